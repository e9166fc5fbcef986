//! The summary of `deepburn predict`: how well predictions match the labels of the table.

use deepburn_models::hf::ProblemType;
use serde_json::Value;

use crate::tools::trained_classifier::{TrainedClassifier, likeliest, likely};

/// Counts of the rows so far.
#[derive(Debug)]
pub(crate) struct PredictionSummary {
    /// What the model predicts.
    problem_type: ProblemType,
    /// All rows.
    pub(crate) texts: usize,
    /// Rows whose label the model could predict.
    labeled: usize,
    /// Rows whose prediction equals their label.
    correct: usize,
    /// The sum of the absolute errors of a regression.
    error: f64,
    /// An example of a label that the model could not predict.
    unknown: Option<String>,
}

impl PredictionSummary {
    /// Returns the summary of no rows.
    pub(crate) fn new(problem_type: ProblemType) -> Self {
        Self { problem_type, texts: 0, labeled: 0, correct: 0, error: 0.0, unknown: None }
    }

    /// Counts a row.
    pub(crate) fn count(
        &mut self,
        label: Option<&str>,
        outputs: &[f64],
        classifier: &TrainedClassifier,
    ) {
        self.texts += 1;
        // A table may have labels for some of its texts.
        let Some(label) = label.filter(|label| !label.trim().is_empty()) else { return };
        let is_known = match self.problem_type {
            ProblemType::SingleLabelClassification => {
                self.compare(classifier.class(label), likeliest(outputs))
            }
            ProblemType::MultiLabelClassification => {
                self.compare(label_set(label, classifier), likely(outputs))
            }
            ProblemType::Regression => self.add_error(numbers(label), outputs),
        };
        if !is_known {
            self.unknown.get_or_insert_with(|| label.chars().take(32).collect());
        }
    }

    /// Counts a class or a set of classes. Returns false without one.
    fn compare<T: PartialEq>(&mut self, known: Option<T>, predicted: T) -> bool {
        let Some(known) = known else { return false };
        self.labeled += 1;
        self.correct += usize::from(known == predicted);
        true
    }

    /// Adds the absolute error of a row, which is a mean over its numbers. Returns false without as
    /// many numbers.
    fn add_error(&mut self, known: Option<Vec<f64>>, predicted: &[f64]) -> bool {
        let Some(known) = known.filter(|it| it.len() == predicted.len()) else { return false };
        self.labeled += 1;
        let errors = known.iter().zip(predicted).map(|(known, found)| (known - found).abs());
        self.error += errors.sum::<f64>() / predicted.len() as f64;
        true
    }

    /// Returns the summary in one line.
    ///
    /// The accuracy or error counts only rows whose label the model could predict.
    pub(crate) fn line(&self) -> String {
        let (texts, labeled) = (self.texts, self.labeled);
        let (mut line, of_model) = match self.problem_type {
            ProblemType::Regression => {
                (format!("texts: {texts}"), "numbers that the model predicts")
            }
            _ => (format!("texts classified: {texts}"), "classes of the model"),
        };
        match self.problem_type {
            _ if labeled == 0 => {}
            ProblemType::Regression => {
                let error = self.error / labeled as f64;
                line += &format!("; mean absolute error {error:.4} ({labeled} with a label)");
            }
            _ => {
                let accuracy = 100.0 * self.correct as f64 / labeled as f64;
                line += &format!(
                    "; accuracy {accuracy:.2} % ({} of {labeled} with a known label)",
                    self.correct
                );
            }
        }
        if let Some(label) = &self.unknown {
            line += &format!("; some labels are not {of_model}, such as {label:?}");
        }
        line
    }
}

/// Returns the classes in the JSON list `label`, in ascending order.
fn label_set(label: &str, classifier: &TrainedClassifier) -> Option<Vec<usize>> {
    let Ok(Value::Array(elements)) = serde_json::from_str(label) else { return None };
    let class = |element: &Value| match element {
        Value::String(name) => classifier.class(name),
        Value::Number(number) => classifier.class(&number.to_string()),
        _ => None,
    };
    let mut classes = elements.iter().map(class).collect::<Option<Vec<_>>>()?;
    // Predicted classes are in this order.
    classes.sort_unstable();
    Some(classes)
}

/// Returns the number in `label`, or the numbers in its JSON list, as they were rounded in
/// training.
fn numbers(label: &str) -> Option<Vec<f64>> {
    let in_f32 = |number: f64| f64::from(number as f32);
    match serde_json::from_str(label) {
        Ok(Value::Array(elements)) => {
            elements.iter().map(|element| element.as_f64().map(in_f32)).collect()
        }
        _ => {
            let number = label.trim().parse().ok().map(in_f32)?;
            number.is_finite().then(|| vec![number])
        }
    }
}
