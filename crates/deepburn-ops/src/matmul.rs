//! Matrix products of tensors, and their precision in f32.
//!
//! Devices with tensor cores multiply f32 matrices faster if they round the operands to TF32, which
//! has 10 bits of mantissa instead of 23. As in PyTorch, products do not do this by default, and
//! one setting allows it for all products of the process ([`allow_tf32`]).

use std::sync::atomic::{AtomicBool, Ordering};

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Shape, TensorMetadata};

use crate::quantized::QuantizedMatrix;
use crate::random::RandomOps;
use crate::sum::SumOps;

/// Whether products of f32 matrices may round their operands to TF32.
static IS_TF32_ALLOWED: AtomicBool = AtomicBool::new(false);

/// Allows or forbids products of f32 matrices to round their operands to TF32, on devices that have
/// it. Applies to all threads, from their next product on. Forbidden by default.
///
/// A process has one setting, as with `torch.set_float32_matmul_precision`. Ranks that differ in it
/// would compute different models, so set it before they start.
pub fn allow_tf32(allowed: bool) {
    IS_TF32_ALLOWED.store(allowed, Ordering::Relaxed);
}

/// Returns whether products of f32 matrices may round their operands to TF32.
#[cfg(feature = "cube")]
pub(crate) fn is_tf32_allowed() -> bool {
    IS_TF32_ALLOWED.load(Ordering::Relaxed)
}

/// Matrix products over the last two axes.
///
/// A backend with products has [`SumOps`] and [`RandomOps`] too, because decorators and fused ops
/// need all of them.
pub trait MatmulOps: SumOps + RandomOps {
    /// Multiplies `lhs` `[..., rows, depth]` by `rhs` `[..., depth, columns]`; the other axes are
    /// broadcast. The result equals
    /// [`FloatTensorOps::float_matmul`](burn_backend::ops::FloatTensorOps::float_matmul) up to
    /// rounding; a backend overrides this method if it has a faster kernel than Burn's.
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }

    /// Returns whether products of f32 matrices on `device` round their operands to TF32 if
    /// [`allow_tf32`] allows it.
    fn has_tf32(_device: &Device<Self>) -> bool {
        false
    }

    /// Multiplies `lhs` `[..., rows, depth]` by a quantized matrix `[depth, columns]`. The result
    /// equals [`matmul`](Self::matmul) with the dequantized matrix.
    fn quantized_matmul(lhs: FloatTensor<Self>, rhs: &QuantizedMatrix<Self>) -> FloatTensor<Self> {
        // The one matrix is broadcast along the leading axes of `lhs`.
        let mut shape = vec![1; lhs.shape().num_dims().saturating_sub(2)];
        shape.extend(rhs.shape());
        Self::matmul(lhs, Self::float_reshape(rhs.dequantized(), Shape::from(shape)))
    }

    /// Computes Burn's linear layer, [`ModuleOps::linear`](burn_backend::ops::ModuleOps::linear). A
    /// backend overrides this method and the two gradients if it must compute them with
    /// [`matmul`](Self::matmul).
    fn module_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        Self::linear(x, weight, bias)
    }

    /// Returns the gradient of the input of [`module_linear`](Self::module_linear).
    fn module_linear_x_gradient(
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::linear_x_backward(weight, grad)
    }

    /// Returns the gradient of the weight of [`module_linear`](Self::module_linear).
    fn module_linear_weight_gradient(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::linear_weight_backward(x, grad)
    }
}

/// Autodiff records `float_matmul`, which calls the one of the backend below. Decorators of
/// `deepburn-zero` compute that one with [`matmul`](MatmulOps::matmul).
impl<B: MatmulOps, C: CheckpointStrategy> MatmulOps for Autodiff<B, C> {}
