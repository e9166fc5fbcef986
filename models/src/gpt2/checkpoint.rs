//! Reading a GPT-2 checkpoint in the layout of `transformers`.
//!
//! Main type: [`Checkpoint`]: a folder with `config.json` and either `model.safetensors` or the
//! shards that `model.safetensors.index.json` lists. Every tensor that is missing, left over, of
//! another shape or type or not finite is named, all in one error, before a model comes out.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use thiserror::Error;

use super::config::{ConfigError, Gpt2Config};
use super::model::Gpt2;
use super::parameters::{HEAD, ParameterShape, hf_name, is_mask_buffer, module_path};
use super::tensor_file::{TensorFile, float_type};
use crate::small_file::read_small_file;
use crate::weights::WeightInit;

/// The file of an unsharded checkpoint.
pub(crate) const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Module path of the token embedding.
const EMBEDDING: &str = "wte.weight";
pub(crate) const CONFIG: &str = "config.json";

/// A checkpoint whose config has been read and whose files have sound headers.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    config: Gpt2Config,
    files: Vec<TensorFile>,
    /// By module path, where each tensor is.
    tensors: BTreeMap<String, Location>,
}

/// Where a tensor is: which file, and under which name.
#[derive(Clone, Debug)]
struct Location {
    file: usize,
    name: String,
}

/// A tensor that does not fit the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorProblem {
    /// Its name in `transformers`.
    pub name: String,
    /// What the config asks for.
    pub expected: String,
    /// What the files hold.
    pub found: String,
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: expected {}, found {}", self.name, self.expected, self.found)
    }
}

/// Why a checkpoint cannot be read or written.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "open", "read", "write", ..
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// `config.json` is refused.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ConfigError,
    },
    /// The folder has no weights.
    #[error("{} has neither {WEIGHTS} nor {INDEX}{hint}", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// What it has instead and what to do, or empty.
        hint: &'static str,
    },
    /// A file is not what its name says.
    #[error("{} cannot be used: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Tensors do not fit the config.
    #[error("{} does not fit its config in {} tensors: {}", folder.display(), problems.len(), listed(problems))]
    Tensors {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// All of them.
        problems: Vec<TensorProblem>,
    },
}

fn listed(problems: &[TensorProblem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl CheckpointError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

/// The part of an index file that is used.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Reads the config and the headers of a checkpoint; no weights yet.
    ///
    /// # Errors
    /// [`CheckpointError`] if a file is missing, unreadable or malformed, or a tensor is there twice.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let folder = folder.as_ref().to_owned();
        let config = read_config(&folder.join(CONFIG))?;
        let files = open_files(&folder)?;
        let mut tensors = BTreeMap::new();
        for (file, content) in files.iter().enumerate() {
            for name in content.names() {
                let path = module_path(&name).to_owned();
                if is_mask_buffer(&path) {
                    continue;
                }
                if let Some(Location { name: first, .. }) =
                    tensors.insert(path, Location { file, name: name.clone() })
                {
                    let reason = format!("`{name}` and `{first}` are the same tensor, given twice");
                    return Err(CheckpointError::Format { path: content.path().into(), reason });
                }
            }
        }
        Ok(Self { folder, config, files, tensors })
    }

    /// The config the checkpoint came with.
    #[must_use]
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The model of `config`, which is the checkpoint's own or derived from it, with the
    /// checkpoint's weights as f32. Memory beyond the model: one tensor.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] naming every tensor that does not fit, or an I/O error.
    pub fn load<B: Backend>(
        mut self,
        config: &Gpt2Config,
        device: &B::Device,
    ) -> Result<Gpt2<B>, CheckpointError> {
        let model = Gpt2::zeros(config, device).map_err(|source| self.misconfigured(source))?;
        self.refuse(self.misfits(config))?;
        self.check_repeated_head(config)?;
        let mut filler =
            Filler { checkpoint: &mut self, path: Vec::new(), problems: Vec::new(), error: None };
        let model = model.map(&mut filler);
        let (problems, error) = (filler.problems, filler.error);
        error.map_or(Ok(()), Err)?;
        self.refuse(problems)?;
        Ok(model)
    }

    /// The model that [`load`](Self::load) makes, except that a weight is read when it is first used.
    /// Names, shapes and types are checked now; [`check_values`](Self::check_values) checks the rest.
    ///
    /// A weight that cannot be read later on, or is not finite, is a panic that says so: Burn's lazy
    /// parameters cannot return errors. Sharded training turns it into one.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] naming every tensor that does not fit.
    pub fn load_lazily<B: Backend>(
        self,
        config: &Gpt2Config,
        device: &B::Device,
    ) -> Result<Gpt2<B>, CheckpointError> {
        self.refuse(self.misfits(config))?;
        let folder = self.folder.clone();
        let checkpoint = Mutex::new(self);
        let read = move |path: &str| {
            // A reader that has panicked left nothing half-done: each read begins with a seek.
            let mut checkpoint = checkpoint.lock().unwrap_or_else(PoisonError::into_inner);
            checkpoint.read_finite(path).unwrap_or_else(|error| panic!("{error}"))
        };
        Gpt2::with(config, &WeightInit::reading(Arc::new(read), device))
            .map_err(|source| CheckpointError::Config { path: folder.join(CONFIG), source })
    }

    /// Reads all weights of the model of `config` once and keeps none: afterwards only the disk can
    /// make [`load_lazily`](Self::load_lazily) fail. Memory: 8 MiB.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn check_values(&mut self, config: &Gpt2Config) -> Result<(), CheckpointError> {
        self.refuse(self.misfits(config))?;
        self.check_repeated_head(config)?;
        let mut problems = Vec::new();
        for ParameterShape { path, shape } in config.parameters() {
            let (mut wild, numel) = (0, shape.iter().product());
            for part in parts(numel) {
                wild += not_finite(&self.read_part(&path, part)?);
            }
            problems.extend(wild_values(&path, wild, numel));
        }
        self.refuse(problems)
    }

    fn misconfigured(&self, source: ConfigError) -> CheckpointError {
        CheckpointError::Config { path: self.folder.join(CONFIG), source }
    }

    /// Takes the tensor at a module path out, where there is one: what is left is loaded without it.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] for one that is not a finite float tensor of `shape`, or an I/O error.
    pub(crate) fn take(
        &mut self,
        path: &str,
        shape: &[usize],
    ) -> Result<Option<Vec<f32>>, CheckpointError> {
        let Some(location) = self.tensors.get(path) else { return Ok(None) };
        let info = self.info(location);
        let fits = |info: &&TensorInfo| info.shape == shape && float_type(info.dtype).is_some();
        if info.filter(fits).is_none() {
            let found =
                info.map_or_else(String::new, |it| format!("{:?} of {}", it.shape, it.dtype));
            let expected = format!("{shape:?} of F32, F16 or BF16");
            let name = location.name.clone();
            self.refuse(vec![TensorProblem { name, expected, found }])?;
        }
        let values = self.read_finite(path)?;
        self.tensors.remove(path);
        Ok(Some(values))
    }

    /// Refuses a checkpoint without a tensor at a module path.
    pub(crate) fn require(&self, path: &str, shape: &[usize]) -> Result<(), CheckpointError> {
        if self.tensors.contains_key(path) {
            return Ok(());
        }
        let expected = format!("{shape:?} of F32, F16 or BF16");
        let found = "nothing".to_owned();
        self.refuse(vec![TensorProblem { name: path.to_owned(), expected, found }])
    }

    /// Leaves the language model's head out.
    pub(crate) fn leave_head(&mut self) {
        self.tensors.remove(HEAD);
    }

    fn refuse(&self, problems: Vec<TensorProblem>) -> Result<(), CheckpointError> {
        if problems.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Tensors { folder: self.folder.clone(), problems })
    }

    /// Tensors that are missing, left over or of the wrong shape or type.
    fn misfits(&self, config: &Gpt2Config) -> Vec<TensorProblem> {
        let mut expected: BTreeMap<String, Vec<usize>> =
            config.parameters().into_iter().map(|p| (p.path, p.shape)).collect();
        if config.tie_word_embeddings && self.tensors.contains_key(HEAD) {
            expected.insert(HEAD.to_owned(), vec![config.vocab_size, config.n_embd]);
        }
        let mut problems = Vec::new();
        for (path, shape) in &expected {
            let wanted = format!("{shape:?} of F32, F16 or BF16");
            let found = match self.tensors.get(path).and_then(|location| self.info(location)) {
                None => "nothing".to_owned(),
                Some(info) if info.shape == *shape && float_type(info.dtype).is_some() => continue,
                Some(info) => format!("{:?} of {}", info.shape, info.dtype),
            };
            problems.push(TensorProblem { name: hf_name(path), expected: wanted, found });
        }
        for (path, location) in &self.tensors {
            if !expected.contains_key(path) {
                let found = self
                    .info(location)
                    .map_or_else(String::new, |info| format!("{:?}", info.shape));
                let expected = "no such tensor".to_owned();
                problems.push(TensorProblem { name: location.name.clone(), expected, found });
            }
        }
        problems
    }

    fn info(&self, location: &Location) -> Option<&TensorInfo> {
        self.files[location.file].info(&location.name)
    }

    /// Reads the tensor at a module path that [`Self::misfits`] found fit.
    fn read(&mut self, path: &str) -> Result<Vec<f32>, CheckpointError> {
        let location = &self.tensors[path];
        self.files[location.file].read(&location.name)
    }

    /// Reads such a tensor and refuses values that are infinite or NaN.
    fn read_finite(&mut self, path: &str) -> Result<Vec<f32>, CheckpointError> {
        let values = self.read(path)?;
        self.refuse(wild_values(path, not_finite(&values), values.len()).into_iter().collect())?;
        Ok(values)
    }

    /// Reads elements of such a tensor.
    fn read_part(&mut self, path: &str, part: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let location = &self.tensors[path];
        self.files[location.file].read_range(&location.name, part)
    }

    /// A tied model has one matrix for embedding and head; a file that has both must agree.
    fn check_repeated_head(&mut self, config: &Gpt2Config) -> Result<(), CheckpointError> {
        if !(config.tie_word_embeddings && self.tensors.contains_key(HEAD)) {
            return Ok(());
        }
        let (mut differing, numel) = (0, config.vocab_size * config.n_embd);
        for part in parts(numel) {
            let embedding = self.read_part(EMBEDDING, part.clone())?;
            let head = self.read_part(HEAD, part)?;
            differing += embedding.iter().zip(&head).filter(|(a, b)| a != b).count();
        }
        if differing == 0 {
            return Ok(());
        }
        self.refuse(vec![TensorProblem {
            name: HEAD.to_owned(),
            expected: "the values of `transformer.wte.weight`, to which it is tied (or \
                       `tie_word_embeddings`: false)"
                .to_owned(),
            found: format!("{differing} of {numel} values that differ"),
        }])
    }
}

/// Elements that are read at a time where no more than a look is taken at them.
const PART: usize = 1 << 20;

fn parts(numel: usize) -> impl Iterator<Item = Range<usize>> {
    (0..numel).step_by(PART).map(move |start| start..numel.min(start + PART))
}

/// How many values are infinite or NaN.
fn not_finite(values: &[f32]) -> usize {
    values.iter().filter(|value| !value.is_finite()).count()
}

/// What is wrong with a tensor of which `wild` of `numel` values are not finite.
fn wild_values(path: &str, wild: usize, numel: usize) -> Option<TensorProblem> {
    (wild > 0).then(|| TensorProblem {
        name: hf_name(path),
        expected: "finite values".to_owned(),
        found: format!("{wild} of {numel} that are infinite or NaN"),
    })
}

fn read_config(path: &Path) -> Result<Gpt2Config, CheckpointError> {
    let text = read_small_file(path).map_err(|e| CheckpointError::io("read", path, e))?;
    text.parse().map_err(|source| CheckpointError::Config { path: path.to_owned(), source })
}

/// Opens the checkpoint's one file, or the shards that its index lists.
pub(crate) fn open_files(folder: &Path) -> Result<Vec<TensorFile>, CheckpointError> {
    let (single, index) = (folder.join(WEIGHTS), folder.join(INDEX));
    if single.exists() {
        return Ok(vec![TensorFile::open(&single)?]);
    }
    if !index.exists() {
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        let hint = if pickled.iter().any(|name| folder.join(name).exists()) {
            "; it has PyTorch's pickled weights: save them again with transformers' \
             save_pretrained, which writes safetensors"
        } else {
            ""
        };
        return Err(CheckpointError::NoWeights { folder: folder.to_owned(), hint });
    }
    open_shards(folder, &index)
}

fn open_shards(folder: &Path, index: &Path) -> Result<Vec<TensorFile>, CheckpointError> {
    let format = |reason| CheckpointError::Format { path: index.to_owned(), reason };
    let text = read_small_file(index).map_err(|e| CheckpointError::io("read", index, e))?;
    let Index { weight_map } =
        serde_json::from_str(&text).map_err(|error| format(error.to_string()))?;
    let mut shards: BTreeMap<&str, TensorFile> = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(format(format!("shard `{shard}` is not a file name in its own folder")));
        }
        if !shards.contains_key(shard.as_str()) {
            shards.insert(shard, TensorFile::open(&folder.join(shard))?);
        }
        if shards[shard.as_str()].info(tensor).is_none() {
            return Err(format(format!("`{tensor}` should be in {shard}, which does not have it")));
        }
    }
    Ok(shards.into_values().collect())
}

/// Puts the checkpoint's tensors into a module, by module path.
struct Filler<'a> {
    checkpoint: &'a mut Checkpoint,
    path: Vec<String>,
    problems: Vec<TensorProblem>,
    /// The first failure to read; nothing is read after it.
    error: Option<CheckpointError>,
}

impl Filler<'_> {
    /// The values of a parameter, or None with the reason noted.
    fn values(&mut self) -> Option<Vec<f32>> {
        if self.error.is_some() {
            return None;
        }
        let path = self.path.join(".");
        let values = match self.checkpoint.read(&path) {
            Ok(values) => values,
            Err(error) => {
                self.error = Some(error);
                return None;
            }
        };
        if let Some(problem) = wild_values(&path, not_finite(&values), values.len()) {
            self.problems.push(problem);
            return None;
        }
        Some(values)
    }
}

impl<B: Backend> ModuleMapper<B> for Filler<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(values) = self.values() else { return param };
        let data = TensorData::new(values, param.lazy_shape());
        let tensor = Tensor::from_data(data, &param.lazy_device());
        let id = param.id;
        param.transform_for_load(tensor, id)
    }
}
