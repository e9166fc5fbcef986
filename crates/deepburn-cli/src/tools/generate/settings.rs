//! The settings of generation: options of the command line, or else values of
//! `generation_config.json`.
//!
//! Main type: [`GenerationSettings`]. Tokens are sampled if an option of sampling is given, or if
//! the file has `do_sample`. As in `transformers`, sampling then uses the other values of the file,
//! and a `top_k` of 50 if neither has one.

use std::fmt::Display;

use clap::Args;
use deepburn_datasets::Tokenizer;
use deepburn_models::causal_lm::{GenerateOptions, RandomSampling, Sampling};
use deepburn_models::hf::{DEFAULT_TOP_K, GenerationConfig, GenerationValues};

use crate::failure::Failure;

/// Options that decide how tokens are chosen.
#[derive(Debug, Args)]
#[cfg_attr(test, derive(Default))]
pub(crate) struct SamplingArguments {
    /// Maximum number of new tokens [default: from generation_config.json, else 40, or 1024 in a
    /// chat].
    #[arg(long)]
    pub(super) max_new_tokens: Option<usize>,
    /// Choose the likeliest token, even if generation_config.json samples.
    #[arg(long, conflicts_with_all = ["top_k", "top_p", "min_p", "temperature"])]
    pub(super) greedy: bool,
    /// Sample from the K likeliest tokens; 0 keeps all [default: from generation_config.json, else
    /// 50].
    #[arg(long, allow_negative_numbers = true)]
    pub(super) top_k: Option<usize>,
    /// Sample from the likeliest tokens whose probabilities add up to P.
    #[arg(long, allow_negative_numbers = true)]
    pub(super) top_p: Option<f64>,
    /// Sample from the tokens with at least P times the probability of the likeliest token.
    #[arg(long, allow_negative_numbers = true)]
    pub(super) min_p: Option<f64>,
    /// Divide logits by T before sampling. Lower values favor likely tokens.
    #[arg(long, allow_negative_numbers = true)]
    pub(super) temperature: Option<f64>,
    /// Make tokens that occurred before less likely; 1 has no effect.
    #[arg(long, allow_negative_numbers = true)]
    pub(super) repetition_penalty: Option<f64>,
    /// Seed of the sampling [default: 0].
    #[arg(long)]
    pub(super) seed: Option<u64>,
}

/// The settings of generation.
#[derive(Debug, PartialEq)]
pub(crate) struct GenerationSettings {
    /// How tokens are chosen.
    pub(crate) sampling: Sampling,
    /// The penalty of tokens that occurred before.
    pub(crate) repetition_penalty: f64,
    /// The maximum number of new tokens.
    pub(crate) max_new_tokens: usize,
    /// Messages about values that come from the file, and about those that have no effect.
    pub(crate) notes: Vec<String>,
}

impl GenerationSettings {
    /// Returns the settings for a prompt and a model with these numbers of tokens and positions.
    /// `most` is the maximum number of new tokens without an option and without a value in the
    /// file.
    ///
    /// # Errors
    /// Returns a user's mistake if `max_length` of the file is not longer than the prompt.
    pub(crate) fn new(
        arguments: &SamplingArguments,
        config: Option<&GenerationConfig>,
        [prompt, positions]: [usize; 2],
        most: usize,
    ) -> Result<Self, Failure> {
        let mut source = ChosenValues { used: Vec::new() };
        let values = config.map(|config| *config.values()).unwrap_or_default();
        let sampling = sampling(arguments, &values, &mut source);
        let samples = sampling != Sampling::Greedy;
        let penalty = values.repetition_penalty;
        let repetition_penalty =
            source.choose("repetition_penalty", arguments.repetition_penalty, penalty, 1.0);
        let max_new_tokens =
            max_new_tokens(arguments, &values, [prompt, positions], most, &mut source)?;
        let mut notes = Vec::new();
        notes.extend(source.note());
        if arguments.seed.is_some() && !samples {
            notes.push(
                "--seed has no effect, because decoding is greedy; sample with --temperature, --top-k, --top-p or \
                 --min-p"
                    .to_owned(),
            );
        }
        Ok(Self { sampling, repetition_penalty, max_new_tokens, notes })
    }

    /// Returns the options of generation. `stop` are the tokens that end a text.
    pub(crate) fn options(self, stop: Vec<u32>, tokenizer: &Tokenizer) -> GenerateOptions {
        let Self { sampling, repetition_penalty, max_new_tokens, notes: _ } = self;
        // An embedding may have more rows than the tokenizer has tokens.
        let num_tokens = Some(tokenizer.vocab_size());
        GenerateOptions { max_new_tokens, sampling, repetition_penalty, stop, num_tokens }
    }

    /// Checks that `count` sequences would differ.
    ///
    /// # Errors
    /// Returns a user's mistake if several sequences are wanted, but tokens are not sampled.
    pub(super) fn check_sequences(&self, count: Option<u32>) -> Result<(), Failure> {
        match (&self.sampling, count) {
            (Sampling::Greedy, Some(count @ 2..)) => Err(Failure::mistake(format!(
                "--num-return-sequences: {count} texts would be the same, because decoding is greedy; sample with \
                 --temperature, --top-k, --top-p or --min-p"
            ))),
            _ => Ok(()),
        }
    }
}

/// Chooses between options and the file, and collects the values of the file that are used.
struct ChosenValues {
    /// The fields with their values.
    used: Vec<String>,
}

impl ChosenValues {
    /// Returns the option, or else the value of the file, or else the default.
    fn choose<T: Display + PartialEq>(
        &mut self,
        name: &str,
        option: Option<T>,
        in_file: Option<T>,
        default: T,
    ) -> T {
        match (option, in_file) {
            (Some(option), _) => option,
            (None, Some(value)) => {
                if value != default {
                    self.used.push(format!("{name} {value}"));
                }
                value
            }
            (None, None) => default,
        }
    }

    /// Returns a note about the values of the file that are used.
    fn note(&self) -> Option<String> {
        let (last, others) = self.used.split_last()?;
        let listed = match others {
            [] => format!("{last} is"),
            others => format!("{} and {last} are", others.join(", ")),
        };
        let greedy = match self.used.iter().any(|it| it == "do_sample") {
            true => ", and --greedy decodes greedily",
            false => "",
        };
        Some(format!(
            "generation_config.json: {listed} applied; options of the command line replace its values{greedy}"
        ))
    }
}

//= transformers 5.23.0 generation/configuration_utils.py _get_default_generation_params
/// Returns how tokens are chosen.
fn sampling(
    arguments: &SamplingArguments,
    values: &GenerationValues,
    source: &mut ChosenValues,
) -> Sampling {
    let &SamplingArguments { greedy, top_k, top_p, min_p, temperature, seed, .. } = arguments;
    let asked = top_k.is_some() || top_p.is_some() || min_p.is_some() || temperature.is_some();
    if greedy || !asked && values.do_sample != Some(true) {
        return Sampling::Greedy;
    }
    if !asked {
        source.used.push("do_sample".to_owned());
    }
    let temperature = source.choose("temperature", temperature, values.temperature, 1.0);
    let count = source.choose("top_k", top_k, values.top_k, DEFAULT_TOP_K);
    Sampling::Random(RandomSampling {
        seed: seed.unwrap_or(0),
        stream: 0,
        temperature,
        top_k: (count > 0).then_some(count),
        top_p: source.choose("top_p", top_p, values.top_p, 1.0),
        min_p: source.choose("min_p", min_p, values.min_p, 0.0),
    })
}

/// Returns the maximum number of new tokens. A value of the file is limited to the positions that
/// the prompt leaves.
fn max_new_tokens(
    arguments: &SamplingArguments,
    values: &GenerationValues,
    [prompt, positions]: [usize; 2],
    most: usize,
    source: &mut ChosenValues,
) -> Result<usize, Failure> {
    if let Some(count) = arguments.max_new_tokens {
        return Ok(count);
    }
    let count = match (values.max_new_tokens, values.max_length) {
        (Some(count), _) => {
            source.used.push(format!("max_new_tokens {count}"));
            count
        }
        (None, Some(length)) if length <= prompt => {
            return Err(Failure::mistake(format!(
                "generation_config.json: max_length is {length}, but the prompt has {prompt} tokens already; set the \
                 number of new tokens with --max-new-tokens"
            )));
        }
        (None, Some(length)) => {
            source.used.push(format!("max_length {length}"));
            length - prompt
        }
        (None, None) => return Ok(most),
    };
    // If the prompt leaves no position, it is cut to make room for at most `most` tokens.
    // Otherwise, a value of the file never cuts it.
    let room = positions.saturating_sub(prompt);
    Ok(count.min(if room == 0 { most } else { room }))
}

/// Returns a note about the fields of the file that change what `transformers` generates and are
/// not applied here; `None` if there are none. `given` are fields that options replace.
pub(crate) fn unapplied_note(
    config: &GenerationConfig,
    given: &[&str],
    sampling: &Sampling,
) -> Option<String> {
    let fields = config.unapplied(given, *sampling != Sampling::Greedy);
    (!fields.is_empty()).then(|| {
        let fields = fields.join(", ");
        format!("generation_config.json: not applied: {fields}; transformers applies them")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn settings(arguments: &SamplingArguments, file: Value) -> GenerationSettings {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("generation_config.json"), file.to_string()).unwrap();
        let config = GenerationConfig::read(folder.path()).unwrap();
        GenerationSettings::new(arguments, config.as_ref(), [7, 100], 40).unwrap()
    }

    fn random(settings: &GenerationSettings) -> &RandomSampling {
        let Sampling::Random(random) = &settings.sampling else { panic!("{settings:?}") };
        random
    }

    //= transformers 5.23.0 generation/configuration_utils.py _get_default_generation_params
    #[test]
    fn the_file_decides_and_options_win() {
        let none = SamplingArguments::default();
        let file = json!({"do_sample": true, "temperature": 0.6, "min_p": 0.1, "top_p": 1.0});
        let found = settings(&none, file.clone());
        let expected = RandomSampling {
            temperature: 0.6,
            min_p: 0.1,
            top_k: Some(50),
            ..RandomSampling::default()
        };
        assert_eq!(random(&found), &expected);
        let note = "generation_config.json: do_sample, temperature 0.6 and min_p 0.1 are applied; options of the \
                    command line replace its values, and --greedy decodes greedily";
        assert_eq!(found.notes, [note]);
        let given = SamplingArguments {
            temperature: Some(0.9),
            top_k: Some(0),
            seed: Some(3),
            ..SamplingArguments::default()
        };
        let found = settings(&given, file.clone());
        let expected = RandomSampling { temperature: 0.9, seed: 3, top_k: None, ..expected };
        assert_eq!(random(&found), &expected);
        let note = "generation_config.json: min_p 0.1 is applied; options of the command line replace its values";
        assert_eq!(found.notes, [note]);
        let greedy = SamplingArguments { greedy: true, ..SamplingArguments::default() };
        let found = settings(&greedy, file);
        assert_eq!((found.sampling, found.notes), (Sampling::Greedy, Vec::new()));
        // Without `do_sample`, values of sampling have no effect, but the penalty has.
        let found = settings(&none, json!({"temperature": 0.6, "repetition_penalty": 1.2}));
        assert_eq!((found.sampling, found.repetition_penalty), (Sampling::Greedy, 1.2));
        // They have one if options sample.
        let hot = SamplingArguments { top_p: Some(0.5), ..SamplingArguments::default() };
        let found = settings(&hot, json!({"temperature": 0.6, "top_k": 0, "top_p": 0.9}));
        let expected = RandomSampling { temperature: 0.6, top_p: 0.5, ..RandomSampling::default() };
        assert_eq!(random(&found), &expected);
    }

    #[test]
    fn the_number_of_new_tokens() {
        let none = SamplingArguments::default();
        let given = SamplingArguments { max_new_tokens: Some(5), ..SamplingArguments::default() };
        for (arguments, file, expected) in [
            (&none, json!({}), 40),
            (&none, json!({"max_length": 20}), 13),
            (&none, json!({"max_length": 20, "max_new_tokens": 30}), 30),
            // The prompt leaves 93 positions.
            (&none, json!({"max_length": 2048}), 93),
            (&given, json!({"max_length": 3, "max_new_tokens": 30}), 5),
        ] {
            assert_eq!(settings(arguments, file.clone()).max_new_tokens, expected, "{file}");
        }
    }
}
