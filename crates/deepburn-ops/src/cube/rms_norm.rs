//! RMS normalization on the device: one launch forward, three backward.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, Shape, TensorMetadata};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, NormWeightGradients, NormalizedRows, RmsNormRows};

use super::array::{are_alike, are_supported, buffer, contiguous, flat_tensor, shaped_tensor};
use crate::portable;
use crate::rms_norm::{
    RmsNorm, RmsNormGradients, RmsNormOps, RmsNormOutput, RmsNormSaved, RmsWeight,
};

/// Supports f32, f16 and bf16 rows, with weights of any of these types. Other types, and rows
/// without elements, use the portable implementation.
impl<R, F, I, BT> RmsNormOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// Allocates the output and an f32 number per row. `epsilon` is rounded to f32.
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> RmsNormOutput<Self> {
        let [rows, width] = [x.shape()[0], x.shape()[1]];
        if !are_supported([&x, &weight]) || width == 0 {
            return portable::rms_norm::forward::<Self>(x, weight, norm);
        }
        let [x, weight] = [x, weight].map(contiguous);
        let plus_one = norm.weight == RmsWeight::PlusOne;
        let [x_rows, factors] = [&x, &weight].map(buffer);
        let RmsNormRows { output, reciprocal_root } =
            cube::rms_norm(&x.client, &x_rows, &factors, norm.epsilon as f32, plus_one);
        RmsNormOutput {
            output: shaped_tensor(output, x.shape(), &x),
            reciprocal_root: shaped_tensor(reciprocal_root, Shape::from(vec![rows, 1]), &x),
        }
    }

    /// Gradients of another type than `x` use the portable implementation.
    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        saved: RmsNormSaved<Self>,
        norm: RmsNorm,
    ) -> RmsNormGradients<Self> {
        let is_empty = saved.x.shape()[1] == 0;
        if !are_alike([&saved.x, &grad]) || !are_supported([&saved.weight]) || is_empty {
            return portable::rms_norm::backward::<Self>(grad, saved, norm);
        }
        let RmsNormSaved { x, weight, reciprocal_root } = saved;
        debug_assert_eq!(reciprocal_root.dtype(), DType::F32);
        let [grad, x, weight, factor] = [grad, x, weight, reciprocal_root].map(contiguous);
        let client = &x.client;
        let [grad, rows, weights, factor] = [&grad, &x, &weight, &factor].map(buffer);
        let normalized = NormalizedRows { x: &rows, mean: None, factor: &factor };
        let NormWeightGradients { weight: weight_sum, .. } =
            cube::norm_weight_gradients(client, &grad, normalized, weights.len(), weights.dtype());
        let plus_one = norm.weight == RmsWeight::PlusOne;
        let x_gradient = cube::norm_x_gradient(client, &grad, normalized, &weights, plus_one);
        RmsNormGradients {
            x: shaped_tensor(x_gradient, x.shape(), &x),
            weight: flat_tensor(weight_sum, &weight),
        }
    }
}
