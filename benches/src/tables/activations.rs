//! Activation checkpointing and activation offload against keeping all activations.

use std::cell::Cell;

use serde_json::{Value, json};

use super::Bench;
use crate::Outcome;
use crate::job::{Job, Workload};
use crate::metrics::observe;
use crate::quantity::{Observations, Quantity};
use crate::results::{Plot, Results};
use crate::rounds::{Variant, measure};
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "activations",
    title: "Activation checkpointing",
    about: "Stage 3 on one rank under each policy, without and with offload of what is kept to NVMe. The losses of all \
        runs have to be the same to the bit.",
    run,
};

const STEPS: usize = 3;
const UNCOUNTED: usize = 1;

fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload =
        suite.pick(Workload::gpt2_small(8, 512), Workload::gpt2("GPT-2 2M", 128, 2, 4, 128));
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
    let variant = |(name, section): &(&'static str, Value)| {
        let job = Job::new(&workload, &tokens, STEPS).stage(3);
        let job = job.set("deepspeed.activation_checkpointing", section.clone());
        let loss = &loss;
        Variant::new(*name, move || same_loss(suite, &job, loss))
    };
    let variants: Vec<_> = policies.iter().map(variant).collect();
    let columns = [Quantity::Step, Quantity::Activations, Quantity::Peak, Quantity::Disk];
    let mut table = measure(results, &workload.title(1), suite.rounds(2), &columns, &variants);
    for (name, _) in &policies[1..] {
        for quantity in [Quantity::Step, Quantity::Activations, Quantity::Peak] {
            table.compare(quantity, name, "off", None);
        }
    }
    table.plot = Some(Plot::Bars(Quantity::Activations));
    results.tables.push(table);
    Ok(())
}

/// Trains and compares the last loss with the earlier runs.
fn same_loss(suite: &Suite, job: &Job, expected: &Cell<Option<f64>>) -> Outcome<Observations> {
    let trained = suite.train(job, suite.output()?, &[])?;
    let loss = trained.rows.last().map(|row| row.loss).ok_or("the run made no step")?;
    let before = expected.replace(expected.get().or(Some(loss)));
    if before.is_some_and(|before| before.to_bits() != loss.to_bits()) {
        return Err(format!(
            "the loss is {loss}, but {before:?} with another policy; they must be equal"
        )
        .into());
    }
    let found = observe(&trained.rows, UNCOUNTED)?;
    Ok(found.with(Quantity::Peak, trained.run.peak_bytes as f64))
}
