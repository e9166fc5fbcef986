use burn_tch::{LibTorch, TchElement};

use crate::optimizer::OptimizerOps;

impl<E: TchElement> OptimizerOps for LibTorch<E> {}
