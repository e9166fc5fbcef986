//! What a model takes over from its tokenizer: the size of its vocabulary and its special tokens.

use std::path::Path;

use deepburn_config::Job;
use deepburn_datasets::Tokenizer;
use deepburn_models::gpt2::Gpt2Config;
use serde_json::{Map, Value};

use crate::data::corpus::tokenizer_of;
use crate::failure::Failure;

/// An embedding has a multiple of so many rows. Matrix kernels, on GPUs above all, are fastest at such sizes.
const ROWS: usize = 64;

/// Whether the number of rows of the embedding is decided without the tokenizer.
pub(crate) fn is_vocabulary_given(job: &Job) -> bool {
    job.model.pretrained.is_some() || job.model.config.contains_key("vocab_size")
}

/// A model from scratch takes the vocabulary of its tokenizer, unless the job gives a size.
///
/// # Errors
/// A user's mistake: more tokens than a model can have.
pub(crate) fn with_vocabulary(
    mut model: Gpt2Config,
    job: &Job,
    tokenizer: Option<&Tokenizer>,
) -> Result<Gpt2Config, Failure> {
    let Some(tokenizer) = tokenizer else { return Ok(model) };
    let tokens = tokenizer.vocab_size();
    if is_vocabulary_given(job) {
        if job.model.pretrained.is_none() && model.vocab_size >= tokens + ROWS {
            tracing::info!(
                "model.config.vocab_size: the model has {} tokens and the tokenizer {tokens}; without this \
                 key the model takes those of the tokenizer",
                model.vocab_size
            );
        }
        return Ok(model);
    }
    model.vocab_size = tokens.max(1).next_multiple_of(ROWS);
    tracing::info!(
        "the model's vocab_size is {}: the {tokens} tokens of the tokenizer, rounded up to a multiple of \
         {ROWS}",
        model.vocab_size
    );
    model.validate().map_err(|error| Failure::mistake(format!("data.tokenizer: {error}")))?;
    Ok(model)
}

/// A model marks and pads texts as its tokenizer does: takes the ids `names` from it that the job does not
/// give. A tokenizer that came with a checkpoint leaves the ids of that checkpoint.
///
/// # Errors
/// A user's mistake.
pub(crate) fn with_special_tokens(
    model: Gpt2Config,
    job: &Job,
    pretrained: Option<&Path>,
    tokenizer: &Tokenizer,
    names: &[&str],
) -> Result<Gpt2Config, Failure> {
    if job.data.tokenizer.is_none() && pretrained.and_then(tokenizer_of).is_some() {
        return Ok(model);
    }
    let mut ids = Map::new();
    for name in names.iter().filter(|name| !job.model.config.contains_key(**name)) {
        let token = name.strip_suffix("_id").unwrap_or(name);
        let id = tokenizer.special_token(token).or(tokenizer.end_of_text());
        ids.insert((*name).to_owned(), id.map_or(Value::Null, Value::from));
    }
    model.with_overrides(&ids).map_err(Failure::mistake)
}
