//! Writes the results of a run: the exported model, the test result and the report.
//!
//! | File | Content |
//! |---|---|
//! | `model/` | `config.json`, `model.safetensors`, tokenizer and companion files, as `transformers` loads them, and `deepburn.json` with the data that it was trained on |
//! | `test.json` | `test_loss` and `targets`; `test_accuracy` and `confusion` for a classifier, `test_accuracy` and `test_f1` with several labels a text, `test_mae` for regression, else `perplexity` |
//! | `report.html` | curves of loss, learning rate, gradient norm, throughput and memory in one self-contained page |
//!
//! The model is written first, because it is the most important result. The report is written last. It is created from
//! `metrics.jsonl`, so that it also has the steps before the run was resumed.
//!
//! `test.json` of a language model:
//!
//! ```text
//! {
//!   "test_loss": 5.468337368224718,
//!   "targets": 124775,
//!   "perplexity": 237.0657119283746
//! }
//! ```

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use deepburn::metrics::{Quality, Row, read_metrics};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::{Answers, BoxError, Engine, FinalModel, Measured, TrainingEnd};
use deepburn_config::{JobRequest, counted};
use deepburn_files::PartialFile;
use deepburn_monitor::{Environment, Report};
use serde_json::{Value, json};

use crate::console;
use crate::data::recipe::Recipe;
use crate::failure::Failure;
use crate::job::model_folder::ModelRecord;
use crate::run::launcher_env::{launch_seconds, restarts};
use crate::run::preparation::Preparation;

/// Writes `test.json` with the loss and the metrics of the task or the perplexity on the test split, and prints them.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub(crate) fn record_test(measured: &Measured, output: &Path) -> Result<(), BoxError> {
    let Measured { row, num_targets, answers } = measured;
    let mut record = json!({ "test_loss": row.eval_loss, "targets": num_targets });
    match row.quality() {
        Quality::Perplexity(perplexity) => record["perplexity"] = json!(perplexity),
        Quality::Accuracy(accuracy) => record["test_accuracy"] = json!(accuracy),
        Quality::LabelSets { accuracy, f1 } => {
            record["test_accuracy"] = json!(accuracy);
            record["test_f1"] = json!(f1);
        }
        Quality::MeanAbsoluteError(error) => record["test_mae"] = json!(error),
    }
    // One row per true class, one column per predicted class.
    if let Some(Answers::Classes(confusion)) = answers
        && let Some(rows) = confusion.rows()
    {
        record["confusion"] = json!(rows);
    }
    let figures = row.quality().figures().into_iter();
    let figures: String = figures.map(|(name, value)| format!(", {name} {value}")).collect();
    console::eprint(&format!("test loss {:.4}{figures}", row.eval_loss));
    Ok(write_whole(&output.join("test.json"), &format!("{record:#}\n"))?)
}

/// Gathers the model parameter by parameter. Rank 0 writes it in the layout of Hugging Face.
///
/// All ranks check each parameter for values that are not finite, so that all of them fail if training has diverged,
/// and no rank waits in a collective.
///
/// # Errors
/// Returns an error if a parameter is not finite, if a collective fails, or if a file cannot be written. No incomplete
/// model is left in the folder then.
pub(crate) fn save_model<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    engine: &Engine<B, R::Model>,
    recipe: &R,
    preparation: &Preparation,
) -> Result<(), BoxError> {
    let folder = preparation.job.training.output_dir.join("model");
    let mut writer = match engine.rank() {
        0 => Some(recipe.writer(&folder)?),
        _ => None,
    };
    // Only one parameter at a time is gathered, so that the export needs little memory at any ZeRO stage.
    for parameter in engine.parameters() {
        let data = engine.states().master_data(parameter.index())?;
        // Every rank has the same values, so all ranks take the same branch.
        if data.iter::<f32>().any(|value| !value.is_finite()) {
            return Err(format!(
                "parameter {} is not finite, so that the model was not saved: training diverged in its last step; \
                 lower the learning rate, and raise an optimizer's eps of 0",
                parameter.path()
            )
            .into());
        }
        if let Some(writer) = &mut writer {
            writer.write(parameter.path(), data)?;
        }
    }
    if let Some(mut writer) = writer {
        if let Some(tokenizer) = recipe.tokenizer() {
            tokenizer.save(&folder)?;
        }
        recipe.companions().copy_to(&folder);
        let training_data = Some(preparation.data.training.as_str());
        let record = ModelRecord::of_job(&preparation.record, training_data);
        writer.set_document(ModelRecord::FILE, record.fields());
        writer.finish()?;
    }
    Ok(())
}

/// Records in `job.json` which model is saved, if the job asks for the best one: the step of the saved model, the step
/// of the best one, and the reason if they differ.
///
/// A failure is only logged, because the model is already saved.
pub(crate) fn record_model(preparation: &Preparation, end: &TrainingEnd) {
    let training = &preparation.job.training;
    let Some(best) = end.best.filter(|_| training.load_best_model_at_end) else { return };
    let mut record = preparation.record.clone();
    record[SAVED_MODEL] = match &end.model {
        FinalModel::Best => json!({ "step": best.step, "is_best": true }),
        FinalModel::Last => json!({ "step": end.step, "is_best": false, "best_step": best.step }),
        FinalModel::LastInsteadOfBest { reason, .. } => json!({
            "step": end.step, "is_best": false, "best_step": best.step, "reason": reason,
        }),
    };
    let path = training.output_dir.join("job.json");
    if let Err(error) = write_whole(&path, &format!("{record:#}")) {
        tracing::warn!("job.json does not record which model is saved: {error}");
    }
}

/// The section of `job.json` that [`record_model`] adds.
const SAVED_MODEL: &str = "saved_model";

/// Returns the record of the job with the section that [`record_model`] added.
fn complete_record(preparation: &Preparation) -> Value {
    let mut record = preparation.record.clone();
    let text = fs::read_to_string(preparation.job.training.output_dir.join("job.json"));
    let written = text.ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    if let Some(saved) = written.as_ref().and_then(|written| written.get(SAVED_MODEL)) {
        record[SAVED_MODEL] = saved.clone();
    }
    record
}

/// Writes `report.html` with the curves of the run, and prints the path of the results.
///
/// # Errors
/// Returns a failure while running if `metrics.jsonl` or `test.json` cannot be read, or if the report cannot be
/// written.
pub(crate) fn write_report(request: &JobRequest, preparation: &Preparation) -> Result<(), Failure> {
    let output = &preparation.job.training.output_dir;
    let rows = read_metrics(&output.join("metrics.jsonl")).map_err(Failure::run)?;
    let test = match fs::read_to_string(output.join("test.json")) {
        Ok(text) => Some(serde_json::from_str(&text).map_err(Failure::run)?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(Failure::run(error)),
    };
    let title = request.config.file_stem().map(|name| name.to_string_lossy().into_owned());
    let report = Report {
        title: title.as_deref().unwrap_or("finetune"),
        job: &complete_record(preparation),
        rows: &rows,
        test: test.as_ref(),
        environment: &Environment::detect(env!("CARGO_PKG_VERSION")),
    };
    report.write(&output.join("report.html")).map_err(Failure::run)?;
    if let Some(line) = goodput(&rows) {
        console::eprint(&line);
    }
    console::eprint(&format!("model, metrics and report are in {}", output.display()));
    Ok(())
}

/// Returns a line with the goodput of a launched job: the share of its wall-clock time that was spent in training
/// steps.
///
/// A step that was repeated after a restart counts once. The rest of the time was spent on start-up, checkpoints and
/// lost steps. Returns `None` without a launcher, because the start time is unknown then.
fn goodput(rows: &[Row]) -> Option<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    let total = (now - launch_seconds()?).max(f64::MIN_POSITIVE);
    let steps = rows.iter().filter_map(|row| match row {
        Row::Step(step) => Some(step.step_seconds),
        _ => None,
    });
    let useful: f64 = steps.sum();
    Some(format!(
        "goodput {:.1} %: {useful:.1} s of steps in {total:.1} s since the launch, {}",
        100.0 * useful / total,
        counted(restarts() as usize, "restart")
    ))
}

/// Writes a file under a temporary name and renames it, so that readers never see an incomplete file.
///
/// # Errors
/// Returns an error that names the path and the remedy.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<(), String> {
    // The temporary file is in the same folder, because a rename works only within a file system.
    let partial = path.with_extension("partial");
    PartialFile::replace(path, partial, text).map_err(|error| {
        format!(
            "{} cannot be written: {error}; check that its folder still exists, its permissions and the free space there",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_a_removed_folder_is_named_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("removed/job.json");
        let message = write_whole(&path, "{}").unwrap_err();
        assert!(
            message.starts_with(&format!("{} cannot be written: ", path.display())),
            "{message}"
        );
        assert!(message.contains("check that its folder still exists"), "{message}");
    }
}
