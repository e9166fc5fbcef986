//! Self-attention: a head of a sequence is one piece of work, done block of queries by block.

use std::ops::Range;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::FloatSlice;
use deepburn_kernels::gemm::{Arithmetic, Matrix, MatrixMut, Product, Threads};
use rayon::prelude::*;

use super::array::{
    Output, arithmetic, contiguous, elements, from_values, is_supported, read, unwritten, widen,
    written,
};
use super::vector::{combine, dot, exp, max, vectorised};
use crate::attention::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, DropoutRow,
    QUERY_BLOCK, SelfAttention,
};
use crate::portable;

vectorised! {
    /// Turns the scores of a block of queries, the first of which sees `visible` keys and each later
    /// one `more`, into weights; 0 for keys that are not seen.
    fn softmax_rows(
        scores: &mut [f32],
        keys: usize,
        visible: usize,
        more: usize,
        log_sums: &mut [f32],
    ) {
        let rows = scores.chunks_exact_mut(keys).zip(log_sums).enumerate();
        for (query, (row, log_sum)) in rows {
            let (seen, unseen) = row.split_at_mut(visible + query * more);
            let largest = max(seen);
            for score in seen.iter_mut() {
                *score = exp(*score - largest);
            }
            let sum = combine(seen.len(), 0.0, |i| seen[i], |a, b| a + b);
            let factor = 1.0 / sum;
            for weight in seen.iter_mut() {
                *weight *= factor;
            }
            unseen.fill(0.0);
            *log_sum = largest + sum.ln();
        }
    }
}

vectorised! {
    /// Turns scores into weights with the logarithms of their sums.
    fn weigh_rows(
        scores: &mut [f32],
        keys: usize,
        visible: usize,
        more: usize,
        log_sums: &[f32],
    ) {
        let rows = scores.chunks_exact_mut(keys).zip(log_sums).enumerate();
        for (query, (row, log_sum)) in rows {
            let (seen, unseen) = row.split_at_mut(visible + query * more);
            for score in seen {
                *score = exp(*score - log_sum);
            }
            unseen.fill(0.0);
        }
    }
}

vectorised! {
    /// Turns the gradient by weights into the gradient by scores: `p (g - c)`.
    fn score_gradient(grad: &mut [f32], weights: &[f32], keys: usize, corrections: &[f32]) {
        let rows = grad.chunks_exact_mut(keys).zip(weights.chunks_exact(keys)).zip(corrections);
        for ((grad, weights), correction) in rows {
            for (grad, weight) in grad.iter_mut().zip(weights) {
                *grad = weight * (*grad - correction);
            }
        }
    }
}

vectorised! {
    fn row_product(left: &[f32], right: &[f32]) -> f32 {
        dot(left, right)
    }
}

/// The dims of the work.
#[derive(Clone, Copy)]
struct AttentionDims {
    batch: usize,
    heads: usize,
    positions: usize,
    /// Of a head.
    width: usize,
    scale: f32,
}

impl AttentionDims {
    fn new(projected: &[usize], attention: &SelfAttention) -> Self {
        let &SelfAttention { batch, heads, scale, .. } = attention;
        let (positions, width) = (projected[0] / batch.max(1), projected[1] / (3 * heads));
        assert_eq!([batch * positions, 3 * heads * width], projected, "{attention:?}");
        Self { batch, heads, positions, width, scale: scale as f32 }
    }

    /// Elements of a row of the result.
    fn row(self) -> usize {
        self.heads * self.width
    }

    fn blocks(self) -> impl DoubleEndedIterator<Item = Range<usize>> {
        let positions = self.positions;
        (0..positions.div_ceil(QUERY_BLOCK))
            .map(move |block| block * QUERY_BLOCK..positions.min((block + 1) * QUERY_BLOCK))
    }

    /// Rows `rows` of head number `head`, counted over all sequences, in a matrix that holds the
    /// heads of `parts` things side by side: of thing number `part`.
    fn place(self, head: usize, rows: &Range<usize>, part: usize, parts: usize) -> usize {
        let row = head / self.heads * self.positions + rows.start;
        (row * parts + part) * self.row() + head % self.heads * self.width
    }

    /// Such rows of the matrix of queries (0), keys (1) and values (2).
    fn projected<'a>(
        self,
        all: FloatSlice<'a>,
        head: usize,
        rows: &Range<usize>,
        part: usize,
    ) -> Matrix<'a> {
        Matrix::new(
            all.starting_at(self.place(head, rows, part, 3)),
            rows.len(),
            self.width,
            3 * self.row(),
        )
    }

    /// Such rows of the result or of its gradient.
    fn merged<'a>(self, all: FloatSlice<'a>, head: usize, rows: &Range<usize>) -> Matrix<'a> {
        Matrix::new(
            all.starting_at(self.place(head, rows, 0, 1)),
            rows.len(),
            self.width,
            self.row(),
        )
    }
}

vectorised! {
    /// Multiplies the weights of a query by 0 where they are dropped, else by `kept`.
    fn drop_row(weights: &mut [f32], row: DropoutRow, kept: f32) {
        for (key, weight) in weights.iter_mut().enumerate() {
            *weight *= if row.drops(key as u32) { 0.0 } else { kept };
        }
    }
}

/// What the work reads.
struct Inputs<'a> {
    dims: AttentionDims,
    mask: &'a AttentionMask,
    projected: FloatSlice<'a>,
    arithmetic: Arithmetic,
    dropout: Option<AttentionDropout>,
}

impl Inputs<'_> {
    /// A product that this thread computes, which is one of many.
    fn product<'a>(&self, left: Matrix<'a>, right: Matrix<'a>) -> Product<'a> {
        Product::new(left, right, self.arithmetic).on(Threads::One)
    }

    /// Keys that the queries `rows` have to do with.
    fn keys(&self, rows: &Range<usize>) -> usize {
        self.mask.keys(rows.end, self.dims.positions)
    }

    /// Keys that the first of the queries `rows` of a head sees, and how many more each next one.
    fn seen(&self, head: usize, rows: &Range<usize>) -> (usize, usize) {
        let AttentionDims { heads, positions, .. } = self.dims;
        let visible = self.mask.seen(head / heads, rows.start, positions);
        (visible, usize::from(*self.mask == AttentionMask::Causal))
    }

    /// Drops some of the weights, or of the gradients by them, of the queries `rows` of a head.
    fn drop(&self, weights: &mut [f32], head: usize, rows: &Range<usize>) {
        let Some(dropout) = self.dropout else { return };
        let keys = weights.len() / rows.len();
        for (query, weights) in rows.clone().zip(weights.chunks_exact_mut(keys)) {
            let row = dropout.row(head * self.dims.positions + query);
            drop_row(weights, row, dropout.factor() as f32);
        }
    }

    /// Writes the scaled scores of the queries `rows` and all keys they have to do with.
    fn scores(&self, out: &mut [f32], head: usize, rows: &Range<usize>) {
        let all = self.keys(rows);
        let [queries, keys] = [(rows, 0), (&(0..all), 1)]
            .map(|(rows, part)| self.dims.projected(self.projected, head, rows, part));
        let out = MatrixMut::new(out, rows.len(), all, all);
        self.product(queries, keys.transposed()).scaled(self.dims.scale).write_to(out);
    }

    fn forward_head(&self, head: usize, output: Output, log_sums: &mut [f32]) {
        let dims = self.dims;
        let mut scratch = unwritten(QUERY_BLOCK.min(dims.positions) * dims.positions);
        for rows in dims.blocks() {
            let keys = self.keys(&rows);
            let weights = &mut scratch[..rows.len() * keys];
            self.scores(weights, head, &rows);
            let (visible, more) = self.seen(head, &rows);
            softmax_rows(weights, keys, visible, more, &mut log_sums[rows.clone()]);
            self.drop(weights, head, &rows);
            let values = dims.projected(self.projected, head, &(0..keys), 2);
            let out = output.at(dims.place(head, &rows, 0, 1));
            // SAFETY: these rows of this head's columns are written by nobody else.
            let out = unsafe { MatrixMut::from_pointer(out, rows.len(), dims.width, dims.row()) };
            self.product(Matrix::new(&weights[..], rows.len(), keys, keys), values).write_to(out);
        }
    }

    fn backward_head(&self, head: usize, given: &Given<'_>, gradient: Output) {
        let dims = self.dims;
        let mut scratch = BackwardScratch::new(dims);
        // The last block sees all keys, so it writes what the others add to.
        for rows in dims.blocks().rev() {
            let keys = self.keys(&rows);
            let BackwardScratch {
                weights, scores_grad, corrections, keys_grad, values_grad, ..
            } = &mut scratch;
            let weights = &mut weights[..rows.len() * keys];
            let scores_grad = &mut scores_grad[..rows.len() * keys];
            let grad = dims.merged(given.grad, head, &rows);
            let values = dims.projected(self.projected, head, &(0..keys), 2);
            self.scores(weights, head, &rows);
            let log_sums = &given.log_sums[head * dims.positions..][rows.clone()];
            let (visible, more) = self.seen(head, &rows);
            weigh_rows(weights, keys, visible, more, log_sums);

            let out = MatrixMut::new(scores_grad, rows.len(), keys, keys);
            self.product(grad, values.transposed()).write_to(out);
            self.drop(scores_grad, head, &rows);
            let corrections = &mut corrections[..rows.len()];
            given.row_products(dims, head, &rows, corrections);
            score_gradient(scores_grad, weights, keys, corrections);

            self.drop(weights, head, &rows);
            let matrix = |values| Matrix::new(values, rows.len(), keys, keys);
            let [weights, scores_grad] = [&weights[..], &scores_grad[..]].map(matrix);
            let (all, width) = (0..keys, dims.width);
            let [queries, key_rows] = [(&rows, 0), (&all, 1)]
                .map(|(rows, part)| dims.projected(self.projected, head, rows, part));
            let queries_grad = gradient.at(dims.place(head, &rows, 0, 3));
            // SAFETY: these rows of this head's columns are written by nobody else.
            let out =
                unsafe { MatrixMut::from_pointer(queries_grad, rows.len(), width, 3 * dims.row()) };
            self.product(scores_grad, key_rows).scaled(dims.scale).write_to(out);
            let is_first = rows.end == dims.positions;
            let products = [
                (values_grad, self.product(weights.transposed(), grad)),
                (keys_grad, self.product(scores_grad.transposed(), queries).scaled(dims.scale)),
            ];
            for (sum, product) in products {
                let out = MatrixMut::new(sum, keys, width, width);
                if is_first { product.write_to(out) } else { product.add_to(out) }
            }
        }
        scratch.store(dims, head, gradient);
    }
}

/// Memory of one head's backward pass.
struct BackwardScratch {
    /// Of a block of queries and all keys.
    weights: Vec<f32>,
    scores_grad: Vec<f32>,
    corrections: [f32; QUERY_BLOCK],
    /// `[positions, width]`: sums over blocks of queries, in f32 whatever the type of the result.
    keys_grad: Vec<f32>,
    values_grad: Vec<f32>,
}

impl BackwardScratch {
    fn new(dims: AttentionDims) -> Self {
        let scores = QUERY_BLOCK.min(dims.positions) * dims.positions;
        let rows = dims.positions * dims.width;
        Self {
            weights: unwritten(scores),
            scores_grad: unwritten(scores),
            corrections: [0.0; QUERY_BLOCK],
            keys_grad: unwritten(rows),
            values_grad: unwritten(rows),
        }
    }

    /// Writes the finished sums to this head's columns of the gradient.
    fn store(&self, dims: AttentionDims, head: usize, gradient: Output) {
        let mut room = Vec::new();
        for (part, sums) in [(1, &self.keys_grad), (2, &self.values_grad)] {
            for (position, sums) in sums.chunks_exact(dims.width.max(1)).enumerate() {
                let start = dims.place(head, &(position..position + 1), part, 3);
                // SAFETY: this head's columns are written by nobody else.
                unsafe {
                    gradient.write(start..start + dims.width, &mut room, |row| {
                        row.copy_from_slice(sums)
                    })
                };
            }
        }
    }
}

/// What backward is given besides the inputs.
struct Given<'a> {
    grad: FloatSlice<'a>,
    output: FloatSlice<'a>,
    log_sums: &'a [f32],
}

impl Given<'_> {
    /// Products of the rows of the result and of its gradient.
    fn row_products(
        &self,
        dims: AttentionDims,
        head: usize,
        rows: &Range<usize>,
        products: &mut [f32],
    ) {
        let [mut grad_room, mut output_room] = [Vec::new(), Vec::new()];
        for (row, product) in rows.clone().zip(products) {
            let start = dims.place(head, &(row..row + 1), 0, 1);
            let part = start..start + dims.width;
            let grad = read(self.grad, part.clone(), &mut grad_room);
            *product = row_product(grad, read(self.output, part, &mut output_room));
        }
    }
}

/// Scores, weights and sums are in f32 also for 16-bit inputs, which makes upcasting the same as not upcasting. In the
/// products bf16 operands stay bf16, and weights are rounded to it.
impl AttentionOps for Flex {
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
                .par_chunks_mut(dims.positions.max(1))
                .enumerate()
                .for_each(|(head, log_sums)| inputs.forward_head(head, output, log_sums));
        });
        let heads = [dims.batch * dims.heads, dims.positions];
        AttentionOutput { output, log_sums: from_values(log_sums, heads, DType::F32) }
    }

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
            (0..dims.batch * dims.heads)
                .into_par_iter()
                .for_each(|head| inputs.backward_head(head, &given, gradient));
        })
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
            projected: elements(projected),
            arithmetic: arithmetic([projected.dtype(); 2]),
            dropout,
        }
    }
}
