//! Reduce-scatter and all-gather between threads, beside plain copies and additions.

use serde::Deserialize;

use super::Bench;
use crate::Outcome;
use crate::programs::CargoBench;
use crate::quantity::{Observations, Quantity};
use crate::results::Bound::AtLeast;
use crate::results::Results;
use crate::rounds::Recorder;
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "collectives",
    title: "Collectives",
    about: "Collectives of 100 million floats between 2 and 4 threads. The limit is the time of the copies and \
        additions that a collective implies, made by as many threads on plain arrays.",
    run,
};

const COLLECTIVES: CargoBench = CargoBench {
    source: "crates/deepburn-comm/benches/collectives.rs",
    selection: &["-p", "deepburn-comm", "--bench", "collectives"],
};

/// A line of the bench.
#[derive(Debug, Deserialize)]
struct Collective {
    name: String,
    threads: usize,
    seconds_median: f64,
    /// Seconds of the copies and additions.
    limit_seconds: f64,
}

fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let rounds = suite.rounds(3);
    let mut recorder = Recorder::default();
    for round in 1..=rounds {
        eprintln!("collectives: round {round}/{rounds}");
        let Some(lines) = suite.programs.cargo_bench(&COLLECTIVES, &[])? else {
            results.missing.push(format!("the bench {}", COLLECTIVES.source));
            return Ok(());
        };
        for line in lines {
            let found: Collective = serde_json::from_value(line.clone())
                .map_err(|error| format!("{line} is no collective: {error}"))?;
            let share = found.limit_seconds / found.seconds_median;
            let observed = Observations::default().with(Quantity::Program, found.seconds_median);
            let name = format!("{}, {} threads", found.name, found.threads);
            recorder.record(&name, false, &observed.with(Quantity::OfLimit, share));
        }
    }
    let mut table = recorder.table("100 million floats", &[Quantity::Program, Quantity::OfLimit]);
    let names: Vec<_> = table.rows.iter().map(|row| row.name.clone()).collect();
    for name in names {
        table.check(Quantity::OfLimit, &name, suite.bound(AtLeast(0.70)));
    }
    results.tables.push(table);
    Ok(())
}
