//! Label smoothing of the cross-entropy loss, as `LabelSmoother` of `transformers` computes it.
//!
//! For logits `l` and a target `t`, the smoothed loss is a weighted mean of the negative
//! log-likelihood and of the mean of `-log(p)` over all `n` classes. With
//! `-log(p[j]) = log(sum(exp(l))) - l[j]`, the smoothing only adds a linear term:
//!
//! ```text
//! loss = (1 - factor) * -log(p[t]) + factor * mean over j of -log(p[j])
//!      = -log(p[t]) + factor * (l[t] - mean(l))
//! ```
//!
//! The functions compute `l[t] - mean(l)`, summed over the targets, in at least f32.

use burn::tensor::{DType, Int, Tensor, backend::Backend};

//= transformers 5.23.0 trainer_pt_utils.py LabelSmoother
/// Returns the term of an output layer, `[1]`. The logits `hidden weight^T` are not computed:
/// `l[t] - mean(l) = hidden (weight[t] - mean of the rows of weight)`.
///
/// `hidden` is `[tokens, width]`, `weight` is `[vocab, width]`, and `targets` `[tokens]` are at
/// least 0.
pub(crate) fn head_term<B: Backend>(
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    let weight = in_f32(weight);
    let chosen = weight.clone().select(0, targets);
    (in_f32(hidden) * (chosen - weight.mean_dim(0))).sum()
}

//= transformers 5.23.0 trainer_pt_utils.py LabelSmoother
/// Returns the term of `logits` `[rows, classes]`, `[1]`. Rows with a negative target do not count.
pub(crate) fn logits_term<B: Backend>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    let logits = in_f32(logits);
    let targets: Tensor<B, 2, Int> = targets.unsqueeze_dim(1);
    let masked = targets.clone().lower_elem(0);
    // `gather` needs valid indices. The rows without a target are masked afterwards.
    let chosen = logits.clone().gather(1, targets.clamp_min(0));
    (chosen - logits.mean_dim(1)).mask_fill(masked, 0.0).sum()
}

/// Converts a 16-bit tensor to f32; returns other tensors unchanged.
pub(crate) fn in_f32<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;
    use burn_flex::Flex;
    use deepburn_ops::{cross_entropy, linear_cross_entropy};
    use deepburn_zero::Training;

    type B = Training<Flex>;

    const FACTOR: f64 = 0.1;
    const TARGETS: [i32; 5] = [3, 0, 6, 3, 1];
    const VOCAB: usize = 7;
    const WIDTH: usize = 3;

    /// Returns values without a pattern, of magnitude up to 1.
    fn values(count: usize, phase: f64) -> Vec<f64> {
        (0..count).map(|index| (index as f64 * 1.7 + phase).sin()).collect()
    }

    fn tensor(values: &[f64], columns: usize) -> Tensor<B, 2> {
        let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
        let shape = [values.len() / columns, columns];
        Tensor::from_data(TensorData::new(values, shape), &Default::default()).require_grad()
    }

    fn targets(targets: &[i32]) -> Tensor<B, 1, Int> {
        Tensor::from_data(TensorData::from(targets), &Default::default())
    }

    /// Returns the smoothed loss of rows of logits, with the formula of `transformers`, and its
    /// gradient.
    fn reference(logits: &[f64], targets: &[i32]) -> (f64, Vec<f64>) {
        let mut loss = 0.0;
        let mut gradient = vec![0.0; logits.len()];
        for (row, &target) in targets.iter().enumerate().filter(|(_, target)| **target >= 0) {
            let row = row * VOCAB..(row + 1) * VOCAB;
            let sum: f64 = logits[row.clone()].iter().map(|logit| logit.exp()).sum();
            for (class, at) in row.enumerate() {
                let probability = logits[at].exp() / sum;
                let of_target = f64::from(u8::from(class == target as usize));
                let label = (1.0 - FACTOR) * of_target + FACTOR / VOCAB as f64;
                loss -= label * probability.ln();
                gradient[at] = probability - label;
            }
        }
        (loss, gradient)
    }

    /// Returns the product of `left` `[rows, inner]` and `right` `[inner, columns]`, given by their
    /// elements.
    fn product(
        [rows, inner, columns]: [usize; 3],
        left: impl Fn(usize, usize) -> f64,
        right: impl Fn(usize, usize) -> f64,
    ) -> Vec<f64> {
        let element = |row, column| (0..inner).map(|at| left(row, at) * right(at, column)).sum();
        (0..rows * columns).map(|index| element(index / columns, index % columns)).collect()
    }

    #[track_caller]
    fn assert_close(found: TensorData, expected: &[f64]) {
        let found: Vec<f32> = found.to_vec().unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < 2e-6, "{found}, not {expected}");
        }
    }

    #[test]
    fn the_loss_of_an_output_layer_and_its_gradients() {
        let rows = TARGETS.len();
        let (h, w) = (values(rows * WIDTH, 0.3), values(VOCAB * WIDTH, 2.0));
        let (hidden, weight) = (tensor(&h, WIDTH), tensor(&w, WIDTH));
        let smoothing = head_term(hidden.clone(), weight.clone(), targets(&TARGETS)) * FACTOR;
        let sum =
            linear_cross_entropy(hidden.clone(), weight.clone(), targets(&TARGETS)) + smoothing;

        let h_at = |row: usize, column: usize| h[row * WIDTH + column];
        let w_at = |row: usize, column: usize| w[row * WIDTH + column];
        let logits = product([rows, WIDTH, VOCAB], h_at, |column, row| w_at(row, column));
        let (loss, gradient) = reference(&logits, &TARGETS);
        let gradient_at = |row: usize, class: usize| gradient[row * VOCAB + class];
        let of_hidden = product([rows, VOCAB, WIDTH], gradient_at, w_at);
        let of_weight = product([VOCAB, rows, WIDTH], |class, row| gradient_at(row, class), h_at);

        assert_close(sum.clone().into_data(), &[loss]);
        let gradients = sum.backward();
        assert_close(hidden.grad(&gradients).unwrap().into_data(), &of_hidden);
        assert_close(weight.grad(&gradients).unwrap().into_data(), &of_weight);
    }

    //= transformers 5.23.0 trainer_pt_utils.py LabelSmoother
    #[test]
    fn the_loss_of_logits_and_its_gradient() {
        let with_ignored = [3, -100, 6, -1, 1];
        let of_logits = values(with_ignored.len() * VOCAB, 0.9);
        let logits = tensor(&of_logits, VOCAB);
        let smoothing = logits_term(logits.clone(), targets(&with_ignored)) * FACTOR;
        let sum = cross_entropy(logits.clone(), targets(&with_ignored)) + smoothing;
        let (loss, gradient) = reference(&of_logits, &with_ignored);
        assert_close(sum.clone().into_data(), &[loss]);
        assert_close(logits.grad(&sum.backward()).unwrap().into_data(), &gradient);
    }

    #[test]
    fn the_term_of_16_bit_tensors_is_in_f32() {
        let (h, w) = (values(15, 0.3), values(VOCAB * WIDTH, 2.0));
        let [hidden, weight] = [h, w].map(|it| tensor(&it, WIDTH).cast(DType::BF16));
        let rounded = [&hidden, &weight].map(|it| it.clone().cast(DType::F32));
        let found = head_term(hidden, weight, targets(&TARGETS));
        assert_eq!(found.dtype(), DType::F32);
        let [hidden, weight] = rounded;
        let expected = head_term(hidden, weight, targets(&TARGETS));
        assert_eq!(found.into_data(), expected.into_data());
    }
}
