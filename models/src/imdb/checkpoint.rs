//! An encoder's weights on the disk.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use serde_json::{Map, Value, json};

use super::config::EncoderConfig;
use super::encoder::Encoder;
use crate::Publication;
use crate::class_names::ClassNames;
use crate::gpt2::{
    CONFIG, CheckpointError, CheckpointWriter, ParameterShape, SavedPrecision, TensorProblem,
    float_type, open_files,
};
use crate::weights::WeightInit;

/// Weights by module path, which is their name in the file.
type Weights = BTreeMap<String, Vec<f32>>;

impl EncoderConfig {
    /// Starts a checkpoint in `folder`, which is created if need be: `model.safetensors`, with
    /// parameters under their module paths, and `config.json`.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the folder cannot be written to.
    pub fn checkpoint_writer(
        &self,
        folder: &Path,
        precision: SavedPrecision,
    ) -> Result<CheckpointWriter, CheckpointError> {
        let name = |path: &str| path.to_owned();
        let documents = vec![("config.json", self.document(precision))];
        CheckpointWriter::start(folder, self.parameters(), name, precision, documents)
    }

    /// How an encoder of this config goes by elsewhere.
    #[must_use]
    pub fn publication(&self) -> Publication {
        let documents = vec![("config.json", self.document(SavedPrecision::F32))];
        Publication::new(&self.parameters(), str::to_owned, documents)
    }

    fn document(&self, precision: SavedPrecision) -> Map<String, Value> {
        // Names that are not sound are refused before a model is made.
        let names = self.class_names().unwrap_or_default();
        let mut fields: Map<String, Value> = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            other => unreachable!("a struct with named fields is an object: {other:?}"),
        };
        fields.extend(ClassNames::fields(names.as_ref(), self.num_classes));
        fields.insert("architectures".into(), json!(["DeepBurnEncoder"]));
        fields.insert("dtype".into(), json!(precision.torch_name()));
        fields.sort_keys();
        fields
    }
}

impl<B: Backend> Encoder<B> {
    /// The encoder of `config` with the weights in `folder`, as f32.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] naming every tensor that does not fit or is not finite; a file that
    /// is missing, unreadable or malformed.
    pub fn load(
        folder: &Path,
        config: &EncoderConfig,
        device: &B::Device,
    ) -> Result<Self, CheckpointError> {
        let weights = read_weights(folder, config)?;
        let read = move |path: &str| weights[path].clone();
        Self::with(config, &WeightInit::reading(Arc::new(read), device)).map_err(|error| {
            CheckpointError::Format { path: folder.join(CONFIG), reason: error.to_string() }
        })
    }
}

/// Reads every parameter of the encoder of `config`.
fn read_weights(folder: &Path, config: &EncoderConfig) -> Result<Weights, CheckpointError> {
    let mut expected: BTreeMap<String, Vec<usize>> = config
        .parameters()
        .into_iter()
        .map(|ParameterShape { path, shape }| (path, shape))
        .collect();
    let (mut weights, mut problems) = (Weights::new(), Vec::new());
    for mut file in open_files(folder)? {
        for name in file.names() {
            let Some(info) = file.info(&name) else { continue };
            let mut refuse = |expected: String, found: String| {
                problems.push(TensorProblem { name: name.clone(), expected, found });
            };
            let Some(shape) = expected.remove(&name) else {
                refuse("no such tensor".to_owned(), format!("{:?}", info.shape));
                continue;
            };
            if info.shape != shape || float_type(info.dtype).is_none() {
                let wanted = format!("{shape:?} of F32, F16 or BF16");
                refuse(wanted, format!("{:?} of {}", info.shape, info.dtype));
                continue;
            }
            let values = file.read(&name)?;
            if values.iter().any(|value| !value.is_finite()) {
                refuse("finite values".to_owned(), "values that are infinite or NaN".to_owned());
            }
            weights.insert(name, values);
        }
    }
    problems.extend(expected.into_iter().map(|(name, shape)| TensorProblem {
        name,
        expected: format!("{shape:?} of F32, F16 or BF16"),
        found: "nothing".to_owned(),
    }));
    match problems.is_empty() {
        true => Ok(weights),
        false => Err(CheckpointError::Tensors { folder: folder.to_owned(), problems }),
    }
}
