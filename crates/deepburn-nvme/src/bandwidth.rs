//! The measured bandwidth of a disk.

use std::path::Path;
use std::time::Instant;

use crate::{IoPolicy, SwapError, SwapFile};

/// Bytes of a request, which is a chunk of offloaded states.
const CHUNK: usize = 4 << 20;
/// Number of requests. Most disks reach their speed within 64 MiB, and a slow disk takes less than
/// a second.
const CHUNKS: usize = 16;

/// Returns the bytes per second that a swap file in `folder` is written and read with. The written
/// data is read once, so reads and writes count alike.
///
/// # Errors
/// Returns an error if the folder cannot be used or has too little space, or if the disk fails.
pub fn measured_bandwidth(folder: &Path) -> Result<f64, SwapError> {
    let bytes = CHUNK * CHUNKS;
    let file = SwapFile::create(folder, SwapFile::padded(bytes), &IoPolicy::default())?;
    let region = file.region(bytes)?;
    let chunks = || (0..CHUNKS).map(|chunk| chunk * CHUNK);
    // Buffers are allocated before the clock starts, because a run reuses its own.
    let buffers = chunks().map(|_| file.pool().zeroed(CHUNK)).collect::<Result<Vec<_>, _>>()?;
    let started = Instant::now();
    let writes = chunks().zip(buffers).map(|(start, buffer)| file.write(&region, start, buffer));
    let writes = writes.collect::<Result<Vec<_>, _>>()?;
    let written = writes.into_iter().map(|write| write.wait()).collect::<Result<Vec<_>, _>>()?;
    // The reads take their buffers from the pool, to which these return.
    drop(written);
    let reads = chunks().map(|start| file.read(&region, start..start + CHUNK));
    let reads = reads.collect::<Result<Vec<_>, _>>()?;
    reads.into_iter().try_for_each(|read| read.wait().map(drop))?;
    // If the clock did not advance, the rate would be infinite.
    Ok((2 * bytes) as f64 / started.elapsed().as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_a_bandwidth_and_a_missing_folder_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let rate = measured_bandwidth(folder.path()).unwrap();
        assert!(rate.is_finite() && rate > 0.0);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(measured_bandwidth(&folder.path().join("missing")).is_err());
    }
}
