//! An encoder's weights on the disk.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::config::EncoderConfig;
use crate::Publication;
use crate::gpt2::{CheckpointError, CheckpointWriter, SavedPrecision};

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
        let mut fields: Map<String, Value> = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            other => unreachable!("a struct with named fields is an object: {other:?}"),
        };
        fields.insert("dtype".into(), json!(precision.torch_name()));
        fields.sort_keys();
        fields
    }
}
