//! A page that compares several runs: charts with the curves of all runs, and a table of results.
//!
//! Main type: [`Comparison`], created from output folders or from files like `metrics.jsonl`. The
//! page is self-contained, like a report. Each run has the same color in all charts; from the
//! seventh run on, colors repeat with dashed lines. More than [`MAX_RUNS`] runs could not be
//! distinguished and are an error.

use crate::chart::{self, Chart, Series};
use crate::html;
use crate::metrics::{EvalRow, MetricsError, StepRow, read_metrics, split};
use crate::report_error::ReportError;
use std::path::{Component, Path, PathBuf};

/// The largest number of runs in a comparison.
pub const MAX_RUNS: usize = chart::MAX_SERIES;

/// The reason why runs cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// No run was given.
    #[error("no run was named; give a run's output folder or its metrics.jsonl")]
    NoRun,
    /// There are more runs than colors.
    #[error("{0} runs are too many for one page; name at most {MAX_RUNS}")]
    TooManyRuns(usize),
    /// A file was given twice.
    #[error("`{}` was named twice; name each run once", .0.display())]
    Twice(PathBuf),
    /// A file cannot be read.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// A file has no rows.
    #[error("metrics file `{}` has no rows yet; wait for the run's first step", .0.display())]
    Empty(PathBuf),
    /// The page cannot be drawn or written.
    #[error(transparent)]
    Page(#[from] ReportError),
}

/// The name and metrics of one run.
#[derive(Debug, Clone)]
struct PlottedRun {
    /// The name in legends and tables.
    name: String,
    /// The optimizer steps, in order.
    steps: Vec<StepRow>,
    /// The evaluations, in order.
    evals: Vec<EvalRow>,
}

/// The metrics of several runs, for a comparison page.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The runs in the given order. The index determines the color.
    runs: Vec<PlottedRun>,
}

impl Comparison {
    /// Reads the metrics of runs, each given by its output folder or by the file. Runs are named by
    /// the parts of their paths that differ.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be read, is not a metrics file, has no
    /// rows or was given twice. Zero runs and more than [`MAX_RUNS`] are errors too.
    pub fn read(paths: &[impl AsRef<Path>]) -> Result<Self, PlotError> {
        match paths.len() {
            0 => return Err(PlotError::NoRun),
            count if count > MAX_RUNS => return Err(PlotError::TooManyRuns(count)),
            _ => {}
        }
        // Folders are resolved to files first, so a run that is given as folder and as file is
        // detected.
        let files: Vec<PathBuf> = paths.iter().map(|path| record_of(path.as_ref())).collect();
        // Two curves of one run would hide each other.
        if let Some(twice) = files.iter().enumerate().find(|(i, file)| files[..*i].contains(file)) {
            return Err(PlotError::Twice(twice.1.clone()));
        }
        let mut runs = Vec::with_capacity(files.len());
        for (file, name) in files.iter().zip(names(&files)) {
            let (steps, evals) = split(&read_metrics(file)?);
            if steps.is_empty() && evals.is_empty() {
                return Err(PlotError::Empty(file.clone()));
            }
            runs.push(PlottedRun { name, steps, evals });
        }
        Ok(Self { runs })
    }

    /// Returns the names of the runs in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.runs.iter().map(|run| &*run.name)
    }

    /// Writes the page atomically.
    ///
    /// # Errors
    /// Returns an error if a curve cannot be drawn or the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), PlotError> {
        let page = self.to_html()?;
        html::write(path, &page)
            .map_err(|source| ReportError::File { path: path.to_path_buf(), source }.into())
    }

    /// Returns the page as text.
    ///
    /// # Errors
    /// Returns an error if a curve cannot be drawn.
    pub fn to_html(&self) -> Result<String, PlotError> {
        let title = self.names().collect::<Vec<_>>().join(", ");
        let (mut body, count) = (String::new(), self.runs.len());
        let runs = if count == 1 { "run" } else { "runs" };
        html::push(
            &mut body,
            format_args!("<h1>Comparison of {count} {runs}</h1>\n<p class=\"legend\">"),
        );
        for (index, run) in self.runs.iter().enumerate() {
            chart::push_key_entry(&mut body, index, &run.name);
        }
        body.push_str("</p>\n");
        let head = HEAD.map(str::to_owned);
        let rows: Vec<_> = self.runs.iter().map(PlottedRun::results).collect();
        html::grid(&mut body, "Results", &head, &rows);
        chart::push_charts(&mut body, chart::GAPS_NOTE, self.charts())?;
        Ok(html::page(&title, &body))
    }

    /// Returns the charts, the most important first. Charts of values that no run has are omitted.
    fn charts(&self) -> Vec<Chart> {
        const MIB: f64 = (1 << 20) as f64;
        let steps = |title, value: fn(&StepRow) -> f64| {
            let points = |run: &PlottedRun| points(&run.steps, |row| row.step, value);
            Chart::new(title, self.series(points))
        };
        let evals = |title, value: fn(&EvalRow) -> f64| {
            let points = |run: &PlottedRun| points(&run.evals, |row| row.step, value);
            Chart::new(title, self.series(points))
        };
        let mut charts = vec![steps("Loss", |row| row.loss)];
        if self.runs.iter().any(|run| !run.evals.is_empty()) {
            charts.push(evals("Evaluation loss", |row| row.eval_loss));
        }
        for (title, value) in QUALITIES {
            let is_given = |row: &EvalRow| !value(row).is_nan();
            if self.runs.iter().flat_map(|run| &run.evals).any(is_given) {
                charts.push(evals(title, value));
            }
        }
        charts.extend([
            steps("Learning rate", |row| row.lr),
            steps("Gradient norm before clipping", |row| row.grad_norm.unwrap_or(f64::NAN)),
        ]);
        // Without fp16, the loss scale is always 1.
        if self.runs.iter().flat_map(|run| &run.steps).any(|row| row.loss_scale != 1.0) {
            charts.push(steps("Loss scale", |row| row.loss_scale));
        }
        charts.extend([
            steps("Tokens per second", |row| row.tokens_per_second).starting_at_zero(),
            steps("Memory of the process in MiB", |row| row.memory.rss as f64 / MIB)
                .starting_at_zero(),
        ]);
        charts
    }

    /// Returns a series for every run. Runs without values get an empty one, so that each run keeps
    /// its color.
    fn series(&self, points: impl Fn(&PlottedRun) -> Vec<(f64, f64)>) -> Vec<Series> {
        self.runs.iter().map(|run| Series::new(&*run.name, points(run).into_iter())).collect()
    }
}

/// A value of an evaluation.
type EvalValue = fn(&EvalRow) -> f64;

/// The charts of metrics besides the loss. A metric that a row does not have is NaN.
const QUALITIES: [(&str, EvalValue); 4] = [
    ("Evaluation accuracy", |row| row.eval_accuracy.unwrap_or(f64::NAN)),
    ("Evaluation F1", |row| row.eval_f1.unwrap_or(f64::NAN)),
    ("Evaluation token accuracy", |row| row.token_accuracy.unwrap_or(f64::NAN)),
    ("Evaluation mean absolute error", |row| row.eval_mae.unwrap_or(f64::NAN)),
];

/// Returns (step, value) for each row.
fn points<R>(rows: &[R], step: fn(&R) -> u64, value: fn(&R) -> f64) -> Vec<(f64, f64)> {
    rows.iter().map(|row| (step(row) as f64, value(row))).collect()
}

/// The column titles of the table of results.
const HEAD: [&str; 7] =
    ["Run", "steps", "last loss", "best eval loss", "best accuracy", "tokens/s", "memory, peak"];

impl PlottedRun {
    /// Returns the row under [`HEAD`]; unknown values are dashes.
    fn results(&self) -> Vec<String> {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let finite = |value: &f64| value.is_finite();
        let last = self.steps.last();
        let loss = self.evals.iter().map(|row| row.eval_loss).filter(finite);
        let accuracy = self.evals.iter().filter_map(|row| row.eval_accuracy).filter(finite);
        // Total tokens divided by total time. A mean of the rates would give short steps too much
        // weight.
        let tokens: f64 = self.steps.iter().map(|row| row.tokens as f64).sum();
        let seconds: f64 = self.steps.iter().map(|row| row.step_seconds).filter(finite).sum();
        let peak = self.steps.iter().map(|row| row.memory.rss).max();
        vec![
            self.name.clone(),
            or_dash(last.map(|row| row.step.to_string())),
            or_dash(last.map(|row| format!("{:.4}", row.loss))),
            or_dash(loss.min_by(f64::total_cmp).map(|loss| format!("{loss:.4}"))),
            or_dash(accuracy.max_by(f64::total_cmp).map(html::percent)),
            or_dash((seconds > 0.0).then(|| format!("{:.1}", tokens / seconds))),
            or_dash(peak.map(|bytes| format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64))),
        ]
    }
}

/// Returns the metrics file of a run that is given by its folder or by the file.
fn record_of(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("metrics.jsonl") } else { path.to_path_buf() }
}

/// Returns a name for each file, made of the parts of its path that differ.
///
/// The common suffix of all paths is skipped. Before it, the smallest number of parts is taken for
/// which all names are distinct. For example, `out/a/run` and `out/b/run` are named `a` and `b`.
fn names(files: &[PathBuf]) -> Vec<String> {
    let parts: Vec<Vec<String>> = files.iter().map(|file| parts_of(file)).collect();
    // Counted from the end, because runs usually differ in a folder above.
    let from_end = |parts: &'_ [String], index: usize| {
        parts.len().checked_sub(index + 1).map(|place| parts[place].clone())
    };
    let same = |index: usize| {
        let first = from_end(&parts[0], index);
        first.is_some() && parts.iter().all(|other| from_end(other, index) == first)
    };
    // A single run is named by the last part of its path.
    let skipped = if parts.len() == 1 { 0 } else { (0..).take_while(|index| same(*index)).count() };
    let distinct = |depth: usize| {
        let mut ends: Vec<_> = parts.iter().map(|parts| end(parts, skipped, depth)).collect();
        ends.sort();
        ends.windows(2).all(|pair| pair[0] != pair[1])
    };
    let longest = parts.iter().map(Vec::len).max().unwrap_or(1);
    // Different files differ at the whole depth at the latest.
    let depth = (1..=longest).find(|depth| distinct(*depth)).unwrap_or(longest);
    parts.iter().map(|parts| end(parts, skipped, depth).join("/")).collect()
}

/// Returns `depth` parts before the last `skipped` ones.
fn end(parts: &[String], skipped: usize, depth: usize) -> &[String] {
    let last = parts.len().saturating_sub(skipped);
    &parts[last.saturating_sub(depth)..last]
}

/// Returns the parts of a path that identify a run, without the file name `metrics.jsonl`.
fn parts_of(file: &Path) -> Vec<String> {
    let absolute = std::path::absolute(file).unwrap_or_else(|_| file.to_path_buf());
    let mut parts: Vec<String> = absolute
        .components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    if parts.len() > 1 && parts.last().is_some_and(|name| name == "metrics.jsonl") {
        parts.pop();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{MemoryRow, MetricsWriter};
    use std::fs;

    fn record(folder: &Path, steps: u64, evals: bool) {
        fs::create_dir_all(folder).unwrap();
        let mut writer = MetricsWriter::create(&folder.join("metrics.jsonl")).unwrap();
        for step in 1..=steps {
            let row = StepRow {
                step,
                loss: 4.0 / step as f64,
                lr: 1e-4,
                grad_norm: Some(1.0),
                loss_scale: 1.0,
                skipped: false,
                tokens: 1000,
                step_seconds: 0.5,
                tokens_per_second: 2000.0,
                memory: MemoryRow { rss: 3 << 29, ..MemoryRow::default() },
                seconds: None,
                ..StepRow::default()
            };
            writer.write(row).unwrap();
            if evals {
                let accuracy = Some(1.0 - 0.5 / step as f64);
                let eval_loss = 3.0 / step as f64;
                let row =
                    EvalRow { step, eval_loss, eval_accuracy: accuracy, ..EvalRow::default() };
                writer.write(row).unwrap();
            }
        }
    }

    fn named(paths: &[&str]) -> Vec<String> {
        names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>())
    }

    #[test]
    fn names_are_what_tells_runs_apart() {
        for (paths, expected) in [
            (&["/o/gpt2/metrics.jsonl"][..], &["gpt2"][..]),
            (&["/o/a/metrics.jsonl", "/o/b/metrics.jsonl"], &["a", "b"]),
            (&["/o/a/output/metrics.jsonl", "/o/b/output/metrics.jsonl"], &["a", "b"]),
            (&["/x/a.jsonl", "/x/b.jsonl"], &["a.jsonl", "b.jsonl"]),
            (&["/x/1/s/m.jsonl", "/x/2/s/m.jsonl", "/x/2/t/m.jsonl"], &["1/s", "2/s", "2/t"]),
            (&["/x/run/metrics.jsonl", "/x/run/old/metrics.jsonl"], &["run", "old"]),
        ] {
            assert_eq!(named(paths), expected, "{paths:?}");
        }
    }

    #[test]
    fn a_page_has_every_run_in_every_chart_and_table() {
        let folder = tempfile::tempdir().unwrap();
        let folders = ["small", "a&b"].map(|name| folder.path().join(name));
        record(&folders[0], 4, true);
        record(&folders[1], 2, false);
        let comparison =
            Comparison::read(&[folders[0].clone(), folders[1].join("metrics.jsonl")]).unwrap();
        assert_eq!(comparison.names().collect::<Vec<_>>(), ["small", "a&b"]);
        let page = comparison.to_html().unwrap();
        assert_eq!(page.matches("</svg>").count(), 7);
        assert!(page.contains("<title>small, a&amp;b</title>") && !page.contains("a&b"));
        // One entry in the legend, and one in each of the five charts that it has values for.
        assert_eq!(page.matches("</i>a&amp;b</span>").count(), 6);
        assert_eq!(page.matches("</i>small</span>").count(), 8);
        let cells = |page: &str| {
            let cell = |part: &str| part.split_once('>').unwrap().1.to_owned();
            page.split("</td>")
                .filter_map(|it| Some(cell(it.rsplit_once("<td")?.1)))
                .collect::<Vec<_>>()
        };
        let expected = ["4", "1.0000", "0.7500", "87.50 %", "2000.0", "1.50 GiB"];
        assert_eq!(cells(&page)[..6], expected);
        assert_eq!(cells(&page)[6..10], ["2", "2.0000", "-", "-"]);
    }

    #[test]
    fn the_seventh_run_is_dashed() {
        let folder = tempfile::tempdir().unwrap();
        let folders: Vec<_> =
            (0..=MAX_RUNS).map(|i| folder.path().join(format!("run-{i}"))).collect();
        for folder in &folders {
            record(folder, 3, false);
        }
        let page = Comparison::read(&folders[..7]).unwrap().to_html().unwrap();
        assert!(page.contains("4px dashed #3B82F7\"></i>run-6</span>"));
        assert!(page.contains("4px solid #DB2777\"></i>run-5</span>"));
        Comparison::read(&folders[..MAX_RUNS]).unwrap().to_html().unwrap();
        let message = Comparison::read(&folders).unwrap_err().to_string();
        assert_eq!(message, "13 runs are too many for one page; name at most 12");
    }

    #[test]
    fn errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let good = folder.path().join("good");
        record(&good, 1, false);
        let says = |paths: &[&Path], part: &str| {
            let message = Comparison::read(paths).unwrap_err().to_string();
            assert!(message.contains(part), "{part:?} not in {message}");
        };
        says(&[], "no run was named");
        says(&[&good, &folder.path().join("missing")], "missing");
        says(&[&good, &good.join("metrics.jsonl")], "named twice");
        says(&[folder.path()], "metrics.jsonl");
        let other = folder.path().join("other.jsonl");
        fs::write(&other, "").unwrap();
        says(&[&good, &other], "other.jsonl` has no rows yet");
        fs::write(&other, "{}\n").unwrap();
        says(&[&good, &other], "other.jsonl`, line 1");
        let nowhere = folder.path().join("no/plot.html");
        let message = Comparison::read(&[good]).unwrap().write(&nowhere).unwrap_err().to_string();
        assert!(message.contains("no/plot.html"), "{message}");
    }
}
