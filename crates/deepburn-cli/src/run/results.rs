//! Writes the results of a run: the exported model, the test result and the report.
//!
//! | File | Content |
//! |---|---|
//! | `model/` | `config.json`, `model.safetensors`, tokenizer and companion files, as `transformers` loads them, and `deepburn.json` with the data that it was trained on |
//! | `adapter/` | `adapter_config.json`, `adapter_model.safetensors` and the same other files, as PEFT loads them; in place of `model/` if the job trains an adapter, unless it saves the merged model too |
//! | `test.json` | `test_loss` and `targets`; `test_accuracy` and `confusion` for a classifier, `test_accuracy` and `test_f1` with several labels a text, `test_mae` for regression, `test_rewards/accuracies` and `test_rewards/margins` for preferences, `perplexity` and `test_mean_token_accuracy` for the next token |
//! | `report.html` | curves of loss, learning rate, gradient norm, throughput and memory in one self-contained page |
//!
//! The model is written first, because it is the most important result. The report is written last.
//! It is created from `metrics.jsonl`, so that it also has the steps before the run was resumed.
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

use burn::module::AutodiffModule;
use burn::tensor::{Shape, TensorData};
use deepburn::metrics::{MetricsRow, Quality, read_metrics};
use deepburn::ops::OptimizerOps;
use deepburn::zero::Training;
use deepburn::{Answers, BoxError, Engine, FinalModel, Measured, TrainingEnd};
use deepburn_config::{JobRequest, counted};
use deepburn_models::FloatType;
use deepburn_models::hf::{AdapterFolder, GENERATION_CONFIG, ModelFolderWriter};
use deepburn_models::lora::Adapter;
use deepburn_monitor::{Environment, Report, read_generated};
use serde_json::{Value, json};

use crate::console;
use crate::failure::Failure;
use crate::job::adapter_base::base_hash;
use crate::job::model_folder::{ADAPTER, MODEL, ModelRecord};
use crate::run::launcher_env::{launch_seconds, restarts};
use crate::run::preparation::Preparation;
use crate::run::result_files::GENERATED;
use crate::whole_file::write_whole;

/// Writes `test.json` with the loss and the metrics of the task or the perplexity on the test
/// split, and prints them.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub(crate) fn record_test(measured: &Measured, output: &Path) -> Result<(), BoxError> {
    let Measured { row, num_targets, answers } = measured;
    let mut record = json!({ "test_loss": row.eval_loss, "targets": num_targets });
    match row.quality() {
        Quality::Perplexity(perplexity) => record["perplexity"] = json!(perplexity),
        Quality::Tokens { perplexity, accuracy } => {
            record["perplexity"] = json!(perplexity);
            record["test_mean_token_accuracy"] = json!(accuracy);
        }
        Quality::Accuracy(accuracy) => record["test_accuracy"] = json!(accuracy),
        Quality::LabelSets { accuracy, f1 } => {
            record["test_accuracy"] = json!(accuracy);
            record["test_f1"] = json!(f1);
        }
        Quality::MeanAbsoluteError(error) => record["test_mae"] = json!(error),
        Quality::Preferences { accuracy, margin } => {
            record["test_rewards/accuracies"] = json!(accuracy);
            record["test_rewards/margins"] = json!(margin);
        }
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
/// All ranks check each parameter for values that are not finite, so that all of them fail if
/// training has diverged, and no rank waits in a collective.
///
/// # Errors
/// Returns an error if a parameter is not finite, if a collective fails, or if a file cannot be
/// written. No incomplete model is left in the folder then.
pub(crate) fn save_model<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    engine: &Engine<B, M>,
    preparation: &Preparation,
) -> Result<(), BoxError> {
    let (info, output) = (preparation.subject.info(), &preparation.job.training.output_dir);
    let adapter = info.adapted().and_then(|adapted| Some((adapted, adapted.adapter_map()?)));
    let folder = output.join(if adapter.is_some() { ADAPTER } else { MODEL });
    let mut writer = match (engine.rank(), &adapter) {
        (0, Some((adapted, map))) => {
            let fields = adapted.adapter().map(Adapter::file_fields).unwrap_or_default();
            Some(AdapterFolder::create(&folder, map, fields)?)
        }
        (0, None) => Some(info.architecture().folder_writer(&folder, FloatType::F32)?),
        _ => None,
    };
    let is_exported = |path: &str| match &adapter {
        Some((_, map)) => map.get(path).is_some(),
        None => true,
    };
    // Only one parameter at a time is gathered, so that the export needs little memory at any ZeRO
    // stage.
    for parameter in engine.parameters().iter().filter(|it| is_exported(it.path())) {
        if parameter.is_quantized() {
            // PEFT stores an adapted embedding, which is in the base model as it was.
            if let Some(writer) = &mut writer {
                let values = original_values(parameter.path(), parameter.shape(), preparation)?;
                let data = values.convert_dtype(engine.states().compute_type());
                writer.write(parameter.path(), data)?;
            }
            continue;
        }
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
            // PEFT also stores a tied head that is trained together with its embedding. It has no
            // parameter here.
            let twin = adapter.as_ref().and_then(|(adapted, _)| adapted.twin_of(parameter.path()));
            if let Some(twin) = twin {
                writer.write(&twin, data.clone())?;
            }
            writer.write(parameter.path(), data)?;
        }
    }
    // Other ranks have only taken part in the gathers.
    let Some(writer) = writer else { return Ok(()) };
    let base = adapter.zip(preparation.pretrained.as_deref());
    let hash = base.and_then(|((adapted, _), base)| base_hash(adapted, base));
    finish_folder(writer, &folder, preparation, hash)
}

/// Reads a quantized parameter from the pretrained model.
///
/// # Errors
/// Returns an error if the files of the pretrained model cannot be read.
fn original_values(
    path: &str,
    shape: &Shape,
    preparation: &Preparation,
) -> Result<TensorData, BoxError> {
    let Some(folder) = &preparation.pretrained else {
        return Err(
            format!("parameter {path} is quantized, and the job has no pretrained model").into()
        );
    };
    let mut base = preparation.subject.info().architecture().base_model(folder)?;
    Ok(TensorData::new(base.read(path)?, shape.clone()))
}

/// Writes the files that accompany exported weights, and finishes the folder. `base_model_hash`
/// identifies the base model of an adapter.
///
/// # Errors
/// Returns an error if a file cannot be written.
fn finish_folder(
    mut writer: ModelFolderWriter,
    folder: &Path,
    preparation: &Preparation,
    base_model_hash: Option<String>,
) -> Result<(), BoxError> {
    let info = preparation.subject.info();
    if let Some(tokenizer) = info.tokenizer() {
        tokenizer.save(folder)?;
    }
    info.settings().companions.copy_to(folder);
    let training_data = Some(preparation.data.training.as_str());
    let mut record = ModelRecord::of_job(&preparation.record, training_data);
    record.base_model_hash = base_model_hash;
    writer.set_document(ModelRecord::FILE, record.fields());
    // With an adapter, it has the end of text that the adapter was trained with.
    if let Some(fields) = info.hf_export().documents.remove(GENERATION_CONFIG) {
        writer.set_document(GENERATION_CONFIG, fields);
    }
    Ok(writer.finish()?)
}

/// Writes the model with the saved adapter merged into its weights, if the job asks for it. It
/// needs no other rank, so it is called after their group has ended: no rank waits for the merge in
/// a collective.
///
/// # Errors
/// Returns an error if a file cannot be read or written. No incomplete model is left then.
pub(crate) fn save_merged(preparation: &Preparation) -> Result<(), BoxError> {
    let Preparation { job, pretrained, subject, .. } = preparation;
    let (Some(adapted), Some(base), true) =
        (subject.info().adapted(), pretrained, job.training.saving.save_merged)
    else {
        return Ok(());
    };
    let output = &job.training.output_dir;
    let adapter = AdapterFolder::open(&output.join(ADAPTER))?;
    let trained = adapted.base().with_trained_adapter(adapter)?;
    let folder = output.join(MODEL);
    let writer = trained.merge_into(base, &folder, FloatType::F32)?;
    finish_folder(writer, &folder, preparation, None)
}

/// Records in `job.json` which model is saved, if the job asks for the best one: the step of the
/// saved model, the step of the best one, and the reason if they differ.
///
/// A failure is only logged, because the model is already saved.
pub(crate) fn record_model(preparation: &Preparation, end: &TrainingEnd) {
    let training = &preparation.job.training;
    // Without `load_best_model_at_end`, the last model is always the saved one.
    let Some(best) = end.best.filter(|_| training.evaluation.load_best_model_at_end) else {
        return;
    };
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
    // Ranks share the record in memory, so rank 0 added the section only to the file.
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
/// Returns a failure while running if `metrics.jsonl` or `test.json` cannot be read, or if the
/// report cannot be written.
pub(crate) fn write_report(request: &JobRequest, preparation: &Preparation) -> Result<(), Failure> {
    let output = &preparation.job.training.output_dir;
    let rows = read_metrics(&output.join("metrics.jsonl")).map_err(Failure::run)?;
    let test = match fs::read_to_string(output.join("test.json")) {
        Ok(text) => Some(serde_json::from_str(&text).map_err(Failure::run)?),
        // There is no test split, or the test was stopped.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(Failure::run(error)),
    };
    let path = output.join(GENERATED);
    let generated = match path.exists() {
        true => read_generated(&path).map_err(Failure::run)?,
        false => Vec::new(),
    };
    let title = request.config.file_stem().map(|name| name.to_string_lossy().into_owned());
    let report = Report {
        title: title.as_deref().unwrap_or("finetune"),
        job: &complete_record(preparation),
        rows: &rows,
        test: test.as_ref(),
        generated: &generated,
        environment: &Environment::detect(env!("CARGO_PKG_VERSION")),
    };
    report.write(&output.join("report.html")).map_err(Failure::run)?;
    if let Some(line) = goodput(&rows) {
        console::eprint(&line);
    }
    let trained = match preparation.job.model.has_adapter() {
        true if preparation.job.training.saving.save_merged => "adapter, model",
        true => "adapter",
        false => "model",
    };
    console::eprint(&format!("{trained}, metrics and report are in {}", output.display()));
    Ok(())
}

/// Returns a line with the goodput of a launched job: the share of its wall-clock time that was
/// spent in training steps.
///
/// A step that was repeated after a restart counts once. The rest of the time was spent on
/// start-up, checkpoints and lost steps. Returns `None` without a launcher, because the start time
/// is unknown then.
fn goodput(rows: &[MetricsRow]) -> Option<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    let total = (now - launch_seconds()?).max(f64::MIN_POSITIVE);
    // `metrics.jsonl` has each step once, because a resumed run removes the rows that it repeats.
    let steps = rows.iter().filter_map(|row| match row {
        MetricsRow::Step(step) => Some(step.step_seconds),
        _ => None,
    });
    let useful: f64 = steps.sum();
    Some(format!(
        "goodput {:.1} %: {useful:.1} s of steps in {total:.1} s since the launch, {}",
        100.0 * useful / total,
        counted(restarts() as usize, "restart")
    ))
}
