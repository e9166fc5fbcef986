//! 0/1 Adam with the engine: runs that are interrupted at every kind of step.

use std::path::Path;
use std::time::Duration;

use burn_flex::Flex;
use deepburn_checkpoint::Checkpoint;
use deepburn_comm::run_ranks;
use deepburn_config::{
    GroupRate, GroupUpdate, NoDecay, OptimizerPlan, ParamGroup, ParamGroups, PathPattern, Plan,
    RawConfig, RunContext, resolve,
};
use deepburn_learner::{
    Engine, EngineError, LoadPlan, SaveRequest, TrainingCheckpointError, initialize,
};
use deepburn_zero::{Group, StateArray};
use serde_json::json;

use crate::mlp::{Net, Trained, step};

/// The number of steps. Steps 1, 2 and 4 use the mean gradient, step 3 compressed gradients. The
/// ranks have the same parameters after steps 5, 6, 8, 12 and 16, and different parameters after
/// steps 7, 9, 10, 11, 13 and 14.
const STEPS: usize = 14;

fn plan(ranks: usize, precision: &str, optimizer: &str) -> Plan {
    let mut params = json!({"lr": 1e-2, "weight_decay": 0.1});
    if optimizer == "ZeroOneAdam" {
        params["var_freeze_step"] = 4.into();
        params["var_update_scaler"] = 1.into();
        params["local_step_scaler"] = 2.into();
        params["local_step_clipper"] = 4.into();
    }
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": params},
        // The sums of these learning rates have no short decimal representation.
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 7}},
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

type Trainer = Engine<Flex, Net<Trained>>;

/// The results of a rank at the end of a run. `of_ranks` has its owned elements of the states that
/// differ between ranks.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f64>,
    weights: Vec<Vec<f32>>,
    local_rates: Option<f64>,
    of_ranks: Vec<(StateArray, Vec<f32>)>,
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
        let (weights, of_ranks) = (weights(&engine)?, of_ranks(&engine)?);
        let local_rates = engine.states().local_rates();
        engine.save_checkpoint(folder, SaveRequest::default())?;
        Ok::<_, TrainingCheckpointError>(Run { losses, weights, local_rates, of_ranks })
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

fn weights(engine: &Trainer) -> Result<Vec<Vec<f32>>, EngineError> {
    let of = |index| Ok(engine.states().master_data(index)?.iter::<f32>().collect());
    (0..engine.parameters().len()).map(of).collect()
}

fn of_ranks(engine: &Trainer) -> Result<Vec<(StateArray, Vec<f32>)>, EngineError> {
    let states = engine.states();
    let mut all = Vec::new();
    let arrays = states.owned_errors()?.into_iter().chain(states.owned_local()?).flatten();
    for (array, owned) in arrays {
        all.push((array, owned.data(0..owned.numel())?.iter::<f32>().collect()));
    }
    Ok(all)
}

/// Returns the plan with another `var_freeze_step`.
fn with_freeze(mut plan: Plan, step: u64) -> Plan {
    if let OptimizerPlan::ZeroOneAdam(zero_one) = &mut plan.optimizer {
        zero_one.var_freeze_step = step;
    }
    plan
}

/// Compression errors of gradients cannot be used for updates, which are smaller by the learning
/// rate.
#[test]
fn a_freeze_at_the_checkpoint_drops_the_errors_of_gradients() {
    let plan = plan(3, "fp32", "ZeroOneAdam");
    let late = with_freeze(plan.clone(), 100);
    for freeze in [2, 3, 4, 5, 6] {
        let folder = tempfile::tempdir().unwrap();
        train(&late, folder.path(), 0..6);
        let resumed = train(&with_freeze(plan.clone(), freeze), folder.path(), 6..STEPS);
        let straight = resumed[0].losses.iter().fold(0.0_f64, |most, loss| most.max(*loss));
        // The losses are below 0.3 from the first step on. With the errors of gradients they were
        // several thousand.
        assert!(straight < 1.0, "frozen after {freeze} steps: {:?}", resumed[0].losses);
    }
}

/// A later freeze postpones local steps: the ranks take exact steps with the same parameters.
#[test]
fn a_freeze_after_the_checkpoint_averages_the_ranks() {
    let plan = plan(3, "fp32", "ZeroOneAdam");
    for interrupted in [7, 8, 11] {
        let folder = tempfile::tempdir().unwrap();
        train(&plan, folder.path(), 0..interrupted);
        let exact = train(&with_freeze(plan.clone(), 100), folder.path(), interrupted..STEPS);
        assert!(
            exact.iter().all(|run| run.weights == exact[0].weights && run.local_rates.is_none())
        );
        // Local steps then start from these parameters, and the ranks have the same parameters
        // after step 16.
        let later = train(&with_freeze(plan.clone(), STEPS as u64), folder.path(), STEPS..16);
        assert!(later.iter().all(|run| run.weights == later[0].weights));
    }
}

/// A group with a learning rate of 0 exchanges nothing, and has no errors in checkpoints.
#[test]
fn a_group_without_a_rate_resumes() {
    let still = ParamGroup {
        params: vec![PathPattern::new("^head").unwrap()],
        dims: Vec::new(),
        update: GroupUpdate::Trained {
            rate: GroupRate::Factor(0.0),
            weight_decay: None,
            betas: None,
            muon_matrices: None,
        },
    };
    let mut plan = plan(2, "fp32", "ZeroOneAdam");
    plan.param_groups = ParamGroups { groups: vec![still], no_decay: NoDecay::Nothing };
    let folder = tempfile::tempdir().unwrap();
    let whole = train(&plan, folder.path(), 0..STEPS);
    for interrupted in [5, 8, 9] {
        let folder = tempfile::tempdir().unwrap();
        train(&plan, folder.path(), 0..interrupted);
        let rest = train(&plan, folder.path(), interrupted..STEPS);
        assert!(rest.iter().zip(&whole).all(|(rest, whole)| rest.weights == whole.weights));
    }
}

#[test]
fn a_resumed_run_takes_the_same_steps_wherever_it_was_interrupted() {
    for (ranks, precision) in
        [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16"), (4, "fp32")]
    {
        let plan = plan(ranks, precision, "ZeroOneAdam");
        let folder = tempfile::tempdir().unwrap();
        let whole = train(&plan, folder.path(), 0..STEPS);
        assert!(whole[0].local_rates.is_some());
        let apart = whole.iter().any(|run| run.weights != whole[0].weights);
        assert_eq!(apart, ranks > 1);
        for interrupted in 1..STEPS {
            let what = format!("after {interrupted} steps on {ranks} ranks in {precision}");
            let folder = tempfile::tempdir().unwrap();
            let first = train(&plan, folder.path(), 0..interrupted);
            let is_apart = [7, 9, 10, 11, 13].contains(&interrupted);
            assert_eq!(first[0].local_rates.is_some(), is_apart, "{what}");
            let rest = train(&plan, folder.path(), interrupted..STEPS);
            for ((whole, first), rest) in whole.iter().zip(first).zip(rest) {
                assert_eq!([first.losses, rest.losses].concat(), whole.losses, "{what}");
                assert!(rest.weights == whole.weights, "{what}");
                assert!(rest.of_ranks == whole.of_ranks, "{what}");
                assert_eq!(rest.local_rates, whole.local_rates, "{what}");
            }
        }
    }
}

/// With another number of ranks, every rank starts with the mean of the ranks' local states.
#[test]
fn runs_resume_with_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let before = train(&plan(2, "fp32", "ZeroOneAdam"), folder.path(), 0..STEPS);
    for (ranks, precision) in [(1, "fp32"), (3, "fp32"), (4, "bf16")] {
        let plan = plan(ranks, precision, "ZeroOneAdam");
        let after = run_ranks(ranks, Duration::from_secs(60), |member| {
            let mut engine = initialize(Net::new(), &plan, Group::<Flex>::new(member))?;
            let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ModuleOnly)?;
            let common = weights(&engine)?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            let (loaded, rates) = (weights(&engine)?, engine.states().local_rates());
            // Steps 15 and 16, of which the second averages the parameters.
            let numbers = [STEPS, STEPS + 1];
            numbers.into_iter().try_for_each(|number| step(&mut engine, number).map(drop))?;
            assert_eq!(engine.states().local_rates(), None);
            Ok::<_, TrainingCheckpointError>((common, loaded, rates, weights(&engine)?))
        });
        let after = after.unwrap_or_else(|failure| panic!("{failure}"));
        for (common, loaded, rates, trained) in &after {
            assert_eq!(*rates, before[0].local_rates);
            assert!(*common == after[0].0 && *loaded == after[0].1 && *trained == after[0].3);
            assert!(common != loaded && loaded != trained);
            let means = before[0].weights.iter().flatten().zip(before[1].weights.iter().flatten());
            for (loaded, (one, other)) in loaded.iter().flatten().zip(means) {
                // The results differ by about six rounding errors of numbers below 2.
                assert!((loaded - (one + other) / 2.0).abs() < 1e-6);
            }
        }
    }
}

/// Local states are refused by optimizers that keep the same states on all ranks.
#[test]
fn states_between_exchanges_are_refused_by_other_optimizers() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        train(&plan(ranks, "fp32", "ZeroOneAdam"), folder.path(), 0..STEPS);
        for other in ["AdamW", "OneBitAdam"] {
            let plan = plan(ranks, "fp32", other);
            let refused = run_ranks(ranks, Duration::from_secs(60), |member| {
                let mut engine = initialize(Net::new(), &plan, Group::<Flex>::new(member))?;
                let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
                engine.load_checkpoint(&checkpoint, LoadPlan::ALL).map(drop)
            });
            let message = refused.map(|_| ()).unwrap_err().to_string();
            assert!(
                message.contains("compressed exchanges") && message.contains("exp_avg_0"),
                "{message}"
            );
        }
    }
}
