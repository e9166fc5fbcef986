//! The model that a fine-tuned model was trained from, whose frozen parameters did not change.
//!
//! Main type: [`BaseModel`]. It reads single parameters, and gives frozen ones the origin
//! [`Origin::Frozen`], so that checkpoints may omit them.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::bf16;
use deepburn_weights::{Origin, Weight, WeightMap};

use super::error::{ModelFolderError, TensorProblem};
use super::weights::Weights;
use crate::fnv::{FNV_OFFSET, fnv1a};

/// The number of elements of a slice of a tensor that a fingerprint hashes.
const HASHED_SLICE: usize = 256;
/// The number of slices, evenly spaced from the first to the last element.
const HASHED_SLICES: usize = 16;

/// A model folder from which single parameters of a fine-tuned model are read. It may lack
/// parameters of the fine-tuned model, and have others.
#[derive(Debug)]
pub struct BaseModel {
    /// The map of the fine-tuned model.
    map: WeightMap,
    /// The paths of parameters with the base values of another parameter, and its path.
    copies: HashMap<String, String>,
    /// The weights in the folder. Only the file headers have been read.
    weights: Weights,
}

impl BaseModel {
    /// Opens a folder. `map` is the map of the fine-tuned model.
    ///
    /// # Errors
    /// Returns an error if a file is missing, unreadable or malformed.
    pub fn open(folder: &Path, map: WeightMap) -> Result<Self, ModelFolderError> {
        Ok(Self::of_weights(Weights::open(folder, map.clone(), &[])?, map))
    }

    /// Returns the base model of a fine-tuned model in which the parameter at `path` started with
    /// the values of the one at `of`, because the folder does not have to store it.
    #[must_use]
    pub(crate) fn with_copy(mut self, path: String, of: String) -> Self {
        self.copies.insert(path, of);
        self
    }

    /// Returns the parameter of the map that the folder stores with the base values of the
    /// parameter at `path`.
    fn stored(&self, path: &str) -> Option<&Weight> {
        self.map.get(self.copies.get(path).map_or(path, String::as_str))
    }

    /// Returns the map of the fine-tuned model with the origin [`Origin::Frozen`] for exactly those
    /// parameters that `is_frozen` accepts and that the folder has in the same shape. A parameter
    /// with new rows is not in the folder.
    #[must_use]
    pub fn frozen_map(&self, is_frozen: impl Fn(&str) -> bool) -> WeightMap {
        let origin = |weight: &Weight| {
            let is_in_folder =
                || self.stored(weight.path()).is_some_and(|it| self.weights.require(it).is_ok());
            match weight.origin() {
                Origin::Tied { .. } => None,
                _ if is_frozen(weight.path()) && is_in_folder() => Some(Origin::Frozen),
                // A checkpoint without it could not be loaded.
                Origin::Frozen => Some(Origin::File),
                _ => None,
            }
        };
        self.map.clone().with_origins(origin).expect("the stored tensors are the same")
    }

    /// Checks that the folder has all parameters of the map in their shapes.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming the first parameter whose tensors do not fit.
    pub(crate) fn require_all(&self) -> Result<(), ModelFolderError> {
        self.map.parameters().try_for_each(|weight| self.weights.require(weight))
    }

    /// Returns the parameters of `map`, which `weights` has.
    pub(crate) fn of_weights(weights: Weights, map: WeightMap) -> Self {
        Self { weights, map, copies: HashMap::new() }
    }

    /// Returns a hash of samples of each tensor, from its first to its last row, which tells models
    /// of equal shapes apart. It reads a few kilobytes per tensor. Values are rounded to bf16
    /// first, so that a model and its copy in bf16 are equal.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if a tensor is missing or has another shape, or an I/O
    /// error.
    pub fn fingerprint(&mut self) -> Result<String, ModelFolderError> {
        let mut hash = FNV_OFFSET;
        let mut add = |bytes: &[u8]| hash = fnv1a(hash, bytes);
        for tensor in self.map.stored_tensors() {
            // The values alone would not tell two norms of ones apart.
            add(tensor.name().as_bytes());
            let count = tensor.composition().num_elements();
            let last = count.saturating_sub(HASHED_SLICE);
            for slice in 0..HASHED_SLICES {
                // Slices of a small tensor overlap.
                let start = (last as u128 * slice as u128 / (HASHED_SLICES - 1) as u128) as usize;
                let range = start..count.min(start + HASHED_SLICE);
                for value in self.weights.elements(tensor, range)? {
                    add(&bf16::from_f32(value).to_bits().to_le_bytes());
                }
            }
        }
        Ok(format!("{hash:016x}"))
    }

    /// Reads a row of the matrix at a module path of the fine-tuned model. Returns `None` if it is
    /// not stored as it is in the module.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if the folder does not have the matrix in the same
    /// shape, or an I/O error.
    pub(crate) fn read_row(
        &mut self,
        path: &str,
        row: usize,
    ) -> Result<Option<Vec<f32>>, ModelFolderError> {
        let Self { map, weights, .. } = self;
        let mut stored = map.stored_tensors().iter();
        let Some(tensor) = stored.find(|it| it.composition().same_as() == Some(path)) else {
            return Ok(None);
        };
        let width = tensor.shape().last().copied().unwrap_or(0);
        weights.elements(tensor, row * width..(row + 1) * width).map(Some)
    }

    /// Reads all values of the parameter at a module path of the fine-tuned model.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if the folder does not have the parameter in the same
    /// shape and with finite values, or an I/O error.
    pub fn read(&mut self, path: &str) -> Result<Vec<f32>, ModelFolderError> {
        if let Some(weight) = self.stored(path).cloned() {
            return self.weights.read_required(&weight);
        }
        let [expected, found] =
            ["a parameter of the fine-tuned model", "nothing"].map(str::to_owned);
        // A parameter of another model, so this always is an error.
        let problem = TensorProblem { name: path.to_owned(), expected, found };
        self.weights.refuse(vec![problem]).map(|()| Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Architecture;
    use crate::gpt2::{ClassifierConfig, Gpt2Config, PretrainedGpt2};
    use crate::hf::ProblemType;
    use burn::tensor::TensorData;
    use deepburn_files::safetensors::FloatType;

    fn tiny() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny"))
    }

    fn frozen(config: &dyn Architecture) -> (Vec<String>, BaseModel) {
        let base = BaseModel::open(tiny(), config.weight_map()).unwrap();
        let map = base.frozen_map(|path| !path.contains("ln_f"));
        let frozen = map.weights().iter().filter(|weight| *weight.origin() == Origin::Frozen);
        (frozen.map(|weight| weight.path().to_owned()).collect(), base)
    }

    fn config() -> Gpt2Config {
        PretrainedGpt2::open(tiny()).unwrap().config().clone()
    }

    #[test]
    fn parameters_of_the_folder_are_frozen() {
        let config = config();
        let (paths, mut base) = frozen(&config);
        // Without the last norm, and without the tied head.
        assert_eq!(paths.len(), config.parameters().len() - 2);
        assert_eq!(base.read("wte.weight").unwrap().len(), config.vocab_size * config.n_embd);
        let error = base.read("wtf.weight").unwrap_err().to_string();
        assert!(error.contains("`wtf.weight`: expected a parameter of the fine-tuned"), "{error}");
    }

    #[test]
    fn fingerprints_tell_models_apart_and_survive_rounding_to_bf16() {
        let map = || config().weight_map();
        let fingerprint = |folder: &Path| {
            BaseModel::open(folder, map()).and_then(|mut base| base.fingerprint()).unwrap()
        };
        let copied = |float: FloatType, factor: f32| {
            let folder = tempfile::tempdir().unwrap();
            let mut writer = config().folder_writer(folder.path(), float).unwrap();
            let mut base = BaseModel::open(tiny(), map()).unwrap();
            for weight in map().parameters() {
                let values = base.read(weight.path()).unwrap().into_iter().map(|it| it * factor);
                writer
                    .write(weight.path(), TensorData::new(values.collect(), weight.shape()))
                    .unwrap();
            }
            writer.finish().unwrap();
            fingerprint(folder.path())
        };
        let own = fingerprint(tiny());
        assert_eq!(copied(FloatType::F32, 1.0), own);
        assert_eq!(copied(FloatType::Bf16, 1.0), own);
        assert_ne!(copied(FloatType::F32, 1.01), own);
    }

    #[test]
    fn new_heads_and_new_rows_are_not_in_the_base() {
        let (whole, _) = frozen(&config());
        let body = Gpt2Config { vocab_size: config().vocab_size + 1, ..config() };
        let problem_type = ProblemType::default();
        let classifier = ClassifierConfig { body, num_classes: 3, problem_type };
        let (paths, mut base) = frozen(&classifier);
        assert_eq!(paths.len(), whole.len() - 1);
        assert!(!paths.iter().any(|path| path.contains("wte") || path.contains("score")));
        let error = base.read("score.weight").unwrap_err().to_string();
        assert!(error.contains("`score.weight`: expected [3, 48]"), "{error}");
    }
}
