//! What a model answered in an evaluation, and the metrics besides the loss.
//!
//! Main type: [`Answers`]. All of them are sums, so ranks add them.

use crate::confusion_matrix::ConfusionMatrix;
use crate::metrics::EvalRow;

/// The answers to the targets of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub enum Answers {
    /// One class for each target.
    Classes(ConfusionMatrix),
    /// A set of labels for each target.
    LabelSets(LabelSetCounts),
    /// Numbers for each target.
    Numbers(AbsoluteErrors),
    /// The most likely token for each target.
    Tokens {
        /// The number of targets that are the most likely token.
        predicted: u64,
    },
    /// Rewards of two completions for each target.
    Preferences(RewardSums),
}

/// Sums of the rewards of pairs of completions in preference optimization.
///
/// The reward of a completion is `beta` times the difference of its log-probabilities under the
/// model and under the reference (Rafailov et al. 2023, equation 5).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RewardSums {
    /// The number of pairs.
    pub pairs: f64,
    /// The rewards of the better completions.
    pub chosen: f64,
    /// The rewards of the worse completions.
    pub rejected: f64,
    /// The number of pairs whose better completion has the larger reward.
    pub right: f64,
}

/// The means of [`RewardSums`], as TRL names them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rewards {
    /// The mean reward of the better completions.
    pub(crate) chosen: f64,
    /// The mean reward of the worse completions.
    pub(crate) rejected: f64,
    /// The mean difference.
    pub(crate) margins: f64,
    /// The share of pairs in the right order.
    pub(crate) accuracies: f64,
}

impl RewardSums {
    /// Adds a pair with these rewards.
    pub fn add(&mut self, chosen: f64, rejected: f64) {
        self.pairs += 1.0;
        self.chosen += chosen;
        self.rejected += rejected;
        self.right += f64::from(chosen > rejected);
    }

    /// Adds other pairs.
    pub fn extend(&mut self, other: Self) {
        let [own, other] = [self.sums(), other.sums()];
        *self = Self::from_sums(std::array::from_fn(|index| own[index] + other[index]));
    }

    /// Returns the numbers that are summed over ranks.
    pub(crate) fn sums(self) -> [f64; 4] {
        [self.pairs, self.chosen, self.rejected, self.right]
    }

    /// Returns the sums of [`sums`](Self::sums).
    pub(crate) fn from_sums([pairs, chosen, rejected, right]: [f64; 4]) -> Self {
        Self { pairs, chosen, rejected, right }
    }

    /// Returns the means; `None` without pairs.
    pub(crate) fn means(self) -> Option<Rewards> {
        (self.pairs > 0.0).then(|| {
            let [chosen, rejected, accuracies] =
                [self.chosen, self.rejected, self.right].map(|sum| sum / self.pairs);
            Rewards { chosen, rejected, margins: chosen - rejected, accuracies }
        })
    }
}

/// Counts of sets of labels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LabelSetCounts {
    /// Targets whose set was predicted exactly.
    pub exact: u64,
    /// Labels that were predicted and hold.
    pub true_positives: u64,
    /// Labels that were predicted and do not hold.
    pub false_positives: u64,
    /// Labels that hold and were not predicted.
    pub false_negatives: u64,
}

/// The sum of absolute errors.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AbsoluteErrors {
    /// The sum over the targets. An error is the mean over the numbers of a target.
    pub sum: f64,
}

impl LabelSetCounts {
    /// Counts a target. The pairs say for each label whether it holds and whether it was predicted.
    pub fn count(&mut self, labels: impl IntoIterator<Item = (bool, bool)>) {
        let mut is_exact = true;
        for (holds, is_predicted) in labels {
            is_exact &= holds == is_predicted;
            match (holds, is_predicted) {
                (true, true) => self.true_positives += 1,
                (false, true) => self.false_positives += 1,
                (true, false) => self.false_negatives += 1,
                (false, false) => {}
            }
        }
        self.exact += u64::from(is_exact);
    }

    /// Returns the F1 score over all pairs of target and label (micro average). It is 0 if no label
    /// holds and none was predicted, as in scikit-learn.
    pub fn f1(&self) -> f64 {
        let right = 2 * self.true_positives;
        match right + self.false_positives + self.false_negatives {
            0 => 0.0,
            all => right as f64 / all as f64,
        }
    }
}

impl Answers {
    /// Returns the numbers that are summed over batches and ranks.
    pub(crate) fn sums(&self) -> Vec<f64> {
        match self {
            Self::Classes(confusion) => confusion.counts().collect(),
            Self::LabelSets(counts) => {
                let LabelSetCounts { exact, true_positives, false_positives, false_negatives } =
                    *counts;
                [exact, true_positives, false_positives, false_negatives]
                    .map(|count| count as f64)
                    .to_vec()
            }
            Self::Numbers(errors) => vec![errors.sum],
            Self::Tokens { predicted } => vec![*predicted as f64],
            Self::Preferences(rewards) => rewards.sums().to_vec(),
        }
    }

    /// Returns answers of this kind with other [`sums`](Self::sums).
    pub(crate) fn with_sums(&self, sums: &[f64]) -> Self {
        let at = |index: usize| sums.get(index).copied().unwrap_or(0.0);
        match self {
            Self::Classes(_) => Self::Classes(ConfusionMatrix::from_counts(sums)),
            Self::LabelSets(_) => Self::LabelSets(LabelSetCounts {
                // Counts are summed as f64, which is exact up to 2^53.
                exact: at(0) as u64,
                true_positives: at(1) as u64,
                false_positives: at(2) as u64,
                false_negatives: at(3) as u64,
            }),
            Self::Numbers(_) => Self::Numbers(AbsoluteErrors { sum: at(0) }),
            Self::Tokens { .. } => Self::Tokens { predicted: at(0) as u64 },
            Self::Preferences(_) => {
                Self::Preferences(RewardSums::from_sums(std::array::from_fn(at)))
            }
        }
    }

    /// Returns a record with the metrics over this number of targets, and without a loss.
    pub(crate) fn metrics(&self, num_targets: f64) -> EvalRow {
        let none = EvalRow::default();
        let share = |count: u64| Some(count as f64 / num_targets);
        match self {
            Self::Classes(confusion) => {
                EvalRow { eval_accuracy: share(confusion.num_correct()), ..none }
            }
            Self::LabelSets(counts) => {
                EvalRow { eval_accuracy: share(counts.exact), eval_f1: Some(counts.f1()), ..none }
            }
            Self::Numbers(errors) => EvalRow { eval_mae: Some(errors.sum / num_targets), ..none },
            Self::Tokens { predicted } => EvalRow { token_accuracy: share(*predicted), ..none },
            Self::Preferences(rewards) => {
                let rewards = rewards.means();
                EvalRow {
                    rewards_chosen: rewards.map(|it| it.chosen),
                    rewards_rejected: rewards.map(|it| it.rejected),
                    rewards_margins: rewards.map(|it| it.margins),
                    rewards_accuracies: rewards.map(|it| it.accuracies),
                    ..none
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of `sklearn.metrics.f1_score(average="micro")` and `accuracy_score` for these
    /// sets.
    #[test]
    fn sets_of_labels_are_counted() {
        let mut counts = LabelSetCounts::default();
        counts.count([(true, true), (false, false), (true, false)]);
        counts.count([(false, false), (false, false), (false, false)]);
        counts.count([(true, true), (false, true), (true, true)]);
        let expected =
            LabelSetCounts { exact: 1, true_positives: 3, false_positives: 1, false_negatives: 1 };
        assert_eq!(counts, expected);
        let metrics = Answers::LabelSets(counts).metrics(3.0);
        let (eval_accuracy, eval_f1) = (Some(1.0 / 3.0), Some(0.75));
        assert_eq!(metrics, EvalRow { eval_accuracy, eval_f1, ..EvalRow::default() });
        assert_eq!(LabelSetCounts { exact: 2, ..LabelSetCounts::default() }.f1(), 0.0);
    }

    #[test]
    fn answers_are_restored_from_their_sums() {
        let mut confusion = ConfusionMatrix::new(2);
        confusion.count(1, 0);
        let sets =
            LabelSetCounts { exact: 1, true_positives: 2, false_positives: 3, false_negatives: 4 };
        for answers in [
            Answers::Classes(confusion),
            Answers::LabelSets(sets),
            Answers::Numbers(AbsoluteErrors { sum: 0.5 }),
            Answers::Tokens { predicted: 7 },
            Answers::Preferences(RewardSums {
                pairs: 2.0,
                chosen: 0.5,
                rejected: -1.5,
                right: 1.0,
            }),
        ] {
            assert_eq!(answers.with_sums(&answers.sums()), answers);
        }
        let metrics = Answers::Tokens { predicted: 3 }.metrics(4.0);
        assert_eq!(metrics, EvalRow { token_accuracy: Some(0.75), ..EvalRow::default() });
        let metrics = Answers::Numbers(AbsoluteErrors { sum: 3.0 }).metrics(4.0);
        assert_eq!(metrics, EvalRow { eval_mae: Some(0.75), ..EvalRow::default() });
    }

    #[test]
    fn rewards_are_averaged_over_pairs() {
        assert_eq!(RewardSums::default().means(), None);
        let mut sums = RewardSums::default();
        sums.add(0.5, -1.0);
        let mut other = RewardSums::default();
        other.add(1.0, 2.0);
        sums.extend(other);
        let expected = Rewards { chosen: 0.75, rejected: 0.5, margins: 0.25, accuracies: 0.5 };
        assert_eq!(sums.means(), Some(expected));
    }
}
