//! A run that is ready to start: its job, the checkpoint it resumes from, and its memory forecast.
//!
//! Main type: [`PreparedRun`]. All inputs have been read and checked, and no output has been written. If ranks are
//! processes, each of them prepares the same run.

use deepburn::Ranks;
use deepburn_config::JobRequest;

use crate::failure::Failure;
use crate::run::forecast::RunForecast;
use crate::run::monitoring::check_monitors;
use crate::run::preparation::{Preparation, prepare};
use crate::run::resume::{self, Origin};

/// A prepared run. The ranks of a process share it.
pub(super) struct PreparedRun {
    /// Job, plan, model and data.
    pub(super) preparation: Preparation,
    /// The checkpoint that the run resumes from.
    pub(super) origin: Option<Origin>,
    /// The memory that the run will need.
    pub(super) forecast: RunForecast,
}

impl PreparedRun {
    /// Resolves the job, reads its data, finds the checkpoint to resume from and predicts the memory of the run.
    /// `resume` is the option `--resume` with its optional value.
    ///
    /// # Errors
    /// Returns a user's mistake. No output has been written then.
    pub(super) fn new(
        request: &JobRequest,
        resume: Option<&Option<String>>,
        ranks: &Ranks,
    ) -> Result<Self, Failure> {
        let mut selected = None;
        let mut preparation = prepare(request, |job, plan| {
            selected = resume::select(job, resume)?;
            check_monitors(&job.training.output_dir, &plan.monitor, &request.config)?;
            Ok(selected.as_ref().and_then(resume::Selected::progress))
        })?;
        let origin = selected.map(|it| it.checked(&preparation)).transpose()?;
        let forecast = RunForecast::new(&preparation, ranks)?;
        preparation.record["memory_forecast"] = forecast.record();
        Ok(Self { preparation, origin, forecast })
    }
}
