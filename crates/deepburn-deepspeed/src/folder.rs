//! Finds the files of a checkpoint.
//!
//! Main type: [`Folder`], which lists the files of a tag by rank. Files of tensor parallelism,
//! experts, universal checkpoints and optimizers on NVMe are recognized by their names and
//! rejected. A missing rank, pipeline stage or layer is an error.
//!
//! Names of the files, with R the data-parallel rank:
//!
//! ```text
//! mp_rank_00_model_states.pt                          the complete model: stages 0 to 2
//! zero_pp_rank_R_mp_rank_00_model_states.pt           rank R's model file: stage 3
//! zero_pp_rank_R_mp_rank_00_optim_states.pt           rank R's optimizer: stages 1 to 3
//! bf16_zero_pp_rank_R_mp_rank_00_optim_states.pt      the same in bf16
//! layer_NN-model_states.pt                            layer NN of a pipeline, whose mp_rank_SS is its stage SS
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::DeepSpeedError;

/// The file that names the newest tag.
const LATEST: &str = "latest";
/// The largest size of this file in bytes. Names of folders are shorter.
const MAX_LATEST: u64 = 4095;
//= deepspeed 0.19.8 runtime/engine.py _get_ckpt_name
/// The end of the name of a model file.
const MODEL: &str = "_model_states.pt";
//= deepspeed 0.19.8 runtime/engine.py _get_rank_zero_ckpt_name
/// The end of the name of an optimizer file.
const OPTIM: &str = "_optim_states.pt";
//= deepspeed 0.19.8 runtime/pipe/module.py ckpt_layer_path
/// The end of the name of a layer's file.
const LAYER: &str = "-model_states.pt";

/// The files of a tag.
#[derive(Debug)]
pub(crate) struct Folder {
    /// The folder of the tag.
    pub(crate) path: PathBuf,
    /// The files of the model and the optimizer.
    pub(crate) files: TagFiles,
}

/// The files of a model and its optimizer.
#[derive(Debug)]
pub(crate) enum TagFiles {
    /// ZeRO stages 0 to 2: the model is in one file.
    Whole(StageFiles),
    /// ZeRO stage 3: the model files and the optimizer files by rank, without a gap.
    Sharded { model: Vec<PathBuf>, optim: Vec<PathBuf> },
    /// A pipeline at ZeRO stage 0 or 1: the stages in order, and the layers with weights by number.
    Pipeline { stages: Vec<StageFiles>, layers: BTreeMap<usize, PathBuf> },
}

/// The files of a pipeline stage, or of a model without a pipeline.
#[derive(Debug)]
pub(crate) struct StageFiles {
    /// The file `mp_rank_SS_model_states.pt`.
    pub(crate) model: PathBuf,
    /// The optimizer files by rank; empty at ZeRO stage 0.
    pub(crate) optim: Vec<PathBuf>,
}

impl Folder {
    /// Finds the tag `tag` in `path`. Without a tag, finds the one that `latest` names, or `path`
    /// itself.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Missing`] if there is no checkpoint or a rank's file is missing,
    /// [`DeepSpeedError::Mixed`] for files that cannot be from one save, or
    /// [`DeepSpeedError::Unsupported`].
    pub(crate) fn find(path: &Path, tag: Option<&str>) -> Result<Self, DeepSpeedError> {
        let path = match tag {
            Some(tag) => tagged(path, tag)?,
            None if has_files(path) => path.to_owned(),
            None => tagged(path, &latest(path)?)?,
        };
        let names = names(&path)?;
        refuse_foreign(&path, &names)?;
        let layers = layers(&path, &names)?;
        let pipeline = (!layers.is_empty()).then(|| stages(&path, &names)).transpose()?;
        refuse_other_stages(&path, &names, pipeline)?;
        let of_stage = |stage| {
            let model = path.join(format!("{}{MODEL}", mp_rank(stage)));
            Ok(StageFiles { model, optim: ranks(&path, &names, stage, OPTIM)? })
        };
        // Only stage 3 has a model file for each rank.
        let sharded = ranks(&path, &names, 0, MODEL)?;
        let first: StageFiles = of_stage(0)?;
        let files = match (first.model.is_file(), sharded.is_empty()) {
            (true, true) => match pipeline {
                None => TagFiles::Whole(first),
                Some(stages) => {
                    let stages =
                        (0..stages).map(of_stage).collect::<Result<_, DeepSpeedError>>()?;
                    TagFiles::Pipeline { stages, layers }
                }
            },
            (false, false) => TagFiles::Sharded { model: sharded, optim: first.optim },
            (false, true) => {
                let reason = "it is missing, and without it there is no checkpoint; copy the \
                              whole folder";
                return Err(DeepSpeedError::missing(&first.model, reason));
            }
            (true, false) => {
                let reason = "there are files of stage 3 beside it";
                return Err(DeepSpeedError::mixed(&first.model, reason));
            }
        };
        Ok(Self { path, files })
    }

    /// Returns true if `path` contains or is a checkpoint.
    pub(crate) fn is_one(path: &Path) -> bool {
        has_files(path) || latest(path).is_ok_and(|tag| has_files(&path.join(tag)))
    }
}

/// Returns true if the folder has model files.
fn has_files(path: &Path) -> bool {
    names(path).is_ok_and(|names| names.iter().any(|name| name.ends_with(MODEL)))
}

/// Returns the folder of a tag, or an error that lists the available ones. A tag is a single folder
/// name, and tags with path separators are rejected.
fn tagged(path: &Path, tag: &str) -> Result<PathBuf, DeepSpeedError> {
    let folder = path.join(tag);
    // A tag with a separator could name a path outside the folder.
    let is_name = folder.file_name().is_some_and(|name| name == tag);
    if is_name && folder.is_dir() {
        return Ok(folder);
    }
    let names = names(path)?;
    let found: Vec<_> = names.into_iter().filter(|name| has_files(&path.join(name))).collect();
    let there = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
    let reason = format!("there is no checkpoint `{tag}` here; existing checkpoints: {there}");
    Err(DeepSpeedError::missing(path, reason))
}

/// Returns the tag in the file `latest`.
///
/// # Errors
/// Returns [`DeepSpeedError::Missing`] without the file, and [`DeepSpeedError::Damaged`] if its
/// text is empty, not UTF-8, or longer than a tag can be.
fn latest(path: &Path) -> Result<String, DeepSpeedError> {
    let file = path.join(LATEST);
    let reason = "it is missing, and so no tag is the newest; name the tag, or its folder";
    if !file.is_file() {
        return Err(DeepSpeedError::missing(&file, reason));
    }
    let mut text = Vec::new();
    // The file may be of another program and of any size.
    File::open(&file)
        .and_then(|file| file.take(MAX_LATEST + 1).read_to_end(&mut text))
        .map_err(DeepSpeedError::io("read it", &file))?;
    let text = String::from_utf8(text).ok().filter(|text| text.len() as u64 <= MAX_LATEST);
    let text = text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    text.ok_or_else(|| DeepSpeedError::damaged(&file, "it does not name a tag"))
}

/// Returns the file names in a folder, sorted. Names that are not UTF-8 are skipped.
fn names(path: &Path) -> Result<Vec<String>, DeepSpeedError> {
    let io = || DeepSpeedError::io("list it", path);
    let mut names = vec![];
    for entry in fs::read_dir(path).map_err(io())? {
        names.extend(entry.map_err(io())?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// Returns an error if the folder contains a file of an unsupported kind.
///
/// # Errors
/// Returns [`DeepSpeedError::Unsupported`] with the file and what to do instead.
fn refuse_foreign(path: &Path, names: &[String]) -> Result<(), DeepSpeedError> {
    let refuse = |name: &str, found: &str, remedy| {
        Err(DeepSpeedError::unsupported(&path.join(name), found, remedy))
    };
    for name in names {
        if name.contains("expert") || name.starts_with("expp_rank") {
            return refuse(name, "it has experts (MoE)", "use a model without experts");
        }
        if name == "offloaded_tensors" {
            let remedy = "save it with the optimizer in memory (offload_optimizer.device)";
            return refuse(name, "the optimizer's state is on NVMe", remedy);
        }
        if name == "zero" && path.join(name).is_dir() {
            let remedy = "open the checkpoint that it was converted from";
            return refuse(name, "it is a universal checkpoint", remedy);
        }
    }
    Ok(())
}

/// Returns what the names of the files of a pipeline stage contain.
fn mp_rank(stage: usize) -> String {
    format!("mp_rank_{stage:02}")
}

/// Returns the files of a pipeline's layers by number. Layers without weights may have no file.
///
/// # Errors
/// Returns [`DeepSpeedError::Unsupported`] for layers of tensor parallelism, whose names have
/// another part.
fn layers(path: &Path, names: &[String]) -> Result<BTreeMap<usize, PathBuf>, DeepSpeedError> {
    let mut layers = BTreeMap::new();
    for name in names {
        let Some(rest) = name.strip_prefix("layer_").filter(|_| name.ends_with(".pt")) else {
            continue;
        };
        let number = rest.strip_suffix(LAYER).and_then(|number| number.parse().ok());
        let number = number.ok_or_else(|| {
            let found = "it is a part of a layer";
            let remedy = "save it without tensor parallelism";
            DeepSpeedError::unsupported(&path.join(name), found, remedy)
        })?;
        if let Some(other) = layers.insert(number, path.join(name)) {
            let reason = format!("there is {} of the same layer", other.display());
            return Err(DeepSpeedError::mixed(&path.join(name), reason));
        }
    }
    Ok(layers)
}

/// Returns the number of pipeline stages.
///
/// # Errors
/// Returns [`DeepSpeedError::Missing`] for a gap in the stages.
fn stages(path: &Path, names: &[String]) -> Result<usize, DeepSpeedError> {
    let number = |name: &String| name.strip_prefix("mp_rank_")?.strip_suffix(MODEL)?.parse().ok();
    let found: BTreeSet<usize> = names.iter().filter_map(number).collect();
    match (0..found.len()).find(|stage| !found.contains(stage)) {
        None => Ok(found.len()),
        Some(gap) => {
            let file = path.join(format!("{}{MODEL}", mp_rank(gap)));
            let reason = "this pipeline stage's file is missing; copy the files of all stages into one folder";
            Err(DeepSpeedError::missing(&file, reason))
        }
    }
}

/// Returns an error for a file of a rank that is not a pipeline stage. `pipeline` is the number of
/// stages; `None` without a pipeline.
///
/// # Errors
/// Returns [`DeepSpeedError::Unsupported`] without a pipeline, where it is a rank of tensor
/// parallelism, and [`DeepSpeedError::Missing`] with one, whose stage has no model file.
fn refuse_other_stages(
    path: &Path,
    names: &[String],
    pipeline: Option<usize>,
) -> Result<(), DeepSpeedError> {
    let own: Vec<_> = (0..pipeline.unwrap_or(1)).map(mp_rank).collect();
    let states = |name: &&String| name.ends_with(MODEL) || name.ends_with(OPTIM);
    let foreign = |name: &&String| !own.iter().any(|rank| name.contains(&format!("{rank}_")));
    let Some(name) = names.iter().filter(states).find(foreign) else { return Ok(()) };
    let file = path.join(name);
    if pipeline.is_none() {
        let remedy =
            "save it without tensor parallelism; of a pipeline, copy the files layer_*.pt, too";
        let found = "it belongs to another model-parallel rank than 0";
        return Err(DeepSpeedError::unsupported(&file, found, remedy));
    }
    let reason = "its pipeline stage has no file *_model_states.pt; copy the files of all stages into one folder";
    Err(DeepSpeedError::missing(&file, reason))
}

/// Returns the files of a pipeline stage with the ending `suffix` in rank order. A missing rank is
/// an error.
///
/// The ranks are parsed from the names, so the order of the directory entries does not matter. An
/// empty list means that there are no such files.
///
/// # Errors
/// Returns [`DeepSpeedError::Missing`] for a gap in the ranks, [`DeepSpeedError::Mixed`] for files
/// of two kinds or two files of one rank, and [`DeepSpeedError::Unsupported`] for a name without a
/// rank.
fn ranks(
    path: &Path,
    names: &[String],
    stage: usize,
    suffix: &str,
) -> Result<Vec<PathBuf>, DeepSpeedError> {
    let (mut found, mut bf16) = (BTreeMap::new(), None);
    let suffix = format!("_{}{suffix}", mp_rank(stage));
    for name in names {
        let Some(prefix) = name.strip_suffix(&suffix) else { continue };
        let is_bf16 = prefix.starts_with("bf16_");
        // If a run changed its working type, files with both kinds of names can be under one tag,
        // and only one of the two sets is complete.
        if *bf16.get_or_insert(is_bf16) != is_bf16 {
            let reason = "files of bf16 and of another working type lie side by side";
            return Err(DeepSpeedError::mixed(&path.join(name), reason));
        }
        let rank = prefix.strip_prefix("bf16_").unwrap_or(prefix).strip_prefix("zero_pp_rank_");
        let rank = rank.and_then(|rank| rank.parse::<usize>().ok()).ok_or_else(|| {
            let (found, remedy) =
                ("its name does not contain a rank", "move it away if it is not a DeepSpeed file");
            DeepSpeedError::unsupported(&path.join(name), found, remedy)
        })?;
        if let Some(other) = found.insert(rank, path.join(name)) {
            let reason = format!("there is {} of the same rank", other.display());
            return Err(DeepSpeedError::mixed(&path.join(name), reason));
        }
    }
    if let Some(gap) = (0..found.len()).find(|rank| !found.contains_key(rank)) {
        let bf16 = if bf16 == Some(true) { "bf16_" } else { "" };
        let name = format!("{bf16}zero_pp_rank_{gap}{suffix}");
        let reason = "this rank's file is missing; copy the files of all ranks into one folder";
        return Err(DeepSpeedError::missing(&path.join(name), reason));
    }
    Ok(found.into_values().collect())
}
