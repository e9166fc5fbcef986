//! Gathers byte strings of different lengths from all ranks.

use crate::{CollectiveTag, CommError, Host, ProcessGroup};

/// Gathers the bytes of every rank, in rank order. A rank may pass an empty slice.
///
/// This takes two collectives: one gathers the lengths, and one gathers the bytes, padded to the
/// longest length.
///
/// # Errors
/// Returns an error if a collective fails.
pub fn gather_bytes(
    group: &(impl ProcessGroup<Host<u8>> + ?Sized),
    tag: CollectiveTag,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>, CommError> {
    // All processes of a job have the same byte order, which the greetings of the MPI engine check.
    let size = (bytes.len() as u64).to_ne_bytes();
    let sizes = gather_equal(group, tag.clone(), size.to_vec())?;
    let sizes = sizes.chunks_exact(size.len()).filter_map(|size| size.try_into().ok());
    let sizes: Vec<usize> = sizes.map(|size| u64::from_ne_bytes(size) as usize).collect();
    // At least one byte, because a list cannot be divided into chunks of length 0.
    let len = sizes.iter().copied().max().unwrap_or(0).max(1);
    let mut padded = bytes.to_vec();
    padded.resize(len, 0);
    let all = gather_equal(group, tag, padded)?;
    let said = all.chunks_exact(len).zip(&sizes).map(|(said, size)| said[..*size].to_vec());
    Ok(said.collect())
}

/// Gathers byte strings of equal length into one array.
fn gather_equal(
    group: &(impl ProcessGroup<Host<u8>> + ?Sized),
    tag: CollectiveTag,
    bytes: Vec<u8>,
) -> Result<Vec<u8>, CommError> {
    // The size of the result is a multiple of the chunk, so no rank's chunk is cut.
    let numel = group.world_size() * bytes.len();
    let all = group.all_gather(tag, vec![bytes.into()], vec![numel])?;
    Ok(all.wait()?.swap_remove(0).into_vec())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::run_ranks;

    #[test]
    fn ranks_hear_what_all_say() {
        let heard = run_ranks(3, Duration::from_secs(60), |member| {
            let said = ["", "a", "longest"][member.rank()];
            gather_bytes(&member, CollectiveTag::new("words", 0), said.as_bytes())
        });
        let expected: Vec<_> = ["", "a", "longest"].map(|said| said.as_bytes().to_vec()).into();
        assert_eq!(heard.unwrap(), vec![expected; 3]);
    }
}
