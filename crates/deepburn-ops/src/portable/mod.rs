//! The families in ops that every backend has.
//!
//! What the traits provide; a backend overrides a method where it has a kernel. Backward formulas
//! are written by hand, so only what they need is kept, and whatever would be large is made in
//! blocks. Inputs of 16 bits are computed with in f32.

pub mod attention;
pub mod cross_entropy;
pub mod gelu;
pub mod linear;
pub mod norm;

use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// A primitive as a tensor of rank `D`, which it must have.
pub(crate) fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The primitive of a float tensor.
pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// A 16-bit tensor as f32; any other as it is.
pub(crate) fn in_f32<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => x,
    }
}

/// `x` in type `dtype`.
pub(crate) fn cast<B: Backend, const D: usize>(x: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}
