//! The shared stream of the backend below, and what is known of lazy tensors.
//!
//! A lazy tensor has no layout until the queue has run, so a query answers `false`, which is always
//! a valid answer.

use burn_backend::tensor::FloatTensor;
use burn_fusion::{Fusion, FusionBackend};

use crate::layout::LayoutOps;
use crate::matmul::MatmulOps;
use crate::stream::StreamOps;

/// The backend below decides which stream the ranks share.
impl<B: FusionBackend + StreamOps> StreamOps for Fusion<B> {
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        B::in_shared_stream(run)
    }
}

/// A product is an op of the queue, into which Burn may fuse the element-wise ops that follow.
impl<B: FusionBackend> MatmulOps for Fusion<B> {}

impl<B: FusionBackend + LayoutOps> LayoutOps for Fusion<B> {
    /// Returns `false`: the layout is decided when the tensor is computed, which may be later.
    fn is_contiguous(_: &FloatTensor<Self>) -> bool {
        false
    }
}
