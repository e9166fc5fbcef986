//! Exports the weights of a checkpoint for other programs.
//!
//! Main function: [`consolidate`]. It reads one tensor at a time, so memory holds one tensor and a
//! buffer. The output is in Hugging Face's safetensors layout: either one `model.safetensors`, or
//! shards of a given size with `model.safetensors.index.json`. A [`WeightMap`] defines the names
//! and the layout of the tensors. Buffers keep their element type, because rounding running
//! statistics to 16 bits would change the model's outputs. Tied weights are written once, and their
//! other names are recorded in the metadata. Existing weights are never overwritten.
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
//! A file is an 8-byte little-endian header length, a JSON header, and the values. Its
//! `__metadata__` has `"format": "pt"`, which `transformers` requires, and for each tied weight an
//! entry from its other name to the name of the tensor.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepburn_files::safetensors::{FloatType, Header, TensorFileWriter};
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
    /// The type of the weights: F32, F16 or BF16. Values are rounded to the nearest, ties to even.
    /// Values that are not finite are written as they are.
    pub element: ElementType,
    /// The largest number of tensor bytes in a file. A larger tensor gets its own file.
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
    /// The path of the parameter, or the name of a tensor that stores several parameters.
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
    /// The parameters that form it, or a buffer. The names of the components are module paths.
    composition: Composition,
    /// The exported type: the requested one, or a buffer's own.
    element: ElementType,
    /// Whether it is a buffer, which is written unchanged.
    is_buffer: bool,
    /// The size of the values in bytes.
    bytes: u64,
}

impl Planned {
    /// Returns the path of the parameter that the tensor stores, or its name if it stores several
    /// parameters.
    fn path(&self) -> &str {
        match self.composition.components() {
            [component] => &component.name,
            _ => &self.name,
        }
    }
}

/// Writes the weights of a checkpoint to the folder `out`, as the tensors of `map`. Buffers that
/// are not in the map are stored under their paths.
///
/// Parameters that the checkpoint omits are read from its base model ([`Checkpoint::set_base`]).
///
/// The folder is created if it does not exist. The complete checkpoint is verified first. `out`
/// gets all files or, after an error, none.
///
/// # Errors
/// Returns the errors of [`Checkpoint::verify`]; [`CheckpointError::NotInside`] for a parameter
/// without weights; [`CheckpointError::OtherBase`] if omitted parameters cannot be read;
/// [`CheckpointError::Layout`] if checkpoint and map differ in a parameter, or if two tensors would
/// have the same name; [`CheckpointError::Overflow`]; [`CheckpointError::Io`] if `out` already
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
    // The headers are small, so the values alone are counted.
    disk::check_free(out, total)?;

    // The temporary folder is inside `out`, so that files can be renamed to their final names.
    // Dropping it removes all remaining files.
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
        // Some files were already moved. All of them are from this export, because there were no
        // weights before.
        names.iter().for_each(|name| _ = fs::remove_file(out.join(name)));
    }
    let files = moved.map_err(CheckpointError::io("move files into", out))?;
    disk::sync_folder(out)?;
    Ok(Consolidated { files, not_finite })
}

/// Plans the tensors to write, without reading any. Wide element types come first.
///
/// # Errors
/// Returns [`CheckpointError::NotInside`] for a parameter without weights,
/// [`CheckpointError::OtherBase`] for an omitted parameter without a base model, and
/// [`CheckpointError::Layout`] for an export type that weights do not have, a name that occurs
/// twice, or a parameter that the map does not have or that has another shape there.
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
        if entry.base.is_some() {
            checkpoint.base_of(entry).map(drop)?;
        }
        let Some(own) = entry.weights_element() else {
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
                // A tensor that joins several parameters is planned with the first of them.
                stored.get(&*component.name).filter(|_| names.insert(&*component.name))
            else {
                continue;
            };
            let composition = tensor.composition().clone();
            tensors.push(planned(component.name.clone(), composition, element, is_buffer));
        }
    }
    let layout = checkpoint.layout();
    // An alias is not enough: it has no values, which the map expects at this path.
    let has = |path: &str| layout.entry(path).is_some_and(|entry| entry.path == path);
    if let Some(weight) = map.parameters().find(|it| !has(it.path())) {
        let (path, folder) = (weight.path(), checkpoint.path().display());
        return refuse(format!("{folder} has no parameter {path} of the weight map"));
    }
    if let Some(twice) = duplicate(&tensors) {
        return refuse(format!("two parameters are called {twice}"));
    }
    // Wide types come first, so that each tensor is aligned to its element size, as readers
    // require.
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.element.size()));
    Ok(tensors)
}

/// Returns the parameter of the map that describes an entry; `None` for a buffer that is not in the
/// map.
///
/// # Errors
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
/// Returns [`CheckpointError::Layout`] if the shape overflows.
fn whole(path: &str, shape: &[usize]) -> Result<Composition, CheckpointError> {
    Composition::join(0, vec![Component::whole(path, shape)]).map_err(CheckpointError::map)
}

/// Returns a name that two tensors have.
fn duplicate(tensors: &[Planned]) -> Option<&str> {
    let mut names = HashSet::new();
    tensors.iter().map(|tensor| &*tensor.name).find(|name| !names.insert(*name))
}

/// Maps the other names of tied weights to the name under which they are written. An alias that is
/// exported under the same name needs no entry.
///
/// # Errors
/// Returns [`CheckpointError::Layout`] if an alias would hide another tensor, another alias, or the
/// metadata's own key `format`.
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

/// Divides the tensors into files of at most `limit` bytes of values, in order. A tensor above the
/// limit gets its own file. At least one file is returned, which is empty for a model without
/// tensors.
fn pack(tensors: &[Planned], limit: u64) -> Vec<&[Planned]> {
    let (mut shards, mut start, mut bytes) = (vec![], 0, 0_u64);
    for (index, tensor) in tensors.iter().enumerate() {
        // The first tensor of a file always fits, so that no file is empty.
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
/// Shards of an earlier export with another number of files would otherwise stay next to the new
/// ones, and a reader could mix both.
fn refuse_weights(out: &Path) -> Result<(), CheckpointError> {
    let is_weights = |name: &String| {
        name == INDEX || name.starts_with("model") && name.ends_with(".safetensors")
    };
    let Some(name) = disk::names(out)?.into_iter().find(is_weights) else { return Ok(()) };
    let source = std::io::ErrorKind::AlreadyExists.into();
    Err(CheckpointError::Io { action: "replace weights", path: out.join(name), source })
}

/// A file to be written: its path, its tensors, and the aliases of the whole export.
struct ShardFile<'a> {
    path: PathBuf,
    tensors: &'a [Planned],
    aliases: &'a BTreeMap<String, String>,
}

/// Writes one file, tensor by tensor. Memory holds one tensor, converted to f32, and a buffer of
/// encoded values. Returns the tensors with values that are not finite.
///
/// # Errors
/// Returns the errors of [`Checkpoint::read`], [`CheckpointError::Overflow`] for a finite value
/// that would become infinite, or a write error.
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
        // Only finite values count: an infinite weight is the model's own and is reported below.
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

/// Returns the safetensors header of a file. Aliases are recorded in the metadata of the file that
/// contains their tensor.
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

/// Returns the text of the index: the total size of all tensors in bytes, and the file that
/// contains each tensor.
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
mod tests;
