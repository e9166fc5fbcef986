//! The language-model loss.
//!
//! Main type: [`CausalLoss`], a sum with the number of its terms, because batches with ignored
//! positions can only be averaged by their sums and counts.

use burn::tensor::{Int, Tensor, backend::Backend};

use super::precision::in_f32;

/// Cross-entropy summed over the positions that predict something.
#[derive(Clone, Debug)]
pub struct CausalLoss<B: Backend> {
    /// Sum of the negative log-likelihoods in nats, `[1]`, at least f32.
    pub sum: Tensor<B, 1>,
    /// Number of terms. 0 when nothing was to be predicted; the sum is 0 then.
    pub tokens: usize,
}

impl<B: Backend> CausalLoss<B> {
    /// Mean over the terms, `[1]`; 0 when there are none.
    #[must_use]
    pub fn mean(self) -> Tensor<B, 1> {
        self.sum / self.tokens.max(1) as f64
    }
}

/// Negative log-likelihood of `targets` `[n, 1]` under `logits` `[n, vocab]`, summed to `[1]`.
///
/// `log(sum(exp(x - max))) - (x[target] - max)`: nothing overflows, and of the large
/// matrix autodiff keeps one copy, the exponentials.
pub(crate) fn cross_entropy_sum<B: Backend>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
) -> Tensor<B, 1> {
    let logits = in_f32(logits);
    // Any shift gives the same value and the same gradient, so the maximum needs no gradient.
    let max = logits.clone().detach().max_dim(1);
    let shifted = logits - max;
    let target = shifted.clone().gather(1, targets);
    let log_sum = shifted.exp().sum_dim(1).log();
    (log_sum - target).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, TensorData};
    use burn_flex::Flex;
    use proptest::prelude::*;

    fn loss(logits: &[f32], targets: &[i32], dtype: DType) -> f32 {
        let device = Default::default();
        let rows = targets.len();
        let shape = [rows, logits.len() / rows];
        let logits = Tensor::<Flex, 2>::from_data(TensorData::new(logits.to_vec(), shape), &device);
        let targets = Tensor::from_data(TensorData::new(targets.to_vec(), [rows, 1]), &device);
        cross_entropy_sum(logits.cast(dtype), targets).into_scalar()
    }

    #[test]
    fn large_logits_do_not_overflow() {
        assert_eq!(loss(&[1e30, 0.0, 0.0, 1e30], &[0, 1], DType::F32), 0.0);
        assert_eq!(loss(&[-1e30, 1e30], &[0], DType::F32), 2e30);
        // The sum of 70,000 ones overflows f16 (65504).
        let uniform = loss(&[0.0; 70_000], &[5], DType::F16);
        assert!((uniform - 70_000_f32.ln()).abs() < 1e-5);
    }

    #[test]
    fn the_mean_of_nothing_is_zero() {
        let sum = Tensor::<Flex, 1>::zeros([1], &Default::default());
        assert_eq!(CausalLoss { sum, tokens: 0 }.mean().into_scalar(), 0.0);
    }

    proptest! {
        #[test]
        fn matches_the_formula_in_f64(
            rows in proptest::collection::vec((proptest::collection::vec(-20_f32..20.0, 7), 0..7), 1..6)
        ) {
            let logits: Vec<f32> = rows.iter().flat_map(|(row, _)| row.clone()).collect();
            let targets: Vec<i32> = rows.iter().map(|(_, target)| *target).collect();
            let expected: f64 = rows.iter().map(|(row, target)| {
                let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
                sum.ln() - f64::from(row[*target as usize])
            }).sum();
            let found = f64::from(loss(&logits, &targets, DType::F32));
            // Terms up to 40, a few roundings each.
            prop_assert!((found - expected).abs() <= 2e-5 * rows.len() as f64);
        }
    }
}
