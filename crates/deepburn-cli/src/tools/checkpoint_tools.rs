//! `deepburn inspect` and `deepburn consolidate`: show training checkpoints and export their
//! weights.
//!
//! `consolidate` writes safetensors with the parameter names of `transformers`, the `config.json`,
//! the tokenizer if the run has one, and the companion files of the pretrained model, so that
//! `from_pretrained` can load the folder. The checkpoint of a job with an adapter is exported as
//! the adapter. Existing files are never overwritten. If another program saved the checkpoint with
//! the library, these names are unknown, and weights are named by their module paths.
//!
//! ```text
//! RUN/checkpoints/step-00001000/   the checkpoint, from any number of ranks
//! RUN/model/                       source of tokenizer and companion files, if the run has saved its model
//! OUT/model.safetensors            or several files with an index, depending on --max-shard-size
//! OUT/config.json, …               the JSON files that the run stored in the checkpoint's client state
//! ```
//!
//! `inspect` reads the whole checkpoint and compares its hashes before it prints anything.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use clap::builder::TypedValueParser;
use deepburn::ClientStates;
use deepburn::checkpoint::{
    Checkpoint, Consolidation, NotFinite, Tag, WeightMap, consolidate as write_weights,
};
use deepburn_config::counted;
use deepburn_models::FloatType;
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{ADAPTER_CONFIG, BaseModel};

use crate::failure::Failure;
use crate::job::model_folder::refuse_run;
use crate::named_values::named_values;
use crate::run::base_model::find_base;
use crate::run::job_state::JobState;
use crate::tools::accompanying_files::AccompanyingFiles;
use crate::tools::adapter_export::AdapterExport;
use crate::whole_file::refuse_existing;

/// Options of `deepburn consolidate`.
#[derive(Debug, Args)]
pub(crate) struct ConsolidateArguments {
    /// Folder of the checkpoint, of checkpoints, or of a run.
    checkpoint: PathBuf,
    /// Output folder.
    out: PathBuf,
    /// Name of the checkpoint [default: the latest].
    #[arg(long)]
    tag: Option<String>,
    /// Export the checkpoint with the best evaluation.
    #[arg(long, conflicts_with = "tag")]
    best: bool,
    /// Folder of the pretrained model, for a checkpoint without its frozen parameters [default:
    /// where the run read it].
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Type of the weights.
    #[arg(long, value_parser = weight_type(), default_value = "f32")]
    dtype: FloatType,
    /// Maximum size of a weight file. Several files get an index.
    #[arg(long, default_value = "5GB")]
    max_shard_size: Size,
}

/// Returns the parser of the type of consolidated weights.
pub(crate) fn weight_type() -> impl TypedValueParser<Value = FloatType> {
    named_values([
        ("f32", "Single precision", FloatType::F32),
        ("f16", "IEEE half precision", FloatType::F16),
        ("bf16", "bfloat16", FloatType::Bf16),
    ])
}

/// A size in bytes, written as `5GB`, `2.5GB`, `500MB`, `2GiB` or `1048576`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    /// The message that clap prints after the name of the option.
    type Err = String;

    /// Parses a number with a unit. A fraction needs one. Units are decimal (`KB`, `MB`, `GB`) or
    /// binary (`KiB`, `MiB`, `GiB`), in any case.
    ///
    /// # Errors
    /// Returns a message if the text has another form, or if the size is 0 or does not fit 64 bits.
    fn from_str(text: &str) -> Result<Self, String> {
        let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
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
        let number = &text[..text.len() - unit.len()];
        let bytes = factor.and_then(|factor| match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(factor),
            // There are no fractions of a byte.
            Err(_) if factor > 1 => {
                let bytes = number.parse::<f64>().ok()? * factor as f64;
                (bytes < u64::MAX as f64).then_some(bytes as u64)
            }
            Err(_) => None,
        });
        match bytes {
            Some(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => {
                Err(format!("invalid size `{text}`; use a number with KB, MB or GB, such as 2.5GB"))
            }
        }
    }
}

/// Opens a checkpoint. `path` is its folder, the folder of all checkpoints, or the output folder of
/// a run.
///
/// # Errors
/// Returns a user's mistake if there is no checkpoint, or if it is damaged.
fn open(path: &Path, tag: Option<&str>) -> Result<Checkpoint, Failure> {
    let tag = tag.map(str::parse::<Tag>).transpose().map_err(Failure::mistake)?;
    // The output folder of a run, or else a folder of checkpoints or a checkpoint.
    let below = crate::run::resume::folder(path);
    let place = if below.is_dir() { &below } else { path };
    Checkpoint::open(place, tag.as_ref()).map_err(Failure::mistake)
}

/// Opens the checkpoint with the best evaluation of the run, as recorded in the latest checkpoint.
/// Checkpoints of other runs in the folder are ignored.
///
/// # Errors
/// Returns a user's mistake if there is no checkpoint, if another program saved it, or if retention
/// has deleted the best checkpoint.
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
            "--best: {} has no checkpoint with the best evaluation; train with training.load_best_model_at_end, which \
             keeps it, or give --tag",
            root.display()
        ))
    })
}

/// Verifies a checkpoint and describes its contents.
///
/// # Errors
/// Returns a user's mistake if there is no checkpoint, or if it is damaged. The message then names
/// the damaged file.
pub(crate) fn inspect(path: &Path, tag: Option<&str>) -> Result<String, Failure> {
    let checkpoint = open(path, tag)?;
    checkpoint.verify().map_err(Failure::mistake)?;
    let text = checkpoint.describe();
    // Checkpoints of other programs, and of later versions, are described without their model.
    let state = JobState::read(&checkpoint).ok();
    let adapter = state.and_then(|state| Some(adapter_line(&state.adapted().ok()??)));
    // The line joins the first paragraph of the description.
    let Some((adapter, (head, rest))) = adapter.zip(text.split_once("\n\n")) else {
        return Ok(text);
    };
    Ok(format!("{head}\n{adapter}\n\n{rest}"))
}

/// Describes the adapter of a model.
fn adapter_line(model: &AnyDecoder) -> String {
    let Some(adapter) = model.adapter() else { return String::new() };
    let config = adapter.config();
    format!(
        "adapter     {} of rank {} in {} of {}",
        if config.dora { "DoRA" } else { "LoRA" },
        config.rank,
        counted(adapter.num_modules(), "module"),
        config.base_model.as_deref().unwrap_or("its base model")
    )
}

/// Writes the weights of a checkpoint and the model's other files. Returns the paths of the files.
///
/// Parameters that the checkpoint omits are read from the folder `--base` of the pretrained model,
/// or from the folder that the run read. Only one parameter at a time is in memory. The weights are
/// written first, either completely or not at all.
///
/// # Errors
/// Returns a user's mistake if the checkpoint is damaged, if the pretrained model does not have the
/// omitted parameters, if a file already exists, or if the float type cannot represent a value.
/// Returns a failure while running if another file cannot be written.
pub(crate) fn consolidate(arguments: &ConsolidateArguments) -> Result<Vec<String>, Failure> {
    let ConsolidateArguments { out, dtype, .. } = arguments;
    let (base, max_shard_bytes) = (arguments.base.as_deref(), arguments.max_shard_size.0);
    let checkpoint = &mut match arguments.best {
        true => open_best(&arguments.checkpoint)?,
        false => open(&arguments.checkpoint, arguments.tag.as_deref())?,
    };
    check_output(checkpoint, out)?;
    let what = Consolidation { element: dtype.element(), max_shard_bytes };
    let as_trained = checkpoint.weight_map().map_err(Failure::mistake)?;
    let Ok(state) = JobState::read(checkpoint) else {
        tracing::info!(
            "finetune did not save this checkpoint, so weights are named by their paths in the module"
        );
        find_base(checkpoint, base, None, |it| BaseModel::open(it, as_trained.clone()))?;
        return write(checkpoint, out, &what, &as_trained);
    };
    if let Some(model) = state.adapted().map_err(Failure::mistake)? {
        let export = AdapterExport { model, base };
        return export.write(checkpoint, state, out, *dtype);
    }
    let recorded = state.base.clone();
    let others = AccompanyingFiles::find(checkpoint, state, *dtype)?;
    others.refuse_existing(out)?;
    // Tools would take the folder for that adapter.
    refuse_existing(out, [ADAPTER_CONFIG])?;
    let map = others.hf_export.weight_map(as_trained).map_err(Failure::mistake)?;
    find_base(checkpoint, base, recorded.as_deref(), |it| BaseModel::open(it, map.clone()))?;
    let mut files = write(checkpoint, out, &what, &map)?;
    files.extend(others.write(out)?);
    Ok(files)
}

/// Checks the output folder. It must not be inside the folder of checkpoints, where the export
/// could be mistaken for a checkpoint or deleted by retention.
///
/// # Errors
/// Returns a user's mistake if `out` is inside the folder of checkpoints or the output folder of a
/// run, or exists and is not a folder.
fn check_output(checkpoint: &Checkpoint, out: &Path) -> Result<(), Failure> {
    if out.exists() && !out.is_dir() {
        return Err(Failure::mistake(format!(
            "{} exists and is not a folder; give another folder",
            out.display()
        )));
    }
    refuse_run(out)?;
    let root = checkpoint.path().parent().and_then(|root| fs::canonicalize(root).ok());
    match (root, fs::canonicalize(out)) {
        (Some(root), Ok(place)) if place.starts_with(&root) => Err(Failure::mistake(format!(
            "{} is a folder of checkpoints; give another folder",
            out.display()
        ))),
        _ => Ok(()),
    }
}

/// Writes the weights, and returns the paths of their files. Logs a warning for parameters with
/// values that are not finite.
///
/// # Errors
/// Returns a user's mistake with the error of the library's export.
fn write(
    checkpoint: &Checkpoint,
    out: &Path,
    what: &Consolidation,
    map: &WeightMap,
) -> Result<Vec<String>, Failure> {
    let done = write_weights(checkpoint, out, what, map).map_err(Failure::mistake)?;
    for NotFinite { path, count, total } in &done.not_finite {
        tracing::warn!(
            "parameter {path}: {count} of {total} values are infinite or NaN, and are exported as they are"
        );
    }
    Ok(done.files.iter().map(|path| path.display().to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sizes_with_units() {
        for (text, bytes) in [
            ("5GB", 5_000_000_000),
            ("2MiB", 2 << 20),
            ("17", 17),
            ("3kb", 3000),
            ("1.5GB", 1_500_000_000),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in
            ["", "GB", "0MB", "-1GB", "1.5", "1.2.3GB", ".GB", "1XB", "99999999999GB", "1 GB"]
        {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
