//! The metrics of a run: `metrics.jsonl`, one JSON object per line.
//!
//! Main types: [`StepRow`] for each optimizer step, [`EvalRow`] for each evaluation,
//! [`MetricsWriter`] and [`read_metrics`]. JSON has no NaN, so numbers that are not finite are
//! written as `null` and read as NaN.

use std::path::Path;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::html::percent;
use crate::rows_file::read_rows;
pub use crate::rows_file::{JsonRow, MetricsError, RowsWriter};

/// An optimizer step, applied or skipped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRow {
    /// The number of the step, from 1.
    pub step: u64,
    /// The mean loss over micro-batches and ranks; NaN for a step without targets.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// The learning rate of the step.
    #[serde(deserialize_with = "null_is_nan")]
    pub lr: f64,
    /// The global norm of the unscaled gradients before clipping; `None` for a skipped step.
    pub grad_norm: Option<f64>,
    /// The loss scale of the backward passes.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss_scale: f64,
    /// Whether the update was skipped because a gradient was not finite or because the step had no
    /// target.
    pub skipped: bool,
    /// The number of tokens (or of samples, if there are no tokens) over all ranks.
    pub tokens: u64,
    /// The wall-clock time of the step in seconds.
    #[serde(deserialize_with = "null_is_nan")]
    pub step_seconds: f64,
    /// Tokens per second over all ranks.
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_second: f64,
    /// The memory of this rank.
    pub memory: MemoryRow,
    /// The time by phase, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<PhaseSeconds>,
    /// Preference optimization: the mean reward of the better completions, the scaled difference to
    /// the reference's log-probability. The names are TRL's.
    #[serde(default, rename = "rewards/chosen", skip_serializing_if = "Option::is_none")]
    pub rewards_chosen: Option<f64>,
    /// The mean reward of the worse completions.
    #[serde(default, rename = "rewards/rejected", skip_serializing_if = "Option::is_none")]
    pub rewards_rejected: Option<f64>,
    /// The mean difference of both rewards.
    #[serde(default, rename = "rewards/margins", skip_serializing_if = "Option::is_none")]
    pub rewards_margins: Option<f64>,
    /// The share of pairs whose better completion has the larger reward.
    #[serde(default, rename = "rewards/accuracies", skip_serializing_if = "Option::is_none")]
    pub rewards_accuracies: Option<f64>,
}

/// The wall-clock time of a step by phase, in seconds, on this rank. The rest of `step_seconds` is
/// other work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseSeconds {
    /// Waiting for batches.
    #[serde(deserialize_with = "null_is_nan")]
    pub data: f64,
    /// Forward passes.
    #[serde(deserialize_with = "null_is_nan")]
    pub forward: f64,
    /// Backward passes.
    #[serde(deserialize_with = "null_is_nan")]
    pub backward: f64,
    /// The optimizer update.
    #[serde(deserialize_with = "null_is_nan")]
    pub optimizer: f64,
}

/// The memory of one rank in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRow {
    /// Parameters or their shards.
    pub parameters: u64,
    /// Accumulated gradients.
    pub gradients: u64,
    /// Optimizer states.
    pub optimizer: u64,
    /// The peak of gathered parameters during the step.
    pub gathered_peak: u64,
    /// The peak of activations during the step.
    pub activations_peak: u64,
    /// The peak of the total device memory during the step.
    #[serde(default)]
    pub device_peak: u64,
    /// The peak of memory offloaded to the host during the step.
    #[serde(default)]
    pub host_peak: u64,
    /// The peak of memory offloaded to NVMe during the step.
    #[serde(default)]
    pub disk_peak: u64,
    /// The resident set size of the process.
    pub rss: u64,
}

/// An evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalRow {
    /// The number of optimizer steps before the evaluation.
    pub step: u64,
    /// The mean loss over the evaluation data.
    #[serde(deserialize_with = "null_is_nan")]
    pub eval_loss: f64,
    /// The accuracy from 0 to 1; `None` for a task without classes. With several labels, all labels
    /// of a text have to be right.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_accuracy: Option<f64>,
    /// The micro-averaged F1 score from 0 to 1; `None` for a task without several labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_f1: Option<f64>,
    /// The mean absolute error; `None` for a task other than regression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_mae: Option<f64>,
    /// The fraction of tokens that are the model's most likely ones, from 0 to 1; `None` for a task
    /// other than the next token.
    #[serde(default, rename = "eval_mean_token_accuracy", skip_serializing_if = "Option::is_none")]
    pub token_accuracy: Option<f64>,
    /// The mean reward of the better completions; `None` for a task without preferences.
    #[serde(default, rename = "eval_rewards/chosen", skip_serializing_if = "Option::is_none")]
    pub rewards_chosen: Option<f64>,
    /// The mean reward of the worse completions.
    #[serde(default, rename = "eval_rewards/rejected", skip_serializing_if = "Option::is_none")]
    pub rewards_rejected: Option<f64>,
    /// The mean difference of both rewards.
    #[serde(default, rename = "eval_rewards/margins", skip_serializing_if = "Option::is_none")]
    pub rewards_margins: Option<f64>,
    /// The share of pairs whose better completion has the larger reward.
    #[serde(default, rename = "eval_rewards/accuracies", skip_serializing_if = "Option::is_none")]
    pub rewards_accuracies: Option<f64>,
}

/// The quality of a model besides its loss. The fields of an [`EvalRow`] determine the kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quality {
    /// exp(loss), for tasks without another metric.
    Perplexity(f64),
    /// Tokens that follow a text.
    Tokens {
        /// exp(loss).
        perplexity: f64,
        /// The fraction of tokens that are the most likely ones, from 0 to 1.
        accuracy: f64,
    },
    /// The accuracy from 0 to 1.
    Accuracy(f64),
    /// Several labels for each target.
    LabelSets {
        /// The accuracy from 0 to 1.
        accuracy: f64,
        /// The F1 score from 0 to 1.
        f1: f64,
    },
    /// The mean absolute error of a regression.
    MeanAbsoluteError(f64),
    /// Preferences: pairs of completions of which one is better.
    Preferences {
        /// The share of pairs whose better completion has the larger reward.
        accuracy: f64,
        /// The mean difference of the rewards.
        margin: f64,
    },
}

impl Quality {
    /// Returns the quality of a model with these metrics.
    pub fn of(loss: f64, accuracy: Option<f64>, f1: Option<f64>, mae: Option<f64>) -> Self {
        match (accuracy, f1, mae) {
            // A regression has no classes, whatever else is known.
            (_, _, Some(mae)) => Self::MeanAbsoluteError(mae),
            (Some(accuracy), Some(f1), None) => Self::LabelSets { accuracy, f1 },
            (Some(accuracy), None, None) => Self::Accuracy(accuracy),
            (None, _, None) => Self::Perplexity(loss.exp()),
        }
    }

    /// Returns the name and the value of each metric, for people.
    pub fn figures(self) -> Vec<(&'static str, String)> {
        match self {
            Self::Perplexity(value) => vec![("perplexity", format!("{value:.2}"))],
            Self::Tokens { perplexity, accuracy } => vec![
                ("perplexity", format!("{perplexity:.2}")),
                ("token accuracy", percent(accuracy)),
            ],
            Self::Accuracy(share) => vec![("accuracy", percent(share))],
            Self::LabelSets { accuracy, f1 } => {
                vec![("accuracy", percent(accuracy)), ("F1", percent(f1))]
            }
            Self::MeanAbsoluteError(error) => {
                vec![("mean absolute error", format!("{error:.4}"))]
            }
            Self::Preferences { accuracy, margin } => {
                vec![("right pairs", percent(accuracy)), ("reward margin", format!("{margin:.4}"))]
            }
        }
    }
}

impl EvalRow {
    /// Returns the quality of the model besides its loss.
    pub fn quality(&self) -> Quality {
        // Tasks with metrics of their own come first, because the others are recognized by what is
        // missing.
        if let (Some(accuracy), Some(margin)) = (self.rewards_accuracies, self.rewards_margins) {
            return Quality::Preferences { accuracy, margin };
        }
        if let Some(accuracy) = self.token_accuracy {
            return Quality::Tokens { perplexity: self.eval_loss.exp(), accuracy };
        }
        Quality::of(self.eval_loss, self.eval_accuracy, self.eval_f1, self.eval_mae)
    }
}

/// A line of `metrics.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub enum MetricsRow {
    /// An optimizer step.
    Step(StepRow),
    /// An evaluation.
    Eval(EvalRow),
}

/// Writes `metrics.jsonl`.
pub type MetricsWriter = RowsWriter<MetricsRow>;

impl MetricsRow {
    /// Returns the step of the row.
    pub fn step(&self) -> u64 {
        match self {
            Self::Step(row) => row.step,
            Self::Eval(row) => row.step,
        }
    }
}

impl JsonRow for MetricsRow {
    fn step(&self) -> u64 {
        self.step()
    }
}

impl<'de> Deserialize<'de> for MetricsRow {
    /// The field `eval_loss` decides the kind first, so that a wrong field is reported for the
    /// right kind.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let row = match value.get("eval_loss") {
            Some(_) => EvalRow::deserialize(value).map(Self::Eval),
            None => StepRow::deserialize(value).map(Self::Step),
        };
        row.map_err(D::Error::custom)
    }
}

impl From<StepRow> for MetricsRow {
    fn from(row: StepRow) -> Self {
        Self::Step(row)
    }
}

impl From<EvalRow> for MetricsRow {
    fn from(row: EvalRow) -> Self {
        Self::Eval(row)
    }
}

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Reads all rows in file order.
///
/// # Errors
/// Returns an error if the file cannot be read, or if a complete line is not a row.
pub fn read_metrics(path: &Path) -> Result<Vec<MetricsRow>, MetricsError> {
    read_rows(path)
}

/// Separates steps and evaluations.
pub(crate) fn split(rows: &[MetricsRow]) -> (Vec<StepRow>, Vec<EvalRow>) {
    let (mut steps, mut evals) = (Vec::new(), Vec::new());
    for row in rows {
        match row {
            MetricsRow::Step(row) => steps.push(*row),
            MetricsRow::Eval(row) => evals.push(*row),
        }
    }
    (steps, evals)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;
    use proptest::prelude::*;

    fn step_row(step: u64) -> StepRow {
        StepRow {
            step,
            loss: 2.5,
            lr: 1e-4,
            grad_norm: Some(0.75),
            loss_scale: 65536.0,
            skipped: false,
            tokens: 1024,
            step_seconds: 0.5,
            tokens_per_second: 2048.0,
            memory: MemoryRow {
                parameters: 1,
                gradients: 2,
                optimizer: 3,
                gathered_peak: 4,
                activations_peak: 5,
                device_peak: 6,
                host_peak: 7,
                disk_peak: 8,
                rss: 9,
            },
            seconds: None,
            ..StepRow::default()
        }
    }

    fn written(rows: &[MetricsRow]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        for row in rows {
            writer.write(*row).unwrap();
        }
        (folder, path)
    }

    #[test]
    fn lines_have_the_documented_fields() {
        let (_folder, path) = written(&[
            step_row(1).into(),
            EvalRow { step: 1, eval_loss: 2.25, ..EvalRow::default() }.into(),
            EvalRow { step: 1, eval_loss: 2.25, eval_accuracy: Some(0.5), ..EvalRow::default() }
                .into(),
            EvalRow {
                step: 1,
                eval_loss: 2.25,
                eval_accuracy: Some(0.5),
                eval_f1: Some(0.75),
                ..EvalRow::default()
            }
            .into(),
            EvalRow { step: 1, eval_loss: 2.25, eval_mae: Some(0.5), ..EvalRow::default() }.into(),
        ]);
        assert_eq!(
            fs::read_to_string(path).unwrap(),
            concat!(
                r#"{"step":1,"loss":2.5,"lr":0.0001,"grad_norm":0.75,"loss_scale":65536.0,"#,
                r#""skipped":false,"tokens":1024,"step_seconds":0.5,"tokens_per_second":2048.0,"#,
                r#""memory":{"parameters":1,"gradients":2,"optimizer":3,"gathered_peak":4,"#,
                r#""activations_peak":5,"device_peak":6,"host_peak":7,"disk_peak":8,"rss":9}}"#,
                "\n",
                r#"{"step":1,"eval_loss":2.25}"#,
                "\n",
                r#"{"step":1,"eval_loss":2.25,"eval_accuracy":0.5}"#,
                "\n",
                r#"{"step":1,"eval_loss":2.25,"eval_accuracy":0.5,"eval_f1":0.75}"#,
                "\n",
                r#"{"step":1,"eval_loss":2.25,"eval_mae":0.5}"#,
                "\n",
            )
        );
    }

    #[test]
    fn phases_are_written_where_they_were_measured() {
        let seconds = PhaseSeconds { data: 0.5, forward: 1.0, backward: 2.0, optimizer: f64::NAN };
        let (_folder, path) = written(&[StepRow { seconds: Some(seconds), ..step_row(1) }.into()]);
        let text = fs::read_to_string(&path).unwrap();
        let written = r#""seconds":{"data":0.5,"forward":1.0,"backward":2.0,"optimizer":null}}"#;
        assert!(text.trim_end().ends_with(written), "{text}");
        let [MetricsRow::Step(read)] = read_metrics(&path).unwrap()[..] else {
            panic!("one step row")
        };
        let read = read.seconds.unwrap();
        assert!(read.backward == 2.0 && read.optimizer.is_nan());
    }

    #[test]
    fn what_is_not_finite_is_null_and_comes_back_as_nan() {
        let row = StepRow {
            loss: f64::NAN,
            lr: f64::INFINITY,
            grad_norm: Some(f64::NEG_INFINITY),
            skipped: true,
            ..step_row(7)
        };
        let (_folder, path) = written(&[row.into()]);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(r#""loss":null,"lr":null,"grad_norm":null"#), "{text}");
        let [MetricsRow::Step(read)] = read_metrics(&path).unwrap()[..] else {
            panic!("one step row")
        };
        assert!(read.loss.is_nan() && read.lr.is_nan() && read.skipped);
        assert_eq!(read.grad_norm, None);
    }

    #[test]
    fn every_line_is_there_when_its_call_returns() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), []);
        for step in 1..=3 {
            writer.write(step_row(step)).unwrap();
            assert_eq!(read_metrics(&path).unwrap().len(), step as usize);
        }
    }

    #[test]
    fn half_a_last_line_is_dropped_and_resuming_mends_it() {
        let (_folder, path) = written(&[step_row(1).into(), step_row(2).into()]);
        let mut text = fs::read_to_string(&path).unwrap();
        text.truncate(text.len() - 20);
        fs::write(&path, text).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), [step_row(1).into()]);
        MetricsWriter::resume(&path, 5).unwrap().write(step_row(2)).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), [step_row(1).into(), step_row(2).into()]);
    }

    #[test]
    fn resuming_drops_what_will_be_made_again() {
        let eval = |step| MetricsRow::from(EvalRow { step, eval_loss: 1.0, ..EvalRow::default() });
        let (folder, path) = written(&[
            step_row(1).into(),
            step_row(2).into(),
            eval(2),
            step_row(3).into(),
            eval(3),
        ]);
        MetricsWriter::resume(&path, 2).unwrap().write(step_row(3)).unwrap();
        let rows = read_metrics(&path).unwrap();
        assert_eq!(rows, [step_row(1).into(), step_row(2).into(), eval(2), step_row(3).into()]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no partial file is left");
        let fresh = folder.path().join("other.jsonl");
        MetricsWriter::resume(&fresh, 0).unwrap().write(step_row(1)).unwrap();
        assert_eq!(read_metrics(&fresh).unwrap().len(), 1);
    }

    #[test]
    fn errors_name_file_and_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let good = r#"{"step":1,"eval_loss":2.25}"#;
        for bad in
            ["{}", "[1]", "{", r#"{"step":-1,"eval_loss":1}"#, r#"{"step":1,"eval_loss":"x"}"#]
        {
            fs::write(&path, format!("{good}\n{bad}\n")).unwrap();
            let message = read_metrics(&path).unwrap_err().to_string();
            assert!(message.contains("metrics.jsonl`, line 2: "), "{message}");
        }
        fs::write(&path, b"\xff\xfe\n").unwrap();
        assert!(read_metrics(&path).unwrap_err().to_string().contains("cannot read"));
        let message = MetricsWriter::create(&folder.path().join("no/m.jsonl")).unwrap_err();
        assert!(message.to_string().contains("no/m.jsonl"), "{message}");
    }

    proptest! {
        #[test]
        fn rows_come_back(
            step in any::<u64>(), loss in any::<f64>(), norm in any::<f32>(), rss in any::<u64>(),
        ) {
            prop_assume!(loss.is_finite() && norm.is_finite());
            let memory = MemoryRow { rss, ..MemoryRow::default() };
            let row = StepRow { loss, grad_norm: Some(norm.into()), memory, ..step_row(step) };
            let line = serde_json::to_string(&MetricsRow::from(row)).unwrap();
            let MetricsRow::Step(read) = serde_json::from_str(&line).unwrap() else { panic!("a step row") };
            // The JSON parser may round the last bits of a double, but never of a float.
            prop_assert!((read.loss - loss).abs() <= 1e-14 * loss.abs() + f64::MIN_POSITIVE);
            prop_assert_eq!(read.grad_norm.map(|norm| norm as f32), Some(norm));
            prop_assert_eq!((read.step, read.memory), (step, memory));
        }

        #[test]
        fn no_line_panics(line in ".{0,80}") {
            let _ = serde_json::from_str::<MetricsRow>(&line);
        }
    }
}
