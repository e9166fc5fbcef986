//! Self-attention: a head of a sequence is one piece of work, done block of queries by block.

use std::borrow::Cow;
use std::ops::Range;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::Flex;
use rayon::prelude::*;

use super::array::{from_values, is_supported, unwritten, widen};
use super::product::{Matrix, MatrixMut, Onto, Threads, multiply};
use super::vector::{combine, dot, exp, max, vectorised};
use crate::attention::{
    AttentionDropout, AttentionOps, AttentionOutput, AttentionSaved, DropoutRow, QUERY_BLOCK,
    Reach, SelfAttention,
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
    /// Products of rows of two matrices with rows `stride` apart.
    fn row_products(left: &[f32], right: &[f32], shape: [usize; 2], stride: usize, out: &mut [f32]) {
        let [rows, columns] = shape;
        for (row, out) in out.iter_mut().enumerate().take(rows) {
            let row = row * stride..row * stride + columns;
            *out = dot(&left[row.clone()], &right[row]);
        }
    }
}

/// The extent of the work.
#[derive(Clone, Copy)]
struct Extent {
    batch: usize,
    heads: usize,
    positions: usize,
    /// Of a head.
    width: usize,
    scale: f32,
}

impl Extent {
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
        all: &'a [f32],
        head: usize,
        rows: &Range<usize>,
        part: usize,
    ) -> Matrix<'a> {
        let start = self.place(head, rows, part, 3);
        Matrix::new(&all[start..], rows.len(), self.width, 3 * self.row())
    }

    /// Such rows of the result or of its gradient.
    fn merged<'a>(self, all: &'a [f32], head: usize, rows: &Range<usize>) -> Matrix<'a> {
        let start = self.place(head, rows, 0, 1);
        Matrix::new(&all[start..], rows.len(), self.width, self.row())
    }
}

/// A matrix of which each head writes its own columns.
#[derive(Clone, Copy)]
struct Columns {
    values: *mut f32,
    len: usize,
    stride: usize,
}

// SAFETY: heads write disjoint elements; see `block`.
unsafe impl Send for Columns {}
// SAFETY: as above.
unsafe impl Sync for Columns {}

impl Columns {
    fn new(values: &mut [f32], stride: usize) -> Self {
        Self { values: values.as_mut_ptr(), len: values.len(), stride }
    }

    /// `rows` rows of `width` elements from element `start` on.
    ///
    /// # Safety
    /// The matrix is alive, and nobody else uses these elements while the result lives.
    unsafe fn block<'a>(self, start: usize, rows: usize, width: usize) -> MatrixMut<'a> {
        assert!(rows == 0 || start + (rows - 1) * self.stride + width <= self.len);
        // SAFETY: inside of the matrix as just checked; the rest is the caller's promise.
        unsafe { MatrixMut::from_pointer(self.values.add(start), rows, width, self.stride) }
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
    extent: Extent,
    reach: &'a Reach,
    projected: Cow<'a, [f32]>,
    dropout: Option<AttentionDropout>,
}

impl Inputs<'_> {
    /// Keys that the queries `rows` have to do with.
    fn keys(&self, rows: &Range<usize>) -> usize {
        self.reach.keys(rows.end, self.extent.positions)
    }

    /// Keys that the first of the queries `rows` of a head sees, and how many more each next one.
    fn seen(&self, head: usize, rows: &Range<usize>) -> (usize, usize) {
        let Extent { heads, positions, .. } = self.extent;
        let visible = self.reach.seen(head / heads, rows.start, positions);
        (visible, usize::from(*self.reach == Reach::Causal))
    }

    /// Drops some of the weights, or of the gradients by them, of the queries `rows` of a head.
    fn drop(&self, weights: &mut [f32], head: usize, rows: &Range<usize>) {
        let Some(dropout) = self.dropout else { return };
        let keys = weights.len() / rows.len();
        for (query, weights) in rows.clone().zip(weights.chunks_exact_mut(keys)) {
            let row = dropout.row(head * self.extent.positions + query);
            drop_row(weights, row, dropout.factor() as f32);
        }
    }

    /// Writes the scaled scores of the queries `rows` and all keys they have to do with.
    fn scores(&self, out: &mut [f32], head: usize, rows: &Range<usize>) {
        let all = self.keys(rows);
        let [queries, keys] = [(rows, 0), (&(0..all), 1)]
            .map(|(rows, part)| self.extent.projected(&self.projected, head, rows, part));
        let out = MatrixMut::new(out, rows.len(), all, all);
        let scale = self.extent.scale;
        multiply(out, Onto::Nothing, queries, keys.transposed(), scale, Threads::One);
    }

    fn forward_head(&self, head: usize, output: Columns, log_sums: &mut [f32]) {
        let extent = self.extent;
        let mut scratch = unwritten(QUERY_BLOCK.min(extent.positions) * extent.positions);
        for rows in extent.blocks() {
            let keys = self.keys(&rows);
            let weights = &mut scratch[..rows.len() * keys];
            self.scores(weights, head, &rows);
            let (visible, more) = self.seen(head, &rows);
            softmax_rows(weights, keys, visible, more, &mut log_sums[rows.clone()]);
            self.drop(weights, head, &rows);
            let values = extent.projected(&self.projected, head, &(0..keys), 2);
            let start = extent.place(head, &rows, 0, 1);
            // SAFETY: these rows of this head's columns are written by nobody else.
            let out = unsafe { output.block(start, rows.len(), extent.width) };
            let weights = Matrix::new(weights, rows.len(), keys, keys);
            multiply(out, Onto::Nothing, weights, values, 1.0, Threads::One);
        }
    }

    fn backward_head(&self, head: usize, given: &Given<'_>, gradient: Columns) {
        let extent = self.extent;
        let room = QUERY_BLOCK.min(extent.positions) * extent.positions;
        let [mut weights, mut scores_grad] = [unwritten(room), unwritten(room)];
        let mut corrections = [0.0; QUERY_BLOCK];
        // The last block sees all keys, so it writes what the others add to.
        for rows in extent.blocks().rev() {
            let keys = self.keys(&rows);
            let onto = if rows.end == extent.positions { Onto::Nothing } else { Onto::Sum };
            let place = |rows: &Range<usize>, part| {
                let start = extent.place(head, rows, part, 3);
                // SAFETY: these columns of the gradient are this head's alone, and each block is
                // let go of before the next is made.
                unsafe { gradient.block(start, rows.len(), extent.width) }
            };
            let weights = &mut weights[..rows.len() * keys];
            let scores_grad = &mut scores_grad[..rows.len() * keys];
            let grad = extent.merged(given.grad, head, &rows);
            let values = extent.projected(&self.projected, head, &(0..keys), 2);
            self.scores(weights, head, &rows);
            let log_sums = &given.log_sums[head * extent.positions..][rows.clone()];
            let (visible, more) = self.seen(head, &rows);
            weigh_rows(weights, keys, visible, more, log_sums);

            let out = MatrixMut::new(scores_grad, rows.len(), keys, keys);
            multiply(out, Onto::Nothing, grad, values.transposed(), 1.0, Threads::One);
            self.drop(scores_grad, head, &rows);
            let start = extent.place(head, &rows, 0, 1);
            let shape = [rows.len(), extent.width];
            let corrections = &mut corrections[..rows.len()];
            row_products(
                &given.grad[start..],
                &given.output[start..],
                shape,
                extent.row(),
                corrections,
            );
            score_gradient(scores_grad, weights, keys, corrections);

            self.drop(weights, head, &rows);
            let matrix = |values| Matrix::new(values, rows.len(), keys, keys);
            let [weights, scores_grad] = [matrix(weights), matrix(scores_grad)];
            let all = 0..keys;
            multiply(place(&all, 2), onto, weights.transposed(), grad, 1.0, Threads::One);
            let [queries, keys] = [(&rows, 0), (&all, 1)]
                .map(|(rows, part)| extent.projected(&self.projected, head, rows, part));
            let scale = extent.scale;
            multiply(place(&rows, 0), Onto::Nothing, scores_grad, keys, scale, Threads::One);
            multiply(place(&all, 1), onto, scores_grad.transposed(), queries, scale, Threads::One);
        }
    }
}

/// What backward is given besides the inputs.
struct Given<'a> {
    grad: &'a [f32],
    output: &'a [f32],
    log_sums: &'a [f32],
}

/// Products are in f32 also for 16-bit inputs, which makes upcasting the same as not upcasting.
impl AttentionOps for Flex {
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        if !is_supported(&projected) {
            return portable::attention::forward::<Self>(projected, attention, dropout);
        }
        let extent = Extent::new(&projected.shape(), attention);
        let inputs =
            Inputs { extent, reach: &attention.reach, projected: widen(&projected), dropout };
        let rows = extent.batch * extent.positions;
        let mut output = unwritten(rows * extent.row());
        let mut log_sums = unwritten(extent.batch * extent.heads * extent.positions);
        let columns = Columns::new(&mut output, extent.row());
        log_sums
            .par_chunks_mut(extent.positions.max(1))
            .enumerate()
            .for_each(|(head, log_sums)| inputs.forward_head(head, columns, log_sums));
        let heads = [extent.batch * extent.heads, extent.positions];
        AttentionOutput {
            output: from_values(output, [rows, extent.row()], projected.dtype()),
            log_sums: from_values(log_sums, heads, DType::F32),
        }
    }

    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        let AttentionSaved { projected, output, log_sums, dropout } = saved;
        if !is_supported(&projected) {
            let saved = AttentionSaved { projected, output, log_sums, dropout };
            return portable::attention::backward::<Self>(grad, saved, attention);
        }
        let extent = Extent::new(&projected.shape(), attention);
        let inputs =
            Inputs { extent, reach: &attention.reach, projected: widen(&projected), dropout };
        let (grad, output, log_sums) = (widen(&grad), widen(&output), widen(&log_sums));
        let given = Given { grad: &grad, output: &output, log_sums: &log_sums };
        let mut gradient = unwritten(inputs.projected.len());
        let columns = Columns::new(&mut gradient, 3 * extent.row());
        (0..extent.batch * extent.heads)
            .into_par_iter()
            .for_each(|head| inputs.backward_head(head, &given, columns));
        from_values(gradient, projected.shape(), projected.dtype())
    }
}
