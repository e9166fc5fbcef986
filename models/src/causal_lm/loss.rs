//! The language-model loss.
//!
//! Main type: [`CausalLoss`], a sum with the number of its terms, because batches with ignored
//! positions can only be averaged by their sums and counts.

use burn::tensor::{Tensor, backend::Backend};

/// Cross-entropy summed over the positions that predict something.
#[derive(Clone, Debug)]
pub struct CausalLoss<B: Backend> {
    /// Sum of the negative log-likelihoods in nats, `[1]`, at least f32.
    pub sum: Tensor<B, 1>,
    /// Number of terms. 0 when nothing was to be predicted; the sum is 0 then.
    pub tokens: usize,
}

impl<B: Backend> CausalLoss<B> {
    /// Returns the mean over the terms, `[1]`; 0 when there are none.
    #[must_use]
    pub fn mean(self) -> Tensor<B, 1> {
        self.sum / self.tokens.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;

    #[test]
    fn the_mean_of_nothing_is_zero() {
        let sum = Tensor::<Flex, 1>::zeros([1], &Default::default());
        assert_eq!(CausalLoss { sum, tokens: 0 }.mean().into_scalar(), 0.0);
    }
}
