//! What a model answered in an evaluation, and the metrics besides the loss.
//!
//! Main type: [`Answers`]. All of them are sums, so ranks add them.

use crate::task::ConfusionMatrix;

/// The answers to the targets of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub enum Answers {
    /// One class for each target.
    Classes(ConfusionMatrix),
    /// A set of labels for each target.
    LabelSets(LabelSetCounts),
    /// Numbers for each target.
    Numbers(AbsoluteErrors),
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
    /// The sum over the targets. An error is the mean over the numbers of a
    /// target.
    pub sum: f64,
}

/// Metrics of an evaluation besides the loss; `None` where the task does not
/// have one.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct AnswerMetrics {
    /// The fraction of targets with the right class or set.
    pub(crate) accuracy: Option<f64>,
    /// The F1 score over all pairs of target and label.
    pub(crate) f1: Option<f64>,
    /// The mean absolute error.
    pub(crate) mae: Option<f64>,
}

impl From<ConfusionMatrix> for Answers {
    fn from(confusion: ConfusionMatrix) -> Self {
        Self::Classes(confusion)
    }
}

impl LabelSetCounts {
    /// Counts a target. The pairs say for each label whether it holds and
    /// whether it was predicted.
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

    /// Returns the F1 score over all pairs of target and label (micro
    /// average). It is 0 if no label holds and none was predicted, as in
    /// scikit-learn.
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
        }
    }

    /// Returns answers of this kind with other [`sums`](Self::sums).
    pub(crate) fn with_sums(&self, sums: &[f64]) -> Self {
        let at = |index: usize| sums.get(index).copied().unwrap_or(0.0);
        match self {
            Self::Classes(_) => Self::Classes(ConfusionMatrix::from_counts(sums)),
            Self::LabelSets(_) => Self::LabelSets(LabelSetCounts {
                exact: at(0) as u64,
                true_positives: at(1) as u64,
                false_positives: at(2) as u64,
                false_negatives: at(3) as u64,
            }),
            Self::Numbers(_) => Self::Numbers(AbsoluteErrors { sum: at(0) }),
        }
    }

    /// Returns the metrics over this number of targets.
    pub(crate) fn metrics(&self, num_targets: f64) -> AnswerMetrics {
        let none = AnswerMetrics::default();
        match self {
            Self::Classes(confusion) => {
                let accuracy = confusion.num_correct() as f64 / num_targets;
                AnswerMetrics { accuracy: Some(accuracy), ..none }
            }
            Self::LabelSets(counts) => AnswerMetrics {
                accuracy: Some(counts.exact as f64 / num_targets),
                f1: Some(counts.f1()),
                ..none
            },
            Self::Numbers(errors) => AnswerMetrics { mae: Some(errors.sum / num_targets), ..none },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of `sklearn.metrics.f1_score(average="micro")` and
    /// `accuracy_score` for these sets.
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
        assert_eq!(metrics, AnswerMetrics { accuracy: Some(1.0 / 3.0), f1: Some(0.75), mae: None });
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
        ] {
            assert_eq!(answers.with_sums(&answers.sums()), answers);
        }
        let metrics = Answers::Numbers(AbsoluteErrors { sum: 3.0 }).metrics(4.0);
        assert_eq!(metrics, AnswerMetrics { mae: Some(0.75), ..AnswerMetrics::default() });
    }
}
