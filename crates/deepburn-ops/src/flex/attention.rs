//! Self-attention in blocks of query rows.
//!
//! Each head of each sequence is one task, so there are `batch * heads` tasks, and each task runs
//! on one thread. In the backward pass, the heads that share keys and values form one task. Within
//! a head, only the scores of [`QUERY_BLOCK`] queries exist at a time. This follows FlashAttention
//! (Dao et al. 2022), but the keys are not divided into blocks, because a CPU cache holds complete
//! rows of scores.
//!
//! ```text
//! projected, a row per position, positions of a sequence below each other
//!   | q head 0 | q head 1 | ... | k head 0 | k head 1 | ... | v head 0 | v head 1 | ... |
//! output and its gradient
//!   | head 0 | head 1 | ... |
//!
//! scores of a head, causal
//!             keys 0 .. 127    128 .. 255
//! queries 0     | x         |                block 0 multiplies by 128 keys
//!         ..    | x x x     |
//!         128   | x x x x x | x         |    block 1 multiplies by 256 keys
//!         ..    | x x x x x | x x x     |
//! ```
//!
//! # Numerics
//!
//! Scores, weights and sums are f32. In a product of two bf16 operands, the weights and the
//! gradients of the scores are rounded to bf16. A row is shifted by its maximum before the
//! exponentials. A score of NaN or plus infinity makes its row NaN. Masked keys get a weight of
//! exactly 0. Padding must be finite, because 0 times a value that is not finite is NaN.
//!
//! # Memory
//!
//! In the forward pass, a thread holds `128 * positions` f32 scores. In the backward pass, it holds
//! twice this number (three times with a soft cap), and the gradient sums for keys and values,
//! `2 * positions * width` f32. All of this memory is freed when the head is finished. Between the
//! passes only the output and a number per row and head are saved. Memory therefore grows in
//! proportion to the length of a sequence.
//!
//! Keys that no query of a block attends to are not read, so the work of a causal mask is about
//! half of all pairs, and the work of a window or of documents grows in proportion to the length
//! too.

mod score_rows;

use std::ops::Range;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::FloatSlice;
use deepburn_kernels::gemm::{Arithmetic, Matrix, MatrixMut, Product, Threads};
use rayon::prelude::*;

use super::array::{
    OutputArray, arithmetic, contiguous, elements, from_values, is_supported, read, unwritten,
    widen, written,
};
use super::cache;
use crate::attention::dimensions::QUERY_BLOCK;
use crate::attention::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, SelfAttention,
};
use crate::portable;
use score_rows::{
    cap_scores, cap_with_slopes, drop_row, row_product, scale_by_slopes, score_gradient,
    softmax_rows, weighted_rows,
};

/// The columns of the projected matrix.
#[derive(Clone, Copy)]
enum AttentionOperand {
    Queries,
    Keys,
    Values,
}

/// The dimensions of an attention, from the shape of its input.
#[derive(Clone, Copy)]
struct AttentionDims {
    /// The number of sequences.
    batch: usize,
    /// The number of heads of a sequence.
    heads: usize,
    /// The number of heads of its keys and values.
    key_value_heads: usize,
    /// The number of positions of a sequence, which are both queries and keys.
    positions: usize,
    /// The number of columns of a head.
    width: usize,
    /// The factor of the scores, usually `1 / sqrt(width)`.
    scale: f32,
}

impl AttentionDims {
    /// Derives the dimensions from the shape of the projected matrix.
    ///
    /// # Panics
    /// Panics if the rows are not a multiple of the batch, the columns not a multiple of the heads,
    /// or the heads not a multiple of the heads of keys and values.
    fn new(projected: &[usize], attention: &SelfAttention) -> Self {
        let &SelfAttention { batch, heads, key_value_heads, scale, .. } = attention;
        let all = attention.projected_heads();
        let (positions, width) = (projected[0] / batch.max(1), projected[1] / all);
        assert_eq!([batch * positions, all * width], projected, "{attention:?}");
        assert_eq!(heads % key_value_heads, 0, "{attention:?}");
        Self { batch, heads, key_value_heads, positions, width, scale: scale as f32 }
    }

    /// Returns the number of columns of the projected matrix.
    fn projected_row(self) -> usize {
        (self.heads + 2 * self.key_value_heads) * self.width
    }

    /// Returns the number of heads of queries that share a head of keys and values.
    fn group(self) -> usize {
        self.heads / self.key_value_heads
    }

    /// Returns the number of columns of the result: the width of all heads.
    fn row(self) -> usize {
        self.heads * self.width
    }

    /// Returns the blocks of query positions, each of [`QUERY_BLOCK`] positions except for the
    /// last.
    fn blocks(self) -> impl DoubleEndedIterator<Item = Range<usize>> {
        let positions = self.positions;
        (0..positions.div_ceil(QUERY_BLOCK))
            .map(move |block| block * QUERY_BLOCK..positions.min((block + 1) * QUERY_BLOCK))
    }

    /// Returns the offset of the first element of the rows `rows` of a head in the result. `head`
    /// is an index over the heads of all sequences.
    fn place(self, head: usize, rows: &Range<usize>) -> usize {
        let row = head / self.heads * self.positions + rows.start;
        row * self.row() + head % self.heads * self.width
    }

    /// Returns the offset of the first element of the rows `rows` in the projected matrix: of the
    /// queries of a head, or of the keys or values that this head attends to.
    fn place_in(self, operand: AttentionOperand, head: usize, rows: &Range<usize>) -> usize {
        let row = head / self.heads * self.positions + rows.start;
        let (own, shared) = (head % self.heads, head % self.heads / self.group());
        let column = match operand {
            AttentionOperand::Queries => own,
            AttentionOperand::Keys => self.heads + shared,
            AttentionOperand::Values => self.heads + self.key_value_heads + shared,
        };
        row * self.projected_row() + column * self.width
    }

    /// Returns the same rows of the projected matrix. The matrix is strided and not copied.
    fn projected<'a>(
        self,
        all: FloatSlice<'a>,
        head: usize,
        rows: &Range<usize>,
        operand: AttentionOperand,
    ) -> Matrix<'a> {
        Matrix::new(
            all.starting_at(self.place_in(operand, head, rows)),
            rows.len(),
            self.width,
            self.projected_row(),
        )
    }

    /// Returns the rows `rows` of a head in the result or in its gradient.
    fn merged<'a>(self, all: FloatSlice<'a>, head: usize, rows: &Range<usize>) -> Matrix<'a> {
        Matrix::new(all.starting_at(self.place(head, rows)), rows.len(), self.width, self.row())
    }
}

/// The inputs of both passes.
struct Inputs<'a> {
    dims: AttentionDims,
    /// The keys that a query attends to.
    mask: &'a AttentionMask,
    /// The limit of the scores.
    soft_cap: Option<f32>,
    /// Queries, keys and values, `[batch * positions, (heads + 2 * key-value heads) * width]`.
    projected: FloatSlice<'a>,
    /// The arithmetic of all products, from the type of `projected`.
    arithmetic: Arithmetic,
    /// The same in both passes, so that backward drops the same weights.
    dropout: Option<AttentionDropout>,
}

impl Inputs<'_> {
    /// Returns a product that runs on this thread only, because the other threads process other
    /// heads.
    fn product<'a>(&self, left: Matrix<'a>, right: Matrix<'a>) -> Product<'a> {
        Product::new(left, right, self.arithmetic).on(Threads::One)
    }

    /// Returns the keys that a block of queries is multiplied with.
    fn keys(&self, head: usize, rows: &Range<usize>) -> Range<usize> {
        self.mask.keys(head / self.dims.heads, rows, self.dims.positions)
    }

    /// Returns the keys that each of the queries `rows` attends to, counted from the start of
    /// `keys`.
    fn seen(&self, head: usize, rows: &Range<usize>, keys: &Range<usize>) -> Vec<Range<usize>> {
        let AttentionDims { heads, positions, .. } = self.dims;
        let seen = rows.clone().map(|row| self.mask.seen(head / heads, row, positions));
        seen.map(|seen| seen.start - keys.start..seen.end - keys.start).collect()
    }

    /// Applies dropout to the weights of the queries `rows` of a head, or to the gradients with
    /// respect to them.
    fn drop(&self, weights: &mut [f32], head: usize, rows: &Range<usize>, keys: &Range<usize>) {
        let Some(dropout) = self.dropout else { return };
        for (query, weights) in rows.clone().zip(weights.chunks_exact_mut(keys.len())) {
            // The row index is unique in the batch, so every row has its own random numbers.
            let row = dropout.row(head * self.dims.positions + query);
            drop_row(weights, keys.start, row, dropout.factor() as f32);
        }
    }

    /// Writes the scaled scores of the queries `rows`, one row with all `keys` per query. Masked
    /// keys within the block have scores too, which softmax ignores.
    fn scores(&self, out: &mut [f32], head: usize, rows: &Range<usize>, keys: &Range<usize>) {
        let all = keys.len();
        let [queries, keys] = [(rows, AttentionOperand::Queries), (keys, AttentionOperand::Keys)]
            .map(|(rows, operand)| self.dims.projected(self.projected, head, rows, operand));
        let out = MatrixMut::new(out, rows.len(), all, all);
        self.product(queries, keys.transposed()).scaled(self.dims.scale).write_to(out);
    }

    /// Computes one head: writes its columns of `output` and its row of `log_sums`.
    fn forward_head(&self, head: usize, output: OutputArray, log_sums: &mut [f32]) {
        let dims = self.dims;
        // Enough for the block that sees the most keys.
        let mut scratch = unwritten(QUERY_BLOCK.min(dims.positions) * dims.positions);
        for rows in dims.blocks() {
            let seen = self.keys(head, &rows);
            let keys = seen.len();
            let weights = &mut scratch[..rows.len() * keys];
            self.scores(weights, head, &rows, &seen);
            if let Some(cap) = self.soft_cap {
                cap_scores(weights, cap);
            }
            let visible = self.seen(head, &rows, &seen);
            softmax_rows(weights, keys, &visible, &mut log_sums[rows.clone()]);
            // After the log-sums, from which the backward pass recomputes the weights before
            // dropout.
            self.drop(weights, head, &rows, &seen);
            let values = dims.projected(self.projected, head, &seen, AttentionOperand::Values);
            let out = output.at(dims.place(head, &rows));
            // SAFETY: no other thread accesses these rows of this head's columns.
            let out = unsafe { MatrixMut::from_pointer(out, rows.len(), dims.width, dims.row()) };
            self.product(Matrix::new(&weights[..], rows.len(), keys, keys), values).write_to(out);
        }
    }

    /// Computes the gradients of the heads that share the keys and values number `shared`, an index
    /// over all sequences: writes their columns of queries, keys and values in `gradient`.
    fn backward_group(&self, shared: usize, given: &Given<'_>, gradient: OutputArray) {
        let group = self.dims.group();
        let mut scratch = BackwardScratch::new(self.dims, self.soft_cap);
        // One after the other, so that the sums of keys and values have a fixed order.
        for head in shared * group..(shared + 1) * group {
            self.backward_head(head, given, gradient, &mut scratch);
        }
        scratch.store(self.dims, shared * group, gradient);
    }

    /// Recomputes the weights of the queries `rows`, before dropout, and the slopes of a soft cap.
    /// Returns the keys that each query attends to.
    fn recompute_weights(
        &self,
        head: usize,
        rows: &Range<usize>,
        keys: &Range<usize>,
        given: &Given<'_>,
        scratch: &mut BackwardScratch,
    ) -> Vec<Range<usize>> {
        let len = rows.len() * keys.len();
        let weights = &mut scratch.weights[..len];
        self.scores(weights, head, rows, keys);
        if let Some(cap) = self.soft_cap {
            cap_with_slopes(weights, cap, &mut scratch.slopes[..len]);
        }
        let log_sums = &given.log_sums[head * self.dims.positions..][rows.clone()];
        let visible = self.seen(head, rows, keys);
        weighted_rows(weights, keys.len(), &visible, log_sums);
        visible
    }

    /// Computes the gradients of one head: writes its columns of queries in `gradient`, and adds to
    /// the gradients of its keys and values.
    ///
    /// For each block of queries, scores and weights are recomputed. With the weights after
    /// dropout, `q = p m`, and the gradient `dy` of the output:
    ///
    /// ```text
    /// dv += q^T dy                    [keys, width]
    /// dp  = m (dy v^T)                [block, keys]
    /// ds  = p (dp - c)                c = sum(dy y) for each row; times the slope of a soft cap
    /// dq  = scale ds k                [block, width], written once
    /// dk += scale ds^T q              [keys, width]
    /// ```
    ///
    /// The blocks are processed from the last to the first, so the order of summation is fixed.
    fn backward_head(
        &self,
        head: usize,
        given: &Given<'_>,
        gradient: OutputArray,
        scratch: &mut BackwardScratch,
    ) {
        let dims = self.dims;
        for rows in dims.blocks().rev() {
            let seen = self.keys(head, &rows);
            let keys = seen.len();
            let visible = self.recompute_weights(head, &rows, &seen, given, scratch);
            let BackwardScratch {
                weights,
                scores_grad,
                slopes,
                corrections,
                keys_grad,
                values_grad,
            } = &mut *scratch;
            let weights = &mut weights[..rows.len() * keys];
            let scores_grad = &mut scores_grad[..rows.len() * keys];
            let grad = dims.merged(given.grad, head, &rows);
            let values = dims.projected(self.projected, head, &seen, AttentionOperand::Values);
            // The gradient with respect to the weights, `dp`, then with respect to the scores,
            // `ds`.
            let out = MatrixMut::new(scores_grad, rows.len(), keys, keys);
            self.product(grad, values.transposed()).write_to(out);
            self.drop(scores_grad, head, &rows, &seen);
            let corrections = &mut corrections[..rows.len()];
            given.row_products(dims, head, &rows, corrections);
            score_gradient(scores_grad, weights, keys, corrections);
            if self.soft_cap.is_some() {
                scale_by_slopes(scores_grad, slopes, keys, &visible);
            }

            // `score_gradient` needed the weights before dropout. The gradient of the values needs
            // them after it, `q`.
            self.drop(weights, head, &rows, &seen);
            let matrix = |values| Matrix::new(values, rows.len(), keys, keys);
            let [weights, scores_grad] = [&weights[..], &scores_grad[..]].map(matrix);
            let [queries, key_rows] =
                [(&rows, AttentionOperand::Queries), (&seen, AttentionOperand::Keys)]
                    .map(|(rows, operand)| dims.projected(self.projected, head, rows, operand));
            let queries_grad = gradient.at(dims.place_in(AttentionOperand::Queries, head, &rows));
            let (width, row) = (dims.width, dims.projected_row());
            // SAFETY: no other thread accesses these rows of this head's columns.
            let out = unsafe { MatrixMut::from_pointer(queries_grad, rows.len(), width, row) };
            self.product(scores_grad, key_rows).scaled(dims.scale).write_to(out);
            for (sum, product) in [
                (values_grad, self.product(weights.transposed(), grad)),
                (keys_grad, self.product(scores_grad.transposed(), queries).scaled(dims.scale)),
            ] {
                sum.add(&seen, width, product);
            }
        }
    }
}

/// The memory of the backward pass of heads that share their keys and values.
struct BackwardScratch {
    /// `[block, keys]`: scores, then weights.
    weights: Vec<f32>,
    /// `[block, keys]`: gradients with respect to the weights, then to the scores.
    scores_grad: Vec<f32>,
    /// `[block, keys]`: the derivatives of the limited scores. Empty without a soft cap.
    slopes: Vec<f32>,
    /// `sum(dy y)` of each query of the block.
    corrections: [f32; QUERY_BLOCK],
    /// The gradient of the keys.
    keys_grad: RowSums,
    /// The gradient of the values.
    values_grad: RowSums,
}

/// `[positions, width]`: a sum over blocks of queries and over heads, in f32 for every type of the
/// result.
struct RowSums {
    /// The sums of the rows in `begun`. The other rows are not initialized.
    values: Vec<f32>,
    /// The rows that have a sum. They are contiguous, because the blocks of queries are.
    begun: Range<usize>,
}

impl RowSums {
    /// Adds a product of shape `[rows, width]` to the rows `rows`.
    ///
    /// Under a causal mask, only the last block attends to all keys. It runs first and writes the
    /// sums to which the others add.
    fn add(&mut self, rows: &Range<usize>, width: usize, product: Product<'_>) {
        let is_first = self.begun.is_empty();
        if is_first {
            self.begun = rows.clone();
        } else if rows.start < self.begun.start {
            self.values[rows.start * width..self.begun.start * width].fill(0.0);
            self.begun.start = rows.start;
        }
        let values = &mut self.values[rows.start * width..rows.end * width];
        let out = MatrixMut::new(values, rows.len(), width, width);
        if is_first { product.write_to(out) } else { product.add_to(out) }
    }
}

impl BackwardScratch {
    /// Allocates the memory without initializing it. Every block writes its scores before it reads
    /// them.
    fn new(dims: AttentionDims, soft_cap: Option<f32>) -> Self {
        let scores = QUERY_BLOCK.min(dims.positions) * dims.positions;
        let rows = dims.positions * dims.width;
        Self {
            weights: unwritten(scores),
            scores_grad: unwritten(scores),
            slopes: unwritten(soft_cap.map_or(0, |_| scores)),
            corrections: [0.0; QUERY_BLOCK],
            keys_grad: RowSums { values: unwritten(rows), begun: 0..0 },
            values_grad: RowSums { values: unwritten(rows), begun: 0..0 },
        }
    }

    /// Rounds the finished sums to the type of the gradient and writes them to this head's columns
    /// of keys and values.
    fn store(&self, dims: AttentionDims, head: usize, gradient: OutputArray) {
        let mut room = Vec::new();
        for (operand, sums) in [
            (AttentionOperand::Keys, &self.keys_grad),
            (AttentionOperand::Values, &self.values_grad),
        ] {
            // The rows of a head are apart in the gradient, so they are written one at a time.
            for (position, sums) in sums.values.chunks_exact(dims.width.max(1)).enumerate() {
                let start = dims.place_in(operand, head, &(position..position + 1));
                // SAFETY: no other thread accesses this head's columns.
                unsafe {
                    gradient.write(start..start + dims.width, &mut room, |row| {
                        row.copy_from_slice(sums)
                    })
                };
            }
        }
    }
}

/// The values that the backward pass needs in addition to the inputs.
struct Given<'a> {
    /// The gradient of the result, `[batch * positions, heads * width]`.
    grad: FloatSlice<'a>,
    /// The output of the forward pass, with the same shape.
    output: FloatSlice<'a>,
    /// The log-sum-exp of each row of scores, `[batch * heads, positions]`.
    log_sums: &'a [f32],
}

impl Given<'_> {
    /// Writes the dot product of each row of the result with the same row of its gradient to
    /// `products`. It equals the sum of `dp p` over the keys, which softmax's derivative subtracts,
    /// and it costs `width` multiplications instead of `keys`.
    fn row_products(
        &self,
        dims: AttentionDims,
        head: usize,
        rows: &Range<usize>,
        products: &mut [f32],
    ) {
        let [mut grad_room, mut output_room] = [Vec::new(), Vec::new()];
        for (row, product) in rows.clone().zip(products) {
            let start = dims.place(head, &(row..row + 1));
            let part = start..start + dims.width;
            let grad = read(self.grad, part.clone(), &mut grad_room);
            *product = row_product(grad, read(self.output, part, &mut output_room));
        }
    }
}

/// Scores, weights and sums are f32 for 16-bit inputs too, so [`SelfAttention::upcast`] has no
/// effect here.
impl AttentionOps for Flex {
    /// Allocates the result and the log-sums, which are f32 for every input type.
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        if !is_supported(&projected) {
            return portable::attention::forward::<Self>(projected, attention, dropout);
        }
        let projected = contiguous(&projected);
        let inputs = Inputs::new(&projected, attention, dropout);
        let dims = inputs.dims;
        let rows = dims.batch * dims.positions;
        let mut log_sums = unwritten(dims.batch * dims.heads * dims.positions);
        let output = written([rows, dims.row()], projected.dtype(), |output| {
            log_sums
                // rayon panics on a chunk size of 0. Without positions there are no chunks in
                // either case.
                .par_chunks_mut(dims.positions.max(1))
                .enumerate()
                .for_each(|(head, log_sums)| inputs.forward_head(head, output, log_sums));
        });
        let heads = [dims.batch * dims.heads, dims.positions];
        AttentionOutput { output, log_sums: from_values(log_sums, heads, DType::F32) }
    }

    /// Allocates the gradient. `grad` and the output are read in place, in their own types.
    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        if !is_supported(&saved.projected) || !is_supported(&grad) {
            return portable::attention::backward::<Self>(grad, saved, attention);
        }
        let AttentionSaved { projected, output, log_sums, dropout } = saved;
        let [projected, grad, output] = [projected, grad, output].map(|tensor| contiguous(&tensor));
        let inputs = Inputs::new(&projected, attention, dropout);
        let dims = inputs.dims;
        let given =
            Given { grad: elements(&grad), output: elements(&output), log_sums: &widen(&log_sums) };
        written(projected.shape(), projected.dtype(), |gradient| {
            (0..dims.batch * dims.key_value_heads)
                .into_par_iter()
                .for_each(|shared| inputs.backward_group(shared, &given, gradient));
        })
    }

    fn write_to_cache(
        cache: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self> {
        cache::write(cache, rows, start)
    }

    fn attention_over_cache(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        filled: usize,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        cache::attention(queries, [keys, values], filled, attention)
    }
}

impl<'a> Inputs<'a> {
    fn new(
        projected: &'a FlexTensor,
        attention: &'a SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> Self {
        Self {
            dims: AttentionDims::new(&projected.shape(), attention),
            mask: &attention.mask,
            soft_cap: attention.soft_cap.map(|cap| cap as f32),
            projected: elements(projected),
            arithmetic: arithmetic([projected.dtype(); 2]),
            dropout,
        }
    }
}
