//! Tables of the test result, `test.json`.
//!
//! ```text
//! {"test_loss": …, "test_accuracy": …, "test_f1": …, "test_mae": …, "perplexity": …, "targets": …,
//!  "confusion": [[answers by class], …, one row per true class]}
//! ```

use crate::html;
use serde_json::Value;

/// Appends the metrics and the confusion matrix. Missing fields and fields of another type are
/// omitted.
pub(super) fn push(html: &mut String, test: &Value) {
    html::table(html, "Test", &figures(test));
    if let Some(counts) = confusion(test) {
        let classes = 0..counts.len();
        let head = std::iter::once("Class".to_owned())
            .chain(classes.map(|class| format!("answered {class}")))
            .chain(["right".to_owned()])
            .collect::<Vec<_>>();
        let rows: Vec<_> =
            counts.iter().enumerate().map(|(class, row)| class_row(class, row)).collect();
        html::grid(html, "Test answers by class", &head, &rows);
    }
}

/// Returns the loss, the metrics of the task or the perplexity, and the number of targets.
fn figures(test: &Value) -> Vec<(String, String)> {
    let number = |name: &str| test.get(name).and_then(Value::as_f64);
    let decimal = |value: f64| format!("{value:.4}");
    let mut rows = Vec::new();
    let mut add = |name: &str, value: Option<String>| {
        rows.extend(value.map(|value| (name.to_owned(), value)));
    };
    let accuracy = number("test_accuracy");
    // The perplexity says little about a task that has an accuracy.
    let perplexity = number("perplexity").filter(|_| accuracy.is_none());
    add("Loss", number("test_loss").map(decimal));
    add("Accuracy", accuracy.map(html::percent));
    add("Perplexity", perplexity.map(|perplexity| format!("{perplexity:.2}")));
    add("Token accuracy", number("test_mean_token_accuracy").map(html::percent));
    add("F1", number("test_f1").map(html::percent));
    add("Mean absolute error", number("test_mae").map(decimal));
    add("Pairs in the right order", number("test_rewards/accuracies").map(html::percent));
    add("Reward margin", number("test_rewards/margins").map(decimal));
    add("Targets", test.get("targets").and_then(Value::as_u64).map(html::grouped));
    rows
}

/// Returns the counts of predicted classes for each true class.
///
/// Returns `None` unless the value is a square matrix of counts.
fn confusion(test: &Value) -> Option<Vec<Vec<u64>>> {
    let rows: Vec<Vec<u64>> = serde_json::from_value(test.get("confusion")?.clone()).ok()?;
    // A matrix that is not square was not written by this program.
    (!rows.is_empty() && rows.iter().all(|row| row.len() == rows.len())).then_some(rows)
}

/// Returns the row of a true class: the class, the count of each answer, and the recall, which is a
/// dash for a class without texts.
fn class_row(class: usize, counts: &[u64]) -> Vec<String> {
    let all: u64 = counts.iter().sum();
    let right = match all {
        0 => "-".to_owned(),
        _ => format!("{:.2} %", 100.0 * counts[class] as f64 / all as f64),
    };
    std::iter::once(class.to_string())
        .chain(counts.iter().map(|count| html::grouped(*count)))
        .chain([right])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn page(test: &Value) -> String {
        let mut html = String::new();
        push(&mut html, test);
        html
    }

    #[test]
    fn a_language_model_has_a_perplexity() {
        let html = page(&json!({"test_loss": 2.0, "perplexity": 7.389, "targets": 287_643}));
        for part in ["<td>2.0000</td>", "Perplexity", "<td>7.39</td>", "<td>287,643</td>"] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert!(!html.contains("by class"));
    }

    #[test]
    fn a_classifier_has_a_confusion_matrix() {
        let html = page(&json!({"test_loss": 0.4, "perplexity": 1.5, "targets": 25000,
            "test_accuracy": 0.8512, "confusion": [[10_000, 2500], [1220, 11_280]]}));
        for part in ["<td>85.12 %</td>", ">answered 1<", ">11,280</td>", ">90.24 %</td>"] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert!(!html.contains("Perplexity"));
    }

    #[test]
    fn several_labels_and_numbers_have_their_own_metrics() {
        let html =
            page(&json!({"test_loss": 0.4, "targets": 9, "test_accuracy": 0.5, "test_f1": 0.75}));
        assert!(html.contains("<td>75.00 %</td>") && html.contains("<td>50.00 %</td>"), "{html}");
        let html = page(&json!({"test_loss": 0.4, "targets": 9, "test_mae": 0.125}));
        assert!(html.contains("Mean absolute error") && html.contains("<td>0.1250</td>"), "{html}");
        assert!(!html.contains("Accuracy") && !html.contains("Perplexity"), "{html}");
    }

    #[test]
    fn whatever_else_a_file_says_is_left_out() {
        for test in [
            json!(null),
            json!({}),
            json!({"test_loss": "low", "targets": -1}),
            json!({"confusion": [[1], [2, 3]]}),
            json!({"confusion": []}),
            json!({"confusion": [[1.5]]}),
        ] {
            assert_eq!(page(&test), "", "{test}");
        }
        assert!(page(&json!({"confusion": [[0]]})).contains(">-</td>"));
    }
}
