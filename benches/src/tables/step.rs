//! Time and memory of a training step: precision, ZeRO stage, ranks and backend, each beside its peers.
//!
//! Two tables: one rank with 4 sequences of 128 tokens, and two ranks with 2 sequences each, so both have
//! the same global batch. Each run makes five steps on random tokens, of which the last three
//! count. The columns are `TRAINING`: seconds of a step and tokens a second are medians over
//! the counted steps, peak memory is PSS of all processes, and the categories are rank 0's ledger, which
//! peers do not have.
//!
//! What is equal on both sides: the size of the model, AdamW, clipping by the global norm, f32 or
//! bf16, the global batch, and the cores in total. What is not: in bf16, PyTorch eager and DDP keep weights and
//! optimizer states in bf16, while DeepBurn, FSDP2 and DeepSpeed keep f32 masters and so more memory. Ranks of
//! DeepBurn are threads of one process, which share gathered parameters; ranks of peers are processes over gloo, and
//! one row has DeepBurn's ranks as processes too.
//!
//! Bounds are promises about ratios on the machine of the report. They hold for full sizes alone.

use super::{Bench, TRAINING};
use crate::Outcome;
use crate::job::{Job, Precision, Workload};
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
/// Steps at the start that do not count: buffers are allocated, and caches filled.
const UNCOUNTED: usize = 2;
/// Rounds of both tables, unless `--rounds` says otherwise.
const ROUNDS: usize = 3;
/// Ranks of the second table.
const RANKS: usize = 2;

/// What runs: DeepBurn with a backend and a kind of ranks, or a peer.
#[derive(Debug, Clone, Copy)]
enum Contestant {
    /// DeepBurn on its CPU backend, with threads as ranks.
    Flex { stage: usize },
    /// DeepBurn on LibTorch's kernels, with threads as ranks.
    Tch { stage: usize },
    /// DeepBurn on its CPU backend, with processes as ranks under `mpirun`.
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
    /// Returns the name of the row. Names of DeepBurn's rows have the stage only in the table of several
    /// ranks.
    fn name(self, precision: Precision, ranks: usize) -> String {
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

    /// Returns the job of a contestant that is DeepBurn, made of `base`; `None` for a peer.
    fn job(self, base: Job) -> Option<Job> {
        match self {
            Flex { stage } => Some(base.stage(stage)),
            Tch { stage } => Some(base.stage(stage).on_tch()),
            Processes { stage } => Some(base.stage(stage).with_processes()),
            Eager | Ddp | Fsdp2 | DeepSpeed { .. } => None,
        }
    }

    /// Returns a peer's script, the package that it needs beside PyTorch, and its options.
    fn script(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Ddp => ("ddp", "transformers", &[]),
            Fsdp2 => ("fsdp2", "transformers", &[]),
            DeepSpeed { stage: 0 } => ("deepspeed_zero", "deepspeed", &["--stage", "0"]),
            DeepSpeed { .. } => ("deepspeed_zero", "deepspeed", &["--stage", "3"]),
            Eager | Flex { .. } | Tch { .. } | Processes { .. } => ("eager", "transformers", &[]),
        }
    }
}

/// Measures both tables and compares their rows.
///
/// # Errors
/// When the tokens cannot be written. Runs that fail are noted in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload =
        suite.pick(Workload::gpt2_small(4, 128), Workload::gpt2("GPT-2 2M", 128, 2, 4, 64));
    let one = [Flex { stage: 0 }, Eager, Tch { stage: 0 }];
    let mut table =
        table(suite, results, &workload, 1, &one.map(|it| (it, Precision::ALL.to_vec())))?;
    compare_one(suite, &mut table);
    results.tables.push(table);

    let both = Precision::ALL.to_vec();
    let two = [
        (Flex { stage: 0 }, both.clone()),
        (Ddp, both.clone()),
        (DeepSpeed { stage: 0 }, both.clone()),
        (Flex { stage: 3 }, both.clone()),
        (Fsdp2, both.clone()),
        (DeepSpeed { stage: 3 }, both.clone()),
        (Tch { stage: 3 }, both),
        (Processes { stage: 3 }, vec![Precision::Fp32]),
    ];
    let mut table = self::table(suite, results, &workload.with_sequences(2), RANKS, &two)?;
    compare_stage_0(suite, &mut table);
    compare_stage_3(suite, &mut table);
    results.tables.push(table);
    Ok(())
}

/// Measures contestants, each in its precisions, and returns the table. Runs of one precision follow each
/// other.
///
/// A contestant that the machine cannot run is noted as missing.
///
/// # Errors
/// When the tokens cannot be written.
fn table(
    suite: &Suite,
    results: &mut Results,
    workload: &Workload,
    ranks: usize,
    contestants: &[(Contestant, Vec<Precision>)],
) -> Outcome<Table> {
    let mut variants = Vec::new();
    for precision in Precision::ALL {
        for (contestant, _) in
            contestants.iter().filter(|(_, precisions)| precisions.contains(&precision))
        {
            let name = contestant.name(precision, ranks);
            let base = Job::new(workload, &suite.tokens(workload)?, STEPS)
                .ranks(ranks)
                .precision(precision);
            let variant = match contestant.job(base) {
                Some(job) => suite.supports(job.features).map(|()| {
                    // Before the rounds, which are timed. That it does not build is an error of the first run.
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

/// Returns the variant of a peer, or what it needs and the machine lacks. `workload` and ranks come as a
/// pair.
fn peer<'a>(
    suite: &'a Suite,
    contestant: Contestant,
    (workload, ranks): (&'a Workload, usize),
    precision: Precision,
) -> Result<Variant<'a>, String> {
    let (script, package, options) = contestant.script();
    let peers = suite.peers_with(&["torch", package])?;
    Ok(Variant::peer(contestant.name(precision, ranks), move || {
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

/// Adds the comparisons of two ranks at stage 3 with FSDP2, DeepSpeed's stage 3, and our own stage 0.
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
