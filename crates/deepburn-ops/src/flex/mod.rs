//! The CPU backend: kernels on host slices.
//!
//! Work is cut into blocks whose size does not depend on the number of threads, and partial sums are
//! added in the order of the blocks, so results are the same bits whatever the number of threads.
//! 16-bit inputs are widened to f32 block by
//! block and results rounded once, except in products: bf16 operands are multiplied as bf16, and attention weights and
//! gradients by logits are rounded to it. f64 goes the portable way.

mod array;
mod attention;
mod cross_entropy;
mod gelu;
mod linear;
mod matmul;
mod norm;
mod optimizer;
mod vector;
