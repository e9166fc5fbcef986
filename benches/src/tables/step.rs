//! Measures the time and the memory of a training step with different precisions, ZeRO stages,
//! ranks and backends, and compares them with peers.
//!
//! There are two tables: one rank with 4 sequences of 128 tokens, and two ranks with 2 sequences
//! each, so that both have the same global batch. Each run has five steps on random tokens, of
//! which the last three are counted. The columns are `TRAINING`: step time and tokens per second
//! are medians over the counted steps, peak memory is the PSS of all processes, and the categories
//! are from rank 0's ledger, which peers do not have.
//!
//! DeepBurn and the peers have the same model, AdamW, clipping by the global norm, precision,
//! global batch, and total number of cores. There are two differences. In bf16, PyTorch eager and
//! DDP have weights and optimizer states in bf16, while DeepBurn, FSDP2 and DeepSpeed have f32
//! master weights, which take more memory. DeepBurn's ranks are threads of one process, which share
//! gathered parameters, while the ranks of peers are processes over gloo. One row has rank
//! processes for DeepBurn, too.
//!
//! The bounds apply to ratios on the machine of the report, in full runs.

use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "step",
    title: "Training step",
    about: "An optimizer step of GPT-2 with AdamW and gradient clipping, on random tokens. The two ranks of the second \
        table are threads of one process, or processes under `mpirun`; the peers' ranks are processes over gloo. In \
        bf16, DeepBurn, FSDP2 and DeepSpeed keep fp32 master weights; PyTorch eager and DDP train weights and \
        optimizer states in bf16.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 5;
/// Number of first steps that are not counted, in which buffers are allocated and caches are
/// filled.
const UNCOUNTED: usize = 2;
/// Number of rounds without `--rounds`.
const ROUNDS: usize = 3;
/// Number of ranks in the second table.
const RANKS: usize = 2;

/// A program that is measured.
#[derive(Debug, Clone, Copy)]
enum Contestant {
    /// DeepBurn at a ZeRO stage. The name of its backend and its ranks is the end of the row's
    /// name, and the function selects both in the job.
    Own(usize, &'static str, fn(BenchJob) -> BenchJob),
    /// A peer with the end of the row's name, its script and options.
    Peer(&'static str, Script, &'static [&'static str]),
}

use Contestant::{Own, Peer};

/// Measures both tables and compares their rows.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload = gpt2(suite, (4, 128), (4, 64));
    // DeepBurn runs on its CPU backend with rank threads, unless the job is changed.
    let (flex, tch): (fn(BenchJob) -> BenchJob, _) = (|job| job, BenchJob::on_tch);
    let one = [Own(0, "flex", flex), Peer("PyTorch eager", Script::EAGER, &[]), Own(0, "tch", tch)];
    let one = one.map(|contestant| (contestant, &RunPrecision::ALL[..]));
    let mut table = table(suite, results, &workload, 1, &one)?;
    compare_one(suite, &mut table);
    results.tables.push(table);

    let both = &RunPrecision::ALL[..];
    let two = [
        (Own(0, "flex", flex), both),
        (Peer("DDP", Script::DDP, &[]), both),
        (Peer("DeepSpeed stage 0", Script::DEEPSPEED, &["--stage", "0"]), both),
        (Own(3, "flex", flex), both),
        (Peer("FSDP2", Script::FSDP2, &[]), both),
        (Peer("DeepSpeed stage 3", Script::DEEPSPEED, &["--stage", "3"]), both),
        (Own(3, "tch", tch), both),
        (Own(3, "flex, processes", BenchJob::with_processes), &[RunPrecision::Fp32][..]),
    ];
    let mut table = self::table(suite, results, &workload.with_sequences(2), RANKS, &two)?;
    compare_stage_0(suite, &mut table);
    compare_stage_3(suite, &mut table);
    results.tables.push(table);
    Ok(())
}

/// Measures contestants in their precisions and returns the table, in which rows are grouped by
/// precision.
///
/// If a contestant cannot be run on this machine, it is recorded as missing.
///
/// # Errors
/// Returns an error if the tokens cannot be written.
fn table(
    suite: &Suite,
    results: &mut Results,
    workload: &Workload,
    ranks: usize,
    contestants: &[(Contestant, &[RunPrecision])],
) -> Outcome<Table> {
    let mut variants = Variants::new(suite);
    for precision in RunPrecision::ALL {
        let type_name = precision.name();
        for (contestant, _) in contestants.iter().filter(|(_, all)| all.contains(&precision)) {
            match *contestant {
                Own(stage, backend, change) => {
                    let job = BenchJob::new(workload, &suite.tokens(workload)?, STEPS);
                    let job = change(job.ranks(ranks).precision(precision).stage(stage));
                    // One rank has no stages.
                    let name = match ranks {
                        1 => format!("{type_name}, {backend}"),
                        _ => format!("{type_name}, stage {stage}, {backend}"),
                    };
                    variants.train(name, job, UNCOUNTED);
                }
                Peer(name, script, options) => {
                    let run = PeerRun::new(script, workload, STEPS).with(options);
                    // A script for one rank runs without `ranks.py`.
                    let run = PeerRun { ranks: (ranks > 1).then_some(ranks), precision, ..run };
                    variants.train_peer(format!("{type_name}, {name}"), run, UNCOUNTED);
                }
            }
        }
    }
    let mut table = variants.measure(results, &workload.title(ranks), ROUNDS, &TRAINING);
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}

/// Adds the comparisons of one rank.
fn compare_one(suite: &Suite, table: &mut Table) {
    let step = Quantity::Step;
    table.compare(step, "fp32, flex", "fp32, PyTorch eager", suite.bound(AtMost(0.90)));
    table.compare(step, "bf16, flex", "bf16, PyTorch eager", suite.bound(AtMost(1.0)));
    table.compare(step, "bf16, flex", "fp32, flex", suite.bound(AtMost(0.65)));
    table.compare(Quantity::Peak, "bf16, flex", "fp32, flex", suite.bound(AtMost(1.0)));
    table.compare(Quantity::Peak, "fp32, flex", "fp32, PyTorch eager", None);
    table.compare(step, "fp32, tch", "fp32, PyTorch eager", None);
    table.compare(step, "bf16, tch", "bf16, PyTorch eager", None);
}

/// Adds the comparisons of two ranks at stage 0 with DDP and DeepSpeed's stage 0.
fn compare_stage_0(suite: &Suite, table: &mut Table) {
    let (own, step) = ("fp32, stage 0, flex", Quantity::Step);
    table.compare(step, own, "fp32, DDP", suite.bound(AtMost(0.85)));
    table.compare(step, own, "fp32, DeepSpeed stage 0", suite.bound(AtMost(0.70)));
    table.compare(Quantity::Peak, own, "fp32, DDP", None);
    table.compare(Quantity::Peak, own, "fp32, DeepSpeed stage 0", None);
    table.compare(step, "bf16, stage 0, flex", "bf16, DDP", None);
    table.compare(step, "bf16, stage 0, flex", "bf16, DeepSpeed stage 0", None);
}

/// Adds the comparisons of two ranks at stage 3 with FSDP2, DeepSpeed's stage 3, and DeepBurn's
/// stage 0.
fn compare_stage_3(suite: &Suite, table: &mut Table) {
    let (step, peak) = (Quantity::Step, Quantity::Peak);
    let fp32 = "fp32, stage 3, flex";
    table.compare(step, fp32, "fp32, DeepSpeed stage 3", suite.bound(AtMost(0.35)));
    table.compare(peak, fp32, "fp32, DeepSpeed stage 3", suite.bound(AtMost(0.30)));
    table.compare(step, fp32, "fp32, FSDP2", suite.bound(AtMost(0.45)));
    table.compare(peak, fp32, "fp32, FSDP2", suite.bound(AtMost(0.35)));
    table.compare(step, fp32, "fp32, stage 0, flex", suite.bound(AtMost(1.05)));
    table.compare(step, "fp32, stage 3, flex, processes", fp32, None);
    table.compare(step, "fp32, stage 3, tch", "fp32, FSDP2", None);
    let (flex, tch) = ("bf16, stage 3, flex", "bf16, stage 3, tch");
    table.compare(step, flex, "bf16, DeepSpeed stage 3", suite.bound(AtMost(0.50)));
    table.compare(step, tch, "bf16, DeepSpeed stage 3", suite.bound(AtMost(0.35)));
    table.compare(step, flex, "bf16, FSDP2", suite.bound(AtMost(0.60)));
    table.compare(step, tch, "bf16, FSDP2", suite.bound(AtMost(0.40)));
    table.compare(step, flex, "bf16, stage 0, flex", suite.bound(AtMost(1.05)));
    table.compare(peak, flex, "bf16, DeepSpeed stage 3", None);
    table.compare(peak, flex, "bf16, FSDP2", None);
    table.compare(peak, tch, "bf16, FSDP2", None);
}
