//! The language-model loss.
//!
//! Main type: [`CausalLoss`], which holds a sum and the number of its terms. Batches can have
//! different numbers of ignored positions, so an average over batches has to be computed from the
//! sums and counts.

use burn::tensor::{Tensor, backend::Backend};

/// The cross-entropy loss, summed over all positions with a target.
#[derive(Clone, Debug)]
pub struct CausalLoss<B: Backend> {
    /// Sum of the negative log-likelihoods in nats, or of the losses with label smoothing, `[1]`,
    /// at least f32.
    pub sum: Tensor<B, 1>,
    /// The number of terms. If no position has a target, the number and the sum are both 0.
    pub tokens: usize,
}

impl<B: Backend> CausalLoss<B> {
    /// Returns the mean over the terms, `[1]`; 0 if there are no terms.
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
