//! Matrix products of tensors.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};

use crate::quantized::QuantizedMatrix;
use crate::sum::SumOps;

/// Matrix products over the last two axes.
///
/// A backend with products has [`SumOps`] too, because decorators and fused ops need both.
pub trait MatmulOps: SumOps {
    /// Multiplies `lhs` `[..., rows, depth]` by `rhs` `[..., depth, columns]`; the other axes are
    /// broadcast. The result equals
    /// [`FloatTensorOps::float_matmul`](burn_backend::ops::FloatTensorOps::float_matmul) up to
    /// rounding; a backend overrides this method if it has a faster kernel than Burn's.
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }

    /// Multiplies `lhs` `[..., rows, depth]` by a quantized matrix `[depth, columns]`. The result
    /// equals [`matmul`](Self::matmul) with the dequantized matrix.
    fn quantized_matmul(lhs: FloatTensor<Self>, rhs: &QuantizedMatrix<Self>) -> FloatTensor<Self> {
        // The one matrix is broadcast along the leading axes of `lhs`.
        let mut shape = vec![1; lhs.shape().num_dims().saturating_sub(2)];
        shape.extend(rhs.shape());
        Self::matmul(lhs, Self::float_reshape(rhs.dequantized(), Shape::from(shape)))
    }
}

/// Autodiff records `float_matmul`, which calls the one of the backend below. Decorators of
/// `deepburn-zero` compute that one with [`matmul`](MatmulOps::matmul).
impl<B: MatmulOps, C: CheckpointStrategy> MatmulOps for Autodiff<B, C> {}
