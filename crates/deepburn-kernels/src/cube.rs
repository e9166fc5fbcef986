//! The kernels for GPUs, in CubeCL.
//!
//! They work on [`Buffer`]s, flat arrays in the memory of a device, and use the formulae and the
//! order of operations of the CPU's. What is written is written in place, so nobody else may hold
//! those buffers. Numbers agree with the CPU's to the last bits only: a device may contract a
//! multiplication and an addition into one operation and has its own square root.
//!
//! A shader compiler may assume that there is no infinity and no NaN, so whether a number is finite is
//! read off its bits.

mod buffer;
mod cast;
mod elementwise;
mod flat;
mod stats;

pub use buffer::{Buffer, ElementType};
pub use cast::cast;
pub(crate) use elementwise::{ElementKernel, launch, lerp, write};
pub use elementwise::{OwnedBuffers, update};
pub use flat::flatten;
pub use stats::gradient_stats;
