//! RMS normalization with ops that every backend supports.
//!
//! Each op allocates a tensor with the shape of `x`.

use burn::tensor::Tensor;
use burn_backend::Backend;

use super::{cast, in_f32, primitive, tensor};
use crate::rms_norm::saved::{RmsNormGradients, RmsNormOutput, RmsNormSaved};
use crate::rms_norm::{RmsNorm, RmsWeight};

/// Implements [`RmsNormOps::rms_norm_forward`](crate::RmsNormOps::rms_norm_forward).
///
/// Returns the output in the type of `x`, and the reciprocal root of each row, `[rows, 1]`, in at
/// least f32. A weight of another type is converted.
pub fn forward<B: Backend>(
    x: B::FloatTensorPrimitive,
    weight: B::FloatTensorPrimitive,
    norm: RmsNorm,
) -> RmsNormOutput<B> {
    let x: Tensor<B, 2> = tensor(x);
    let dtype = x.dtype();
    let x = in_f32(x);
    let squares = (x.clone() * x.clone()).mean_dim(1);
    let reciprocal_root = (squares + norm.epsilon).sqrt().recip();
    let quotient = x * reciprocal_root.clone();
    let quotient = match norm.weight {
        RmsWeight::Factor => in_f32(cast(quotient, dtype)),
        RmsWeight::PlusOne => quotient,
    };
    RmsNormOutput {
        output: primitive(cast(quotient * factor::<B>(weight, norm), dtype)),
        reciprocal_root: primitive(reciprocal_root),
    }
}

/// Implements [`RmsNormOps::rms_norm_backward`](crate::RmsNormOps::rms_norm_backward).
///
/// With the quotient `q = x r`, where `r` is the reciprocal root, and `g = dy w`, where `w` is the
/// weight, or the weight plus 1: `dx = r (g - q mean(g q))`, where the mean is over a row. The
/// gradient of the weight is the sum of `dy q` over all rows. `q` is not rounded.
///
/// Each gradient has the type of its input.
pub fn backward<B: Backend>(
    grad: B::FloatTensorPrimitive,
    saved: RmsNormSaved<B>,
    norm: RmsNorm,
) -> RmsNormGradients<B> {
    let (grad, x): (Tensor<B, 2>, Tensor<B, 2>) = (tensor(grad), tensor(saved.x));
    let reciprocal_root: Tensor<B, 2> = tensor(saved.reciprocal_root);
    let weight_dtype = tensor::<B, 1>(saved.weight.clone()).dtype();
    let (dtype, grad) = (x.dtype(), in_f32(grad));
    let quotient = in_f32(x) * reciprocal_root.clone();
    let weight_grad = (grad.clone() * quotient.clone()).sum_dim(0).squeeze_dim::<1>(0);
    let scaled = grad * factor::<B>(saved.weight, norm);
    let along = (scaled.clone() * quotient.clone()).mean_dim(1);
    let x_grad = (scaled - quotient * along) * reciprocal_root;
    RmsNormGradients {
        x: primitive(cast(x_grad, dtype)),
        weight: primitive(cast(weight_grad, weight_dtype)),
    }
}

/// Returns the factor of each column, `[1, width]`, in at least f32.
fn factor<B: Backend>(weight: B::FloatTensorPrimitive, norm: RmsNorm) -> Tensor<B, 2> {
    let weight = in_f32(tensor::<B, 1>(weight)).unsqueeze();
    match norm.weight {
        RmsWeight::Factor => weight,
        RmsWeight::PlusOne => weight + 1.0,
    }
}
