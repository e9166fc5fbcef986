//! Softmax cross-entropy.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};
use burn_flex::Flex;
use deepburn_kernels::gemm::{Matrix, MatrixMut, Product};
use rayon::prelude::*;

use super::array::{
    arithmetic, blocks, changed, contiguous, elements, from_values, is_supported, read, unwritten,
    widen, written,
};
use super::vector::{combine, exp, max, vectorised};
use crate::cross_entropy::{CrossEntropyOps, HeadGradients, HeadLoss, logits_chunk_rows};
use crate::host::int_into_host;
use crate::portable;

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

impl CrossEntropyOps for Flex {
    /// Logits are in f32 also for 16-bit inputs. Their gradients are rounded to bf16 where the inputs are.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        let (tokens, width) = (hidden.shape()[0], hidden.shape()[1]);
        let vocab = weight.shape()[0];
        if !is_supported(&hidden) || !is_supported(&weight) || tokens == 0 {
            return portable::cross_entropy::head_loss::<Self>(hidden, weight, targets, wanted);
        }
        let targets = int_into_host::<Self>(targets);
        let arithmetic = arithmetic([hidden.dtype(), weight.dtype()]);
        let [hidden, weight] = [&hidden, &weight].map(contiguous);
        let (hidden, weight) =
            (elements(&hidden), Matrix::new(elements(&weight), vocab, width, width));
        let step = logits_chunk_rows(tokens, vocab);
        let mut logits = unwritten::<f32>(step * vocab);
        let mut hidden_grad = wanted.hidden.then(|| unwritten(tokens * width));
        let mut weight_grad = wanted.weight.then(|| unwritten(vocab * width));
        let mut loss = 0.0;
        for start in (0..tokens).step_by(step) {
            let rows = start..tokens.min(start + step);
            let hidden = Matrix::new(hidden.starting_at(start * width), rows.len(), width, width);
            let logits = &mut logits[..rows.len() * vocab];
            let out = MatrixMut::new(logits, rows.len(), vocab, vocab);
            Product::new(hidden, weight.transposed(), arithmetic).write_to(out);
            let any = wanted.hidden || wanted.weight;
            loss += rows_loss(logits, vocab, &targets[rows.clone()], any);
            let grad = Matrix::new(&logits[..], rows.len(), vocab, vocab);
            if let Some(all) = &mut hidden_grad {
                let part = &mut all[rows.start * width..rows.end * width];
                let out = MatrixMut::new(part, rows.len(), width, width);
                Product::new(grad, weight, arithmetic).write_to(out);
            }
            if let Some(sum) = &mut weight_grad {
                let product = Product::new(grad.transposed(), hidden, arithmetic);
                let out = MatrixMut::new(sum, vocab, width, width);
                if start == 0 { product.write_to(out) } else { product.add_to(out) }
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
        let logits = match logits.dtype() {
            DType::F32 => logits,
            _ => from_values(widen(&logits).into_owned(), logits.shape(), DType::F32),
        };
        let mut loss = 0.0;
        let logits = changed(logits, |all| {
            let len = targets.len() * vocab;
            // SAFETY: nobody else has the elements, all of which are written.
            unsafe {
                all.update(0..len, &mut Vec::new(), |all| {
                    loss = rows_loss(all, vocab, &targets, gradient)
                })
            };
        });
        let loss = from_values(vec![loss as f32], [1], DType::F32);
        (loss, gradient.then_some(logits))
    }

    fn scale_gradient(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        if gradient.dtype() != DType::F32 || !is_supported(&factor) {
            return portable::cross_entropy::scale_gradient::<Self>(gradient, factor, dtype);
        }
        let factor = widen(&factor)[0];
        let shape = gradient.shape();
        let blocks = blocks(shape.num_elements());
        if dtype == DType::F32 && factor == 1.0 {
            return gradient;
        }
        if dtype == DType::F32 {
            return changed(gradient, |all| {
                blocks.for_each(|block| {
                    // SAFETY: blocks are disjoint, and all elements of a gradient are written.
                    unsafe { all.update(block, &mut Vec::new(), |part| scale(part, factor)) };
                });
            });
        }
        let gradient = contiguous(&gradient);
        let values = elements(&gradient);
        written(shape, dtype, |out| {
            blocks.for_each_init(<[Vec<f32>; 2]>::default, |[room, out_room], block| {
                let part = read(values, block.clone(), room);
                let write = |out: &mut [f32]| {
                    out.copy_from_slice(part);
                    scale(out, factor);
                };
                // SAFETY: blocks are disjoint.
                unsafe { out.write(block, out_room, write) };
            });
        })
    }
}
