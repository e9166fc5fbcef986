//! Measures the update time and the memory of the states of every optimizer.
//!
//! GPT-2 124M is trained on two ranks with each optimizer, at stage 1, so that states are sharded.
//! The 1-bit optimizers do not support sharding and are trained at stage 0. Their warm-up stage
//! ends after two steps, and only compressed steps after it are counted.
//!
//! The column *optimizer* is `seconds.optimizer` of rank 0: the norm, clipping, the update, and
//! their communication. PyTorch's optimizers run on one rank with all cores and without
//! communication. Each of DeepBurn's two ranks updates half of the elements, and both share the
//! same cores.
//!
//! Measurement errors: micro-batches are small (one sequence of 128 tokens), so the update is a
//! large part of a step. Ratios of whole steps would differ for larger batches.

use super::*;

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
/// Number of first steps that are not counted. The warm-up stage of the 1-bit optimizers ends in
/// them, after two steps.
const UNCOUNTED: usize = 3;
/// The optimizers of `eager.py`.
const IN_PYTORCH: [&str; 3] = ["AdamW", "SGD", "Adagrad"];

/// Returns the optimizers: the type and parameters in the DeepSpeed section, and the ZeRO stage.
fn optimizers() -> Vec<(&'static str, Value, usize)> {
    vec![
        ("AdamW", json!({ "lr": 1e-4 }), 1),
        ("Adam", json!({ "lr": 1e-4 }), 1),
        ("SGD", json!({ "lr": 1e-4, "momentum": 0.9 }), 1),
        // Updates of Lion have a larger norm, so its paper advises a smaller learning rate.
        ("Lion", json!({ "lr": 1e-5 }), 1),
        ("Adagrad", json!({ "lr": 1e-4 }), 1),
        ("Lamb", json!({ "lr": 1e-4 }), 1),
        ("Muon", json!({ "muon_lr": 1e-3, "adam_lr": 1e-4 }), 1),
        // The 1-bit optimizers compress after two steps, which are not counted.
        ("OneBitAdam", json!({ "lr": 1e-5, "freeze_step": 2 }), 0),
        ("OneBitLamb", json!({ "lr": 1e-5, "freeze_step": 2 }), 0),
        ("ZeroOneAdam", json!({ "lr": 1e-5, "var_freeze_step": 2 }), 0),
    ]
}

/// Measures all optimizers, and PyTorch's AdamW, SGD and Adagrad.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload = gpt2(suite, (1, 128), (1, 32));
    let tokens = suite.tokens(&workload)?;
    let mut variants = Variants::new(suite);
    for (kind, parameters, stage) in optimizers() {
        let optimizer = json!({ "type": kind, "params": parameters });
        let job = BenchJob::new(&workload, &tokens, STEPS)
            .ranks(2)
            .stage(stage)
            .set("deepspeed.optimizer", optimizer);
        variants.train(kind, job, UNCOUNTED);
        if IN_PYTORCH.contains(&kind) {
            let run = PeerRun::new(Script::EAGER, &workload, STEPS).with(&["--optimizer", kind]);
            variants.train_peer(format!("{kind}, PyTorch eager"), run, UNCOUNTED);
        }
    }
    let columns = [Quantity::OptimizerStep, Quantity::Step, Quantity::Peak, Quantity::Optimizer];
    let mut table = variants.measure(results, &workload.title(2), 2, &columns);
    for kind in IN_PYTORCH {
        table.compare(Quantity::OptimizerStep, kind, &format!("{kind}, PyTorch eager"), None);
    }
    table.plot = Some(Plot::Bars(Quantity::OptimizerStep));
    results.tables.push(table);
    Ok(())
}
