//! The best model of a run, and when to stop because no better one comes.
//!
//! Main types: [`BestPlan`], what is asked for, and [`LoopState`], how far a run is with it, which every
//! checkpoint has. The rules are those of the Trainer of `transformers` (`load_best_model_at_end`,
//! `EarlyStoppingCallback`), but for one: here a checkpoint is saved whenever an evaluation is the best so far,
//! so evaluations and checkpoints need no common rhythm.

use std::path::Path;

use deepburn_checkpoint::{Checkpoint, CheckpointError};
use serde::{Deserialize, Serialize};

use crate::metrics::EvalRow;

/// By which number of an evaluation models are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BestMetric {
    /// The evaluation loss; the lowest is best.
    #[default]
    Loss,
    /// The share of right answers; the highest is best.
    Accuracy,
}

impl BestMetric {
    /// The metric of an evaluation such that the lowest is best: the loss, or the share of wrong answers. It is
    /// what checkpoints keep as [`Run::metric`](deepburn_checkpoint::Run::metric). `None` for a task without
    /// answers.
    pub fn of(self, row: &EvalRow) -> Option<f64> {
        match self {
            Self::Loss => Some(row.eval_loss),
            Self::Accuracy => row.eval_accuracy.map(|accuracy| 1.0 - accuracy),
        }
    }
}

/// When training stops although steps are left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EarlyStopping {
    /// Evaluations in a row that are not better than the best, after which training stops.
    pub patience: u64,
    /// By how much an evaluation has to be better to count, in units of the metric.
    pub threshold: f64,
}

/// What becomes of the best model.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BestPlan {
    /// By what models are compared.
    pub metric: BestMetric,
    /// Whether a checkpoint of the best model is saved and kept, and its weights are loaded when training ends.
    pub load_at_end: bool,
    /// `None` takes all steps.
    pub early_stopping: Option<EarlyStopping>,
    /// A hash of what evaluations are made on. Evaluations on other data are not compared.
    pub evaluation_data: u64,
}

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    /// Optimizer step after which it was made.
    pub step: u64,
    /// As [`BestMetric::of`] gives it.
    pub metric: f64,
    /// What `metric` measures.
    #[serde(default)]
    pub by: BestMetric,
    /// [`BestPlan::evaluation_data`] of the run that made it.
    #[serde(default)]
    pub evaluation_data: u64,
}

/// What the training loop knows besides the engine. Checkpoints have it, so that a run that resumes picks the
/// same best model and stops at the same step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoopState {
    /// Whether the evaluation that was due after the last step is still to be made.
    pub evaluation_pending: bool,
    /// `None` before the first evaluation whose metric is a number.
    pub best: Option<BestEvaluation>,
    /// Evaluations since one was better by the threshold.
    pub evaluations_without_improvement: u64,
}

impl LoopState {
    /// The state that a run with `plan` resumes with. The best evaluation is forgotten if it is not comparable
    /// with those to come, because the metric or the evaluation data has changed.
    pub(crate) fn resumed_with(self, plan: &BestPlan) -> Self {
        let is_comparable = |best: BestEvaluation| {
            (best.by, best.evaluation_data) == (plan.metric, plan.evaluation_data)
        };
        match self.best.is_none_or(is_comparable) {
            true => self,
            false => Self { evaluation_pending: self.evaluation_pending, ..Self::default() },
        }
    }

    /// Records an evaluation and returns whether it is the best so far. NaN and infinity are never the best.
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

    /// Whether training stops here.
    pub(crate) fn stops(&self, plan: &BestPlan) -> bool {
        let patience = plan.early_stopping.map(|it| it.patience.max(1));
        patience.is_some_and(|patience| self.evaluations_without_improvement >= patience)
    }
}

impl BestEvaluation {
    /// The checkpoint in the folder `root` that holds this model; `None` where there is none. Other checkpoints
    /// of the same step, of a run that was abandoned, have another metric or the same weights.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn checkpoint(&self, root: &Path) -> Result<Option<Checkpoint>, CheckpointError> {
        let is_it = |checkpoint: &Checkpoint| {
            let run = checkpoint.run();
            run.step == self.step && run.metric == Some(self.metric)
        };
        Ok(Checkpoint::all(root)?.into_iter().rev().find(is_it))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64, eval_loss: f64) -> EvalRow {
        EvalRow { step, eval_loss, eval_accuracy: None }
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
    fn the_first_of_equal_losses_is_best() {
        let (found, state, stopped) = record(&BestPlan::default(), &[3.0, 2.0, 2.0, 2.5]);
        assert_eq!(found, [true, true, false, false]);
        assert_eq!(state.best, Some(best(2, 2.0)));
        assert_eq!(stopped, None);
    }

    #[test]
    fn a_loss_that_is_no_number_is_never_best() {
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
        let row = |accuracy| EvalRow { step: 1, eval_loss: 1.0, eval_accuracy: Some(accuracy) };
        let found = [0.5, 0.75, 0.6].map(|accuracy| state.record(&plan, &row(accuracy)));
        assert_eq!(found, [true, true, false]);
        assert_eq!(state.best.map(|best| best.metric), Some(0.25));
    }

    #[test]
    fn a_best_that_is_not_comparable_is_forgotten() {
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
