//! Reading of rotations from a file.

use std::io::{Read, Seek};

use super::model_keys::{ModelKeys, REMEDY, decimal};
use super::rope::{wavelength, yarn_attention_factor};
use super::{Architecture, GgufRope, Hyperparameters, RopeScaling};
use crate::{GgufError, GgufReader};

/// The base of the frequencies in files without the key, and of Gemma 3's layers with a window.
const DEFAULT_THETA: f64 = 1e4;

/// The largest relative difference of divisors that are computed from the same numbers, in f32.
const ROUNDING: f64 = 1e-6;

/// The rotations, of which only divisors in tensors are not read yet.
pub(super) struct RopeReader {
    architecture: Architecture,
    width: usize,
    theta: f64,
    /// The base for layers with a window.
    window_theta: f64,
    has_windows: bool,
    scaling: ScalingKeys,
}

/// The keys `rope.scaling.*`.
struct ScalingKeys {
    kind: ScalingKind,
    factor: f64,
    max_len: usize,
    original_len: usize,
    /// The factor of sines and cosines.
    attention_factor: Option<f64>,
    /// Replaces the factor of sines and cosines that follows from `factor`.
    yarn_attention_factor: Option<f64>,
    beta_fast: f64,
    beta_slow: f64,
}

/// The values of `rope.scaling.type`.
#[derive(Clone, Copy, PartialEq)]
enum ScalingKind {
    None,
    Linear,
    Yarn,
    LongRope,
}

impl RopeReader {
    /// Reads the keys.
    pub(super) fn new(keys: &ModelKeys<'_>, model: &Hyperparameters) -> Result<Self, GgufError> {
        const WIDTH: &str = "rope.dimension_count";
        const WINDOW_THETA: &str = "rope.freq_base_swa";
        let architecture = keys.architecture;
        let width = keys.optional_size(WIDTH)?.unwrap_or(model.attention.head_width);
        // llama.cpp rotates whole heads only in the architecture llama.
        let is_whole = architecture != Architecture::Llama || width == model.attention.head_width;
        if !width.is_multiple_of(2) || width > model.attention.head_width || !is_whole {
            let rule = format!("must be even, and at most the length of keys; {REMEDY}");
            return Err(keys.error(WIDTH, rule));
        }
        if keys.optional_size("rope.dimension_count_swa")?.is_some_and(|other| other != width) {
            let rule = format!("must be {width}, as in layers without a window; {REMEDY}");
            return Err(keys.error("rope.dimension_count_swa", rule));
        }
        let theta = keys.positive("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
        let own = keys.positive(WINDOW_THETA)?;
        let window_theta = match architecture {
            Architecture::Gemma3 => own.unwrap_or(DEFAULT_THETA),
            Architecture::Gemma2 if own.is_some_and(|own| own != theta) => {
                let rule = format!("must be {theta}, as in layers without a window; {REMEDY}");
                return Err(keys.error(WINDOW_THETA, rule));
            }
            _ => theta,
        };
        let has_windows = model.attention.windows.iter().any(Option::is_some);
        let scaling = ScalingKeys::read(keys, model.context_length)?;
        Ok(Self { architecture, width, theta, window_theta, has_windows, scaling })
    }

    /// Reads the divisors. Returns the rotation of layers without a window, and of layers with one
    /// if it is another.
    pub(super) fn read<R: Read + Seek>(
        self,
        file: &mut GgufReader<R>,
    ) -> Result<(Option<GgufRope>, Option<GgufRope>), GgufError> {
        // GPT-2 has learned positions instead.
        if self.architecture == Architecture::Gpt2 {
            return Ok((None, None));
        }
        let scaling = self.scaling(file)?;
        let Self { width, theta, .. } = self;
        let rope = GgufRope { width, theta, scaling };
        let window = GgufRope { width, theta: self.window_theta, scaling: RopeScaling::Default };
        let is_other = self.architecture == Architecture::Gemma3 && self.has_windows;
        let window = (is_other && window != rope).then_some(window);
        Ok((Some(rope), window))
    }

    /// Returns the scaling.
    fn scaling<R: Read + Seek>(&self, file: &mut GgufReader<R>) -> Result<RopeScaling, GgufError> {
        let freqs = self.divisors(file, "rope_freqs.weight")?;
        let long = self.divisors(file, "rope_factors_long.weight")?;
        let short = self.divisors(file, "rope_factors_short.weight")?;
        let keys = &self.scaling;
        let is_divided = keys.factor != 1.0 && keys.kind != ScalingKind::None;
        let scaling = match (freqs, long, short) {
            (None, None, None) => return keys.without_divisors(self.architecture),
            (Some(freqs), None, None) if keys.kind != ScalingKind::LongRope => {
                self.of_llama3(freqs)
            }
            (None, Some(long_factor), Some(short_factor)) => RopeScaling::LongRope {
                short_factor,
                long_factor,
                original_len: keys.original_len,
                attention_factor: keys.long_attention_factor(),
            },
            _ => {
                let problem = "are not supported together or alone; llama.cpp reads rope_freqs, or rope_factors_long and rope_factors_short with the scaling type longrope";
                return Err(GgufError::field("tensors of divisors", problem));
            }
        };
        // Both would change the frequencies.
        match is_divided || keys.kind == ScalingKind::Yarn {
            true => Err(keys.unsupported(self.architecture, "beside tensors of divisors")),
            false => Ok(scaling),
        }
    }

    /// Reads a tensor of divisors, one per pair of elements.
    fn divisors<R: Read + Seek>(
        &self,
        file: &mut GgufReader<R>,
        name: &str,
    ) -> Result<Option<Vec<f64>>, GgufError> {
        let Some(tensor) = file.header().tensor(name) else { return Ok(None) };
        let pairs = self.width / 2;
        if tensor.shape() != [pairs as u64] {
            let problem = format!("is {:?}; must be [{pairs}]", tensor.shape());
            return Err(GgufError::tensor(name, problem));
        }
        let values = file.read(name)?;
        let divisor = |value: &f32| decimal(*value).filter(|it| it.is_finite() && *it > 0.0);
        let divisors: Option<Vec<f64>> = values.iter().map(divisor).collect();
        divisors
            .map(Some)
            .ok_or_else(|| GgufError::tensor(name, "has a divisor that is not above 0"))
    }

    /// Returns the scaling of Llama 3 that has these divisors, with the bounds 1 and 4 that all
    /// published models have. If there is none, the divisors are used for all lengths.
    fn of_llama3(&self, divisors: Vec<f64>) -> RopeScaling {
        // Long wavelengths are divided by the whole factor, so it is the largest divisor.
        let factor = divisors.iter().copied().fold(1.0, f64::max);
        let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
        // A pair between both bounds determines the original length.
        let between = divisors.iter().enumerate().find(|(_, it)| 1.0 < **it && **it < factor);
        // Without such a pair, a range of lengths gives the same divisors. 8192 is the length of
        // Llama 3.
        let original_len = between.map_or(8192.0, |(pair, divisor)| {
            // The rule of the divisors, solved for the length.
            let smooth = (1.0 / divisor - 1.0 / factor) / (1.0 - 1.0 / factor);
            wavelength(pair, self.width, self.theta)
                * (smooth * (high_freq_factor - low_freq_factor) + low_freq_factor)
        });
        let original_len = original_len.round() as usize;
        let found = RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len };
        let is_close =
            |(own, other): (&f32, &f64)| (f64::from(*own) / other - 1.0).abs() <= ROUNDING;
        // The divisors may follow another rule, so they are computed again and compared.
        let tensors = found.tensors(self.width, self.theta);
        let is_same = tensors.iter().all(|(_, own)| own.iter().zip(&divisors).all(is_close));
        match is_same && factor > 1.0 {
            true => found,
            false => RopeScaling::LongRope {
                short_factor: divisors.clone(),
                long_factor: divisors,
                original_len: self.scaling.original_len,
                attention_factor: self.scaling.attention_factor.unwrap_or(1.0),
            },
        }
    }
}

impl ScalingKeys {
    fn read(keys: &ModelKeys<'_>, max_len: usize) -> Result<Self, GgufError> {
        const KIND: &str = "rope.scaling.type";
        let kind = match keys.get(KIND).map(|value| value.as_str()) {
            Some(Some("none")) => ScalingKind::None,
            // As in llama.cpp.
            None | Some(Some("linear")) => ScalingKind::Linear,
            Some(Some("yarn")) => ScalingKind::Yarn,
            Some(Some("longrope")) => ScalingKind::LongRope,
            _ => {
                let rule = format!("supported are none, linear, yarn and longrope; {REMEDY}");
                return Err(keys.error(KIND, rule));
            }
        };
        let factor = match keys.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            // The key of older files.
            None => keys.number("rope.scale_linear")?,
        };
        let original_len = keys.optional_size("rope.scaling.original_context_length")?;
        Ok(Self {
            kind,
            // 0 stands for no factor, as in llama.cpp.
            factor: factor.filter(|it| *it != 0.0).unwrap_or(1.0),
            max_len,
            original_len: original_len.unwrap_or(max_len),
            attention_factor: keys.positive("rope.scaling.attn_factor")?,
            yarn_attention_factor: keys.positive("rope.scaling.yarn_attn_factor")?,
            beta_fast: keys.positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: keys.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        })
    }

    /// Returns the scaling of a file without tensors of divisors.
    fn without_divisors(&self, architecture: Architecture) -> Result<RopeScaling, GgufError> {
        let scaling = match self.kind {
            ScalingKind::LongRope => {
                return Err(self.unsupported(architecture, "without tensors of divisors"));
            }
            ScalingKind::Yarn => {
                let grown = yarn_attention_factor(self.factor);
                return Ok(RopeScaling::Yarn {
                    factor: self.factor,
                    original_len: self.original_len,
                    beta_fast: self.beta_fast,
                    beta_slow: self.beta_slow,
                    truncate: true,
                    attention_factor: self.yarn_attention_factor.unwrap_or(grown)
                        * self.attention_factor.unwrap_or(1.0),
                });
            }
            ScalingKind::Linear if self.factor != 1.0 => {
                RopeScaling::Linear { factor: self.factor }
            }
            ScalingKind::None | ScalingKind::Linear => RopeScaling::Default,
        };
        match self.attention_factor {
            None | Some(1.0) => Ok(scaling),
            Some(_) => Err(self.unsupported(architecture, "with rope.scaling.attn_factor")),
        }
    }

    /// Returns the factor of sines and cosines of longrope. The one that follows from the lengths
    /// is not rounded to f32.
    fn long_attention_factor(&self) -> f64 {
        let growth = self.max_len as f64 / self.original_len as f64;
        let grown = match growth <= 1.0 {
            true => 1.0,
            // The rule of `_compute_longrope_parameters` in `transformers`.
            false => (1.0 + growth.ln() / (self.original_len as f64).ln()).sqrt(),
        };
        let given = self.attention_factor.unwrap_or(1.0);
        if given as f32 == grown as f32 { grown } else { given }
    }

    /// Returns the error about an unsupported combination.
    fn unsupported(&self, architecture: Architecture, how: &str) -> GgufError {
        let kind = match self.kind {
            ScalingKind::None => "none",
            ScalingKind::Linear => "linear",
            ScalingKind::Yarn => "yarn",
            ScalingKind::LongRope => "longrope",
        };
        let problem = format!(
            "is {kind} with the factor {}, which is not supported {how}; {REMEDY}",
            self.factor
        );
        GgufError::metadata(&format!("{architecture}.rope.scaling.type"), problem)
    }
}
