//! Measures the time from the start of a program to its first training step.
//!
//! For DeepBurn, the job has one step, and the time until it begins is the arrival time of the
//! first row of metrics minus the duration of the step. A peer prints a line when its model has
//! been wrapped. Both times include the start of the process, loading libraries, reading the job,
//! initializing the weights, and sharding or wrapping the model. DeepBurn's time also includes
//! reading the token file.
//!
//! Measurement errors: the arrival time is late by up to 10 ms. After the first round, programs and
//! libraries are in the page cache. A cold start of PyTorch takes longer. The first round is
//! included in the range over rounds.

use super::Bench;
use crate::Outcome;
use crate::job::{BenchJob, RunPrecision, Workload};
use crate::peers::PeerRun;
use crate::quantity::{Observations, Quantity};
use crate::results::{Plot, Results};
use crate::rounds::{Variant, add_peer, measure};
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "startup",
    title: "Start-up",
    about: "Time from the start of the program until its first step begins: reading the job, initializing the weights \
        and sharding them. Peers import their libraries, initialize the same model and wrap it.",
    run,
};

/// Measures DeepBurn with four combinations of ranks and stage, and three peers.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload =
        suite.pick(Workload::gpt2_small(1, 128), Workload::gpt2("GPT-2 2M", 128, 2, 1, 32));
    let tokens = suite.tokens(&workload)?;
    let mut variants = Vec::new();
    for (name, ranks, stage) in [
        ("1 rank", 1, 0),
        ("stage 0, 2 ranks", 2, 0),
        ("stage 3, 2 ranks", 2, 3),
        ("stage 3, 8 ranks", 8, 3),
    ] {
        let job = BenchJob::new(&workload, &tokens, 1).ranks(ranks).stage(stage);
        variants.push(Variant::new(name, move || start(suite, &job)));
    }
    let peers: [(_, _, _, &[&str], _); 3] = [
        ("PyTorch eager, 1 rank", "eager", None, &[], "transformers"),
        ("FSDP2, 2 ranks", "fsdp2", Some(2), &[], "transformers"),
        ("DeepSpeed stage 3, 2 ranks", "deepspeed_zero", Some(2), &["--stage", "3"], "deepspeed"),
    ];
    for (name, script, ranks, options, package) in peers {
        let (peers, workload) = (suite.peers_with(&["torch", package]), &workload);
        add_peer(&mut variants, results, name, peers, move |peers| {
            let precision = RunPrecision::Fp32;
            let run = PeerRun { script, ranks, workload, precision, steps: 1, options };
            // The step itself is not measured, so none has to be left out.
            peers.train(&run, 0)
        });
    }
    let columns = [Quantity::Startup];
    let mut table = measure(results, workload.name, suite.rounds(3), &columns, &variants);
    table.compare(Quantity::Startup, "1 rank", "PyTorch eager, 1 rank", None);
    table.compare(Quantity::Startup, "stage 3, 2 ranks", "FSDP2, 2 ranks", None);
    table.compare(Quantity::Startup, "stage 3, 2 ranks", "DeepSpeed stage 3, 2 ranks", None);
    table.plot = Some(Plot::Bars(Quantity::Startup));
    results.tables.push(table);
    Ok(())
}

/// Runs a job and returns the time until its first step begins.
///
/// # Errors
/// Returns an error if the run fails, or ends before its first row was seen.
fn start(suite: &Suite, job: &BenchJob) -> Outcome<Observations> {
    let trained = suite.train(job, suite.output()?, &[])?;
    let startup = trained.startup().ok_or("the run ended before its first step was seen")?;
    Ok(Observations::of(Quantity::Startup, startup))
}
