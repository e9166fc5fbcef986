//! Runs cargo benchmarks that print a line `{"name": …, "value": …}` for each row.

use serde::Deserialize;

use crate::Outcome;
use crate::programs::CargoBench;
use crate::quantity::Observations;
use crate::results::Results;
use crate::rounds::Recorder;
use crate::suite::Suite;

/// A line of a cargo benchmark.
#[derive(Debug, Deserialize)]
struct Score {
    /// Name of the row. Underscores are replaced by spaces.
    name: String,
    /// The measured number. Its meaning depends on the benchmark.
    value: f64,
}

/// Runs a cargo benchmark in rounds and returns its rows. `observe` converts a value to a quantity.
///
/// If there is no such benchmark, it is recorded as missing in `results`, and the result is `None`.
///
/// # Errors
/// Returns an error if the cargo benchmark does not build or fails, or if its output is invalid.
pub(super) fn record(
    suite: &Suite,
    results: &mut Results,
    bench: &CargoBench,
    arguments: &[&str],
    observe: fn(f64) -> Observations,
) -> Outcome<Option<Recorder>> {
    let rounds = suite.rounds(3);
    let mut recorder = Recorder::default();
    for round in 1..=rounds {
        eprintln!("{}: round {round}/{rounds}", results.bench);
        let Some(lines) = suite.programs.cargo_bench(bench, arguments)? else {
            results.missing.push(format!("the bench {}", bench.source));
            return Ok(None);
        };
        if lines.is_empty() {
            return Err(format!("{} printed no JSON", bench.source).into());
        }
        for line in lines {
            let Score { name, value } = serde_json::from_value(line.clone())
                .map_err(|error| format!("{}: {line}: {error}", bench.source))?;
            recorder.record(&name.replace('_', " "), false, &observe(value));
        }
    }
    Ok(Some(recorder))
}
