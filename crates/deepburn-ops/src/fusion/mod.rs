//! Burn's lazy tensors, over any backend that can fuse: kernels are queued like ops of its own.

mod fused;
mod optimizer;
mod stream;
