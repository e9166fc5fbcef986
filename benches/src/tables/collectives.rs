//! Compares reduce-scatter and all-gather between threads with plain copies and additions.
//!
//! The cargo benchmark `rank_threads` of `deepburn-zero` measures collectives inside one process.
//! It prints the rate of each collective as a fraction of its limit, which is the rate of plain
//! loops with the same copies and additions. This benchmark runs it in rounds and stores the
//! fractions.
//!
//! Measurement errors: limit and collective are measured one after the other, and both depend on
//! the memory bandwidth, which other programs use too.

use super::score::ScoreTable;
use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "collectives",
    title: "Collectives",
    about: "Collectives of 100 million floats between 2 and 4 threads (`cargo bench --workspace --bench \
        rank_threads`). The limit is the rate of the copies and additions that a collective implies, by plain loops, \
        on as many threads for a reduce-scatter and on one for an all-gather, whose result the ranks share.",
    run,
};

/// The cargo benchmark of `deepburn-zero`, which prints a JSON line for each collective and number
/// of ranks.
const RANK_THREADS: CargoBench = CargoBench {
    source: "crates/deepburn-zero/benches/rank_threads.rs",
    selection: &["--workspace", "--bench", "rank_threads"],
};

/// Runs the cargo benchmark in rounds. Each row has to reach 70 % of its limit.
///
/// # Errors
/// Returns an error if the cargo benchmark does not build or fails, or if its output is invalid.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    // These rounds are within a round of the suite.
    let arguments: &[&str] = suite.pick(&[], &["--rounds", "1", "--elements", "1000000"]);
    let scores = ScoreTable {
        title: suite.pick("100 million floats", "1 million floats"),
        quantity: Quantity::OfLimit,
        // The benchmark prints shares of the limit.
        convert: |share| share,
        bound: AtLeast(0.70),
        plot: Some(Plot::Bars(Quantity::OfLimit)),
    };
    score::run(suite, results, &RANK_THREADS, arguments, &scores)
}
