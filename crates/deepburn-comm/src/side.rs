//! Validation of collectives before they take a position in the common order.
//!
//! [`Side::checked`] describes the call of one rank, or returns [`CommError::InvalidArgument`] with
//! the reason that one of the checks gives. Arguments are ranks of the group; a [`Side`] has ranks
//! of the world, which messages show.

use tracing::{Span, trace_span};

use crate::{
    CollectiveTag, CommError, GroupRanks, Operation, Partition, Payload, ReduceOp, Side, Signature,
};

impl Side {
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

    /// Describes a call on arrays of the type `T`.
    ///
    /// # Errors
    /// Returns an error if the arguments are invalid, for the reason instead of a signature.
    pub(crate) fn checked<T>(
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

/// Checks that all arrays can be reduced with `op`, and returns their signature.
pub(crate) fn check_reduction<T: Payload>(arrays: &[T], op: ReduceOp) -> Result<Signature, String> {
    match arrays.iter().find(|array| !array.supports(op)) {
        None => Ok(Signature::of(arrays)),
        Some(array) => Err(format!(
            "elements of type {} have no {op}; convert the array to a float type",
            array.dtype()
        )),
    }
}

/// Checks that a rank's chunks are shards of arrays of `numels` elements.
pub(crate) fn check_chunks<T: Payload>(
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
pub(crate) fn check_root(root: usize, world_size: usize) -> Result<(), String> {
    if root < world_size {
        return Ok(());
    }
    Err(format!("root is {root}, but the ranks are 0 to {}", world_size - 1))
}
