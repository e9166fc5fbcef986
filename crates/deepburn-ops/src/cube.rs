//! The op families on GPUs through CubeCL: wgpu (Vulkan, Metal, WebGPU) and CUDA.
//!
//! - Optimizer steps, gradient statistics, conversions, concatenation, sums and the rows of an
//!   embedding's gradient are kernels of `deepburn_kernels::cube`. They run on the device, and only
//!   the statistics are copied to the host.
//! - Zeros and ones of dropout are drawn on the device, with the bits of the host's generator.
//! - Products of f32 matrices use tensor cores only if TF32 is allowed (`matmul`).
//! - Normalizations, activations, rotary embeddings, the sums of bias gradients and the loss of a
//!   head are kernels too, with one launch or a few for each pass, and sums in a fixed order. Other
//!   element types than f32, f16 and bf16 use the provided methods.
//! - Self-attention is a few fused kernels, forward and backward (`attention`).
//! - All ranks of a process submit their work to one stream of the device (`stream`).

mod array;
mod attention;
mod bias_gradient;
mod cross_entropy;
mod gated;
mod gelu;
pub(crate) mod linear;
mod matmul;
mod norm;
mod optimizer;
mod random;
mod rms_norm;
mod rotary;
mod stream;
mod sum;
