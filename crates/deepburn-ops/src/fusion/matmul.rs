//! Matrix products of lazy tensors.
//!
//! A product is a plain op, into which Burn may fuse the element-wise ops that follow. If the inner
//! backend must keep it from rounding to TF32, the product is a kernel of that backend instead.

use burn_backend::calculate_matmul_output;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, TensorMetadata};
use burn_fusion::{Fusion, FusionBackend};

use super::queue::{InnerKernel, queue};
use crate::cube::linear;
use crate::matmul::{MatmulOps, is_tf32_allowed};
use crate::random::RandomOps;

/// Random numbers are drawn on the host: a kernel would not wait for its turn in the lazy queue.
impl<B: FusionBackend> RandomOps for Fusion<B> {}

/// # Panics
/// Panics if the shapes of the operands do not fit.
impl<B: FusionBackend + MatmulOps> MatmulOps for Fusion<B> {
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let are_f32 = [&lhs, &rhs].into_iter().all(|operand| operand.dtype() == DType::F32);
        if !are_f32 || is_tf32_allowed() || !B::has_tf32(&Self::float_device(&lhs)) {
            return Self::float_matmul(lhs, rhs);
        }
        let shape = calculate_matmul_output(&lhs.shape(), &rhs.shape());
        let shape = shape.unwrap_or_else(|error| panic!("matmul: {error:?}"));
        let mut results =
            queue::<B, _>(UnroundedProduct, vec![lhs, rhs], vec![(shape, DType::F32)]);
        results.pop().expect("one result was asked for")
    }

    fn has_tf32(device: &Device<Self>) -> bool {
        B::has_tf32(device)
    }

    fn module_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        linear::forward::<Self>(x, weight, bias)
    }

    fn module_linear_x_gradient(
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        linear::x_gradient::<Self>(weight, grad)
    }

    fn module_linear_weight_gradient(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        linear::weight_gradient::<Self>(x, grad)
    }
}

/// The product of its two inputs, which are not rounded.
#[derive(Debug)]
struct UnroundedProduct;

impl<B: FusionBackend + MatmulOps> InnerKernel<B> for UnroundedProduct {
    const NAME: &'static str = "deepburn product";

    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("queued with two operands");
        let (lhs, rhs) = (next(), next());
        vec![B::matmul(lhs, rhs)]
    }
}
