//! `report.html`: a self-contained page about a run.
//!
//! Main type: [`Report`], created from the rows of `metrics.jsonl`, the resolved job, the test
//! result if there is one, and the environment. The page loads nothing: curves are inline SVG,
//! there is no script, and all untrusted text is escaped. It follows the reader's light or dark
//! theme and is readable on a phone.

mod curves;
mod environment;
mod generated;
mod summary;
mod tested;

use crate::GeneratedText;
use crate::chart;
use crate::html::{self, Escaped};
use crate::metrics::{MetricsRow, split};
use crate::report_error::ReportError;
pub use environment::Environment;
use serde_json::Value;
use std::path::Path;

/// A page about one run.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    /// The title, such as the name of the job file.
    pub title: &'a str,
    /// The resolved job.
    pub job: &'a Value,
    /// The rows of `metrics.jsonl`; may be empty.
    pub rows: &'a [MetricsRow],
    /// The content of `test.json`, if there was a test. Missing fields are omitted.
    pub test: Option<&'a Value>,
    /// The texts that the model generated after evaluations, in the order of their steps; may be
    /// empty.
    pub generated: &'a [GeneratedText],
    /// The machine and program of the run.
    pub environment: &'a Environment,
}

impl Report<'_> {
    /// Writes the page atomically.
    ///
    /// # Errors
    /// Returns an error if a curve cannot be drawn or the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), ReportError> {
        html::write(path, &self.to_html()?)
            .map_err(|source| ReportError::File { path: path.to_path_buf(), source })
    }

    /// Returns the page as text.
    ///
    /// # Errors
    /// Returns an error if a curve cannot be drawn.
    pub fn to_html(self) -> Result<String, ReportError> {
        let (steps, evals) = split(self.rows);
        let mut body = String::new();
        let title = Escaped(self.title);
        html::push(&mut body, format_args!("<h1>{title}</h1>\n"));
        let mut result = summary::rows(&steps, &evals);
        result.extend(self.environment.result_rows());
        html::table(&mut body, "Result", &result);
        if let Some(test) = self.test {
            tested::push(&mut body, test);
        }
        chart::push_charts(&mut body, chart::GAPS_NOTE, curves::charts(&steps, &evals))?;
        generated::push(&mut body, self.generated);
        html::table(&mut body, "Time by phase", &summary::phases(&steps));
        html::table(&mut body, "Job", &job_rows(self.job));
        html::folded_json(&mut body, "The whole job as JSON", self.job);
        html::table(&mut body, "Environment", &self.environment.rows());
        Ok(html::page(self.title, &body))
    }
}

/// Returns the values of the job by dotted path. The DeepSpeed section appears only in the folded
/// JSON.
fn job_rows(job: &Value) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    if let Value::Object(sections) = job {
        // The DeepSpeed section has hundreds of resolved keys, which would hide the other values.
        for (name, section) in sections.iter().filter(|(name, _)| *name != "deepspeed") {
            collect_leaves(name, section, &mut rows);
        }
    }
    rows
}

/// Appends the values below `value`, which is at `path`. Nulls are omitted; empty objects and lists
/// are shown as JSON.
fn collect_leaves(path: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, field) in fields {
                collect_leaves(&format!("{path}.{name}"), field, rows);
            }
        }
        Value::String(text) => rows.push((path.to_owned(), text.clone())),
        Value::Null => {}
        other => rows.push((path.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests;
