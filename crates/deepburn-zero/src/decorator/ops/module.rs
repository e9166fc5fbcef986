//! Layers that Burn's modules call: embeddings, convolutions, pooling, interpolation, attention and
//! losses.
//!
//! Three families are written by hand. The gradient of an embedding stays sparse ([`RowGradient`])
//! and needs only the shape of the table, so backward does not gather the table. Convolutions are
//! counted for model FLOPs ([`operations`](crate::ledger)). Linear layers use the products of
//! [`MatmulOps`], and a pipeline stage may defer their weight gradient. Transposed and deformable
//! convolutions and Burn's `linear` and `attention` are not counted. All except `linear` use the
//! products of the inner backend.

use burn_backend::TensorMetadata;
use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
    MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
};
use burn_backend::tensor::{FloatTensor, IntTensor};
use deepburn_ops::MatmulOps;

use crate::decorator::ops::product::{convolution, count};
use crate::decorator::ops::weight_gradients::weight_gradients;
use crate::decorator::ops::{forward, recorded, weight};
use crate::decorator::{Sharded, ZeroTensor};
use crate::group::RowGradient;
use crate::recompute::Cost;

/// The table of layers that need only the data of their operands.
macro_rules! module_ops {
    ($with:ident) => {
        $with! {
            fn deform_conv2d_backward(
                x: float, offset: float, weight: float, mask: (maybe float), bias: (maybe float),
                output_grad: float, options: [DeformConvOptions<2>],
            )
                -> (DeformConv2dBackward {
                    x_grad: float, offset_grad: float, weight_grad: float, mask_grad: (maybe float), bias_grad: (maybe float)
                });
            fn max_pool1d_with_indices(
                x: float, kernel_size: [usize], stride: [usize], padding: [usize],
                dilation: [usize], ceil_mode: [bool],
            ) -> (MaxPool1dWithIndices { output: float, indices: int });
            fn max_pool1d_with_indices_backward(
                x: float, kernel_size: [usize], stride: [usize], padding: [usize],
                dilation: [usize], ceil_mode: [bool], output_grad: float, indices: int,
            ) -> (MaxPool1dBackward { x_grad: float });
            fn max_pool2d_with_indices(
                x: float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]],
                dilation: [[usize; 2]], ceil_mode: [bool],
            ) -> (MaxPool2dWithIndices { output: float, indices: int });
            fn max_pool2d_with_indices_backward(
                x: float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]],
                dilation: [[usize; 2]], ceil_mode: [bool], output_grad: float, indices: int,
            ) -> (MaxPool2dBackward { x_grad: float });
            #[product] fn deform_conv2d(
                x: float, offset: float, weight: float, mask: (maybe float), bias: (maybe float),
                options: [DeformConvOptions<2>],
            ) -> float;
            #[product] fn conv_transpose2d(
                x: float, weight: float, bias: (maybe float), options: [ConvTransposeOptions<2>],
            ) -> float;
            #[product] fn conv_transpose3d(
                x: float, weight: float, bias: (maybe float), options: [ConvTransposeOptions<3>],
            ) -> float;
            fn avg_pool2d(
                x: float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]],
                count_include_pad: [bool], ceil_mode: [bool],
            ) -> float;
            fn avg_pool2d_backward(
                x: float, grad: float, kernel_size: [[usize; 2]], stride: [[usize; 2]],
                padding: [[usize; 2]], count_include_pad: [bool], ceil_mode: [bool],
            ) -> float;
            fn adaptive_avg_pool2d(x: float, output_size: [[usize; 2]]) -> float;
            fn adaptive_avg_pool2d_backward(x: float, grad: float) -> float;
            fn max_pool2d(
                x: float, kernel_size: [[usize; 2]], stride: [[usize; 2]], padding: [[usize; 2]],
                dilation: [[usize; 2]], ceil_mode: [bool],
            ) -> float;
            #[full] fn interpolate(
                x: float, output_size: [[usize; 2]], options: [InterpolateOptions],
            ) -> float;
            fn interpolate_backward(
                x: float, grad: float, output_size: [[usize; 2]], options: [InterpolateOptions],
            ) -> float;
            #[product] fn attention(
                query: float, key: float, value: float, mask: (maybe bool),
                attn_bias: (maybe float), options: [AttentionModuleOptions],
            ) -> float;
            fn rfft(signal: float, dim: [usize], n: [Option<usize>]) -> (float, float);
            fn irfft(spectrum_re: float, spectrum_im: float, dim: [usize], n: [Option<usize>])
                -> float;
            fn linear_bias_backward(output_grad: float) -> float;
            fn conv1d_bias_backward(x: float, bias: float, output_grad: float) -> float;
            fn conv2d_bias_backward(x: float, bias: float, output_grad: float) -> float;
            fn conv3d_bias_backward(x: float, bias: float, output_grad: float) -> float;
            #[product] fn conv_transpose1d(
                x: float, weight: float, bias: (maybe float), options: [ConvTransposeOptions<1>],
            ) -> float;
            fn conv_transpose1d_x_backward(
                weight: float, output_grad: float, options: [ConvTransposeOptions<1>],
            ) -> float;
            fn conv_transpose1d_weight_backward(
                x: float, weight: float, output_grad: float, options: [ConvTransposeOptions<1>],
            ) -> float;
            fn conv_transpose1d_bias_backward(x: float, bias: float, output_grad: float) -> float;
            fn conv_transpose2d_x_backward(
                weight: float, output_grad: float, options: [ConvTransposeOptions<2>],
            ) -> float;
            fn conv_transpose2d_weight_backward(
                x: float, weight: float, output_grad: float, options: [ConvTransposeOptions<2>],
            ) -> float;
            fn conv_transpose2d_bias_backward(x: float, bias: float, output_grad: float) -> float;
            fn conv_transpose3d_x_backward(
                weight: float, output_grad: float, options: [ConvTransposeOptions<3>],
            ) -> float;
            fn conv_transpose3d_weight_backward(
                x: float, weight: float, output_grad: float, options: [ConvTransposeOptions<3>],
            ) -> float;
            fn conv_transpose3d_bias_backward(x: float, bias: float, output_grad: float) -> float;
            fn unfold4d(x: float, kernel_size: [[usize; 2]], options: [UnfoldOptions]) -> float;
            fn avg_pool1d(
                x: float, kernel_size: [usize], stride: [usize], padding: [usize],
                count_include_pad: [bool], ceil_mode: [bool],
            ) -> float;
            fn avg_pool1d_backward(
                x: float, grad: float, kernel_size: [usize], stride: [usize], padding: [usize],
                count_include_pad: [bool], ceil_mode: [bool],
            ) -> float;
            fn adaptive_avg_pool1d(x: float, output_size: [usize]) -> float;
            fn adaptive_avg_pool1d_backward(x: float, grad: float) -> float;
            fn max_pool1d(
                x: float, kernel_size: [usize], stride: [usize], padding: [usize],
                dilation: [usize], ceil_mode: [bool],
            ) -> float;
            #[full] fn layer_norm(tensor: float, gamma: float, beta: (maybe float), epsilon: [f64])
                -> float;
            #[full] fn ctc_loss(
                log_probs: float, targets: int, input_lengths: int, target_lengths: int,
                blank: [usize],
            ) -> float;
            fn has_ctc_loss_backward() -> [bool];
            fn ctc_loss_backward(
                log_probs: float, targets: int, input_lengths: int, target_lengths: int,
                grad_loss: float, blank: [usize],
            ) -> float;
        }
    };
}
pub(crate) use module_ops;

/// The table of layers that [`Sharded`] implements by hand, because their operations are counted,
/// their gradient stays sparse or may be deferred, or [`MatmulOps`] computes their products.
macro_rules! counted_module_ops {
    ($with:ident) => {
        $with! {
            fn embedding(weights: float, indices: int) -> float;
            #[product] fn linear(x: float, weight: float, bias: (maybe float)) -> float;
            fn linear_x_backward(weight: float, output_grad: float) -> float;
            fn linear_weight_backward(x: float, output_grad: float) -> float;
            #[product] fn conv1d(
                x: float, weight: float, bias: (maybe float), options: [ConvOptions<1>],
            ) -> float;
            fn conv1d_x_backward(
                x: float, weight: float, output_grad: float, options: [ConvOptions<1>],
            ) -> float;
            fn conv1d_weight_backward(
                x: float, weight: float, output_grad: float, options: [ConvOptions<1>],
            ) -> float;
            #[product] fn conv2d(
                x: float, weight: float, bias: (maybe float), options: [ConvOptions<2>],
            ) -> float;
            fn conv2d_x_backward(
                x: float, weight: float, output_grad: float, options: [ConvOptions<2>],
            ) -> float;
            fn conv2d_weight_backward(
                x: float, weight: float, output_grad: float, options: [ConvOptions<2>],
            ) -> float;
            #[product] fn conv3d(
                x: float, weight: float, bias: (maybe float), options: [ConvOptions<3>],
            ) -> float;
            fn conv3d_x_backward(
                x: float, weight: float, output_grad: float, options: [ConvOptions<3>],
            ) -> float;
            fn conv3d_weight_backward(
                x: float, weight: float, output_grad: float, options: [ConvOptions<3>],
            ) -> float;
        }
    };
}
pub(crate) use counted_module_ops;

/// Implements a convolution over `$axes` axes and its two backward functions, with operation
/// counts.
///
/// Each backward function takes as many operations as forward, because it also pairs every output
/// with every weight of its channel. `terms` is the number of products per output element:
/// `inputs / groups` times the kernel size.
macro_rules! convolutions {
    ($($axes:literal: $forward:ident, $($backward:ident),*;)*) => { $(
        fn $forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: Option<FloatTensor<Self>>,
            options: ConvOptions<$axes>,
        ) -> FloatTensor<Self> {
            // A handle for the count, which follows the op because it needs the shape of the
            // output.
            let kernel = weight.clone();
            let terms = kernel.shape().num_elements() / kernel.shape().as_slice()[0].max(1);
            let [output] = recorded!(
                Cost::of_product(terms);
                x: float, weight: float, bias: (maybe float), options: [ConvOptions<$axes>]
                    => [B::$forward(x, weight, bias, options)]
            );
            let outputs = output.shape().num_elements();
            count(&[&kernel], || convolution(outputs, &kernel.shape()));
            output
        }

        $(
            fn $backward(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                output_grad: FloatTensor<Self>,
                options: ConvOptions<$axes>,
            ) -> FloatTensor<Self> {
                count(&[&weight], || convolution(output_grad.shape().num_elements(), &weight.shape()));
                let (x, weight) = (x.into_full(), weight.into_full());
                ZeroTensor::full(B::$backward(x, weight, output_grad.into_full(), options))
            }
        )*
    )* };
}

/// Bias gradients and transposed convolutions are plain lines of the table `module_ops`.
impl<B: MatmulOps> ModuleOps<Sharded<B>> for Sharded<B> {
    /// Looks up rows `indices` of a table. The whole table is gathered if it is sharded. Only the
    /// rows of a quantized table are dequantized. The result is cheap to recompute.
    fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        let [rows] = recorded!(Cost::Low; weights: weight, indices: int => [weight::embedding::<B>(weights, indices)]);
        rows
    }

    convolutions! {
        1: conv1d, conv1d_x_backward, conv1d_weight_backward;
        2: conv2d, conv2d_x_backward, conv2d_weight_backward;
        3: conv3d, conv3d_x_backward, conv3d_weight_backward;
    }

    /// Returns the sparse gradient of a table: the rows that were looked up. The table is not read.
    /// Duplicate rows are summed later, when a shard is reduced.
    fn embedding_backward(
        weights: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        ZeroTensor::sparse_rows(RowGradient::new(
            weights.shape(),
            indices.into_inner(),
            output_grad.into_full(),
        ))
    }

    fn linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let [output] = recorded!(
            Cost::High; x: float, weight: float, bias: (maybe float)
                => [B::module_linear(x, weight, bias)]
        );
        output
    }

    fn linear_x_backward(
        weight: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [gradient] = recorded!(
            Cost::Low; weight: float, output_grad: float
                => [B::module_linear_x_gradient(weight, output_grad)]
        );
        gradient
    }

    /// Returns the gradient of the weight of Burn's linear layer, `[inputs, outputs]`.
    fn linear_weight_backward(
        x: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let width = |tensor: &FloatTensor<Self>| tensor.shape().as_slice().last().copied();
        let axes = [&x, &output_grad].map(|tensor| width(tensor).unwrap_or(1));
        let [gradient] = weight_gradients([x, output_grad], [axes.into()], |[x, output_grad]| {
            [B::module_linear_weight_gradient(x, output_grad)]
        });
        gradient
    }

    module_ops!(forward);
}
