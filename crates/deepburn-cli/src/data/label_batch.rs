//! The labels of a batch in the layout that models read, and the answers of a model to them.
//!
//! Main type: [`LabelBatch`].

use deepburn::{AbsoluteErrors, Answers, LabelSetCounts};
use deepburn_datasets::TextLabel;
use deepburn_models::hf::ProblemType;
use deepburn_models::{TextBatchError, TextLabels};

/// The labels of a batch. Rows without a text have the class -1 or the flags -1, and 0 as numbers.
pub(crate) enum LabelBatch {
    /// One class for each row.
    Class(Vec<i64>),
    /// For each row and class, 1 or 0.
    MultiLabel(Vec<i64>),
    /// For each row and target, a number to predict.
    Regression(Vec<f32>),
}

/// The class and the flags of a row without a text.
const NO_TEXT: i64 = -1;

impl LabelBatch {
    /// Converts labels for a model with `outputs` outputs. A label is `None` for a row without a
    /// text.
    ///
    /// # Errors
    /// Returns [`TextBatchError`] if the model does not have a class of a set.
    pub(crate) fn new(
        problem_type: ProblemType,
        labels: &[Option<TextLabel>],
        outputs: usize,
    ) -> Result<Self, TextBatchError> {
        Ok(match problem_type {
            ProblemType::SingleLabelClassification => Self::Class(
                labels
                    .iter()
                    .map(|label| {
                        label.as_ref().and_then(TextLabel::class).map_or(NO_TEXT, i64::from)
                    })
                    .collect(),
            ),
            ProblemType::MultiLabelClassification => {
                let mut flags = Vec::with_capacity(labels.len() * outputs);
                for (text, label) in labels.iter().enumerate() {
                    let start = flags.len();
                    flags.resize(start + outputs, if label.is_some() { 0 } else { NO_TEXT });
                    for class in label.iter().flat_map(TextLabel::classes) {
                        let unknown = TextBatchError::Label {
                            text,
                            label: (*class).into(),
                            num_classes: outputs,
                        };
                        *flags[start..].get_mut(*class as usize).ok_or(unknown)? = 1;
                    }
                }
                Self::MultiLabel(flags)
            }
            ProblemType::Regression => {
                let mut values = Vec::with_capacity(labels.len() * outputs);
                for label in labels {
                    match label {
                        Some(TextLabel::Values(numbers)) => values.extend_from_slice(numbers),
                        _ => values.resize(values.len() + outputs, 0.0),
                    }
                }
                Self::Regression(values)
            }
        })
    }

    /// Returns the labels for [`TextBatch::new`](deepburn_models::TextBatch::new).
    pub(crate) fn as_labels(&self) -> TextLabels<'_> {
        match self {
            Self::Class(classes) => TextLabels::Class(classes),
            Self::MultiLabel(flags) => TextLabels::MultiLabel(flags),
            Self::Regression(values) => TextLabels::Regression(values),
        }
    }
}

/// Counts the sets of labels that `logits` predict. A label is predicted if its probability is at
/// least one half, so if its logit is at least 0. Rows with negative `flags` are not texts. A text
/// with a logit that is infinite or NaN has no answer, so that all its labels count as wrong.
pub(crate) fn count_label_sets(flags: &[i64], logits: &[f32], outputs: usize) -> Answers {
    let mut counts = LabelSetCounts::default();
    let rows = flags.chunks(outputs.max(1)).zip(logits.chunks(outputs.max(1)));
    for (flags, logits) in rows.filter(|(flags, _)| flags[0] >= 0) {
        let is_finite = logits.iter().all(|logit| logit.is_finite());
        counts.count(flags.iter().zip(logits).map(|(flag, logit)| {
            let holds = *flag == 1;
            (holds, if is_finite { *logit >= 0.0 } else { !holds })
        }));
    }
    Answers::LabelSets(counts)
}

/// Sums the absolute errors of the texts. Rows of length 0 are not texts.
pub(crate) fn sum_errors(
    values: &[f32],
    logits: &[f32],
    lengths: &[usize],
    outputs: usize,
) -> Answers {
    let rows = values.chunks(outputs.max(1)).zip(logits.chunks(outputs.max(1))).zip(lengths);
    let error = |values: &[f32], logits: &[f32]| {
        let errors =
            values.iter().zip(logits).map(|(value, logit)| f64::from(*value) - f64::from(*logit));
        errors.map(f64::abs).sum::<f64>() / outputs as f64
    };
    let errors = rows.filter(|(_, length)| **length > 0);
    let sum = errors.map(|((values, logits), _)| error(values, logits)).sum();
    Answers::Numbers(AbsoluteErrors { sum })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_become_rows() {
        let sets = [Some(TextLabel::Classes(vec![0, 2])), None, Some(TextLabel::Classes(vec![]))];
        let batch = LabelBatch::new(ProblemType::MultiLabelClassification, &sets, 3).unwrap();
        let LabelBatch::MultiLabel(flags) = batch else { panic!("flags") };
        assert_eq!(flags, [1, 0, 1, -1, -1, -1, 0, 0, 0]);
        let unknown = LabelBatch::new(ProblemType::MultiLabelClassification, &sets, 2);
        let label = TextBatchError::Label { text: 0, label: 2, num_classes: 2 };
        assert_eq!(unknown.err(), Some(label));
        let values = [Some(TextLabel::Values(vec![0.5, -1.0])), None];
        let batch = LabelBatch::new(ProblemType::Regression, &values, 2).unwrap();
        let LabelBatch::Regression(values) = batch else { panic!("numbers") };
        assert_eq!(values, [0.5, -1.0, 0.0, 0.0]);
    }

    #[test]
    fn answers_count_texts_only() {
        let counts = count_label_sets(&[1, 0, -1, -1, 0, 0], &[0.0, -0.1, 3.0, 3.0, 2.0, -1.0], 2);
        let expected =
            LabelSetCounts { exact: 1, true_positives: 1, false_positives: 1, false_negatives: 0 };
        assert_eq!(counts, Answers::LabelSets(expected));
        // Without an answer, no label is right, not even one that does not hold.
        let counts = count_label_sets(&[1, 0, 0, 0], &[f32::NAN, 1.0, -1.0, f32::INFINITY], 2);
        let expected =
            LabelSetCounts { exact: 0, true_positives: 0, false_positives: 3, false_negatives: 1 };
        assert_eq!(counts, Answers::LabelSets(expected));
        let errors = sum_errors(&[1.0, 2.0, 0.0, 0.0], &[0.5, 4.0, 9.0, 9.0], &[3, 0], 2);
        assert_eq!(errors, Answers::Numbers(AbsoluteErrors { sum: 1.25 }));
    }
}
