//! Writes the metrics of a run for other programs while it trains.
//!
//! Main type: [`Monitors`], which writes TensorBoard event files, DeepSpeed's CSV files, or both.
//! The tags and the horizontal axis (the number of training samples) are the same as in DeepSpeed,
//! so that runs of both programs can be compared. As in DeepSpeed, the loss scale is only written
//! in fp16.

use crate::csv::CsvFiles;
use crate::error::MonitorError;
use crate::metrics::{EvalRow, StepRow};
use crate::tensorboard::EventWriter;
use std::path::PathBuf;

/// The output folders and options of the monitors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MonitorFolders {
    /// The folder of event files; `None` writes none.
    pub tensorboard: Option<PathBuf>,
    /// The folder of CSV files; `None` writes none.
    pub csv: Option<PathBuf>,
    /// Whether the loss scale is written (in fp16).
    pub loss_scale: bool,
    /// The number of samples after which a run resumes. CSV files keep earlier lines.
    pub resumed_after: u64,
}

/// The monitors of a run.
#[derive(Debug)]
pub struct Monitors {
    tensorboard: Option<EventWriter>,
    csv: Option<CsvFiles>,
    loss_scale: bool,
}

impl Monitors {
    /// Creates the folders and the event file.
    ///
    /// # Errors
    /// Returns an error if one of them cannot be created.
    pub fn create(folders: &MonitorFolders) -> Result<Self, MonitorError> {
        let MonitorFolders { tensorboard, csv, loss_scale, resumed_after } = folders;
        Ok(Self {
            tensorboard: tensorboard.as_deref().map(EventWriter::create).transpose()?,
            csv: csv
                .as_deref()
                .map(|folder| CsvFiles::create(folder, *resumed_after))
                .transpose()?,
            loss_scale: *loss_scale,
        })
    }

    /// Writes a step that ended after `samples` training samples over all ranks.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn step(&mut self, samples: u64, row: &StepRow) -> Result<(), MonitorError> {
        // In other precisions it is always 1, and DeepSpeed does not write it.
        let loss_scale = self.loss_scale.then_some(row.loss_scale);
        self.scalars(
            samples,
            &[
                ("Train/Samples/train_loss", Some(row.loss)),
                ("Train/Samples/lr", Some(row.lr)),
                ("Train/Samples/loss_scale", loss_scale),
                // Before clipping. DeepSpeed does not record it.
                ("Train/Samples/grad_norm", row.grad_norm),
                ("Train/Samples/rewards_accuracies", row.rewards_accuracies),
                ("Train/Samples/rewards_margins", row.rewards_margins),
            ],
        )
    }

    /// Writes an evaluation after `samples` training samples over all ranks.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn evaluation(&mut self, samples: u64, row: &EvalRow) -> Result<(), MonitorError> {
        self.scalars(
            samples,
            &[
                // With DeepSpeed, the training script records it.
                ("Eval/Samples/eval_loss", Some(row.eval_loss)),
                ("Eval/Samples/eval_accuracy", row.eval_accuracy),
                ("Eval/Samples/eval_f1", row.eval_f1),
                ("Eval/Samples/eval_mae", row.eval_mae),
                ("Eval/Samples/eval_mean_token_accuracy", row.token_accuracy),
                ("Eval/Samples/eval_rewards_accuracies", row.rewards_accuracies),
                ("Eval/Samples/eval_rewards_margins", row.rewards_margins),
            ],
        )
    }

    /// Writes the values that a row has, with their tags.
    fn scalars(
        &mut self,
        samples: u64,
        values: &[(&str, Option<f64>)],
    ) -> Result<(), MonitorError> {
        for (tag, value) in values {
            let Some(value) = *value else { continue };
            if let Some(events) = &mut self.tensorboard {
                events.scalar(tag, samples, value)?;
            }
            if let Some(files) = &mut self.csv {
                files.scalar(tag, samples, value)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::metrics::MemoryRow;
    use std::fs;

    fn step(step: u64) -> StepRow {
        StepRow {
            step,
            loss: 2.5 / step as f64,
            lr: 1e-4,
            grad_norm: (step != 2).then_some(0.75),
            loss_scale: 65536.0,
            skipped: step == 2,
            tokens: 1024,
            step_seconds: 0.5,
            tokens_per_second: 2048.0,
            memory: MemoryRow::default(),
            seconds: None,
            ..StepRow::default()
        }
    }

    fn files_of(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn curves_are_deepspeed_s_over_samples() {
        let folder = tempfile::tempdir().unwrap();
        for loss_scale in [false, true] {
            let csv = folder.path().join(format!("csv-{loss_scale}"));
            let folders =
                MonitorFolders { csv: Some(csv.clone()), loss_scale, ..MonitorFolders::default() };
            let mut monitors = Monitors::create(&folders).unwrap();
            monitors.step(32, &step(1)).unwrap();
            monitors.step(64, &step(2)).unwrap();
            monitors.step(96, &step(3)).unwrap();
            let row = EvalRow {
                step: 3,
                eval_loss: 1.5,
                eval_accuracy: Some(0.5),
                eval_f1: Some(0.25),
                eval_mae: None,
                ..EvalRow::default()
            };
            monitors.evaluation(96, &row).unwrap();
            let mut expected = vec![
                "Eval_Samples_eval_accuracy.csv",
                "Eval_Samples_eval_f1.csv",
                "Eval_Samples_eval_loss.csv",
                "Train_Samples_grad_norm.csv",
                "Train_Samples_loss_scale.csv",
                "Train_Samples_lr.csv",
                "Train_Samples_train_loss.csv",
            ];
            expected.retain(|name| loss_scale || !name.contains("loss_scale"));
            assert_eq!(files_of(&csv), expected);
            let read = |name: &str| fs::read_to_string(csv.join(name)).unwrap();
            assert_eq!(
                read("Train_Samples_train_loss.csv"),
                "step,train_loss\n32,2.5\n64,1.25\n96,0.8333333333333334\n"
            );
            assert_eq!(read("Train_Samples_grad_norm.csv"), "step,grad_norm\n32,0.75\n96,0.75\n");
            assert_eq!(read("Eval_Samples_eval_accuracy.csv"), "step,eval_accuracy\n96,0.5\n");
            assert_eq!(read("Eval_Samples_eval_f1.csv"), "step,eval_f1\n96,0.25\n");
        }
    }

    #[test]
    fn every_monitor_that_is_wanted_writes_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let folders = MonitorFolders {
            tensorboard: Some(folder.path().join("events/run")),
            csv: Some(folder.path().join("csv/run")),
            ..MonitorFolders::default()
        };
        let mut both = Monitors::create(&folders).unwrap();
        both.step(32, &step(1)).unwrap();
        assert_eq!(files_of(folder.path()), ["csv", "events"]);
        assert_eq!(files_of(&folder.path().join("events/run")).len(), 1);
        assert_eq!(files_of(&folder.path().join("csv/run")).len(), 3);
        let mut none = Monitors::create(&MonitorFolders::default()).unwrap();
        none.step(32, &step(1)).unwrap();
    }
}
