//! LibTorch, on the CPU or on CUDA.

mod fused;
mod optimizer;
