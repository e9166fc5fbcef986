//! The calls of collectives, checked before they take a place in the common order.
//!
//! Each constructor of [`Side`] describes what one rank calls, or returns the
//! [`CommError::InvalidArgument`] that turns it down. Every engine starts its collectives with these.

use crate::{CommError, Operation, Partition, Payload, ReduceOp, Side, Signature, Tag};

impl Side {
    /// An all-reduce of `arrays`.
    ///
    /// # Errors
    /// When `op` is not defined for an element type.
    pub fn all_reduce<T: Payload>(
        rank: usize,
        tag: Tag,
        arrays: &[T],
        op: ReduceOp,
    ) -> Result<Self, CommError> {
        let signature = check_reduction(arrays, op).map(|()| Signature::of(arrays));
        Self::checked::<T>(rank, Operation::AllReduce(op), tag, signature)
    }

    /// A reduce-scatter of `arrays`.
    ///
    /// # Errors
    /// When `op` is not defined for an element type.
    pub fn reduce_scatter<T: Payload>(
        rank: usize,
        tag: Tag,
        arrays: &[T],
        op: ReduceOp,
    ) -> Result<Self, CommError> {
        let signature = check_reduction(arrays, op).map(|()| Signature::of(arrays));
        Self::checked::<T>(rank, Operation::ReduceScatter(op), tag, signature)
    }

    /// An all-gather of `chunks` into arrays of `numels` elements.
    ///
    /// # Errors
    /// When there is not one size a chunk, or a chunk is not a shard of its array.
    pub fn all_gather<T: Payload>(
        rank: usize,
        world_size: usize,
        tag: Tag,
        chunks: &[T],
        numels: &[usize],
    ) -> Result<Self, CommError> {
        let signature = check_chunks(chunks, numels, world_size)
            .map(|()| Signature { numels: numels.to_vec(), ..Signature::of(chunks) });
        Self::checked::<T>(rank, Operation::AllGather, tag, signature)
    }

    /// An exchange of the parts of `arrays`.
    ///
    /// # Errors
    /// Never; returns a `Result` like its siblings.
    pub fn all_to_all<T: Payload>(rank: usize, tag: Tag, arrays: &[T]) -> Result<Self, CommError> {
        Self::checked::<T>(rank, Operation::AllToAll, tag, Ok(Signature::of(arrays)))
    }

    /// A broadcast from `root` into arrays like `arrays`.
    ///
    /// # Errors
    /// When `root` is not a rank.
    pub fn broadcast<T: Payload>(
        rank: usize,
        world_size: usize,
        tag: Tag,
        arrays: &[T],
        root: usize,
    ) -> Result<Self, CommError> {
        let signature = check_root(root, world_size).map(|()| Signature::of(arrays));
        Self::checked::<T>(rank, Operation::Broadcast { root }, tag, signature)
    }

    /// A barrier, whatever payload a rank otherwise exchanges.
    pub fn barrier(rank: usize, tag: Tag) -> Self {
        let payload = std::any::type_name::<()>().into();
        Self { rank, operation: Operation::Barrier, tag, payload, signature: None }
    }

    fn checked<T>(
        rank: usize,
        operation: Operation,
        tag: Tag,
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

/// Checks that the chunks of one rank are what an all-gather of `numels` elements needs.
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
