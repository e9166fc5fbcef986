//! The model that a training run ends with.
//!
//! Main types: [`TrainingEnd`] and [`FinalModel`]. With `load_best_model_at_end`, the weights of
//! the best model replace the weights of the last step. A run that has taken all its steps is never
//! lost: if the best checkpoint is missing or damaged, the model of the last step is kept, and a
//! warning names both models.
//!
//! All ranks verify the checkpoint before any of them changes its weights, and exchange the
//! results. Either all ranks load the best model, or all of them keep the last one.

use std::path::Path;

use burn::module::AutodiffModule;
use deepburn_checkpoint::{Checkpoint, CheckpointError, Tag};
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use tracing::warn;

use crate::best::BestEvaluation;
use crate::checkpoint::{LoadPlan, TrainingCheckpointError};
use crate::{Cause, Engine};

/// The model that the engine has at the end of a run.
#[derive(Debug, Clone, PartialEq)]
pub enum FinalModel {
    /// The model of the last step.
    Last,
    /// The model of the best evaluation ([`BestPlan::load_at_end`](crate::BestPlan::load_at_end)).
    Best,
    /// The model of the last step, because the best model cannot be loaded: its checkpoint could
    /// not be saved, was deleted, or is damaged.
    LastInsteadOfBest {
        /// The metric of the last model ([`BestMetric::of`](crate::BestMetric::of)); `None` if it
        /// was not evaluated.
        metric: Option<f64>,
        /// The error of this rank, or of the lowest rank that failed.
        reason: String,
    },
}

/// How a run ended that has taken all its steps or was stopped early.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingEnd {
    /// The last step.
    pub step: u64,
    /// The best evaluation.
    pub best: Option<BestEvaluation>,
    /// The model that the engine has.
    pub model: FinalModel,
    /// The reason why the evaluation after the last step failed: a rank cannot read its data. The
    /// same on all ranks. The model is complete, but was not evaluated.
    pub failed_evaluation: Option<String>,
}

/// Loads the weights of the `best` model into `engine`. All ranks call this together. `root` is the
/// folder of checkpoints, if there is one, and `last_metric` the metric of the last model, if it
/// was evaluated.
///
/// The optimizer states are not loaded, because training is over.
///
/// # Errors
/// Returns an error if a collective fails, or if a verified file can no longer be read.
pub(crate) fn load_best<B, M>(
    engine: &mut Engine<B, M>,
    best: &BestEvaluation,
    root: Option<&Path>,
    last_metric: Option<f64>,
) -> Result<FinalModel, Cause>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
{
    let (step, last) = (best.step, engine.global_steps());
    let checkpoint;
    let found = match root.map(|root| best.checkpoint(root)) {
        Some(Ok(Some(found))) => {
            checkpoint = found;
            Ok(&checkpoint)
        }
        Some(Err(error)) => Err(error.into()),
        Some(Ok(None)) => Err(unlisted(root, step)),
        None => Err(no_checkpoint(root, "the run has no checkpoint plan".to_owned())),
    };
    // A rank that found no checkpoint takes part too, because others may have found one and wait in
    // the exchange.
    let error = match engine.check_together(found, LoadPlan::ModuleOnly) {
        Ok(checked) => {
            let adopted = engine.adopt_checked(&checked);
            adopted.map_err(|error| Cause::Outside(error.into()))?;
            return Ok(FinalModel::Best);
        }
        Err(TrainingCheckpointError::Engine(error)) => return Err(error.into()),
        Err(error) => error,
    };
    if step == last {
        // The last model is the best one, so no weights have to be loaded.
        return Ok(FinalModel::Best);
    }
    if engine.rank() == 0 {
        warn!(
            "load_best_model_at_end: the best model, of step {step}, cannot be loaded ({error}); \
             the model of the last step, {last}, is kept instead"
        );
    }
    Ok(FinalModel::LastInsteadOfBest { metric: last_metric, reason: error.to_string() })
}

/// Returns the error for a best model, of `step`, that is not among the checkpoints in `root`. It
/// names the file if the manifest is damaged.
fn unlisted(root: Option<&Path>, step: u64) -> TrainingCheckpointError {
    match root.map(|root| Checkpoint::open(root, Some(&Tag::of_step(step)))) {
        Some(Err(error @ CheckpointError::Damaged { .. })) => error.into(),
        _ => {
            let reason = format!("the one of step {step} could not be saved or was deleted");
            no_checkpoint(root, reason)
        }
    }
}

/// Returns the error for a best model without a checkpoint.
fn no_checkpoint(root: Option<&Path>, reason: String) -> TrainingCheckpointError {
    let path = root.unwrap_or(Path::new("checkpoints")).to_owned();
    CheckpointError::Missing { path, reason }.into()
}
