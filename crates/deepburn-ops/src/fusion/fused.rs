use burn_fusion::{Fusion, FusionBackend};

use crate::{AttentionOps, CrossEntropyOps, GeluOps, LayerNormOps, LinearOps};

// Plain ops are what fusion makes kernels of.
impl<B: FusionBackend> AttentionOps for Fusion<B> {}
impl<B: FusionBackend> CrossEntropyOps for Fusion<B> {}
impl<B: FusionBackend> GeluOps for Fusion<B> {}
impl<B: FusionBackend> LayerNormOps for Fusion<B> {}
impl<B: FusionBackend> LinearOps for Fusion<B> {}
