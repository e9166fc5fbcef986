//! The op families on burn-flex, Burn's CPU backend: kernels that read and write the memory of host
//! tensors.
//!
//! # Types
//!
//! The kernels support f32, f16 and bf16 and compute in f32. f64 uses [`crate::portable`]. 16-bit
//! inputs are widened to f32 a block at a time, and results are rounded once, to nearest even.
//! Matrix products are the exception: two bf16 operands are multiplied as bf16 if the processor has
//! instructions for it, so attention weights and the gradients of logits are rounded to bf16 before
//! a product.
//!
//! # Threads
//!
//! Work is divided into blocks on the current rayon pool. The size of a block does not depend on
//! the number of threads, and partial sums are added in the order of the blocks. Results are
//! therefore bitwise identical for every number of threads.
//!
//! # Memory
//!
//! An op allocates its result and, per thread, at most a few blocks of f32 scratch memory.
//! Attention and the loss head also allocate the scores or logits of one block; their modules
//! document the sizes. Inputs are copied only if they are not contiguous. An input without other
//! owners is updated in place if the result has the same shape.

mod array;
mod attention;
mod blockwise;
mod cache;
mod cross_entropy;
mod gated;
mod gelu;
mod linear;
mod matmul;
mod norm;
mod optimizer;
mod quantized;
mod rms_norm;
mod rotary;
mod sum;
mod vector;
