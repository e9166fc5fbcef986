//! The settings of generation: options of the command line, or else values of `generation_config.json`.
//!
//! Main type: [`GenerationSettings`]. Tokens are sampled if an option of sampling is given, or if the file has `do_sample`. As in
//! `transformers`, sampling then uses the other values of the file, and a `top_k` of 50 if neither has one.

use std::fmt::Display;

use deepburn_models::causal_lm::{RandomSampling, Sampling};
use deepburn_models::hf::{DEFAULT_TOP_K, GenerationConfig, GenerationValues};

use super::GenerateArguments;
use crate::failure::Failure;

/// Maximum number of new tokens without `--max-new-tokens` and without a value in the file.
const MAX_NEW_TOKENS: usize = 40;

/// The settings of generation.
#[derive(Debug, PartialEq)]
pub(super) struct GenerationSettings {
    /// How tokens are chosen.
    pub(super) sampling: Sampling,
    /// The penalty of tokens that occurred before.
    pub(super) repetition_penalty: f64,
    /// The maximum number of new tokens.
    pub(super) max_new_tokens: usize,
    /// Messages about values that come from the file, and about those that have no effect.
    pub(super) notes: Vec<String>,
}

impl GenerationSettings {
    /// Returns the settings for a prompt and a model with these numbers of tokens and positions.
    ///
    /// # Errors
    /// Returns a user's mistake if `max_length` of the file is not longer than the prompt, or if several sequences are
    /// wanted, but tokens are not sampled.
    pub(super) fn new(
        arguments: &GenerateArguments,
        config: Option<&GenerationConfig>,
        [prompt, positions]: [usize; 2],
    ) -> Result<Self, Failure> {
        let mut source = ChosenValues { used: Vec::new() };
        let values = config.map(|config| *config.values()).unwrap_or_default();
        let sampling = sampling(arguments, &values, &mut source);
        let samples = sampling != Sampling::Greedy;
        if let (false, Some(count @ 2..)) = (samples, arguments.num_return_sequences) {
            return Err(Failure::mistake(format!(
                "--num-return-sequences: {count} texts would be the same, because decoding is greedy; sample with \
                 --temperature, --top-k, --top-p or --min-p"
            )));
        }
        let penalty = values.repetition_penalty;
        let repetition_penalty =
            source.choose("repetition_penalty", arguments.repetition_penalty, penalty, 1.0);
        let max_new_tokens = max_new_tokens(arguments, &values, [prompt, positions], &mut source)?;
        let mut notes = Vec::new();
        notes.extend(source.note());
        notes.extend(config.and_then(|config| unapplied(config, arguments, samples)));
        if arguments.seed.is_some() && !samples {
            notes.push(
                "--seed has no effect, because decoding is greedy; sample with --temperature, --top-k, --top-p or \
                 --min-p"
                    .to_owned(),
            );
        }
        Ok(Self { sampling, repetition_penalty, max_new_tokens, notes })
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

/// Returns how tokens are chosen.
fn sampling(
    arguments: &GenerateArguments,
    values: &GenerationValues,
    source: &mut ChosenValues,
) -> Sampling {
    let &GenerateArguments { greedy, top_k, top_p, min_p, temperature, seed, .. } = arguments;
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

/// Returns the maximum number of new tokens. A value of the file is limited to the positions that the prompt leaves.
fn max_new_tokens(
    arguments: &GenerateArguments,
    values: &GenerationValues,
    [prompt, positions]: [usize; 2],
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
        (None, None) => return Ok(MAX_NEW_TOKENS),
    };
    // The prompt is cut if it leaves no position, but not for the sake of a value that nobody asked for here.
    let room = positions.saturating_sub(prompt);
    Ok(count.min(if room == 0 { MAX_NEW_TOKENS } else { room }))
}

/// Returns a note about the fields of the file that change what `transformers` generates and are not applied here;
/// `None` if there are none.
fn unapplied(
    config: &GenerationConfig,
    arguments: &GenerateArguments,
    samples: bool,
) -> Option<String> {
    let mut given = Vec::new();
    given.extend(arguments.num_return_sequences.map(|_| "num_return_sequences"));
    given.extend((!arguments.stop.is_empty()).then_some("stop_strings"));
    let fields = config.unapplied(&given, samples);
    (!fields.is_empty()).then(|| {
        let fields = fields.join(", ");
        format!("generation_config.json: not applied: {fields}; transformers applies them")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn settings(arguments: &GenerateArguments, file: Value) -> GenerationSettings {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("generation_config.json"), file.to_string()).unwrap();
        let config = GenerationConfig::read(folder.path()).unwrap();
        GenerationSettings::new(arguments, config.as_ref(), [7, 100]).unwrap()
    }

    fn random(settings: &GenerationSettings) -> &RandomSampling {
        let Sampling::Random(random) = &settings.sampling else { panic!("{settings:?}") };
        random
    }

    #[test]
    fn the_file_decides_and_options_win() {
        let none = GenerateArguments::default();
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
        let given = GenerateArguments {
            temperature: Some(0.9),
            top_k: Some(0),
            seed: Some(3),
            ..GenerateArguments::default()
        };
        let found = settings(&given, file.clone());
        let expected = RandomSampling { temperature: 0.9, seed: 3, top_k: None, ..expected };
        assert_eq!(random(&found), &expected);
        let note = "generation_config.json: min_p 0.1 is applied; options of the command line replace its values";
        assert_eq!(found.notes, [note]);
        let greedy = GenerateArguments { greedy: true, ..GenerateArguments::default() };
        let found = settings(&greedy, file);
        assert_eq!((found.sampling, found.notes), (Sampling::Greedy, Vec::new()));
        // Without `do_sample`, values of sampling have no effect, but the penalty has.
        let found = settings(&none, json!({"temperature": 0.6, "repetition_penalty": 1.2}));
        assert_eq!((found.sampling, found.repetition_penalty), (Sampling::Greedy, 1.2));
        // They have one if options sample.
        let hot = GenerateArguments { top_p: Some(0.5), ..GenerateArguments::default() };
        let found = settings(&hot, json!({"temperature": 0.6, "top_k": 0, "top_p": 0.9}));
        let expected = RandomSampling { temperature: 0.6, top_p: 0.5, ..RandomSampling::default() };
        assert_eq!(random(&found), &expected);
    }

    #[test]
    fn the_number_of_new_tokens() {
        let none = GenerateArguments::default();
        let given = GenerateArguments { max_new_tokens: Some(5), ..GenerateArguments::default() };
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
