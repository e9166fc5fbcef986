//! Asynchronous swapping of optimizer states, gradients and parameter shards to a local disk.
//!
//! This crate is the I/O layer of ZeRO-Infinity. It requires Linux.
//!
//! - [`SwapFile`]: the swap file of one rank. It is preallocated, so that a full disk is detected
//!   at the start, and has no name, so that a killed process leaves no file behind.
//! - [`Region`]: a part of the file that is reserved for one array.
//! - [`AlignedBuffer`]: host memory that is suitable for direct I/O, allocated from a
//!   [`BufferPool`].
//! - [`PendingIo`]: a read or write in progress. Waiting for it returns the buffer.
//! - [`IoPolicy`]: block size and queue depth, as in DeepSpeed's `aio` section.
//!
//! ```no_run
//! use deepburn_nvme::{IoPolicy, SwapFile};
//!
//! # fn main() -> Result<(), deepburn_nvme::SwapError> {
//! let moments = 4 * 1_000_001;
//! let bytes = 2 * SwapFile::padded(moments);
//! let swap = SwapFile::create("/mnt/nvme".as_ref(), bytes, &IoPolicy::default())?;
//! let (first, second) = (swap.region(moments)?, swap.region(moments)?);
//!
//! let mut buffer = swap.pool().zeroed(moments)?;
//! buffer.as_mut_slice::<f32>().fill(0.5);
//! let writing = swap.write(&first, 0, buffer)?;
//! let reading = swap.read(&second, 0..moments)?;
//! assert!(reading.wait()?.as_slice::<f32>().iter().all(|&moment| moment == 0.0));
//! writing.wait()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//! Reads and writes may be started at any time and take effect in the order in which they were
//! started. A request that overlaps an earlier request starts only after the earlier request is
//! complete, unless both are reads. All other requests run in parallel and complete in any order.
//!
//! # Failures
//! A failed write is logged and invalidates the whole file: all later calls return the error of
//! this write, because the file no longer contains the data that the caller stored. This also
//! applies to requests that were queued at the time of the failure, and to failed writes whose
//! [`PendingIo`] was dropped. A failed read only affects its own [`PendingIo`].
//!
//! This crate does not depend on tensors, backends or other crates of DeepBurn.

// Unsafe code is only allowed in `aligned_buffer.rs` and `transfer_block.rs`, which share memory
// with the workers.
#![deny(unsafe_code)]

mod aligned_buffer;
mod bandwidth;
mod error;
mod file;
mod folder;
mod pending;
mod policy;
mod pool;
mod queue;
mod raw_file;
mod region;
mod shelf;
mod statistics;
mod swap;
mod transfer_block;
mod worker;

pub use aligned_buffer::AlignedBuffer;
pub use bandwidth::measured_bandwidth;
pub use error::{SwapError, SwapOperation};
pub use folder::check_folder;
pub use pending::PendingIo;
pub use policy::IoPolicy;
pub use pool::BufferPool;
pub use region::{ALIGNMENT, Region};
pub use statistics::IoStatistics;
pub use swap::SwapFile;
