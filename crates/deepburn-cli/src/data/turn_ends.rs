//! The token that ends a learned turn, which should end generation too.
//!
//! Base models end a text with one token, and chat templates a turn with another. A model that
//! learns the latter still generates on after its answer, because no program stops there.

use deepburn_config::Job;
use deepburn_datasets::{Sample, Samples, Tokenizer};
use deepburn_models::LanguageModelConfig;
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{GenerationConfig, ModelConfigError};
use serde_json::{Map, Value};

use crate::data::job_tokenizer::VocabularyOrigin;
use crate::data::unlearned_tokens::inspected;
use crate::failure::Failure;

/// Returns the tokens that end a text of a model with this configuration and, if it has one, this
/// `generation_config.json`.
///
/// # Errors
/// Returns an error if a field of the file has another type.
pub(crate) fn end_tokens(
    config: &AnyDecoder,
    generation_config: Option<&Map<String, Value>>,
) -> Result<Vec<u32>, ModelConfigError> {
    let of_file = generation_config.map(|fields| GenerationConfig::new(fields.clone()));
    // As `deepburn generate` does it with the exported folder.
    Ok(match of_file.transpose()?.as_ref().and_then(GenerationConfig::eos_token_ids) {
        Some(ids) => ids.to_vec(),
        None => config.extra().eos_token_ids(),
    })
}

/// Returns whether the tokenizer of the job replaces the special tokens of the pretrained model,
/// whose end tokens are `own`: by other ids, or by an end of text that the model does not have.
pub(crate) fn replaces_tokens(
    own: &[u32],
    job: &Job,
    tokenizer: Option<&Tokenizer>,
    vocabulary: VocabularyOrigin,
) -> bool {
    let end = tokenizer.filter(|_| job.data.eos_token.is_some()).map(Tokenizer::end_of_text);
    let is_other_end = end.is_some_and(|end| end.is_none_or(|end| !own.contains(&end)));
    vocabulary == VocabularyOrigin::New || is_other_end
}

/// Warns of samples that end with a special token that does not end a text of the model, whose end
/// tokens are `ends`.
///
/// # Errors
/// Returns a user's mistake if a sample cannot be read.
pub(crate) fn warn_of_other_ends(
    job: &Job,
    samples: &Samples,
    tokenizer: &Tokenizer,
    ends: &[u32],
) -> Result<(), Failure> {
    let added = tokenizer.extra_tokens().into_iter().filter(|token| token.is_special);
    let special: Vec<u32> = added.map(|token| token.id).collect();
    for sample in inspected(samples) {
        let sample = sample.map_err(Failure::mistake)?;
        let text = |id: u32| tokenizer.decode(&[id], false).map_err(Failure::mistake);
        let Some((last, rest)) = other_end(&sample, &special, ends) else { continue };
        // Before other text, it begins a turn that has no end token.
        if !tokenizer.decode(&rest, false).map_err(Failure::mistake)?.trim().is_empty() {
            continue;
        }
        let known = ends.iter().map(|id| Ok(format!("{:?}", text(*id)?)));
        let known = known.collect::<Result<Vec<_>, Failure>>()?.join(", ");
        let last_text = text(last)?;
        // An id of the job takes precedence over the token that it names.
        let remedy = match job.model.config.contains_key("eos_token_id") {
            true => format!("add {last} to model.config.eos_token_id"),
            false => format!("set data.eos_token to {last_text:?}"),
        };
        tracing::warn!(
            "learned text ends with {last_text:?}, which does not end a text of the model ({}): generation would continue \
             after an answer; {remedy}",
            if ends.is_empty() {
                "it has no end token".to_owned()
            } else {
                format!("only {known}")
            }
        );
        return Ok(());
    }
    Ok(())
}

/// Returns the last token among `special` that the sample trains, and the trained tokens after it;
/// `None` if it trains a token of `ends`.
fn other_end(sample: &Sample, special: &[u32], ends: &[u32]) -> Option<(u32, Vec<u32>)> {
    let trained = sample.ids.iter().zip(&sample.trained).filter(|(_, trained)| **trained);
    let trained: Vec<u32> = trained.map(|(id, _)| *id).collect();
    if trained.iter().any(|id| ends.contains(id)) {
        return None;
    }
    let last = trained.iter().rposition(|id| special.contains(id))?;
    Some((trained[last], trained[last + 1..].to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_learned_special_token_is_an_end_if_the_sample_learns_none() {
        let sample = |ids: &[u32], first: usize| Sample {
            ids: ids.to_vec(),
            trained: (0..ids.len()).map(|at| at >= first).collect(),
        };
        let found = |sample| other_end(&sample, &[7, 8, 9], &[9]);
        assert_eq!(found(sample(&[7, 1, 8, 2], 0)), Some((8, vec![2])));
        // With an end of the text, and with an end that is not learned.
        assert_eq!(found(sample(&[7, 1, 8, 9], 0)), None);
        assert_eq!(found(sample(&[9, 7, 1, 2], 1)), Some((7, vec![1, 2])));
        // No special token is learned.
        assert_eq!(found(sample(&[7, 1, 2], 1)), None);
    }
}
