//! The benchmarks, each in its own file.
//!
//! Main type: [`Bench`]. A benchmark creates [`Variants`], measures them, adds comparisons with
//! bounds, and adds the tables to the results. The module documentation of each benchmark describes
//! how its quantities are measured and their measurement errors. The field `about` is a shorter
//! description for the report.
//!
//! To add a benchmark, add a file and an entry in [`BENCHES`].

mod activations;
mod batching;
mod checkpoints;
mod collectives;
mod compiled_ranks;
mod decoders;
mod decorator;
mod forecast;
mod generation;
mod gpu;
mod lengths;
mod loader;
mod offload;
mod optimizers;
mod pipelines;
mod processors;
mod products;
mod scaling;
mod score;
mod sizes;
mod startup;
mod step;

// For the files of the benchmarks, which import all of this.
use serde_json::{Value, json};

use crate::Outcome;
use crate::job::{BenchJob, RunPrecision, Workload};
use crate::peers::{PeerRun, Script};
use crate::process::{ProgramRun, Watched};
use crate::programs::CargoBench;
use crate::quantity::{Observations, Quantity};
use crate::results::Bound::{AtLeast, AtMost};
use crate::results::{Plot, Results, Table};
use crate::rounds::{RoundRecorder, Variants};
use crate::suite::{Suite, TrainingRun};

pub(crate) use gpu::GpuOptions;

/// Columns of tables about training: time, memory of all processes, and memory of rank 0 by
/// category.
const TRAINING: [Quantity; 8] = [
    Quantity::Step,
    Quantity::Throughput,
    Quantity::Peak,
    Quantity::Parameters,
    Quantity::Gradients,
    Quantity::Optimizer,
    Quantity::Gathered,
    Quantity::Activations,
];

/// Returns GPT-2 124M with micro-batches of `full.0` sequences of `full.1` tokens. A quick run has
/// a small GPT-2 with micro-batches of `quick`.
fn gpt2(suite: &Suite, full: (usize, usize), quick: (usize, usize)) -> Workload {
    let small = Workload::gpt2("GPT-2 2M", 128, 2, quick.0, quick.1);
    suite.pick(Workload::gpt2_small(full.0, full.1), small)
}

/// A benchmark of the suite.
#[derive(Debug)]
pub(crate) struct Bench {
    /// Name on the command line, and of the file of results, which may have a suffix: `gpu-<card>`.
    pub(crate) name: &'static str,
    /// Heading in the report.
    pub(crate) title: &'static str,
    /// Description of the measurement in the report.
    pub(crate) about: &'static str,
    /// Runs the benchmark and adds tables, missing programs and failures to the results. An error
    /// only ends this benchmark.
    pub(crate) run: fn(&Suite, &mut Results) -> Outcome<()>,
}

impl Bench {
    /// Returns the benchmark of results with this name.
    pub(crate) fn of(results: &str) -> Option<&'static Self> {
        let name = results.split_once('-').map_or(results, |(name, _)| name);
        BENCHES.iter().find(|bench| bench.name == name)
    }
}

/// All benchmarks, in the order in which they are run and reported.
pub(crate) const BENCHES: [Bench; 21] = [
    step::BENCH,
    lengths::BENCH,
    compiled_ranks::BENCH,
    sizes::BENCH,
    pipelines::BENCH,
    processors::BENCH,
    decoders::BENCH,
    generation::BENCH,
    products::BENCH,
    collectives::BENCH,
    decorator::BENCH,
    scaling::BENCH,
    loader::BENCH,
    startup::BENCH,
    optimizers::BENCH,
    offload::BENCH,
    activations::BENCH,
    checkpoints::BENCH,
    batching::BENCH,
    forecast::BENCH,
    gpu::BENCH,
];
