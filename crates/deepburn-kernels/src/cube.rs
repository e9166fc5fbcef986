//! The kernels for GPUs, in CubeCL.
//!
//! They work on [`DeviceBuffer`]s, flat arrays in device memory, with the formulae and the order of
//! operations of the CPU kernels. Results are written in place, so nobody else may hold the buffers
//! that a kernel updates. Launches are queued and return at once; only [`gradient_stats`] waits for
//! the device.
//!
//! Results agree with the CPU's up to the last bits: a device may fuse a multiplication with an
//! addition, and it has a square root and a division of its own. A shader compiler may assume that
//! there is no infinity and no NaN, so whether a number is finite is decided by its bits.

mod cast;
mod device_buffer;
mod elementwise;
mod flat;
mod stats;
mod update;

pub use cast::cast;
pub use device_buffer::{DeviceBuffer, DeviceDType};
pub use elementwise::OwnedBuffers;
pub(crate) use elementwise::{ElementKernel, launch, lerp, write};
pub use flat::flatten;
pub use stats::gradient_stats;
pub use update::update;
