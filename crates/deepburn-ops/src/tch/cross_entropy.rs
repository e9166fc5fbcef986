//! Softmax cross-entropy in chunks of tokens, with LibTorch's in-place ops.
//!
//! ```text
//! for each chunk of rows
//!   logits = hidden weight^T              in the type of the operands
//!   log_probabilities = log_softmax       in at least f32; the logits are freed
//!   probabilities = exp                   in place
//!   probabilities[target] -= 1            in place: now the gradient of the logits
//!   hidden gradient = gradient weight     in the type of the operands
//!   weight gradient += gradient^T hidden  in at least f32
//! ```
//!
//! At most two buffers of `[rows, vocab]` exist at the same time. The losses of the chunks are
//! added in their order. Logits that are not finite give a loss of NaN or infinity.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};
use burn_tch::{LibTorch, TchElement};
use tch::{Kind, Tensor};

use super::{wide, wrap};
use crate::cross_entropy::{CrossEntropyOps, HeadGradients, HeadLoss, logits_chunk_rows};

/// Targets may have any integer type and are converted to 64 bits, the type of LibTorch's indices.
impl<E: TchElement> CrossEntropyOps for LibTorch<E> {
    /// The gradient of the logits is rounded to the type of the operands before the products, so
    /// that 16-bit operands use the hardware's 16-bit instructions.
    ///
    /// Returns only the requested gradients, in at least f32.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        let (hidden, weight, targets) = (hidden.tensor, weight.tensor, targets.tensor);
        let (tokens, vocab) = (hidden.size()[0], weight.size()[0]);
        let (kind, options) = (hidden.kind(), (wide(hidden.kind()), hidden.device()));
        let mut loss = Tensor::zeros([1], options);
        let mut hidden_grads = Vec::new();
        let mut weight_grad: Option<Tensor> = None;
        let step = logits_chunk_rows(tokens as usize, vocab as usize);
        for start in (0..tokens).step_by(step) {
            let rows = (step as i64).min(tokens - start);
            let hidden = hidden.narrow(0, start, rows);
            let logits = hidden.mm(&weight.tr());
            let any = wanted.hidden || wanted.weight;
            let (sum, gradient) = chunk(logits, targets.narrow(0, start, rows), any);
            loss += sum;
            let Some(gradient) = gradient.map(|gradient| gradient.to_kind(kind)) else { continue };
            if wanted.hidden {
                hidden_grads.push(gradient.mm(&weight).to_kind(options.0));
            }
            if wanted.weight {
                weight_grad = Some(added(weight_grad, &gradient, &hidden));
            }
        }
        // Without tokens there are no chunks, and the gradients are 0.
        let none = |rows| Tensor::zeros([rows, hidden.size()[1]], options);
        let hidden_grad = wanted.hidden.then(|| match hidden_grads.is_empty() {
            true => none(0),
            false => Tensor::cat(&hidden_grads, 0),
        });
        let weight_grad = wanted.weight.then(|| weight_grad.unwrap_or_else(|| none(vocab)));
        HeadLoss {
            loss: wrap(loss),
            gradients: HeadGradients {
                hidden: hidden_grad.map(wrap),
                weight: weight_grad.map(wrap),
            },
        }
    }

    /// Converts the logits to at least f32, so the gradient is a new tensor.
    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let (loss, gradient) = chunk(logits.tensor, targets.tensor, gradient);
        (wrap(loss.reshape([1])), gradient.map(wrap))
    }

    /// Multiplies in place if the gradient is not shared. The factor is not copied to the host,
    /// because reading it would wait for all queued kernels.
    fn scale_gradient(
        mut gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        let factor = factor.tensor.to_kind(gradient.tensor.kind()).reshape([1, 1]);
        let scaled = match gradient.mut_ops(|gradient| gradient.g_mul_(&factor)) {
            Some(scaled) => scaled,
            None => wrap(gradient.tensor * factor),
        };
        if scaled.dtype() == dtype {
            return scaled;
        }
        wrap(scaled.tensor.to_kind(kind_of(dtype)))
    }
}

/// Returns the summed loss, a scalar, of logits `[tokens, vocab]` and, if requested, its gradient
/// with respect to the logits, in at least f32.
///
/// A target below 0 is replaced by 0 so that it is a valid index. Its loss and its row of the
/// gradient are then set to 0.
///
/// The masked rows of the gradient are found on the device with `nonzero`, which synchronizes on
/// CUDA. Most batches have few or no masked rows, so a pass over the complete gradient would cost
/// more.
fn chunk(logits: Tensor, targets: Tensor, gradient: bool) -> (Tensor, Option<Tensor>) {
    let mut log_probabilities = logits.log_softmax(1, wide(logits.kind()));
    // Both are `[rows, vocab]`, and the logits are not needed any more.
    drop(logits);
    let targets = targets.to_kind(Kind::Int64).unsqueeze(1);
    let masked = targets.lt(0);
    let targets = targets.clamp_min(0);
    let mut losses = log_probabilities.gather(1, &targets, false).neg();
    let loss = losses.masked_fill_(&masked, 0.0).sum(log_probabilities.kind());
    let gradient = gradient.then(|| {
        let mut probabilities = log_probabilities.exp_();
        let ones = Tensor::full(targets.size(), -1.0, (probabilities.kind(), targets.device()));
        let _ = probabilities.scatter_add_(1, &targets, &ones);
        // Usually few or no rows are masked, so a pass over all rows would be slower.
        let rows = masked.squeeze_dim(1).nonzero().squeeze_dim(1);
        if rows.numel() > 0 {
            let _ = probabilities.index_fill_(0, &rows, 0.0);
        }
        probabilities
    });
    (loss, gradient)
}

/// Returns `sum + gradient^T hidden` in at least f32. An f32 product is accumulated in place by
/// `addmm`. A 16-bit product is rounded to 16 bits first and then added in f32.
///
/// The first chunk initializes the sum, so no zeros are allocated.
fn added(sum: Option<Tensor>, gradient: &Tensor, hidden: &Tensor) -> Tensor {
    let gradient = gradient.tr();
    match sum {
        None => gradient.mm(hidden).to_kind(wide(hidden.kind())),
        Some(mut sum) if sum.kind() == hidden.kind() => sum.addmm_(&gradient, hidden),
        Some(mut sum) => sum.g_add_(&gradient.mm(hidden)),
    }
}

/// Returns LibTorch's element type for a float type; f32 for types without an equivalent.
fn kind_of(dtype: DType) -> Kind {
    match dtype {
        DType::F64 => Kind::Double,
        DType::F16 => Kind::Half,
        DType::BF16 => Kind::BFloat16,
        _ => Kind::Float,
    }
}
