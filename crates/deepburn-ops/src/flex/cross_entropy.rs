//! Softmax cross-entropy, fused with the product that computes the logits.
//!
//! ```text
//! hidden [tokens, width]     weight [vocab, width]
//!    |  chunk of rows            |
//!    +------------+--------------+
//!                 v
//!    logits [rows, vocab] f32, at most 64 MiB, one buffer for all chunks
//!                 |  overwritten by their gradient, softmax - one-hot
//!      +----------+-----------+
//!      v                      v
//! hidden gradient          weight gradient
//! rows of the chunk        sum over the chunks, in their order
//! ```
//!
//! # Numerics
//!
//! A row is shifted by its largest logit. Exponentials are added in f32 within blocks of 4096. The
//! sums of blocks, the losses of rows and the sum of all losses are f64. The result is rounded to
//! f32 once. A logit of NaN or plus infinity makes the loss and the gradient of its row NaN. A
//! logit of minus infinity has a probability of 0; if it is the target, the loss is infinite.
//!
//! # Threads
//!
//! Products use all threads. Rows of logits are distributed over the threads, and their losses are
//! added in the order of the tokens.

use std::ops::Range;

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::FloatSlice;
use deepburn_kernels::gemm::{Arithmetic, Matrix, MatrixMut, Product};
use rayon::prelude::*;

use super::array::{
    arithmetic, changed, contiguous, elements, from_values, is_supported, is_supported_type,
    unwritten, widen,
};
use super::blockwise;
use super::quantized::HostMatrix;
use super::vector::{combine, exp, max, vectorized};
use crate::cross_entropy::{CrossEntropyOps, HeadGradients, HeadLoss, logits_chunk_rows};
use crate::host::int_into_host;
use crate::portable;
use crate::quantized::QuantizedMatrix;

/// The number of exponentials that are added in f32.
///
/// The sums of such blocks are added in f64, so the error does not grow with the size of the
/// vocabulary. A block fits in the first-level cache.
const SUM_BLOCK: usize = 4096;

vectorized! {
    /// Returns the loss of a row of logits, `log(sum(exp(l))) - l[target]`. If `gradient` is true,
    /// the logits are overwritten with the gradient of the loss: `exp(l) / sum(exp(l))`, minus 1 at
    /// the target. `target` must be less than the number of logits.
    ///
    /// Without `gradient` the logits stay unchanged and the exponentials are not stored.
    fn row_loss(logits: &mut [f32], target: usize, gradient: bool) -> f64 {
        let largest = max(logits);
        // Read before the logits are overwritten.
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
        // Both terms are shifted by the largest logit, which cancels.
        sum.ln() - f64::from(shifted_target)
    }
}

/// Returns whether the logit of `target` is the largest of its row, and the first one with its
/// value.
fn is_predicted(logits: &[f32], target: usize) -> bool {
    let largest = logits[target];
    logits[..target].iter().all(|logit| *logit < largest)
        && logits[target..].iter().all(|logit| *logit <= largest)
}

/// Returns the number of rows of `vocab` logits whose target is predicted.
fn rows_predicted(logits: &[f32], vocab: usize, targets: &[i64]) -> usize {
    let rows = logits.par_chunks(vocab.max(1)).zip(targets);
    let is_right = |(logits, target): &(&[f32], &i64)| {
        usize::try_from(**target).is_ok_and(|target| is_predicted(logits, target))
    };
    rows.filter(is_right).count()
}

vectorized! {
    /// Multiplies each value by `factor`.
    fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

/// Returns the summed loss of rows of `vocab` logits, one row per target. If `gradient` is true,
/// the logits are overwritten with their gradient. The gradient is 0 for masked rows, whose target
/// is negative.
///
/// Losses are added in f64 in the order of the rows. A row of logits is read three times with
/// `gradient` and twice without: for its maximum, its exponentials, and the division by their sum.
///
/// # Panics
/// Panics if a target is `vocab` or more.
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
    // The losses are collected first, because a parallel sum would depend on how rayon divides the
    // rows.
    losses.iter().sum()
}

/// The weight of a head, `[vocab, width]`.
enum HeadWeight<'a> {
    /// All elements.
    Dense(Matrix<'a>),
    /// In 8 or 4 bits.
    Quantized(HostMatrix),
}

impl HeadWeight<'_> {
    /// Writes the logits of rows of hidden states.
    fn logits(&self, hidden: Matrix<'_>, arithmetic: Arithmetic, logits: &mut [f32]) {
        match self {
            Self::Dense(weight) => {
                let (rows, vocab) = (hidden.rows(), weight.rows());
                let out = MatrixMut::new(logits, rows, vocab, vocab);
                Product::new(hidden, weight.transposed(), arithmetic).write_to(out);
            }
            Self::Quantized(weight) => weight.logits(hidden, arithmetic, logits),
        }
    }

    /// Writes the gradient of rows of hidden states. `grad` is the gradient of their logits.
    fn hidden_gradient(&self, grad: Matrix<'_>, arithmetic: Arithmetic, out: &mut [f32]) {
        match self {
            Self::Dense(weight) => {
                let (rows, width) = (grad.rows(), weight.columns());
                let out = MatrixMut::new(out, rows, width, width);
                Product::new(grad, *weight, arithmetic).write_to(out);
            }
            Self::Quantized(weight) => weight.hidden_gradient(grad, arithmetic, out),
        }
    }
}

/// A language-model head and its targets.
struct LossHead<'a> {
    /// The numbers of tokens, of hidden states of each, and of logits.
    shape: [usize; 3],
    /// The hidden states in row-major order.
    hidden: FloatSlice<'a>,
    weight: HeadWeight<'a>,
    targets: Vec<i64>,
    arithmetic: Arithmetic,
}

/// Calls `work` with the head of `hidden` `[tokens, width]` and `weight` `[vocab, width]`.
fn with_head<R>(
    [hidden, weight]: [&FlexTensor; 2],
    targets: IntTensor<Flex>,
    work: impl FnOnce(LossHead<'_>) -> R,
) -> R {
    let [hidden, weight] = [hidden, weight].map(contiguous);
    let (vocab, width) = (weight.shape()[0], hidden.shape()[1]);
    work(LossHead {
        shape: [hidden.shape()[0], width, vocab],
        hidden: elements(&hidden),
        weight: HeadWeight::Dense(Matrix::new(elements(&weight), vocab, width, width)),
        targets: int_into_host::<Flex>(targets),
        arithmetic: arithmetic([hidden.dtype(), weight.dtype()]),
    })
}

/// Calls `work` with the head of a quantized weight.
fn with_quantized_head<R>(
    hidden: &FlexTensor,
    weight: &QuantizedMatrix<Flex>,
    targets: IntTensor<Flex>,
    work: impl FnOnce(LossHead<'_>) -> R,
) -> R {
    let hidden = contiguous(hidden);
    work(LossHead {
        shape: [hidden.shape()[0], hidden.shape()[1], weight.shape()[0]],
        hidden: elements(&hidden),
        weight: HeadWeight::Quantized(HostMatrix::of(weight)),
        targets: int_into_host::<Flex>(targets),
        arithmetic: arithmetic([hidden.dtype(), weight.dtype()]),
    })
}

impl LossHead<'_> {
    /// Calls `work` with each chunk of tokens: their range, their hidden states and their logits.
    fn each_chunk(&self, mut work: impl FnMut(Range<usize>, Matrix<'_>, &mut [f32])) {
        let [tokens, width, vocab] = self.shape;
        let step = logits_chunk_rows(tokens, vocab);
        // The chunk's buffer is used again for every chunk; the last one may be shorter.
        let mut logits = unwritten::<f32>(step * vocab);
        for start in (0..tokens).step_by(step) {
            let rows = start..tokens.min(start + step);
            let hidden = self.hidden.starting_at(start * width);
            let hidden = Matrix::new(hidden, rows.len(), width, width);
            let logits = &mut logits[..rows.len() * vocab];
            self.weight.logits(hidden, self.arithmetic, logits);
            work(rows, hidden, logits);
        }
    }

    /// Computes the loss and the wanted gradients, one chunk of rows at a time. The weight
    /// gradient, which only a dense weight has, is summed over the chunks in their order.
    fn loss(&self, wanted: HeadGradients<bool>) -> HeadLoss<Flex> {
        let [tokens, width, vocab] = self.shape;
        // Not zeroed: each chunk writes its rows, and the first chunk writes all of the weight
        // gradient.
        let mut hidden_grad = wanted.hidden.then(|| unwritten(tokens * width));
        let mut weight_grad = wanted.weight.then(|| unwritten(vocab * width));
        let mut loss = 0.0;
        self.each_chunk(|rows, hidden, logits| {
            let any = wanted.hidden || wanted.weight;
            loss += rows_loss(logits, vocab, &self.targets[rows.clone()], any);
            let grad = Matrix::new(&logits[..], rows.len(), vocab, vocab);
            if let Some(all) = &mut hidden_grad {
                let part = &mut all[rows.start * width..rows.end * width];
                self.weight.hidden_gradient(grad, self.arithmetic, part);
            }
            if let Some(sum) = &mut weight_grad {
                let product = Product::new(grad.transposed(), hidden, self.arithmetic);
                let out = MatrixMut::new(sum, vocab, width, width);
                // The first chunk writes the sum, so it need not be zeroed.
                if rows.start == 0 { product.write_to(out) } else { product.add_to(out) }
            }
        });
        let tensor = |rows| move |values| from_values(values, [rows, width], DType::F32);
        HeadLoss {
            loss: from_values(vec![loss as f32], [1], DType::F32),
            gradients: HeadGradients {
                hidden: hidden_grad.map(tensor(tokens)),
                weight: weight_grad.map(tensor(vocab)),
            },
        }
    }

    /// Computes the loss and the number of predicted targets, `[2]`, one chunk of rows at a time.
    fn scores(&self) -> FloatTensor<Flex> {
        let [_, _, vocab] = self.shape;
        let (mut loss, mut predicted) = (0.0, 0);
        self.each_chunk(|rows, _, logits| {
            let targets = &self.targets[rows];
            loss += rows_loss(logits, vocab, targets, false);
            predicted += rows_predicted(logits, vocab, targets);
        });
        from_values(vec![loss as f32, predicted as f32], [2], DType::F32)
    }
}

/// Returns whether the panels of a quantized weight are decoded into the products, instead of the
/// whole weight before.
fn can_decode(hidden: &FloatTensor<Flex>, weight: &QuantizedMatrix<Flex>) -> bool {
    // A panel consists of stored rows, and a transposed weight has its logits in the stored
    // columns.
    let are_supported = is_supported(hidden) && is_supported_type(weight.dtype());
    are_supported && !weight.is_transposed() && hidden.shape()[0] > 0
}

/// Targets are copied to host memory as 64-bit integers once per call. Hidden states and weights
/// may have different types: the products use bf16 arithmetic if both are bf16, and otherwise f32.
impl CrossEntropyOps for Flex {
    /// Computes logits in f32 for 16-bit inputs too. If hidden states and weight are bf16, the
    /// gradients of the logits are rounded to bf16 for the two products that follow.
    ///
    /// In addition to the chunk of logits, the requested gradients are allocated in f32. They are
    /// kept until the backward pass. A head without tokens uses the portable implementation.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        if !is_supported(&hidden) || !is_supported(&weight) || hidden.shape()[0] == 0 {
            return portable::cross_entropy::head_loss::<Self>(hidden, weight, targets, wanted);
        }
        with_head([&hidden, &weight], targets, |head| head.loss(wanted))
    }

    /// Decodes the weight a panel at a time, twice for each chunk of logits if the gradient is
    /// wanted. The gradient of the hidden states is the sum of f32 products with the panels.
    fn quantized_head_loss(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
        wanted: bool,
    ) -> HeadLoss<Self> {
        let wanted = HeadGradients { hidden: wanted, weight: false };
        if !can_decode(&hidden, weight) {
            return Self::head_loss(hidden, weight.dequantized(), targets, wanted);
        }
        with_quantized_head(&hidden, weight, targets, |head| head.loss(wanted))
    }

    /// Computes the loss of [`head_loss`](Self::head_loss), with the same bits, and counts while
    /// the logits of a chunk are in memory.
    fn head_scores(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        if !is_supported(&hidden) || !is_supported(&weight) || hidden.shape()[0] == 0 {
            return portable::cross_entropy::head_scores::<Self>(hidden, weight, targets);
        }
        with_head([&hidden, &weight], targets, |head| head.scores())
    }

    /// Decodes the weight a panel at a time, once for each chunk of logits.
    fn quantized_head_scores(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        if !can_decode(&hidden, weight) {
            return Self::head_scores(hidden, weight.dequantized(), targets);
        }
        with_quantized_head(&hidden, weight, targets, |head| head.scores())
    }

    /// Overwrites f32 logits with their gradient in place if their memory is not shared; other
    /// logits are copied to f32 first. Without `gradient` they keep their values, but are copied
    /// under the same conditions.
    ///
    /// The gradient has the shape of the logits and is f32.
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
        // The gradient is f32 for all inputs, and is rounded to their type once, by
        // `scale_gradient`.
        let logits = match logits.dtype() {
            DType::F32 => logits,
            _ => from_values(widen(&logits).into_owned(), logits.shape(), DType::F32),
        };
        let mut loss = 0.0;
        let logits = changed(logits, |all| {
            let len = targets.len() * vocab;
            // SAFETY: no other code has access to the elements, and all of them are written.
            unsafe {
                all.update(0..len, &mut Vec::new(), |all| {
                    loss = rows_loss(all, vocab, &targets, gradient)
                })
            };
        });
        let loss = from_values(vec![loss as f32], [1], DType::F32);
        (loss, gradient.then_some(logits))
    }

    /// Returns the gradient unchanged if the factor is 1 and `dtype` is f32. Otherwise f32
    /// gradients are scaled in place and 16-bit results are written to a new tensor, with one
    /// rounding.
    fn scale_gradient(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        if gradient.dtype() != DType::F32 || !is_supported(&factor) {
            return portable::cross_entropy::scale_gradient::<Self>(gradient, factor, dtype);
        }
        let factor = widen(&factor)[0];
        match dtype {
            DType::F32 if factor == 1.0 => gradient,
            DType::F32 => blockwise::update(gradient, [], |[], part| scale(part, factor)),
            _ => blockwise::map([&gradient], dtype, |[part], out| {
                out.copy_from_slice(part);
                scale(out, factor);
            }),
        }
    }
}
