//! A run that is ready to start: its job, the checkpoint it resumes from, and its memory forecast.
//!
//! Main type: [`PreparedRun`]. All inputs have been read and checked, and no output has been
//! written. If ranks are processes, each of them prepares the same run.

use deepburn::{PipelineLayout, Ranks};
use deepburn_config::{DataKind, Job, JobRequest};

use crate::failure::Failure;
use crate::run::forecast::{RunForecast, largest_batch};
use crate::run::launcher_env::restarts;
use crate::run::monitoring::check_monitors;
use crate::run::output_folder::refuse_running;
use crate::run::preparation::{Preparation, Resumed, prepare};
use crate::run::resume::{self, ResumedCheckpoint};

/// What a run does with the model of its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Train it. The option `--resume`, with its optional value, names a checkpoint.
    Train {
        /// The checkpoint to resume from.
        resume: Option<Option<String>>,
    },
    /// Evaluate it on the eval and test splits.
    Evaluate,
}

/// A prepared run. The ranks of a process share it.
pub(super) struct PreparedRun {
    /// Training or evaluation.
    pub(super) purpose: Purpose,
    /// Job, plan, model and data.
    pub(super) preparation: Preparation,
    /// The checkpoint that the run resumes from.
    pub(super) checkpoint: Option<ResumedCheckpoint>,
    /// The pipeline stages of the model; `None` without a pipeline.
    pub(super) layout: Option<PipelineLayout>,
    /// The memory that the run will need.
    pub(super) forecast: RunForecast,
}

impl PreparedRun {
    /// Resolves the job, reads its data, finds the checkpoint to resume from and predicts the
    /// memory of the run.
    ///
    /// # Errors
    /// Returns a user's mistake. No output has been written then.
    pub(super) fn new(
        request: &JobRequest,
        purpose: Purpose,
        ranks: &Ranks,
    ) -> Result<Self, Failure> {
        // Selected in the middle of the preparation: the job has to be known, and the data depends
        // on it.
        let mut selected = None;
        let mut preparation = prepare(request, |job, plan| {
            match &purpose {
                Purpose::Train { resume } => selected = resume::select(job, resume.as_ref())?,
                Purpose::Evaluate => check_evaluation(job)?,
            }
            // The paths of monitors are checked before the data is read.
            check_monitors(&job.training.output_dir, &plan.outputs.monitor, &request.config)?;
            selected.as_ref().map_or(Ok(Resumed::default()), resume::Selected::resumed)
        })?;
        let checkpoint = selected.map(|it| it.checked(&preparation)).transpose()?;
        let layout = pipeline_layout(&preparation)?;
        let forecast = RunForecast::new(&preparation, ranks)?;
        preparation.record["memory_forecast"] = forecast.record();
        Ok(Self { purpose, preparation, checkpoint, layout, forecast })
    }
}

/// Divides the model into the pipeline stages of the plan; `None` without a pipeline.
///
/// # Errors
/// Returns a user's mistake if the model cannot be divided into so many stages.
fn pipeline_layout(preparation: &Preparation) -> Result<Option<PipelineLayout>, Failure> {
    let Preparation { plan, subject, .. } = preparation;
    if plan.pipeline.is_none() {
        return Ok(None);
    }
    if plan.outputs.monitor.flops.is_some() {
        return Err(Failure::mistake(
            "deepspeed.flops_profiler.enabled: a pipeline stage counts its own operations only, and the profile would be of \
             the first stage; set it to false, or train with one stage",
        ));
    }
    let layout = subject.pipeline_layout(plan, largest_batch(preparation));
    layout.map(Some).map_err(|error| Failure::mistake(error.to_string()))
}

/// Checks that a job can be evaluated without training: it has data for it, and its output folder
/// has no run, whose metrics an evaluation would replace.
///
/// # Errors
/// Returns a user's mistake.
fn check_evaluation(job: &Job) -> Result<(), Failure> {
    let (output, splits) = (&job.training.output_dir, &job.data.splits);
    refuse_running(output)?;
    if job.model.pretrained.is_none() {
        return Err(Failure::mistake(
            "--evaluate: the job has no trained model, and random weights would be measured; set model.pretrained to a \
             model or to the folder of a run",
        ));
    }
    if job.model.lora.is_some() {
        return Err(Failure::mistake(
            "--evaluate: model.lora is a new adapter, which changes nothing yet; give a trained one as model.adapter, or set \
             model.lora to null",
        ));
    }
    if matches!(job.data.kind, DataKind::Preference(_)) {
        return Err(Failure::mistake(
            "--evaluate: is not supported for data of kind \"preference\": a model is compared with the one at the start of \
             its training, and this run trains nothing; the rows of a training run have its evaluations",
        ));
    }
    if !splits.has_eval() && !splits.has_test() {
        return Err(Failure::mistake(
            "--evaluate: the job has neither an eval nor a test split; set data.splits.eval or data.splits.test",
        ));
    }
    let record = output.join("job.json");
    if record.exists() && restarts() == 0 {
        return Err(Failure::mistake(format!(
            "--evaluate: {} is from an earlier run, whose metrics would be replaced; give another folder with --output-dir",
            record.display()
        )));
    }
    Ok(())
}
