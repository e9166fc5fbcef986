//! Validation of collectives before they take a position in the common order.
//!
//! Each constructor of [`Side`] describes the call of one rank, or returns
//! [`CommError::InvalidArgument`]. All engines use these constructors when they
//! start a collective.

use crate::{CollectiveTag, CommError, Operation, Partition, Payload, ReduceOp, Side, Signature};

impl Side {
    /// Describes an all-reduce of `arrays`.
    ///
    /// # Errors
    ///
    /// Returns an error if `op` is not defined for an element type.
    pub fn all_reduce<T: Payload>(
        rank: usize,
        tag: CollectiveTag,
        arrays: &[T],
        op: ReduceOp,
    ) -> Result<Self, CommError> {
        let signature = check_reduction(arrays, op).map(|()| Signature::of(arrays));
        Self::checked::<T>(rank, Operation::AllReduce(op), tag, signature)
    }

    /// Describes a reduce-scatter of `arrays`.
    ///
    /// # Errors
    ///
    /// Returns an error if `op` is not defined for an element type.
    pub fn reduce_scatter<T: Payload>(
        rank: usize,
        tag: CollectiveTag,
        arrays: &[T],
        op: ReduceOp,
    ) -> Result<Self, CommError> {
        let signature = check_reduction(arrays, op).map(|()| Signature::of(arrays));
        Self::checked::<T>(rank, Operation::ReduceScatter(op), tag, signature)
    }

    /// Describes an all-gather of `chunks` into arrays of `numels` elements.
    ///
    /// # Errors
    ///
    /// Returns an error if there is not exactly one size per chunk, or if a
    /// chunk does not have the size of a shard.
    pub fn all_gather<T: Payload>(
        rank: usize,
        world_size: usize,
        tag: CollectiveTag,
        chunks: &[T],
        numels: &[usize],
    ) -> Result<Self, CommError> {
        let signature = check_chunks(chunks, numels, world_size)
            .map(|()| Signature { numels: numels.to_vec(), ..Signature::of(chunks) });
        Self::checked::<T>(rank, Operation::AllGather, tag, signature)
    }

    /// Describes an all-to-all exchange of `arrays`.
    ///
    /// # Errors
    ///
    /// Never fails; returns a `Result` like the other constructors.
    pub fn all_to_all<T: Payload>(
        rank: usize,
        tag: CollectiveTag,
        arrays: &[T],
    ) -> Result<Self, CommError> {
        Self::checked::<T>(rank, Operation::AllToAll, tag, Ok(Signature::of(arrays)))
    }

    /// Describes a broadcast from `root`. `arrays` define the sizes and types.
    ///
    /// # Errors
    ///
    /// Returns an error if `root` is not a rank of the group.
    pub fn broadcast<T: Payload>(
        rank: usize,
        world_size: usize,
        tag: CollectiveTag,
        arrays: &[T],
        root: usize,
    ) -> Result<Self, CommError> {
        let signature = check_root(root, world_size).map(|()| Signature::of(arrays));
        Self::checked::<T>(rank, Operation::Broadcast { root }, tag, signature)
    }

    /// Describes a barrier. It has no payload type, so ranks with different
    /// payload types can use the same barrier.
    pub fn barrier(rank: usize, tag: CollectiveTag) -> Self {
        let payload = std::any::type_name::<()>().into();
        Self { rank, operation: Operation::Barrier, tag, payload, signature: None }
    }

    /// Returns the description, or an error if the arguments are invalid.
    fn checked<T>(
        rank: usize,
        operation: Operation,
        tag: CollectiveTag,
        signature: Result<Signature, String>,
    ) -> Result<Self, CommError> {
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
