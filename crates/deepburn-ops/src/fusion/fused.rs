//! The families with a forward and a backward pass, in plain ops.
//!
//! Burn fuses element-wise ops and reductions into kernels, so hand-written kernels would only
//! split its groups.

use burn_fusion::{Fusion, FusionBackend};

use crate::{AttentionOps, CrossEntropyOps, GeluOps, LayerNormOps, LinearOps};

// Plain ops are what fusion makes kernels of.
impl<B: FusionBackend> AttentionOps for Fusion<B> {}
impl<B: FusionBackend> CrossEntropyOps for Fusion<B> {}
impl<B: FusionBackend> GeluOps for Fusion<B> {}
impl<B: FusionBackend> LayerNormOps for Fusion<B> {}
impl<B: FusionBackend> LinearOps for Fusion<B> {}
