//! What every engine checks before it starts a collective. Each check returns the reason for
//! [`CommError::InvalidArgument`](crate::CommError::InvalidArgument).

use crate::{Partition, Payload, ReduceOp};

/// Checks that all arrays can be reduced with `op`.
///
/// # Errors
/// The element type for which `op` is not defined.
pub fn check_reduction<T: Payload>(arrays: &[T], op: ReduceOp) -> Result<(), String> {
    match arrays.iter().find(|array| !array.supports(op)) {
        None => Ok(()),
        Some(array) => Err(format!(
            "elements of type {} have no {op}; convert the array to a float type",
            array.dtype()
        )),
    }
}

/// Checks that the chunks of one rank are what an all-gather of `numels` elements needs.
///
/// # Errors
/// The number of chunks, or the first chunk of another size than the shard of its array.
pub fn check_chunks<T: Payload>(
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
///
/// # Errors
/// When it is not.
pub fn check_root(root: usize, world_size: usize) -> Result<(), String> {
    if root < world_size {
        return Ok(());
    }
    Err(format!("root is {root}, but the ranks are 0 to {}", world_size - 1))
}
