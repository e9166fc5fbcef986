//! Text generation from a prompt.
//!
//! Main type: [`Generation`], an iterator over new tokens. It ends with an error if the model
//! computes NaN. The model caches the keys and values of earlier positions, so each new token needs
//! a forward pass over one position instead of the whole sequence. There is no sliding window: the
//! prompt and the new tokens together must not exceed the model's maximum length. This is checked
//! before the first token is generated.
//!
//! A longer text need not be processed from its start: [`SeenTokens`] are what a generation has
//! processed, and another one continues from them if its prompt begins with the same tokens.
//!
//! [`Sampling`](super::Sampling) describes how tokens are chosen. To stop at a text, stop the
//! iteration.

use deepburn_ops::FusedOps;

use super::LanguageModel;
use super::batch::{BatchLimits, id_tensor};
use super::generate_error::GenerateError;
use super::options::GenerateOptions;
use super::sampling::Chooser;
use crate::architecture::TokenLimits;

/// An iterator over generated tokens. It ends after a stop token, at the token limit or after an
/// error.
#[derive(Debug)]
pub struct Generation<'a, B: FusedOps, M: LanguageModel<B>> {
    /// The model, which is not changed.
    model: &'a M,
    /// The device that token ids are moved to.
    device: B::Device,
    /// The tokens that the model has processed.
    seen: SeenTokens<M::Cache>,
    /// The tokens that the model has not processed yet: first the prompt, later the last generated
    /// token.
    unseen: Vec<u32>,
    /// The number of tokens that may still be generated.
    left: usize,
    /// Chooses the next token from logits.
    chooser: Chooser,
    /// Tokens that end the iteration.
    stop: Vec<u32>,
    /// The number of logits to choose from, at least 1.
    num_tokens: usize,
}

impl<'a, B: FusedOps, M: LanguageModel<B>> Generation<'a, B, M> {
    /// Checks the prompt and the options without computing logits.
    ///
    /// # Errors
    /// Returns [`GenerateError`] if the prompt is empty or has unknown tokens, if prompt and new
    /// tokens together are too long for the model, or if a sampling option is out of range.
    pub(super) fn new(
        model: &'a M,
        prompt: &[u32],
        options: &GenerateOptions,
        seen: Option<SeenTokens<M::Cache>>,
    ) -> Result<Self, GenerateError> {
        let (limits, max_new_tokens) = (model.limits(), options.max_new_tokens);
        BatchLimits { limits, batch: 1, length: prompt.len() }.check_tokens(prompt)?;
        let TokenLimits { vocab_size, max_len, max_len_field: field } = limits;
        if prompt.len().saturating_add(max_new_tokens) > max_len {
            let prompt = prompt.len();
            return Err(GenerateError::TooLong { prompt, max_new_tokens, max_len, field });
        }
        // A cache that is continued may expect fewer positions than this text has; it grows then.
        let fresh =
            || SeenTokens { tokens: Vec::new(), cache: model.cache(prompt.len() + max_new_tokens) };
        // A cache of the whole prompt cannot be used: the logits of the last prompt token choose
        // the first new one, so this token has to be processed.
        let seen = seen.filter(|seen| seen.begins(prompt)).unwrap_or_else(fresh);
        Ok(Self {
            model,
            device: model.device(),
            unseen: prompt[seen.tokens.len()..].to_vec(),
            seen,
            left: max_new_tokens,
            chooser: Chooser::new(options, prompt)?,
            stop: options.stop.clone(),
            num_tokens: options.num_tokens.unwrap_or(vocab_size).max(1),
        })
    }

    /// Runs the model on the unseen tokens and returns the logits of the next token.
    ///
    /// The result has one value for each token that may be chosen, as f32 on the host.
    fn advance(&mut self) -> Vec<f32> {
        let SeenTokens { tokens, cache } = &mut self.seen;
        let ids = id_tensor(&self.unseen, [1, self.unseen.len()], &self.device);
        let logits = self.model.next_logits(ids, tokens.len(), cache);
        tokens.append(&mut self.unseen);
        // Without a copy if they are f32 already: every token waits for this.
        let mut logits: Vec<f32> =
            logits.into_data().convert::<f32>().into_vec().expect("converted to f32");
        logits.truncate(self.num_tokens);
        logits
    }
}

impl<B: FusedOps, M: LanguageModel<B>> Generation<'_, B, M> {
    /// Returns the tokens that the model has processed, for a text that begins with them.
    #[must_use]
    pub fn into_seen(self) -> SeenTokens<M::Cache> {
        self.seen
    }
}

/// Tokens that a model has processed, and their keys and values.
#[derive(Clone, Debug)]
pub struct SeenTokens<C> {
    tokens: Vec<u32>,
    cache: C,
}

impl<C> SeenTokens<C> {
    /// Returns whether `prompt` begins with these tokens and is longer.
    pub fn begins(&self, prompt: &[u32]) -> bool {
        prompt.len() > self.tokens.len() && prompt.starts_with(&self.tokens)
    }

    /// Returns the number of tokens.
    pub fn count(&self) -> usize {
        self.tokens.len()
    }
}

/// Checks that a token can be chosen from `logits`, the logits of the token at `position`. A logit
/// of minus infinity is allowed: its token has the probability 0.
///
/// # Errors
/// Returns [`GenerateError::NotFinite`] if a logit is NaN or infinity, or if every logit is minus
/// infinity.
fn check_logits(logits: &[f32], position: usize) -> Result<(), GenerateError> {
    // Summed without a branch, so that it is vectorized. A vocabulary has fewer than 2^24 tokens.
    let is_wrong = |logit: &f32| u32::from(logit.is_nan() | (*logit == f32::INFINITY));
    let wrong: u32 = logits.iter().map(is_wrong).sum();
    let total = logits.len();
    let count = match wrong as usize {
        // Softmax would be 0/0, and greedy decoding would return token 0 as if it were likely.
        0 if logits.iter().all(|logit| *logit == f32::NEG_INFINITY) => total,
        0 => return Ok(()),
        count => count,
    };
    Err(GenerateError::NotFinite { position, count, total })
}

impl<B: FusedOps, M: LanguageModel<B>> Iterator for Generation<'_, B, M> {
    type Item = Result<u32, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        // The first pass sees the whole prompt, later ones the last token.
        let logits = self.advance();
        // The position of the next token is the number of tokens that the model has seen.
        if let Err(error) = check_logits(&logits, self.seen.tokens.len()) {
            self.left = 0;
            return Some(Err(error));
        }
        let token = self.chooser.choose(logits);
        self.unseen = vec![token];
        // The stop token itself is returned, so that a caller sees why generation ended.
        self.left = if self.stop.contains(&token) { 0 } else { self.left - 1 };
        Some(Ok(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causal_lm::sampling::most_likely;
    use crate::causal_lm::{RandomSampling, Sampling};
    use crate::gpt2::{Gpt2, Gpt2Config};
    use burn::module::{Module, ModuleMapper, Param};
    use burn::tensor::Tensor;
    use burn_flex::Flex;

    fn random(temperature: f64, top_k: Option<usize>, top_p: f64) -> Sampling {
        let default = RandomSampling::default();
        Sampling::Random(RandomSampling { seed: 9, temperature, top_k, top_p, ..default })
    }

    #[test]
    fn logits_that_are_not_numbers_are_refused() {
        let low = f32::NEG_INFINITY;
        assert_eq!(check_logits(&[1.0, low, -2.0], 7), Ok(()));
        for (logits, count) in [
            ([1.0, f32::NAN, 2.0], 1),
            ([1.0, -f32::NAN, f32::NAN], 2),
            ([f32::INFINITY, 1.0, low], 1),
            ([low; 3], 3),
        ] {
            let error = GenerateError::NotFinite { position: 7, count, total: 3 };
            assert_eq!(check_logits(&logits, 7), Err(error));
        }
    }

    /// Makes all weights NaN.
    struct NotANumber;

    impl ModuleMapper<Flex> for NotANumber {
        fn map_float<const D: usize>(
            &mut self,
            param: Param<Tensor<Flex, D>>,
        ) -> Param<Tensor<Flex, D>> {
            param.map(|tensor| tensor * f32::NAN)
        }
    }

    #[test]
    fn a_model_that_computes_nan_ends_generation_with_an_error() {
        let model = model().map(&mut NotANumber);
        for sampling in [Sampling::Greedy, random(1.0, Some(3), 0.9)] {
            let mut generation = model.generate(&[1, 7], &options(8, sampling)).unwrap();
            let error = generation.next().unwrap().unwrap_err();
            assert!(matches!(error, GenerateError::NotFinite { position: 2, .. }), "{error}");
            assert!(generation.next().is_none());
        }
    }

    fn model() -> Gpt2<Flex> {
        let config = Gpt2Config {
            vocab_size: 23,
            n_positions: 12,
            n_embd: 12,
            n_layer: 2,
            n_head: 3,
            initializer_range: 0.5,
            ..Gpt2Config::small()
        };
        Gpt2::new(&config, 11, &Default::default()).unwrap()
    }

    fn options(max_new_tokens: usize, sampling: Sampling) -> GenerateOptions {
        GenerateOptions { sampling, ..GenerateOptions::greedy(max_new_tokens) }
    }

    #[test]
    fn the_cache_gives_the_logits_of_the_whole_sequence() {
        let model = model();
        let prompt = [3, 1, 4];
        let mut generation = model.generate(&prompt, &options(8, Sampling::Greedy)).unwrap();
        let mut tokens = prompt.to_vec();
        for _ in 0..8 {
            let cached = generation.advance();
            let ids = id_tensor::<Flex>(&tokens, [1, tokens.len()], &Default::default());
            let whole: Tensor<Flex, 3> = model.forward(ids).narrow(1, tokens.len() - 1, 1);
            let whole: Vec<f32> = whole.into_data().to_vec().unwrap();
            for (a, b) in cached.iter().zip(&whole) {
                assert!((a - b).abs() < 1e-5, "{a} {b}");
            }
            let token = most_likely(&whole);
            generation.unseen = vec![token];
            tokens.push(token);
        }
    }

    #[test]
    fn a_text_continues_from_the_tokens_that_were_seen() {
        let model = model();
        let all = |generation: Generation<'_, Flex, Gpt2<Flex>>| -> Vec<u32> {
            generation.map(Result::unwrap).collect()
        };
        let mut first = model.generate(&[3, 1], &options(4, Sampling::Greedy)).unwrap();
        let new: Vec<u32> = first.by_ref().map(Result::unwrap).collect();
        let seen = first.into_seen();
        // The last token was chosen, but not processed.
        assert_eq!(seen.tokens, [&[3, 1], &new[..3]].concat());
        let options = options(3, Sampling::Greedy);
        let longer = [&[3, 1], &new[..], &[7, 2]].concat();
        let expected = all(model.generate(&longer, &options).unwrap());
        let generation = model.generate_after(seen.clone(), &longer, &options).unwrap();
        assert_eq!(generation.unseen, [new[3], 7, 2]);
        assert_eq!(all(generation), expected);
        // Another text, and one that is not longer, start anew.
        for prompt in [&[3, 2, 5, 5, 5, 5, 5][..], &seen.tokens] {
            let generation = model.generate_after(seen.clone(), prompt, &options).unwrap();
            assert_eq!(generation.unseen, prompt);
            assert_eq!(all(generation), all(model.generate(prompt, &options).unwrap()));
        }
    }

    #[test]
    fn a_seed_decides_and_stop_tokens_end() {
        let model = model();
        let sampling = random(1.5, None, 1.0);
        let generate = |options: &GenerateOptions| -> Vec<u32> {
            model.generate(&[1], options).unwrap().map(Result::unwrap).collect()
        };
        let all = generate(&options(11, sampling.clone()));
        assert_eq!(all.len(), 11);
        assert_eq!(generate(&options(11, sampling.clone())), all);
        let stop = GenerateOptions { stop: vec![all[4]], ..options(11, sampling) };
        let first = all.iter().position(|token| *token == all[4]).unwrap();
        assert_eq!(generate(&stop), all[..=first]);
    }

    #[test]
    fn rows_of_padding_are_never_chosen() {
        let model = model();
        let sampling = random(5.0, None, 1.0);
        let all = model.generate(&[1], &options(11, sampling.clone())).unwrap();
        assert!(all.into_iter().any(|token| token.unwrap() >= 5));
        for sampling in [sampling, Sampling::Greedy] {
            let few = GenerateOptions { num_tokens: Some(5), ..options(11, sampling) };
            assert!(model.generate(&[1], &few).unwrap().all(|token| token.unwrap() < 5));
        }
    }

    #[test]
    fn refusals() {
        let model = model();
        let greedy = |count| options(count, Sampling::Greedy);
        let min_p = Sampling::Random(RandomSampling { min_p: 1.5, ..RandomSampling::default() });
        let penalty = GenerateOptions { repetition_penalty: 0.0, ..greedy(1) };
        let table: [(&[u32], GenerateOptions, &str); 10] = [
            (&[], greedy(1), "is empty"),
            (&[23], greedy(1), "input id 23 (sequence 0, position 0)"),
            (&[1; 13], greedy(0), "`n_positions` = 12"),
            (&[1; 10], greedy(3), "the prompt's length 10 plus 3 new tokens is more than"),
            (&[1], greedy(usize::MAX), "is more than"),
            (&[1], options(1, random(0.0, None, 1.0)), "`temperature` is 0"),
            (&[1], options(1, random(1.0, Some(0), 1.0)), "`top_k` is 0"),
            (&[1], options(1, random(1.0, None, f64::NAN)), "`top_p` is NaN"),
            (&[1], options(1, min_p), "`min_p` is 1.5"),
            (&[1], penalty, "`repetition_penalty` is 0"),
        ];
        for (prompt, options, expected) in table {
            let message = model.generate(prompt, &options).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert_eq!(model.generate(&[1; 12], &greedy(0)).unwrap().next(), None);
    }
}
