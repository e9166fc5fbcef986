//! Tokens that a base model has not learned and that its adapter cannot learn.
//!
//! The files of many base models have rows for special tokens that no training text contained: the
//! rows are 0, or almost equal to each other. An adapter that does not train these rows leaves the
//! model unable to read or to write the tokens, and the loss hardly shows it.

use std::collections::BTreeMap;
use std::path::Path;

use super::any::AnyDecoder;
use crate::architecture::{Architecture, LanguageModelConfig};
use crate::hf::{BaseModel, ModelFolderError};

/// The number of rows with which the others are compared, evenly spaced over the vocabulary.
const COMPARED: usize = 256;

/// The norm of a row that was not learned, relative to the median of the compared rows, at most.
/// Such a row is 0 but for noise.
const SMALLEST_NORM: f32 = 0.01;

/// The distance of rows that count as equal, at most, relative to their norm or the median of the
/// compared rows, whichever is larger. `resize_token_embeddings` of `transformers` draws new rows
/// around the mean of the others, which is much smaller than most rows, from a normal distribution
/// with 1e-9 of their covariance: the distance is about 5e-5 of the norm of most rows.
const LARGEST_DISTANCE: f32 = 1e-3;

impl AnyDecoder {
    /// Returns the tokens among `tokens` whose row of the embedding, or of an untied head, the base
    /// model in `folder` seems not to have learned, if the adapter does not train it either, by the
    /// name of the module. `others` are tokens that may have equal rows, such as reserved ones.
    /// Returns nothing without an adapter.
    ///
    /// # Errors
    /// Returns an error if a file is missing, unreadable or malformed.
    pub fn unlearned_tokens(
        &self,
        folder: &Path,
        tokens: &[u32],
        others: &[u32],
    ) -> Result<BTreeMap<String, Vec<u32>>, ModelFolderError> {
        let mut found = BTreeMap::new();
        let Some(adapter) = self.adapter() else { return Ok(found) };
        let (parts, rows) = (self.base().parts(), self.limits().vocab_size as u32);
        let paths =
            [Some(parts.embedding_path()), (!parts.head.is_tied).then(|| parts.head_path())];
        let mut base = BaseModel::open(folder, self.base().weight_map())?;
        for path in paths.into_iter().flatten() {
            let module = path.strip_suffix(".weight").unwrap_or(&path);
            // Then all rows can learn.
            if adapter.trains(&path) || adapter.module(module).is_some() {
                continue;
            }
            let trained = adapter.trained_tokens(module).unwrap_or_default();
            let frozen = |token: &u32| *token < rows && !trained.contains(&(*token as usize));
            let tokens: Vec<u32> = tokens.iter().copied().filter(frozen).collect();
            let others: Vec<u32> = others.iter().copied().filter(|it| *it < rows).collect();
            let unlearned = unlearned_rows(&mut base, &path, (&tokens, &others), rows)?;
            if !unlearned.is_empty() {
                found.insert(module.to_owned(), unlearned);
            }
        }
        Ok(found)
    }
}

/// Returns the tokens among `tokens` whose row of the matrix at `path` is much smaller than most
/// rows, or almost equal to the row of another token. The matrix has `rows` rows.
///
/// # Errors
/// Returns an error if the matrix cannot be read.
fn unlearned_rows(
    base: &mut BaseModel,
    path: &str,
    (tokens, others): (&[u32], &[u32]),
    rows: u32,
) -> Result<Vec<u32>, ModelFolderError> {
    // Embeddings and heads are stored as in the module, so there always is a row.
    let mut row = |token: u32| Ok(base.read_row(path, token as usize)?.unwrap_or_default());
    let norm = |values: &[f32]| values.iter().map(|it| it * it).sum::<f32>().sqrt();
    let step = (rows as usize).div_ceil(COMPARED).max(1);
    let mut norms = Vec::new();
    for token in (0..rows).step_by(step) {
        norms.push(norm(&row(token)?));
    }
    norms.sort_by(f32::total_cmp);
    // The median does not depend on the rows that were not learned, as long as they are few.
    let median = norms.get(norms.len() / 2).copied().unwrap_or(0.0);
    let mut candidates = Vec::new();
    for token in tokens {
        candidates.push((*token, row(*token)?));
    }
    let mut found = Vec::new();
    for (token, values) in &candidates {
        if norm(values) <= SMALLEST_NORM * median {
            found.push(*token);
        }
    }
    for other in others {
        let values = row(*other)?;
        let is_equal = |own: &[f32]| {
            let difference: Vec<f32> = own.iter().zip(&values).map(|(a, b)| a - b).collect();
            norm(&difference) <= LARGEST_DISTANCE * norm(&values).max(median)
        };
        let equal = candidates.iter().filter(|(token, own)| token != other && is_equal(own));
        found.extend(equal.map(|(token, _)| *token));
    }
    // A row may be small, and equal to several others.
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use burn_flex::{Flex, FlexDevice};
    use deepburn_files::safetensors::FloatType;
    use deepburn_lora::LoraConfig;
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::architecture::SavedConfig;
    use crate::decoder::Decoder;
    use crate::families::LlamaConfig;

    const VOCAB: usize = 40;

    fn config(is_tied: bool) -> LlamaConfig {
        let fields = json!({
            "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
            "tie_word_embeddings": is_tied,
        });
        LlamaConfig::from_fields(fields.as_object().unwrap().clone()).unwrap()
    }

    /// Returns a model folder in which some rows of a matrix have these values.
    fn folder(is_tied: bool, matrix: &str, rows: &[(usize, f32)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let model: Decoder<Flex> = Decoder::new(&config(is_tied), 3, &FlexDevice).unwrap();
        model.save(folder.path(), FloatType::F32).unwrap();
        let path = folder.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        let length = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..length]).unwrap();
        let start = length + header[matrix]["data_offsets"][0].as_u64().unwrap() as usize;
        for (row, value) in rows {
            let at = start + row * 8 * 4;
            for element in bytes[at..at + 8 * 4].chunks_exact_mut(4) {
                element.copy_from_slice(&value.to_le_bytes());
            }
        }
        std::fs::write(&path, bytes).unwrap();
        folder
    }

    fn unlearned((is_tied, folder): (bool, &Path), lora: Value) -> Vec<u32> {
        let config = AnyDecoder::new(config(is_tied));
        let lora = LoraConfig::of_job(lora.as_object().unwrap()).unwrap();
        let config = config.with_adapter(lora).unwrap();
        let all: Vec<u32> = (0..VOCAB as u32).collect();
        let found = config.unlearned_tokens(folder, &all, &[30, 31, 4_000_000]).unwrap();
        // Each module has its own tokens here.
        found.into_values().flatten().collect()
    }

    #[test]
    fn small_and_equal_rows_were_not_learned() {
        let linear = json!({"target_modules": "all-linear"});
        let embedding = "model.embed_tokens.weight";
        let learned = folder(true, embedding, &[]);
        assert_eq!(unlearned((true, learned.path()), linear.clone()), [0; 0]);
        let some =
            folder(true, embedding, &[(3, 0.0), (4, 1e-9), (5, 0.5), (29, 0.50001), (31, 0.5)]);
        assert_eq!(unlearned((true, some.path()), linear.clone()), [3, 4, 5, 29]);
        let apart = folder(true, embedding, &[(5, 0.49), (31, 0.5)]);
        assert_eq!(unlearned((true, apart.path()), linear), [0; 0]);
    }

    /// Around a mean of 4% of most rows, which differ from it by their own norm.
    #[test]
    fn rows_drawn_around_a_small_mean_were_not_learned() {
        let embedding = "model.embed_tokens.weight";
        let (mean, noise) = (0.04, 3e-5);
        let mut rows: Vec<(usize, f32)> = (0..VOCAB)
            .map(|row| (row, if row % 2 == 0 { 1.0 } else { -0.9 } + 0.01 * row as f32))
            .collect();
        for (row, sign) in [(29, -1.0), (30, 1.0), (31, 0.5)] {
            rows[row].1 = mean + sign * noise;
        }
        let resized = folder(true, embedding, &rows);
        let linear = json!({"target_modules": "all-linear"});
        assert_eq!(unlearned((true, resized.path()), linear), [29, 30, 31]);
    }

    #[test]
    fn rows_that_the_adapter_trains_do_not_count() {
        let embedding = "model.embed_tokens.weight";
        let some = folder(true, embedding, &[(3, 0.0), (4, 0.0)]);
        for (lora, expected) in [
            (json!({"trainable_token_indices": [4]}), vec![3]),
            (json!({"trainable_token_indices": [3, 4]}), vec![]),
            (json!({"modules_to_save": ["embed_tokens"]}), vec![]),
            (json!({"target_modules": ["q_proj", "embed_tokens"]}), vec![]),
        ] {
            assert_eq!(unlearned((true, some.path()), lora.clone()), expected, "{lora}");
        }
        // The head has rows of its own.
        let head = folder(false, "lm_head.weight", &[(7, 0.0)]);
        assert_eq!(
            unlearned((false, head.path()), json!({"modules_to_save": ["embed_tokens"]})),
            [7]
        );
        assert_eq!(
            unlearned((false, head.path()), json!({"modules_to_save": ["lm_head"]})),
            [0; 0]
        );
    }
}
