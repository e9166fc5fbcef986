//! How often a job evaluates and saves: `eval_strategy`, `eval_steps`, `save_strategy` and
//! `save_steps`.

use super::*;
use crate::job_plan::{Cadence, SavingPlan};
use crate::step_count::StepCount;

impl JobReader<'_> {
    /// Reads how often the model is evaluated, or saved. Without a strategy, the number of steps
    /// decides.
    pub(crate) fn cadence(
        &mut self,
        strategy: &Setting<'_, Option<&str>>,
        steps: &Setting<'_, Option<StepCount>>,
    ) -> Option<Cadence> {
        let by_steps = steps.value.map(Cadence::Every);
        let Some(name) = strategy.value else { return by_steps };
        warning!(if steps.is_given() && name != "steps"; self.findings, &**steps =>
            "has no effect: {} is \"{name}\"", strategy.path; "remove it, or write \"steps\" there");
        match name {
            "epoch" => Some(Cadence::Epoch),
            "steps" => {
                refuse!(if !steps.is_given(); self.findings, &**strategy =>
                    "is \"steps\", and {} is missing", steps.path; "add the number of steps, 500 for example");
                by_steps
            }
            "best" => {
                refuse!(self.findings, &**strategy => "does not support \"best\"";
                    "write training.load_best_model_at_end true instead, which keeps a checkpoint of the best evaluation");
                None
            }
            _ => None,
        }
    }

    /// Reads the keys about evaluations.
    pub(super) fn evaluation(&mut self, training: &Training<'_>) -> EvaluationPlan {
        filled!(EvaluationPlan, training {
            eval_max_samples, per_device_eval_batch_size, load_best_model_at_end,
            metric_for_best_model, early_stopping_patience, early_stopping_threshold,
        }
            eval_steps: self.cadence(&training.eval_strategy, &training.eval_steps),
            samples: None,
        )
    }

    /// Reads the keys about checkpoints.
    pub(super) fn saving(&mut self, training: &Training<'_>, has_adapter: bool) -> SavingPlan {
        filled!(SavingPlan, training { async_save, save_total_limit, save_best_limit, save_merged }
            save_steps: self.cadence(&training.save_strategy, &training.save_steps),
            checkpoint_scope: match has_adapter && !training.checkpoint_scope.is_given() {
                true => CheckpointScope::Trained,
                false => training.checkpoint_scope.value,
            },
        )
    }

    /// Checks that limits on checkpoints have checkpoints and evaluations to apply to.
    pub(crate) fn check_saving(&mut self, training: &TrainingJob) {
        let saving = &training.saving;
        // The best model is kept as a checkpoint, which the keys apply to as well.
        let saves = saving.save_steps.is_some() || training.evaluation.load_best_model_at_end;
        let limits = saving.save_total_limit.is_some();
        let best = saving.save_best_limit.is_some();
        for (key, is_given) in [("save_total_limit", limits), ("async_save", saving.async_save)] {
            refuse!(if is_given && !saves; self.findings, format!("training.{key}") =>
                "no checkpoints are saved"; "add training.save_steps, or remove it");
        }
        refuse!(if best && !limits; self.findings, "training.save_best_limit" =>
            "all checkpoints are kept"; "add training.save_total_limit, or remove it");
        // Ratios are compared when the number of steps is known.
        refuse!(if best && training.evaluates_checkpoints() == Some(false);
            self.findings, "training.save_best_limit" =>
            "checkpoints are judged by an evaluation in the step that they are saved in";
            "add training.eval_steps, and training.save_steps as a multiple of it");
    }
}
