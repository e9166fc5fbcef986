//! Measures the training step of GPT-2 with sequences of 128 to 4,096 tokens beside PyTorch, eager
//! and with `torch.compile`.
//!
//! The first three tables are of one rank: 4 sequences of 128 tokens, one of 1,024, and one of
//! 4,096, for which the model has as many positions. The last one is of two ranks with one sequence
//! of 1,024 tokens each: stage 0 beside DDP, and stage 3 beside FSDP2. In bf16, PyTorch on one rank
//! and DDP have weights and optimizer states in bf16, DeepBurn and FSDP2 have f32 master weights.
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
        PyTorch is measured in eager mode and with `torch.compile`. In bf16, PyTorch and DDP train weights and \
        optimizer states in bf16; DeepBurn and FSDP2 keep fp32 master weights.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 4;
/// Number of first steps that are not counted.
const UNCOUNTED: usize = 2;
/// Number of rounds without `--rounds`.
const ROUNDS: usize = 3;
/// Number of ranks in the last table.
const RANKS: usize = 2;
/// The columns of the tables.
const COLUMNS: [Quantity; 3] = [Quantity::Step, Quantity::Throughput, Quantity::Peak];
/// The ways in which PyTorch runs a model, with the options of the scripts.
const MODES: [(&str, &[&str]); 2] = [("eager", &[]), ("compiled", &["--compile"])];

/// The bounds of a table of one rank, as ratios to PyTorch.
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
    let workload = gpt2(suite, (1, 1024), (1, 64));
    let table = two_ranks(suite, results, &workload)?;
    results.tables.push(table);
    Ok(())
}

/// Measures one rank beside PyTorch.
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

/// Measures two ranks beside DDP and FSDP2.
///
/// # Errors
/// Returns an error if the tokens cannot be written.
fn two_ranks(suite: &Suite, results: &mut Results, workload: &Workload) -> Outcome<Table> {
    const PEERS: [(usize, &str, Script); 2] =
        [(0, "DDP", Script::DDP), (3, "FSDP2", Script::FSDP2)];
    let mut variants = Variants::new(suite);
    for precision in RunPrecision::ALL {
        let name = precision.name();
        for (stage, peer, script) in PEERS {
            let job = BenchJob::new(workload, &suite.tokens(workload)?, STEPS);
            let job = job.ranks(RANKS).precision(precision).stage(stage);
            variants.train(format!("{name}, stage {stage}, flex"), job, UNCOUNTED);
            for (mode, options) in MODES {
                let run = PeerRun::new(script, workload, STEPS);
                let run = PeerRun { ranks: Some(RANKS), precision, ..run }.with(options);
                variants.train_peer(format!("{name}, {peer} {mode}"), run, UNCOUNTED);
            }
        }
    }
    let mut table = variants.measure(results, &workload.title(RANKS), ROUNDS, &COLUMNS);
    for precision in RunPrecision::ALL.map(RunPrecision::name) {
        for (stage, peer, _) in PEERS {
            let own = format!("{precision}, stage {stage}, flex");
            // Only fully sharded training in f32 has bounds.
            let bound =
                |most| suite.bound(AtMost(most)).filter(|_| stage == 3 && precision == "fp32");
            let [eager, compiled] = MODES.map(|(mode, _)| format!("{precision}, {peer} {mode}"));
            table.compare(Quantity::Step, &own, &eager, bound(0.40));
            table.compare(Quantity::Peak, &own, &eager, bound(0.35));
            table.compare(Quantity::Step, &own, &compiled, None);
        }
    }
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}
