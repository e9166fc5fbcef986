//! Formats results as Markdown.
//!
//! The report has three parts: the introduction with the method, a table of all bounds, and a
//! section for each benchmark. A section has its tables (plot, rows, comparisons), a list of
//! missing and failed runs, and a line with command, machine, versions, commit and time.
//!
//! Functions named `push_…` append to the text. Columns without values are omitted. A missing value
//! is a dash.

use std::fmt::{self, Display, Write as _};

use crate::quantity::Quantity;
use crate::results::{Bound, MeasuredRow, Results, RowComparison, Table};
use crate::statistics::RoundSummary;
use crate::tables::{BENCHES, Bench};

/// The plot of a table, as links for a light and a dark background.
#[derive(Debug, Clone)]
pub(super) struct Picture {
    /// Name of the benchmark.
    pub(super) bench: String,
    /// Title of the table, which is also the alternative text of the picture.
    pub(super) title: String,
    /// Link for a light background, relative to the report.
    pub(super) light: String,
    /// Link for a dark background.
    pub(super) dark: String,
}

/// The introduction of the report, with the commands and the method. The method is implemented in
/// `rounds`, `statistics` and `memory`.
const INTRODUCTION: &str = "\
<!-- Generated from benches/results by `cargo run --release -p deepburn-benches -- report`. -->

# Benchmarks

```sh
cargo run --release -p deepburn-benches -- all --peers VENV
cargo run --release -p deepburn-benches -- step products --peers VENV
cargo run --release -p deepburn-benches -- all --quick
```

`VENV` is a Python virtual environment with the packages of [`peers/requirements.txt`](peers/requirements.txt). \
Without it, without Open MPI (`mpirun`, and what the feature `mpi` needs) or without a bench of a crate, the suite \
measures the rest and says what is missing. It builds the programs itself and needs no network. `--quick` tries the \
suite on small models in a few minutes; its results go to `target/benches/quick`. `report` alone generates this file \
and the plots from the results. [`gpu.sh`](gpu.sh) measures on a GPU.

## Method

- Runs take turns, A B A B. Each is a process of its own. The first steps of a run are not counted.
- A round is the median over a run's steps. A cell is the median over rounds, with the smallest and the largest \
round in parentheses.
- A ratio compares medians; in parentheses are the smallest and the largest ratio within a round. It is \
compared with the bound.
- Peak memory covers all processes of a run: the largest sum of proportional set sizes (PSS), sampled every 50 \
ms when resident sets grow. Parameters, gradients and other categories are taken from rank 0, from the run's \
`metrics.jsonl`.
- Models, tokens and texts are generated from fixed seeds. Peers train the same model on the same number of tokens, \
and each of their ranks has an equal share of the cores.
";

/// Returns the report of `results`, which are in the order of the suite.
///
/// Results of benchmarks that are not in the suite any more are omitted.
pub(super) fn report(results: &[Results], pictures: &[Picture]) -> String {
    let mut text = String::from(INTRODUCTION);
    if results.is_empty() {
        text.push_str("\nThere are no results yet.\n");
        return text;
    }
    push_bounds(&mut text, results);
    for results in results {
        // The texts of a section are in the program, and not in the results.
        if let Some(bench) = BENCHES.iter().find(|bench| bench.name == results.bench) {
            push_bench(&mut text, bench, results, pictures);
        }
    }
    text
}

/// Appends a table with the bounds of all benchmarks, and the number of bounds that are reached.
///
/// A bound is not reached if its quantity was not measured, which its row shows.
fn push_bounds(text: &mut String, results: &[Results]) {
    let tables = || results.iter().flat_map(|results| &results.tables);
    let bounds: Vec<_> = tables()
        .flat_map(|table| table.comparisons.iter().map(move |comparison| (table, comparison)))
        .filter(|(_, comparison)| comparison.bound.is_some())
        .collect();
    if bounds.is_empty() {
        return;
    }
    let reached = bounds.iter().filter(|(_, comparison)| comparison.reached == Some(true)).count();
    line(text, format_args!("\n## Bounds\n\n{reached} of {} are reached.\n", bounds.len()));
    line(
        text,
        format_args!("| Work | Quantity | Measured | Bound | Reached |\n|---|---|---|---|---|"),
    );
    for (table, comparison) in bounds {
        let RowComparison { quantity, value, .. } = comparison;
        let is_ratio = comparison.against.is_some();
        let value = value
            .as_ref()
            .map_or_else(|| "not measured".into(), |value| spread(*quantity, is_ratio, value));
        let (work, bound) = (
            ComparedRows(comparison),
            comparison.bound.map(|bound| shown(*quantity, is_ratio, bound)),
        );
        line(
            text,
            format_args!(
                "| {}: {work} | {} | {value} | {} | {} |",
                table.title,
                quantity.label(),
                bound.unwrap_or_default(),
                verdict(comparison.reached)
            ),
        );
    }
}

/// Appends the section of a benchmark.
///
/// For a missing program or a failure, the list has the first line of the message. The complete
/// message is in the file of results.
fn push_bench(text: &mut String, bench: &Bench, results: &Results, pictures: &[Picture]) {
    line(text, format_args!("\n## {}\n\n{}", bench.title, bench.about));
    if results.quick {
        line(
            text,
            format_args!(
                "\n**Small models and one round: the figures only show that the suite works.**"
            ),
        );
    }
    for table in &results.tables {
        line(text, format_args!("\n### {}\n", table.title));
        let of_table =
            |picture: &&Picture| picture.bench == results.bench && picture.title == table.title;
        if let Some(picture) = pictures.iter().find(of_table) {
            push_picture(text, picture);
        }
        push_rows(text, table);
        push_comparisons(text, table);
    }
    for (heading, items) in [("Not measured", &results.missing), ("Failed", &results.failures)] {
        if !items.is_empty() {
            line(text, format_args!("\n{heading}:\n"));
            items.iter().for_each(|item| line(text, format_args!("- {}", first_line(item))));
        }
    }
    push_source(text, results);
}

/// Appends a plot whose file is selected by the reader's color scheme, for example on GitHub.
fn push_picture(text: &mut String, picture: &Picture) {
    let Picture { light, dark, title, .. } = picture;
    line(
        text,
        format_args!(
            "<picture>\n  <source media=\"(prefers-color-scheme: dark)\" srcset=\"{dark}\">"
        ),
    );
    line(text, format_args!("  <img alt=\"{title}\" src=\"{light}\">\n</picture>\n"));
}

/// Appends the rows of a table, each cell with its median and range.
fn push_rows(text: &mut String, table: &Table) {
    let has = |column: &&Quantity| table.rows.iter().any(|row| row.measures.contains_key(*column));
    let columns: Vec<_> = table.columns.iter().filter(has).collect();
    let labels: String = columns.iter().map(|column| format!(" {} |", column.label())).collect();
    line(text, format_args!("| |{labels}\n|---|{}", "---:|".repeat(columns.len())));
    for row in &table.rows {
        let cell = |column: &&Quantity| {
            let value = row.measures.get(column).map(|value| measured(**column, value));
            format!(" {} |", value.unwrap_or_else(|| "–".into()))
        };
        line(
            text,
            format_args!("| {} |{}", name(row), columns.iter().map(cell).collect::<String>()),
        );
    }
}

/// Returns the name of a row, in italics for a peer.
fn name(row: &MeasuredRow) -> String {
    if row.is_peer { format!("*{}*", row.name) } else { row.name.clone() }
}

/// Appends the comparisons of a table. The columns of bounds are omitted if no comparison has a
/// bound.
fn push_comparisons(text: &mut String, table: &Table) {
    if table.comparisons.is_empty() {
        return;
    }
    let has_bounds = table.comparisons.iter().any(|comparison| comparison.bound.is_some());
    let columns =
        if has_bounds { " Bound | Reached |\n|---|---|---|---|---|" } else { "\n|---|---|---|" };
    line(text, format_args!("\n| Comparison | Quantity | Median |{columns}"));
    for comparison in &table.comparisons {
        let quantity = comparison.quantity;
        let is_ratio = comparison.against.is_some();
        let value = comparison.value.as_ref();
        let value =
            value.map_or_else(|| "not measured".into(), |value| spread(quantity, is_ratio, value));
        let bound = comparison.bound.map(|bound| shown(quantity, is_ratio, bound));
        let promised = match bound {
            Some(bound) => format!(" {bound} | {} |", verdict(comparison.reached)),
            // All rows of a table need the same number of cells.
            None if has_bounds => "  |  |".into(),
            None => String::new(),
        };
        let work = ComparedRows(comparison);
        line(text, format_args!("| {work} | {} | {value} |{promised}", quantity.label()));
    }
}

/// Appends the command, the machine, the versions, the commit and the time in small print, so that
/// the measurement can be repeated.
fn push_source(text: &mut String, results: &Results) {
    let Results { machine, commit, .. } = results;
    let versions: Vec<_> =
        results.versions.iter().map(|(name, version)| version_of(name, version)).collect();
    let dirty = if commit.dirty { ", with changes" } else { "" };
    let instructions = machine.instructions.join(" ");
    line(
        text,
        format_args!(
            "\n<sub>`{}`, {} s. {}, {} cores ({instructions}), {:.0} GB, {}; {}; commit {}{dirty}; {}.</sub>",
            results.command,
            results.seconds.round(),
            machine.cpu,
            machine.cores,
            machine.memory_bytes as f64 / 1e9,
            machine.kernel,
            versions.join(", "),
            short(&commit.hash),
            results.date,
        ),
    );
}

/// Returns the name and the version. The output of `rustc --version` already has the name.
fn version_of(name: &str, version: &str) -> String {
    if version.starts_with(name) { version.to_owned() } else { format!("{name} {version}") }
}

/// Returns the first 10 characters of a commit's hash.
pub(super) fn short(hash: &str) -> &str {
    hash.get(..10).unwrap_or(hash)
}

/// Displays the rows of a comparison: a row, or `row / row` for a ratio.
struct ComparedRows<'a>(&'a RowComparison);

impl Display for ComparedRows<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.against {
            Some(against) => write!(f, "{} / {against}", self.0.row),
            None => f.write_str(&self.0.row),
        }
    }
}

/// Formats a median with its range in parentheses. The range is omitted if its ends have the same
/// text, for example if there is only one round.
fn measured(quantity: Quantity, value: &RoundSummary) -> String {
    let format = |value| quantity.format(value);
    let RoundSummary { median, min, max, .. } = value;
    if format(*min) == format(*max) {
        return format(*median);
    }
    format!("{} ({}–{})", format(*median), format(*min), format(*max))
}

/// Formats the value of a comparison with its range. Ratios have no unit.
fn spread(quantity: Quantity, is_ratio: bool, value: &RoundSummary) -> String {
    if !is_ratio {
        return measured(quantity, value);
    }
    let RoundSummary { median, min, max, rounds } = value;
    // A single round has no range.
    if rounds.len() == 1 {
        format!("{median:.2}")
    } else {
        format!("{median:.2} ({min:.2}–{max:.2})")
    }
}

/// Formats a bound with its sign and its unit.
fn shown(quantity: Quantity, is_ratio: bool, bound: Bound) -> String {
    let (sign, value) = match bound {
        Bound::AtMost(value) => ("≤", value),
        Bound::AtLeast(value) => ("≥", value),
    };
    if is_ratio {
        format!("{sign} {value:.2}")
    } else {
        format!("{sign} {}", quantity.format(value))
    }
}

/// Formats whether a bound is reached, in bold if it is not.
fn verdict(reached: Option<bool>) -> &'static str {
    match reached {
        Some(true) => "yes",
        Some(false) => "**no**",
        None => "not measured",
    }
}

/// Returns the first line of a message, because a list item in Markdown has one line.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// Appends a line with its line break.
fn line(text: &mut String, arguments: fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{arguments}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::sample;

    #[test]
    fn a_report_has_bounds_rows_ratios_and_what_is_missing() {
        let picture = Picture {
            bench: "step".into(),
            title: "GPT-2 124M, 1 rank x 4 x 128 tokens".into(),
            light: "results/step-1-light.svg".into(),
            dark: "results/step-1-dark.svg".into(),
        };
        let text = report(&[sample()], &[picture]);
        let measured = text.split_once("share of the cores.").map_or("", |(_, rest)| rest);
        let measured = measured.split_once("\n## ").map_or("", |(_, rest)| rest);
        assert_eq!(format!("## {measured}"), include_str!("../../tests/report.md"));
    }

    #[test]
    fn without_results_the_report_says_so() {
        assert!(report(&[], &[]).ends_with("There are no results yet.\n"));
    }
}
