//! GPUs through CubeCL: wgpu and CUDA.

mod fused;
mod optimizer;
mod stream;
