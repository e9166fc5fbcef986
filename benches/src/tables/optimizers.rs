//! Every optimizer: time of the update and memory of its states.
//!
//! GPT-2 124M trains on two ranks with each optimizer, at stage 1 so that states are sharded. The 1-bit
//! optimizers do not support sharding and train at stage 0; they freeze after two steps, and only the
//! compressed steps after it are counted.
//!
//! `seconds.optimizer` of rank 0 is what the column *optimizer* shows: the norm, clipping, the update, and
//! the communication between them. PyTorch's optimizers run on one rank, where there is no communication,
//! with all cores; half of the elements belong to each of DeepBurn's two ranks, which share the same cores.
//!
//! Errors: micro-batches are small (one sequence of 128 tokens), so the update is a large part of a step.
//! Ratios of whole steps would not hold for larger batches.

use serde_json::{Value, json};

use super::Bench;
use crate::Outcome;
use crate::job::{Job, Precision, Workload};
use crate::peers::PeerRun;
use crate::quantity::Quantity;
use crate::results::{Plot, Results};
use crate::rounds::{Variant, measure};
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "optimizers",
    title: "Optimizers",
    about: "One step with each optimizer on two ranks at stage 1, and at stage 0 for the 1-bit optimizers, whose steps \
        after the freeze are measured. The optimizer's part is the norm, clipping, the update and its communication. \
        PyTorch's optimizers run on one rank with all cores.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 6;
/// Steps at the start that do not count. The 1-bit optimizers freeze within them, after two steps.
const UNCOUNTED: usize = 3;

/// Returns the optimizers: type and parameters as in the DeepSpeed section, and the ZeRO stage.
fn optimizers() -> Vec<(&'static str, Value, usize)> {
    vec![
        ("AdamW", json!({ "lr": 1e-4 }), 1),
        ("Adam", json!({ "lr": 1e-4 }), 1),
        ("SGD", json!({ "lr": 1e-4, "momentum": 0.9 }), 1),
        ("Lion", json!({ "lr": 1e-5 }), 1),
        ("Adagrad", json!({ "lr": 1e-4 }), 1),
        ("Lamb", json!({ "lr": 1e-4 }), 1),
        ("Muon", json!({ "muon_lr": 1e-3, "adam_lr": 1e-4 }), 1),
        ("OneBitAdam", json!({ "lr": 1e-5, "freeze_step": 2 }), 0),
        ("OneBitLamb", json!({ "lr": 1e-5, "freeze_step": 2 }), 0),
        ("ZeroOneAdam", json!({ "lr": 1e-5, "var_freeze_step": 2 }), 0),
    ]
}

/// Measures all optimizers, and PyTorch's AdamW, SGD and Adagrad beside them.
///
/// # Errors
/// When the tokens cannot be written. Runs that fail are noted in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload =
        suite.pick(Workload::gpt2_small(1, 128), Workload::gpt2("GPT-2 2M", 128, 2, 1, 32));
    let tokens = suite.tokens(&workload)?;
    let mut variants = Vec::new();
    for (kind, parameters, stage) in optimizers() {
        let optimizer = json!({ "type": kind, "params": parameters });
        let job = Job::new(&workload, &tokens, STEPS)
            .ranks(2)
            .stage(stage)
            .set("deepspeed.optimizer", optimizer);
        variants.push(Variant::new(kind, move || suite.observe(&job, UNCOUNTED)));
        // `eager.py` has these optimizers of PyTorch.
        if !["AdamW", "SGD", "Adagrad"].contains(&kind) {
            continue;
        }
        let name = format!("{kind}, PyTorch eager");
        match suite.peers_with(&["torch", "transformers"]) {
            Err(lacks) => results.missing.push(format!("{name}: {lacks}")),
            Ok(peers) => {
                let workload = &workload;
                variants.push(Variant::peer(name, move || {
                    let (script, precision, options) =
                        ("eager", Precision::Fp32, ["--optimizer", kind]);
                    let run = PeerRun {
                        script,
                        ranks: None,
                        workload,
                        precision,
                        steps: STEPS,
                        options: &options,
                    };
                    peers.train(&run, UNCOUNTED)
                }));
            }
        }
    }
    let columns = [Quantity::OptimizerStep, Quantity::Step, Quantity::Peak, Quantity::Optimizer];
    let mut table = measure(results, &workload.title(2), suite.rounds(2), &columns, &variants);
    for kind in ["AdamW", "SGD", "Adagrad"] {
        table.compare(Quantity::OptimizerStep, kind, &format!("{kind}, PyTorch eager"), None);
    }
    table.plot = Some(Plot::Bars(Quantity::OptimizerStep));
    results.tables.push(table);
    Ok(())
}
