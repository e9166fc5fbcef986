//! The CPU backend: kernels on host slices.

mod optimizer;
