//! Folders with an adapter in the format of PEFT.
//!
//! Main type: [`AdapterFolder`].
//!
//! ```text
//! adapter_config.json           the fields of LoraConfig
//! adapter_model.safetensors     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, …
//! ```

use std::path::{Path, PathBuf};

use deepburn_files::safetensors::FloatType;
use deepburn_lora::{LoraConfig, LoraError};
use deepburn_weights::{Origin, WeightMap};
use serde_json::{Map, Value};

use super::ADAPTER_CONFIG;
use super::error::ModelFolderError;
use super::small_file::read_small_file;
use super::weights::Weights;
use super::writer::ModelFolderWriter;

/// The weights of an adapter.
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// A folder with an adapter. Its configuration has been read.
#[derive(Clone, Debug)]
pub struct AdapterFolder {
    path: PathBuf,
    config: LoraConfig,
}

impl AdapterFolder {
    /// Reads the configuration in a folder.
    ///
    /// # Errors
    /// Returns an error if the configuration is missing, unreadable, or not supported, or if the
    /// weights are missing.
    pub fn open(path: &Path) -> Result<Self, ModelFolderError> {
        let file = path.join(ADAPTER_CONFIG);
        let format = |reason: String| ModelFolderError::Format { path: file.clone(), reason };
        let text = read_small_file(&file).map_err(|e| ModelFolderError::io("read", &file, e))?;
        let fields: Map<String, Value> =
            serde_json::from_str(&text).map_err(|error| format(error.to_string()))?;
        let config = LoraConfig::of_file(&fields).map_err(|error| format(error.to_string()))?;
        if !path.join(ADAPTER_WEIGHTS).is_file() {
            let pickled = path.join("adapter_model.bin").exists();
            let hint = match pickled {
                true => {
                    "it has adapter_model.bin; load it with PEFT and save it again as safetensors"
                }
                false => "give the folder that PEFT's save_pretrained wrote",
            };
            return Err(format(format!("it has no {ADAPTER_WEIGHTS} beside it; {hint}")));
        }
        Ok(Self { path: path.to_owned(), config })
    }

    /// Returns the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Sets the name of the base model, which the adapter's own file may give by another path.
    #[must_use]
    pub fn with_base_model(self, name: &str) -> Self {
        Self { config: self.config.with_base_model(name), ..self }
    }

    /// Returns the error for an adapter that does not fit its model.
    pub(crate) fn misfit(&self, error: &LoraError) -> ModelFolderError {
        let path = self.path.join(ADAPTER_CONFIG);
        ModelFolderError::Format { path, reason: error.to_string() }
    }

    /// Opens the weights, whose names, shapes and types have to match `map`.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming all tensors that do not match, or the error of
    /// opening the file.
    pub(crate) fn weights(&self, map: &WeightMap) -> Result<Weights, ModelFolderError> {
        // Copies of tied parameters may be in the file. Everything else has to be.
        let mut weights = Weights::of_file(&self.path.join(ADAPTER_WEIGHTS), map.clone())?;
        weights.check_shapes(
            map.clone()
                .with_origins(|weight| match weight.origin() {
                    Origin::Tied { .. } => None,
                    _ => Some(Origin::File),
                })
                .expect("the stored tensors are the same"),
        )?;
        Ok(weights)
    }

    /// Starts writing an adapter with the tensors of `map`, in f32, to a folder, which is created
    /// if it does not exist.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Io`] if the folder cannot be written to.
    pub fn create(
        folder: &Path,
        map: &WeightMap,
        fields: Map<String, Value>,
    ) -> Result<ModelFolderWriter, ModelFolderError> {
        let documents = vec![(ADAPTER_CONFIG, fields)];
        ModelFolderWriter::with_name(folder, ADAPTER_WEIGHTS, map, FloatType::F32, documents)
    }
}
