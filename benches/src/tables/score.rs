//! Runs cargo benchmarks that print a line `{"name": …, "value": …}` for each row.

use serde::Deserialize;

use super::*;
use crate::results::Bound;

/// A line of a cargo benchmark.
#[derive(Debug, Deserialize)]
struct BenchScore {
    /// Name of the row. Underscores are replaced by spaces.
    name: String,
    /// The measured number. Its meaning depends on the benchmark.
    value: f64,
}

/// How the values of a cargo benchmark become a table.
pub(super) struct ScoreTable<'a> {
    /// Heading of the table.
    pub(super) title: &'a str,
    /// The quantity of all rows.
    pub(super) quantity: Quantity,
    /// Converts a value to the quantity.
    pub(super) convert: fn(f64) -> f64,
    /// The bound of each row.
    pub(super) bound: Bound,
    /// The plot of the rows.
    pub(super) plot: Option<Plot>,
}

/// Runs a cargo benchmark in rounds and adds its table, with a bound for each row.
///
/// If there is no such benchmark, it is recorded as missing in `results`.
///
/// # Errors
/// Returns an error if the cargo benchmark does not build or fails, or if its output is invalid.
pub(super) fn run(
    suite: &Suite,
    results: &mut Results,
    bench: &CargoBench,
    arguments: &[&str],
    scores: &ScoreTable<'_>,
) -> Outcome<()> {
    let rounds = suite.rounds(3);
    let mut recorder = RoundRecorder::default();
    for round in 1..=rounds {
        eprintln!("{}: round {round}/{rounds}", results.bench);
        let Some(lines) = suite.programs.cargo_bench(bench, arguments)? else {
            results.missing.push(format!("the bench {}", bench.source));
            return Ok(());
        };
        // A benchmark that ignores `--json` must not look like one without rows.
        if lines.is_empty() {
            return Err(format!("{} printed no JSON", bench.source).into());
        }
        for line in lines {
            let BenchScore { name, value } = serde_json::from_value(line.clone())
                .map_err(|error| format!("{}: {line}: {error}", bench.source))?;
            let found = Observations::of(scores.quantity, (scores.convert)(value));
            recorder.record(&name.replace('_', " "), false, &found);
        }
    }
    let mut table = recorder.table(scores.title, &[scores.quantity]);
    let names: Vec<_> = table.rows.iter().map(|row| row.name.clone()).collect();
    for name in names {
        table.check(scores.quantity, &name, suite.bound(scores.bound));
    }
    table.plot = scores.plot;
    results.tables.push(table);
    Ok(())
}
