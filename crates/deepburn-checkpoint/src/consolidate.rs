//! Exports the weights of a checkpoint for other programs.
//!
//! Main function: [`consolidate`]. It reads one tensor at a time, so memory
//! holds one tensor and a buffer. The output is in Hugging Face's
//! safetensors layout: either one `model.safetensors`, or shards of a given
//! size with `model.safetensors.index.json`. A [`WeightMap`] defines the names
//! and the layout of the tensors. Buffers keep their element type, because
//! rounding running statistics to 16 bits would change the model's outputs.
//! Tied weights are written once, and their other names are recorded in the
//! metadata. Existing weights are never overwritten.
//!
//! ```text
//! OUT/.unfinished-XXXXXX/               files until all of them are complete
//! OUT/model.safetensors                 everything fits into one file, or
//! OUT/model-00001-of-00002.safetensors
//! OUT/model-00002-of-00002.safetensors
//! OUT/model.safetensors.index.json      {"metadata": {"total_size": BYTES},
//!                                        "weight_map": {NAME: FILE, …}}
//! ```
//!
//! A file is an 8-byte little-endian header length, a JSON header, and the
//! values. Its `__metadata__` has `"format": "pt"`, which `transformers`
//! requires, and for each tied weight an entry from its other name to the name
//! of the tensor.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepburn_safetensors::{FloatType, Header, TensorFileWriter};
use deepburn_weights::{Component, Composition, Origin, Weight, WeightMap};
use serde_json::{Map, json};

use crate::{Checkpoint, CheckpointError, ElementType, EntryKind, ParamEntry, StateKind, disk};

/// The name of the index of shards, as `transformers` looks for it.
const INDEX: &str = "model.safetensors.index.json";
/// The number of elements that are cast and written at a time.
const CHUNK: usize = 256 << 10;

/// Options of [`consolidate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Consolidation {
    /// The type of the weights: F32, F16 or BF16. Values are rounded to the
    /// nearest, ties to even. Values that are not finite are written as they are.
    pub element: ElementType,
    /// The largest number of tensor bytes in a file. A larger tensor gets its
    /// own file.
    pub max_shard_bytes: u64,
}

/// The result of [`consolidate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consolidated {
    /// The files, the index last.
    pub files: Vec<PathBuf>,
    /// The tensors with values that are infinite or NaN.
    pub not_finite: Vec<NotFinite>,
}

/// A tensor with values that are not finite, which were written as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotFinite {
    /// The path of the parameter, or the name of a tensor that stores several
    /// parameters.
    pub path: String,
    /// The number of these values.
    pub count: usize,
    /// The number of all values.
    pub total: usize,
}

/// A tensor to be written, planned before any value is read.
struct Planned {
    /// The exported name, unique in the export.
    name: String,
    /// The parameters that form it, or a buffer. The names of the components are
    /// module paths.
    composition: Composition,
    /// The exported type: the requested one, or a buffer's own.
    element: ElementType,
    /// Whether it is a buffer, which is written unchanged.
    is_buffer: bool,
    /// The size of the values in bytes.
    bytes: u64,
}

impl Planned {
    /// Returns the path of the parameter that the tensor stores, or its name if
    /// it stores several parameters.
    fn path(&self) -> &str {
        match self.composition.components() {
            [component] => &component.name,
            _ => &self.name,
        }
    }
}

/// Writes the weights of a checkpoint to the folder `out`, as the tensors of
/// `map`. Buffers that are not in the map are stored under their paths.
///
/// The folder is created if it does not exist. The complete checkpoint is
/// verified first. `out` gets all files or, after an error, none.
///
/// # Errors
///
/// Returns the errors of [`Checkpoint::verify`]; [`CheckpointError::NotInside`]
/// for a parameter without weights; [`CheckpointError::Layout`] if checkpoint
/// and map differ in a parameter, or if two tensors would have the same name;
/// [`CheckpointError::Overflow`]; [`CheckpointError::Io`] if `out` already
/// contains weights; [`CheckpointError::DiskFull`] or another I/O error.
pub fn consolidate(
    checkpoint: &Checkpoint,
    out: &Path,
    what: &Consolidation,
    map: &WeightMap,
) -> Result<Consolidated, CheckpointError> {
    // Verified first, so that the manifest's sizes can be trusted.
    checkpoint.verify()?;
    let tensors = plan(checkpoint, what.element, map)?;
    let shards = pack(&tensors, what.max_shard_bytes);
    fs::create_dir_all(out).map_err(CheckpointError::io("create", out))?;
    refuse_weights(out)?;
    let total: u64 = tensors.iter().map(|tensor| tensor.bytes).sum();
    disk::check_free(out, total)?;

    // The temporary folder is inside `out`, so that files can be renamed to
    // their final names. Dropping it removes all remaining files.
    let unfinished = tempfile::Builder::new()
        .prefix(".unfinished-")
        .tempdir_in(out)
        .map_err(CheckpointError::io("create a folder in", out))?;
    let aliases = aliases(checkpoint, &tensors, map)?;
    let (mut names, mut not_finite) = (vec![], vec![]);
    for (index, shard) in shards.iter().enumerate() {
        let name = shard_name(index, shards.len());
        let path = unfinished.path().join(&name);
        let file = ShardFile { path, tensors: shard, aliases: &aliases };
        not_finite.extend(write_shard(&file, checkpoint)?);
        names.push(name);
    }
    if shards.len() > 1 {
        let index = index(&shards, &names, total);
        disk::write_new(&unfinished.path().join(INDEX), index.as_bytes())?;
        names.push(INDEX.to_owned());
    }
    let moved: Result<Vec<_>, _> = names
        .iter()
        .map(|name| {
            let path = out.join(name);
            fs::rename(unfinished.path().join(name), &path).map(|()| path)
        })
        .collect();
    if moved.is_err() {
        // Some files were already moved. All of them are from this export,
        // because there were no weights before.
        names.iter().for_each(|name| _ = fs::remove_file(out.join(name)));
    }
    let files = moved.map_err(CheckpointError::io("move files into", out))?;
    disk::sync_folder(out)?;
    Ok(Consolidated { files, not_finite })
}

/// Plans the tensors to write, without reading any. Wide element types come
/// first.
///
/// # Errors
///
/// Returns [`CheckpointError::NotInside`] for a parameter without weights, and
/// [`CheckpointError::Layout`] for an export type that weights do not have, a
/// name that occurs twice, or a parameter that the map does not have or that
/// has another shape there.
fn plan(
    checkpoint: &Checkpoint,
    element: ElementType,
    map: &WeightMap,
) -> Result<Vec<Planned>, CheckpointError> {
    let refuse = |reason| Err(CheckpointError::Layout { reason });
    if !element.is_trainable() {
        return refuse(format!("weights are not written as {element}, but as F32, F16 or BF16"));
    }
    let stored: HashMap<_, _> = map.stored_tensors().iter().map(|it| (it.name(), it)).collect();
    let mut names = HashSet::new();
    let mut tensors = vec![];
    for entry in checkpoint.layout().entries() {
        let Some(own) = entry.element_of(&StateKind::Weights) else {
            let reason = format!("it has no weights of parameter {}", entry.path);
            return Err(CheckpointError::NotInside { path: checkpoint.path().into(), reason });
        };
        let is_buffer = entry.kind == EntryKind::Buffer;
        let Some(weight) = weight_of(entry, map)? else {
            let composition = whole(&entry.path, &entry.shape)?;
            tensors.push(planned(entry.path.clone(), composition, own, is_buffer));
            continue;
        };
        let element = if is_buffer { own } else { element };
        for component in weight.composition().components() {
            let Some(tensor) =
                stored.get(&*component.name).filter(|_| names.insert(&*component.name))
            else {
                continue;
            };
            let composition = tensor.composition().clone();
            tensors.push(planned(component.name.clone(), composition, element, is_buffer));
        }
    }
    let layout = checkpoint.layout();
    let has = |path: &str| layout.entry(path).is_some_and(|entry| entry.path == path);
    if let Some(weight) = map.parameters().find(|it| !has(it.path())) {
        let (path, folder) = (weight.path(), checkpoint.path().display());
        return refuse(format!("{folder} has no parameter {path} of the weight map"));
    }
    if let Some(twice) = duplicate(&tensors) {
        return refuse(format!("two parameters are called {twice}"));
    }
    // Wide types come first, so that each tensor is aligned to its element
    // size, as readers require.
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.element.size()));
    Ok(tensors)
}

/// Returns the parameter of the map that describes an entry; `None` for a buffer
/// that is not in the map.
///
/// # Errors
///
/// Returns [`CheckpointError::Layout`] if the map does not fit the entry.
fn weight_of<'m>(
    entry: &ParamEntry,
    map: &'m WeightMap,
) -> Result<Option<&'m Weight>, CheckpointError> {
    let path = &entry.path;
    let reason = match (map.get(path), entry.kind) {
        (None, EntryKind::Buffer) => return Ok(None),
        (None, EntryKind::Parameter) => format!("the weight map has no parameter {path}"),
        (Some(weight), kind) => match weight.origin() {
            Origin::Tied { to } => {
                format!("{path} has values of its own and cannot be tied to {to}")
            }
            _ if weight.shape() != entry.shape => {
                format!("{path} of shape {:?} cannot be {:?}", entry.shape, weight.shape())
            }
            _ if kind == EntryKind::Buffer && weight.composition().same_as().is_none() => {
                format!("{path} is a buffer, whose layout cannot change")
            }
            _ => return Ok(Some(weight)),
        },
    };
    Err(CheckpointError::Layout { reason })
}

/// Returns the plan of a tensor.
fn planned(
    name: String,
    composition: Composition,
    element: ElementType,
    is_buffer: bool,
) -> Planned {
    let bytes = composition.num_elements() as u64 * element.size() as u64;
    Planned { name, composition, element, is_buffer, bytes }
}

/// Returns the composition of a tensor that equals the parameter at `path`.
///
/// # Errors
///
/// Returns [`CheckpointError::Layout`] if the shape overflows.
fn whole(path: &str, shape: &[usize]) -> Result<Composition, CheckpointError> {
    Composition::join(0, vec![Component::whole(path, shape)]).map_err(CheckpointError::map)
}

/// Returns a name that two tensors have.
fn duplicate(tensors: &[Planned]) -> Option<&str> {
    let mut names = HashSet::new();
    tensors.iter().map(|tensor| &*tensor.name).find(|name| !names.insert(*name))
}

/// Maps the other names of tied weights to the name under which they are
/// written. An alias that is exported under the same name needs no entry.
///
/// # Errors
///
/// Returns [`CheckpointError::Layout`] if an alias would hide another tensor,
/// another alias, or the metadata's own key `format`.
fn aliases(
    checkpoint: &Checkpoint,
    tensors: &[Planned],
    map: &WeightMap,
) -> Result<BTreeMap<String, String>, CheckpointError> {
    let names: HashSet<_> = tensors.iter().map(|tensor| &tensor.name).collect();
    let mut aliases = BTreeMap::new();
    for entry in checkpoint.layout().entries() {
        let name = map.stored_name(&entry.path);
        for path in &entry.aliases {
            let alias = map.stored_name(path);
            if alias == *name {
                continue;
            }
            if names.contains(&alias) || aliases.contains_key(&alias) || alias == "format" {
                let reason = format!("{path}, tied to {}, cannot be called {alias}", entry.path);
                return Err(CheckpointError::Layout { reason });
            }
            aliases.insert(alias, name.clone());
        }
    }
    Ok(aliases)
}

/// Divides the tensors into files of at most `limit` bytes of values, in order.
/// A tensor above the limit gets its own file. At least one file is returned,
/// which is empty for a model without tensors.
fn pack(tensors: &[Planned], limit: u64) -> Vec<&[Planned]> {
    let (mut shards, mut start, mut bytes) = (vec![], 0, 0_u64);
    for (index, tensor) in tensors.iter().enumerate() {
        if bytes + tensor.bytes > limit && index > start {
            shards.push(&tensors[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += tensor.bytes;
    }
    shards.push(&tensors[start..]);
    shards
}

/// Returns the name of the file with this index, from 0, out of `count`.
fn shard_name(index: usize, count: usize) -> String {
    match count {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

/// Returns an error if the folder already has weights.
///
/// Shards of an earlier export with another number of files would otherwise
/// stay next to the new ones, and a reader could mix both.
fn refuse_weights(out: &Path) -> Result<(), CheckpointError> {
    let is_weights = |name: &String| {
        name == INDEX || name.starts_with("model") && name.ends_with(".safetensors")
    };
    let Some(name) = disk::names(out)?.into_iter().find(is_weights) else { return Ok(()) };
    let source = std::io::ErrorKind::AlreadyExists.into();
    Err(CheckpointError::Io { action: "replace weights", path: out.join(name), source })
}

/// A file to be written: its path, its tensors, and the aliases of the whole
/// export.
struct ShardFile<'a> {
    path: PathBuf,
    tensors: &'a [Planned],
    aliases: &'a BTreeMap<String, String>,
}

/// Writes one file, tensor by tensor. Memory holds one tensor, converted to
/// f32, and a buffer of encoded values. Returns the tensors with values that
/// are not finite.
///
/// # Errors
///
/// Returns the errors of [`Checkpoint::read`], [`CheckpointError::Overflow`]
/// for a finite value that would become infinite, or a write error.
fn write_shard(
    shard: &ShardFile<'_>,
    checkpoint: &Checkpoint,
) -> Result<Vec<NotFinite>, CheckpointError> {
    let header = header(shard);
    let failed = |error| disk::write_error(&shard.path, header.file_len())(error);
    let partial = shard.path.with_extension("partial");
    let mut writer = TensorFileWriter::create(&shard.path, partial, &header).map_err(failed)?;
    let (mut bytes, mut not_finite) = (Vec::new(), vec![]);
    for tensor in shard.tensors {
        let total = tensor.composition.num_elements();
        let float = match FloatType::try_from(tensor.element) {
            Ok(float) if !tensor.is_buffer => float,
            // A buffer keeps its type. The plan has no parameters of other types.
            _ => {
                let values = checkpoint.read(tensor.path(), &StateKind::Weights, 0..total)?;
                writer.write(values.bytes()).map_err(failed)?;
                continue;
            }
        };
        let values = tensor.composition.read(0..total, |path, range, values| {
            append_weights(checkpoint, path, range, values)
        })?;
        let path = tensor.path().to_owned();
        if let Some(found) = float.overflow(&values) {
            return Err(CheckpointError::Overflow { path, found, float });
        }
        let count = values.iter().filter(|value| !value.is_finite()).count();
        if count > 0 {
            not_finite.push(NotFinite { path, count, total });
        }
        for chunk in values.chunks(CHUNK) {
            bytes.clear();
            float.encode(chunk, &mut bytes);
            writer.write(&bytes).map_err(failed)?;
        }
    }
    writer.finish().map_err(failed)?;
    Ok(not_finite)
}

/// Appends a range of a parameter's weights to `values`, converted to f32.
///
/// # Errors
///
/// Returns the errors of [`Checkpoint::read`].
fn append_weights(
    checkpoint: &Checkpoint,
    path: &str,
    range: Range<usize>,
    values: &mut Vec<f32>,
) -> Result<(), CheckpointError> {
    let kind = StateKind::Weights;
    let element = checkpoint.layout().entry(path).and_then(|entry| entry.element_of(&kind));
    if element != Some(ElementType::F32) {
        values.extend(checkpoint.read(path, &kind, range)?.into_f32());
        return Ok(());
    }
    // Values of this type are read in place, so that they are in memory once.
    let start = values.len();
    values.resize(start + range.len(), 0.0);
    checkpoint.read_into(path, &kind, range.start, &mut values[start..])
}

/// Returns the safetensors header of a file. Aliases are recorded in the
/// metadata of the file that contains their tensor.
fn header(shard: &ShardFile<'_>) -> Header {
    // `transformers` requires the key `format`. Tied weights are recorded like in
    // `safetensors.torch.save_model`, from alias to name.
    let mut metadata = Map::from_iter([("format".to_owned(), json!("pt"))]);
    for (alias, name) in shard.aliases {
        if shard.tensors.iter().any(|tensor| tensor.name == *name) {
            metadata.insert(alias.clone(), json!(name));
        }
    }
    let mut header = Header::new(metadata);
    for Planned { name, composition, element, .. } in shard.tensors {
        header.push(name, *element, composition.shape());
    }
    header
}

/// Returns the text of the index: the total size of all tensors in bytes, and
/// the file that contains each tensor.
fn index(shards: &[&[Planned]], names: &[String], total: u64) -> String {
    let files: BTreeMap<_, _> = shards
        .iter()
        .zip(names)
        .flat_map(|(tensors, file)| tensors.iter().map(move |tensor| (&tensor.name, file)))
        .collect();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": files });
    format!("{index:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{TempRoot, buffer, parameter, run, save, save_layout, values};
    use crate::{Layout, RankWriter, Save, StoredState, Tag};
    use half::bf16;
    use safetensors::SafeTensors;
    use serde_json::Value;
    use std::sync::Arc;

    fn elements<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// Exports a checkpoint under the module paths.
    fn as_trained(
        checkpoint: &Checkpoint,
        out: &Path,
        what: &Consolidation,
    ) -> Result<Vec<PathBuf>, CheckpointError> {
        Ok(consolidate(checkpoint, out, what, &checkpoint.weight_map()?)?.files)
    }

    const ALL: Consolidation =
        Consolidation { element: ElementType::F32, max_shard_bytes: u64::MAX };

    fn opened(world_size: usize) -> (TempRoot, Checkpoint, PathBuf) {
        let root = TempRoot::new();
        save(&root, 1, world_size);
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        let out = root.join("out");
        (root, checkpoint, out)
    }

    fn weights(path: &str, numel: usize) -> Vec<f32> {
        values(path, &StateKind::Weights, 1, 0..numel)
    }

    #[test]
    fn one_file_has_every_weight_once() {
        let (_root, checkpoint, out) = opened(3);
        let files = as_trained(&checkpoint, &out, &ALL).unwrap();
        assert_eq!(files, [out.join("model.safetensors")]);
        let bytes = fs::read(&files[0]).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap();
        assert_eq!((&*metadata["format"], &*metadata["head"]), ("pt", "a"));
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(tensors.len(), 3);
        assert_eq!(tensors.tensor("a").unwrap().shape(), [3, 4]);
        for (path, numel) in [("a", 12), ("b", 3), ("frozen", 1)] {
            let found: Vec<f32> = elements(tensors.tensor(path).unwrap().data());
            assert_eq!(found, weights(path, numel));
        }
        assert_eq!(disk::names(&out).unwrap(), ["model.safetensors"]);
    }

    #[test]
    fn shards_and_index_contain_every_weight() {
        let (_root, checkpoint, out) = opened(2);
        let what = Consolidation { element: ElementType::Bf16, max_shard_bytes: 8 };
        let files = as_trained(&checkpoint, &out, &what).unwrap();
        let names: Vec<_> =
            files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        let [first, second] = [1, 2].map(|n| format!("model-0000{n}-of-00002.safetensors"));
        assert_eq!(names, [&first, &second, INDEX]);
        let index: Value = serde_json::from_slice(&fs::read(&files[2]).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], 32);
        assert_eq!(index["weight_map"], json!({ "a": first, "b": second, "frozen": second }));
        for (name, file) in index["weight_map"].as_object().unwrap() {
            let bytes = fs::read(out.join(file.as_str().unwrap())).unwrap();
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            let tensor = tensors.tensor(name).unwrap();
            let found: Vec<bf16> = elements(tensor.data());
            let expected: Vec<_> =
                weights(name, found.len()).into_iter().map(bf16::from_f32).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn buffers_keep_their_types() {
        let root = TempRoot::new();
        let entries = vec![
            parameter("w", &[2, 3]),
            buffer("mask", &[5], ElementType::Bool),
            buffer("mean", &[3], ElementType::F32),
            buffer("order", &[2, 2], ElementType::I64),
        ];
        let layout = Arc::new(Layout::new(entries, 2).unwrap());
        save_layout(&root, 1, &layout, run(1));
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        let what = Consolidation { element: ElementType::Bf16, ..ALL };
        let files = consolidate(&checkpoint, &root.join("out"), &what, &renamed(&checkpoint, "w"));
        let files = files.unwrap().files;
        let bytes = fs::read(&files[0]).unwrap();
        let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        // Each tensor starts at a multiple of its element size, and only the parameter is
        // transposed.
        for (name, dtype, shape, size) in [
            ("model.order", "I64", vec![2, 2], 8),
            ("model.mean", "F32", vec![3], 4),
            ("model.w", "BF16", vec![3, 2], 2),
            ("model.mask", "BOOL", vec![5], 1),
        ] {
            let tensor = tensors.tensor(name).unwrap();
            assert_eq!((tensor.dtype().to_string(), tensor.shape()), (dtype.into(), &shape[..]));
            let start = 8 + header + metadata.info(name).unwrap().data_offsets.0;
            assert_eq!(start % size, 0, "{name}");
        }
        let found: Vec<i64> = elements(tensors.tensor("model.order").unwrap().data());
        let expected = weights("order", 4).into_iter().map(|value| value as i64);
        assert_eq!(found, expected.collect::<Vec<_>>());
        let text = checkpoint.describe();
        assert!(text.contains("elements    6 in 1 parameters, 6 trainable"), "{text}");
        assert!(text.contains("buffers     12 elements in 3"), "{text}");
        assert!(text.contains("weights BOOL, buffer"), "{text}");
        let what = Consolidation { element: ElementType::I64, ..ALL };
        let error = as_trained(&checkpoint, &root.join("other"), &what).unwrap_err();
        assert!(error.to_string().contains("weights are not written as I64"), "{error}");
    }

    /// Renames tensors and transposes matrices, as the maps of real models do.
    fn renamed(checkpoint: &Checkpoint, matrix: &str) -> WeightMap {
        let map = checkpoint.weight_map().unwrap();
        let map = map.renamed(|path| format!("model.{path}")).unwrap();
        map.transposed(|path| path == matrix).unwrap()
    }

    #[test]
    fn exports_rename_and_transpose_parameters() {
        let (_root, checkpoint, out) = opened(2);
        let files = consolidate(&checkpoint, &out, &ALL, &renamed(&checkpoint, "a"));
        let files = files.unwrap().files;
        let bytes = fs::read(&files[0]).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let turned = tensors.tensor("model.a").unwrap();
        assert_eq!(turned.shape(), [4, 3]);
        let found: Vec<f32> = elements(turned.data());
        assert_eq!(found[..3], [0, 4, 8].map(|i| weights("a", 12)[i]));
    }

    #[test]
    fn existing_weights_are_not_replaced() {
        let (_root, checkpoint, out) = opened(1);
        for name in ["model.safetensors", "model-00001-of-00009.safetensors", INDEX] {
            fs::create_dir_all(&out).unwrap();
            fs::write(out.join(name), "mine").unwrap();
            let error = as_trained(&checkpoint, &out, &ALL).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("cannot replace weights"), "{error}");
            assert_eq!(disk::names(&out).unwrap(), [name]);
            fs::remove_file(out.join(name)).unwrap();
        }
        fs::write(out.join("config.json"), "{}").unwrap();
        as_trained(&checkpoint, &out, &ALL).unwrap();
        assert_eq!(disk::names(&out).unwrap(), ["config.json", "model.safetensors"]);
    }

    #[test]
    fn a_damaged_checkpoint_is_not_exported() {
        let (root, checkpoint, out) = opened(2);
        fs::write(root.join("step-00000001/rank-00001.safetensors"), "noise").unwrap();
        let error = as_trained(&checkpoint, &out, &ALL).unwrap_err();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        assert!(!out.exists());
    }

    #[test]
    fn several_parameters_form_a_tensor_and_several_tensors_a_parameter() {
        let root = TempRoot::new();
        let entries = ["up", "gate", "qk"].map(|path| parameter(path, &[2, 3]));
        let layout = Arc::new(Layout::new(entries.to_vec(), 2).unwrap());
        save_layout(&root, 1, &layout, run(1));
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        let part = |path: &str, rows: Range<usize>| {
            let component = Component::whole("gate_up", &[6, 2]).sliced(0, rows).transposed();
            Weight::new(path, Composition::join(0, vec![component]).unwrap())
        };
        let [q, k] = [("q", 1), ("k", 2)].map(|(name, out)| Component::whole(name, &[out, 2]));
        let joined = Composition::join(1, vec![q.transposed(), k.transposed()]).unwrap();
        let weights = vec![part("up", 3..6), part("gate", 0..3), Weight::new("qk", joined)];
        let map = WeightMap::new(weights).unwrap();
        let done = consolidate(&checkpoint, &root.join("out"), &ALL, &map).unwrap();
        assert!(done.not_finite.is_empty());
        let bytes = fs::read(&done.files[0]).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let turned = |path: &str| [0, 3, 1, 4, 2, 5].map(|at| weights_of(path)[at]);
        let found = |name: &str| elements::<f32>(tensors.tensor(name).unwrap().data());
        assert_eq!(tensors.tensor("gate_up").unwrap().shape(), [6, 2]);
        assert_eq!(found("gate_up"), [turned("gate"), turned("up")].concat());
        assert_eq!([found("q"), found("k")].concat(), turned("qk"));
        let missing = WeightMap::new(vec![part("up", 0..6)]).unwrap();
        let error = consolidate(&checkpoint, &root.join("other"), &ALL, &missing).unwrap_err();
        assert!(error.to_string().contains("up of shape [2, 3] cannot be [2, 6]"), "{error}");
    }

    fn weights_of(path: &str) -> Vec<f32> {
        weights(path, 6)
    }

    #[test]
    fn exports_that_lose_something_are_refused() {
        let (_root, checkpoint, out) = opened(1);
        let own = || checkpoint.weight_map().unwrap();
        let fewer = own().parameters().skip(1).cloned().collect();
        let map = own();
        let extra = map.weights().iter().cloned();
        let extra = extra.chain([Weight::new("more", Composition::whole("more", &[1]))]);
        let reshaped = map.weights().iter().map(|weight| match weight.path() {
            "a" => Weight::new("a", Composition::whole("a", &[4, 3])),
            _ => weight.clone(),
        });
        let cases = [
            (own().renamed(|path| path.replace("head", "b")), "cannot be called b"),
            (WeightMap::new(fewer), "the weight map has no parameter a"),
            (WeightMap::new(extra.collect()), "has no parameter more of the weight map"),
            (WeightMap::new(reshaped.collect()), "of shape [3, 4] cannot be [4, 3]"),
        ];
        for (map, expected) in cases {
            let error = consolidate(&checkpoint, &out, &ALL, &map.unwrap()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert!(own().renamed(|_| "w".into()).is_err());
        assert!(disk::names(&out).unwrap_or_default().is_empty());
        // A parameter whose moments were saved, but not its weights.
        let root = TempRoot::new();
        let mut entry = parameter("a", &[2]);
        entry.states.remove(0);
        let layout = Arc::new(Layout::new(vec![entry], 1).unwrap());
        save_layout(&root, 1, &layout, run(1));
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        let error = as_trained(&checkpoint, &out, &ALL).unwrap_err().to_string();
        assert!(error.contains("no weights of parameter a"), "{error}");
    }

    /// Saves one parameter with these weights and consolidates it.
    fn rounded(weights: &[f32], element: ElementType) -> Result<Vec<u8>, CheckpointError> {
        let root = TempRoot::new();
        let stored = StoredState { kind: StateKind::Weights, element: ElementType::F32 };
        let entry = ParamEntry { states: vec![stored], ..parameter("w", &[weights.len()]) };
        let layout = Arc::new(Layout::new(vec![entry], 1).unwrap());
        let save = Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
        let mut writer = RankWriter::create(save.ticket(), layout, 0).unwrap();
        writer.write("w", &StateKind::Weights, weights).unwrap();
        let record = writer.finish(Value::Null).unwrap();
        save.commit(vec![record], run(1)).unwrap();
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        let out = root.join("out");
        let files = as_trained(&checkpoint, &out, &Consolidation { element, ..ALL })?;
        let bytes = fs::read(&files[0]).unwrap();
        Ok(SafeTensors::deserialize(&bytes).unwrap().tensor("w").unwrap().data().to_vec())
    }

    #[test]
    fn values_round_to_the_nearest_and_ties_to_even() {
        let ulp = 2_f32.powi(-10);
        let values = [1.0 + 0.5 * ulp, 1.0 + 1.5 * ulp, 1.0 + 0.6 * ulp, f32::INFINITY, 2e-8, -0.0];
        let halves: Vec<u16> = elements(&rounded(&values, ElementType::F16).unwrap());
        assert_eq!(halves, [0x3c00, 0x3c02, 0x3c01, 0x7c00, 0x0000, 0x8000]);
        let ulp = 2_f32.powi(-7);
        let values = [1.0 + 0.5 * ulp, 1.0 + 1.5 * ulp, 1.0 + 0.6 * ulp, f32::MIN_POSITIVE];
        let brain: Vec<u16> = elements(&rounded(&values, ElementType::Bf16).unwrap());
        assert_eq!(brain, [0x3f80, 0x3f82, 0x3f81, 0x0080]);
        let error = rounded(&[1.0, -65520.0], ElementType::F16).unwrap_err();
        assert!(matches!(error, CheckpointError::Overflow { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains("parameter w has a value of magnitude 6.552e4"), "{error}");
        assert!(error.contains("float16 is 6.5504e4: export bf16 or f32"), "{error}");
        let error = rounded(&[1.0, f32::MAX], ElementType::Bf16).unwrap_err().to_string();
        assert!(error.contains("bfloat16 is 3.3895314e38: export f32"), "{error}");
    }

    #[test]
    fn tensors_are_packed_in_order() {
        let sizes = |limit, bytes: &[u64]| -> Vec<usize> {
            let planned = |&bytes| Planned {
                name: String::new(),
                composition: Composition::whole("w", &[]),
                element: ElementType::F32,
                is_buffer: false,
                bytes,
            };
            let tensors: Vec<_> = bytes.iter().map(planned).collect();
            pack(&tensors, limit).iter().map(|shard| shard.len()).collect()
        };
        assert_eq!(sizes(10, &[4, 6, 1, 20, 3]), [2, 1, 1, 1]);
        assert_eq!(sizes(10, &[20]), [1]);
        assert_eq!(sizes(0, &[1, 1]), [1, 1]);
        assert_eq!(sizes(10, &[]), [0]);
    }
}
