//! Fused tensor ops for Burn backends.
//!
//! One extension trait a family connects the kernels to a backend: [`OptimizerOps`] for what an
//! optimizer step does with the elements that a rank owns. A provided method is written in ops that
//! every backend has, or on host memory; a backend overrides it where it has a kernel.

mod host;
mod optimizer;
mod stream;

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "fusion")]
mod fusion;
#[cfg(feature = "tch")]
mod tch;

pub use host::{float_from_host, float_into_host, int_into_host, read_float};
pub use optimizer::{AdamArrays, OptimizerOps};
pub use stream::StreamOps;
