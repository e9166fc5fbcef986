//! Writing a model folder.
//!
//! Main type: [`ModelFolderWriter`]. It takes one tensor at a time, in any order, because the tensors of a
//! sharded model are gathered one at a time; it holds none of them. The weights get their name when they are
//! complete: until then nothing in the folder changes that a reader would look at.
//!
//! ```text
//! create    FOLDER/<unfinished name>      the header and space for all tensors
//! write     …                             each tensor at its offset
//! finish    FOLDER/model.safetensors      by a rename
//!           FOLDER/config.json, …         each by a rename, after the weights
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use deepburn_files::PartialFile;
use deepburn_safetensors::{FloatType, Header, TensorFileWriter};
use serde_json::{Map, Value};

use super::error::{ModelFolderError, TensorProblem, WEIGHTS};
use super::names::{Names, ParameterShape};

/// Values converted and written at a time.
const CHUNK: usize = 1 << 18;

/// JSON files beside the weights, each with its name and fields. They are written after the weights, because a reader
/// looks for `config.json` first and should then find everything.
pub type JsonFiles = Vec<(&'static str, Map<String, Value>)>;

/// A model folder being written.
///
/// Dropped before [`ModelFolderWriter::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct ModelFolderWriter {
    /// The folder that is written.
    folder: PathBuf,
    /// The type of the weights in the file.
    float: FloatType,
    /// JSON files to write at the end.
    documents: JsonFiles,
    /// The weights; `None` once they have their name.
    file: Option<TensorFileWriter>,
    /// Tensors still to come, by module path.
    pending: BTreeMap<String, PendingTensor>,
}

/// A tensor that is still to be written.
#[derive(Debug)]
struct PendingTensor {
    /// Its name in the file.
    name: String,
    /// The shape that its data must have.
    shape: Vec<usize>,
    /// Its first byte, from the beginning of the values.
    start: u64,
}

impl ModelFolderWriter {
    /// Starts a folder, which is created if need be, for these parameters and documents.
    ///
    /// # Errors
    /// [`ModelFolderError::Io`] if the folder cannot be written to.
    pub fn create(
        folder: &Path,
        parameters: Vec<ParameterShape>,
        names: Names,
        float: FloatType,
        documents: JsonFiles,
    ) -> Result<Self, ModelFolderError> {
        let folder = folder.to_owned();
        fs::create_dir_all(&folder).map_err(|e| ModelFolderError::io("create", &folder, e))?;
        let (header, pending) = lay_out(parameters, names, float);
        let weights = folder.join(WEIGHTS);
        let partial = unfinished(&weights);
        let io = |source| ModelFolderError::io("write", &partial, source);
        let file = TensorFileWriter::create(&weights, partial.clone(), &header).map_err(io)?;
        Ok(Self { folder, float, documents, file: Some(file), pending })
    }

    /// Writes the parameter at a module path; float data of any width.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] if the model has no such parameter, it was written before or its
    /// shape is another; an I/O error.
    pub fn write(&mut self, path: &str, data: TensorData) -> Result<(), ModelFolderError> {
        let found = format!("{:?} of {:?}", data.shape.to_vec(), data.dtype);
        let Some(PendingTensor { name, shape, start }) = self.pending.get(path) else {
            let expected = "a parameter of the model that was not written yet".to_owned();
            return Err(self.problem(path.to_owned(), expected, found));
        };
        let (same_shape, start) = (data.shape.iter().eq(shape), *start);
        let data = if data.dtype.is_float() { data.convert::<f32>() } else { data };
        let (true, Ok(values)) = (same_shape, data.as_slice::<f32>()) else {
            return Err(self.problem(name.clone(), format!("{shape:?} of a float type"), found));
        };
        self.write_values(start, values)
            .map_err(|source| ModelFolderError::io("write", &self.folder.join(WEIGHTS), source))?;
        self.pending.remove(path);
        Ok(())
    }

    /// Converts and writes values in chunks, so that a large tensor is not in memory twice.
    ///
    /// `start` is the tensor's first byte.
    fn write_values(&mut self, start: u64, values: &[f32]) -> std::io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.seek(start)?;
        let mut bytes = Vec::with_capacity(CHUNK.min(values.len()) * self.float.size());
        for chunk in values.chunks(CHUNK) {
            bytes.clear();
            self.float.encode(chunk, &mut bytes);
            file.write(&bytes)?;
        }
        Ok(())
    }

    /// Gives the weights their name, then writes `config.json` and what else goes beside them.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every parameter that was not written; an I/O error.
    pub fn finish(mut self) -> Result<(), ModelFolderError> {
        if !self.pending.is_empty() {
            let missing = |PendingTensor { name, shape, .. }: &PendingTensor| TensorProblem {
                name: name.clone(),
                expected: format!("{shape:?}"),
                found: "nothing: it was not written".to_owned(),
            };
            let problems = self.pending.values().map(missing).collect();
            return Err(ModelFolderError::Tensors { folder: self.folder.clone(), problems });
        }
        if let Some(file) = self.file.take() {
            let finished = file.finish();
            finished.map_err(|e| ModelFolderError::io("write", &self.folder.join(WEIGHTS), e))?;
        }
        for (name, fields) in &self.documents {
            write_json(&self.folder.join(name), fields)?;
        }
        Ok(())
    }

    /// Returns the error of one tensor.
    ///
    /// `name` is the tensor's name in the file, or the module path of a parameter that the model does not have.
    fn problem(&self, name: String, expected: String, found: String) -> ModelFolderError {
        let problems = vec![TensorProblem { name, expected, found }];
        ModelFolderError::Tensors { folder: self.folder.clone(), problems }
    }
}

impl Drop for ModelFolderWriter {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            drop(file);
            // This removes only an empty folder, so nothing of the user is lost.
            _ = fs::remove_dir(&self.folder);
        }
    }
}

/// Returns the header of the file, and where each tensor goes. Tensors are sorted by name, as `transformers` writes
/// them.
fn lay_out(
    parameters: Vec<ParameterShape>,
    names: Names,
    float: FloatType,
) -> (Header, BTreeMap<String, PendingTensor>) {
    let mut named: Vec<_> =
        parameters.into_iter().map(|it| ((names.in_file)(&it.path), it)).collect();
    named.sort_by(|(left, _), (right, _)| left.cmp(right));
    let mut header = Header::pytorch();
    let pending = named.into_iter().map(|(name, ParameterShape { path, shape })| {
        let start = header.push(&name, float.element(), &shape);
        (path, PendingTensor { name, shape, start })
    });
    let pending = pending.collect();
    (header, pending)
}

/// Writes a JSON file whole or not at all.
///
/// # Errors
/// [`ModelFolderError::Io`].
fn write_json(path: &Path, fields: &Map<String, Value>) -> Result<(), ModelFolderError> {
    let text = serde_json::to_string_pretty(fields).expect("a JSON object always is JSON") + "\n";
    PartialFile::replace(path, unfinished(path), text)
        .map_err(|source| ModelFolderError::io("write", path, source))
}

/// Returns the name a file has until it is complete: hidden, beside it, of this process alone.
fn unfinished(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    path.with_file_name(format!(".{name}.{}.unfinished", std::process::id()))
}
