//! Reads the parameters that a checkpoint omits from their base model.
//!
//! Main type: [`BaseReader`]. Every parameter is verified with the hash in the checkpoint when it
//! is read. Exports read a parameter in several ranges, so the last parameter is kept.

use std::error::Error;
use std::fmt;

use deepburn_files::safetensors::FloatType;

use crate::{BaseValues, CheckpointError, ParamEntry};

/// A function that returns all values of the parameter at a module path of the base model.
pub(crate) type ReadBase = dyn FnMut(&str) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> + Send;

/// The base model of a checkpoint.
pub(crate) struct BaseReader {
    /// Reads a parameter.
    read: Box<ReadBase>,
    /// The path and the verified values of the last parameter, in the checkpoint's type.
    last: Option<(String, Vec<u8>)>,
}

impl BaseReader {
    /// Returns a reader that has read nothing yet.
    pub(crate) fn new(read: Box<ReadBase>) -> Self {
        Self { read, last: None }
    }

    /// Reads a parameter and verifies it. Returns its values as little-endian bytes, converted to
    /// the type that the checkpoint names.
    ///
    /// # Errors
    /// Returns [`CheckpointError::OtherBase`] if the base model does not have the parameter, or has
    /// other values.
    pub(crate) fn read(
        &mut self,
        entry: &ParamEntry,
        base: &BaseValues,
    ) -> Result<Vec<u8>, CheckpointError> {
        let path = &entry.path;
        let other = |reason| CheckpointError::OtherBase { path: path.clone(), reason };
        let values = (self.read)(path).map_err(|error| other(error.to_string()))?;
        // Omitted parameters are frozen floats, but the type is from the manifest, which is not
        // trusted.
        let Ok(float) = FloatType::try_from(base.element) else {
            return Err(other(format!("the base model has no {}", base.element)));
        };
        if entry.checked_numel() != Some(values.len()) {
            let (found, shape) = (values.len(), &entry.shape);
            return Err(other(format!("{found} values are not of shape {shape:?}")));
        }
        let mut bytes = Vec::with_capacity(values.len() * float.size());
        // The hash is of the values in the stored type, so they are rounded before they are
        // compared.
        float.encode(&values, &mut bytes);
        base.check(path, &BaseValues::of(base.element, &bytes))?;
        Ok(bytes)
    }

    /// Returns the same values, which are read again only if another parameter was read in between.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    pub(crate) fn values(
        &mut self,
        entry: &ParamEntry,
        base: &BaseValues,
    ) -> Result<&[u8], CheckpointError> {
        // The memory of another parameter is released first.
        let last = self.last.take().filter(|(path, _)| *path == entry.path);
        let last = match last {
            Some(last) => last,
            None => (entry.path.clone(), self.read(entry, base)?),
        };
        Ok(&self.last.insert(last).1)
    }
}

impl fmt::Debug for BaseReader {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.last.as_ref().map(|(path, _)| path);
        formatter.debug_struct("BaseReader").field("last", &last).finish_non_exhaustive()
    }
}
