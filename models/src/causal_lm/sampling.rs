//! The choice of the next token from logits.
//!
//! Main type: [`Chooser`]. `transformers` 5 has the same steps in the same order:
//!
//! ```text
//! repetition penalty      logits of earlier tokens: divided if positive, else multiplied
//! temperature             all logits are divided
//! top_k                   the k likeliest tokens remain, and those that are as likely as the last of them
//! top_p                   of these, the likeliest whose probabilities add up to p
//! min_p                   of these, the ones with at least p times the probability of the likeliest
//! random sample           one of the remaining tokens, by their probabilities
//! ```
//!
//! Greedy decoding has the first step only. Random numbers come from a ChaCha generator on the
//! host, so a seed gives the same tokens on all backends that compute the same logits.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::generate_error::GenerateError;
use super::options::{GenerateOptions, RandomSampling, Sampling};

impl RandomSampling {
    //= transformers 5.23.0 generation/utils.py _get_logits_processor
    /// Returns the tokens that remain after all filters, with weights that are proportional to
    /// their probabilities. At least one remains. The order depends on the logits and the options
    /// only.
    fn candidates(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        // `transformers` divides by the temperature first, which keeps the order of the logits, so
        // the same tokens remain.
        let kept = self.top_k.map_or(f32::NEG_INFINITY, |count| limit_of(logits, count));
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // The highest logit is subtracted, so that no exponential overflows. Its weight is 1.
        let weight =
            |logit: f32| ((f64::from(logit) - f64::from(highest)) / self.temperature).exp();
        // Ids fit u32, because a vocabulary has fewer than 2^24 tokens.
        let listed = (0..).zip(logits).filter(|(_, logit)| **logit >= kept);
        let mut candidates: Vec<_> = listed.map(|(id, logit)| (id, weight(*logit))).collect();
        if self.top_p < 1.0 {
            keep_mass(&mut candidates, self.top_p);
        }
        //= transformers 5.23.0 generation/logits_process.py MinPLogitsWarper
        // The likeliest token has weight 1, so weights are already relative to it.
        candidates.retain(|(_, weight)| *weight >= self.min_p);
        candidates
    }
}

//= transformers 5.23.0 generation/logits_process.py TopKLogitsWarper
/// Returns the lowest of the `count` highest logits, or minus infinity if there are fewer logits.
/// `count` must be positive.
fn limit_of(logits: &[f32], count: usize) -> f32 {
    if count > logits.len() {
        return f32::NEG_INFINITY;
    }
    let mut values = logits.to_vec();
    *values.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
}

/// The number of tokens that `keep_mass` sorts first.
const FEW_TOKENS: usize = 256;

//= transformers 5.23.0 generation/logits_process.py TopPLogitsWarper
/// Keeps the smallest set of most likely tokens whose share of all weights is at least `mass`, and
/// at least one token, in descending order.
///
/// Only as many tokens are sorted as are needed, because a vocabulary is large and the mass is
/// usually in a few tokens. All tokens are kept if their share stays below `mass` because of
/// rounding.
fn keep_mass(candidates: &mut Vec<(u32, f64)>, mass: f64) {
    // The weights do not add up to 1. Scaling the limit once is cheaper than scaling all weights.
    let limit = mass * candidates.iter().map(|(_, weight)| weight).sum::<f64>();
    // Equal weights are ordered by id, so that there is one order.
    let better = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let mut sorted = FEW_TOKENS;
    loop {
        if sorted < candidates.len() {
            // In linear time, the best tokens are moved to the front, still unsorted.
            candidates.select_nth_unstable_by(sorted, better);
        }
        let count = sorted.min(candidates.len());
        candidates[..count].sort_unstable_by(better);
        let mut sum = 0.0;
        let reached = candidates[..count].iter().position(|(_, weight)| {
            sum += weight;
            sum >= limit
        });
        if let Some(last) = reached {
            candidates.truncate(last + 1);
        }
        if reached.is_some() || count == candidates.len() {
            return;
        }
        // 256, 2,048, 16,384, …: a flat distribution over a large vocabulary takes few rounds.
        sorted *= 8;
    }
}

/// Samples a token by inverse transform sampling: returns the token at fraction `uniform`, in [0,
/// 1), of the cumulative weights. The weights do not have to add up to 1.
fn draw(candidates: &[(u32, f64)], uniform: f64) -> u32 {
    let mut left = uniform * candidates.iter().map(|(_, weight)| weight).sum::<f64>();
    for (id, weight) in candidates {
        left -= weight;
        if left < 0.0 {
            return *id;
        }
    }
    // Rounding can leave a small remainder after the last token with a weight, which is the right
    // choice then.
    candidates.iter().rev().find(|(_, weight)| *weight > 0.0).map_or(0, |(id, _)| *id)
}

/// Chooses tokens from logits.
#[derive(Debug)]
pub(super) struct Chooser {
    /// The options of random sampling and its generator; `None` for greedy decoding.
    random: Option<(RandomSampling, Box<ChaCha8Rng>)>,
    /// The repetition penalty; 1 has no effect.
    penalty: f32,
    /// The tokens of the sequence, each once, in ascending order. Empty if there is no penalty.
    repeated: Vec<u32>,
}

impl Chooser {
    /// Checks the options and seeds the generator. `prompt` has the tokens before the first choice.
    ///
    /// # Errors
    /// Returns [`GenerateError::Option`] if a value is out of range.
    pub(super) fn new(options: &GenerateOptions, prompt: &[u32]) -> Result<Self, GenerateError> {
        let random = match &options.sampling {
            Sampling::Greedy => None,
            Sampling::Random(random) => {
                random.check()?;
                let mut generator = Box::new(ChaCha8Rng::seed_from_u64(random.seed));
                generator.set_stream(random.stream);
                Some((random.clone(), generator))
            }
        };
        // Checked in f32, in which it is applied: 1e-60 would be a penalty of 0.
        let (value, penalty) = (options.repetition_penalty, options.repetition_penalty as f32);
        if !(penalty.is_finite() && penalty > 0.0) {
            let (name, rule) = ("repetition_penalty", "positive (1 has no effect)");
            return Err(GenerateError::Option { name, value, rule });
        }
        let mut chooser = Self { random, penalty, repeated: Vec::new() };
        prompt.iter().for_each(|token| chooser.note(*token));
        Ok(chooser)
    }

    /// Adds a token of the sequence to those that the repetition penalty applies to.
    fn note(&mut self, token: u32) {
        if self.penalty != 1.0
            && let Err(place) = self.repeated.binary_search(&token)
        {
            self.repeated.insert(place, token);
        }
    }

    //= transformers 5.23.0 generation/logits_process.py RepetitionPenaltyLogitsProcessor
    /// Applies the repetition penalty, in f32 as in `transformers`.
    fn penalize(&self, logits: &mut [f32]) {
        for token in &self.repeated {
            // The logits of padding are cut off, and an infinite logit has no other value.
            let logit = logits.get_mut(*token as usize).filter(|logit| logit.is_finite());
            if let Some(logit) = logit {
                // An overflow would make a finite logit infinite, which `choose` does not accept.
                let changed =
                    if *logit < 0.0 { *logit * self.penalty } else { *logit / self.penalty };
                *logit = changed.clamp(f32::MIN, f32::MAX);
            }
        }
    }

    /// Returns the id of the chosen token. The logits must not be empty, and at least one must be
    /// finite, the others finite or minus infinity.
    pub(super) fn choose(&mut self, mut logits: Vec<f32>) -> u32 {
        self.penalize(&mut logits);
        let token = match &mut self.random {
            None => most_likely(&logits),
            Some((options, generator)) => {
                // 53 random bits, the precision of an f64, give a uniform value in [0, 1).
                let uniform = (generator.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
                draw(&options.candidates(&logits), uniform)
            }
        };
        self.note(token);
        token
    }
}

/// Returns the token with the highest logit, the first of several.
pub(super) fn most_likely(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in (0..).zip(logits) {
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn random(temperature: f64, top_k: Option<usize>, top_p: f64) -> RandomSampling {
        RandomSampling { seed: 9, temperature, top_k, top_p, ..RandomSampling::default() }
    }

    fn chooser(sampling: Sampling, repetition_penalty: f64, prompt: &[u32]) -> Chooser {
        let options =
            GenerateOptions { sampling, repetition_penalty, ..GenerateOptions::greedy(1) };
        Chooser::new(&options, prompt).unwrap()
    }

    fn frequencies(sampling: &RandomSampling, logits: &[f32]) -> Vec<f64> {
        let mut chooser = chooser(Sampling::Random(sampling.clone()), 1.0, &[]);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[chooser.choose(logits.to_vec()) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    /// Logits of probabilities 1/2, 1/8, 1/4, 1/8.
    const LOGITS: [f32; 4] = [0.0, -1.386_294_4, -std::f32::consts::LN_2, -1.386_294_4];

    #[test]
    fn random_choice_follows_the_probabilities() {
        let table: [(RandomSampling, [f64; 4]); 7] = [
            (random(1.0, None, 1.0), [0.5, 0.125, 0.25, 0.125]),
            // Squared probabilities, of sum 11/32.
            (random(0.5, None, 1.0), [8.0 / 11.0, 0.5 / 11.0, 2.0 / 11.0, 0.5 / 11.0]),
            (random(1.0, Some(2), 1.0), [2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]),
            // The third and the fourth token are equally likely, so both are kept.
            (random(1.0, Some(3), 1.0), [0.5, 0.125, 0.25, 0.125]),
            (random(1.0, None, 0.6), [2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]),
            (random(1.0, None, 0.1), [1.0, 0.0, 0.0, 0.0]),
            (
                RandomSampling { min_p: 0.4, ..random(1.0, None, 1.0) },
                [2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0],
            ),
        ];
        for (sampling, expected) in table {
            for (found, expected) in frequencies(&sampling, &LOGITS).iter().zip(expected) {
                // Four standard errors of a frequency, at most 0.5 / sqrt(20000).
                assert!((found - expected).abs() < 0.0142, "{sampling:?}: {found} {expected}");
                assert_eq!(*found == 0.0, expected == 0.0);
            }
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(most_likely(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(most_likely(&[f32::NEG_INFINITY; 3]), 0);
    }

    /// Each stream of a seed is another sequence, and the same in each run.
    #[test]
    fn streams_differ_and_are_reproducible() {
        let sequence = |seed: u64, stream: u64| -> Vec<u32> {
            let sampling = RandomSampling { seed, stream, ..RandomSampling::default() };
            let mut chooser = chooser(Sampling::Random(sampling), 1.0, &[]);
            (0..40).map(|_| chooser.choose(vec![0.0; 1000])).collect()
        };
        let all = [(1, 0), (1, 1), (1, 2), (2, 0)].map(|(seed, stream)| sequence(seed, stream));
        assert_eq!(sequence(1, 1), all[1]);
        for (a, first) in all.iter().enumerate() {
            assert!(all[..a].iter().all(|other| other != first));
        }
    }

    //= transformers 5.23.0 generation/logits_process.py RepetitionPenaltyLogitsProcessor
    #[test]
    fn the_penalty_makes_tokens_of_the_prompt_and_new_ones_less_likely() {
        let logits = [3.0, 2.5, -1.0, 2.0];
        let mut greedy = chooser(Sampling::Greedy, 2.0, &[2, 0, 0, 70]);
        let mut penalized = logits.to_vec();
        greedy.penalize(&mut penalized);
        assert_eq!(penalized, [1.5, 2.5, -2.0, 2.0]);
        // Token 1 is penalized once it is chosen.
        assert_eq!([1, 3, 0].map(|_| greedy.choose(logits.to_vec())), [1, 3, 0]);
        let mut unchanged = logits.to_vec();
        chooser(Sampling::Greedy, 1.0, &[0, 1]).penalize(&mut unchanged);
        assert_eq!(unchanged, logits);
    }

    /// The steps as `transformers` defines them: each sets the logits of tokens to minus infinity.
    fn reference(options: &RandomSampling, logits: &[f32]) -> Vec<f64> {
        let softmax = |logits: &[f64]| -> Vec<f64> {
            let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let all: Vec<f64> = logits.iter().map(|logit| (logit - highest).exp()).collect();
            let sum: f64 = all.iter().sum();
            all.into_iter().map(|value| value / sum).collect()
        };
        let mut logits: Vec<f64> =
            logits.iter().map(|logit| f64::from(*logit) / options.temperature).collect();
        if let Some(count) = options.top_k {
            let mut sorted = logits.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let lowest = sorted[count.min(sorted.len()) - 1];
            logits.iter_mut().filter(|it| **it < lowest).for_each(|it| *it = f64::NEG_INFINITY);
        }
        if options.top_p < 1.0 {
            let probabilities = softmax(&logits);
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]).then(a.cmp(b)));
            let mut before = 0.0;
            for token in order {
                if before >= options.top_p {
                    logits[token] = f64::NEG_INFINITY;
                }
                before += probabilities[token];
            }
        }
        let probabilities = softmax(&logits);
        let highest = probabilities.iter().copied().fold(0.0, f64::max);
        for (logit, probability) in logits.iter_mut().zip(&probabilities) {
            if *probability < options.min_p * highest {
                *logit = f64::NEG_INFINITY;
            }
        }
        softmax(&logits)
    }

    proptest! {
        //= transformers 5.23.0 generation/utils.py _get_logits_processor
        //= transformers 5.23.0 generation/logits_process.py TopKLogitsWarper
        //= transformers 5.23.0 generation/logits_process.py TopPLogitsWarper
        //= transformers 5.23.0 generation/logits_process.py MinPLogitsWarper
        /// Thousands of tokens, so that `keep_mass` sorts several times. Few different logits give
        /// ties.
        #[test]
        fn filters_agree_with_a_reference(
            logits in proptest::collection::vec(
                prop_oneof![(-60_i8..60).prop_map(f32::from), -6_f32..6.0], 1..3000,
            ),
            temperature in prop_oneof![Just(1.0), 0.1_f64..5.0],
            top_k in prop_oneof![Just(None), (1_usize..4000).prop_map(Some)],
            top_p in prop_oneof![Just(1.0), 0.01_f64..1.0],
            min_p in prop_oneof![Just(0.0), 0.0_f64..1.0],
        ) {
            let options =
                RandomSampling { temperature, top_k, top_p, min_p, ..RandomSampling::default() };
            options.check().unwrap();
            let candidates = options.candidates(&logits);
            let sum: f64 = candidates.iter().map(|(_, weight)| weight).sum();
            let mut found = vec![0.0; logits.len()];
            for (id, weight) in &candidates {
                found[*id as usize] = weight / sum;
            }
            for (found, expected) in found.iter().zip(reference(&options, &logits)) {
                // The bound allows for thousands of f64 roundings. A random limit is practically
                // never so close to a cumulative weight that rounding decides which tokens remain.
                prop_assert!((found - expected).abs() < 1e-12, "{options:?}: {found} {expected}");
            }
        }
    }
}
