//! `deepburn generate`: continue a text with a language model.
//!
//! Decoding is greedy unless a sampling option is given. Random sampling depends only on `--seed`, so that the same
//! command prints the same text.
//!
//! Generation stops at the end tokens of `generation_config.json`, or else of `config.json`. Other fields of
//! `generation_config.json` are not applied, and a note names those that would change the text:
//!
//! ```text
//! generation_config.json: not applied: do_sample, temperature; transformers applies them; sample with --top-k, --top-p
//! and --temperature
//! ```

use std::path::PathBuf;

use clap::Args;
use deepburn_datasets::Tokenizer;
use deepburn_models::causal_lm::{GenerateOptions, Sampling};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::GenerationConfig;
use deepburn_models::{Architecture, LanguageModelConfig};

use crate::console;
use crate::failure::Failure;
use crate::job::known_model::{KnownModel, continue_prompt};
use crate::job::model_folder::ModelFolder;

/// Options of `deepburn generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// Folder of a run, or of a model with its tokenizer.
    #[arg(long)]
    model: PathBuf,
    /// Text to continue.
    #[arg(long)]
    prompt: String,
    /// Maximum number of new tokens [default: 40].
    #[arg(long)]
    max_new_tokens: Option<usize>,
    /// Sample from the K likeliest tokens. Without --top-k, --top-p and --temperature, decoding is greedy.
    #[arg(long, allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Sample from the likeliest tokens whose probabilities add up to P.
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Divide logits by T before sampling. Lower values favour likely tokens.
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Seed of the sampling [default: 0].
    #[arg(long)]
    seed: Option<u64>,
}

/// Maximum number of new tokens without `--max-new-tokens`.
const MAX_NEW_TOKENS: usize = 40;

impl GenerateArguments {
    /// Returns the method that chooses tokens. Prints a note if `--seed` has no effect.
    fn sampling(&self) -> Sampling {
        let Self { top_k, top_p, temperature, seed, .. } = self;
        if !self.is_sampling() {
            if seed.is_some() {
                console::eprint(
                    "--seed has no effect: without --top-k, --top-p and --temperature, decoding is greedy",
                );
            }
            return Sampling::Greedy;
        }
        Sampling::Random {
            seed: seed.unwrap_or(0),
            temperature: temperature.unwrap_or(1.0),
            top_k: *top_k,
            top_p: top_p.unwrap_or(1.0),
        }
    }

    /// Returns whether an option of sampling is given.
    fn is_sampling(&self) -> bool {
        self.top_k.is_some() || self.top_p.is_some() || self.temperature.is_some()
    }

    /// Returns the fields of `generation_config.json` that options replace.
    fn given_fields(&self) -> Vec<&'static str> {
        let mut given = Vec::new();
        if self.max_new_tokens.is_some() {
            given.extend(["max_new_tokens", "max_length"]);
        }
        given.extend(self.top_k.map(|_| "top_k"));
        given.extend(self.top_p.map(|_| "top_p"));
        given.extend(self.temperature.map(|_| "temperature"));
        given
    }
}

/// Returns the prompt with its continuation.
///
/// # Errors
/// Returns a user's mistake if the model is not a language model or has no tokenizer, if its `generation_config.json`
/// is malformed, if the prompt is empty, or if a sampling option is out of range. Returns a failure while running if
/// the model computes NaN.
pub(crate) fn generate(arguments: &GenerateArguments) -> Result<String, Failure> {
    let max_new_tokens = arguments.max_new_tokens.unwrap_or(MAX_NEW_TOKENS);
    deepburn::start_threads().map_err(Failure::run)?;
    let folder = ModelFolder::find(&arguments.model, "--model")?.path;
    let KnownModel::LanguageModel(model) = KnownModel::read(Some(&folder))? else {
        return Err(Failure::mistake(format!(
            "--model: {} is a classifier; classify texts with `deepburn predict`, or give a language model",
            folder.display()
        )));
    };
    let tokenizer = Tokenizer::load(&folder).map_err(Failure::mistake)?;
    let tokens = tokenizer.encode(&arguments.prompt).map_err(Failure::mistake)?;
    if tokens.is_empty() {
        return Err(Failure::mistake("--prompt: has no tokens; give a text to continue"));
    }
    let context = last_tokens(&tokens, max_new_tokens, model.max_len())?;
    let sampling = arguments.sampling();
    let config = GenerationConfig::read(&folder).map_err(Failure::mistake)?;
    if let Some(note) = config.as_ref().and_then(|config| note_unapplied(config, arguments)) {
        console::eprint(&note);
    }
    let options = GenerateOptions {
        max_new_tokens,
        sampling,
        stop: end_tokens(&model, config.as_ref(), tokenizer.vocab_size()),
        // An embedding may have more rows than the tokenizer has tokens.
        num_tokens: Some(tokenizer.vocab_size()),
    };
    let new = continue_prompt(&model, &folder, context, &options)?;
    tokenizer.decode(&[tokens, new].concat(), true).map_err(Failure::run)
}

/// Returns the tokens after which generation stops. Prints a note about ids that are not among the `vocab_size` tokens
/// of the tokenizer, because they are never generated.
fn end_tokens(
    model: &AnyDecoder,
    config: Option<&GenerationConfig>,
    vocab_size: usize,
) -> Vec<u32> {
    let (source, ids) = match config.and_then(GenerationConfig::eos_token_ids) {
        Some(ids) => ("generation_config.json", ids.to_vec()),
        None => ("config.json", model.extra().eos_token_ids()),
    };
    let unknown: Vec<_> = ids.iter().filter(|id| **id as usize >= vocab_size).collect();
    if let [first, rest @ ..] = &unknown[..] {
        let more =
            if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        console::eprint(&format!(
            "{source}: eos_token_id {first}{more} cannot end the text: the tokenizer has {vocab_size} tokens"
        ));
    }
    ids
}

/// Returns a note about the fields of `generation_config.json` that change what `transformers` generates and are not
/// applied here; `None` if there are none.
fn note_unapplied(config: &GenerationConfig, arguments: &GenerateArguments) -> Option<String> {
    let samples = arguments.is_sampling();
    let fields = config.unapplied(&arguments.given_fields(), samples);
    if fields.is_empty() {
        return None;
    }
    let remedy = match fields.contains(&"do_sample") {
        true => "; sample with --top-k, --top-p and --temperature",
        false => "",
    };
    Some(format!(
        "generation_config.json: not applied: {}; transformers applies them{remedy}",
        fields.join(", ")
    ))
}

/// Returns the last tokens of a prompt that fit into the model's positions together with `new` tokens. Prints a note if
/// the prompt is longer.
///
/// The beginning of a long prompt is dropped, because its end is most relevant for the continuation.
///
/// # Errors
/// Returns a user's mistake if the new tokens alone take all positions.
fn last_tokens(tokens: &[u32], new: usize, positions: usize) -> Result<&[u32], Failure> {
    let room = positions.saturating_sub(new);
    if room == 0 {
        return Err(Failure::mistake(format!(
            "--max-new-tokens: too many: {new}; the model has {positions} positions for prompt and new tokens \
             together; use a smaller number"
        )));
    }
    if tokens.len() > room {
        console::eprint(&format!(
            "the prompt is cut to its last {room} of {} tokens: the model has {positions} positions, and {new} are \
             for new tokens",
            tokens.len()
        ));
    }
    Ok(&tokens[tokens.len().saturating_sub(room)..])
}
