//! Validation of collectives before they take a position in the common order.
//!
//! Each constructor of [`Side`] describes the call of one rank, or returns
//! [`CommError::InvalidArgument`]. Arguments are ranks of the group; a [`Side`] has ranks of the
//! world, which messages show.

use tracing::{Span, trace_span};

use crate::{
    CollectiveTag, CommError, GroupRanks, Operation, Partition, Payload, ReduceOp, Side, Signature,
};

impl Side {
    /// Describes a reduction of `arrays`. `operation` is an all-reduce or a reduce-scatter.
    ///
    /// # Errors
    /// Returns an error if `op` is not defined for an element type.
    pub(crate) fn reduction<T: Payload>(
        ranks: &GroupRanks,
        operation: fn(ReduceOp) -> Operation,
        tag: CollectiveTag,
        arrays: &[T],
        op: ReduceOp,
    ) -> Result<Self, CommError> {
        let signature = check_reduction(arrays, op).map(|()| Signature::of(arrays));
        Self::checked::<T>(ranks, operation(op), tag, signature)
    }

    /// Describes an all-gather of `chunks` into arrays of `numels` elements.
    ///
    /// # Errors
    /// Returns an error if there is not exactly one size per chunk, or if a chunk does not have the
    /// size of a shard.
    pub(crate) fn all_gather<T: Payload>(
        ranks: &GroupRanks,
        tag: CollectiveTag,
        chunks: &[T],
        numels: Vec<usize>,
    ) -> Result<Self, CommError> {
        let signature = check_chunks(chunks, &numels, ranks.len())
            .map(|()| Signature { numels, ..Signature::of(chunks) });
        Self::checked::<T>(ranks, Operation::AllGather, tag, signature)
    }

    /// Describes an all-to-all exchange of `arrays`.
    ///
    /// # Errors
    /// Never fails; returns a `Result` like the other constructors.
    pub(crate) fn all_to_all<T: Payload>(
        ranks: &GroupRanks,
        tag: CollectiveTag,
        arrays: &[T],
    ) -> Result<Self, CommError> {
        Self::checked::<T>(ranks, Operation::AllToAll, tag, Ok(Signature::of(arrays)))
    }

    /// Describes a broadcast from `root`. `arrays` define the sizes and types.
    ///
    /// # Errors
    /// Returns an error if `root` is not a rank of the group.
    pub(crate) fn broadcast<T: Payload>(
        ranks: &GroupRanks,
        tag: CollectiveTag,
        arrays: &[T],
        root: usize,
    ) -> Result<Self, CommError> {
        let signature = check_root(root, ranks.len()).map(|()| Signature::of(arrays));
        // An invalid root stays as it was passed, for the error.
        let root = ranks.members().get(root).copied().unwrap_or(root);
        Self::checked::<T>(ranks, Operation::Broadcast { root }, tag, signature)
    }

    /// Describes a barrier. It has no payload type, so ranks with different payload types can use
    /// the same barrier.
    pub(crate) fn barrier(ranks: &GroupRanks, tag: CollectiveTag) -> Self {
        let (rank, tag) = (ranks.world_rank(), ranks.tagged(tag));
        let payload = std::any::type_name::<()>().into();
        Self { rank, operation: Operation::Barrier, tag, payload, signature: None }
    }

    /// Returns the number of elements of each array: of the input, or of the result of a gather.
    pub fn numels(&self) -> &[usize] {
        self.signature.as_ref().map_or(&[], |signature| &signature.numels)
    }

    /// Creates the trace span of the wait for the result, with the name and the tag of the
    /// collective.
    pub fn span(&self) -> Span {
        match self.operation {
            Operation::AllReduce(_) => trace_span!("all_reduce", tag = %self.tag),
            Operation::ReduceScatter(_) => trace_span!("reduce_scatter", tag = %self.tag),
            Operation::AllGather => trace_span!("all_gather", tag = %self.tag),
            Operation::AllToAll => trace_span!("all_to_all", tag = %self.tag),
            Operation::Broadcast { .. } => trace_span!("broadcast", tag = %self.tag),
            Operation::Barrier => trace_span!("barrier", tag = %self.tag),
        }
    }

    /// Returns the description, or an error if the arguments are invalid.
    fn checked<T>(
        ranks: &GroupRanks,
        operation: Operation,
        tag: CollectiveTag,
        signature: Result<Signature, String>,
    ) -> Result<Self, CommError> {
        // Other ranks compare and show a side, so it has world ranks and the name of the group.
        let (rank, tag) = (ranks.world_rank(), ranks.tagged(tag));
        let payload = std::any::type_name::<T>().into();
        match signature {
            Ok(signature) => Ok(Self { rank, operation, tag, payload, signature: Some(signature) }),
            Err(reason) => Err(CommError::InvalidArgument { rank, operation, tag, reason }),
        }
    }
}

/// Checks that all arrays can be reduced with `op`.
fn check_reduction<T: Payload>(arrays: &[T], op: ReduceOp) -> Result<(), String> {
    match arrays.iter().find(|array| !array.supports(op)) {
        None => Ok(()),
        Some(array) => Err(format!(
            "elements of type {} have no {op}; convert the array to a float type",
            array.dtype()
        )),
    }
}

/// Checks that a rank's chunks are shards of arrays of `numels` elements.
fn check_chunks<T: Payload>(
    chunks: &[T],
    numels: &[usize],
    world_size: usize,
) -> Result<(), String> {
    if chunks.len() != numels.len() {
        let (chunks, numels) = (chunks.len(), numels.len());
        return Err(format!(
            "{chunks} chunks but {numels} sizes were given; pass one size a chunk"
        ));
    }
    for (i, (chunk, &numel)) in chunks.iter().zip(numels).enumerate() {
        let (found, needed) = (chunk.numel(), Partition::new(numel, world_size).shard_len());
        if found != needed {
            return Err(format!(
                "chunk {i} has {found} elements, but an array of {numel} elements on {world_size} \
                 ranks has chunks of ceil({numel} / {world_size}) = {needed}; cut or pad the chunk"
            ));
        }
    }
    Ok(())
}

/// Checks that `root` is a rank.
fn check_root(root: usize, world_size: usize) -> Result<(), String> {
    if root < world_size {
        return Ok(());
    }
    Err(format!("root is {root}, but the ranks are 0 to {}", world_size - 1))
}
