//! Finds the files of a checkpoint.
//!
//! Main type: [`Folder`], which lists the files of a tag by rank. Files of
//! pipeline or tensor parallelism, experts, universal checkpoints and
//! optimizers on NVMe are recognised by their names and rejected. A missing
//! rank is an error.
//!
//! Names of the files, with R the data-parallel rank:
//!
//! ```text
//! mp_rank_00_model_states.pt                          the complete model: stages 0 to 2
//! zero_pp_rank_R_mp_rank_00_model_states.pt           rank R's model file: stage 3
//! zero_pp_rank_R_mp_rank_00_optim_states.pt           rank R's optimizer: stages 1 to 3
//! bf16_zero_pp_rank_R_mp_rank_00_optim_states.pt      the same in bf16
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::DeepSpeedError;

/// The file that names the newest tag.
const LATEST: &str = "latest";
/// The end of the name of a model file.
const MODEL: &str = "_model_states.pt";
/// The end of the name of an optimizer file.
const OPTIM: &str = "_optim_states.pt";
/// Rank 0 of the tensor-parallel dimension, the only supported one.
const MP_RANK: &str = "mp_rank_00";

/// The files of a tag.
#[derive(Debug)]
pub(crate) struct Folder {
    /// The folder of the tag.
    pub(crate) path: PathBuf,
    /// One file with the complete model (stages 0 to 2), or one file per rank
    /// (stage 3).
    pub(crate) model: ModelFiles,
    /// The optimizer files by rank; empty at stage 0.
    pub(crate) optim: Vec<PathBuf>,
}

/// The files `*_model_states.pt`.
#[derive(Debug)]
pub(crate) enum ModelFiles {
    /// The file of rank 0, which has the complete model.
    Whole(PathBuf),
    /// The files by rank, without a gap.
    Sharded(Vec<PathBuf>),
}

impl Folder {
    /// Finds the tag `tag` in `path`. Without a tag, finds the one that
    /// `latest` names, or `path` itself.
    ///
    /// # Errors
    ///
    /// Returns [`DeepSpeedError::Missing`] if there is no checkpoint or a
    /// rank's file is missing, [`DeepSpeedError::Mixed`] for files that cannot
    /// be from one save, or [`DeepSpeedError::Unsupported`].
    pub(crate) fn find(path: &Path, tag: Option<&str>) -> Result<Self, DeepSpeedError> {
        let path = match tag {
            Some(tag) => tagged(path, tag)?,
            None if has_files(path) => path.to_owned(),
            None => tagged(path, &latest(path)?)?,
        };
        let names = names(&path)?;
        refuse_foreign(&path, &names)?;
        let whole = path.join(format!("{MP_RANK}{MODEL}"));
        let sharded = ranks(&path, &names, MODEL)?;
        let model = match (whole.is_file(), sharded.is_empty()) {
            (true, true) => ModelFiles::Whole(whole),
            (false, false) => ModelFiles::Sharded(sharded),
            (false, true) => {
                let reason = "it is missing, and without it there is no checkpoint; copy the \
                              whole folder";
                return Err(DeepSpeedError::missing(&whole, reason));
            }
            (true, false) => {
                let reason = "there are files of stage 3 beside it";
                return Err(DeepSpeedError::mixed(&whole, reason));
            }
        };
        let optim = ranks(&path, &names, OPTIM)?;
        Ok(Self { path, model, optim })
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

/// Returns the folder of a tag, or an error that lists the available ones. A
/// tag is a single folder name, and tags with path separators are rejected.
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
///
/// Returns [`DeepSpeedError::Missing`] without the file, and
/// [`DeepSpeedError::Damaged`] if its text is empty, not UTF-8, or longer than
/// a tag can be.
fn latest(path: &Path) -> Result<String, DeepSpeedError> {
    let file = path.join(LATEST);
    let reason = "it is missing, and so no tag is the newest; name the tag, or its folder";
    if !file.is_file() {
        return Err(DeepSpeedError::missing(&file, reason));
    }
    let size = fs::metadata(&file).map_err(DeepSpeedError::io("read it", &file))?.len();
    let text = fs::read(&file).map_err(DeepSpeedError::io("read it", &file))?;
    let text = String::from_utf8(text).ok().filter(|_| size < 4096);
    let text = text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    text.ok_or_else(|| DeepSpeedError::damaged(&file, "it does not name a tag"))
}

/// Returns the file names in a folder, sorted. Names that are not UTF-8 are
/// skipped.
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
///
/// Returns [`DeepSpeedError::Unsupported`] with the file and what to do
/// instead.
fn refuse_foreign(path: &Path, names: &[String]) -> Result<(), DeepSpeedError> {
    let refuse = |name: &str, found: &str, remedy| {
        Err(DeepSpeedError::unsupported(&path.join(name), found, remedy))
    };
    for name in names {
        let states = name.ends_with(MODEL) || name.ends_with(OPTIM);
        if name.contains("expert") || name.starts_with("expp_rank") {
            return refuse(name, "it has experts (MoE)", "use a model without experts");
        }
        if name.starts_with("layer_") && name.ends_with(".pt") {
            let remedy = "save it without pipeline parallelism";
            return refuse(name, "it is a layer of a pipeline", remedy);
        }
        if states && !name.contains(MP_RANK) {
            let remedy = "save it without tensor and pipeline parallelism";
            return refuse(name, "it belongs to another model-parallel rank than 0", remedy);
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

/// Returns the files with the ending `suffix` in rank order. A missing rank is
/// an error.
///
/// The ranks are parsed from the names, so the order of the directory entries
/// does not matter. An empty list means that there are no such files.
///
/// # Errors
///
/// Returns [`DeepSpeedError::Missing`] for a gap in the ranks,
/// [`DeepSpeedError::Mixed`] for files of two kinds or two files of one rank,
/// and [`DeepSpeedError::Unsupported`] for a name without a rank.
fn ranks(path: &Path, names: &[String], suffix: &str) -> Result<Vec<PathBuf>, DeepSpeedError> {
    let (mut found, mut bf16) = (BTreeMap::new(), None);
    let suffix = format!("_{MP_RANK}{suffix}");
    for name in names {
        let Some(prefix) = name.strip_suffix(&suffix) else { continue };
        let is_bf16 = prefix.starts_with("bf16_");
        // If a run changed its working type, files with both kinds of names can be under one tag, and only
        // one of the two sets is complete.
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
