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

use super::{Bench, TRAINING};
use crate::Outcome;
use crate::job::{BenchJob, RunPrecision, Workload};
use crate::peers::PeerRun;
use crate::quantity::Quantity;
use crate::results::Bound::AtMost;
use crate::results::{Plot, Results, Table};
use crate::rounds::{Variant, measure};
use crate::suite::Suite;

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

/// A program that is measured: DeepBurn with a backend and a kind of ranks, or a peer.
#[derive(Debug, Clone, Copy)]
enum Contestant {
    /// DeepBurn on its CPU backend with rank threads.
    Flex { stage: usize },
    /// DeepBurn on LibTorch's kernels with rank threads.
    Tch { stage: usize },
    /// DeepBurn on its CPU backend with rank processes under `mpirun`.
    Processes { stage: usize },
    /// PyTorch in eager mode, on one rank.
    Eager,
    /// PyTorch's `DistributedDataParallel`.
    Ddp,
    /// PyTorch's `fully_shard`.
    Fsdp2,
    /// DeepSpeed at a ZeRO stage.
    DeepSpeed { stage: usize },
}

use Contestant::{Ddp, DeepSpeed, Eager, Flex, Fsdp2, Processes, Tch};

impl Contestant {
    /// Returns the name of the row. DeepBurn's rows have the stage in their name if there are
    /// several ranks.
    fn name(self, precision: RunPrecision, ranks: usize) -> String {
        let precision = precision.name();
        let stage =
            |stage: usize| if ranks == 1 { String::new() } else { format!(", stage {stage}") };
        match self {
            Flex { stage: number } => format!("{precision}{}, flex", stage(number)),
            Tch { stage: number } => format!("{precision}{}, tch", stage(number)),
            Processes { stage: number } => format!("{precision}{}, flex, processes", stage(number)),
            Eager => format!("{precision}, PyTorch eager"),
            Ddp => format!("{precision}, DDP"),
            Fsdp2 => format!("{precision}, FSDP2"),
            DeepSpeed { stage } => format!("{precision}, DeepSpeed stage {stage}"),
        }
    }

    /// Returns DeepBurn's job, which is based on `base`, or `None` for a peer.
    fn job(self, base: BenchJob) -> Option<BenchJob> {
        match self {
            Flex { stage } => Some(base.stage(stage)),
            Tch { stage } => Some(base.stage(stage).on_tch()),
            Processes { stage } => Some(base.stage(stage).with_processes()),
            Eager | Ddp | Fsdp2 | DeepSpeed { .. } => None,
        }
    }

    /// Returns the script of a peer, the package that it needs in addition to PyTorch, and its
    /// options.
    fn script(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Ddp => ("ddp", "transformers", &[]),
            Fsdp2 => ("fsdp2", "transformers", &[]),
            DeepSpeed { stage: 0 } => ("deepspeed_zero", "deepspeed", &["--stage", "0"]),
            // No other stages are measured.
            DeepSpeed { .. } => ("deepspeed_zero", "deepspeed", &["--stage", "3"]),
            Eager | Flex { .. } | Tch { .. } | Processes { .. } => ("eager", "transformers", &[]),
        }
    }
}

/// Measures both tables and compares their rows.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload =
        suite.pick(Workload::gpt2_small(4, 128), Workload::gpt2("GPT-2 2M", 128, 2, 4, 64));
    let one = [Flex { stage: 0 }, Eager, Tch { stage: 0 }];
    let mut table =
        table(suite, results, &workload, 1, &one.map(|it| (it, RunPrecision::ALL.to_vec())))?;
    compare_one(suite, &mut table);
    results.tables.push(table);

    let both = RunPrecision::ALL.to_vec();
    let two = [
        (Flex { stage: 0 }, both.clone()),
        (Ddp, both.clone()),
        (DeepSpeed { stage: 0 }, both.clone()),
        (Flex { stage: 3 }, both.clone()),
        (Fsdp2, both.clone()),
        (DeepSpeed { stage: 3 }, both.clone()),
        (Tch { stage: 3 }, both),
        (Processes { stage: 3 }, vec![RunPrecision::Fp32]),
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
    contestants: &[(Contestant, Vec<RunPrecision>)],
) -> Outcome<Table> {
    let mut variants = Vec::new();
    for precision in RunPrecision::ALL {
        for (contestant, _) in
            contestants.iter().filter(|(_, precisions)| precisions.contains(&precision))
        {
            let name = contestant.name(precision, ranks);
            let base = BenchJob::new(workload, &suite.tokens(workload)?, STEPS)
                .ranks(ranks)
                .precision(precision);
            let variant = match contestant.job(base) {
                Some(job) => suite.supports(job.features).map(|()| {
                    // Build the program before the rounds, which are timed. If the build fails, the
                    // first run returns the error.
                    let _ = suite.build(job.features);
                    Variant::new(&name, move || suite.observe(&job, UNCOUNTED))
                }),
                None => peer(suite, *contestant, (workload, ranks), precision),
            };
            match variant {
                Ok(variant) => variants.push(variant),
                Err(lacks) => results.missing.push(format!("{name}: {lacks}")),
            }
        }
    }
    let mut table =
        measure(results, &workload.title(ranks), suite.rounds(ROUNDS), &TRAINING, &variants);
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}

/// Returns the variant of a peer. The tuple has the workload and the number of ranks.
///
/// # Errors
/// Returns a message that names the missing package.
fn peer<'a>(
    suite: &'a Suite,
    contestant: Contestant,
    (workload, ranks): (&'a Workload, usize),
    precision: RunPrecision,
) -> Result<Variant<'a>, String> {
    let (script, package, options) = contestant.script();
    let peers = suite.peers_with(&["torch", package])?;
    Ok(Variant::peer(contestant.name(precision, ranks), move || {
        // A script for one rank runs without `ranks.py`.
        let ranks = (ranks > 1).then_some(ranks);
        peers.train(
            &PeerRun { script, ranks, workload, precision, steps: STEPS, options },
            UNCOUNTED,
        )
    }))
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
