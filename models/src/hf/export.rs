//! The files that other programs need in addition to the weights.
//!
//! Main type: [`HfExport`]. It is stored as JSON in training checkpoints.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::names::{Names, ParameterShape};
use super::writer::JsonFiles;
use deepburn_safetensors::FloatType;

/// The contents of a Hugging Face model folder except the weights. It is stored in training checkpoints, so that a
/// checkpoint can be exported without the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HfExport {
    /// Tensor names by module path, for parameters whose tensor name differs from the module path.
    pub names: BTreeMap<String, String>,
    /// JSON files stored next to the weights, by file name.
    pub documents: BTreeMap<String, Map<String, Value>>,
}

impl HfExport {
    /// Returns an export. Only names that differ from their module paths are stored.
    pub(crate) fn new(parameters: &[ParameterShape], names: Names, documents: JsonFiles) -> Self {
        let names = parameters.iter().map(|it| (it.path.clone(), (names.in_file)(&it.path)));
        let documents = documents.into_iter().map(|(name, fields)| (name.to_owned(), fields));
        Self {
            names: names.filter(|(path, name)| path != name).collect(),
            documents: documents.collect(),
        }
    }

    /// Sets the fields of the JSON file `name`.
    pub fn set_document(&mut self, name: &'static str, fields: Map<String, Value>) {
        self.documents.insert(name.to_owned(), fields);
    }

    /// Returns the tensor name of the parameter at a module path.
    pub fn name(&self, path: &str) -> String {
        self.names.get(path).map_or(path, String::as_str).to_owned()
    }

    /// Returns the same files for weights with another float type.
    #[must_use]
    pub fn with_dtype(mut self, float: FloatType) -> Self {
        for fields in self.documents.values_mut() {
            for name in ["dtype", "torch_dtype"] {
                if let Some(dtype) = fields.get_mut(name) {
                    *dtype = json!(float.torch_name());
                }
            }
        }
        self
    }
}
