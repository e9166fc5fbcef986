//! The best model of a run, and early stopping.
//!
//! Main types: [`BestPlan`], the settings, and [`LoopState`], the progress that every checkpoint
//! stores. The rules are the same as in the Trainer of `transformers` (`load_best_model_at_end`,
//! `EarlyStoppingCallback`), with one exception: a checkpoint is saved whenever an evaluation is
//! the best so far. Evaluation and checkpoint intervals therefore need not match.
//!
//! An evaluation without any target counts neither as best nor as one without improvement.
//! Retention never deletes the checkpoint of the best model that has one. Checkpoints of an
//! abandoned branch do not count, because the [`LoopState`] comes from the checkpoint that was
//! resumed. A checkpoint with a pending evaluation has no metric. If it was due, or is the best so
//! far, the resumed run saves the step again after the evaluation.

use std::path::Path;

use deepburn_checkpoint::{Checkpoint, CheckpointError};
use serde::{Deserialize, Serialize};

use crate::metrics::EvalRow;

/// The evaluation metric by which models are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BestMetric {
    /// The evaluation loss; the lowest is best.
    #[default]
    Loss,
    /// The accuracy, from 0 to 1; the highest is best.
    Accuracy,
    /// The F1 score, from 0 to 1; the highest is best.
    F1,
    /// The mean absolute error; the lowest is best.
    Mae,
}

impl BestMetric {
    /// Returns the metric of an evaluation in a form for which the lowest value is best: a loss or
    /// an error, or one minus an accuracy or F1 score.
    ///
    /// Checkpoints store this number as [`Run::metric`](deepburn_checkpoint::Run::metric). Returns
    /// `None` if the task does not have the metric.
    pub fn of(self, row: &EvalRow) -> Option<f64> {
        match self {
            Self::Loss => Some(row.eval_loss),
            Self::Accuracy => row.eval_accuracy.map(|accuracy| 1.0 - accuracy),
            Self::F1 => row.eval_f1.map(|f1| 1.0 - f1),
            Self::Mae => row.eval_mae,
        }
    }
}

/// The conditions of early stopping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EarlyStopping {
    /// Training stops after this many consecutive evaluations without an improvement.
    pub patience: u64,
    /// The smallest improvement that counts, in units of the metric.
    pub threshold: f64,
}

/// Settings for the best model of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BestPlan {
    /// The metric that is compared.
    pub metric: BestMetric,
    /// Whether a checkpoint of the best model is saved and kept, and its weights are loaded at the
    /// end of training.
    pub load_at_end: bool,
    /// The conditions for stopping before `max_steps`; `None` runs all steps.
    pub early_stopping: Option<EarlyStopping>,
    /// A hash of the evaluation data. Evaluations on different data are never compared.
    pub evaluation_data: u64,
}

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    /// The optimizer step after which the evaluation was made.
    pub step: u64,
    /// The value of [`BestMetric::of`].
    pub metric: f64,
    /// The metric that `metric` measures.
    #[serde(default)]
    pub by: BestMetric,
    /// The [`BestPlan::evaluation_data`] of the run that made the evaluation.
    #[serde(default)]
    pub evaluation_data: u64,
}

/// The state of the training loop outside the engine.
///
/// Checkpoints store it, so that a resumed run chooses the same best model and stops at the same
/// step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoopState {
    /// Whether the evaluation after the last step is still due, because the run was interrupted
    /// before it was complete.
    pub evaluation_pending: bool,
    /// Whether the texts after the last evaluation are still due, because the run was interrupted
    /// while the model generated them.
    pub texts_pending: bool,
    /// Whether a checkpoint of the last step is due. It is saved again after the pending
    /// evaluation, because it had no metric before.
    pub save_pending: bool,
    /// `None` before the first evaluation whose metric is a number.
    pub best: Option<BestEvaluation>,
    /// Consecutive evaluations that did not improve by more than the threshold.
    pub evaluations_without_improvement: u64,
}

impl LoopState {
    /// Returns the state with which a run with `plan` resumes. The best evaluation so far is
    /// dropped if the metric or the evaluation data has changed, because the values are not
    /// comparable.
    pub(crate) fn resumed_with(self, plan: &BestPlan) -> Self {
        let is_comparable = |best: BestEvaluation| {
            (best.by, best.evaluation_data) == (plan.metric, plan.evaluation_data)
        };
        match self.best.is_none_or(is_comparable) {
            true => self,
            // The counter of early stopping starts again too, because it counts from the best
            // evaluation.
            false => Self { best: None, evaluations_without_improvement: 0, ..self },
        }
    }

    /// Records an evaluation and returns whether it is the best so far. An evaluation whose metric
    /// is NaN or infinite is never the best.
    ///
    /// As in `transformers`, there are two comparisons: any improvement makes a model the best one,
    /// but only an improvement by more than the threshold resets the early-stopping counter.
    pub(crate) fn record(&mut self, plan: &BestPlan, row: &EvalRow) -> bool {
        self.evaluation_pending = false;
        let Some(metric) = plan.metric.of(row) else { return false };
        let threshold = plan.early_stopping.map_or(0.0, |it| it.threshold);
        let before = self.best.map(|best| best.metric);
        let improves = |by: f64| metric.is_finite() && before.is_none_or(|it| metric < it - by);
        match improves(threshold) {
            true => self.evaluations_without_improvement = 0,
            false => self.evaluations_without_improvement += 1,
        }
        let is_best = improves(0.0);
        if is_best {
            let BestPlan { metric: by, evaluation_data, .. } = *plan;
            self.best = Some(BestEvaluation { step: row.step, metric, by, evaluation_data });
        }
        is_best
    }

    /// Returns true if early stopping ends the run now. A patience of 0 counts as 1.
    pub(crate) fn stops(&self, plan: &BestPlan) -> bool {
        let patience = plan.early_stopping.map(|it| it.patience.max(1));
        patience.is_some_and(|patience| self.evaluations_without_improvement >= patience)
    }
}

impl BestEvaluation {
    /// Returns the checkpoint of this model in the folder `root`, or `None` if there is none.
    ///
    /// An abandoned run may have left another checkpoint of the same step. Its metric differs, or
    /// it has the same weights. Of several checkpoints of this model, the newest intact one is
    /// returned.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn checkpoint(&self, root: &Path) -> Result<Option<Checkpoint>, CheckpointError> {
        let mut found = self.candidates(root)?;
        // If all of them are damaged, the error of the newest one is reported when it is loaded.
        let intact = found.iter().position(|checkpoint| checkpoint.verify().is_ok()).unwrap_or(0);
        Ok((!found.is_empty()).then(|| found.swap_remove(intact)))
    }

    /// Returns true if the folder `root` has a checkpoint of this model. Its files are not
    /// verified.
    pub(crate) fn is_saved(&self, root: &Path) -> bool {
        self.candidates(root).is_ok_and(|found| !found.is_empty())
    }

    /// Returns the checkpoints of this model, the newest first.
    fn candidates(&self, root: &Path) -> Result<Vec<Checkpoint>, CheckpointError> {
        let is_it = |checkpoint: &Checkpoint| {
            let run = checkpoint.run();
            run.step == self.step && run.metric == Some(self.metric)
        };
        Ok(Checkpoint::all(root)?.into_iter().rev().filter(is_it).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64, eval_loss: f64) -> EvalRow {
        EvalRow { step, eval_loss, ..EvalRow::default() }
    }

    fn best(step: u64, metric: f64) -> BestEvaluation {
        BestEvaluation { step, metric, by: BestMetric::Loss, evaluation_data: 0 }
    }

    fn record(plan: &BestPlan, losses: &[f64]) -> (Vec<bool>, LoopState, Option<usize>) {
        let mut state = LoopState::default();
        let mut stopped = None;
        let mut found = Vec::new();
        for (index, loss) in losses.iter().enumerate() {
            found.push(state.record(plan, &row(index as u64 + 1, *loss)));
            stopped = stopped.or(state.stops(plan).then_some(index));
        }
        (found, state, stopped)
    }

    #[test]
    fn the_lowest_value_of_each_metric_is_best() {
        let row = EvalRow { eval_f1: Some(0.75), eval_mae: Some(2.0), ..row(1, 3.0) };
        let metrics = [BestMetric::Loss, BestMetric::Accuracy, BestMetric::F1, BestMetric::Mae];
        assert_eq!(metrics.map(|by| by.of(&row)), [Some(3.0), None, Some(0.25), Some(2.0)]);
    }

    #[test]
    fn the_first_of_equal_losses_is_best() {
        let (found, state, stopped) = record(&BestPlan::default(), &[3.0, 2.0, 2.0, 2.5]);
        assert_eq!(found, [true, true, false, false]);
        assert_eq!(state.best, Some(best(2, 2.0)));
        assert_eq!(stopped, None);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_never_best() {
        let (found, state, _) = record(&BestPlan::default(), &[f64::NAN, f64::INFINITY]);
        assert_eq!((found, state.best), (vec![false, false], None));
        assert_eq!(state.evaluations_without_improvement, 2);
    }

    #[test]
    fn patience_counts_evaluations_in_a_row() {
        let early_stopping = Some(EarlyStopping { patience: 2, threshold: 0.0 });
        let plan = BestPlan { early_stopping, ..BestPlan::default() };
        let (_, state, stopped) = record(&plan, &[3.0, 3.5, 2.5, 2.6, 2.7, 1.0]);
        assert_eq!(stopped, Some(4));
        assert_eq!(state.best.map(|best| best.step), Some(6));
    }

    #[test]
    fn small_gains_do_not_reset_patience_and_still_count_as_best() {
        let early_stopping = Some(EarlyStopping { patience: 2, threshold: 0.5 });
        let plan = BestPlan { early_stopping, ..BestPlan::default() };
        let (found, _, stopped) = record(&plan, &[3.0, 2.9, 2.8]);
        assert_eq!((found, stopped), (vec![true, true, true], Some(2)));
    }

    #[test]
    fn accuracy_is_best_where_it_is_highest() {
        let plan = BestPlan { metric: BestMetric::Accuracy, ..BestPlan::default() };
        let mut state = LoopState::default();
        let row = |accuracy| EvalRow {
            step: 1,
            eval_loss: 1.0,
            eval_accuracy: Some(accuracy),
            ..EvalRow::default()
        };
        let found = [0.5, 0.75, 0.6].map(|accuracy| state.record(&plan, &row(accuracy)));
        assert_eq!(found, [true, true, false]);
        assert_eq!(state.best.map(|best| best.metric), Some(0.25));
    }

    #[test]
    fn a_best_evaluation_that_is_not_comparable_is_dropped() {
        let patient = Some(EarlyStopping { patience: 3, threshold: 0.0 });
        let plan = BestPlan { early_stopping: patient, ..BestPlan::default() };
        let (_, state, _) = record(&plan, &[0.2, 0.3]);
        assert_eq!(state.resumed_with(&plan), state);
        let pending = LoopState { evaluation_pending: true, ..state };
        for other in [
            BestPlan { metric: BestMetric::Accuracy, ..plan },
            BestPlan { evaluation_data: 7, ..plan },
        ] {
            assert_eq!(state.resumed_with(&other), LoopState::default());
            let resumed = pending.resumed_with(&other);
            assert_eq!(resumed, LoopState { evaluation_pending: true, ..LoopState::default() });
        }
    }

    #[test]
    fn states_of_older_checkpoints_have_defaults() {
        let state: LoopState = serde_json::from_str("{}").unwrap();
        assert_eq!(state, LoopState::default());
    }
}
