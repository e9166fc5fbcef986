//! Implementation of the model traits for the encoder: its files, its training pass and its module.
//!
//! The files have the layout of `transformers`, but `transformers` does not support this model:
//! `model_type` is `deepburn_encoder`, and parameters are named by their module paths.
//!
//! ```text
//! config.json          the fields of `EncoderConfig`, class names, architectures, dtype
//! model.safetensors    embedding.weight, layers.N.{in_proj, out_proj, linear1, linear2, norm1, norm2}.{weight, bias},
//!                      classifier1.{weight, bias}, classifier2.{weight, bias}
//! ```

use std::path::Path;

use burn::tensor::backend::Backend;
use deepburn_files::safetensors::FloatType;
use deepburn_weights::WeightMap;
use serde_json::{Map, Value, json};

use super::config::EncoderConfig;
use super::model::Encoder;
use super::parameters::weight_map;
use crate::architecture::{Architecture, BuildModel, MatrixUse, TextClassifierConfig};
use crate::hf::{
    CONFIG, ClassNames, ClassNamesError, JsonFiles, ModelConfigError, ModelFolderError,
    ProblemType, Weights,
};
use crate::texts::TextLimits;
use crate::weights::WeightInit;

/// Parameters, names, files and the training pass.
impl Architecture for EncoderConfig {
    /// Returns the name in logs: `Encoder`.
    fn name(&self) -> &'static str {
        "Encoder"
    }

    /// Maps the parameters of the embedding, the layers and the classification head. Position
    /// encodings are computed, so they have no parameter.
    fn weight_map(&self) -> WeightMap {
        weight_map(self)
    }

    fn matrix_use(&self, path: &str) -> MatrixUse {
        match path {
            "embedding.weight" => MatrixUse::TokenTable,
            _ => MatrixUse::Linear,
        }
    }

    fn width(&self) -> usize {
        self.embed_dim
    }

    fn max_len(&self) -> usize {
        self.max_len
    }

    /// Returns only `config.json`. Unnamed classes get placeholder names, because readers expect a
    /// name for every class.
    fn documents(&self, float: FloatType) -> JsonFiles {
        // Invalid names are rejected before a model is built.
        let names = self.class_names().unwrap_or_default();
        let mut fields: Map<String, Value> = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            other => unreachable!("a struct with named fields is an object: {other:?}"),
        };
        fields.extend(ClassNames::fields(names.as_ref(), self.num_classes));
        fields.insert("architectures".into(), json!(["DeepBurnEncoder"]));
        fields.insert("dtype".into(), json!(float.torch_name()));
        fields.sort_keys();
        vec![(CONFIG, fields)]
    }

    /// Reads every tensor in blocks, using at most 8 MiB of memory.
    fn check_weights(&self, folder: &Path) -> Result<(), ModelFolderError> {
        open(self, folder)?.check_values()
    }
}

/// Limits and class names, forwarded to the inherent methods.
impl TextClassifierConfig for EncoderConfig {
    fn limits(&self) -> TextLimits {
        Self::limits(self)
    }

    fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        Self::class_names(self)
    }

    fn problem_type(&self) -> ProblemType {
        self.problem_type
    }
}

/// Modules with random, zero or stored weights. `load` converts the weights to f32. In addition to
/// the model, one tensor is in memory at a time.
impl<B: Backend> BuildModel<B> for EncoderConfig {
    type Model = Encoder<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Encoder<B>, ModelConfigError> {
        Encoder::new(self, seed, device)
    }

    fn zeros(&self, device: &B::Device) -> Result<Encoder<B>, ModelConfigError> {
        self.validate()?;
        Encoder::with(self, &WeightInit::zeros(weight_map(self), device))
    }

    fn load(&self, folder: &Path, device: &B::Device) -> Result<Encoder<B>, ModelFolderError> {
        let model =
            self.zeros(device).map_err(|source| ModelFolderError::config(folder, source))?;
        let mut weights = open(self, folder)?;
        weights.log_prefix();
        weights.fill(model)
    }

    /// Reads each weight when it is first used. The folder contains every parameter, so the seed is
    /// not used.
    fn load_lazily(
        &self,
        folder: &Path,
        _seed: u64,
        device: &B::Device,
    ) -> Result<Encoder<B>, ModelFolderError> {
        let reader = open(self, folder)?.into_reader();
        Encoder::with(self, &WeightInit::reading(weight_map(self), reader, device))
            .map_err(|source| ModelFolderError::config(folder, source))
    }
}

/// Opens the weights in `folder` and checks their names, shapes and types.
///
/// # Errors
/// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit, or another
/// [`ModelFolderError`] if a file is missing, unreadable or malformed.
fn open(config: &EncoderConfig, folder: &Path) -> Result<Weights, ModelFolderError> {
    let map = weight_map(config);
    let mut weights = Weights::open(folder, map.clone(), &[])?;
    weights.check_shapes(map)?;
    Ok(weights)
}
