//! Sums of lazy tensors, in the order of the inner backend.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use burn_fusion::{Fusion, FusionBackend};

use super::queue::{InnerKernel, queue};
use crate::sum::SumOps;

/// Burn would run its own sum of the inner backend, which may have no fixed order.
impl<B: FusionBackend + SumOps> SumOps for Fusion<B> {
    fn sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let result = vec![(Shape::from(vec![1]), tensor.dtype())];
        let mut results = queue::<B, _>(Sum, vec![tensor], result);
        results.pop().expect("one result was asked for")
    }
}

/// The sum of its input.
#[derive(Debug)]
struct Sum;

impl<B: FusionBackend + SumOps> InnerKernel<B> for Sum {
    const NAME: &'static str = "deepburn sum";

    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        inputs.into_iter().map(B::sum).collect()
    }
}
