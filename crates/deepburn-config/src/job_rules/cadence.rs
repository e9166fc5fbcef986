//! How often a job evaluates and saves: `eval_strategy`, `eval_steps`, `save_strategy` and
//! `save_steps`.

use super::*;
use crate::job_plan::Cadence;
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

    /// Checks that limits on checkpoints have checkpoints and evaluations to apply to.
    pub(crate) fn check_saving(&mut self, training: &TrainingJob) {
        let saves = training.save_steps.is_some() || training.load_best_model_at_end;
        let limits = training.save_total_limit.is_some();
        let best = training.save_best_limit.is_some();
        for (key, is_given) in [("save_total_limit", limits), ("async_save", training.async_save)] {
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
