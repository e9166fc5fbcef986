//! Writing a checkpoint in the layout of `transformers`.
//!
//! Main type: [`CheckpointWriter`]. It takes one tensor at a time, in any order, because the tensors
//! of a sharded model are gathered one at a time; it holds none of them. The weights get their name
//! when they are complete: until then nothing in the folder changes that a reader would look at.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::checkpoint::{CONFIG, CheckpointError, TensorProblem, WEIGHTS};
use super::classifier::ClassifierConfig;
use super::config::Gpt2Config;
use super::model::Gpt2;
use super::parameters::{ParameterShape, hf_name};
use super::precision::SavedPrecision;
use crate::Publication;

/// Values converted and written at a time.
const CHUNK: usize = 1 << 18;

/// A checkpoint being written.
///
/// Dropped before [`CheckpointWriter::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct CheckpointWriter {
    folder: PathBuf,
    precision: SavedPrecision,
    /// JSON files that go beside the weights, by name.
    documents: Documents,
    file: File,
    /// The unfinished file; None once it has its name.
    unfinished: Option<PathBuf>,
    /// Tensors still to come, by module path.
    pending: Pending,
}

type Pending = BTreeMap<String, Slot>;
pub(crate) type Documents = Vec<(&'static str, Map<String, Value>)>;

/// Where in the file a tensor goes.
#[derive(Debug)]
struct Slot {
    /// Its name in the file.
    name: String,
    shape: Vec<usize>,
    /// Its first byte, from the beginning of the file.
    start: u64,
}

impl CheckpointWriter {
    /// Starts a checkpoint for a GPT-2 of `config` in `folder`, which is created if need be.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the folder cannot be written to.
    pub fn create(
        folder: impl AsRef<Path>,
        config: &Gpt2Config,
        precision: SavedPrecision,
    ) -> Result<Self, CheckpointError> {
        let documents = documents(config, precision);
        Self::start(folder.as_ref(), config.parameters(), hf_name, precision, documents)
    }

    /// Starts a checkpoint of any model: its parameters, and how each is called in the file.
    pub(crate) fn start(
        folder: &Path,
        parameters: Vec<ParameterShape>,
        name: fn(&str) -> String,
        precision: SavedPrecision,
        documents: Documents,
    ) -> Result<Self, CheckpointError> {
        let folder = folder.to_owned();
        fs::create_dir_all(&folder).map_err(|e| CheckpointError::io("create", &folder, e))?;
        let unfinished = unfinished(&folder.join(WEIGHTS));
        let (header, pending) = lay_out(parameters, name, precision);
        let io = |source| CheckpointError::io("write", &unfinished, source);
        let mut file = File::create(&unfinished).map_err(io)?;
        file.write_all(&header).map_err(io)?;
        let unfinished = Some(unfinished);
        Ok(Self { folder, precision, documents, file, unfinished, pending })
    }

    /// Writes the parameter at a module path; float data of any width.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] if the model has no such parameter, it was written before or its
    /// shape is another; an I/O error.
    pub fn write(&mut self, path: &str, data: TensorData) -> Result<(), CheckpointError> {
        let found = format!("{:?} of {:?}", data.shape.to_vec(), data.dtype);
        let Some(Slot { name, shape, start }) = self.pending.get(path) else {
            let expected = "a parameter of the model that was not written yet".to_owned();
            return Err(self.problem(path.to_owned(), expected, found));
        };
        let (same_shape, start) = (data.shape.iter().eq(shape), *start);
        let data = if data.dtype.is_float() { data.convert::<f32>() } else { data };
        let (true, Ok(values)) = (same_shape, data.as_slice::<f32>()) else {
            return Err(self.problem(name.clone(), format!("{shape:?} of a float type"), found));
        };
        self.write_values(start, values)
            .map_err(|source| CheckpointError::io("write", &self.weights(), source))?;
        self.pending.remove(path);
        Ok(())
    }

    fn write_values(&mut self, start: u64, values: &[f32]) -> std::io::Result<()> {
        self.file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::with_capacity(CHUNK.min(values.len()) * self.precision.size());
        for chunk in values.chunks(CHUNK) {
            bytes.clear();
            self.precision.encode(chunk, &mut bytes);
            self.file.write_all(&bytes)?;
        }
        Ok(())
    }

    /// Names the weights, then writes `config.json` and what else goes beside them.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] naming every parameter that was not written; an I/O error.
    pub fn finish(mut self) -> Result<(), CheckpointError> {
        if !self.pending.is_empty() {
            let missing = |Slot { name, shape, .. }: &Slot| TensorProblem {
                name: name.clone(),
                expected: format!("{shape:?}"),
                found: "nothing: it was not written".to_owned(),
            };
            let problems = self.pending.values().map(missing).collect();
            return Err(CheckpointError::Tensors { folder: self.folder.clone(), problems });
        }
        let weights = self.weights();
        if let Some(unfinished) = &self.unfinished {
            self.file
                .sync_all()
                .and_then(|()| fs::rename(unfinished, &weights))
                .map_err(|source| CheckpointError::io("write", &weights, source))?;
            self.unfinished = None;
        }
        for (name, fields) in &self.documents {
            write_json(&self.folder.join(name), fields)?;
        }
        Ok(())
    }

    fn weights(&self) -> PathBuf {
        self.folder.join(WEIGHTS)
    }

    fn problem(&self, name: String, expected: String, found: String) -> CheckpointError {
        let problems = vec![TensorProblem { name, expected, found }];
        CheckpointError::Tensors { folder: self.folder.clone(), problems }
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if let Some(path) = self.unfinished.take() {
            // There is nobody to tell, and an unfinished file misleads no reader.
            _ = fs::remove_file(path);
            // Only where it is empty: then it was made for this checkpoint, or nobody misses it.
            _ = fs::remove_dir(&self.folder);
        }
    }
}

impl<B: Backend> Gpt2<B> {
    /// Writes the model as a checkpoint that [`Checkpoint`](super::Checkpoint) and `transformers` load.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn save(
        &self,
        folder: impl AsRef<Path>,
        precision: SavedPrecision,
    ) -> Result<(), CheckpointError> {
        let writer = CheckpointWriter::create(folder, self.config(), precision)?;
        let mut saver = Saver { writer, path: Vec::new(), outcome: Ok(()) };
        self.visit(&mut saver);
        saver.outcome?;
        saver.writer.finish()
    }
}

/// Writes a module's parameters as it visits them.
struct Saver {
    writer: CheckpointWriter,
    path: Vec<String>,
    outcome: Result<(), CheckpointError>,
}

impl<B: Backend> ModuleVisitor<B> for Saver {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.outcome.is_ok() {
            self.outcome = self.writer.write(&self.path.join("."), param.val().into_data());
        }
    }
}

/// The header of the file, and where each tensor goes.
fn lay_out(
    mut parameters: Vec<ParameterShape>,
    name: fn(&str) -> String,
    precision: SavedPrecision,
) -> (Vec<u8>, Pending) {
    parameters.sort_by_cached_key(|parameter| name(&parameter.path));
    let mut end = 0;
    let mut infos = Vec::with_capacity(parameters.len());
    for parameter in &parameters {
        let start = end;
        end += parameter.shape.iter().product::<usize>() * precision.size();
        let (dtype, shape) = (precision.safetensors(), parameter.shape.clone());
        infos
            .push((name(&parameter.path), TensorInfo { dtype, shape, data_offsets: (start, end) }));
    }
    let starts: Vec<_> = infos.iter().map(|(_, info)| info.data_offsets.0).collect();
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let header = Metadata::new(Some(format), infos)
        .expect("the tensors follow each other without gaps, each as long as its shape says");
    let mut text = serde_json::to_vec(&header).expect("names and numbers always are JSON");
    // Tensors begin at a multiple of 8, as safetensors aligns them.
    text.resize(text.len().next_multiple_of(8), b' ');
    let data_start = 8 + text.len() as u64;
    let header = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
    let pending = parameters
        .into_iter()
        .zip(starts)
        .map(|(parameter, start)| {
            let start = data_start + start as u64;
            let name = name(&parameter.path);
            (parameter.path, Slot { name, shape: parameter.shape, start })
        })
        .collect();
    (header, pending)
}

/// `config.json`: the config with what is known of the weights.
fn model_config(config: &Gpt2Config, precision: SavedPrecision) -> Map<String, Value> {
    let mut fields = Map::from(config.clone());
    fields.insert("architectures".into(), json!(["GPT2LMHeadModel"]));
    fields.insert("dtype".into(), json!(precision.torch_name()));
    if let Some(older_name) = fields.get_mut("torch_dtype") {
        *older_name = json!(precision.torch_name());
    }
    fields.sort_keys();
    fields
}

/// `config.json` of a classifier. `transformers` finds the end of a text by its padding.
pub(crate) fn classifier_config(
    config: &ClassifierConfig,
    precision: SavedPrecision,
) -> Map<String, Value> {
    let mut fields = model_config(&config.body, precision);
    fields.insert("architectures".into(), json!(["GPT2ForSequenceClassification"]));
    fields.extend(config.labels());
    if fields.get("pad_token_id").is_none_or(Value::is_null) {
        let end = config.body.eos_token_ids().first().map_or(Value::Null, |id| json!(id));
        fields.insert("pad_token_id".into(), end);
    }
    fields.sort_keys();
    fields
}

/// What lies beside the weights of a language model.
fn documents(config: &Gpt2Config, precision: SavedPrecision) -> Documents {
    vec![
        (CONFIG, model_config(config, precision)),
        ("generation_config.json", generation_config(config)),
    ]
}

impl Gpt2Config {
    /// How a language model of this config goes by in `transformers`.
    #[must_use]
    pub fn publication(&self) -> Publication {
        let documents = documents(self, SavedPrecision::F32);
        Publication::new(&self.parameters(), hf_name, documents)
    }
}

/// `generation_config.json`: the special tokens that generation needs.
fn generation_config(config: &Gpt2Config) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("_from_model_config".into(), json!(true));
    for name in ["bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"] {
        if let Some(value) = config.carried.0.get(name).filter(|value| !value.is_null()) {
            fields.insert(name.into(), value.clone());
        }
    }
    fields
}

/// Writes a JSON file whole or not at all.
fn write_json(path: &Path, fields: &Map<String, Value>) -> Result<(), CheckpointError> {
    let text = serde_json::to_string_pretty(fields).expect("a JSON object always is JSON") + "\n";
    let unfinished = unfinished(path);
    fs::write(&unfinished, text)
        .and_then(|()| fs::rename(&unfinished, path))
        .map_err(|source| CheckpointError::io("write", path, source))
}

/// The name a file has until it is complete: hidden, beside it, of this process alone.
fn unfinished(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    path.with_file_name(format!(".{name}.{}.unfinished", std::process::id()))
}
