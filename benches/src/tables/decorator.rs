//! What the decorator costs that makes a backend sharded.

use serde::Deserialize;

use super::Bench;
use crate::Outcome;
use crate::programs::CargoBench;
use crate::quantity::{Observations, Quantity};
use crate::results::Bound::AtMost;
use crate::results::Results;
use crate::rounds::Recorder;
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "decorator",
    title: "Decorator",
    about: "Additional time of a tiny model's ops on `Sharded<B>` over the same ops on `B`, on tensors that are not \
        sharded.",
    run,
};

const DECORATOR: CargoBench = CargoBench {
    source: "crates/deepburn-zero/benches/decorator.rs",
    selection: &["--workspace", "--bench", "decorator"],
};

/// A line of the bench.
#[derive(Debug, Deserialize)]
struct Decorated {
    name: String,
    /// Additional time over the time on the plain backend.
    overhead_median: f64,
}

fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let rounds = suite.rounds(3);
    let mut recorder = Recorder::default();
    for round in 1..=rounds {
        eprintln!("decorator: round {round}/{rounds}");
        let Some(lines) = suite.programs.cargo_bench(&DECORATOR, &[])? else {
            results.missing.push(format!("the bench {}", DECORATOR.source));
            return Ok(());
        };
        for line in lines {
            let found: Decorated = serde_json::from_value(line.clone())
                .map_err(|error| format!("{line} has no overhead: {error}"))?;
            let observed = Observations::default().with(Quantity::Overhead, found.overhead_median);
            recorder.record(&found.name, false, &observed);
        }
    }
    let mut table = recorder.table("Tiny model", &[Quantity::Overhead]);
    let names: Vec<_> = table.rows.iter().map(|row| row.name.clone()).collect();
    for name in names {
        table.check(Quantity::Overhead, &name, suite.bound(AtMost(0.02)));
    }
    results.tables.push(table);
    Ok(())
}
