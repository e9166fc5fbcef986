//! 1-bit Adam and 1-bit LAMB with the engine: runs that are interrupted around the freeze, and
//! refused checkpoints.

use std::path::Path;
use std::time::Duration;

use burn_flex::Flex;
use deepburn_checkpoint::Checkpoint;
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, Precision, RawConfig, RunContext, resolve};
use deepburn_learner::{
    Engine, EngineError, LoadPlan, SaveRequest, TrainingCheckpointError, initialize,
};
use deepburn_zero::{Group, StateArray};
use serde_json::json;

use crate::mlp::{Net, Trained, step};

/// The number of exact steps. Later steps exchange signs.
const FREEZE: usize = 3;
const STEPS: usize = 7;

fn plan(ranks: usize, precision: &str, micro_batches: usize) -> Plan {
    with_freeze("OneBitAdam", ranks, precision, micro_batches, FREEZE)
}

fn plan_of(optimizer: &str, ranks: usize, precision: &str, micro_batches: usize) -> Plan {
    with_freeze(optimizer, ranks, precision, micro_batches, FREEZE)
}

fn with_freeze(
    optimizer: &str,
    ranks: usize,
    precision: &str,
    micro_batches: usize,
    freeze_step: usize,
) -> Plan {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2, "weight_decay": 0.1, "freeze_step": freeze_step}},
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

type Trainer = Engine<Flex, Net<Trained>>;

/// The losses, weights and compression errors of a rank, and the scalars of 1-bit LAMB.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f64>,
    scalars: Vec<(&'static str, f64)>,
    weights: Vec<Vec<f32>>,
    errors: Vec<(StateArray, Vec<f32>)>,
}

/// Takes the steps `steps` and saves a checkpoint in `folder`. Unless they are the first steps, the
/// run resumes from the checkpoint in `folder`. Each rank has different batches.
fn train(plan: &Plan, folder: &Path, steps: std::ops::Range<usize>) -> Vec<Run> {
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let rank = member.rank();
        let mut engine = initialize(Net::new(), plan, Group::<Flex>::new(member))?;
        if steps.start > 0 {
            let checkpoint = Checkpoint::open_intact(folder, None)?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
        }
        let losses = steps.clone().map(|number| step(&mut engine, 10 * number + rank));
        let losses = losses.collect::<Result<_, _>>()?;
        let all = 0..engine.parameters().len();
        let scalars = all.flat_map(|index| engine.states().scalars(index)).collect();
        let run = Run { losses, scalars, weights: weights(&engine)?, errors: errors(&engine)? };
        engine.save_checkpoint(folder, SaveRequest::default())?;
        Ok::<_, TrainingCheckpointError>(run)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

fn weights(engine: &Trainer) -> Result<Vec<Vec<f32>>, EngineError> {
    let of = |index| Ok(engine.states().master_data(index)?.iter::<f32>().collect());
    (0..engine.parameters().len()).map(of).collect()
}

/// Returns the parts of all compression errors that this rank owns, by parameter.
fn errors(engine: &Trainer) -> Result<Vec<(StateArray, Vec<f32>)>, EngineError> {
    let mut all = Vec::new();
    for (array, owned) in engine.states().owned_errors()?.into_iter().flatten() {
        all.push((array, owned.data(0..owned.numel())?.iter::<f32>().collect()));
    }
    Ok(all)
}

#[test]
fn a_resumed_run_takes_the_same_steps_wherever_it_was_interrupted() {
    let runs = [(1, "fp32"), (2, "fp32"), (3, "bf16"), (4, "fp32")];
    let optimizers = ["OneBitAdam", "OneBitLamb"].into_iter();
    let runs = optimizers.flat_map(|optimizer| runs.map(|run| (optimizer, run)));
    for (optimizer, (ranks, precision)) in runs {
        let plan = plan_of(optimizer, ranks, precision, 1);
        let folder = tempfile::tempdir().unwrap();
        let whole = train(&plan, folder.path(), 0..STEPS);
        assert_eq!(whole[0].errors.is_empty(), ranks == 1);
        assert!(whole.iter().all(|run| run.weights == whole[0].weights), "ranks have one model");
        for interrupted in 1..STEPS {
            let folder = tempfile::tempdir().unwrap();
            let first = train(&plan, folder.path(), 0..interrupted);
            let rest = train(&plan, folder.path(), interrupted..STEPS);
            let has_scalars =
                |run: &Run, count: usize| run.scalars.len() == run.weights.len() * count;
            match (optimizer, interrupted) {
                ("OneBitAdam", _) => assert!(has_scalars(&first[0], 0)),
                (_, ..=FREEZE) => assert!(has_scalars(&first[0], 2), "{:?}", first[0].scalars),
                _ => assert!(has_scalars(&first[0], 3), "{:?}", first[0].scalars),
            }
            for ((whole, first), rest) in whole.iter().zip(first).zip(rest) {
                let what = format!(
                    "{optimizer} after {interrupted} steps on {ranks} ranks in {precision}"
                );
                assert_eq!([first.losses, rest.losses].concat(), whole.losses, "{what}");
                assert!(rest.weights == whole.weights, "{what}");
                assert!(rest.errors == whole.errors, "{what}");
                assert!(rest.scalars == whole.scalars, "{what}");
            }
        }
    }
}

/// Returns the mean of the worker errors, or the server errors, of all elements in model order. The
/// parts that the ranks own are concatenated.
fn mean_errors(ranks: &[&Vec<(StateArray, Vec<f32>)>], is_worker: bool) -> Vec<f64> {
    let is_chosen = |array: &StateArray| (*array != StateArray::ServerError) == is_worker;
    let workers = if is_worker { ranks.len() } else { 1 };
    // The arrays of one parameter are consecutive, and every rank has the same arrays.
    let chosen = |rank: &&Vec<(StateArray, Vec<f32>)>| -> Vec<Vec<f32>> {
        rank.iter()
            .filter(|(array, _)| is_chosen(array))
            .map(|(_, values)| values.clone())
            .collect()
    };
    let by_rank: Vec<_> = ranks.iter().map(chosen).collect();
    let parameters = by_rank[0].len() / workers;
    let mut means = Vec::new();
    for parameter in 0..parameters {
        for arrays in &by_rank {
            let arrays = &arrays[parameter * workers..(parameter + 1) * workers];
            means.extend((0..arrays[0].len()).map(|i| {
                arrays.iter().map(|array| f64::from(array[i])).sum::<f64>() / workers as f64
            }));
        }
    }
    means
}

/// With another number of ranks no error is lost: the mean of the worker errors is unchanged.
#[test]
fn errors_are_kept_with_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let before = train(&plan(2, "fp32", 1), folder.path(), 0..STEPS);
    for ranks in [3, 4] {
        let plan = plan(ranks, "fp32", 1);
        let after = run_ranks(ranks, Duration::from_secs(60), |member| {
            let mut engine = initialize(Net::new(), &plan, Group::<Flex>::new(member))?;
            let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            let errors = errors(&engine)?;
            // Training continues.
            step(&mut engine, 0)?;
            Ok::<_, TrainingCheckpointError>(errors)
        });
        let after = after.unwrap_or_else(|failure| panic!("{failure}"));
        let after: Vec<_> = after.iter().collect();
        let before: Vec<_> = before.iter().map(|run| &run.errors).collect();
        let [worker, server] = [true, false].map(|is_worker| mean_errors(&before, is_worker));
        let others = [true, false].map(|is_worker| mean_errors(&after, is_worker));
        for (was, is) in worker.iter().chain(&server).zip(others.iter().flatten()) {
            // The means of two numbers below 0.1 are rounded once.
            assert!((was - is).abs() < 1e-8, "{was}, {is}");
        }
        assert!(worker.len() == server.len() && worker.iter().chain(&server).any(|x| *x != 0.0));
    }
    // A single rank does not exchange anything and has no errors.
    let alone = train(&plan(1, "fp32", 1), folder.path(), STEPS..STEPS + 1);
    assert!(alone[0].errors.is_empty());
}

/// Exact steps after compressed steps change the second moment, and with it the compressed
/// quantity.
#[test]
fn errors_are_dropped_when_the_freeze_is_postponed() {
    let folder = tempfile::tempdir().unwrap();
    let before = train(&plan(2, "fp32", 1), folder.path(), 0..STEPS);
    assert!(!before[0].errors.is_empty());
    let later = with_freeze("OneBitAdam", 2, "fp32", 1, STEPS + 2);
    let exact = train(&later, folder.path(), STEPS..STEPS + 2);
    assert!(exact[0].errors.is_empty());
    let compressed = train(&later, folder.path(), STEPS + 2..STEPS + 3);
    assert!(!compressed[0].errors.is_empty());
    assert_eq!(compressed[0].weights, compressed[1].weights);
}

/// No gradients are sent after the freeze, so none are rounded to the communication type.
#[test]
fn the_communication_type_ends_at_the_freeze() {
    let plan = plan(2, "fp32", 1);
    let mut rounding = plan.clone();
    rounding.precision.communication = Precision::Fp16;
    let runs = [&plan, &rounding].map(|after| {
        let folder = tempfile::tempdir().unwrap();
        train(&plan, folder.path(), 0..FREEZE);
        train(after, folder.path(), FREEZE..STEPS)
    });
    assert!(runs[0] == runs[1]);
}

#[test]
fn states_of_compressed_steps_are_refused_by_other_optimizers() {
    let folder = tempfile::tempdir().unwrap();
    train(&plan(2, "fp32", 1), folder.path(), 0..STEPS);
    let config = json!({"train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "AdamW"}});
    let adam =
        resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(2)).unwrap().plan;
    let refused = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine = initialize(Net::new(), &adam, Group::<Flex>::new(member))?;
        let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
        engine.load_checkpoint(&checkpoint, LoadPlan::ALL).map(drop)
    });
    let message = refused.map(|_| ()).unwrap_err().to_string();
    assert!(
        message.contains("states of compressed exchanges") && message.contains("worker_error_0"),
        "{message}"
    );
}

/// Sums that are not averaged have the accumulation type from the first micro-batch on.
#[test]
fn one_rank_resumes_in_mid_accumulation_after_the_freeze() {
    let mut plan = plan(1, "fp32", 2);
    plan.precision.communication = Precision::Fp16;
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (middle, end) = (2 * FREEZE + 1, 2 * FREEZE + 4);
    let uninterrupted = train(&plan, whole.path(), 0..end);
    train(&plan, parts.path(), 0..middle);
    let resumed = train(&plan, parts.path(), middle..end);
    assert_eq!(uninterrupted[0].weights, resumed[0].weights);
    assert_eq!(uninterrupted[0].losses[middle..], resumed[0].losses);
}

/// Checkpoints contain gradient sums over all ranks, but not the sums of single ranks.
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
    assert!(
        message.contains("1-bit optimizers") && message.contains("last micro-batch"),
        "{message}"
    );
}
