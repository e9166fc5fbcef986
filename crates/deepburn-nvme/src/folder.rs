//! Checks the folder of a swap file before data is written.

use std::path::Path;

use rustix::fs::{FileType, StatVfsMountFlags};
use rustix::io::Errno;

use crate::{SwapError, SwapOperation};

/// File systems that store files in host memory, with their magic numbers from statfs(2). Swapping
/// to such a file system does not free memory.
const IN_MEMORY: [(u64, &str); 2] = [(0x0102_1994, "tmpfs"), (0x8584_58f6, "ramfs")];

/// Checks that `folder` is a folder on a writable disk with `needed` bytes of free space. This
/// function does not write to the disk.
///
/// # Errors
/// Returns an error if the folder is missing, is not a folder or cannot be inspected, or if its
/// file system is in memory, read-only or has too little free space. The error names the folder and
/// suggests how to fix the problem.
pub fn check_folder(folder: &Path, needed: u64) -> Result<(), SwapError> {
    let inspect = |errno| SwapError::os(folder, SwapOperation::Inspect, (0, needed), errno);
    let stat = rustix::fs::stat(folder).map_err(|errno| match errno {
        Errno::NOENT => SwapError::Missing { folder: folder.to_owned() },
        Errno::NOTDIR => SwapError::NotAFolder { folder: folder.to_owned() },
        errno => inspect(errno),
    })?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Err(SwapError::NotAFolder { folder: folder.to_owned() });
    }
    // The width and sign of this field depend on the architecture, but only 32 bits are used.
    let magic = rustix::fs::statfs(folder).map_err(inspect)?.f_type as u64 & 0xffff_ffff;
    if let Some((_, filesystem)) = IN_MEMORY.iter().find(|(number, _)| *number == magic) {
        return Err(SwapError::InMemory { folder: folder.to_owned(), filesystem });
    }
    let space = rustix::fs::statvfs(folder).map_err(inspect)?;
    if space.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(SwapError::ReadOnly { folder: folder.to_owned() });
    }
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < needed {
        return Err(SwapError::NoSpace { folder: folder.to_owned(), needed, free });
    }
    Ok(())
}

/// Returns the number of free bytes that are available to this user; `None` if it is unknown.
pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    let space = rustix::fs::statvfs(folder).ok()?;
    Some(space.f_bavail.saturating_mul(space.f_frsize))
}
