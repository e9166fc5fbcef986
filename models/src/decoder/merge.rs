//! Writes a model whose adapter is merged into its weights.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::TensorData;
use deepburn_files::safetensors::FloatType;
use deepburn_lora::merge::Factors;
use deepburn_lora::{ADAPTER_BIAS, AdaptedModule, LoraError, MAGNITUDE, TOKEN_ROWS};
use deepburn_weights::{Weight, WeightMap};
use serde_json::{Map, json};

use super::any::AnyDecoder;
use crate::architecture::{Architecture, LanguageModelConfig};
use crate::hf::{BaseModel, ModelConfigError, ModelFolderError, ModelFolderWriter, Weights};
use crate::weights::ReadWeights;

/// A decoder and its trained adapter, which are merged one parameter at a time.
pub(super) struct Merge {
    /// The adapted model.
    decoder: AnyDecoder,
    /// The map of the adapter file.
    map: WeightMap,
    /// The adapter file.
    adapter: Weights,
    /// The base model.
    base: BaseModel,
}

impl Merge {
    /// Opens the files of a model with a trained adapter.
    ///
    /// # Errors
    /// Returns [`ModelFolderError`] if the adapter is not trained or cannot be merged, or if a file
    /// is missing, unreadable or malformed.
    pub(super) fn open(decoder: &AnyDecoder, base: &Path) -> Result<Self, ModelFolderError> {
        let (Some(adapter), Some(map)) = (decoder.trained_adapter(), decoder.adapter_map()) else {
            let hint = "; it has no trained adapter to merge".to_owned();
            return Err(ModelFolderError::NoWeights { folder: base.to_owned(), hint });
        };
        decoder.check_mergeable().map_err(|error| adapter.misfit(&error))?;
        let adapter = adapter.weights(&map)?;
        // An untied head is read under the name of the embedding.
        let base = BaseModel::open(base, decoder.base().weight_map())?;
        Ok(Self { decoder: decoder.clone(), map, adapter, base })
    }

    /// Returns the configuration of the merged model. An adapted or separately trained embedding is
    /// no longer the head.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the family does not support an untied head.
    pub(super) fn config(&self) -> Result<AnyDecoder, ModelConfigError> {
        let base = self.decoder.base();
        let parts = base.parts();
        let embedding = parts.embedding_path();
        let module = embedding.strip_suffix(".weight").unwrap_or(&embedding);
        let adapter = self.decoder.adapter();
        let is_apart = adapter.is_some_and(|it| it.unties() || it.module(module).is_some());
        if !(is_apart && parts.head.is_tied) {
            return Ok(base);
        }
        let untied = Map::from_iter([("tie_word_embeddings".to_owned(), json!(false))]);
        base.with_overrides(&untied)
    }

    /// Writes all parameters of the merged model.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if a tensor does not fit or is not finite, or an I/O
    /// error.
    fn write(
        mut self,
        config: &AnyDecoder,
        writer: &mut ModelFolderWriter,
    ) -> Result<(), ModelFolderError> {
        for weight in config.weight_map().parameters() {
            let values = self.values(weight)?;
            writer.write(weight.path(), TensorData::new(values, weight.shape()))?;
        }
        Ok(())
    }

    /// Returns the values of a parameter of the merged model.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if a tensor does not fit or is not finite, or an I/O
    /// error.
    pub(super) fn values(&mut self, weight: &Weight) -> Result<Vec<f32>, ModelFolderError> {
        let mut values = self.base_values(weight.path())?;
        self.merge(weight, &mut values)?;
        Ok(values)
    }

    /// Returns a function that merges a parameter of this map when it is first used. It panics with
    /// the error message, like the function of [`Weights::into_reader`].
    pub(super) fn into_reader(self, map: WeightMap) -> Arc<ReadWeights> {
        let merge = Mutex::new(self);
        Arc::new(move |path: &str| {
            // As in `Weights::into_reader`, the panic of an earlier read leaves the files usable.
            let mut merge = merge.lock().unwrap_or_else(PoisonError::into_inner);
            let weight = map.get(path).unwrap_or_else(|| panic!("there is no parameter {path}"));
            merge.values(weight).unwrap_or_else(|error| panic!("{error}"))
        })
    }

    /// Returns the values of a parameter before its adapter is merged: of the base model, or
    /// trained as a whole.
    fn base_values(&mut self, path: &str) -> Result<Vec<f32>, ModelFolderError> {
        if self.decoder.adapter().is_some_and(|adapter| adapter.trains(path))
            && let Some(weight) = self.map.get(path)
        {
            return self.adapter.read_required(weight);
        }
        let parts = self.decoder.base().parts();
        // A head that the adapter has untied starts as the embedding, which the base model has
        // once.
        match parts.head.is_tied && path == parts.head_path() {
            true => self.base.read(&parts.embedding_path()),
            false => self.base.read(path),
        }
    }

    /// Merges the adapter of a parameter into its values.
    fn merge(&mut self, weight: &Weight, values: &mut [f32]) -> Result<(), ModelFolderError> {
        let Some((path, leaf)) = weight.path().rsplit_once('.') else { return Ok(()) };
        // Trained rows replace rows of the base model. Such a table has no factors, so nothing is
        // left to merge afterwards.
        if leaf == "weight"
            && let Some(rows) = self.factor(path, TOKEN_ROWS)?
        {
            self.replace_rows(path, &rows, values);
        }
        let adapted = self.decoder.adapter().and_then(|adapter| adapter.module(path));
        let Some(AdaptedModule { module, rank, scale }) = adapted.cloned() else { return Ok(()) };
        if leaf == "bias" {
            let bias = self.factor(path, ADAPTER_BIAS)?;
            let bias = bias.unwrap_or_default();
            values.iter_mut().zip(&bias).for_each(|(sum, own)| {
                // The bias of an adapter is scaled like its product. The sum is rounded once.
                *sum = (f64::from(*sum) + scale * f64::from(*own)) as f32;
            });
            return Ok(());
        }
        let [a, b] = module.kind.factor_names().map(|leaf| self.factor(path, leaf));
        let (Some(a), Some(b)) = (a?, b?) else { return Ok(()) };
        let magnitude = self.factor(path, MAGNITUDE)?;
        let magnitude = magnitude.as_deref();
        Factors { a: &a, b: &b, rank, scale, magnitude }.merge_into(values);
        Ok(())
    }

    /// Replaces the trained rows of the table at `path`, whose values are `values`.
    fn replace_rows(&self, path: &str, rows: &[f32], values: &mut [f32]) {
        let tokens = self.decoder.adapter().and_then(|adapter| adapter.trained_tokens(path));
        let tokens = tokens.unwrap_or_default();
        let width = rows.len() / tokens.len().max(1);
        // Without rows the width is 0, for which `chunks_exact` panics.
        for (token, row) in tokens.iter().zip(rows.chunks_exact(width.max(1))) {
            values[token * width..][..width].copy_from_slice(row);
        }
    }

    /// Reads a parameter of the adapter of the module at `path`; `None` if the adapter has none.
    fn factor(&mut self, path: &str, leaf: &str) -> Result<Option<Vec<f32>>, ModelFolderError> {
        let weight = self.map.get(&format!("{path}.{leaf}"));
        weight.map(|weight| self.adapter.read_required(weight)).transpose()
    }
}

impl AnyDecoder {
    /// Writes the model in the folder `base`, with its trained adapter merged into the weights.
    /// Returns the writer, which still needs [`finish`](ModelFolderWriter::finish). One parameter
    /// is in memory at a time.
    ///
    /// # Errors
    /// Returns [`ModelFolderError`] if the model has no trained adapter, if files do not fit, or an
    /// I/O error.
    pub fn merge_into(
        &self,
        base: &Path,
        out: &Path,
        float: FloatType,
    ) -> Result<ModelFolderWriter, ModelFolderError> {
        let merge = Merge::open(self, base)?;
        self.check_adapter(base)?;
        let config = merge.config().map_err(|source| ModelFolderError::config(base, source))?;
        let mut writer = config.folder_writer(out, float)?;
        merge.write(&config, &mut writer)?;
        Ok(writer)
    }

    /// Checks that each bias of an adapter can be added to a bias of the model.
    ///
    /// # Errors
    /// Returns [`LoraError::Module`] naming a layer without a bias.
    pub fn check_mergeable(&self) -> Result<(), LoraError> {
        // An adapter without biases can always be added to the weights.
        let Some(adapter) = self.adapter().filter(|it| it.config().adapter_bias) else {
            return Ok(());
        };
        let map = self.base().weight_map();
        let modules = self.parts().modules();
        let lacking = modules.iter().find(|module| {
            adapter.module(&module.path).is_some()
                && map.get(&format!("{}.bias", module.path)).is_none()
        });
        match lacking {
            None => Ok(()),
            Some(module) => Err(LoraError::Module {
                name: "lora_bias".to_owned(),
                reason: format!(
                    "`{}` has no bias to which the adapter's could be added; use the adapter without merging it",
                    module.name
                ),
            }),
        }
    }
}
