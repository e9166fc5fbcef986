//! Options for text generation.
//!
//! Main type: [`GenerateOptions`]. [`Sampling`] describes how tokens are chosen.

use super::generate_error::GenerateError;

/// Options for text generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The maximum number of tokens to generate.
    pub max_new_tokens: usize,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// The divisor of the positive logits of tokens that are in the prompt or were generated, and
    /// the factor of the negative ones. A positive number; values above 1 make repetitions less
    /// likely (Keskar et al. 2019).
    pub repetition_penalty: f64,
    /// Tokens after which generation stops. The stop token itself is returned.
    /// `config.eos_token_ids()` returns the model's end-of-sequence tokens.
    pub stop: Vec<u32>,
    /// The number of tokens of the tokenizer. Further rows of the output layer are padding and are
    /// never chosen. `None` allows all rows.
    pub num_tokens: Option<usize>,
}

impl GenerateOptions {
    /// Returns options for greedy decoding of `max_new_tokens` tokens, which nothing else ends.
    #[must_use]
    pub fn greedy(max_new_tokens: usize) -> Self {
        Self {
            max_new_tokens,
            sampling: Sampling::Greedy,
            repetition_penalty: 1.0,
            stop: Vec::new(),
            num_tokens: None,
        }
    }
}

/// The method that chooses the next token.
#[derive(Clone, Debug, PartialEq)]
pub enum Sampling {
    /// The most likely token. Ties are resolved in favor of the lower id.
    Greedy,
    /// A random token, sampled from the model's probabilities.
    Random(RandomSampling),
}

/// Options for random sampling. The default keeps all tokens and their probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct RandomSampling {
    /// The seed of the random number generator.
    pub seed: u64,
    /// The number of the generator's stream. Streams of the same seed are independent, so that
    /// several sequences with the same seed differ and are reproducible one by one.
    pub stream: u64,
    /// The divisor of the logits, a positive number. Values below 1 sharpen the distribution,
    /// values above 1 flatten it.
    pub temperature: f64,
    /// The number of most likely tokens to keep. `None` keeps all.
    pub top_k: Option<usize>,
    /// The total probability of the most likely tokens to keep, in (0, 1]. 1 keeps all.
    pub top_p: f64,
    /// The smallest probability of the tokens to keep, relative to the most likely token, in [0,
    /// 1]. 0 keeps all.
    pub min_p: f64,
}

impl Default for RandomSampling {
    fn default() -> Self {
        Self { seed: 0, stream: 0, temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0 }
    }
}

impl RandomSampling {
    /// Checks the ranges of the options.
    ///
    /// # Errors
    /// Returns [`GenerateError::Option`] if a value is out of range.
    pub(super) fn check(&self) -> Result<(), GenerateError> {
        let &Self { temperature, top_k, top_p, min_p, .. } = self;
        let refuse = |name, value, rule| Err(GenerateError::Option { name, value, rule });
        if !(temperature.is_finite() && temperature > 0.0) {
            let rule = "positive (greedy choice is its limit at 0)";
            return refuse("temperature", temperature, rule);
        }
        if top_k == Some(0) {
            return refuse("top_k", 0.0, "at least 1, or absent to keep all tokens");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse("top_p", top_p, "in (0, 1]");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return refuse("min_p", min_p, "in [0, 1]");
        }
        Ok(())
    }
}
