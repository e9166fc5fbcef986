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

use super::*;

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
    let workload = gpt2(suite, (1, 128), (1, 32));
    let tokens = suite.tokens(&workload)?;
    let mut variants = Variants::new(suite);
    for (name, ranks, stage) in [
        ("1 rank", 1, 0),
        ("stage 0, 2 ranks", 2, 0),
        ("stage 3, 2 ranks", 2, 3),
        ("stage 3, 8 ranks", 8, 3),
    ] {
        let job = BenchJob::new(&workload, &tokens, 1).ranks(ranks).stage(stage);
        variants.own(name, move || suite.train(&job, suite.output()?, &[])?.startup(0));
    }
    let peers: [(_, _, _, &[&str]); 3] = [
        ("PyTorch eager, 1 rank", Script::EAGER, None, &[]),
        ("FSDP2, 2 ranks", Script::FSDP2, Some(2), &[]),
        ("DeepSpeed stage 3, 2 ranks", Script::DEEPSPEED, Some(2), &["--stage", "3"]),
    ];
    for (name, script, ranks, options) in peers {
        let run = PeerRun { ranks, ..PeerRun::new(script, &workload, 1).with(options) };
        // The step itself is not measured, so none has to be left out.
        variants.train_peer(name, run, 0);
    }
    let columns = [Quantity::Startup];
    let mut table = variants.measure(results, workload.name, 3, &columns);
    table.compare(Quantity::Startup, "1 rank", "PyTorch eager, 1 rank", None);
    table.compare(Quantity::Startup, "stage 3, 2 ranks", "FSDP2, 2 ranks", None);
    table.compare(Quantity::Startup, "stage 3, 2 ranks", "DeepSpeed stage 3, 2 ranks", None);
    table.plot = Some(Plot::Bars(Quantity::Startup));
    results.tables.push(table);
    Ok(())
}
