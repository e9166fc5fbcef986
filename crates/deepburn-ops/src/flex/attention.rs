//! Self-attention in blocks of query rows and keys, as in FlashAttention (Dao et al. 2022).
//!
//! In the forward pass, a task is a block of [`QUERY_BLOCK`] queries of a head, and runs on one
//! thread. The scores of a block exist for [`KEY_BLOCK`] keys at a time. Each block of keys has its
//! own softmax, and `score_rows::merge_rows` combines the results.
//!
//! In the backward pass, a task is a few blocks of queries of a head (`backward`), so that a single
//! long sequence with few heads uses all threads too.
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
//! A thread holds up to `128 * 2048` f32 scores in the forward pass, and twice this number in the
//! backward pass (three times with a soft cap), with the gradient sums of `backward`. All of this
//! memory is freed when the task is finished. Between the passes only the output and a number per
//! row and head are saved. Memory therefore grows in proportion to the length of a sequence.
//!
//! Keys that no query of a block attends to are not read, so the work of a causal mask is about
//! half of all pairs, and the work of a window or of documents grows in proportion to the length
//! too.

mod backward;
mod row_sums;
mod score_rows;

use std::ops::Range;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::FloatSlice;
use deepburn_kernels::gemm::{Arithmetic, Matrix, MatrixMut, Product, Threads};
use rayon::prelude::*;

use super::array::{
    OutputArray, arithmetic, contiguous, elements, from_values, is_supported, unwritten, widen,
    written,
};
use super::cache;
use crate::attention::dimensions::QUERY_BLOCK;
use crate::attention::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, SelfAttention,
};
use crate::portable;
use backward::Given;
use score_rows::{cap_scores, drop_row, merge_rows, softmax_rows};

/// The number of keys whose scores exist at the same time. They take 1 MiB in f32, about the size
/// of a second-level cache. Blocks of 1024 to 4096 keys are equally fast over 16,384 positions, and
/// complete rows are slower.
const KEY_BLOCK: usize = 2048;

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

    /// Returns the number of blocks of [`QUERY_BLOCK`] query positions, of which the last may have
    /// fewer.
    fn blocks(self) -> usize {
        self.positions.div_ceil(QUERY_BLOCK)
    }

    /// Returns the query positions of a block.
    fn block(self, block: usize) -> Range<usize> {
        block * QUERY_BLOCK..self.positions.min((block + 1) * QUERY_BLOCK)
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

/// Divides keys into blocks of [`KEY_BLOCK`], of which the last may have fewer.
fn key_blocks(keys: Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let count = keys.len().div_ceil(KEY_BLOCK);
    (0..count).map(move |block| {
        let start = keys.start + block * KEY_BLOCK;
        start..keys.end.min(start + KEY_BLOCK)
    })
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
    /// blocks.
    fn product<'a>(&self, left: Matrix<'a>, right: Matrix<'a>) -> Product<'a> {
        Product::new(left, right, self.arithmetic).on(Threads::One)
    }

    /// Returns the keys that a block of queries is multiplied with.
    fn keys(&self, head: usize, rows: &Range<usize>) -> Range<usize> {
        self.mask.keys(head / self.dims.heads, rows, self.dims.positions)
    }

    /// Returns the keys within `keys` that each of the queries `rows` attends to, counted from the
    /// start of `keys`. A query may attend to none of them.
    fn seen(&self, head: usize, rows: &Range<usize>, keys: &Range<usize>) -> Vec<Range<usize>> {
        let AttentionDims { heads, positions, .. } = self.dims;
        let seen = rows.clone().map(|row| self.mask.seen(head / heads, row, positions));
        let counted = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
        seen.map(|seen| counted(seen.start)..counted(seen.end)).collect()
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

    /// Computes the queries `rows` of a head: writes their part of `output` and of `log_sums`.
    fn forward_block(
        &self,
        head: usize,
        rows: &Range<usize>,
        output: OutputArray,
        log_sums: &mut [f32],
        scratch: &mut ForwardScratch,
    ) {
        let AttentionDims { width, .. } = self.dims;
        let keys = self.keys(head, rows);
        if keys.len() <= KEY_BLOCK {
            let out = output.at(self.dims.place(head, rows));
            // SAFETY: no other thread accesses these rows of this head's columns.
            let out = unsafe { MatrixMut::from_pointer(out, rows.len(), width, self.dims.row()) };
            self.forward_keys(head, rows, &keys, out, log_sums, &mut scratch.scores);
            return;
        }
        let ForwardScratch { scores, total, part, room } = scratch;
        let [total, part] = [total, part].map(|sums| at_least(sums, rows.len() * width));
        let mut part_log_sums = [0.0; QUERY_BLOCK];
        let part_log_sums = &mut part_log_sums[..rows.len()];
        for (number, keys) in key_blocks(keys).enumerate() {
            let is_first = number == 0;
            let (out, sums) = match is_first {
                true => (&mut *total, &mut *log_sums),
                false => (&mut *part, &mut *part_log_sums),
            };
            let out = MatrixMut::new(out, rows.len(), width, width);
            self.forward_keys(head, rows, &keys, out, sums, scores);
            if !is_first {
                merge_rows(total, log_sums, part, part_log_sums, width.max(1));
            }
        }
        for (row, total) in rows.clone().zip(total.chunks_exact(width.max(1))) {
            let start = self.dims.place(head, &(row..row + 1));
            // SAFETY: as above.
            unsafe { output.write(start..start + width, room, |row| row.copy_from_slice(total)) };
        }
    }

    /// Computes the attention of the queries `rows` to `keys` alone: its output and the log-sum-exp
    /// of each row, which is minus infinity for a query that attends to none of the keys.
    fn forward_keys(
        &self,
        head: usize,
        rows: &Range<usize>,
        keys: &Range<usize>,
        out: MatrixMut<'_>,
        log_sums: &mut [f32],
        scores: &mut Vec<f32>,
    ) {
        let weights = at_least(scores, rows.len() * keys.len());
        self.scores(weights, head, rows, keys);
        if let Some(cap) = self.soft_cap {
            cap_scores(weights, cap);
        }
        let visible = self.seen(head, rows, keys);
        softmax_rows(weights, keys.len(), &visible, log_sums);
        // After the log-sums, from which the backward pass recomputes the weights before dropout.
        self.drop(weights, head, rows, keys);
        let weights = Matrix::new(&weights[..], rows.len(), keys.len(), keys.len());
        let values = self.dims.projected(self.projected, head, keys, AttentionOperand::Values);
        self.product(weights, values).write_to(out);
    }
}

/// The memory of a thread in the forward pass, which blocks use one after the other.
#[derive(Default)]
struct ForwardScratch {
    /// `[block, keys]`: scores, then weights.
    scores: Vec<f32>,
    /// `[block, width]`: the output for the blocks of keys up to now.
    total: Vec<f32>,
    /// `[block, width]`: the output for one block of keys.
    part: Vec<f32>,
    /// For [`OutputArray::write`].
    room: Vec<f32>,
}

/// Returns the first `len` elements of `memory`, which is replaced by a larger one if necessary.
/// The elements are arbitrary.
fn at_least(memory: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if memory.len() < len {
        // Twice the old size, because the blocks of a causal mask need more and more.
        *memory = unwritten(len.max(2 * memory.len()));
    }
    &mut memory[..len]
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
            // rayon panics on a chunk size of 0. Without positions there are no chunks in either
            // case.
            let heads = log_sums.par_chunks_mut(dims.positions.max(1)).enumerate();
            let blocks = heads.flat_map(|(head, log_sums)| {
                let blocks = log_sums.par_chunks_mut(QUERY_BLOCK).enumerate();
                blocks.map(move |(block, log_sums)| (head, dims.block(block), log_sums))
            });
            blocks.for_each_init(ForwardScratch::default, |scratch, (head, rows, log_sums)| {
                inputs.forward_block(head, &rows, output, log_sums, scratch);
            });
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
