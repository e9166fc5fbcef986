//! Self-attention with the fused kernels of `deepburn_kernels::cube`.
//!
//! Forward is one launch, backward three. Only the list of a mask is copied to the device, once for
//! all layers that share it. Heads
//! that are too wide for the kernels, other types than f32, f16 and bf16, and devices without
//! enough shared memory use the provided implementation.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{
    self, AttentionGradient, AttentionResult, DeviceAttention, KeyMask, MaskList,
};

use super::array::{buffer, contiguous, element_type, flat_tensor};
use crate::attention::dimensions::{AttentionMask, SelfAttention};
use crate::attention::dropout::AttentionDropout;
use crate::attention::saved::{AttentionOutput, AttentionSaved};
use crate::portable;
use crate::{AttentionOps, OptimizerOps};

/// Scores, weights and sums are f32 whether or not an attention asks for `upcast`.
///
/// NaN and infinities of a position reach only queries that attend to a key within 63 positions of
/// it.
impl<R, F, I, BT> AttentionOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        let Some(options) = fused(&projected, attention, dropout) else {
            return portable::attention::forward::<Self>(projected, attention, dropout);
        };
        let projected = contiguous(projected);
        let list = mask_list(&projected, attention, &options);
        let AttentionResult { output, log_sums } =
            cube::attention_forward(&projected.client, &options, &list, &buffer(&projected));
        let DeviceAttention { batch, positions, heads, width, .. } = options;
        let matrix = |buffer, shape: [usize; 2]| {
            Self::float_reshape(flat_tensor(buffer, &projected), Shape::from(shape.to_vec()))
        };
        AttentionOutput {
            output: matrix(output, [batch * positions, heads * width]),
            log_sums: matrix(log_sums, [batch * heads, positions]),
        }
    }

    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        let Some(options) = fused(&saved.projected, attention, saved.dropout) else {
            return portable::attention::backward::<Self>(grad, saved, attention);
        };
        let AttentionSaved { projected, output, log_sums, .. } = saved;
        // The gradient of an output can have another type, for example of a sum in f32.
        let grad = Self::cast(grad, projected.dtype().into());
        let [projected, output, log_sums, grad] =
            [projected, output, log_sums, grad].map(contiguous);
        let result = AttentionResult { output: buffer(&output), log_sums: buffer(&log_sums) };
        let arrays = AttentionGradient {
            grad: &buffer(&grad),
            projected: &buffer(&projected),
            result: &result,
        };
        let list = mask_list(&projected, attention, &options);
        let gradient = cube::attention_backward(&projected.client, &options, &list, &arrays);
        Self::float_reshape(flat_tensor(gradient, &projected), projected.shape())
    }
}

/// Returns the options of the fused kernels; `None` if they cannot compute this attention.
fn fused<'a, R: CubeRuntime>(
    projected: &CubeTensor<R>,
    attention: &'a SelfAttention,
    dropout: Option<AttentionDropout>,
) -> Option<DeviceAttention<'a>> {
    let dtype = element_type(projected.dtype().into())?;
    let [rows, columns] = projected.shape().dims();
    let options = DeviceAttention {
        batch: attention.batch,
        positions: rows / attention.batch.max(1),
        heads: attention.heads,
        key_value_heads: attention.key_value_heads,
        width: columns / attention.projected_heads(),
        scale: attention.scale as f32,
        soft_cap: attention.soft_cap.map(|cap| cap as f32),
        mask: match &attention.mask {
            AttentionMask::Causal => KeyMask::Causal,
            AttentionMask::Window(window) => KeyMask::Window(*window),
            AttentionMask::Since(firsts) => KeyMask::Since(firsts),
            AttentionMask::Lengths(lengths) => KeyMask::Lengths(lengths),
        },
        dropout: dropout.map(AttentionDropout::for_kernels),
    };
    cube::supports_attention(&projected.client, &options, dtype).then_some(options)
}

/// Returns the list of a mask on the device of `projected`.
fn mask_list<R: CubeRuntime>(
    projected: &CubeTensor<R>,
    attention: &SelfAttention,
    options: &DeviceAttention<'_>,
) -> MaskList {
    let upload = || MaskList::upload(&projected.client, options);
    match &attention.mask {
        AttentionMask::Causal | AttentionMask::Window(_) => upload(),
        AttentionMask::Since(list) | AttentionMask::Lengths(list) => {
            let dimensions = [options.batch, options.positions];
            list.copy_for((projected.device.clone(), dimensions), upload)
        }
    }
}
