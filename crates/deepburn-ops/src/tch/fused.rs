//! Forward and backward in LibTorch's own ops.

use burn_tch::{LibTorch, TchElement};

use crate::{AttentionOps, CrossEntropyOps, GeluOps, LayerNormOps, LinearOps};

impl<E: TchElement> LayerNormOps for LibTorch<E> {}
impl<E: TchElement> GeluOps for LibTorch<E> {}
impl<E: TchElement> LinearOps for LibTorch<E> {}
impl<E: TchElement> CrossEntropyOps for LibTorch<E> {}
impl<E: TchElement> AttentionOps for LibTorch<E> {}
