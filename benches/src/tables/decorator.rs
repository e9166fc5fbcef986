//! Measures the overhead of the backend decorator `Zero`, which shards parameters.
//!
//! The cargo benchmark `decorator_step` of `deepburn-zero` trains the same perceptron on `Flex` and
//! on `Zero<Flex>` and prints the ratio of their times. The overhead is this ratio minus 1. It
//! comes from bookkeeping in each op (entries of the ledger, states of parameters, casts that are
//! not needed), so it is largest for small inputs.
//!
//! Measurement errors: the overhead is a small difference of two times. Its range over rounds may
//! be larger than the overhead, which may be negative.

use super::score::ScoreTable;
use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "decorator",
    title: "Decorators",
    about: "Additional time of forward and backward of a perceptron on `Zero<Flex>` over `Flex`, with gradients \
        written out and the same matrix products on both sides. A row is named after the rows and columns of its \
        input. An operation through the decorators takes about 80 ns more: it asks the thread's context whether it is \
        recorded, compares the types of its operands, and enters its result in the ledger. That is a sixth of an \
        operation on 64 elements, and nothing beside a usual one.",
    run,
};

/// The cargo benchmark of `deepburn-zero`, which prints a JSON line for each size of the input.
const DECORATOR_STEP: CargoBench = CargoBench {
    source: "crates/deepburn-zero/benches/decorator_step.rs",
    selection: &["--workspace", "--bench", "decorator_step"],
};

/// Runs the cargo benchmark in rounds. The overhead of each row may be at most 2 %.
///
/// # Errors
/// Returns an error if the cargo benchmark does not build or fails, or if its output is invalid.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let arguments: &[&str] = suite.pick(&[], &["--rounds", "5"]);
    let scores = ScoreTable {
        title: "Perceptron",
        quantity: Quantity::Overhead,
        // The benchmark prints the time on `Zero<Flex>` divided by the time on `Flex`.
        convert: |ratio| ratio - 1.0,
        bound: AtMost(0.02),
        plot: None,
    };
    score::run(suite, results, &DECORATOR_STEP, arguments, &scores)
}
