//! `deepburn inspect` and `deepburn consolidate`: training checkpoints for people and for other
//! programs.

use std::fs;
use std::path::Path;
use std::str::FromStr;

use clap::ValueEnum;
use deepburn::ClientStates;
use deepburn::checkpoint::{
    Atom, Checkpoint, Consolidation, ElementType, Export, Tag, consolidate as write_weights,
};
use deepburn_models::Publication;
use deepburn_models::gpt2::SavedPrecision;

use crate::failure::Failure;
use crate::run::job_state::JobState;
use crate::run::results::write_whole;

/// What a tokenizer consists of, in one form or another.
const TOKENIZER_FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
];

/// The type of consolidated weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightType {
    /// Single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl WeightType {
    fn types(self) -> (ElementType, SavedPrecision) {
        match self {
            Self::F32 => (ElementType::F32, SavedPrecision::F32),
            Self::F16 => (ElementType::F16, SavedPrecision::F16),
            Self::Bf16 => (ElementType::Bf16, SavedPrecision::Bf16),
        }
    }
}

/// A number of bytes: `5GB`, `500MB`, `2GiB`, `1048576`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let factor = match unit.to_ascii_uppercase().as_str() {
            "" | "B" => Some(1),
            "KB" => Some(1_000),
            "MB" => Some(1_000_000),
            "GB" => Some(1_000_000_000),
            "KIB" => Some(1 << 10),
            "MIB" => Some(1 << 20),
            "GIB" => Some(1 << 30),
            _ => None,
        };
        let number = text[..text.len() - unit.len()].parse::<u64>().ok();
        let bytes = number.zip(factor).and_then(|(number, factor)| number.checked_mul(factor));
        match bytes {
            Some(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => Err(format!("`{text}` is no size: write a whole number and KB, MB or GB")),
        }
    }
}

/// The checkpoint in `path`: a checkpoint's folder, the folder it lies in, or a run's output folder.
fn open(path: &Path, tag: Option<&str>) -> Result<Checkpoint, Failure> {
    let tag = tag.map(str::parse::<Tag>).transpose().map_err(Failure::mistake)?;
    let below = crate::run::resume::folder(path);
    let place = if below.is_dir() { &below } else { path };
    Checkpoint::open(place, tag.as_ref()).map_err(Failure::mistake)
}

/// Which checkpoint of a folder is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CheckpointChoice<'a> {
    /// The one that was saved last.
    Latest,
    /// The one with this name.
    Tag(&'a str),
    /// The one whose model had the best evaluation.
    Best,
}

impl CheckpointChoice<'_> {
    fn open(self, path: &Path) -> Result<Checkpoint, Failure> {
        match self {
            Self::Latest => open(path, None),
            Self::Tag(tag) => open(path, Some(tag)),
            Self::Best => open_best(path),
        }
    }
}

/// The checkpoint that the latest one knows as the best of its run. Checkpoints of a run that was abandoned do not
/// count.
fn open_best(path: &Path) -> Result<Checkpoint, Failure> {
    let latest = open(path, None)?;
    let root = latest.path().parent().unwrap_or(path);
    let states = ClientStates::read(&latest).map_err(Failure::mistake)?;
    let found = match states.loop_state.best {
        Some(best) => best.checkpoint(root).map_err(Failure::mistake)?,
        None => None,
    };
    found.ok_or_else(|| {
        Failure::mistake(format!(
            "--best: {} has no checkpoint of the best evaluation; train with \
             training.load_best_model_at_end, which saves and keeps it, or give --tag",
            root.display()
        ))
    })
}

/// What is inside a checkpoint.
pub(crate) fn inspect(path: &Path, tag: Option<&str>) -> Result<String, Failure> {
    let checkpoint = open(path, tag)?;
    match checkpoint.verify() {
        Ok(()) => Ok(checkpoint.describe()),
        Err(error) => Err(Failure::mistake(error)),
    }
}

/// Names that a model has elsewhere.
struct Published<'a>(&'a Publication);

impl Export for Published<'_> {
    fn name(&self, path: &str) -> String {
        self.0.name(path)
    }

    fn shape(&self, atom: &Atom) -> Vec<usize> {
        // Modules keep their weights as `transformers` keeps GPT-2's.
        atom.shape.clone()
    }
}

/// Writes the weights of a checkpoint, and the model's other files, to `out`. Returns what was
/// written.
pub(crate) fn consolidate(
    path: &Path,
    choice: CheckpointChoice<'_>,
    out: &Path,
    dtype: WeightType,
    max_shard_size: Size,
) -> Result<Vec<String>, Failure> {
    let checkpoint = choice.open(path)?;
    refuse_inside(&checkpoint, out)?;
    let (element, precision) = dtype.types();
    let what = Consolidation { element, max_shard_bytes: max_shard_size.0 };
    let publication = JobState::read(&checkpoint).ok().map(|state| state.publication);
    let Some(publication) = publication.map(|it| it.in_precision(precision)) else {
        tracing::warn!("finetune did not save it: weights keep their module paths as names");
        return write(&checkpoint, out, &what, &deepburn::checkpoint::AsTrained);
    };
    for name in publication.documents.keys() {
        if out.join(name).symlink_metadata().is_ok() {
            return Err(Failure::mistake(format!(
                "{} is there already, and nothing is replaced: give another folder",
                out.join(name).display()
            )));
        }
    }
    let mut files = write(&checkpoint, out, &what, &Published(&publication))?;
    for (name, fields) in &publication.documents {
        let text = serde_json::to_string_pretty(fields).map_err(Failure::run)?;
        write_whole(&out.join(name), &format!("{text}\n")).map_err(Failure::run)?;
        files.push(out.join(name).display().to_string());
    }
    // The model that the run left, or is going to leave, has them beside it.
    let model = checkpoint.path().ancestors().nth(2).map(|output| output.join("model"));
    for name in TOKENIZER_FILES {
        let source = model.as_ref().map(|model| model.join(name)).filter(|path| path.is_file());
        if let Some(source) = source {
            fs::copy(source, out.join(name)).map_err(Failure::run)?;
            files.push(out.join(name).display().to_string());
        }
    }
    Ok(files)
}

/// Weights do not belong among checkpoints.
fn refuse_inside(checkpoint: &Checkpoint, out: &Path) -> Result<(), Failure> {
    let root = checkpoint.path().parent().and_then(|root| fs::canonicalize(root).ok());
    match (root, fs::canonicalize(out)) {
        (Some(root), Ok(place)) if place.starts_with(&root) => Err(Failure::mistake(format!(
            "{} is where checkpoints lie: give another folder",
            out.display()
        ))),
        _ => Ok(()),
    }
}

fn write(
    checkpoint: &Checkpoint,
    out: &Path,
    what: &Consolidation,
    export: &dyn Export,
) -> Result<Vec<String>, Failure> {
    let files = write_weights(checkpoint, out, what, export).map_err(Failure::mistake)?;
    Ok(files.iter().map(|path| path.display().to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [("5GB", 5_000_000_000), ("2MiB", 2 << 20), ("17", 17), ("3kb", 3000)]
        {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GB", "0MB", "-1GB", "1.5GB", "1XB", "99999999999GB", "1 GB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
