//! The backward pass of attention.
//!
//! A task is up to [`PART_BLOCKS`] blocks of queries of a head. It writes the gradients of its
//! queries, and sums the gradients of its keys and values. The tasks that share keys and values are
//! all blocks of a group of heads. Their sums are added in a binary tree. The tree follows from the
//! sizes alone, so the result has the same bits on any number of threads, and a thread holds at
//! most one sum, `2 * keys * width` f32, for each level of the tree.
//!
//! ```text
//! a group of two heads with eight blocks each
//!   head 0, blocks 0..4   head 0, blocks 4..8   head 1, blocks 0..4   head 1, blocks 4..8
//!            |                     |                     |                     |
//!            +----------+----------+                     +----------+----------+
//!                       +---------------------+---------------------+
//!                             gradients of the keys and values
//! ```

use std::ops::Range;

use deepburn_kernels::FloatSlice;
use deepburn_kernels::gemm::{Matrix, MatrixMut};

use super::row_sums::{RowSums, joined};
use super::score_rows::{
    cap_with_slopes, row_product, scale_by_slopes, score_gradient, weighted_rows,
};
use super::{AttentionDims, AttentionOperand, Inputs, KEY_BLOCK, key_blocks};
use crate::attention::dimensions::QUERY_BLOCK;
use crate::flex::array::{OutputArray, read, unwritten};

/// The number of blocks of queries that a task of the backward pass processes: enough for the sums
/// of two parts to cost little beside their products.
const PART_BLOCKS: usize = 4;

/// Consecutive blocks of queries of a head, whose gradients one task computes.
struct BackwardPart {
    /// An index over the heads of all sequences.
    head: usize,
    blocks: Range<usize>,
}

/// The values that the backward pass needs in addition to the inputs.
pub(super) struct Given<'a> {
    /// The gradient of the result, `[batch * positions, heads * width]`.
    pub(super) grad: FloatSlice<'a>,
    /// The output of the forward pass, with the same shape.
    pub(super) output: FloatSlice<'a>,
    /// The log-sum-exp of each row of scores, `[batch * heads, positions]`.
    pub(super) log_sums: &'a [f32],
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

impl AttentionDims {
    /// Returns the parts of the backward pass of the heads that share the keys and values number
    /// `shared`, an index over all sequences.
    fn parts(self, shared: usize) -> Vec<BackwardPart> {
        let heads = shared * self.group()..(shared + 1) * self.group();
        let parts = heads.flat_map(|head| {
            (0..self.blocks()).step_by(PART_BLOCKS).map(move |first| BackwardPart {
                head,
                blocks: first..self.blocks().min(first + PART_BLOCKS),
            })
        });
        parts.collect()
    }

    /// Rounds `values`, `[rows, width]`, to the type of the gradient, and writes them to the
    /// columns of an operand of a head.
    fn store_rows(
        self,
        operand: AttentionOperand,
        head: usize,
        rows: &Range<usize>,
        values: &[f32],
        gradient: OutputArray,
    ) {
        let mut room = Vec::new();
        // The rows of a head are apart in the gradient, so they are written one at a time.
        for (row, values) in rows.clone().zip(values.chunks_exact(self.width.max(1))) {
            let start = self.place_in(operand, head, &(row..row + 1));
            // SAFETY: no other thread accesses these rows of this head's columns.
            unsafe {
                gradient
                    .write(start..start + self.width, &mut room, |row| row.copy_from_slice(values))
            };
        }
    }
}

impl Inputs<'_> {
    /// Computes the gradients of the heads that share the keys and values number `shared`, an index
    /// over all sequences: writes their columns of queries, keys and values in `gradient`.
    pub(super) fn backward_group(&self, shared: usize, given: &Given<'_>, gradient: OutputArray) {
        let parts = self.dims.parts(shared);
        // Without positions there is no part.
        if !parts.is_empty() {
            let sums = self.backward_parts(&parts, given, gradient);
            sums.store(self.dims, shared * self.dims.group(), gradient);
        }
    }

    /// Computes the gradients of the queries of `parts`, and returns the sums of the gradients of
    /// the keys and values. Halves of the parts run on two threads where a thread is idle.
    fn backward_parts(
        &self,
        parts: &[BackwardPart],
        given: &Given<'_>,
        gradient: OutputArray,
    ) -> BackwardSums {
        if let [part] = parts {
            return self.backward_part(part, given, gradient);
        }
        let (first, last) = parts.split_at(parts.len() / 2);
        let (first, last) = rayon::join(
            || self.backward_parts(first, given, gradient),
            || self.backward_parts(last, given, gradient),
        );
        first.plus(last, self.dims.width)
    }

    /// Computes the gradients of a part: writes the gradients of its queries to `gradient`, and
    /// returns the gradients of its keys and values.
    ///
    /// The blocks of queries are processed from the last to the first, and their keys too, so the
    /// order of summation is fixed.
    fn backward_part(
        &self,
        part: &BackwardPart,
        given: &Given<'_>,
        gradient: OutputArray,
    ) -> BackwardSums {
        let keys = part.blocks.clone().map(|block| self.keys(part.head, &self.dims.block(block)));
        let keys = keys.reduce(joined).expect("a part has a block");
        let mut scratch = BackwardScratch::new(self.dims, keys.len(), self.soft_cap);
        let mut sums = BackwardSums::new(&keys, self.dims.width);
        for block in part.blocks.clone().rev() {
            let rows = self.dims.block(block);
            self.backward_block(part.head, &rows, given, gradient, &mut scratch, &mut sums);
        }
        sums
    }

    /// Computes the gradients of a block of queries: writes their own, and adds the gradients of
    /// their keys and values to `sums`. With the weights `p`, the weights after dropout, `q = p m`,
    /// and the gradient `dy` of the output:
    ///
    /// ```text
    /// dv += q^T dy                    [keys, width]
    /// dp  = m (dy v^T)                [block, keys]
    /// ds  = p (dp - c)                c = sum(dy y) for each row; times the slope of a soft cap
    /// dq += scale ds k                [block, width]
    /// dk += scale ds^T q              [keys, width]
    /// ```
    fn backward_block(
        &self,
        head: usize,
        rows: &Range<usize>,
        given: &Given<'_>,
        gradient: OutputArray,
        scratch: &mut BackwardScratch,
        sums: &mut BackwardSums,
    ) {
        let AttentionDims { width, scale, .. } = self.dims;
        let projected =
            |rows: &_, operand| self.dims.projected(self.projected, head, rows, operand);
        let grad = self.dims.merged(given.grad, head, rows);
        let queries = projected(rows, AttentionOperand::Queries);
        given.row_products(self.dims, head, rows, &mut scratch.corrections[..rows.len()]);
        let all = self.keys(head, rows);
        let is_whole = all.len() <= KEY_BLOCK;
        for (number, keys) in key_blocks(all).rev().enumerate() {
            self.score_gradients(head, rows, &keys, given, scratch);
            let BackwardScratch { weights, scores_grad, queries_grad, .. } = &mut *scratch;
            let [weights, scores_grad] = [weights, scores_grad].map(|values| {
                Matrix::new(&values[..rows.len() * keys.len()], rows.len(), keys.len(), keys.len())
            });
            let out = if is_whole {
                let start = self.dims.place_in(AttentionOperand::Queries, head, rows);
                let row = self.dims.projected_row();
                // SAFETY: no other thread accesses these rows of this head's columns.
                unsafe { MatrixMut::from_pointer(gradient.at(start), rows.len(), width, row) }
            } else {
                MatrixMut::new(&mut queries_grad[..rows.len() * width], rows.len(), width, width)
            };
            let key_rows = projected(&keys, AttentionOperand::Keys);
            let product = self.product(scores_grad, key_rows).scaled(scale);
            if number == 0 {
                product.write_to(out)
            } else {
                product.add_to(out)
            }
            let keys_grad = self.product(scores_grad.transposed(), queries).scaled(scale);
            sums.keys.add(&keys, width, keys_grad);
            sums.values.add(&keys, width, self.product(weights.transposed(), grad));
        }
        if !is_whole {
            let sums = &scratch.queries_grad[..rows.len() * width];
            self.dims.store_rows(AttentionOperand::Queries, head, rows, sums, gradient);
        }
    }

    /// Recomputes the weights of the queries `rows` for `keys`, and computes the gradients with
    /// respect to their scores, `ds`. The weights are those after dropout, `q`.
    fn score_gradients(
        &self,
        head: usize,
        rows: &Range<usize>,
        keys: &Range<usize>,
        given: &Given<'_>,
        scratch: &mut BackwardScratch,
    ) {
        let len = rows.len() * keys.len();
        let BackwardScratch { weights, scores_grad, slopes, corrections, .. } = scratch;
        let [weights, scores_grad] = [weights, scores_grad].map(|values| &mut values[..len]);
        self.scores(weights, head, rows, keys);
        if let Some(cap) = self.soft_cap {
            cap_with_slopes(weights, cap, &mut slopes[..len]);
        }
        let log_sums = &given.log_sums[head * self.dims.positions..][rows.clone()];
        let visible = self.seen(head, rows, keys);
        weighted_rows(weights, keys.len(), &visible, log_sums);

        // The gradient with respect to the weights, `dp`, then with respect to the scores.
        let grad = self.dims.merged(given.grad, head, rows);
        let values = self.dims.projected(self.projected, head, keys, AttentionOperand::Values);
        let out = MatrixMut::new(scores_grad, rows.len(), keys.len(), keys.len());
        self.product(grad, values.transposed()).write_to(out);
        self.drop(scores_grad, head, rows, keys);
        score_gradient(scores_grad, weights, keys.len(), &corrections[..rows.len()]);
        if self.soft_cap.is_some() {
            scale_by_slopes(scores_grad, &slopes[..len], keys.len(), &visible);
        }
        // The gradient of the scores needed the weights before dropout. The values' needs them
        // after it.
        self.drop(weights, head, rows, keys);
    }
}

/// The memory of a part of the backward pass.
struct BackwardScratch {
    /// `[block, keys]`: scores, then weights.
    weights: Vec<f32>,
    /// `[block, keys]`: gradients with respect to the weights, then to the scores.
    scores_grad: Vec<f32>,
    /// `[block, keys]`: the derivatives of the limited scores. Empty without a soft cap.
    slopes: Vec<f32>,
    /// `[block, width]`: the sum of the gradient of the queries over several blocks of keys. Empty
    /// if there is one.
    queries_grad: Vec<f32>,
    /// `sum(dy y)` of each query of the block.
    corrections: [f32; QUERY_BLOCK],
}

impl BackwardScratch {
    /// Allocates the memory for queries with up to `keys` keys without initializing it. Every block
    /// writes its scores before it reads them.
    fn new(dims: AttentionDims, keys: usize, soft_cap: Option<f32>) -> Self {
        let rows = QUERY_BLOCK.min(dims.positions);
        let scores = rows * keys.min(KEY_BLOCK);
        let sums = if keys > KEY_BLOCK { rows * dims.width } else { 0 };
        Self {
            weights: unwritten(scores),
            scores_grad: unwritten(scores),
            slopes: unwritten(soft_cap.map_or(0, |_| scores)),
            queries_grad: unwritten(sums),
            corrections: [0.0; QUERY_BLOCK],
        }
    }
}

/// The gradients of keys and values, summed over blocks of queries and over heads.
struct BackwardSums {
    keys: RowSums,
    values: RowSums,
}

impl BackwardSums {
    /// Allocates the sums of the positions `rows`.
    fn new(rows: &Range<usize>, width: usize) -> Self {
        Self { keys: RowSums::new(rows, width), values: RowSums::new(rows, width) }
    }

    /// Adds the sums of two parts.
    fn plus(self, other: Self, width: usize) -> Self {
        Self {
            keys: self.keys.plus(other.keys, width),
            values: self.values.plus(other.values, width),
        }
    }

    /// Writes the finished sums, which cover all positions because each position attends to itself,
    /// to the columns of keys and values that `head` attends to.
    fn store(&self, dims: AttentionDims, head: usize, gradient: OutputArray) {
        for (operand, sums) in
            [(AttentionOperand::Keys, &self.keys), (AttentionOperand::Values, &self.values)]
        {
            assert_eq!(sums.begun, 0..dims.positions, "positions without a gradient");
            dims.store_rows(operand, head, &sums.begun, &sums.values, gradient);
        }
    }
}
