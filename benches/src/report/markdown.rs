//! Formats results as Markdown.
//!
//! The report has three parts: the introduction with the method, a table of all bounds, and a
//! section for each benchmark. A section has its tables (plot, rows, comparisons), a list of
//! missing and failed runs, and a line with command, machine, versions, commit and time.
//!
//! Functions named `push_…` append to the text. Columns without values are omitted. A missing value
//! is a dash.

use std::collections::HashMap;
use std::fmt::{self, Write as _};

use crate::machine::{Gpu, Machine};
use crate::quantity::Quantity;
use crate::results::{Bound, MeasuredRow, Results, RowComparison, Table};
use crate::statistics::RoundSummary;
use crate::tables::Bench;

/// The plots of tables: links for a light and a dark background, relative to the report, by
/// benchmark and title.
pub(super) type Pictures = HashMap<(String, String), [String; 2]>;

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
and the plots from the results. [`gpu`](gpu/README.md) measures on an NVIDIA GPU.

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
pub(super) fn report(results: &[Results], pictures: &Pictures) -> String {
    let mut text = String::from(INTRODUCTION);
    // Writing to a string cannot fail.
    let _ = push_results(&mut text, results, pictures);
    text
}

/// Appends the bounds and a section for each benchmark.
fn push_results(text: &mut String, results: &[Results], pictures: &Pictures) -> fmt::Result {
    if results.is_empty() {
        return writeln!(text, "\nThere are no results yet.");
    }
    push_bounds(text, results)?;
    for results in results {
        // The texts of a section are in the program, and not in the results.
        if let Some(bench) = Bench::of(&results.bench) {
            push_bench(text, bench, results, pictures)?;
        }
    }
    Ok(())
}

/// Appends a table with the bounds of all benchmarks, and the number of bounds that are reached.
///
/// A bound is not reached if its quantity was not measured, which its row shows.
fn push_bounds(text: &mut String, results: &[Results]) -> fmt::Result {
    let tables = results.iter().flat_map(|results| &results.tables);
    let bounds: Vec<_> = tables
        .flat_map(|table| table.comparisons.iter().map(move |comparison| (table, comparison)))
        .filter(|(_, comparison)| comparison.bound.is_some())
        .collect();
    if bounds.is_empty() {
        return Ok(());
    }
    let reached = bounds.iter().filter(|(_, comparison)| comparison.reached == Some(true)).count();
    writeln!(text, "\n## Bounds\n\n{reached} of {} are reached.\n", bounds.len())?;
    writeln!(text, "| Work | Quantity | Measured | Bound | Reached |\n|---|---|---|---|---|")?;
    for (table, comparison) in bounds {
        let bound = bound_cells(comparison).unwrap_or_default();
        writeln!(text, "| {}: {}{bound}", table.title, value_cells(comparison))?;
    }
    Ok(())
}

/// Returns the section of a benchmark without plots, to print it.
pub(crate) fn section(results: &Results) -> String {
    let mut text = String::new();
    if let Some(bench) = Bench::of(&results.bench) {
        // Writing to a string cannot fail.
        let _ = push_bench(&mut text, bench, results, &Pictures::new());
    }
    text
}

/// Appends the section of a benchmark.
///
/// For a missing program or a failure, the list has the first line of the message. The complete
/// message is in the file of results.
fn push_bench(
    text: &mut String,
    bench: &Bench,
    results: &Results,
    pictures: &Pictures,
) -> fmt::Result {
    let gpu = results.machine.gpu.as_ref().map(|gpu| format!(": {}", gpu.name));
    writeln!(text, "\n## {}{}\n\n{}", bench.title, gpu.unwrap_or_default(), bench.about)?;
    if results.quick {
        let warning = "Small models and one round: the figures only show that the suite works.";
        writeln!(text, "\n**{warning}**")?;
    }
    for table in &results.tables {
        writeln!(text, "\n### {}\n", table.title)?;
        let table_name = (results.bench.clone(), table.title.clone());
        if let Some([light, dark]) = pictures.get(&table_name) {
            push_picture(text, &table.title, light, dark)?;
        }
        push_rows(text, table)?;
        push_comparisons(text, table)?;
    }
    for (heading, items) in [("Not measured", &results.missing), ("Failed", &results.failures)] {
        if !items.is_empty() {
            writeln!(text, "\n{heading}:\n")?;
        }
        for item in items {
            writeln!(text, "- {}", first_line(item))?;
        }
    }
    push_source(text, results)
}

/// Appends a plot whose file is selected by the reader's color scheme, for example on GitHub.
/// `title` is its alternative text.
fn push_picture(text: &mut String, title: &str, light: &str, dark: &str) -> fmt::Result {
    writeln!(text, "<picture>")?;
    writeln!(text, "  <source media=\"(prefers-color-scheme: dark)\" srcset=\"{dark}\">")?;
    writeln!(text, "  <img alt=\"{title}\" src=\"{light}\">\n</picture>\n")
}

/// Appends the rows of a table, each cell with its median and range.
fn push_rows(text: &mut String, table: &Table) -> fmt::Result {
    let has = |column: &&Quantity| table.rows.iter().any(|row| row.measures.contains_key(*column));
    let columns: Vec<_> = table.columns.iter().filter(has).collect();
    let labels: String = columns.iter().map(|column| format!(" {} |", column.label())).collect();
    writeln!(text, "| |{labels}\n|---|{}", "---:|".repeat(columns.len()))?;
    for row in &table.rows {
        let cell = |column: &&Quantity| {
            let value = row.measures.get(column).map(|value| measured(**column, value));
            format!(" {} |", value.unwrap_or_else(|| "–".into()))
        };
        writeln!(text, "| {} |{}", name(row), columns.iter().map(cell).collect::<String>())?;
    }
    Ok(())
}

/// Returns the name of a row, in italics for a peer.
fn name(row: &MeasuredRow) -> String {
    if row.is_peer { format!("*{}*", row.name) } else { row.name.clone() }
}

/// Appends the comparisons of a table. The columns of bounds are omitted if no comparison has a
/// bound.
fn push_comparisons(text: &mut String, table: &Table) -> fmt::Result {
    if table.comparisons.is_empty() {
        return Ok(());
    }
    let has_bounds = table.comparisons.iter().any(|comparison| comparison.bound.is_some());
    let columns =
        if has_bounds { " Bound | Reached |\n|---|---|---|---|---|" } else { "\n|---|---|---|" };
    writeln!(text, "\n| Comparison | Quantity | Median |{columns}")?;
    for comparison in &table.comparisons {
        // All rows of a table need the same number of cells.
        let without = if has_bounds { "  |  |" } else { "" };
        let bound = bound_cells(comparison).unwrap_or_else(|| without.into());
        writeln!(text, "| {}{bound}", value_cells(comparison))?;
    }
    Ok(())
}

/// Appends the command, the machine, the versions, the commit and the time in small print, so that
/// the measurement can be repeated.
fn push_source(text: &mut String, results: &Results) -> fmt::Result {
    let Results { command, machine, commit, date, .. } = results;
    let Machine { cpu, cores, memory_bytes, instructions, kernel, gpu } = machine;
    let gpu = gpu.as_ref().map(|Gpu { name, driver, memory_bytes }| {
        format!("{name}, {:.0} GB, driver {driver}; ", *memory_bytes as f64 / 1e9)
    });
    let versions: Vec<_> =
        results.versions.iter().map(|(name, version)| version_of(name, version)).collect();
    let dirty = if commit.dirty { ", with changes" } else { "" };
    writeln!(
        text,
        "\n<sub>`{command}`, {} s. {}{cpu}, {cores} cores ({}), {:.0} GB, {kernel}; {}; commit {}{dirty}; {date}.</sub>",
        results.seconds.round(),
        gpu.unwrap_or_default(),
        instructions.join(" "),
        *memory_bytes as f64 / 1e9,
        versions.join(", "),
        short(&commit.hash),
    )
}

/// Returns the name and the version. The output of `rustc --version` already has the name.
fn version_of(name: &str, version: &str) -> String {
    if version.starts_with(name) { version.to_owned() } else { format!("{name} {version}") }
}

/// Returns the first 10 characters of a commit's hash.
pub(super) fn short(hash: &str) -> &str {
    hash.get(..10).unwrap_or(hash)
}

/// Formats the cells of a comparison: its row, or `row / row` for a ratio, the quantity and the
/// value.
fn value_cells(comparison: &RowComparison) -> String {
    let RowComparison { quantity, row, against, value, .. } = comparison;
    let against = against.as_ref().map(|against| format!(" / {against}")).unwrap_or_default();
    let value = value.as_ref().map(|value| spread(comparison, value));
    let value = value.unwrap_or_else(|| "not measured".into());
    format!("{row}{against} | {} | {value} |", quantity.label())
}

/// Formats the cells of a comparison's bound and whether it is reached, in bold if it is not.
fn bound_cells(comparison: &RowComparison) -> Option<String> {
    let (sign, value) = match comparison.bound? {
        Bound::AtMost(value) => ("≤", value),
        Bound::AtLeast(value) => ("≥", value),
    };
    let value = match comparison.against {
        Some(_) => format!("{value:.2}"),
        None => comparison.quantity.format(value),
    };
    let reached = match comparison.reached {
        Some(true) => "yes",
        Some(false) => "**no**",
        None => "not measured",
    };
    Some(format!(" {sign} {value} | {reached} |"))
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
fn spread(comparison: &RowComparison, value: &RoundSummary) -> String {
    if comparison.against.is_none() {
        return measured(comparison.quantity, value);
    }
    let RoundSummary { median, min, max, rounds } = value;
    // A single round has no range.
    if rounds.len() == 1 {
        format!("{median:.2}")
    } else {
        format!("{median:.2} ({min:.2}–{max:.2})")
    }
}

/// Returns the first line of a message, because a list item in Markdown has one line.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::sample;

    #[test]
    fn a_report_has_bounds_rows_ratios_and_what_is_missing() {
        let table = ("step".into(), "GPT-2 124M, 1 rank x 4 x 128 tokens".into());
        let links = ["results/step-1-light.svg".into(), "results/step-1-dark.svg".into()];
        let text = report(&[sample()], &HashMap::from([(table, links)]));
        let measured = text.split_once("share of the cores.").map_or("", |(_, rest)| rest);
        let measured = measured.split_once("\n## ").map_or("", |(_, rest)| rest);
        assert_eq!(format!("## {measured}"), include_str!("../../tests/report.md"));
    }

    #[test]
    fn without_results_the_report_says_so() {
        assert!(report(&[], &HashMap::new()).ends_with("There are no results yet.\n"));
    }
}
