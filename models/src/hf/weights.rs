//! The weights of a model folder.
//!
//! Main type: [`Weights`], which reads `model.safetensors`, or the shards listed in
//! `model.safetensors.index.json`. One error names all tensors that are missing or unknown, have
//! the wrong shape or type, or contain values that are not finite. A file is never loaded into
//! memory as a whole.
//!
//! Names may have the prefix of a wrapper such as DDP, which is removed ([`find_prefix`]).
//!
//! There are three checks, and each relies on the previous one. [`Weights::open`] checks the
//! headers of all files. [`Weights::check_shapes`] compares names, shapes and types with the map of
//! the model. Values are checked while they are read. Methods that require *checked* tensors rely
//! on the second check. The supported types are F32, F16 and BF16; all values are converted to f32.
//!
//! The origins in a map say which parameters are read, and which are new or have new rows. A folder
//! may repeat a tied parameter under its other names.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use deepburn_weights::{StoredTensor, Weight, WeightMap};
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::error::{INDEX, ModelFolderError, TensorProblem, WEIGHTS};
use super::mean_rows::append_mean_rows;
use super::name_prefix::{MERGE, adapter_in, find_prefix, without_layer_wrappers};
use super::small_file::read_small_file;
use super::tensor_file::{TensorFile, float_type};
use super::{ADAPTER_CONFIG, CONFIG};
use crate::weights::ReadWeights;

/// The weights of a model folder. The headers of all files have been checked.
#[derive(Debug)]
pub(crate) struct Weights {
    /// The folder, for messages.
    folder: PathBuf,
    /// The map of the model's parameters.
    map: WeightMap,
    /// The prefix of a wrapper that all tensor names have; empty if there is none.
    prefix: String,
    /// The open files.
    files: Vec<TensorFile>,
    /// The location of each tensor, by its name in the map.
    tensors: BTreeMap<String, TensorLocation>,
}

/// The location of a tensor: its file and its name in that file.
#[derive(Clone, Debug)]
struct TensorLocation {
    /// Index in `Weights::files`.
    file: usize,
    /// The tensor's name in this file.
    name: String,
}

/// The fields of an index file that are used.
#[derive(Deserialize)]
struct Index {
    /// The shard of each tensor, by the tensor's name.
    #[serde(deserialize_with = "unique_entries")]
    weight_map: BTreeMap<String, String>,
}

/// Reads an object of strings. A name that is given twice is an error, because only one of its
/// values can be right.
///
/// # Errors
/// Returns the error of the deserializer.
fn unique_entries<'de, D: Deserializer<'de>>(
    object: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    /// Collects the entries.
    struct Entries;

    impl<'de> Visitor<'de> for Entries {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object with the file of each tensor")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
            let mut entries = BTreeMap::new();
            while let Some((tensor, shard)) = fields.next_entry::<String, String>()? {
                if let Some(first) = entries.get(&tensor) {
                    return Err(A::Error::custom(format_args!(
                        "`weight_map` names `{tensor}` twice, in {first} and in {shard}; remove the entry of the file that \
                         does not have it"
                    )));
                }
                entries.insert(tensor, shard);
            }
            Ok(entries)
        }
    }

    object.deserialize_map(Entries)
}

impl Weights {
    /// Reads the headers of a folder's weight files, but not the weights. `others` are names of
    /// tensors that the files may contain in addition to the tensors of `map`.
    ///
    /// # Errors
    /// Returns an error if a file is missing, unreadable or malformed, a tensor occurs twice,
    /// tensor names have an unknown prefix, or the weights are a LoRA adapter.
    pub(crate) fn open(
        folder: &Path,
        map: WeightMap,
        others: &[&str],
    ) -> Result<Self, ModelFolderError> {
        let files = open_files(folder)?;
        let in_files: Vec<Vec<String>> = files.iter().map(TensorFile::names).collect();
        let all = || in_files.iter().flatten().map(String::as_str);
        let own_name = |name: &str| map.tensor_name(&without_layer_wrappers(name));
        let is_own = |name: &str| {
            own_name(name).is_some_and(|own| map.has_tensor(&own) || others.contains(&&*own))
        };
        // First, because otherwise every tensor of the model would be reported as missing.
        let prefix = match adapter_in(all()) {
            Some(reason) => Err(reason),
            None => find_prefix(all(), is_own).map(str::to_owned),
        };
        let prefix = prefix
            .map_err(|reason| ModelFolderError::Format { path: folder.to_owned(), reason })?;
        let mut tensors = BTreeMap::new();
        for (file, (content, in_file)) in files.iter().zip(in_files).enumerate() {
            for name in in_file {
                let own = name.strip_prefix(&prefix).unwrap_or(&name);
                // Buffers, such as causal masks, have no name in the map.
                let Some(own) = own_name(own) else { continue };
                let location = TensorLocation { file, name: name.clone() };
                if let Some(TensorLocation { name: first, .. }) = tensors.insert(own, location) {
                    let reason = format!("`{name}` and `{first}` are the same tensor, given twice");
                    return Err(ModelFolderError::Format { path: content.path().into(), reason });
                }
            }
        }
        Ok(Self { folder: folder.to_owned(), map, prefix, files, tensors })
    }

    /// Opens a file of weights that is not the `model.safetensors` of a folder. Names have no
    /// prefix.
    ///
    /// # Errors
    /// Returns an error if the file is unreadable or malformed.
    pub(crate) fn of_file(path: &Path, map: WeightMap) -> Result<Self, ModelFolderError> {
        let file = TensorFile::open(path)?;
        let locations = file.names().into_iter();
        let tensors = locations.map(|name| (name.clone(), TensorLocation { file: 0, name }));
        let (tensors, folder) = (tensors.collect(), path.to_owned());
        Ok(Self { folder, map, prefix: String::new(), files: vec![file], tensors })
    }

    /// Logs the prefix that was removed from all tensor names, if there is one.
    pub(crate) fn log_prefix(&self) {
        if !self.prefix.is_empty() {
            tracing::info!(
                "{}: the names of all tensors start with `{}`, which is removed",
                self.folder.display(),
                self.prefix
            );
        }
    }

    /// Returns the folder of the files.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns whether there is a tensor of this name.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Removes a tensor from the list of tensors.
    pub(crate) fn remove(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Returns the number of rows of a tensor; `None` if there is no such tensor.
    pub(crate) fn num_rows(&self, name: &str) -> Option<usize> {
        self.info(self.tensors.get(name)?)?.shape.first().copied()
    }

    /// Reads a parameter and removes its tensors from the list of tensors. Returns `None` if there
    /// is none of them.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if a tensor is not a finite float tensor of the
    /// expected shape, or an I/O error.
    pub(crate) fn take(&mut self, weight: &Weight) -> Result<Option<Vec<f32>>, ModelFolderError> {
        let components = weight.composition().components();
        if !components.iter().any(|component| self.contains(&component.name)) {
            return Ok(None);
        }
        let values = self.read_required(weight)?;
        components.iter().for_each(|component| self.remove(&component.name));
        Ok(Some(values))
    }

    /// Reads a parameter.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if a tensor is missing or is not a finite float tensor
    /// of the expected shape, or an I/O error.
    pub(crate) fn read_required(&mut self, weight: &Weight) -> Result<Vec<f32>, ModelFolderError> {
        self.require(weight)?;
        let values = read_weight(weight, &mut self.files, &self.tensors)?;
        self.refuse_not_finite(weight, &values)?;
        Ok(values)
    }

    /// Checks that there are the tensors of a parameter.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming the tensors.
    pub(crate) fn require(&self, weight: &Weight) -> Result<(), ModelFolderError> {
        let components = weight.composition().components().iter();
        self.refuse(
            components
                .filter_map(|component| self.misfit(&component.name, &component.shape))
                .collect(),
        )
    }

    /// Checks that the names, shapes and types of all tensors match `map`, which is used from then
    /// on. The files may contain copies of tied parameters.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming all tensors that are missing, unknown, or have
    /// the wrong shape or type.
    pub(crate) fn check_shapes(&mut self, map: WeightMap) -> Result<(), ModelFolderError> {
        self.map = map;
        let stored = self.map.stored_tensors().iter();
        let mut expected: Vec<_> =
            stored.map(|it| (it.first_path(), it.name(), it.shape())).collect();
        for (weight, _) in self.map.tied() {
            let copies = weight.composition().components().iter();
            let copies = copies.filter(|component| self.contains(&component.name));
            expected.extend(copies.map(|it| (weight.path(), it.name.as_str(), &it.shape[..])));
        }
        // So that messages list the problems in the order of the paths.
        expected.sort();
        let misfits = expected.iter().filter_map(|(_, name, shape)| self.misfit(name, shape));
        let mut problems: Vec<_> = misfits.collect();
        for (own, location) in &self.tensors {
            if !self.map.has_tensor(own) {
                let found = self.info(location).map(|info| format!("{:?}", info.shape));
                let expected = "no such tensor".to_owned();
                let name = location.name.clone();
                problems.push(TensorProblem { name, expected, found: found.unwrap_or_default() });
            }
        }
        self.refuse(problems)
    }

    /// Reads all tensors of the map, which must be checked tensors, and checks that their values
    /// are finite. The values are not kept in memory. Uses 8 MiB of memory.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that is not finite, or an I/O
    /// error.
    pub(crate) fn check_values(&mut self) -> Result<(), ModelFolderError> {
        let mut problems = Vec::new();
        let Self { map, files, tensors, .. } = self;
        // Rows that the files do not contain are means of checked values.
        for tensor in map.stored_tensors() {
            let (mut count, numel) = (0, tensor.composition().num_elements());
            for part in parts(numel) {
                let mut values = Vec::with_capacity(part.len());
                append_range(files, tensors, tensor.name(), part, &mut values)?;
                count += not_finite(&values);
            }
            problems.extend(not_finite_problem(tensor.name(), count, numel));
        }
        self.refuse(problems)
    }

    /// Loads the weights, which must be checked tensors, into a module. In addition to the module,
    /// one tensor is in memory at a time.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that is not finite, or an I/O
    /// error.
    pub(crate) fn fill<B: Backend, M: Module<B>>(
        &mut self,
        module: M,
    ) -> Result<M, ModelFolderError> {
        let mut filler =
            Filler { weights: self, path: Vec::new(), problems: Vec::new(), error: None };
        let module = module.map(&mut filler);
        let (problems, error) = (filler.problems, filler.error);
        // A read error comes first: nothing was read after it, so the list of problems is
        // incomplete.
        error.map_or(Ok(()), Err)?;
        self.refuse(problems)?;
        Ok(module)
    }

    /// Returns a function that reads a checked tensor when it is first used.
    ///
    /// If a weight cannot be read or is not finite, the function panics with the error message,
    /// because Burn's lazy parameters cannot return errors. Sharded training converts the panic to
    /// an error. The function can be called from several threads; reads are serialized by a lock.
    pub(crate) fn into_reader(self) -> Arc<ReadWeights> {
        let weights = Mutex::new(self);
        Arc::new(move |path: &str| {
            // The lock is poisoned if an earlier read panicked. The data is still consistent,
            // because each read starts with a seek.
            let mut weights = weights.lock().unwrap_or_else(PoisonError::into_inner);
            weights.read_finite(path).unwrap_or_else(|error| panic!("{error}"))
        })
    }

    /// Counts the elements in which two checked tensors of equal size differ. The tensors are given
    /// by name.
    ///
    /// NaN is never equal to another value. Uses 8 MiB of memory.
    ///
    /// # Errors
    /// Returns an I/O error if a file cannot be read.
    pub(crate) fn count_differences(
        &mut self,
        [left, right]: [&str; 2],
        numel: usize,
    ) -> Result<usize, ModelFolderError> {
        let mut count = 0;
        for part in parts(numel) {
            let mut read = |name: &str| {
                let mut values = Vec::with_capacity(part.len());
                append_range(&mut self.files, &self.tensors, name, part.clone(), &mut values)?;
                Ok::<_, ModelFolderError>(values)
            };
            let (a, b) = (read(left)?, read(right)?);
            count += a.iter().zip(&b).filter(|(a, b)| a != b).count();
        }
        Ok(count)
    }

    /// Returns the elements of a tensor in `range`.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if the tensor is missing or is not a float tensor of
    /// the expected shape, or an I/O error.
    pub(crate) fn elements(
        &mut self,
        tensor: &StoredTensor,
        range: Range<usize>,
    ) -> Result<Vec<f32>, ModelFolderError> {
        self.refuse(self.misfit(tensor.name(), tensor.shape()).into_iter().collect())?;
        let mut values = Vec::new();
        append_range(&mut self.files, &self.tensors, tensor.name(), range, &mut values)?;
        Ok(values)
    }

    /// Returns an error if `problems` is not empty.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] with all problems.
    pub(crate) fn refuse(&self, problems: Vec<TensorProblem>) -> Result<(), ModelFolderError> {
        if problems.is_empty() {
            return Ok(());
        }
        Err(ModelFolderError::Tensors { folder: self.folder.clone(), problems })
    }

    /// Returns a problem if a tensor is missing or has the wrong shape or type.
    fn misfit(&self, name: &str, shape: &[usize]) -> Option<TensorProblem> {
        let found = match self.tensors.get(name).and_then(|location| self.info(location)) {
            None => "nothing".to_owned(),
            Some(info) if info.shape == shape && float_type(info.dtype).is_some() => return None,
            Some(info) => format!("{:?} of {}", info.shape, info.dtype),
        };
        let expected = format!("{shape:?} of F32, F16 or BF16");
        Some(TensorProblem { name: name.to_owned(), expected, found })
    }

    /// Returns the type, shape and offsets of a tensor.
    fn info(&self, location: &TensorLocation) -> Option<&TensorInfo> {
        self.files[location.file].info(&location.name)
    }

    /// Reads the parameter at a module path, and appends its new rows.
    ///
    /// # Errors
    /// Returns an I/O error if a file cannot be read.
    ///
    /// # Panics
    /// Panics if the map has no such parameter, or if the shapes were not checked.
    fn read(&mut self, path: &str) -> Result<Vec<f32>, ModelFolderError> {
        read_weight(known(&self.map, path), &mut self.files, &self.tensors)
    }

    /// Reads the parameter at a module path and checks that its values are finite.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if a value is infinite or NaN, or an I/O error.
    fn read_finite(&mut self, path: &str) -> Result<Vec<f32>, ModelFolderError> {
        let values = self.read(path)?;
        self.refuse_not_finite(known(&self.map, path), &values)?;
        Ok(values)
    }

    /// Returns an error if values of a parameter are not finite.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] with the number of these values.
    fn refuse_not_finite(&self, weight: &Weight, values: &[f32]) -> Result<(), ModelFolderError> {
        let problem = not_finite_problem(&weight.stored_name(), not_finite(values), values.len());
        self.refuse(problem.into_iter().collect())
    }
}

/// Returns the parameter at a module path.
///
/// # Panics
/// Panics if the map has no such parameter.
fn known<'a>(map: &'a WeightMap, path: &str) -> &'a Weight {
    map.get(path).unwrap_or_else(|| panic!("the weight map has no parameter {path}"))
}

/// Reads a parameter of checked tensors, and appends its new rows.
///
/// # Errors
/// Returns an I/O error if a file cannot be read.
fn read_weight(
    weight: &Weight,
    files: &mut [TensorFile],
    tensors: &BTreeMap<String, TensorLocation>,
) -> Result<Vec<f32>, ModelFolderError> {
    let stored = weight.composition();
    // The memory for the new rows is reserved first, so that the values are not copied.
    let mut values = Vec::with_capacity(weight.num_elements());
    stored.append(0..stored.num_elements(), &mut values, |name, range, values| {
        append_range(files, tensors, name, range, values)
    })?;
    let width = stored.shape().iter().skip(1).product();
    append_mean_rows(&mut values, width, weight.new_rows());
    Ok(values)
}

/// Appends a range of elements of a checked tensor to `values`.
///
/// # Errors
/// Returns an I/O error if a file cannot be read.
fn append_range(
    files: &mut [TensorFile],
    tensors: &BTreeMap<String, TensorLocation>,
    name: &str,
    range: Range<usize>,
    values: &mut Vec<f32>,
) -> Result<(), ModelFolderError> {
    let TensorLocation { file, name } = &tensors[name];
    files[*file].append_range(name, range, values)
}

/// Returns a problem if `count`, the number of values that are not finite, is greater than 0.
fn not_finite_problem(name: &str, count: usize, numel: usize) -> Option<TensorProblem> {
    (count > 0).then(|| TensorProblem {
        name: name.to_owned(),
        expected: "finite values".to_owned(),
        found: format!("{count} of {numel} that are infinite or NaN"),
    })
}

/// The number of elements that checks read at a time.
///
/// Two parts, as f32, use 8 MiB of memory.
const PART: usize = 1 << 20;

/// Splits a tensor of `numel` elements into ranges of at most `PART` elements.
fn parts(numel: usize) -> impl Iterator<Item = Range<usize>> {
    (0..numel).step_by(PART).map(move |start| start..numel.min(start + PART))
}

/// Returns the number of values that are infinite or NaN.
fn not_finite(values: &[f32]) -> usize {
    values.iter().filter(|value| !value.is_finite()).count()
}

/// Refuses a folder that has a LoRA adapter in place of a model.
///
/// # Errors
/// Returns [`ModelFolderError::NoWeights`] with the remedy.
pub(crate) fn refuse_adapter(folder: &Path) -> Result<(), ModelFolderError> {
    match folder.join(ADAPTER_CONFIG).exists() && !folder.join(CONFIG).exists() {
        true => {
            Err(ModelFolderError::NoWeights { folder: folder.to_owned(), hint: adapter_hint() })
        }
        false => Ok(()),
    }
}

/// Returns the hint about a folder with a LoRA adapter.
fn adapter_hint() -> String {
    format!("; it has a LoRA adapter: {MERGE}")
}

/// Opens `model.safetensors`, or the shards that the index lists.
///
/// # Errors
/// Returns [`ModelFolderError::NoWeights`] if there are none, or the error of opening a file.
fn open_files(folder: &Path) -> Result<Vec<TensorFile>, ModelFolderError> {
    let (single, index) = (folder.join(WEIGHTS), folder.join(INDEX));
    // A single file takes precedence over an index beside it, as in `transformers`.
    if single.exists() {
        return Ok(vec![TensorFile::open(&single)?]);
    }
    if !index.exists() {
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        let hint = if pickled.iter().any(|name| folder.join(name).exists()) {
            "; it has PyTorch's pickled weights: save them again with transformers' \
             save_pretrained, which writes safetensors"
                .to_owned()
        } else if folder.join(ADAPTER_CONFIG).exists() {
            adapter_hint()
        } else {
            String::new()
        };
        return Err(ModelFolderError::NoWeights { folder: folder.to_owned(), hint });
    }
    open_shards(folder, &index)
}

/// Opens the shards of an index. Each listed tensor must be in its shard. Shards must be in the
/// folder of the index, because an untrusted index must not be able to open other files.
///
/// # Errors
/// Returns [`ModelFolderError::Format`] if the index is not JSON, names a file outside the folder,
/// or lists a tensor that is missing from its shard. Otherwise returns the error of opening a file.
fn open_shards(folder: &Path, index: &Path) -> Result<Vec<TensorFile>, ModelFolderError> {
    let format = |reason| ModelFolderError::Format { path: index.to_owned(), reason };
    let text = read_small_file(index).map_err(|e| ModelFolderError::io("read", index, e))?;
    let Index { weight_map } =
        serde_json::from_str(&text).map_err(|error| format(error.to_string()))?;
    let mut shards: BTreeMap<&str, TensorFile> = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        // Without this check, an index could open any file on the machine.
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

/// Loads weights into a module by module path.
struct Filler<'a> {
    /// The weights to load.
    weights: &'a mut Weights,
    /// The names of the modules on the path to the visited parameter.
    path: Vec<String>,
    /// Tensors whose values are not finite.
    problems: Vec<TensorProblem>,
    /// The first read error. Nothing is read after it.
    error: Option<ModelFolderError>,
}

impl Filler<'_> {
    /// Returns the values of the current parameter. If they are invalid, records the problem and
    /// returns `None`.
    fn values(&mut self) -> Option<Vec<f32>> {
        if self.error.is_some() {
            return None;
        }
        let path = self.path.join(".");
        let values = match self.weights.read(&path) {
            Ok(values) => values,
            Err(error) => {
                self.error = Some(error);
                return None;
            }
        };
        let name = self.weights.map.stored_name(&path);
        if let Some(problem) = not_finite_problem(&name, not_finite(&values), values.len()) {
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
        // Burn maps a loaded tensor to the layout of the parameter, for example a column-major one.
        let id = param.id;
        param.transform_for_load(tensor, id)
    }
}
