//! Benches of crates that print one number a row: `{"name": …, "value": …}`.
//!
//! Main type: [`Score`].

use serde::Deserialize;

use crate::Outcome;
use crate::programs::CargoBench;
use crate::quantity::Observations;
use crate::results::Results;
use crate::rounds::Recorder;
use crate::suite::Suite;

/// A row of such a bench.
#[derive(Debug, Deserialize)]
struct Score {
    /// Name of the row; underscores are shown as spaces.
    name: String,
    /// The number, whose meaning the bench defines.
    value: f64,
}

/// Runs a bench in rounds and returns its rows; `observe` turns a value into a quantity.
///
/// `None`, with a note in `results`, if the crate has no such bench.
///
/// # Errors
/// When the bench does not build, fails or prints something else.
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
