//! Layer normalization on the device: one launch forward, three backward.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, Shape, TensorMetadata};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, LayerNormRows, NormWeightGradients, NormalizedRows};

use super::array::{are_alike, are_supported, buffer, contiguous, flat_tensor, shaped_tensor};
use crate::norm::{LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved};
use crate::portable;

/// Supports f32, f16 and bf16 rows, with weights of any of these types. Other types, and rows
/// without elements, use the portable implementation.
impl<R, F, I, BT> LayerNormOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// Allocates the output and two f32 numbers per row. `epsilon` is rounded to f32.
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> LayerNormOutput<Self> {
        let [rows, width] = [x.shape()[0], x.shape()[1]];
        if !are_supported([&x]) || !are_alike([&gamma, &beta]) || width == 0 {
            return portable::norm::forward::<Self>(x, gamma, beta, epsilon);
        }
        let [x, gamma, beta] = [x, gamma, beta].map(contiguous);
        let weights = [&gamma, &beta].map(buffer);
        let LayerNormRows { output, mean, reciprocal_deviation } =
            cube::layer_norm(&x.client, &buffer(&x), weights.each_ref(), epsilon as f32);
        let column = Shape::from(vec![rows, 1]);
        LayerNormOutput {
            output: shaped_tensor(output, x.shape(), &x),
            mean: shaped_tensor(mean, column.clone(), &x),
            reciprocal_deviation: shaped_tensor(reciprocal_deviation, column, &x),
        }
    }

    /// Gradients of another type than `x` use the portable implementation.
    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        let is_empty = saved.x.shape()[1] == 0;
        if !are_alike([&saved.x, &grad]) || !are_supported([&saved.gamma]) || is_empty {
            return portable::norm::backward::<Self>(grad, saved);
        }
        let LayerNormSaved { x, gamma, mean, reciprocal_deviation } = saved;
        debug_assert!([&mean, &reciprocal_deviation].iter().all(|it| it.dtype() == DType::F32));
        let [grad, x, gamma, mean, factor] =
            [grad, x, gamma, mean, reciprocal_deviation].map(contiguous);
        let client = &x.client;
        let [grad, rows, weight, mean, factor] = [&grad, &x, &gamma, &mean, &factor].map(buffer);
        let normalized = NormalizedRows { x: &rows, mean: Some(&mean), factor: &factor };
        let NormWeightGradients { weight: gamma_sum, bias } =
            cube::norm_weight_gradients(client, &grad, normalized, weight.len(), weight.dtype());
        let beta_sum = bias.expect("sums of a normalization with means have a bias");
        let x_gradient = cube::norm_x_gradient(client, &grad, normalized, &weight, false);
        LayerNormGradients {
            x: shaped_tensor(x_gradient, x.shape(), &x),
            gamma: flat_tensor(gamma_sum, &gamma),
            beta: flat_tensor(beta_sum, &gamma),
        }
    }
}
