//! Compares activation checkpointing and activation offload with keeping all activations.
//!
//! GPT-2 124M is trained for three steps at stage 3 on one rank, with each policy of
//! `deepspeed.activation_checkpointing`. Recomputation reduces memory but takes time, so the
//! columns are the time of a step, the peak of *activations* in rank 0's ledger, the peak memory of
//! the process, and the bytes on NVMe.
//!
//! Neither recomputation nor offload may change the bits of activations. So the last losses of all
//! runs are compared. A run whose loss differs is recorded as a failure.
//!
//! Measurement errors: NVMe is the disk of cargo's target folder, which may be another kind of
//! disk. Only two steps of a run are counted.

use std::cell::Cell;

use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "activations",
    title: "Activation checkpointing",
    about: "Stage 3 on one rank with each policy, with and without offload of the saved activations to NVMe. The \
        losses of all runs have to have the same bits.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 3;
/// Number of first steps that are not counted, in which buffers are allocated and, at stage 3, the
/// order of parameters is recorded.
const UNCOUNTED: usize = 1;

/// Measures five policies on the same tokens and compares each of them with `off`.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload = gpt2(suite, (8, 512), (4, 128));
    let tokens = suite.tokens(&workload)?;
    let nvme = suite.scratch();
    let policies: [(&str, Value); 5] = [
        ("off", json!({})),
        ("full", json!({ "policy": "full" })),
        ("selective", json!({ "policy": "selective" })),
        ("full, offload", json!({ "policy": "full", "nvme_path": nvme })),
        ("selective, offload", json!({ "policy": "selective", "nvme_path": nvme })),
    ];
    let loss = Cell::new(None);
    let mut variants = Variants::new(suite);
    for (name, section) in &policies {
        let job = BenchJob::new(&workload, &tokens, STEPS).stage(3);
        let job = job.set("deepspeed.activation_checkpointing", section.clone());
        let loss = &loss;
        variants.own(*name, move || same_loss(suite, &job, loss));
    }
    let columns = [Quantity::Step, Quantity::Activations, Quantity::Peak, Quantity::Disk];
    let mut table = variants.measure(results, &workload.title(1), 2, &columns);
    for (name, _) in &policies[1..] {
        // Without the bytes on NVMe, of which `off` has none.
        for quantity in [Quantity::Step, Quantity::Activations, Quantity::Peak] {
            table.compare(quantity, name, "off", None);
        }
    }
    table.plot = Some(Plot::Bars(Quantity::Activations));
    results.tables.push(table);
    Ok(())
}

/// Trains and compares the last loss with the loss of earlier runs. `expected` is the loss of the
/// first run that succeeded.
///
/// # Errors
/// Returns an error if the run fails or its loss has other bits.
fn same_loss(suite: &Suite, job: &BenchJob, expected: &Cell<Option<f64>>) -> Outcome<Observations> {
    let trained = suite.train(job, suite.output()?, &[])?;
    let loss = trained.rows.last().map(|row| row.loss).ok_or("the run made no step")?;
    // The first loss stays the expected one.
    let before = expected.replace(expected.get().or(Some(loss)));
    if before.is_some_and(|before| before.to_bits() != loss.to_bits()) {
        return Err(format!(
            "the loss is {loss}, but {before:?} with another policy; they must be equal"
        )
        .into());
    }
    trained.observe(UNCOUNTED)
}
