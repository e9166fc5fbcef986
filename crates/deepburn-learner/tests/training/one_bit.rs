//! 1-bit Adam through the engine: runs that are interrupted around the freeze, and what is refused.

use std::path::Path;
use std::time::Duration;

use burn_flex::Flex;
use deepburn_checkpoint::Checkpoint;
use deepburn_comm::run_ranks;
use deepburn_config::{Facts, Plan, Written, resolve};
use deepburn_learner::{
    Engine, EngineError, LoadPlan, SaveRequest, TrainingCheckpointError, initialize,
};
use deepburn_zero::{Group, StateArray};
use serde_json::json;

use crate::mlp::{Net, Trained, step};

/// Exact steps; the steps after them exchange signs.
const FREEZE: usize = 3;
const STEPS: usize = 7;

fn plan(ranks: usize, precision: &str, micro_batches: usize) -> Plan {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "weight_decay": 0.1, "freeze_step": FREEZE}},
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    resolve(&Written::from_value(&config).unwrap(), &Facts::on_host(ranks)).unwrap().plan
}

type Trainer = Engine<Flex, Net<Trained>>;

/// Weights of rank 0, its losses, and what each rank has lost.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f64>,
    weights: Vec<Vec<f32>>,
    errors: Vec<(StateArray, Vec<f32>)>,
}

/// Takes steps `steps`, from the checkpoint in `folder` unless they are the first, and saves there at the end. Each
/// rank has batches of its own.
fn train(plan: &Plan, folder: &Path, steps: std::ops::Range<usize>) -> Vec<Run> {
    let ranks = run_ranks(plan.batch.world_size, Duration::from_secs(60), |member| {
        let rank = member.rank();
        let mut engine = initialize(Net::new(), plan, Group::<Flex>::new(member))?;
        if steps.start > 0 {
            let checkpoint = Checkpoint::open_intact(folder, None)?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
        }
        let losses = steps.clone().map(|number| step(&mut engine, 10 * number + rank));
        let losses = losses.collect::<Result<_, _>>()?;
        let run = Run { losses, weights: weights(&engine)?, errors: errors(&engine)? };
        engine.save_checkpoint(folder, SaveRequest::default())?;
        Ok::<_, TrainingCheckpointError>(run)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

fn weights(engine: &Trainer) -> Result<Vec<Vec<f32>>, EngineError> {
    let of = |index| Ok(engine.states().master_data(index)?.iter::<f32>().collect());
    (0..engine.parameters().len()).map(of).collect()
}

/// What this rank owns of all errors, parameter after parameter.
fn errors(engine: &Trainer) -> Result<Vec<(StateArray, Vec<f32>)>, EngineError> {
    let mut all = Vec::new();
    for (array, owned) in engine.states().owned_errors()?.into_iter().flatten() {
        all.push((array, owned.data(0..owned.numel())?.iter::<f32>().collect()));
    }
    Ok(all)
}

#[test]
fn a_resumed_run_takes_the_same_steps_wherever_it_was_interrupted() {
    for (ranks, precision) in [(1, "fp32"), (2, "fp32"), (3, "bf16"), (4, "fp32")] {
        let plan = plan(ranks, precision, 1);
        let folder = tempfile::tempdir().unwrap();
        let whole = train(&plan, folder.path(), 0..STEPS);
        assert_eq!(whole[0].errors.is_empty(), ranks == 1);
        assert!(whole.iter().all(|run| run.weights == whole[0].weights), "ranks have one model");
        for interrupted in 1..STEPS {
            let folder = tempfile::tempdir().unwrap();
            let first = train(&plan, folder.path(), 0..interrupted);
            let rest = train(&plan, folder.path(), interrupted..STEPS);
            for ((whole, first), rest) in whole.iter().zip(first).zip(rest) {
                let what = format!("after {interrupted} steps on {ranks} ranks in {precision}");
                assert_eq!([first.losses, rest.losses].concat(), whole.losses, "{what}");
                assert!(rest.weights == whole.weights, "{what}");
                assert!(rest.errors == whole.errors, "{what}");
            }
        }
    }
}

/// With another number of ranks no error is lost: the mean of the worker errors is what it was.
#[test]
fn errors_go_on_with_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let before = train(&plan(2, "fp32", 1), folder.path(), 0..STEPS);
    for ranks in [3, 4] {
        let plan = plan(ranks, "fp32", 1);
        let after = run_ranks(ranks, Duration::from_secs(60), |member| {
            let mut engine = initialize(Net::new(), &plan, Group::<Flex>::new(member))?;
            let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            let errors = errors(&engine)?;
            // It trains on.
            step(&mut engine, 0)?;
            Ok::<_, TrainingCheckpointError>(errors)
        });
        let after = after.unwrap_or_else(|failure| panic!("{failure}"));
        let sum = |runs: &[&Vec<(StateArray, Vec<f32>)>], is_worker: bool| -> f64 {
            let errors = runs.iter().flat_map(|run| run.iter());
            let chosen =
                errors.filter(|(array, _)| (*array != StateArray::ServerError) == is_worker);
            chosen.flat_map(|(_, values)| values).map(|value| f64::from(*value)).sum()
        };
        let before: Vec<_> = before.iter().map(|run| &run.errors).collect();
        let after: Vec<_> = after.iter().collect();
        let [worker, server] = [true, false].map(|is_worker| sum(&before, is_worker));
        // Means of two numbers, each rounded once; some 200 of them, below 0.01.
        assert!((sum(&after, true) / ranks as f64 - worker / 2.0).abs() < 1e-6);
        assert!((sum(&after, false) - server).abs() < 1e-9 && worker != 0.0 && server != 0.0);
    }
    // One rank has nobody to exchange with.
    let alone = train(&plan(1, "fp32", 1), folder.path(), STEPS..STEPS + 1);
    assert!(alone[0].errors.is_empty());
}

#[test]
fn states_of_compressed_steps_are_refused_by_other_optimizers() {
    let folder = tempfile::tempdir().unwrap();
    train(&plan(2, "fp32", 1), folder.path(), 0..STEPS);
    let config = json!({"train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "AdamW"}});
    let adam = resolve(&Written::from_value(&config).unwrap(), &Facts::on_host(2)).unwrap().plan;
    let refused = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine = initialize(Net::new(), &adam, Group::<Flex>::new(member))?;
        let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
        engine.load_checkpoint(&checkpoint, LoadPlan::ALL).map(drop)
    });
    let message = refused.map(|_| ()).unwrap_err().to_string();
    assert!(
        message.contains("as 1-bit Adam does") && message.contains("worker_error_0"),
        "{message}"
    );
}

/// Sums of single ranks are in no checkpoint; those of all ranks are.
#[test]
fn a_checkpoint_in_mid_accumulation_is_refused_after_the_freeze() {
    let plan = plan(2, "fp32", 2);
    let folder = tempfile::tempdir().unwrap();
    let seen = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine = initialize(Net::new(), &plan, Group::<Flex>::new(member))?;
        step(&mut engine, 0)?;
        engine.save_checkpoint(folder.path(), SaveRequest::default())?;
        (1..2 * FREEZE + 1).try_for_each(|number| step(&mut engine, number).map(drop))?;
        let refused = engine.save_checkpoint(folder.path(), SaveRequest::default());
        Ok::<_, TrainingCheckpointError>(refused.map(drop).unwrap_err().to_string())
    });
    let message = seen.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0);
    assert!(message.contains("1-bit Adam"), "{message}");
}
