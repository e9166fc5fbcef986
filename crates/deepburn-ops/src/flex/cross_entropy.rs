//! Softmax cross-entropy.

use std::borrow::Cow;
use std::ops::Range;

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, Slice, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::array::{
    BLOCK, from_values, into_widened, is_supported, narrow, unwritten, values_mut, widen,
};
use super::product::{Matrix, MatrixMut, Onto, Threads, multiply};
use super::vector::{combine, exp, max, vectorised};
use crate::cross_entropy::{CrossEntropyOps, HeadGradients, HeadLoss, logits_chunk_rows};
use crate::host::int_into_host;
use crate::portable;

/// Rows of a 16-bit weight that are widened at a time.
const WEIGHT_ROWS: usize = 8192;

/// Logits whose exponentials are added up in f32; sums of such sums are in f64.
const SUM_BLOCK: usize = 4096;

vectorised! {
    /// Loss of a row of logits, which with `gradient` become its gradient. `target` is in range.
    fn row_loss(logits: &mut [f32], target: usize, gradient: bool) -> f64 {
        let largest = max(logits);
        let shifted_target = logits[target] - largest;
        let add = |a: f32, b: f32| a + b;
        let mut sum = 0.0;
        for block in logits.chunks_mut(SUM_BLOCK) {
            sum += f64::from(if gradient {
                for logit in block.iter_mut() {
                    *logit = exp(*logit - largest);
                }
                combine(block.len(), 0.0, |i| block[i], add)
            } else {
                combine(block.len(), 0.0, |i| exp(block[i] - largest), add)
            });
        }
        if gradient {
            let factor = (1.0 / sum) as f32;
            for logit in logits.iter_mut() {
                *logit *= factor;
            }
            logits[target] -= 1.0;
        }
        sum.ln() - f64::from(shifted_target)
    }
}

vectorised! {
    fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

/// Summed loss of rows of `vocab` logits, which with `gradient` become their gradient.
///
/// # Panics
/// If a target is neither masked nor in the vocabulary.
fn rows_loss(logits: &mut [f32], vocab: usize, targets: &[i64], gradient: bool) -> f64 {
    let losses: Vec<f64> = logits
        .par_chunks_mut(vocab.max(1))
        .zip(targets)
        .map(|(logits, target)| match usize::try_from(*target) {
            Ok(target) => {
                assert!(target < vocab, "target {target} is not in a vocabulary of {vocab}");
                row_loss(logits, target, gradient)
            }
            Err(_) => {
                if gradient {
                    logits.fill(0.0);
                }
                0.0
            }
        })
        .collect();
    losses.iter().sum()
}

/// The weight of a head, in blocks of rows as f32.
struct HeadWeight<'a> {
    tensor: &'a FlexTensor,
    vocab: usize,
    width: usize,
}

impl HeadWeight<'_> {
    /// Calls `each` with the rows of each block and their values. A weight in f32 is one block and
    /// not copied.
    fn blocks(&self, mut each: impl FnMut(Range<usize>, Matrix<'_>)) {
        let whole = self.tensor.dtype() == DType::F32;
        let step = if whole { self.vocab } else { WEIGHT_ROWS }.max(1);
        for start in (0..self.vocab).step_by(step) {
            let rows = start..self.vocab.min(start + step);
            let values = if whole {
                widen(self.tensor)
            } else {
                let slices = [Slice::from(rows.clone()), Slice::from(0..self.width)];
                Cow::Owned(widen(&Flex::float_slice(self.tensor.clone(), &slices)).into_owned())
            };
            let matrix = Matrix::new(&values, rows.len(), self.width, self.width);
            each(rows, matrix);
        }
    }

    /// `out = hidden weight^T`.
    fn logits(&self, out: &mut [f32], hidden: Matrix<'_>) {
        self.blocks(|rows, weight| {
            let part = &mut out[rows.start..];
            let part = MatrixMut::new(part, hidden.rows, rows.len(), self.vocab);
            multiply(part, Onto::Nothing, hidden, weight.transposed(), 1.0, Threads::All);
        });
    }

    /// `out = grad weight`.
    fn hidden_gradient(&self, out: &mut [f32], grad: &[f32], tokens: usize) {
        self.blocks(|rows, weight| {
            let onto = if rows.start == 0 { Onto::Nothing } else { Onto::Sum };
            let grad = Matrix::new(&grad[rows.start..], tokens, rows.len(), self.vocab);
            let out = MatrixMut::new(out, tokens, self.width, self.width);
            multiply(out, onto, grad, weight, 1.0, Threads::All);
        });
    }
}

impl CrossEntropyOps for Flex {
    /// Products are in f32 also for 16-bit inputs: that is no slower here.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        let (tokens, width) = (hidden.shape()[0], hidden.shape()[1]);
        let vocab = weight.shape()[0];
        if !is_supported(&hidden) || tokens == 0 {
            return portable::cross_entropy::head_loss::<Self>(hidden, weight, targets, wanted);
        }
        let targets = int_into_host::<Self>(targets);
        let hidden = widen(&hidden);
        let weight = match weight.dtype() {
            DType::F32 => weight.to_contiguous(),
            _ => weight,
        };
        let weight = HeadWeight { tensor: &weight, vocab, width };
        let step = logits_chunk_rows(tokens, vocab);
        let mut logits = unwritten(step * vocab);
        let mut hidden_grad = wanted.hidden.then(|| unwritten(tokens * width));
        let mut weight_grad = wanted.weight.then(|| unwritten(vocab * width));
        let mut loss = 0.0;
        for start in (0..tokens).step_by(step) {
            let rows = start..tokens.min(start + step);
            let part = rows.start * width..rows.end * width;
            let hidden = Matrix::new(&hidden[part.clone()], rows.len(), width, width);
            let logits = &mut logits[..rows.len() * vocab];
            weight.logits(logits, hidden);
            let any = wanted.hidden || wanted.weight;
            loss += rows_loss(logits, vocab, &targets[rows.clone()], any);
            if let Some(all) = &mut hidden_grad {
                weight.hidden_gradient(&mut all[part], logits, rows.len());
            }
            if let Some(sum) = &mut weight_grad {
                let onto = if start == 0 { Onto::Nothing } else { Onto::Sum };
                let grad = Matrix::new(logits, rows.len(), vocab, vocab).transposed();
                let sum = MatrixMut::new(sum, vocab, width, width);
                multiply(sum, onto, grad, hidden, 1.0, Threads::All);
            }
        }
        let tensor = |rows| move |values| from_values(values, [rows, width], DType::F32);
        HeadLoss {
            loss: from_values(vec![loss as f32], [1], DType::F32),
            gradients: HeadGradients {
                hidden: hidden_grad.map(tensor(tokens)),
                weight: weight_grad.map(tensor(vocab)),
            },
        }
    }

    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        if !is_supported(&logits) {
            return portable::cross_entropy::logits_loss::<Self>(logits, targets, gradient);
        }
        let vocab = logits.shape()[1];
        let targets = int_into_host::<Self>(targets);
        let mut logits = into_widened(logits);
        let loss = rows_loss(values_mut(&mut logits), vocab, &targets, gradient);
        let loss = from_values(vec![loss as f32], [1], DType::F32);
        (loss, gradient.then_some(logits))
    }

    fn scale_gradient(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        if !is_supported(&gradient) || !is_supported(&factor) {
            return portable::cross_entropy::scale_gradient::<Self>(gradient, factor, dtype);
        }
        let factor = widen(&factor)[0];
        let mut gradient = into_widened(gradient);
        if factor != 1.0 {
            values_mut(&mut gradient).par_chunks_mut(BLOCK).for_each(|part| scale(part, factor));
        }
        narrow(gradient, dtype)
    }
}
