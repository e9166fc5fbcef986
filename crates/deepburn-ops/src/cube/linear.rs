//! Burn's linear layer with the products of [`MatmulOps`].
//!
//! The formulas are the same as in Burn's [`ModuleOps::linear`], which calls `float_matmul` of the
//! backend.
//!
//! [`ModuleOps::linear`]: burn_backend::ops::ModuleOps::linear

use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};

use crate::matmul::MatmulOps;

/// Returns `x` `[.., inputs]` times `weight` `[inputs, outputs]`, plus `bias` `[outputs]`.
pub(crate) fn forward<B: MatmulOps>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let axes = x.shape().num_dims();
    let product = B::matmul(x, with_axes::<B>(weight, axes));
    match bias {
        Some(bias) => B::float_add(product, with_axes::<B>(bias, axes)),
        None => product,
    }
}

/// Returns the gradient of the input, `grad` times the transposed weight.
pub(crate) fn x_gradient<B: MatmulOps>(
    weight: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let axes = grad.shape().num_dims();
    B::matmul(grad, with_axes::<B>(B::float_swap_dims(weight, 0, 1), axes))
}

/// Returns the gradient of the weight, the transposed input times `grad`. The products of a batch
/// are added along the leading axes, the first axis first.
pub(crate) fn weight_gradient<B: MatmulOps>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    let axes = x.shape().num_dims();
    let products = B::matmul(B::float_swap_dims(x, axes - 2, axes - 1), grad);
    let sum = (0..axes - 2).fold(products, B::float_sum_dim);
    let matrix = sum.shape()[axes - 2..].to_vec();
    B::float_reshape(sum, Shape::from(matrix))
}

/// Returns the tensor with axes of length 1 before its own, so that it has `axes`.
fn with_axes<B: MatmulOps>(tensor: FloatTensor<B>, axes: usize) -> FloatTensor<B> {
    let own = tensor.shape();
    let missing = axes.saturating_sub(own.num_dims());
    if missing == 0 {
        return tensor;
    }
    let shape: Vec<_> = std::iter::repeat_n(1, missing).chain(own.to_vec()).collect();
    B::float_reshape(tensor, Shape::from(shape))
}
