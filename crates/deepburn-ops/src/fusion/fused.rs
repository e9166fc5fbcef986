//! The op families with a forward and a backward pass, implemented with plain ops.
//!
//! Burn fuses element-wise ops and reductions into kernels, so a hand-written kernel would only
//! split a group of fused ops.

use burn_fusion::{Fusion, FusionBackend};

use crate::{
    AttentionOps, CrossEntropyOps, GatedOps, GeluOps, LayerNormOps, LinearOps, MatmulOps,
    RmsNormOps, RotaryOps,
};

// The provided methods use plain ops, which Burn fuses into kernels.
impl<B: FusionBackend + MatmulOps> AttentionOps for Fusion<B> {}
impl<B: FusionBackend + MatmulOps> CrossEntropyOps for Fusion<B> {}
impl<B: FusionBackend> GatedOps for Fusion<B> {}
impl<B: FusionBackend> GeluOps for Fusion<B> {}
impl<B: FusionBackend> LayerNormOps for Fusion<B> {}
impl<B: FusionBackend + MatmulOps> LinearOps for Fusion<B> {}
impl<B: FusionBackend> RmsNormOps for Fusion<B> {}
impl<B: FusionBackend> RotaryOps for Fusion<B> {}
