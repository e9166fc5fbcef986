//! Self-attention in blocks of query rows, with ops that every backend supports.
//!
//! ```text
//! projected [batch * positions, 3 * width]
//!         split_heads
//! queries, keys, values  [batch, heads, positions, head width]
//!         for each block of 128 queries
//! scores  [batch, heads, block, keys]   f32, causal: keys up to the end of the block
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

use super::{cast, in_f32, primitive, tensor};
use crate::attention::dimensions::{AttentionMask, QUERY_BLOCK, SelfAttention};
use crate::attention::dropout::AttentionDropout;
use crate::attention::saved::{AttentionOutput, AttentionSaved};

/// Queries, keys or values by head, `[batch, heads, positions, head width]`.
type Heads<B> = Tensor<B, 4>;

/// Implements [`AttentionOps::attention_forward`](crate::AttentionOps::attention_forward).
pub fn forward<B: Backend>(
    projected: B::FloatTensorPrimitive,
    attention: &SelfAttention,
    dropout: Option<AttentionDropout>,
) -> AttentionOutput<B> {
    let [queries, keys, values] = split_heads(tensor::<B, 2>(projected), attention);
    let (output, log_sums) = attend(queries, [keys, values], attention, dropout);
    AttentionOutput { output: primitive(merge_heads(output)), log_sums: primitive(log_sums) }
}

/// Returns the attention of `queries` over `keys` and `values`, `[batch * queries, width]`, without
/// dropout. The queries are the last positions.
pub fn over_cache<B: Backend>(
    queries: Heads<B>,
    keys: Heads<B>,
    values: Heads<B>,
    attention: &SelfAttention,
) -> Tensor<B, 2> {
    merge_heads(attend(queries, [keys, values], attention, None).0)
}

/// Returns the output by head, `[batch, heads, queries, head width]`, and the log-sum-exp of each
/// row of scores, `[batch * heads, queries]`.
///
/// With a cache of earlier positions, there are more keys than queries. The queries are then the
/// last positions.
///
/// Each block of queries is computed completely before the next one. The outputs and log-sums of
/// the blocks are concatenated at the end.
fn attend<B: Backend>(
    queries: Heads<B>,
    [keys, values]: [Heads<B>; 2],
    attention: &SelfAttention,
    dropout: Option<AttentionDropout>,
) -> (Heads<B>, Tensor<B, 2>) {
    let [batch, heads, rows, _] = queries.dims();
    let past = keys.dims()[2] - rows;
    let blocks = (0..rows).step_by(QUERY_BLOCK).map(|start| {
        let block = start..rows.min(start + QUERY_BLOCK);
        let visible = attention.mask.keys(past + block.end, past + rows);
        let scores = scores(
            rows_of(&queries, block.clone()),
            rows_of(&keys, 0..visible),
            past + block.start,
            attention,
        );
        let max = scores.clone().max_dim(3);
        // Shifted by the row's maximum, so that no exponential overflows.
        let exponentials = (scores - max.clone()).exp();
        let sums = exponentials.clone().sum_dim(3);
        let log_sums = sums.clone().log() + max;
        // Dropout is applied after normalisation, so the remaining weights sum to 1 only in
        // expectation.
        let weights = drop_weights(exponentials / sums, dropout, &block, rows);
        let output = cast(weights, values.dtype()).matmul(rows_of(&values, 0..visible));
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
pub fn backward<B: Backend>(
    grad: B::FloatTensorPrimitive,
    saved: AttentionSaved<B>,
    attention: &SelfAttention,
) -> B::FloatTensorPrimitive {
    let &SelfAttention { batch, heads, .. } = attention;
    let projected: Tensor<B, 2> = tensor(saved.projected);
    let dtype = projected.dtype();
    let [queries, keys, values] = split_heads(projected, attention);
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
        let seen = attention.mask.keys(block.end, rows);
        let [keys, values] = [&keys, &values].map(|all| rows_of(all, 0..seen));
        let scores = scores(queries.clone(), keys.clone(), start, attention);
        let weights = (scores - rows_of(&log_sums, block.clone())).exp();
        let dropped = cast(drop_weights(weights.clone(), saved.dropout, &block, rows), dtype);
        let value_part = dropped.swap_dims(2, 3).matmul(grad.clone());
        let weights_grad = in_f32(grad.matmul(values.swap_dims(2, 3)));
        let weights_grad = drop_weights(weights_grad, saved.dropout, &block, rows);
        let scores_grad = weights * (weights_grad - rows_of(&corrections, block.clone()));
        let scores_grad = cast(scores_grad * attention.scale, dtype);
        query_grads.push(scores_grad.clone().matmul(keys));
        let key_part = scores_grad.swap_dims(2, 3).matmul(queries);
        // A block contributes only to the keys that it attends to.
        let visible = [0..batch, 0..heads, 0..seen, 0..head_width];
        let add = |sum: Heads<B>, part| {
            let added = sum.clone().slice(visible.clone()) + in_f32(part);
            sum.slice_assign(visible.clone(), added)
        };
        key_grad = add(key_grad, key_part);
        value_grad = add(value_grad, value_part);
    }
    let query_grad = in_f32(Tensor::cat(query_grads, 2));
    let packed = Tensor::cat(vec![query_grad, key_grad, value_grad], 1);
    primitive(cast(merge_heads(packed), dtype))
}

/// Splits `[batch * positions, 3 * width]` into queries, keys and values by head. The results are
/// views where the backend supports them.
fn split_heads<B: Backend>(
    projected: Tensor<B, 2>,
    &SelfAttention { batch, heads, .. }: &SelfAttention,
) -> [Heads<B>; 3] {
    let [rows, width] = projected.dims();
    let by_head = projected
        .reshape([batch, rows / batch.max(1), 3 * heads, width / (3 * heads)])
        .swap_dims(1, 2);
    [0, 1, 2].map(|part| by_head.clone().narrow(1, part * heads, heads))
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

/// Returns the scaled scores `[batch, heads, rows, keys]` in at least f32, with minus infinity for
/// masked keys. The first query is at position `first` of the keys.
///
/// The queries are scaled before the product, which makes overflow in 16-bit products less likely.
fn scores<B: Backend>(
    queries: Heads<B>,
    keys: Heads<B>,
    first: usize,
    attention: &SelfAttention,
) -> Tensor<B, 4> {
    let ([batch, heads, rows, _], visible) = (queries.dims(), keys.dims()[2]);
    let (queries, keys) =
        if attention.upcast { (in_f32(queries), in_f32(keys)) } else { (queries, keys) };
    let scores = in_f32((queries * attention.scale).matmul(keys.swap_dims(2, 3)));
    // The additive mask of one row: 0 for visible keys, minus infinity for the others.
    let bias = |sequence, query| {
        let seen = attention.mask.seen(sequence, query, visible);
        (0..visible).map(move |key| if key < seen { 0.0 } else { f32::NEG_INFINITY })
    };
    let (device, dtype) = (scores.device(), scores.dtype());
    let tensor = |bias: Vec<f32>, shape: [usize; 3]| {
        let bias = Tensor::<B, 3>::from_data(TensorData::new(bias, shape), (&device, DType::F32));
        cast(bias, dtype)
    };
    // Rows with the same mask are merged into one axis, along which the mask is broadcast. These
    // are the heads of all sequences under a causal mask, and all heads and queries of one sequence
    // with padding. A single query under a causal mask attends to all keys and needs no mask.
    let (bias, shape) = match attention.mask {
        AttentionMask::Causal if rows == 1 => return scores,
        AttentionMask::Causal => {
            let bias = (0..rows).flat_map(|row| bias(0, first + row)).collect();
            (tensor(bias, [1, 1, rows * visible]), [1, batch * heads, rows * visible])
        }
        AttentionMask::Lengths(_) => {
            let bias = (0..batch).flat_map(|sequence| bias(sequence, 0)).collect();
            (tensor(bias, [batch, 1, visible]), [batch, heads * rows, visible])
        }
    };
    (scores.reshape(shape) + bias).reshape([batch, heads, rows, visible])
}

/// Applies dropout to the weights `[batch, heads, rows, keys]` of the queries `block` out of
/// `positions`. Returns the weights unchanged if `dropout` is `None`.
///
/// The dropout mask depends only on seed and position. It is computed on the host, with one byte
/// per weight, so both passes and all backends drop the same weights.
fn drop_weights<B: Backend>(
    weights: Tensor<B, 4>,
    dropout: Option<AttentionDropout>,
    block: &Range<usize>,
    positions: usize,
) -> Tensor<B, 4> {
    let Some(dropout) = dropout else { return weights };
    let [batch, heads, rows, visible] = weights.dims();
    let dropped: Vec<bool> = (0..batch * heads)
        .flat_map(|head| block.clone().map(move |query| dropout.row(head * positions + query)))
        .flat_map(|row| (0..visible as u32).map(move |key| row.drops(key)))
        .collect();
    let data = TensorData::new(dropped, [batch, heads, rows, visible]);
    let dropped = Tensor::<B, 4, Bool>::from_data(data, &weights.device());
    weights.mask_fill(dropped, 0.0) * dropout.factor()
}
