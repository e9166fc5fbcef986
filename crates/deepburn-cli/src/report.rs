//! `report.html`: one self-contained page about a run.
//!
//! Main type: [`Report`], made of the rows of `metrics.jsonl`, the resolved job and the
//! environment. The page loads nothing from anywhere: curves are inline SVG, there is no script,
//! and everything that came from a user is escaped. It follows the reader's light or dark setting
//! and fits a telephone.

mod chart;
mod environment;
mod html;
mod summary;

use chart::{Chart, Series};
use deepburn::metrics::{EvalRow, MemoryRow, Row, StepRow};
pub(crate) use environment::Environment;
use html::Escaped;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// What stands above the curves, and the start of their section.
const CURVES: &str = "<p class=\"note\">Curves over optimizer steps; a gap is a skipped step or a \
                      value that is not finite.</p>\n<section class=\"charts\">\n";

/// A page about one run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report<'a> {
    /// Headline, such as the name of the job file.
    pub(crate) title: &'a str,
    /// The resolved job.
    pub(crate) job: &'a Value,
    /// The rows of `metrics.jsonl`; none yet is fine.
    pub(crate) rows: &'a [Row],
    /// Where the run took place.
    pub(crate) environment: &'a Environment,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    /// A curve could not be drawn.
    #[error("cannot draw the curve of {chart}: {reason}")]
    Chart {
        /// Title of the chart.
        chart: &'static str,
        /// What the drawing library said.
        reason: String,
    },
    /// The file system refused.
    #[error(
        "cannot write report `{}`: {source}; check that the folder exists and is writable",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl Report<'_> {
    /// Writes the page; a page that is there already stays until the new one is complete.
    ///
    /// # Errors
    /// When a curve cannot be drawn or the file cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result<(), ReportError> {
        let page = self.to_html()?;
        let partial = path.with_extension("html.partial");
        fs::write(&partial, page)
            .and_then(|()| fs::rename(&partial, path))
            .map_err(|source| ReportError::File { path: path.to_path_buf(), source })
    }

    /// The page as text.
    ///
    /// # Errors
    /// When a curve cannot be drawn.
    pub(crate) fn to_html(self) -> Result<String, ReportError> {
        let (steps, evals) = split(self.rows);
        let mut body = String::new();
        let title = Escaped(self.title);
        html::push(&mut body, format_args!("<h1>{title}</h1>\n"));
        html::table(&mut body, "Result", &summary::rows(&steps, &evals));
        body.push_str(CURVES);
        for chart in charts(&steps, &evals) {
            body.push_str(&chart.to_figure()?);
        }
        body.push_str("</section>\n");
        html::table(&mut body, "Job", &job_rows(self.job));
        html::folded_json(&mut body, "The whole job as JSON", self.job);
        html::table(&mut body, "Environment", &self.environment.rows());
        Ok(html::page(self.title, &body))
    }
}

fn split(rows: &[Row]) -> (Vec<StepRow>, Vec<EvalRow>) {
    let (mut steps, mut evals) = (Vec::new(), Vec::new());
    for row in rows {
        match row {
            Row::Step(row) => steps.push(*row),
            Row::Eval(row) => evals.push(*row),
        }
    }
    (steps, evals)
}

fn charts(steps: &[StepRow], evals: &[EvalRow]) -> Vec<Chart> {
    let by_step = |name, value: fn(&StepRow) -> f64| {
        Series::new(name, steps.iter().map(|row| (row.step as f64, value(row))))
    };
    let mut loss = vec![by_step("training", |row| row.loss)];
    if !evals.is_empty() {
        let eval = evals.iter().map(|row| (row.step as f64, row.eval_loss));
        loss.push(Series::new("evaluation", eval));
    }
    let mut charts = vec![
        Chart::new("Loss", loss),
        Chart::new("Learning rate", vec![by_step("learning rate", |row| row.lr)]),
        Chart::new(
            "Gradient norm before clipping",
            vec![by_step("norm", |row| row.grad_norm.unwrap_or(f64::NAN))],
        ),
        Chart::new("Loss scale", vec![by_step("scale", |row| row.loss_scale)]),
        Chart::new("Tokens per second", vec![by_step("tokens/s", |row| row.tokens_per_second)])
            .starting_at_zero(),
        Chart::new("Memory of this rank in MiB", memory_series(steps)).starting_at_zero(),
    ];
    if evals.iter().any(|row| row.eval_accuracy.is_some()) {
        let accuracy =
            evals.iter().map(|row| (row.step as f64, row.eval_accuracy.unwrap_or(f64::NAN)));
        let series = vec![Series::new("evaluation", accuracy)];
        charts.push(Chart::new("Accuracy", series).starting_at_zero());
    }
    charts
}

/// Picks a category.
type BytesOf = fn(&MemoryRow) -> u64;

fn memory_series(steps: &[StepRow]) -> Vec<Series> {
    const MIB: f64 = (1 << 20) as f64;
    let categories: [(&str, BytesOf); 6] = [
        ("parameters", |memory| memory.parameters),
        ("gradients", |memory| memory.gradients),
        ("optimizer", |memory| memory.optimizer),
        ("gathered, peak", |memory| memory.gathered_peak),
        ("activations, peak", |memory| memory.activations_peak),
        ("whole process", |memory| memory.rss),
    ];
    categories
        .into_iter()
        .map(|(name, bytes)| {
            let points = steps.iter().map(|row| (row.step as f64, bytes(&row.memory) as f64 / MIB));
            Series::new(name, points)
        })
        .collect()
}

/// The job's leaves as dotted paths and values; the DeepSpeed section is in the folded JSON only.
fn job_rows(job: &Value) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    if let Value::Object(sections) = job {
        for (name, section) in sections.iter().filter(|(name, _)| *name != "deepspeed") {
            collect_leaves(name, section, &mut rows);
        }
    }
    rows
}

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
