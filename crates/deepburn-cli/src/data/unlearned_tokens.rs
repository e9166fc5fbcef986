//! Special tokens of the data that an adapter cannot learn.
//!
//! Base models have not learned the tokens of turns if no training text contained them. An adapter
//! of linear layers does not change the rows of the embedding, so the model could then neither read
//! nor write these tokens.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use deepburn_datasets::{DataError, Sample, Samples, Tokenizer};
use deepburn_models::decoder::AnyDecoder;
use serde_json::json;

use crate::failure::Failure;

/// The number of samples whose tokens are looked at, evenly spaced over the train split.
const INSPECTED: usize = 256;

/// The number of added tokens that are compared with each other.
const COMPARED: usize = 512;

/// Warns of special tokens in `samples` that the base model in `folder` has not learned and that
/// the adapter of `config` does not train.
///
/// # Errors
/// Returns a user's mistake if the samples or the base model cannot be read.
pub(crate) fn warn_of_unlearned_tokens(
    config: &AnyDecoder,
    folder: &Path,
    samples: &Samples,
    tokenizer: &Tokenizer,
) -> Result<(), Failure> {
    if config.adapter().is_none() {
        return Ok(());
    }
    // Unused tokens are compared too: rows that nobody trained are often equal to each other.
    let (used, all) = added_tokens(tokenizer, samples)?;
    let found = config.unlearned_tokens(folder, &used, &all).map_err(Failure::mistake)?;
    let ids: HashSet<u32> = found.values().flatten().copied().collect();
    if ids.is_empty() {
        return Ok(());
    }
    let added = tokenizer.extra_tokens().into_iter().filter(|it| ids.contains(&it.id));
    let texts: Vec<String> = added.map(|it| format!("{:?}", it.text)).collect();
    // The rows of an existing adapter are fixed by its configuration.
    let is_new = config.trained_adapter().is_none();
    tracing::warn!(
        "the base model has not learned {} of the data (rows of its embedding or output layer are 0, or equal to others), and \
         the adapter does not train these rows: the model may never end a turn; {}set model.lora.trainable_token_indices to \
         {}, or use a base model that was trained with these tokens",
        texts.join(", "),
        if is_new { "" } else { "train a new adapter instead of model.adapter, and " },
        indices(&found, config.parts().head.is_tied),
    );
    Ok(())
}

/// Returns samples that are evenly spaced over the split.
pub(crate) fn inspected(samples: &Samples) -> impl Iterator<Item = Result<Sample, DataError>> + '_ {
    // A split has at least one sample, so the step is not 0.
    let step = samples.len().div_ceil(INSPECTED);
    (0..samples.len()).step_by(step).map(|index| samples.get(index))
}

/// Returns the ids of the added tokens that occur in the samples, and the ids of the first added
/// tokens.
///
/// # Errors
/// Returns a user's mistake if a sample cannot be read.
fn added_tokens(tokenizer: &Tokenizer, samples: &Samples) -> Result<(Vec<u32>, Vec<u32>), Failure> {
    let mut in_data = HashSet::new();
    for sample in inspected(samples) {
        in_data.extend(sample.map_err(Failure::mistake)?.ids);
    }
    let ids: Vec<u32> = tokenizer.extra_tokens().into_iter().map(|it| it.id).collect();
    let used = ids.iter().copied().filter(|id| in_data.contains(id)).collect();
    Ok((used, ids.into_iter().take(COMPARED).collect()))
}

/// Returns the value of `trainable_token_indices`. A list means the embedding, so an untied head
/// needs its name.
fn indices(found: &BTreeMap<String, Vec<u32>>, is_tied: bool) -> String {
    match found.values().next() {
        Some(tokens) if is_tied => json!(tokens).to_string(),
        _ => json!(found).to_string(),
    }
}
