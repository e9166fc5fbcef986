//! How a model goes by in other programs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::gpt2::{ParameterShape, SavedPrecision};

/// What has to be known besides the weights to publish a model: enough to do so from a training
/// checkpoint, without the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Publication {
    /// Names of parameters whose module path is not their name, by module path.
    pub names: BTreeMap<String, String>,
    /// JSON files that lie beside the weights, by name.
    pub documents: BTreeMap<String, Map<String, Value>>,
}

impl Publication {
    pub(crate) fn new(
        parameters: &[ParameterShape],
        name: impl Fn(&str) -> String,
        documents: Vec<(&'static str, Map<String, Value>)>,
    ) -> Self {
        let names = parameters.iter().map(|it| (it.path.clone(), name(&it.path)));
        let documents = documents.into_iter().map(|(name, fields)| (name.to_owned(), fields));
        Self {
            names: names.filter(|(path, name)| path != name).collect(),
            documents: documents.collect(),
        }
    }

    /// The name of the parameter at a module path.
    pub fn name(&self, path: &str) -> String {
        self.names.get(path).map_or(path, String::as_str).to_owned()
    }

    /// The same for weights in another type.
    #[must_use]
    pub fn in_precision(mut self, precision: SavedPrecision) -> Self {
        for fields in self.documents.values_mut() {
            for name in ["dtype", "torch_dtype"] {
                if let Some(dtype) = fields.get_mut(name) {
                    *dtype = json!(precision.torch_name());
                }
            }
        }
        self
    }
}
