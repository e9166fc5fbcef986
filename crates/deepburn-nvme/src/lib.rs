//! Swaps optimizer states, gradients and parameter shards to a local disk, asynchronously.
//!
//! The I/O layer of ZeRO-Infinity. It needs Linux.
//!
//! - [`SwapFile`]: the swap file of one rank. It is preallocated and has no name, so a full disk is
//!   known at the start and a killed process leaves nothing behind.
//! - [`Region`]: a part of the file, reserved for one array.
//! - [`AlignedBuffer`]: host memory that direct I/O can use, allocated from a [`BufferPool`].
//! - [`PendingIo`]: a read or write in progress; waiting for it returns the buffer.
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
//! started. A request that overlaps an earlier one in progress starts only after the earlier one is
//! complete, unless both are reads. Other requests run in parallel and complete in any order.
//!
//! # Failures
//! A write that fails is logged and fails the whole file: from then on every call returns the first
//! failure, because the file no longer holds what the caller stored. This includes requests that were
//! queued when it failed, and writes whose [`PendingIo`] was dropped. A failed read affects only its
//! own [`PendingIo`].
//!
//! Nothing here depends on tensors, backends or another crate of DeepBurn.

// Allowed only in `aligned_buffer.rs` and `transfer_block.rs`, whose memory is shared with the workers.
#![deny(unsafe_code)]

mod aligned_buffer;
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
pub use error::{SwapError, SwapOperation};
pub use folder::check_folder;
pub use pending::PendingIo;
pub use policy::IoPolicy;
pub use pool::BufferPool;
pub use region::{ALIGNMENT, Region};
pub use statistics::IoStatistics;
pub use swap::SwapFile;
