//! Writes model folders.
//!
//! Main type: [`ModelFolderWriter`]. Tensors are written one at a time and in any order, because
//! the tensors of a sharded model are gathered one at a time. No tensor is kept in memory. The
//! weight file is renamed to its final name when it is complete, so readers never see a partial
//! file.
//!
//! ```text
//! create    FOLDER/<temporary name>       the header and space for all tensors
//! write     …                             each tensor at its offset
//! finish    FOLDER/model.safetensors      by a rename
//!           FOLDER/config.json, …         each by a rename, after the weights
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use deepburn_files::PartialFile;
use deepburn_files::safetensors::{FloatType, Header, TensorFileWriter};
use deepburn_weights::{Weight, WeightMap};
use serde_json::{Map, Value};

use super::error::{ModelFolderError, TensorProblem, WEIGHTS};

/// The number of values that are converted and written at a time.
const CHUNK: usize = 1 << 18;

/// JSON files stored next to the weights, each with its name and fields. They are written after the
/// weights, because readers look for `config.json` first and then expect the other files.
pub type JsonFiles = Vec<(&'static str, Map<String, Value>)>;

/// A writer for a model folder.
///
/// If it is dropped before [`ModelFolderWriter::finish`], the partial file is removed, and so is
/// the folder if it is empty.
#[derive(Debug)]
pub struct ModelFolderWriter {
    /// The folder that is written.
    folder: PathBuf,
    /// The final path of the weight file.
    weights: PathBuf,
    /// The type of the weights in the file.
    float: FloatType,
    /// JSON files that are written at the end.
    documents: JsonFiles,
    /// The weight file; `None` after it has been renamed to its final name.
    file: Option<TensorFileWriter>,
    /// The offset of the first byte of each tensor from the start of the values.
    starts: BTreeMap<String, u64>,
    /// Parameters that have not been written yet, by module path.
    pending: BTreeMap<String, Weight>,
}

impl ModelFolderWriter {
    /// Starts writing a folder with the tensors of a map and these JSON files. The folder is
    /// created if it does not exist.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Io`] if the folder cannot be written to.
    pub fn create(
        folder: &Path,
        map: &WeightMap,
        float: FloatType,
        documents: JsonFiles,
    ) -> Result<Self, ModelFolderError> {
        Self::with_name(folder, WEIGHTS, map, float, documents)
    }

    /// Starts writing a folder whose weight file has this name.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Io`] if the folder cannot be written to.
    pub(crate) fn with_name(
        folder: &Path,
        name: &'static str,
        map: &WeightMap,
        float: FloatType,
        documents: JsonFiles,
    ) -> Result<Self, ModelFolderError> {
        let folder = folder.to_owned();
        fs::create_dir_all(&folder).map_err(|e| ModelFolderError::io("create", &folder, e))?;
        let (header, starts) = lay_out(map, float);
        let pending = map.parameters().map(|it| (it.path().to_owned(), it.clone())).collect();
        let weights = folder.join(name);
        let io = |source| ModelFolderError::io("write", &weights, source);
        let file = TensorFileWriter::beside(&weights, &header).map_err(io)?;
        Ok(Self { folder, weights, float, documents, file: Some(file), starts, pending })
    }

    /// Sets the fields of the JSON file `name`, which is written next to the weights.
    pub fn set_document(&mut self, name: &'static str, fields: Map<String, Value>) {
        self.documents.retain(|(document, _)| *document != name);
        self.documents.push((name, fields));
    }

    /// Writes the parameter at a module path. `data` can have any float type. Values that are
    /// already infinite or NaN are written as they are, with a warning that names the tensor.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if the model has no such parameter, the parameter was
    /// already written or its shape is wrong, [`ModelFolderError::Overflow`] if a finite value
    /// would become infinite, or an I/O error.
    pub fn write(&mut self, path: &str, data: TensorData) -> Result<(), ModelFolderError> {
        let found = format!("{:?} of {:?}", data.shape.to_vec(), data.dtype);
        let Some(weight) = self.pending.get(path) else {
            let expected = "a parameter of the model that was not written yet".to_owned();
            return Err(self.problem(path.to_owned(), expected, found));
        };
        let (name, shape) = (weight.stored_name(), weight.shape());
        let same_shape = data.shape.iter().eq(&shape);
        // Before the conversion to f32, in which such values are infinite.
        let wide = wide_overflow(&data);
        let data = if data.dtype.is_float() { data.convert::<f32>() } else { data };
        let (true, Ok(values)) = (same_shape, data.as_slice::<f32>()) else {
            return Err(self.problem(name, format!("{shape:?} of a float type"), found));
        };
        if let Some(found) = wide.or(self.float.overflow(values).map(f64::from)) {
            let float = self.float;
            return Err(ModelFolderError::Overflow { name, found, float });
        }
        let count = values.iter().filter(|value| !value.is_finite()).count();
        if count > 0 {
            let total = values.len();
            tracing::warn!(
                "`{name}`: {count} of {total} values are infinite or NaN, and are exported as they are"
            );
        }
        let io = |source| ModelFolderError::io("write", &self.weights, source);
        let Some(file) = &mut self.file else { return Ok(()) };
        let float = self.float;
        let written = weight.composition().write(values, |tensor, first, values| {
            file.seek(self.starts[tensor] + (first * float.size()) as u64)?;
            write_values(file, float, values)
        });
        written.map_err(io)?;
        // Only now, so that a parameter whose write failed counts as missing.
        self.pending.remove(path);
        Ok(())
    }

    /// Renames the weight file to its final name, then writes `config.json` and the other JSON
    /// files.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every parameter that was not written, or an I/O
    /// error.
    pub fn finish(mut self) -> Result<(), ModelFolderError> {
        if !self.pending.is_empty() {
            let missing = |weight: &Weight| TensorProblem {
                name: weight.stored_name(),
                expected: format!("{:?}", weight.shape()),
                found: "nothing: it was not written".to_owned(),
            };
            let problems = self.pending.values().map(missing).collect();
            return Err(ModelFolderError::Tensors { folder: self.folder.clone(), problems });
        }
        if let Some(file) = self.file.take() {
            let finished = file.finish();
            finished.map_err(|e| ModelFolderError::io("write", &self.weights, e))?;
        }
        // After the weights, because programs take a folder with config.json for a complete one.
        for (name, fields) in &self.documents {
            write_json(&self.folder.join(name), fields)?;
        }
        Ok(())
    }

    /// Returns an error for one tensor.
    ///
    /// `name` is the tensor's name in the file, or the module path of a parameter that the model
    /// does not have.
    fn problem(&self, name: String, expected: String, found: String) -> ModelFolderError {
        let problems = vec![TensorProblem { name, expected, found }];
        ModelFolderError::Tensors { folder: self.folder.clone(), problems }
    }
}

impl Drop for ModelFolderWriter {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            drop(file);
            // `remove_dir` only removes empty folders, so no user data is lost.
            _ = fs::remove_dir(&self.folder);
        }
    }
}

/// Returns the largest magnitude of the finite values in f64 `data` if it exceeds f32, to which
/// they are converted.
fn wide_overflow(data: &TensorData) -> Option<f64> {
    let values = data.as_slice::<f64>().ok()?;
    let finite = values.iter().map(|value| value.abs()).filter(|value| value.is_finite());
    let largest = finite.fold(0.0, f64::max);
    (largest as f32).is_infinite().then_some(largest)
}

/// Converts and writes values in chunks, so that no second copy of a large tensor is in memory.
fn write_values(
    file: &mut TensorFileWriter,
    float: FloatType,
    values: &[f32],
) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(CHUNK.min(values.len()) * float.size());
    for chunk in values.chunks(CHUNK) {
        bytes.clear();
        float.encode(chunk, &mut bytes);
        file.write(&bytes)?;
    }
    Ok(())
}

/// Returns the header of the file and the offset of each tensor. Tensors are sorted by name, as in
/// files written by `transformers`.
fn lay_out(map: &WeightMap, float: FloatType) -> (Header, BTreeMap<String, u64>) {
    let mut tensors: Vec<_> = map.stored_tensors().iter().collect();
    tensors.sort_by_key(|tensor| tensor.name());
    let mut header = Header::pytorch();
    let starts = tensors.into_iter().map(|tensor| {
        let start = header.push(tensor.name(), float.element(), tensor.shape());
        (tensor.name().to_owned(), start)
    });
    let starts = starts.collect();
    (header, starts)
}

/// Writes a JSON file atomically.
///
/// # Errors
/// Returns [`ModelFolderError::Io`] if a file cannot be written.
fn write_json(path: &Path, fields: &Map<String, Value>) -> Result<(), ModelFolderError> {
    let text = serde_json::to_string_pretty(fields).expect("a JSON object always is JSON") + "\n";
    let written = PartialFile::beside(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.finish()
    });
    written.map_err(|source| ModelFolderError::io("write", path, source))
}
