//! What a run leaves when it has come to its end: the final test, the model, the report.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use deepburn::metrics::{Row, read_metrics};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::{Engine, Measured};
use deepburn_config::JobRequest;
use deepburn_monitor::{Environment, Report};
use serde_json::json;

use crate::counted::counted;
use crate::data::recipe::Recipe;
use crate::failure::Failure;
use crate::run::finetune::RankError;
use crate::run::preparation::Preparation;
use crate::run::progress::tell;
use crate::run::resume::restarts;

/// Set by a launcher: when it started the job first, in seconds since 1970.
pub(crate) const STARTED: &str = "DEEPBURN_STARTED";

/// Writes `test.json`: what the final test found, on data that trained nothing.
pub(crate) fn record_test(measured: &Measured, output: &Path) -> Result<(), RankError> {
    let Measured { row, num_targets, answers } = measured;
    let mut record = json!({ "test_loss": row.eval_loss, "targets": num_targets });
    let mut line = format!("test loss {:.4}", row.eval_loss);
    match (row.eval_accuracy, answers) {
        (Some(accuracy), Some(answers)) => {
            record["test_accuracy"] = json!(accuracy);
            // A row for each class, in it how often each class was the answer.
            if let Some(rows) = answers.rows() {
                record["confusion"] = json!(rows);
            }
            line += &format!(", accuracy {:.2} %", 100.0 * accuracy);
        }
        _ => {
            record["perplexity"] = json!(row.eval_loss.exp());
            line += &format!(", perplexity {:.2}", row.eval_loss.exp());
        }
    }
    tell(&line);
    write_whole(&output.join("test.json"), &format!("{record:#}\n"))
        .map_err(|cause| RankError::Test { cause })
}

/// Gathers the model parameter by parameter; rank 0 writes it in Hugging Face's layout.
pub(crate) fn save_model<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    engine: &Engine<B, R::Model>,
    recipe: &R,
    output: &Path,
) -> Result<(), RankError> {
    let folder = output.join("model");
    let mut writer = match engine.rank() {
        0 => Some(recipe.writer(&folder)?),
        _ => None,
    };
    for parameter in engine.parameters() {
        let data = engine.states().master_data(parameter.index())?;
        if data.iter::<f32>().any(|value| !value.is_finite()) {
            return Err(RankError::Diverged { path: parameter.path().to_owned() });
        }
        if let Some(writer) = &mut writer {
            writer.write(parameter.path(), data)?;
        }
    }
    if let Some(writer) = writer {
        if let Some(tokenizer) = recipe.tokenizer() {
            tokenizer.save(&folder)?;
        }
        writer.finish()?;
    }
    Ok(())
}

/// Draws the curves of the run.
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
        job: &preparation.record,
        rows: &rows,
        test: test.as_ref(),
        environment: &Environment::detect(env!("CARGO_PKG_VERSION")),
    };
    report.write(&output.join("report.html")).map_err(Failure::run)?;
    if let Some(line) = goodput(&rows) {
        tell(&line);
    }
    tell(&format!("model, metrics and report are in {}", output.display()));
    Ok(())
}

/// The share of a launched job's time that went into steps that count. Steps that were taken again after
/// a restart count once; what else takes time is starting, saving, and what was lost.
fn goodput(rows: &[Row]) -> Option<String> {
    let started: f64 = std::env::var(STARTED).ok()?.parse().ok()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    let total = (now - started).max(f64::MIN_POSITIVE);
    let steps = rows.iter().filter_map(|row| match row {
        Row::Step(step) => Some(step.step_seconds),
        _ => None,
    });
    let useful: f64 = steps.sum();
    let restarts = restarts();
    Some(format!(
        "goodput {:.1} %: {useful:.1} s of steps in {total:.1} s since the launch, {}",
        100.0 * useful / total,
        counted(restarts as usize, "restart")
    ))
}

/// Writes a file that is there whole or not at all.
pub(crate) fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let partial = path.with_extension("partial");
    let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // It may not even have been created.
        let _ = fs::remove_file(&partial);
    }
    written
}
