//! The tensors of a model folder, one at a time, with a trained adapter merged into them.
//!
//! Main type: [`StoredValues`]. Files in other formats are written from it.

use std::path::Path;

use deepburn_weights::StoredTensor;

use super::any::AnyDecoder;
use super::merge::Merge;
use crate::architecture::Architecture;
use crate::hf::{BaseModel, ModelFolderError};

/// The values of a model under the names of its Hugging Face files.
pub struct StoredValues {
    /// The configuration of the model without an adapter.
    config: AnyDecoder,
    /// The tensors, sorted by the parameters that they store.
    tensors: Vec<StoredTensor>,
    /// The files.
    source: Source,
}

/// Where values come from.
enum Source {
    /// A folder without an adapter.
    Model(Box<BaseModel>),
    /// A base model and its adapter.
    Merged(Box<Merge>),
}

impl AnyDecoder {
    /// Opens the model in the folder `base`, with the trained adapter of this configuration if it
    /// has one. Only headers are read.
    ///
    /// # Errors
    /// Returns [`ModelFolderError`] if a file is missing, unreadable or malformed, if tensors are
    /// missing or have other shapes, or if the adapter does not fit or cannot be merged.
    pub fn stored_values(&self, base: &Path) -> Result<StoredValues, ModelFolderError> {
        let (config, source) = match self.trained_adapter() {
            Some(_) => {
                // A copy in the adapter that differs shows that the adapter was trained on another
                // model.
                self.check_adapter(base)?;
                let merge = Merge::open(self, base)?;
                let config = merge.config();
                let config = config.map_err(|source| ModelFolderError::config(base, source))?;
                (config, Source::Merged(Box::new(merge)))
            }
            None => {
                let model = BaseModel::open(base, self.base().weight_map())?;
                model.require_all()?;
                (self.base(), Source::Model(Box::new(model)))
            }
        };
        let tensors = config.weight_map().stored_tensors().to_vec();
        Ok(StoredValues { config, tensors, source })
    }
}

impl StoredValues {
    /// Returns the configuration of the model. A merged adapter may have untied the head.
    #[must_use]
    pub fn config(&self) -> &AnyDecoder {
        &self.config
    }

    /// Returns the tensors. Copies of tied parameters are not included.
    #[must_use]
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// Reads the values of a tensor in f32, row by row. A tensor that is stored in another layout
    /// than the parameter is in memory twice, in both layouts.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if a value is not finite, or an I/O error.
    ///
    /// # Panics
    /// Panics if `index` is not the index of a tensor.
    pub fn read(&mut self, index: usize) -> Result<Vec<f32>, ModelFolderError> {
        let (tensor, map) = (&self.tensors[index], self.config.weight_map());
        let source = &mut self.source;
        let mut read = |path: &str| match (&mut *source, map.get(path)) {
            (Source::Model(model), _) => model.read(path),
            (Source::Merged(merge), Some(weight)) => merge.values(weight),
            // The tensors are the map's, so it has all paths.
            (Source::Merged(_), None) => Ok(Vec::new()),
        };
        let composition = tensor.composition();
        // An embedding may take most of the memory, so it is not copied.
        if let Some(path) = composition.same_as() {
            return read(path);
        }
        // Parts of one parameter follow each other, so it is read once.
        let mut last: Option<(String, Vec<f32>)> = None;
        composition.read(0..composition.num_elements(), |path, range, values| {
            if last.as_ref().is_none_or(|(name, _)| name != path) {
                last = Some((path.to_owned(), read(path)?));
            }
            values.extend(last.iter().flat_map(|(_, whole)| &whole[range.clone()]));
            Ok(())
        })
    }
}
