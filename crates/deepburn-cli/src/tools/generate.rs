//! `deepburn generate`: continue a text with a language model.
//!
//! Decoding is greedy unless a sampling option is given. Random sampling depends only on `--seed`, so that the same
//! command prints the same text.

use std::path::PathBuf;

use clap::Args;
use deepburn_datasets::Tokenizer;
use deepburn_models::causal_lm::{GenerateOptions, Sampling};

use crate::console;
use crate::failure::Failure;
use crate::job::known_model::KnownModel;
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
    /// Maximum number of new tokens.
    #[arg(long, default_value_t = 40)]
    max_new_tokens: usize,
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

/// Returns the prompt with its continuation.
///
/// # Errors
/// Returns a user's mistake if the model is not a language model or has no tokenizer, if the prompt is empty, or if a
/// sampling option is out of range.
pub(crate) fn generate(arguments: &GenerateArguments) -> Result<String, Failure> {
    let GenerateArguments { prompt, max_new_tokens, top_k, top_p, temperature, seed, .. } =
        arguments;
    deepburn::start_threads().map_err(Failure::run)?;
    let folder = ModelFolder::find(&arguments.model, "--model")?.path;
    let KnownModel::LanguageModel(model) = KnownModel::read(Some(&folder))? else {
        return Err(Failure::mistake(format!(
            "--model: {} is a classifier; classify texts with `deepburn predict`, or give a language model",
            folder.display()
        )));
    };
    let tokenizer = Tokenizer::load(&folder).map_err(Failure::mistake)?;
    let tokens = tokenizer.encode(prompt).map_err(Failure::mistake)?;
    if tokens.is_empty() {
        return Err(Failure::mistake("--prompt: has no tokens; give a text to continue"));
    }
    let context = last_tokens(&tokens, *max_new_tokens, model.max_len())?;
    let sampling = match (top_k, top_p, temperature) {
        (None, None, None) => {
            if seed.is_some() {
                console::eprint(
                    "--seed has no effect: without --top-k, --top-p and --temperature, decoding is greedy",
                );
            }
            Sampling::Greedy
        }
        _ => Sampling::Random {
            seed: seed.unwrap_or(0),
            temperature: temperature.unwrap_or(1.0),
            top_k: *top_k,
            top_p: top_p.unwrap_or(1.0),
        },
    };
    let options = GenerateOptions {
        max_new_tokens: *max_new_tokens,
        sampling,
        stop: model.extra_fields().eos_token_ids(),
        // An embedding may have more rows than the tokenizer has tokens.
        num_tokens: Some(tokenizer.vocab_size()),
    };
    let new = model.continue_prompt(&folder, context, &options)?;
    tokenizer.decode(&[tokens, new].concat(), true).map_err(Failure::run)
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
