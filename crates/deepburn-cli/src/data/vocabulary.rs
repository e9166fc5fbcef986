//! Sets the vocabulary size and the special tokens of a model to the tokenizer's.
//!
//! A model and its tokenizer have to agree on both. Otherwise the model would be trained on ids
//! that it does not have. Values that the job sets explicitly always take precedence.

use deepburn_config::Job;
use deepburn_datasets::{END_OF_TEXT, Tokenizer};
use deepburn_models::LanguageModelConfig;
use serde_json::{Map, Value};

use crate::data::job_tokenizer::VocabularyOrigin;
use crate::failure::Failure;

/// The number of rows of an embedding is a multiple of this. Matrix kernels, especially on GPUs,
/// are fastest at such sizes.
const ROWS: usize = 64;

/// Returns whether the vocabulary size is set by the job or a pretrained model rather than by the
/// tokenizer.
pub(crate) fn is_vocabulary_given(job: &Job) -> bool {
    job.model.pretrained.is_some() || job.model.config.contains_key("vocab_size")
}

/// Sets the vocabulary size of a model without pretrained weights to its tokenizer's, unless the
/// job sets a size.
///
/// The size is rounded up to a multiple of [`ROWS`]. The additional rows are never used, because no
/// text contains their ids.
///
/// # Errors
/// Returns a user's mistake if the tokenizer has more tokens than the model supports.
pub(crate) fn with_vocabulary<C: LanguageModelConfig>(
    mut model: C,
    job: &Job,
    tokenizer: Option<&Tokenizer>,
) -> Result<C, Failure> {
    let Some(tokenizer) = tokenizer else { return Ok(model) };
    let tokens = tokenizer.vocab_size();
    if is_vocabulary_given(job) {
        // Rounding up adds fewer rows than this.
        if job.model.pretrained.is_none() && model.limits().vocab_size >= tokens + ROWS {
            tracing::info!(
                "model.config.vocab_size: the model has {} tokens, but the tokenizer {tokens}; without this key both have \
                 the same",
                model.limits().vocab_size
            );
        }
        return Ok(model);
    }
    model.set_vocab_size(tokens.max(1).next_multiple_of(ROWS));
    tracing::info!(
        "the model's vocab_size is {}: the {tokens} tokens of the tokenizer, rounded up to a multiple of {ROWS}",
        model.limits().vocab_size
    );
    model.validate().map_err(Failure::of_key("data.tokenizer"))?;
    Ok(model)
}

/// Sets the special tokens `names` of a model to its tokenizer's special tokens, except for tokens
/// that the job sets.
///
/// A pretrained model keeps its ids with its own tokenizer. A tokenizer with the same ids replaces
/// those that it names. With a new vocabulary, a pretrained model loses all its ids, because they
/// stand for other tokens. `data.eos_token` always applies.
///
/// # Errors
/// Returns a user's mistake if the model does not support the ids.
pub(crate) fn with_special_tokens<C: LanguageModelConfig>(
    model: C,
    job: &Job,
    tokenizer: Option<&Tokenizer>,
    vocabulary: VocabularyOrigin,
    names: &[&str],
) -> Result<C, Failure> {
    let mut ids = Map::new();
    let is_new = vocabulary == VocabularyOrigin::New;
    let is_inherited =
        |name: &&str| is_new && job.model.pretrained.is_some() && !names.contains(name);
    // Fields for tokens that the caller does not name, such as a decoder's start.
    let inherited = model.extra().token_fields().filter(is_inherited);
    let all = names.iter().copied().chain(inherited);
    for name in all.filter(|name| !job.model.config.contains_key(*name)) {
        let token = name.strip_suffix("_id").unwrap_or(name);
        let is_chosen = token == "eos_token" && job.data.eos_token.is_some();
        let chosen = tokenizer.and_then(Tokenizer::end_of_text).filter(|_| is_chosen);
        let named = || tokenizer?.special_token(token);
        let default = || default_id(tokenizer?, token).filter(|_| names.contains(&name));
        // The model's own tokenizer changes no id; one with the same ids may name further tokens; a
        // new one is the only source.
        let id = match vocabulary {
            VocabularyOrigin::Pretrained => chosen,
            VocabularyOrigin::SameIds => chosen.or_else(named),
            VocabularyOrigin::New => chosen.or_else(named).or_else(default),
        };
        // A null removes an id, which would stand for another token of a new vocabulary.
        if id.is_some() || is_new {
            ids.insert(name.to_owned(), id.map_or(Value::Null, Value::from));
        }
    }
    model.with_overrides(&ids).map_err(Failure::mistake)
}

/// Checks the special tokens that the job sets: the model must have an embedding for each.
///
/// # Errors
/// Returns a user's mistake that names the field.
pub(crate) fn check_special_tokens(job: &Job, vocab_size: usize) -> Result<(), Failure> {
    for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        let Some(value) = job.model.config.get(name) else { continue };
        let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        // Values that are not ids were refused with the configuration.
        let outside = ids.iter().filter_map(Value::as_u64).find(|id| *id >= vocab_size as u64);
        if let Some(id) = outside {
            return Err(Failure::mistake(format!(
                "model.config.{name}: out of range: {id}; the model has the tokens 0 to {}; give the id of one of them, or \
                 remove the key",
                vocab_size.saturating_sub(1)
            )));
        }
    }
    Ok(())
}

/// Returns the id of a special token that the tokenizer does not name: its end-of-text token, if it
/// has one, ends and pads texts. GPT-2's end-of-text token also begins them.
fn default_id(tokenizer: &Tokenizer, token: &str) -> Option<u32> {
    let is_gpt2 = || tokenizer.end_of_text_token().as_deref() == Some(END_OF_TEXT);
    tokenizer.end_of_text().filter(|_| token != "bos_token" || is_gpt2())
}
