//! Rotary position embeddings (Su et al. 2021), with the scalings of `transformers`.
//!
//! Main type: [`Rotary`]. Element `i` of the first half of a head and element `i` of the second
//! half are the coordinates of a point, which is rotated by the angle `position * frequency[i]`. A
//! product of a rotated query and a rotated key therefore depends on the distance between their
//! positions only.
//!
//! Frequencies and angles are rounded to f32, as in `transformers`, in which the models were
//! trained.

use std::f64::consts::TAU;

use burn::tensor::{Tensor, TensorData, backend::Backend};
use deepburn_ops::{RotaryOps, RotatedHeads, rotate_heads};

use super::rotary_angles::cosines_and_sines;

/// A rotation of queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The number of elements of a head that are rotated, the first ones. Even.
    pub width: usize,
    /// The base of the frequencies: `theta^(-2 i / width)`.
    pub theta: f64,
    /// How the frequencies are changed for longer sequences.
    pub scaling: RotaryScaling,
}

/// A change of the frequencies for sequences that are longer than those that the model was first
/// trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryScaling {
    /// None.
    Default,
    /// All frequencies are divided by `factor` (Chen et al. 2023).
    Linear {
        /// Divides all frequencies.
        factor: f64,
    },
    /// The base grows with the length of the sequence.
    Dynamic {
        /// The growth of the base.
        factor: f64,
        /// The length from which it grows.
        max_len: usize,
    },
    /// High frequencies are kept, low ones are divided by `factor`, with a ramp in between (Peng et
    /// al. 2023).
    Yarn {
        /// Divides the low frequencies.
        factor: f64,
        /// The length that the model was first trained on.
        original_len: usize,
        /// Frequencies with more rotations than this over the original length are kept.
        beta_fast: f64,
        /// Frequencies with fewer rotations than this are divided.
        beta_slow: f64,
        /// Whether the ends of the ramp are rounded to whole elements.
        truncate: bool,
        /// The factor of sines and cosines.
        attention_factor: f64,
    },
    /// Wavelengths are compared with two bounds, as in Llama 3.1.
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// Wavelengths above the original length divided by this are divided.
        low_freq_factor: f64,
        /// Wavelengths below the original length divided by this are kept.
        high_freq_factor: f64,
        /// The length that the model was first trained on.
        original_len: usize,
    },
    /// Each frequency has a divisor for short and for long sequences (Ding et al. 2024).
    LongRope {
        /// The divisors for sequences up to the original length.
        short_factor: Vec<f64>,
        /// The divisors for longer sequences.
        long_factor: Vec<f64>,
        /// The length that the model was first trained on.
        original_len: usize,
        /// The factor of sines and cosines.
        attention_factor: f64,
        /// Whether generation computes the keys of earlier positions again, with the divisors of
        /// longer sequences, once a sequence exceeds the original length.
        recomputes_keys: bool,
    },
}

impl Rotary {
    /// Returns the frequencies of the pairs of elements for sequences of `positions` tokens.
    #[must_use]
    pub fn frequencies(&self, positions: usize) -> Vec<f32> {
        let pairs = 0..self.width / 2;
        let powers = |theta: f64| {
            let width = self.width as f64;
            pairs.clone().map(move |pair| theta.powf(-(2.0 * pair as f64) / width))
        };
        let own = || powers(self.theta);
        let round = |frequencies: &mut dyn Iterator<Item = f64>| {
            frequencies.map(|frequency| frequency as f32).collect()
        };
        match &self.scaling {
            RotaryScaling::Default => round(&mut own()),
            //= transformers 5.23.0 modeling_rope_utils.py _compute_linear_scaling_rope_parameters
            RotaryScaling::Linear { factor } => round(&mut own().map(|it| it / factor)),
            //= transformers 5.23.0 modeling_rope_utils.py _compute_dynamic_ntk_parameters
            RotaryScaling::Dynamic { factor, max_len } => {
                let (length, max_len) = (positions.max(*max_len) as f64, *max_len as f64);
                // 1 up to `max_len`, then growing in proportion to the length.
                let growth = factor * length / max_len - (factor - 1.0);
                let width = self.width as f64;
                // With this exponent, the lowest frequency is divided by `growth`, and the highest
                // is kept.
                round(&mut powers(self.theta * growth.powf(width / (width - 2.0))))
            }
            RotaryScaling::Yarn { factor, .. } => {
                let ramp = self.yarn_ramp();
                let mix = |(it, kept): (f64, f64)| it / factor * (1.0 - kept) + it * kept;
                round(&mut own().zip(ramp).map(mix))
            }
            //= transformers 5.23.0 modeling_rope_utils.py _compute_llama3_parameters
            RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                let (length, low, high) = (*original_len as f64, low_freq_factor, high_freq_factor);
                round(&mut own().map(|frequency| {
                    let wavelength = TAU / frequency;
                    if wavelength > length / low {
                        frequency / factor
                    } else if wavelength < length / high {
                        frequency
                    } else {
                        // From 0 at the longest of these wavelengths to 1 at the shortest.
                        let kept = (length / wavelength - low) / (high - low);
                        (1.0 - kept) * frequency / factor + kept * frequency
                    }
                }))
            }
            //= transformers 5.23.0 modeling_rope_utils.py _compute_longrope_parameters
            RotaryScaling::LongRope { short_factor, long_factor, original_len, .. } => {
                let factors = if positions > *original_len { long_factor } else { short_factor };
                round(&mut own().zip(factors).map(|(frequency, factor)| frequency / factor))
            }
        }
    }

    //= transformers 5.23.0 modeling_rope_utils.py _compute_yarn_parameters
    /// Returns the share of each frequency that is kept, for [`RotaryScaling::Yarn`].
    fn yarn_ramp(&self) -> Vec<f64> {
        let RotaryScaling::Yarn { original_len, beta_fast, beta_slow, truncate, .. } = self.scaling
        else {
            return vec![1.0; self.width / 2];
        };
        // The pair of elements that makes this number of rotations over the original length.
        let pair_of = |rotations: f64| {
            let turns = (original_len as f64 / (rotations * TAU)).ln();
            self.width as f64 * turns / (2.0 * self.theta.ln())
        };
        let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        // `transformers` clamps to the width too, although there are half as many pairs.
        let (low, mut high) = (low.max(0.0), high.min((self.width - 1) as f64));
        if low == high {
            // `transformers` avoids the division by 0 in the same way.
            high += 0.001;
        }
        let kept = |pair: usize| 1.0 - ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
        (0..self.width / 2).map(kept).collect()
    }

    /// Returns the factor of all sines and cosines.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RotaryScaling::Yarn { attention_factor, .. }
            | RotaryScaling::LongRope { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    //= transformers 5.23.0 models/phi3/modeling_phi3.py prepare_inputs_for_generation
    /// Returns whether the keys of the first `past` tokens have to be computed again for a sequence
    /// of `positions` tokens, which has other frequencies. `transformers` does this in Phi 3 only.
    /// Other models, and [`RotaryScaling::Dynamic`], keep the keys that are in the cache.
    pub(crate) fn outdates_keys(&self, past: usize, positions: usize) -> bool {
        match self.scaling {
            RotaryScaling::LongRope { original_len, recomputes_keys: true, .. } => {
                past <= original_len && positions > original_len
            }
            _ => false,
        }
    }

    /// Returns whether there are such lengths.
    pub(crate) fn can_outdate_keys(&self) -> bool {
        matches!(self.scaling, RotaryScaling::LongRope { recomputes_keys: true, .. })
    }

    /// Returns the sines and cosines of a pass.
    ///
    /// `positions` lists the position of each row of `[batch * queries]`, or of each query if they
    /// are the same in all sequences. `length` is the largest position + 1.
    pub(crate) fn table<B: Backend>(
        &self,
        positions: &[usize],
        length: usize,
        device: &B::Device,
    ) -> RotaryTable<B> {
        let frequencies = self.frequencies(length);
        let shape = [positions.len(), self.width / 2];
        let rows = cosines_and_sines(&frequencies, self.attention_factor(), positions, length);
        let [cos, sin] =
            rows.map(|values| Tensor::from_data(TensorData::new(values, shape), device));
        RotaryTable { cos, sin }
    }
}

/// The sines and cosines of the positions of a pass, both `[positions, width / 2]`.
#[derive(Clone, Debug)]
pub(crate) struct RotaryTable<B: Backend> {
    cos: Tensor<B, 2>,
    sin: Tensor<B, 2>,
}

impl<B: Backend> RotaryTable<B> {
    /// Rotates the first heads of each row of `x`, `[rows, columns]`. The table has a row for each
    /// row of `x`, or for each position of the sequences that `x` consists of.
    pub(crate) fn rotate(&self, x: Tensor<B, 2>, heads: RotatedHeads) -> Tensor<B, 2>
    where
        B: RotaryOps,
    {
        rotate_heads(x, self.cos.clone(), self.sin.clone(), heads)
    }
}
