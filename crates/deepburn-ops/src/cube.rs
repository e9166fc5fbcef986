//! The op families on GPUs through CubeCL: wgpu (Vulkan, Metal, WebGPU) and CUDA.
//!
//! - Optimizer steps, gradient statistics, conversions, concatenation, sums and the rows of an
//!   embedding's gradient are kernels of `deepburn_kernels::cube`. They run on the device, and only
//!   the statistics are copied to the host.
//! - Zeros and ones of dropout are drawn on the device, with the bits of the host's generator.
//! - Products of f32 matrices use tensor cores only if TF32 is allowed (`matmul`).
//! - Forward and backward passes use the provided methods, which call burn-cubecl's other ops.
//! - All ranks of a process submit their work to one stream of the device (`stream`).

mod array;
mod bias_gradient;
mod cross_entropy;
mod fused;
mod gated;
mod gelu;
pub(crate) mod linear;
mod matmul;
mod norm;
mod optimizer;
mod random;
mod rms_norm;
mod stream;
mod sum;
