//! Rotary position embeddings.

use std::f64::consts::TAU;

use super::Architecture;
use crate::{GgufError, Metadata};

/// A rotation of queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufRope {
    /// The number of elements of a head that are rotated, the first ones.
    pub width: usize,
    /// The base of the frequencies, `theta^(-2 i / width)`.
    pub theta: f64,
    /// How the frequencies are changed for longer sequences.
    pub scaling: RopeScaling,
}

/// A change of the frequencies, as `rope_type` in `config.json`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// None.
    Default,
    /// All frequencies are divided.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The base grows with the length of the sequence. llama.cpp does not support it.
    Dynamic,
    /// Low frequencies are divided, with a ramp (Peng et al. 2023).
    Yarn {
        /// The divisor.
        factor: f64,
        /// The length that the model was first trained on.
        original_len: usize,
        /// Frequencies with more rotations over the original length are kept.
        beta_fast: f64,
        /// Frequencies with fewer rotations are divided.
        beta_slow: f64,
        /// Whether the ends of the ramp are rounded to whole elements.
        truncate: bool,
        /// The factor of sines and cosines.
        attention_factor: f64,
    },
    /// Wavelengths are compared with two bounds, as in Llama 3.1.
    Llama3 {
        /// The divisor of low frequencies.
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
        /// The divisors up to the original length.
        short_factor: Vec<f64>,
        /// The divisors for longer contexts.
        long_factor: Vec<f64>,
        /// The length that the model was first trained on.
        original_len: usize,
        /// The factor of sines and cosines.
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// Returns the name in `config.json`.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear { .. } => "linear",
            Self::Dynamic => "dynamic",
            Self::Yarn { .. } => "yarn",
            Self::Llama3 { .. } => "llama3",
            Self::LongRope { .. } => "longrope",
        }
    }

    /// Returns an error if llama.cpp does not compute the scaling for an architecture.
    pub(super) fn check(&self, architecture: Architecture) -> Result<(), GgufError> {
        use Architecture::{Gemma2, Gemma3, Gpt2, Llama, Phi3, Qwen2, Qwen3};

        let is_supported = match self {
            Self::Default => true,
            Self::Linear { .. } => architecture != Gpt2,
            Self::Dynamic => false,
            // llama.cpp reads the keys of other ramps for other architectures only.
            Self::Yarn { beta_fast, beta_slow, truncate, .. } => {
                let is_usual = *truncate && *beta_fast == 32.0 && *beta_slow == 1.0;
                is_usual && matches!(architecture, Llama | Qwen2 | Qwen3)
            }
            // Of these, llama.cpp reads the tensors with divisors.
            Self::Llama3 { .. } => architecture == Llama,
            Self::LongRope { .. } => matches!(architecture, Llama | Phi3),
        };
        if is_supported {
            return Ok(());
        }
        let supported = match architecture {
            Gpt2 => "default",
            Llama => "default, linear, llama3, longrope, or yarn with the default ramp",
            Qwen2 | Qwen3 => "default, linear, or yarn with the default ramp",
            Phi3 => "default, linear or longrope",
            Gemma2 | Gemma3 => "default or linear",
        };
        let problem = format!(
            "is {}; llama.cpp supports {supported} for {architecture}; keep the model as safetensors",
            self.name()
        );
        Err(GgufError::field("`rope_parameters.rope_type`", problem))
    }

    /// Appends the keys `ARCHITECTURE.rope.scaling.*`.
    pub(super) fn push(
        &self,
        architecture: Architecture,
        metadata: &mut Metadata,
    ) -> Result<(), GgufError> {
        let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
        match *self {
            // The divisors of Llama 3 are a tensor. Dynamic scaling was refused before.
            Self::Default | Self::Dynamic | Self::Llama3 { .. } => {}
            Self::Linear { factor } => {
                metadata.push(key("type"), "linear")?;
                metadata.push(key("factor"), factor as f32)?;
            }
            Self::Yarn { factor, original_len, attention_factor, .. } => {
                metadata.push(key("type"), "yarn")?;
                metadata.push(key("factor"), factor as f32)?;
                metadata.push(key("original_context_length"), size(original_len)?)?;
                // llama.cpp multiplies sines and cosines by this default already.
                let default = yarn_attention_factor(factor);
                if (attention_factor / default - 1.0).abs() > 1e-6 {
                    metadata.push(key("attn_factor"), (attention_factor / default) as f32)?;
                }
            }
            Self::LongRope { original_len, attention_factor, .. } => {
                // The architecture phi3 reads the divisors without a type.
                if architecture != Architecture::Phi3 {
                    metadata.push(key("type"), "longrope")?;
                }
                metadata.push(key("original_context_length"), size(original_len)?)?;
                metadata.push(key("attn_factor"), attention_factor as f32)?;
            }
        }
        Ok(())
    }

    /// Returns the tensors of divisors, one per pair of elements, with their names.
    pub(super) fn tensors(&self, width: usize, theta: f64) -> Vec<(&'static str, Vec<f32>)> {
        let floats = |values: &[f64]| values.iter().map(|value| *value as f32).collect();
        match self {
            Self::LongRope { short_factor, long_factor, .. } => vec![
                ("rope_factors_long.weight", floats(long_factor)),
                ("rope_factors_short.weight", floats(short_factor)),
            ],
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                // The rule of `_compute_llama3_parameters` in `transformers`, for divisors instead
                // of frequencies.
                let divisor = |pair: usize| {
                    let length = *original_len as f64;
                    let wavelength = wavelength(pair, width, theta);
                    if wavelength < length / high_freq_factor {
                        return 1.0;
                    }
                    if wavelength > length / low_freq_factor {
                        return *factor;
                    }
                    let smooth = (length / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    1.0 / ((1.0 - smooth) / factor + smooth)
                };
                let divisors: Vec<f64> = (0..width / 2).map(divisor).collect();
                vec![("rope_freqs.weight", floats(&divisors))]
            }
            _ => Vec::new(),
        }
    }
}

/// Returns the factor of sines and cosines that follows from the divisor of frequencies (Peng et
/// al. 2023).
pub(super) fn yarn_attention_factor(factor: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 }
}

/// Returns the number of positions after which a pair of elements has made a full turn.
pub(super) fn wavelength(pair: usize, width: usize, theta: f64) -> f64 {
    TAU * theta.powf(2.0 * pair as f64 / width as f64)
}

/// Returns a size as the type that metadata has.
pub(super) fn size(value: usize) -> Result<u32, GgufError> {
    let problem = || GgufError::field("metadata", format!("{value} does not fit into 32 bits"));
    u32::try_from(value).map_err(|_| problem())
}
