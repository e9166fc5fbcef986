//! Measures the training step of GPT-2 medium and large on two ranks at stage 3, beside FSDP2, with
//! and without recomputation of the blocks.
//!
//! The rows with recomputation have `activation_checkpointing` with the policy `full`, and
//! `gradient_checkpointing_enable` in the peer: both keep the inputs of blocks. Steps and columns
//! are as in [`super::lengths`].
//!
//! The ratios have no bounds. They show whether the ratios of GPT-2 124M hold for larger models.

use super::lengths::{COLUMNS, STEPS, UNCOUNTED};
use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "sizes",
    title: "Larger models",
    about: "An optimizer step of GPT-2 medium and large in fp32 on two ranks at stage 3, with AdamW and gradient clipping. \
        DeepBurn's ranks are threads, the peer's ranks are processes over gloo. With recomputation, both keep the inputs \
        of blocks and compute the rest again. A run that does not fit the memory of the machine is listed as failed.",
    run,
};

/// Number of ranks.
const RANKS: usize = 2;
/// Number of rounds without `--rounds`. A round takes a quarter of an hour.
const ROUNDS: usize = 2;

/// Measures both sizes.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let quick = Workload::gpt2("GPT-2 2M", 128, 2, 1, 64);
    let sizes =
        suite.pick(vec![Workload::gpt2_medium(1, 512), Workload::gpt2_large(1, 512)], vec![quick]);
    for workload in &sizes {
        let table = one_size(suite, results, workload)?;
        results.tables.push(table);
    }
    Ok(())
}

/// Measures one model beside FSDP2.
///
/// # Errors
/// Returns an error if the tokens cannot be written.
fn one_size(suite: &Suite, results: &mut Results, workload: &Workload) -> Outcome<Table> {
    const WAYS: [(&str, &str, &[&str]); 2] =
        [("", "off", &[]), (", recomputed", "full", &["--recompute"])];
    let mut variants = Variants::new(suite);
    for (way, policy, options) in WAYS {
        let job = BenchJob::new(workload, &suite.tokens(workload)?, STEPS).ranks(RANKS).stage(3);
        let job = job.set("deepspeed.activation_checkpointing", json!({ "policy": policy }));
        variants.train(format!("flex{way}"), job, UNCOUNTED);
        let run = PeerRun::new(Script::FSDP2, workload, STEPS);
        let run = PeerRun { ranks: Some(RANKS), ..run }.with(options);
        variants.train_peer(format!("FSDP2{way}"), run, UNCOUNTED);
    }
    let mut table = variants.measure(results, &workload.title(RANKS), ROUNDS, &COLUMNS);
    for (way, ..) in WAYS {
        let [own, peer] = ["flex", "FSDP2"].map(|name| format!("{name}{way}"));
        table.compare(Quantity::Step, &own, &peer, None);
        table.compare(Quantity::Peak, &own, &peer, None);
    }
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}
