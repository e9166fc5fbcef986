//! The W&B offline run of a job, which rank 0 writes if `wandb.enabled` or `training.report_to`
//! asks for it.
//!
//! Main type: [`WandbRecord`]. A hook and the rank share it: the hook writes a row for each step,
//! and the rank adds the result of the test and the exit status. At the end, users see the command
//! that uploads the run. Training never uses the network for it.
//!
//! As with other monitors, a full disk does not end a run. Rows wait in memory until there is room.

use std::cell::RefCell;
use std::rc::Rc;

use deepburn::metrics::{EvalRow, StepRow};
use deepburn::{BoxError, Hook};
use deepburn_config::WandbPlan;
use deepburn_launch::quoted;
use deepburn_monitor::{MonitorError, WandbOptions, WandbRun};

use crate::console;
use crate::run::full_disk::FullDisk;
use crate::run::prepared::PreparedRun;
use crate::run::resume::ResumedCheckpoint;

/// A run that its hook and the rank share. Both are used on the thread of the rank.
type SharedRun = Rc<RefCell<WandbRun>>;

/// The warning on a full disk.
const WAITING: &str = "training continues, and rows of the W&B run wait until there is room";

/// The W&B run of a job. If it is dropped without [`finish`](Self::finish), the run is recorded as
/// failed.
pub(super) struct WandbRecord {
    /// Writes the run.
    run: SharedRun,
    /// The exit status that is written when this is dropped.
    status: u8,
}

impl WandbRecord {
    /// Creates the run, or returns `None` if the job does not ask for one.
    ///
    /// A run that resumes from its own checkpoint continues its W&B run. A run that resumes from a
    /// DeepSpeed checkpoint is a new one.
    ///
    /// # Errors
    /// Returns an error if a file cannot be created, or if files of the earlier run cannot be read
    /// or shortened.
    pub(super) fn create(run: &PreparedRun) -> Result<Option<Self>, BoxError> {
        let PreparedRun { preparation, checkpoint, .. } = run;
        let Some(WandbPlan { project, group, team }) = &preparation.plan.outputs.monitor.wandb
        else {
            return Ok(None);
        };
        let output = &preparation.job.training.output_dir;
        let options = WandbOptions {
            project: project.clone(),
            team: team.clone(),
            group: group.clone(),
            // As in transformers, where the name of a run is its output folder by default.
            name: output.file_name().unwrap_or(output.as_os_str()).to_string_lossy().into_owned(),
            producer: concat!("deepburn-", env!("CARGO_PKG_VERSION")).to_owned(),
            config: preparation.record.clone(),
            loss_scale: preparation.plan.precision.uses_fp16(),
            resumed_after: checkpoint.as_ref().map_or(0, ResumedCheckpoint::step),
            continues: matches!(checkpoint, Some(ResumedCheckpoint::Own(_))),
        };
        let run = WandbRun::create(&output.join(WandbPlan::FOLDER), &options)?;
        if run.repeats_uploaded_steps() {
            tracing::warn!(
                "the run resumes before steps that are uploaded to W&B already; W&B keeps their rows next to the new ones"
            );
        }
        Ok(Some(Self { run: Rc::new(RefCell::new(run)), status: 1 }))
    }

    /// Returns the hook that writes the rows.
    pub(super) fn hook(&self) -> Box<dyn Hook> {
        Box::new(WandbHook { run: self.run.clone(), disk: FullDisk::default() })
    }

    /// Adds the result on the test split.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, unless the disk is full.
    pub(super) fn test(&self, row: &EvalRow) -> Result<(), BoxError> {
        let written = self.run.borrow_mut().test(row);
        FullDisk::default().handle(written, MonitorError::is_disk_full, WAITING)
    }

    /// Writes the exit status of the process, and prints the command that uploads the run.
    pub(super) fn finish(mut self, status: u8) {
        // `drop` follows.
        self.status = status;
    }
}

impl Drop for WandbRecord {
    /// Writes the exit status. A failure is a warning, because the results of the run are saved.
    fn drop(&mut self) {
        let mut run = self.run.borrow_mut();
        if let Err(error) = run.finish(i32::from(self.status)) {
            tracing::warn!("the W&B run lacks its last rows and its exit status: {error}");
        }
        let folder = run.upload_folder().display().to_string();
        let words = ["wandb".to_owned(), "sync".to_owned(), folder];
        console::eprint(&format!("to upload the W&B run, type: {}", quoted(&words)));
    }
}

/// Writes a row of the W&B run for each step, with the evaluation after it.
struct WandbHook {
    /// Writes the run, and keeps rows that could not be written.
    run: SharedRun,
    /// State of the warning.
    disk: FullDisk,
}

impl Hook for WandbHook {
    /// Begins the row of the step.
    fn after_step(&mut self, row: &StepRow, samples: u64) -> Result<(), BoxError> {
        let written = self.run.borrow_mut().step(samples, row);
        self.disk.handle(written, MonitorError::is_disk_full, WAITING)
    }

    /// Adds the evaluation to the row of its step.
    fn after_evaluation(&mut self, row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        let written = self.run.borrow_mut().evaluation(row);
        self.disk.handle(written, MonitorError::is_disk_full, WAITING)
    }
}
