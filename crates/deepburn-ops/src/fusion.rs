//! The op families on Burn's lazy tensors, for any backend that supports fusion.
//!
//! A lazy tensor describes ops in a queue, which Burn compiles to few kernels when a result is
//! read. DeepBurn's kernels are custom ops of that queue (`queue`): they run on tensors of the
//! inner backend, in the order of the queue. Forward and backward passes are plain ops, which Burn
//! can fuse.

mod fused;
mod matmul;
mod optimizer;
mod queue;
mod stream;
mod sum;
