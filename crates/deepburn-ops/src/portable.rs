//! The op families, implemented with ops that every backend supports.
//!
//! The provided methods of the op traits call these functions. A backend overrides a method if it
//! has its own kernel. The backward formulas are written by hand, so only the values that they need
//! are saved. Large intermediate tensors are computed in blocks, and 16-bit inputs are computed in
//! f32.
//!
//! These functions are also the reference for the flex and LibTorch kernels: tests compare all
//! implementations with the same formulas in f64. The backend determines the order of summation,
//! and [`MatmulOps`] the products.

pub mod attention;
pub mod cache;
pub mod cross_entropy;
pub mod gated;
pub mod gelu;
pub mod linear;
pub mod norm;
pub mod rms_norm;
pub mod rotary;

use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::matmul::MatmulOps;

/// Wraps a primitive, whose rank must be `D`, as a tensor.
pub(crate) fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// Returns the primitive of a float tensor.
pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// Multiplies over the last two axes with the products of [`MatmulOps`].
pub(crate) fn matmul<B: MatmulOps, const D: usize>(
    lhs: Tensor<B, D>,
    rhs: Tensor<B, D>,
) -> Tensor<B, D> {
    tensor(B::matmul(primitive(lhs), primitive(rhs)))
}

/// Converts a 16-bit tensor to f32; returns other tensors unchanged.
pub(crate) fn in_f32<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => x,
    }
}

/// Returns `x` in type `dtype`.
pub(crate) fn cast<B: Backend, const D: usize>(x: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}
