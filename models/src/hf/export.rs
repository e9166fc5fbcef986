//! The contents of a model folder except the weights.
//!
//! Main type: [`HfExport`]. It is stored as JSON in training checkpoints, with the map of the
//! weights.

use std::collections::BTreeMap;

use deepburn_files::safetensors::FloatType;
use deepburn_weights::{Origin, WeightMap, WeightMapError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::writer::JsonFiles;

/// The JSON files of a Hugging Face model folder, and the map of its weights. It is stored in
/// training checkpoints, so that a checkpoint can be exported without the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HfExport {
    /// The map of the weights.
    #[serde(flatten)]
    weights: StoredMap,
    /// JSON files stored next to the weights, by file name.
    pub documents: BTreeMap<String, Map<String, Value>>,
}

/// The map of the weights in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum StoredMap {
    /// The complete map.
    #[serde(rename = "weight_map")]
    Complete(WeightMap),
    /// Tensor names by module path, for parameters whose tensor name differs from the module path.
    /// Earlier versions stored only names, because all parameters were stored as in the module.
    #[serde(rename = "names")]
    Names(BTreeMap<String, String>),
}

impl HfExport {
    /// Returns an export. The origins of the values are not stored, because a checkpoint contains
    /// the values.
    pub(crate) fn new(map: WeightMap, documents: JsonFiles) -> Self {
        let map = map.with_origins(|weight| match weight.origin() {
            Origin::Tied { .. } => None,
            _ => Some(Origin::File),
        });
        let map = map.expect("the stored tensors are the same");
        let documents = documents.into_iter().map(|(name, fields)| (name.to_owned(), fields));
        Self { weights: StoredMap::Complete(map), documents: documents.collect() }
    }

    /// Sets the fields of the JSON file `name`.
    pub fn set_document(&mut self, name: &'static str, fields: Map<String, Value>) {
        self.documents.insert(name.to_owned(), fields);
    }

    /// Returns the map of the weights. `as_trained` is the map of a checkpoint that stores tensors
    /// under their module paths. It is only used for checkpoints of earlier versions, which do not
    /// contain the map of the model.
    ///
    /// # Errors
    /// Returns an error if two parameters of an earlier checkpoint have the same name.
    pub fn weight_map(&self, as_trained: WeightMap) -> Result<WeightMap, WeightMapError> {
        match &self.weights {
            StoredMap::Complete(map) => Ok(map.clone()),
            StoredMap::Names(names) => {
                as_trained.renamed(|path| names.get(path).map_or(path, String::as_str).to_owned())
            }
        }
    }

    /// Returns the same files for weights with another float type.
    #[must_use]
    pub fn with_dtype(mut self, float: FloatType) -> Self {
        for fields in self.documents.values_mut() {
            // The second name is from older versions of `transformers`.
            for name in ["dtype", "torch_dtype"] {
                if let Some(dtype) = fields.get_mut(name) {
                    *dtype = json!(float.torch_name());
                }
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Architecture;
    use crate::gpt2::Gpt2Config;

    /// The text that earlier versions stored for a small model.
    #[test]
    fn exports_of_earlier_versions_are_read() {
        let earlier = json!({
            "names": { "wte.weight": "transformer.wte.weight" },
            "documents": { "config.json": { "dtype": "float32" } },
        });
        let export: HfExport = serde_json::from_value(earlier).unwrap();
        let parameters = [("wte.weight", vec![5, 2]), ("lm_head.weight", vec![5, 2])];
        let as_trained = WeightMap::as_trained(parameters).unwrap();
        let map = export.weight_map(as_trained).unwrap();
        let names: Vec<_> = map.stored_tensors().iter().map(|it| (it.name(), it.shape())).collect();
        let shape = &[5, 2][..];
        assert_eq!(names, [("transformer.wte.weight", shape), ("lm_head.weight", shape)]);
    }

    #[test]
    fn exports_are_read_back() {
        let export = Gpt2Config::small().hf_export();
        let text = serde_json::to_string(&export).unwrap();
        assert_eq!(serde_json::from_str::<HfExport>(&text).unwrap(), export);
        let as_trained = WeightMap::new(vec![]).unwrap();
        let map = export.weight_map(as_trained).unwrap();
        assert_eq!(map.stored_name("wte.weight"), "transformer.wte.weight");
        assert!(map.parameters().all(|weight| *weight.origin() == Origin::File));
    }
}
