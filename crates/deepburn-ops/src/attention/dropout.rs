//! Dropout of attention weights, computed from a seed and the position of each weight.

use burn_backend::{Distribution, TensorData};

/// The number of random numbers that a seed combines.
pub const SEED_DRAWS: usize = 2;

/// The random bits of each of them: an f32 has 24 bits of precision.
const DRAWN_BITS: u32 = 24;

/// Returns the distribution of the random numbers that a seed combines.
pub fn seed_distribution() -> Distribution {
    Distribution::Uniform(0.0, f64::from(1 << DRAWN_BITS))
}

/// Returns the seed that combines [`SEED_DRAWS`] numbers of [`seed_distribution`].
pub fn seed_from(draws: &TensorData) -> u64 {
    draws.iter::<f32>().fold(0, |seed, draw| seed << DRAWN_BITS | draw as u64)
}

/// Dropout of attention weights. Whether a weight is dropped depends only on the seed and the
/// weight's position, so no mask is saved for the backward pass. The remaining weights are divided
/// by the keep probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDropout {
    /// The seed of the selection.
    pub seed: u64,
    /// The fraction of weights that is dropped, below 1.
    pub probability: f64,
}

impl AttentionDropout {
    /// Returns true if the weight of key `key` is dropped for query `row`. Rows are numbered over
    /// the queries of all heads of all sequences.
    pub fn drops(self, row: usize, key: usize) -> bool {
        self.row(row).drops(key as u32)
    }

    /// Returns the factor by which the remaining weights are multiplied, `1 / (1 - probability)`.
    pub(crate) fn factor(self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// Returns the random numbers of query `row`. Rows are numbered over the queries of all heads
    /// of all sequences.
    pub(crate) fn row(self, row: usize) -> DropoutRow {
        // SplitMix64 (Steele et al. 2014).
        let mut z = self.seed.wrapping_add((row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        DropoutRow { low: z as u32, high: (z >> 32) as u32, threshold: self.threshold() }
    }

    /// Returns the probability in units of 2^-32.
    fn threshold(self) -> u32 {
        // Below 2^32, because the probability is below 1.
        (self.probability * 2_f64.powi(32)) as u32
    }

    /// Returns the same dropout for the kernels of devices, which have the same random numbers.
    #[cfg(feature = "cube")]
    pub(crate) fn for_kernels(self) -> deepburn_kernels::cube::WeightDropout {
        deepburn_kernels::cube::WeightDropout {
            seed: self.seed,
            threshold: self.threshold(),
            factor: self.factor() as f32,
        }
    }
}

/// The random numbers of one query.
#[derive(Clone, Copy)]
pub(crate) struct DropoutRow {
    /// Combined with the index of the key.
    low: u32,
    /// Combined with the result of the hash.
    high: u32,
    /// The drop probability in units of 2^-32. A weight is dropped if its random number is below
    /// this threshold.
    threshold: u32,
}

impl DropoutRow {
    /// Returns true if the weight of key `key` is dropped. Uses integer arithmetic only, so that a
    /// loop over keys vectorizes.
    #[inline(always)]
    pub(crate) fn drops(self, key: u32) -> bool {
        // A 32-bit finalizer with low bias (Wellons, "Prospecting for hash functions").
        let mut x = self.low ^ key.wrapping_mul(0x9e37_79b9);
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        (x ^ (x >> 16) ^ self.high) < self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_dropped_with_their_probability() {
        for probability in [0.0, 0.1, 0.5, 0.999] {
            let dropout = AttentionDropout { seed: 7, probability };
            let weights = (0..200).flat_map(|row| (0..200).map(move |key| (row, key)));
            let dropped = weights.filter(|(row, key)| dropout.drops(*row, *key)).count() as f64;
            // Four standard deviations of a binomial distribution of 40,000 weights.
            let tolerance = 4.0 * (4e4 * probability * (1.0 - probability)).sqrt();
            assert!((dropped - 4e4 * probability).abs() <= tolerance, "{probability}: {dropped}");
        }
    }
}
