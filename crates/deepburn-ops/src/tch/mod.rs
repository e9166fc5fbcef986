//! LibTorch, on the CPU or on CUDA.

mod optimizer;
