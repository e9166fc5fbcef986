use burn_fusion::{Fusion, FusionBackend};

use crate::stream::StreamOps;

impl<B: FusionBackend + StreamOps> StreamOps for Fusion<B> {
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        B::in_shared_stream(run)
    }
}
