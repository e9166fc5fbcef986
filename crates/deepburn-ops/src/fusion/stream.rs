use burn_backend::tensor::FloatTensor;
use burn_fusion::{Fusion, FusionBackend};

use crate::layout::LayoutOps;
use crate::matmul::MatmulOps;
use crate::stream::StreamOps;

impl<B: FusionBackend + StreamOps> StreamOps for Fusion<B> {
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        B::in_shared_stream(run)
    }
}

impl<B: FusionBackend> MatmulOps for Fusion<B> {}

impl<B: FusionBackend + LayoutOps> LayoutOps for Fusion<B> {
    /// Decided when the tensor is computed, which may be later.
    fn is_contiguous(_: &FloatTensor<Self>) -> bool {
        false
    }
}
