//! Measures the training step of GPT-2 with sequences of 128 to 4,096 tokens beside PyTorch, eager
//! and with `torch.compile`.
//!
//! There are three tables: 4 sequences of 128 tokens, one of 1,024, and one of 4,096, for which the
//! model has as many positions. In bf16, PyTorch has weights and optimizer states in bf16, and
//! DeepBurn has f32 master weights.
//!
//! Each run has four steps on random tokens, of which the last two are counted: a compiled program
//! compiles in its first step, and buffers are allocated in the first two. PyTorch recomputes
//! nothing, and neither does DeepBurn.
//!
//! The bounds apply to ratios on the machine of the report, in full runs. The bounds of bf16 are
//! for processors with bf16 instructions.

use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "lengths",
    title: "Long sequences and compiled peers",
    about: "An optimizer step of GPT-2 124M with AdamW and gradient clipping, on random tokens, without recomputation. \
        PyTorch is measured in eager mode and with `torch.compile`. In bf16, PyTorch trains weights and optimizer \
        states in bf16; DeepBurn keeps fp32 master weights.",
    run,
};

/// Optimizer steps of a run.
pub(super) const STEPS: usize = 4;
/// Number of first steps that are not counted.
pub(super) const UNCOUNTED: usize = 2;
/// Number of rounds without `--rounds`.
pub(super) const ROUNDS: usize = 3;
/// The columns of the tables.
pub(super) const COLUMNS: [Quantity; 3] = [Quantity::Step, Quantity::Throughput, Quantity::Peak];
/// The ways in which PyTorch runs a model, with the options of the scripts.
pub(super) const MODES: [(&str, &[&str]); 2] = [("eager", &[]), ("compiled", &["--compile"])];

/// The bounds of a table, as ratios to PyTorch.
struct Bounds {
    /// The time of a step in f32, relative to eager mode.
    fp32_eager: f64,
    /// The time of a step in f32, relative to the compiled model.
    fp32_compiled: f64,
    /// The time of a step in bf16, relative to the compiled model.
    bf16_compiled: f64,
    /// The memory in f32, relative to eager mode.
    memory: f64,
}

/// Measures all tables and compares their rows.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let short = Bounds { fp32_eager: 0.90, fp32_compiled: 0.90, bf16_compiled: 0.90, memory: 0.75 };
    let long =
        || Bounds { fp32_eager: 0.85, fp32_compiled: 0.95, bf16_compiled: 0.85, memory: 0.70 };
    let sizes =
        [((4, 128), (4, 32), short), ((1, 1024), (1, 64), long()), ((1, 4096), (1, 128), long())];
    for (full, quick, bounds) in sizes {
        let mut workload = gpt2(suite, full, quick);
        workload.model["n_positions"] = json!(workload.length.max(1024));
        let table = one_rank(suite, results, &workload, &bounds)?;
        results.tables.push(table);
    }
    Ok(())
}

/// Measures sequences of one length.
///
/// # Errors
/// Returns an error if the tokens cannot be written.
fn one_rank(
    suite: &Suite,
    results: &mut Results,
    workload: &Workload,
    bounds: &Bounds,
) -> Outcome<Table> {
    let mut variants = Variants::new(suite);
    for precision in RunPrecision::ALL {
        let name = precision.name();
        let job = BenchJob::new(workload, &suite.tokens(workload)?, STEPS).precision(precision);
        variants.train(format!("{name}, flex"), job, UNCOUNTED);
        for (mode, options) in MODES {
            let run = PeerRun { precision, ..PeerRun::new(Script::EAGER, workload, STEPS) };
            variants.train_peer(format!("{name}, PyTorch {mode}"), run.with(options), UNCOUNTED);
        }
    }
    let mut table = variants.measure(results, &workload.title(1), ROUNDS, &COLUMNS);
    let mut compare = |quantity, precision: &str, mode, bound: Option<f64>| {
        let (own, peer) = (format!("{precision}, flex"), format!("{precision}, PyTorch {mode}"));
        table.compare(quantity, &own, &peer, bound.and_then(|most| suite.bound(AtMost(most))));
    };
    compare(Quantity::Step, "fp32", "eager", Some(bounds.fp32_eager));
    compare(Quantity::Step, "fp32", "compiled", Some(bounds.fp32_compiled));
    compare(Quantity::Peak, "fp32", "eager", Some(bounds.memory));
    compare(Quantity::Peak, "fp32", "compiled", None);
    compare(Quantity::Step, "bf16", "eager", None);
    compare(Quantity::Step, "bf16", "compiled", Some(bounds.bf16_compiled));
    table.compare(Quantity::Step, "bf16, flex", "fp32, flex", suite.bound(AtMost(1.0)));
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}
