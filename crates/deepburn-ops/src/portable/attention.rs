//! Self-attention in blocks of query rows, with ops that every backend supports.
//!
//! ```text
//! projected [batch * positions, (heads + 2 key-value heads) * head width]
//!         split_heads
//! queries                [batch, heads, positions, head width]
//! keys, values           [batch, key-value heads, positions, head width]
//!         repeat_heads
//! queries, keys, values  [batch, heads, positions, head width]
//!         for each block of 128 queries
//! scores  [batch, heads, block, keys]   f32, only the keys that a query of the block attends to
//!         softmax, dropout, times values
//! output  [batch, heads, positions, head width]
//!         merge_heads
//!         [batch * positions, width]
//! ```
//!
//! The largest tensors are the scores of a block: `batch * heads * 128 * positions` elements in at
//! least f32. Several tensors of this size exist at the same time, because each op allocates its
//! result. Attention masks and dropout masks are computed on the host and copied to the device for
//! each block.
//!
//! Masking adds minus infinity to the scores of masked keys. Keys and queries must therefore be
//! finite at masked positions too, because infinity minus infinity is NaN.

use std::ops::Range;

use burn::tensor::{Bool, DType, Tensor, TensorData};
use burn_backend::Backend;

use super::{cast, in_f32, matmul, primitive, tensor};
use crate::attention::dimensions::{AttentionMask, QUERY_BLOCK, SelfAttention};
use crate::attention::dropout::AttentionDropout;
use crate::attention::saved::{AttentionOutput, AttentionSaved};
use crate::matmul::MatmulOps;

/// Queries, keys or values by head, `[batch, heads, positions, head width]`.
type Heads<B> = Tensor<B, 4>;

/// Implements [`AttentionOps::attention_forward`](crate::AttentionOps::attention_forward).
pub fn forward<B: MatmulOps>(
    projected: B::FloatTensorPrimitive,
    attention: &SelfAttention,
    dropout: Option<AttentionDropout>,
) -> AttentionOutput<B> {
    let [queries, keys, values] = split_heads(tensor::<B, 2>(projected), attention);
    let [keys, values] = [keys, values].map(|rows| repeat_heads(rows, attention));
    let (output, log_sums) = attend(queries, [keys, values], attention, dropout);
    AttentionOutput { output: primitive(merge_heads(output)), log_sums: primitive(log_sums) }
}

/// Returns the attention of `queries` over `keys` and `values`, `[batch * queries, width]`, without
/// dropout. The queries are the last positions.
pub(super) fn over_keys<B: MatmulOps>(
    queries: Heads<B>,
    keys_and_values: [Heads<B>; 2],
    attention: &SelfAttention,
) -> Tensor<B, 2> {
    let repeated = keys_and_values.map(|rows| repeat_heads(rows, attention));
    merge_heads(attend(queries, repeated, attention, None).0)
}

/// Returns the output by head, `[batch, heads, queries, head width]`, and the log-sum-exp of each
/// row of scores, `[batch * heads, queries]`.
///
/// With a cache of earlier positions, there are more keys than queries. The queries are then the
/// last positions.
///
/// Each block of queries is computed completely before the next one. The outputs and log-sums of
/// the blocks are concatenated at the end.
fn attend<B: MatmulOps>(
    queries: Heads<B>,
    [keys, values]: [Heads<B>; 2],
    attention: &SelfAttention,
    dropout: Option<AttentionDropout>,
) -> (Heads<B>, Tensor<B, 2>) {
    let [batch, heads, rows, _] = queries.dims();
    let past = keys.dims()[2] - rows;
    let blocks = (0..rows).step_by(QUERY_BLOCK).map(|start| {
        let block = start..rows.min(start + QUERY_BLOCK);
        let own = past + block.start..past + block.end;
        let seen = keys_of_block(attention, &own, past + rows);
        let scores = scores(
            rows_of(&queries, block.clone()),
            rows_of(&keys, seen.clone()),
            &BlockMask { attention, rows: own, seen: seen.clone(), positions: past + rows },
        );
        let max = scores.clone().max_dim(3);
        // Shifted by the row's maximum, so that no exponential overflows.
        let exponentials = (scores - max.clone()).exp();
        let sums = exponentials.clone().sum_dim(3);
        let log_sums = sums.clone().log() + max;
        // Dropout is applied after normalization, so the remaining weights sum to 1 only in
        // expectation.
        let weights = drop_weights(exponentials / sums, dropout, &block, &seen, rows);
        let output = matmul(cast(weights, values.dtype()), rows_of(&values, seen));
        (output, log_sums.reshape([batch * heads, block.len()]))
    });
    let (outputs, log_sums) = blocks.unzip();
    (Tensor::cat(outputs, 2), Tensor::cat(log_sums, 1))
}

/// Implements [`AttentionOps::attention_backward`](crate::AttentionOps::attention_backward).
///
/// The weights are recomputed from the saved log-sums. For each row, let `p` be the weights, `m`
/// the dropout factors, `q = p m` the weights after dropout, and `c = sum(dy y)`. Then
/// `dv = q^T dy` and `ds = p (m (dy v^T) - c)` (Dao et al. 2022, appendix B.2). The gradients of
/// keys and values are sums over the blocks of queries in at least f32, added in the order of the
/// blocks.
pub fn backward<B: MatmulOps>(
    grad: B::FloatTensorPrimitive,
    saved: AttentionSaved<B>,
    attention: &SelfAttention,
) -> B::FloatTensorPrimitive {
    let &SelfAttention { batch, heads, .. } = attention;
    let projected: Tensor<B, 2> = tensor(saved.projected);
    let dtype = projected.dtype();
    let [queries, keys, values] = split_heads(projected, attention);
    let [keys, values] = [keys, values].map(|rows| repeat_heads(rows, attention));
    let by_head = |rows: B::FloatTensorPrimitive| {
        let [all, width] = tensor::<B, 2>(rows.clone()).dims();
        tensor::<B, 2>(rows)
            .reshape([batch, all / batch.max(1), heads, width / heads])
            .swap_dims(1, 2)
    };
    let grad = by_head(grad);
    let corrections = (in_f32(grad.clone()) * in_f32(by_head(saved.output))).sum_dim(3);
    let [_, _, rows, head_width] = queries.dims();
    let log_sums = tensor::<B, 2>(saved.log_sums).reshape([batch, heads, rows, 1]);
    let zeros = in_f32(keys.clone()).zeros_like();
    let (mut key_grad, mut value_grad) = (zeros.clone(), zeros);
    let mut query_grads = Vec::new();
    for start in (0..rows).step_by(QUERY_BLOCK) {
        let block = start..rows.min(start + QUERY_BLOCK);
        let (grad, queries) = (rows_of(&grad, block.clone()), rows_of(&queries, block.clone()));
        let seen = keys_of_block(attention, &block, rows);
        let [keys, values] = [&keys, &values].map(|all| rows_of(all, seen.clone()));
        let mask =
            BlockMask { attention, rows: block.clone(), seen: seen.clone(), positions: rows };
        let (scores, slope) = scores_and_slope(queries.clone(), keys.clone(), &mask);
        let weights = (scores - rows_of(&log_sums, block.clone())).exp();
        let dropped = drop_weights(weights.clone(), saved.dropout, &block, &seen, rows);
        let value_part = matmul(cast(dropped, dtype).swap_dims(2, 3), grad.clone());
        let weights_grad = in_f32(matmul(grad, values.swap_dims(2, 3)));
        // The derivative of dropout is the same mask and factor.
        let weights_grad = drop_weights(weights_grad, saved.dropout, &block, &seen, rows);
        let scores_grad = weights * (weights_grad - rows_of(&corrections, block.clone()));
        let scores_grad = match slope {
            Some(slope) => scores_grad * slope,
            None => scores_grad,
        };
        let scores_grad = cast(scores_grad * attention.scale, dtype);
        query_grads.push(matmul(scores_grad.clone(), keys));
        let key_part = matmul(scores_grad.swap_dims(2, 3), queries);
        // A block contributes only to the keys that it attends to.
        let visible = [0..batch, 0..heads, seen, 0..head_width];
        let add = |sum: Heads<B>, part| {
            let added = sum.clone().slice(visible.clone()) + in_f32(part);
            sum.slice_assign(visible.clone(), added)
        };
        key_grad = add(key_grad, key_part);
        value_grad = add(value_grad, value_part);
    }
    let query_grad = in_f32(Tensor::cat(query_grads, 2));
    let [key_grad, value_grad] = [key_grad, value_grad].map(|grad| sum_heads(grad, attention));
    // The column order of `projected`: queries, keys, values.
    let packed = Tensor::cat(vec![query_grad, key_grad, value_grad], 1);
    primitive(cast(merge_heads(packed), dtype))
}

/// Splits rows of queries, keys and values by head. The results are views where the backend
/// supports them.
fn split_heads<B: Backend>(projected: Tensor<B, 2>, attention: &SelfAttention) -> [Heads<B>; 3] {
    let &SelfAttention { batch, heads, key_value_heads, .. } = attention;
    let ([rows, columns], all) = (projected.dims(), attention.projected_heads());
    let by_head =
        projected.reshape([batch, rows / batch.max(1), all, columns / all]).swap_dims(1, 2);
    let [keys, values] = attention.first_heads();
    [(0, heads), (keys, key_value_heads), (values, key_value_heads)]
        .map(|(first, count)| by_head.clone().narrow(1, first, count))
}

/// Repeats each head of keys or values for all heads of queries that attend to it.
fn repeat_heads<B: Backend>(rows: Heads<B>, attention: &SelfAttention) -> Heads<B> {
    let [batch, own, positions, width] = rows.dims();
    let group = attention.heads / attention.key_value_heads;
    if group == 1 {
        return rows;
    }
    let rows = rows.reshape([batch, own, 1, positions, width]);
    rows.expand([batch, own, group, positions, width]).reshape([
        batch,
        own * group,
        positions,
        width,
    ])
}

/// Adds up the gradients of keys or values of all heads of queries that attend to the same head.
fn sum_heads<B: Backend>(grad: Heads<B>, attention: &SelfAttention) -> Heads<B> {
    let [batch, heads, positions, width] = grad.dims();
    let own = attention.key_value_heads;
    if own == heads {
        return grad;
    }
    let grad = grad.reshape([batch, own, heads / own, positions, width]).sum_dim(2);
    grad.reshape([batch, own, positions, width])
}

/// Joins the heads: `[batch, heads, positions, head width]` becomes
/// `[batch * positions, heads * head width]`.
fn merge_heads<B: Backend>(by_head: Heads<B>) -> Tensor<B, 2> {
    let [batch, heads, rows, head_width] = by_head.dims();
    by_head.swap_dims(1, 2).reshape([batch * rows, heads * head_width])
}

/// Returns the positions `rows` of every head.
///
/// The result is a view on backends with strided tensors, and a copy on others.
fn rows_of<B: Backend>(all: &Tensor<B, 4>, rows: Range<usize>) -> Tensor<B, 4> {
    all.clone().narrow(2, rows.start, rows.len())
}

/// A block of queries, and the keys that it is multiplied with.
struct BlockMask<'a> {
    attention: &'a SelfAttention,
    /// The positions of the queries.
    rows: Range<usize>,
    /// The positions of the keys.
    seen: Range<usize>,
    /// The number of positions of a sequence.
    positions: usize,
}

/// Returns the keys that any of the queries `rows` of any sequence attends to.
fn keys_of_block(attention: &SelfAttention, rows: &Range<usize>, positions: usize) -> Range<usize> {
    let own = (0..attention.batch).map(|sequence| attention.mask.keys(sequence, rows, positions));
    own.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..positions)
}

/// Returns the scaled scores `[batch, heads, rows, keys]` in at least f32, with minus infinity for
/// masked keys.
fn scores<B: MatmulOps>(queries: Heads<B>, keys: Heads<B>, block: &BlockMask<'_>) -> Tensor<B, 4> {
    block.mask(capped(products(queries, keys, block.attention), block.attention))
}

/// Returns the same scores, and the derivative of the soft cap, if there is one.
///
/// The derivative of `cap tanh(x / cap)` is `1 - tanh(x / cap)^2`.
fn scores_and_slope<B: MatmulOps>(
    queries: Heads<B>,
    keys: Heads<B>,
    block: &BlockMask<'_>,
) -> (Tensor<B, 4>, Option<Tensor<B, 4>>) {
    let scores = capped(products(queries, keys, block.attention), block.attention);
    let cap = block.attention.soft_cap;
    let slope = cap.map(|cap| -(scores.clone() / cap).powf_scalar(2.0) + 1.0);
    (block.mask(scores), slope)
}

/// Returns the scaled products of queries and keys.
///
/// The queries are scaled before the product, which makes overflow in 16-bit products less likely.
fn products<B: MatmulOps>(
    queries: Heads<B>,
    keys: Heads<B>,
    attention: &SelfAttention,
) -> Tensor<B, 4> {
    let (queries, keys) =
        if attention.upcast { (in_f32(queries), in_f32(keys)) } else { (queries, keys) };
    in_f32(matmul(queries * attention.scale, keys.swap_dims(2, 3)))
}

//= transformers 5.23.0 models/gemma2/modeling_gemma2.py attn_logit_softcapping
/// Applies the soft cap.
fn capped<B: Backend>(scores: Tensor<B, 4>, attention: &SelfAttention) -> Tensor<B, 4> {
    match attention.soft_cap {
        Some(cap) => (scores / cap).tanh() * cap,
        None => scores,
    }
}

impl BlockMask<'_> {
    /// Adds minus infinity to the scores of masked keys.
    fn mask<B: Backend>(&self, scores: Tensor<B, 4>) -> Tensor<B, 4> {
        let Self { attention: SelfAttention { mask, .. }, rows, seen, positions } = self;
        let [batch, heads, queries, keys] = scores.dims();
        // The additive mask of one row: 0 for visible keys, minus infinity for the others.
        let bias = |sequence, query| {
            let visible = mask.seen(sequence, query, *positions);
            seen.clone()
                .map(move |key| if visible.contains(&key) { 0.0 } else { f32::NEG_INFINITY })
        };
        // Rows with the same mask are merged into one axis, along which the mask is broadcast.
        // These are the heads of all sequences under a mask that is the same for all of them, the
        // heads of a sequence under another mask, and all heads and queries of one sequence with
        // padding. A single query under a causal mask attends to all keys and needs no mask.
        let (bias, mask_shape, shape): (Vec<f32>, _, _) = match mask {
            AttentionMask::Causal if queries == 1 => return scores,
            AttentionMask::Causal | AttentionMask::Window(_) => (
                rows.clone().flat_map(|row| bias(0, row)).collect(),
                [1, 1, queries * keys],
                [1, batch * heads, queries * keys],
            ),
            AttentionMask::Since(_) => (
                (0..batch).flat_map(|it| rows.clone().flat_map(move |row| bias(it, row))).collect(),
                [batch, 1, queries * keys],
                [batch, heads, queries * keys],
            ),
            AttentionMask::Lengths(_) => (
                (0..batch).flat_map(|sequence| bias(sequence, 0)).collect(),
                [batch, 1, keys],
                [batch, heads * queries, keys],
            ),
        };
        let (device, dtype) = (scores.device(), scores.dtype());
        let bias = TensorData::new(bias, mask_shape);
        let bias = cast(Tensor::<B, 3>::from_data(bias, (&device, DType::F32)), dtype);
        (scores.reshape(shape) + bias).reshape([batch, heads, queries, keys])
    }
}

/// Applies dropout to the weights `[batch, heads, rows, keys]` of the queries `block` and the keys
/// `seen` out of `positions`. Returns the weights unchanged if `dropout` is `None`.
///
/// The dropout mask depends only on seed and position. It is computed on the host, with one byte
/// per weight, so both passes and all backends drop the same weights.
fn drop_weights<B: Backend>(
    weights: Tensor<B, 4>,
    dropout: Option<AttentionDropout>,
    block: &Range<usize>,
    seen: &Range<usize>,
    positions: usize,
) -> Tensor<B, 4> {
    let Some(dropout) = dropout else { return weights };
    let [batch, heads, rows, visible] = weights.dims();
    let dropped: Vec<bool> = (0..batch * heads)
        .flat_map(|head| block.clone().map(move |query| dropout.row(head * positions + query)))
        .flat_map(|row| seen.clone().map(move |key| row.drops(key as u32)))
        .collect();
    let data = TensorData::new(dropped, [batch, heads, rows, visible]);
    let dropped = Tensor::<B, 4, Bool>::from_data(data, &weights.device());
    weights.mask_fill(dropped, 0.0) * dropout.factor()
}
