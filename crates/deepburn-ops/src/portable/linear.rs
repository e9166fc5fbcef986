//! Linear layers, computed with the products of [`MatmulOps`].
//!
//! The product determines the element type and the precision of the results.

use burn::tensor::Tensor;
use burn_backend::TensorMetadata;

use super::{cast, in_f32, primitive, tensor};
use crate::linear::gradients::LinearGradients;
use crate::matmul::MatmulOps;

/// Implements [`LinearOps::fused_linear`](crate::LinearOps::fused_linear). The product is rounded
/// before the bias is added.
pub fn forward<B: MatmulOps>(
    x: B::FloatTensorPrimitive,
    weight: B::FloatTensorPrimitive,
    bias: Option<B::FloatTensorPrimitive>,
) -> B::FloatTensorPrimitive {
    let product = B::matmul(x, weight);
    match bias {
        Some(bias) => primitive(tensor::<B, 2>(product) + tensor::<B, 1>(bias).unsqueeze()),
        None => product,
    }
}

/// Implements [`LinearOps::linear_x_gradient`](crate::LinearOps::linear_x_gradient).
pub fn x_gradient<B: MatmulOps>(
    grad: B::FloatTensorPrimitive,
    weight: B::FloatTensorPrimitive,
) -> B::FloatTensorPrimitive {
    B::matmul(grad, B::float_transpose(weight))
}

/// Implements [`LinearOps::linear_gradients`](crate::LinearOps::linear_gradients). The bias
/// gradient is summed over rows in at least f32, because a 16-bit sum of thousands of rows would
/// lose small terms.
pub fn gradients<B: MatmulOps>(
    grad: B::FloatTensorPrimitive,
    x: B::FloatTensorPrimitive,
) -> LinearGradients<B> {
    let dtype = grad.dtype();
    let weight = B::matmul(B::float_transpose(x), grad.clone());
    let bias: Tensor<B, 2> = in_f32(tensor(grad)).sum_dim(0);
    LinearGradients { weight, bias: primitive(cast(bias.squeeze_dim::<1>(0), dtype)) }
}
