//! GPUs through CubeCL: wgpu and CUDA.

mod optimizer;
mod stream;
