//! The families, implemented with ops that every backend has.
//!
//! These are the provided methods of the traits; a backend overrides a method
//! if it has a kernel. Backward formulas are written by hand, so only the
//! values that they need are kept, and large intermediate tensors are computed
//! in blocks. 16-bit inputs are computed in f32.
//!
//! They run on every backend, and are the reference for the kernels of flex and
//! LibTorch: tests compare all of them with the same formulae in f64. The order
//! of sums is the backend's.

pub mod attention;
pub mod cross_entropy;
pub mod gelu;
pub mod linear;
pub mod norm;

use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Returns a primitive as a tensor of rank `D`, which it must have.
pub(crate) fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// Returns the primitive of a float tensor.
pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// Converts a 16-bit tensor to f32; returns any other unchanged.
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
