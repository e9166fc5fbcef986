//! Self-attention with LibTorch's fused kernel for the CPU.
//!
//! The kernel (`_scaled_dot_product_flash_attention_for_cpu`) works on blocks of queries and keys
//! and never materializes the full score matrix. It is used for the causal mask without dropout.
//! All other cases (CUDA, other masks, dropout, shared keys and values, and soft caps) use
//! [`crate::portable::attention`].
//!
//! ```text
//! projected [batch * positions, 3 * width]
//!   | queries, head after head | keys | values |
//!         view [batch, positions, 3, heads, head width]
//!         select 0, 1, 2 and swap positions with heads
//!   [batch, heads, positions, head width]      views, no copy
//! ```

use burn_backend::tensor::FloatTensor;
use burn_tch::{LibTorch, TchElement};
use tch::{Device, Tensor};

use super::wrap;
use crate::attention::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, SelfAttention,
};
use crate::portable;

/// The forward and the backward pass select the implementation by the same conditions. The saved
/// log-sums have the same meaning in both implementations.
impl<E: TchElement> AttentionOps for LibTorch<E> {
    /// The kernel computes scores and sums in at least f32. Its log-sums have the shape
    /// `[batch, heads, positions]`; the first two axes are merged here.
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        if dropout.is_some() || !has_kernel(&projected.tensor, attention) {
            return portable::attention::forward::<Self>(projected, attention, dropout);
        }
        let [queries, keys, values] = split_heads(&projected.tensor, attention);
        let (output, log_sums) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
            &queries,
            &keys,
            &values,
            0.0,
            true,
            None::<Tensor>,
            attention.scale,
        );
        let [batch, heads, positions, _] = sizes(&queries);
        AttentionOutput {
            output: wrap(merge_heads(output)),
            log_sums: wrap(log_sums.reshape([batch * heads, positions])),
        }
    }

    /// Computes the gradients of queries, keys and values, and concatenates them in the column
    /// order of `projected`.
    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        if saved.dropout.is_some() || !has_kernel(&saved.projected.tensor, attention) {
            // The portable implementation transposes the output, and a transposed tensor of
            // LibTorch shares its memory. burn-tch does not track that and would multiply in place,
            // which would change the saved output.
            let output = wrap(saved.output.tensor.copy());
            let saved = AttentionSaved { output, ..saved };
            return portable::attention::backward::<Self>(grad, saved, attention);
        }
        let [queries, keys, values] = split_heads(&saved.projected.tensor, attention);
        let [batch, heads, positions, head_width] = sizes(&queries);
        let by_head =
            |rows: Tensor| rows.reshape([batch, positions, heads, head_width]).transpose(1, 2);
        let (queries, keys, values) =
            Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
                &by_head(grad.tensor),
                &queries,
                &keys,
                &values,
                &by_head(saved.output.tensor),
                &saved.log_sums.tensor.reshape([batch, heads, positions]),
                0.0,
                true,
                None::<Tensor>,
                attention.scale,
            );
        wrap(Tensor::cat(&[queries, keys, values].map(merge_heads), 1))
    }
}

/// Returns true if LibTorch's kernel supports the input: on the CPU, causal and not empty, with
/// keys and values for each head.
fn has_kernel(projected: &Tensor, attention: &SelfAttention) -> bool {
    let causal = attention.mask == AttentionMask::Causal && attention.soft_cap.is_none();
    causal
        && attention.key_value_heads == attention.heads
        && projected.device() == Device::Cpu
        && projected.numel() > 0
}

/// Returns queries, keys and values as views of shape `[batch, heads, positions, head width]`.
///
/// # Panics
/// Panics if LibTorch cannot reshape the matrix, because its shape does not match `attention`.
fn split_heads(
    projected: &Tensor,
    &SelfAttention { batch, heads, .. }: &SelfAttention,
) -> [Tensor; 3] {
    let (batch, heads) = (batch as i64, heads as i64);
    let [rows, width] = <[i64; 2]>::try_from(projected.size()).expect("it is a matrix");
    let by_head = projected.reshape([batch, rows / batch, 3, heads, width / (3 * heads)]);
    [0, 1, 2].map(|part| by_head.select(2, part).transpose(1, 2))
}

/// Returns `[batch, heads, positions, head width]` as a matrix
/// `[batch * positions, heads * head width]`, which is a copy.
fn merge_heads(by_head: Tensor) -> Tensor {
    let [batch, heads, positions, head_width] = sizes(&by_head);
    by_head.transpose(1, 2).reshape([batch * positions, heads * head_width])
}

/// Returns the dimensions of a tensor with four axes.
///
/// # Panics
/// Panics if the tensor has a different number of axes.
fn sizes(by_head: &Tensor) -> [i64; 4] {
    by_head.size().try_into().expect("it is split by head")
}
