//! The file on the disk: creation without a name, preallocation, and the check for direct I/O.
//!
//! ```text
//! open      O_TMPFILE | O_EXCL, else a unique name that is removed at once
//! reserve   fallocate, else ftruncate with a warning
//! direct    statx(STATX_DIOALIGN), fcntl(O_DIRECT), one read and one write as a check
//! buffered  fadvise(RANDOM), pwritev2(RWF_DSYNC), fadvise(DONTNEED) after each block
//! ```
//!
//! A file without a name is deleted when its last descriptor is closed, so a killed process leaves
//! no file behind. Without direct I/O, cached pages are dropped after each block, because they
//! would use the host memory that offloading is meant to free.

use std::io::IoSlice;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{Advice, AtFlags, FallocateFlags, Mode, OFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::folder::{check_folder, free_bytes};
use crate::raw_file::RawFile;
use crate::{ALIGNMENT, BufferPool, SwapError, SwapOperation};

/// A file without a name. It is deleted when its last descriptor is closed, even if the process is
/// killed.
#[derive(Debug)]
pub(crate) struct DiskFile {
    /// The descriptor, which is not inherited by child processes.
    file: OwnedFd,
    /// Whether the descriptor has `O_DIRECT`.
    is_direct: bool,
    /// Whether the disk has reserved all bytes.
    is_preallocated: bool,
}

impl DiskFile {
    /// Creates a file of `bytes` zero bytes in `folder`. Uses direct I/O if `direct` is set and the
    /// file system supports it.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be used or the disk is full.
    pub(crate) fn create(folder: &Path, bytes: u64, direct: bool) -> Result<Self, SwapError> {
        check_folder(folder, bytes)?;
        let refused = |errno| match errno {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => {
                SwapError::ReadOnly { folder: folder.to_owned() }
            }
            errno => SwapError::os(folder, SwapOperation::Create, (0, bytes), errno),
        };
        let file = open_unnamed(folder).map_err(refused)?;
        let is_preallocated =
            preallocate(&file, 0..bytes).map_err(|errno| no_space(folder, 0..bytes, errno))?;
        if !is_preallocated {
            tracing::warn!(
                "swap folder {}: the file system cannot preallocate files; if the disk fills up \
                 during training, a write will fail",
                folder.display()
            );
        }
        let is_direct = direct && enable_direct(&file, folder)?;
        if direct && !is_direct {
            tracing::warn!(
                "swap folder {}: the file system does not support direct I/O; swapping goes \
                 through the page cache, which is slower",
                folder.display()
            );
        }
        if !is_direct {
            // Read-ahead would cache pages beyond a request, which `drop_cache` would not drop.
            // This call is only a hint, so errors are ignored.
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        }
        Ok(Self { file, is_direct, is_preallocated })
    }
}

impl RawFile for DiskFile {
    fn read_at(&self, memory: &mut [u8], offset: u64) -> Result<usize, Errno> {
        rustix::io::pread(&self.file, memory, offset)
    }

    fn write_at(&self, memory: &[u8], offset: u64) -> Result<usize, Errno> {
        if self.is_direct {
            return rustix::io::pwrite(&self.file, memory, offset);
        }
        // Without DSYNC, a write to the page cache succeeds even if the disk fails later, when no
        // caller waits for the result. The page is then dropped, and a read returns the old data.
        let memory = [IoSlice::new(memory)];
        rustix::io::pwritev2(&self.file, &memory, offset, ReadWriteFlags::DSYNC)
    }

    fn drop_cache(&self, offset: u64, length: u64) {
        if !self.is_direct {
            // This call is only a hint, so errors are ignored.
            let length = NonZeroU64::new(length);
            let _ = rustix::fs::fadvise(&self.file, offset, length, Advice::DontNeed);
        }
    }

    fn grow(&self, added: Range<u64>) -> Result<(), Errno> {
        let end = added.start;
        preallocate(&self.file, added).map(drop).inspect_err(|_| {
            // A full disk may have allocated a part of the range. Truncating the file frees this
            // part.
            let _ = rustix::fs::ftruncate(&self.file, end);
        })
    }

    fn is_direct(&self) -> bool {
        self.is_direct
    }

    fn is_preallocated(&self) -> bool {
        self.is_preallocated
    }
}

/// Converts the error of reserving `bytes` in a file. For a full disk, the error contains the
/// needed and the free space.
pub(crate) fn no_space(folder: &Path, bytes: Range<u64>, errno: Errno) -> SwapError {
    let needed = bytes.end - bytes.start;
    match errno {
        Errno::NOSPC => {
            let free = free_bytes(folder).unwrap_or_default();
            SwapError::NoSpace { folder: folder.to_owned(), needed, free }
        }
        errno => SwapError::os(folder, SwapOperation::Preallocate, (bytes.start, needed), errno),
    }
}

/// Opens a new file without a name.
///
/// # Errors
/// Returns the system's error.
fn open_unnamed(folder: &Path) -> Result<OwnedFd, Errno> {
    // With EXCL, the file cannot be linked to a name later.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        // The file system or the kernel does not support unnamed files.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => open_unlinked(folder),
        outcome => outcome,
    }
}

/// Opens a new file with a unique name and removes the name immediately. If the process is killed
/// between the two calls, an empty file is left behind.
///
/// # Errors
/// Returns the system's error.
fn open_unlinked(folder: &Path) -> Result<OwnedFd, Errno> {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    loop {
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        // The time distinguishes processes with the same id on machines that share the folder.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = folder.join(format!(".deepburn-swap-{}-{time}-{number}", process::id()));
        match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST | Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(file) => return rustix::fs::unlink(&path).map(|()| file),
        }
    }
}

/// Reserves `bytes`, a range that ends at the new end of the file. Returns false if the file system
/// can only set the length. In this case, writes can fail later because the disk is full.
///
/// # Errors
/// Returns the system's error, `NOSPC` for a full disk.
fn preallocate(file: &OwnedFd, bytes: Range<u64>) -> Result<bool, Errno> {
    let length = bytes.end - bytes.start;
    loop {
        return match rustix::fs::fallocate(file, FallocateFlags::empty(), bytes.start, length) {
            Ok(()) => Ok(true),
            Err(Errno::INTR) => continue,
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                rustix::fs::ftruncate(file, bytes.end).map(|()| false)
            }
            Err(errno) => Err(errno),
        };
    }
}

/// Enables direct I/O. If the file system does not support it, restores the flags of the descriptor
/// and returns false.
///
/// # Errors
/// Returns an error if the flags cannot be read or restored, or if the test block cannot be read or
/// written for another reason.
fn enable_direct(file: &OwnedFd, folder: &Path) -> Result<bool, SwapError> {
    let failed = |errno| SwapError::os(folder, SwapOperation::Create, (0, ALIGNMENT as u64), errno);
    let buffered = rustix::fs::fcntl_getfl(file).map_err(failed)?;
    if !alignment_suffices(file)
        || rustix::fs::fcntl_setfl(file, buffered | OFlags::DIRECT).is_err()
    {
        return Ok(false);
    }
    // Some file systems accept the flag but reject requests, so one block is read and written as a
    // test.
    let mut zeros = BufferPool::new().zeroed(ALIGNMENT)?;
    let mut probe = || {
        let read = rustix::io::pread(file, zeros.as_mut_bytes(), 0)?;
        let written = rustix::io::pwrite(file, zeros.as_bytes(), 0)?;
        Ok(read == ALIGNMENT && written == ALIGNMENT)
    };
    match probe() {
        Ok(true) => Ok(true),
        Ok(false) | Err(Errno::INVAL | Errno::OPNOTSUPP) => {
            rustix::fs::fcntl_setfl(file, buffered).map_err(failed)?;
            Ok(false)
        }
        Err(errno) => Err(failed(errno)),
    }
}

/// Returns true if [`ALIGNMENT`] is sufficient for direct I/O, or if the kernel does not report the
/// alignment (before Linux 6.1).
fn alignment_suffices(file: &OwnedFd) -> bool {
    let Ok(stat) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return true;
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return true;
    }
    // Zero means that the file does not support direct I/O.
    let needed = [stat.stx_dio_mem_align, stat.stx_dio_offset_align];
    needed.iter().all(|&bytes| bytes != 0 && (ALIGNMENT as u32).is_multiple_of(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_with_a_name_lose_it_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<OwnedFd> = (0..3).map(|_| open_unlinked(folder.path()).unwrap()).collect();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        preallocate(&files[0], 0..8192).unwrap();
        assert_eq!(rustix::io::pwrite(&files[0], b"data", 4096), Ok(4));
        let mut read = [1; 5];
        assert_eq!(rustix::io::pread(&files[0], &mut read, 4096), Ok(5));
        assert_eq!(&read, b"data\0");
        assert_eq!(rustix::fs::fstat(&files[1]).unwrap().st_size, 0);
    }
}
