//! The labels of a batch of texts, and the losses of classifiers.
//!
//! Main type: [`TextLabels`]. Losses are as in `transformers`, but summed over the texts instead of
//! averaged:
//!
//! ```text
//! Class         cross-entropy of the softmax over the classes
//! MultiLabel    binary cross-entropy of the sigmoid of each logit, mean over the classes
//! Regression    squared error, mean over the targets of a text
//! ```

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use deepburn_ops::{FusedOps, cross_entropy};

use crate::label_smoothing::{in_f32, logits_term};
use crate::text_error::TextBatchError;

/// The labels of a batch of texts in host memory. Rows without a text complete a batch and have no
/// label.
#[derive(Clone, Copy, Debug)]
pub enum TextLabels<'a> {
    /// The class of each text; negative for a row without a text.
    Class(&'a [i64]),
    /// For each text and class, row by row: 1 if the text has the class, or else 0; negative for a
    /// row without a text.
    MultiLabel(&'a [i64]),
    /// For each text and target, row by row: the number to predict. Values for a row without a text
    /// are ignored.
    Regression(&'a [f32]),
}

impl<'a> From<&'a [i64]> for TextLabels<'a> {
    /// Returns one class for each text.
    fn from(classes: &'a [i64]) -> Self {
        Self::Class(classes)
    }
}

impl<'a, const N: usize> From<&'a [i64; N]> for TextLabels<'a> {
    /// Returns one class for each text.
    fn from(classes: &'a [i64; N]) -> Self {
        Self::Class(classes)
    }
}

impl<'a> From<&'a Vec<i64>> for TextLabels<'a> {
    /// Returns one class for each text.
    fn from(classes: &'a Vec<i64>) -> Self {
        Self::Class(classes)
    }
}

impl TextLabels<'_> {
    /// Returns the number of texts that the labels are for, in a model with `outputs` outputs;
    /// `None` if the number of labels is not a multiple of the outputs.
    pub(crate) fn num_texts(self, outputs: usize) -> Option<usize> {
        let (labels, each) = match self {
            Self::Class(labels) => (labels.len(), 1),
            Self::MultiLabel(flags) => (flags.len(), outputs),
            Self::Regression(values) => (values.len(), outputs),
        };
        (each > 0 && labels.is_multiple_of(each)).then(|| labels / each)
    }

    /// Checks the labels of texts with these `lengths`, of which 0 stands for a row without a text.
    ///
    /// # Errors
    /// Returns [`TextBatchError`] for the first label that the model does not have.
    pub(crate) fn check(self, lengths: &[usize], num_classes: usize) -> Result<(), TextBatchError> {
        match self {
            Self::Class(labels) => {
                for (text, (&label, &own)) in labels.iter().zip(lengths).enumerate() {
                    let known =
                        if own == 0 { label < 0 } else { (0..num_classes as i64).contains(&label) };
                    if !known {
                        return Err(TextBatchError::Label { text, label, num_classes });
                    }
                }
            }
            // `num_texts` has refused incomplete rows, and 0 classes, for which `chunks` panics.
            Self::MultiLabel(flags) => {
                for (text, (row, &own)) in flags.chunks(num_classes).zip(lengths).enumerate() {
                    let known =
                        |flag: &i64| if own == 0 { *flag < 0 } else { (0..2).contains(flag) };
                    if let Some(&flag) = row.iter().find(|flag| !known(flag)) {
                        return Err(TextBatchError::Flag { text, flag });
                    }
                }
            }
            Self::Regression(values) => {
                for (text, (row, &own)) in values.chunks(num_classes).zip(lengths).enumerate() {
                    if own > 0 && row.iter().any(|value| !value.is_finite()) {
                        return Err(TextBatchError::NotFinite { text });
                    }
                }
            }
        }
        Ok(())
    }
}

/// The labels of a batch on the device.
#[derive(Clone, Debug)]
pub(crate) enum LabelTensor<B: Backend> {
    /// `[texts]`: the class of each text; negative for a row without a text.
    Class(Tensor<B, 1, Int>),
    /// `[texts * classes]`: 1 or 0; negative for a row without a text.
    MultiLabel(Tensor<B, 1, Int>),
    /// Numbers to predict.
    Regression {
        /// `[texts, targets]`; 0 for a row without a text.
        targets: Tensor<B, 2>,
        /// `[texts, 1]`: 1 for a text, and 0 for a row without a text.
        counted: Tensor<B, 2>,
    },
}

impl<B: Backend> LabelTensor<B> {
    /// Copies checked labels to a device.
    pub(crate) fn new(labels: TextLabels<'_>, lengths: &[usize], device: &B::Device) -> Self {
        let integers = |labels: &[i64]| {
            let labels: Vec<i32> = labels.iter().map(|label| *label as i32).collect();
            let shape = [labels.len()];
            Tensor::from_data(TensorData::new(labels, shape), device)
        };
        match labels {
            TextLabels::Class(labels) => Self::Class(integers(labels)),
            TextLabels::MultiLabel(flags) => Self::MultiLabel(integers(flags)),
            TextLabels::Regression(values) => {
                let texts = lengths.len();
                let each = values.len() / texts.max(1);
                // Values of rows without a text might be NaN, and NaN times 0 is NaN.
                let rows = values.chunks(each.max(1)).zip(lengths);
                let values: Vec<f32> = rows
                    .flat_map(|(row, own)| {
                        row.iter().map(move |value| if *own > 0 { *value } else { 0.0 })
                    })
                    .collect();
                let counted: Vec<f32> =
                    lengths.iter().map(|own| if *own > 0 { 1.0 } else { 0.0 }).collect();
                Self::Regression {
                    targets: Tensor::from_data(TensorData::new(values, [texts, each]), device),
                    counted: Tensor::from_data(TensorData::new(counted, [texts, 1]), device),
                }
            }
        }
    }
}

impl<B: FusedOps> LabelTensor<B> {
    //= transformers 5.23.0 loss/loss_utils.py ForSequenceClassificationLoss
    /// Returns the loss summed over the texts, `[1]`, in at least f32. `label_smoothing` is the
    /// weight of the mean over the classes in the loss of one class for each text; the other losses
    /// do not have it.
    pub(crate) fn loss(&self, logits: Tensor<B, 2>, label_smoothing: f64) -> Tensor<B, 1> {
        let [texts, outputs] = logits.dims();
        match self {
            Self::Class(classes) if label_smoothing == 0.0 => {
                cross_entropy(logits, classes.clone())
            }
            Self::Class(classes) => {
                let term = logits_term(logits.clone(), classes.clone());
                cross_entropy(logits, classes.clone()) + term * label_smoothing
            }
            // sigmoid(x) = softmax([0, x])[1], so the binary cross-entropy is the cross-entropy of
            // the logits [0, x]. Its gradient, sigmoid(x) - label, is exact for every x.
            Self::MultiLabel(flags) => {
                let logits = logits.reshape([texts * outputs, 1]);
                let pairs = Tensor::cat(vec![logits.zeros_like(), logits], 1);
                cross_entropy(pairs, flags.clone()) / outputs as f64
            }
            Self::Regression { targets, counted } => {
                // Squares of 16-bit values can overflow.
                let logits = in_f32(logits);
                let [targets, counted] =
                    [targets, counted].map(|it| it.clone().cast(logits.dtype()));
                let deviation = (logits - targets) * counted;
                (deviation.clone() * deviation).sum() / outputs as f64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::{Flex, FlexDevice};

    /// Returns the loss of logits `[texts, outputs]`.
    fn loss(logits: &[f32], labels: TextLabels<'_>, lengths: &[usize]) -> f64 {
        let outputs = logits.len() / lengths.len();
        labels.check(lengths, outputs).unwrap();
        let data = TensorData::new(logits.to_vec(), [lengths.len(), outputs]);
        let logits = Tensor::<Flex, 2>::from_data(data, &FlexDevice);
        let loss = LabelTensor::<Flex>::new(labels, lengths, &FlexDevice).loss(logits, 0.0);
        f64::from(loss.into_scalar())
    }

    /// Against the formula in f64, with logits of any size, a text without labels and a row without
    /// a text.
    #[test]
    fn binary_cross_entropy_is_stable() {
        let logits = [0.0, 1e-3, -2.5, 80.0, -80.0, 30.0, 0.0, -1.0, 1e4, 7.0, 7.0, 7.0];
        let flags = [1, 0, 1, 1, 0, 0, 0, 0, 1, -1, -1, -1];
        let found = loss(&logits, TextLabels::MultiLabel(&flags), &[3, 1, 2, 0]);
        let counted = logits.iter().zip(flags).filter(|(_, flag)| *flag >= 0);
        let each = counted.map(|(logit, flag)| {
            let (x, y) = (f64::from(*logit), flag as f64);
            x.max(0.0) - x * y + (-x.abs()).exp().ln_1p()
        });
        let expected = each.sum::<f64>() / 3.0;
        assert!((found - expected).abs() < 3e-7 * expected, "{found} {expected}");
        // A wrong label with a large logit costs the logit.
        assert_eq!(loss(&[1e30], TextLabels::MultiLabel(&[0]), &[1]), f64::from(1e30_f32));
    }

    #[test]
    fn the_squared_error_is_the_mean_over_targets() {
        let logits = [0.5, -1.0, 3.0, 1e3, 9.0, 9.0];
        let targets = [0.25, 1.0, 3.0, -1e3, f32::NAN, f32::NAN];
        let found = loss(&logits, TextLabels::Regression(&targets), &[2, 1, 0]);
        assert_eq!(found, f64::from((0.0625 + 4.0 + 4e6_f32) / 2.0));
        // A batch without texts has the loss 0.
        assert_eq!(loss(&[1.0, 2.0], TextLabels::Regression(&[0.0; 2]), &[0, 0]), 0.0);
        assert_eq!(loss(&[1.0, 2.0], TextLabels::MultiLabel(&[-1; 2]), &[0, 0]), 0.0);
    }

    #[test]
    fn labels_of_another_shape_or_value_are_named() {
        assert_eq!(TextLabels::MultiLabel(&[0; 5]).num_texts(2), None);
        assert_eq!(TextLabels::Regression(&[0.0; 6]).num_texts(2), Some(3));
        assert_eq!(TextLabels::Class(&[0; 3]).num_texts(2), Some(3));
        let flag = TextBatchError::Flag { text: 1, flag: 2 };
        assert_eq!(TextLabels::MultiLabel(&[0, 1, 2, 0]).check(&[1, 1], 2), Err(flag));
        let flag = TextBatchError::Flag { text: 0, flag: 0 };
        assert_eq!(TextLabels::MultiLabel(&[0, -1]).check(&[0], 2), Err(flag));
        let value = TextBatchError::NotFinite { text: 0 };
        assert_eq!(TextLabels::Regression(&[f32::INFINITY]).check(&[1], 1), Err(value));
        assert_eq!(TextLabels::Regression(&[f32::NAN]).check(&[0], 1), Ok(()));
    }
}
