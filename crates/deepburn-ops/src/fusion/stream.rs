//! The shared stream of the inner backend, and the layout of lazy tensors.
//!
//! A lazy tensor has no layout until the queue has run, so `is_contiguous` returns `false`, which
//! is always allowed.

use burn_backend::tensor::FloatTensor;
use burn_fusion::{Fusion, FusionBackend};

use crate::layout::LayoutOps;
use crate::stream::StreamOps;

/// The inner backend decides which stream the ranks share.
impl<B: FusionBackend + StreamOps> StreamOps for Fusion<B> {
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        B::in_shared_stream(run)
    }
}

impl<B: FusionBackend + LayoutOps> LayoutOps for Fusion<B> {
    /// Returns `false`: the layout is decided when the tensor is computed, which may be later.
    fn is_contiguous(_: &FloatTensor<Self>) -> bool {
        false
    }
}
