//! Positional reads and writes of a file.

use std::fmt;
use std::ops::Range;

use rustix::io::Errno;

/// Positional reads and writes of a file. Tests use another implementation to inject failures.
pub(crate) trait RawFile: Send + Sync + fmt::Debug {
    /// Reads up to `memory.len()` bytes and returns their number, which is 0 at the end of the
    /// file.
    ///
    /// # Errors
    /// Returns the system's error.
    fn read_at(&self, memory: &mut [u8], offset: u64) -> Result<usize, Errno>;

    /// Writes up to `memory.len()` bytes and returns their number. Disk errors are reported by this
    /// call, not by a later call.
    ///
    /// # Errors
    /// Returns the system's error.
    fn write_at(&self, memory: &[u8], offset: u64) -> Result<usize, Errno>;

    /// Asks the system to drop the cached pages of a range, if there are any.
    fn drop_cache(&self, offset: u64, length: u64);

    /// Extends the file by the range `added`, which starts at the end of the file.
    ///
    /// # Errors
    /// Returns the system's error. The length of the file is then unchanged.
    fn grow(&self, added: Range<u64>) -> Result<(), Errno>;

    /// Returns true if reads and writes bypass the page cache.
    fn is_direct(&self) -> bool;

    /// Returns true if the disk has reserved all bytes.
    fn is_preallocated(&self) -> bool;
}
