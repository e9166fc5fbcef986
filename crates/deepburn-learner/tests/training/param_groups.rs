//! Compares parameter groups with PyTorch. The losses are in `data/param_groups.json`, written by
//! `data/param_groups.py`.

use std::time::Duration;

use burn_flex::Flex;
use deepburn_checkpoint::Checkpoint;
use deepburn_comm::run_ranks;
use deepburn_config::{
    GroupRate, GroupUpdate, NoDecay, ParamGroup, ParamGroups, PathPattern, Plan, RawConfig,
    RunContext, resolve,
};
use deepburn_learner::{
    Engine, EngineError, LoadPlan, SaveRequest, TrainingCheckpointError, initialize,
};
use deepburn_zero::Group;
use serde_json::{Value, json};

use crate::mlp::{Net, Trained, losses, step};

fn group(params: &[&str], dims: &[usize], update: GroupUpdate) -> ParamGroup {
    let params = params.iter().map(|pattern| PathPattern::new(pattern).unwrap()).collect();
    ParamGroup { params, dims: dims.to_vec(), update }
}

/// Returns the groups of a function of the script.
fn groups(name: &str) -> ParamGroups {
    let trained = |rate, weight_decay, betas| GroupUpdate::Trained {
        rate,
        weight_decay,
        betas,
        muon_matrices: None,
    };
    match name {
        "adamw" => ParamGroups {
            groups: vec![
                group(&["^middle"], &[], GroupUpdate::Frozen),
                group(
                    &["^head"],
                    &[],
                    trained(GroupRate::Own(0.005), Some(0.3), Some([0.7, 0.95])),
                ),
            ],
            no_decay: NoDecay::BiasesAndNorms,
        },
        "sgd" => ParamGroups {
            groups: vec![group(
                &["^first", "^norm", "^middle"],
                &[1],
                trained(GroupRate::Factor(0.5), Some(0.2), None),
            )],
            no_decay: NoDecay::Nothing,
        },
        other => panic!("no groups {other}"),
    }
}

fn plan(name: &str, stage: u8, ranks: usize) -> Plan {
    let (optimizer, lr) = match name {
        "adamw" => (json!({"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}), 0.02),
        _ => {
            let params = json!({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01});
            (json!({"type": "SGD", "params": params}), 0.1)
        }
    };
    let config = json!({
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": lr,
            "warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    });
    let written = RawConfig::from_value(&config).unwrap();
    let facts = RunContext { param_groups: groups(name), ..RunContext::on_host(ranks) };
    resolve(&written, &facts).unwrap().plan
}

fn expected(name: &str) -> Vec<f64> {
    let text = include_str!("../data/param_groups.json");
    let losses = &serde_json::from_str::<Value>(text).unwrap()[name];
    losses.as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
}

#[test]
fn losses_match_pytorch() {
    for name in ["adamw", "sgd"] {
        let expected = expected(name);
        for (stage, ranks) in [(0, 1), (0, 2), (1, 2), (2, 3), (3, 1), (3, 2)] {
            let found = losses(&plan(name, stage, ranks));
            for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                // The order of f32 additions differs.
                let what = format!("{name}, stage {stage}, {ranks} ranks, step {step}");
                assert!((found - expected).abs() < 1e-5, "{what}: {found}, {expected}");
            }
        }
        // Without the groups the losses are different.
        let without = Plan { param_groups: ParamGroups::default(), ..plan(name, 0, 1) };
        let difference = losses(&without)[19] - expected[19];
        assert!(difference.abs() > 1e-3, "{name}: {difference}");
    }
}

#[test]
fn a_resumed_run_takes_the_same_steps() {
    for (stage, ranks) in [(1, 2), (3, 2)] {
        let (plan, folder) = (plan("adamw", stage, ranks), tempfile::tempdir().unwrap());
        let whole = losses(&plan);
        let halves = run_ranks(ranks, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let mut engine = initialize(Net::new(), &plan, group.clone())?;
            let mut losses = Vec::new();
            for number in 0..9 {
                losses.push(step(&mut engine, number)?);
            }
            engine.save_checkpoint(folder.path(), SaveRequest::default())?;
            drop(engine);
            let mut engine = initialize(Net::new(), &plan, group)?;
            let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            for number in 9..20 {
                losses.push(step(&mut engine, number)?);
            }
            Ok::<_, TrainingCheckpointError>(losses)
        });
        let halves = halves.unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(halves[0], whole, "stage {stage}");
    }
}

/// Returns the plan "adamw" of 16-bit or f32 training without frozen groups, with the optimizer on
/// the device or in host memory.
fn released(stage: u8, ranks: usize, more: &Value) -> Plan {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    });
    for (key, value) in more.as_object().unwrap() {
        match key.as_str() {
            "offload_optimizer" => config["zero_optimization"][key] = value.clone(),
            _ => config[key] = value.clone(),
        }
    }
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

/// Returns the plan with the layer `middle` frozen.
fn frozen_middle(plan: &Plan) -> Plan {
    let groups = vec![group(&["^middle"], &[], GroupUpdate::Frozen)];
    Plan { param_groups: ParamGroups { groups, no_decay: NoDecay::Nothing }, ..plan.clone() }
}

/// Returns the weights of all parameters by path.
fn weights(engine: &Engine<Flex, Net<Trained>>) -> Result<Vec<(String, Vec<f32>)>, EngineError> {
    let weights = engine.parameters().iter().map(|parameter| {
        let data = engine.states().master_data(parameter.index())?;
        Ok((parameter.path().to_owned(), data.iter::<f32>().collect()))
    });
    weights.collect()
}

/// Checks the first update of a parameter with new moments at AdamW's rate 0.02 and weight decay
/// 0.1. Bias correction makes both moments the gradient's, so each element with a gradient moves by
/// the learning rate.
#[track_caller]
fn assert_first_update(before: &[f32], after: &[f32], what: &str) {
    for (before, after) in before.iter().zip(after) {
        let moved = (after - before * (1.0 - 0.02 * 0.1)).abs();
        assert!((moved - 0.02).abs() < 2e-4, "{what}: {before} {after} moved by {moved}");
    }
}

#[test]
fn a_released_parameter_starts_with_new_states() {
    for more in [
        json!({}),
        json!({"bf16": {"enabled": true}}),
        json!({"offload_optimizer": {"device": "cpu"}}),
    ] {
        let mut expected = None;
        for (stage, ranks) in [(0, 1), (1, 2), (2, 2), (3, 2)] {
            if stage == 0 && more.get("offload_optimizer").is_some() {
                continue;
            }
            let what = format!("stage {stage}, {more}");
            let (plan, folder) = (released(stage, ranks, &more), tempfile::tempdir().unwrap());
            let found = run_ranks(ranks, Duration::from_secs(60), |member| {
                let group = Group::<Flex>::new(member);
                let mut engine = initialize(Net::new(), &frozen_middle(&plan), group.clone())?;
                (0..9).try_for_each(|number| step(&mut engine, number).map(drop))?;
                engine.save_checkpoint(folder.path(), SaveRequest::default())?;
                drop(engine);

                let load = |plan: &Plan| {
                    let mut engine = initialize(Net::new(), plan, group.clone())?;
                    let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
                    engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
                    Ok::<_, TrainingCheckpointError>(engine)
                };
                let mut engine = load(&plan)?;
                let before = weights(&engine)?;
                step(&mut engine, 9)?;
                let first = weights(&engine)?;
                engine.save_checkpoint(folder.path(), SaveRequest::default())?;
                (10..13).try_for_each(|number| step(&mut engine, number).map(drop))?;
                let straight = weights(&engine)?;
                drop(engine);
                // The checkpoint has the number of steps of each parameter.
                let mut engine = load(&plan)?;
                (10..13).try_for_each(|number| step(&mut engine, number).map(drop))?;
                let resumed = weights(&engine)?;
                drop(engine);
                // A parameter that is frozen again keeps its values.
                let mut engine = load(&frozen_middle(&plan))?;
                (10..13).try_for_each(|number| step(&mut engine, number).map(drop))?;
                let frozen = weights(&engine)?;
                Ok::<_, TrainingCheckpointError>([before, first, straight, resumed, frozen])
            });
            let [before, first, straight, resumed, frozen] =
                found.unwrap_or_else(|failure| panic!("{what}: {failure}")).swap_remove(0);
            assert_eq!(resumed, straight, "{what}");
            for (index, (path, before)) in before.iter().enumerate() {
                if path.starts_with("middle") {
                    assert_first_update(before, &first[index].1, &what);
                    let kept = frozen[index].1.iter().zip(&first[index].1);
                    // In bf16, a frozen parameter has no f32 master.
                    kept.for_each(|(kept, first)| assert!((kept / first - 1.0).abs() < 5e-3));
                } else {
                    assert_ne!(frozen[index], first[index], "{what}");
                }
            }
            assert_eq!(&straight, expected.get_or_insert_with(|| straight.clone()), "{what}");
        }
    }
}

#[test]
fn an_optimizer_with_compressed_exchanges_gets_no_new_states() {
    let optimizer = json!({"type": "OneBitAdam", "params": {"lr": 0.02, "freeze_step": 4}});
    let plan = released(0, 2, &json!({ "optimizer": optimizer }));
    let folder = tempfile::tempdir().unwrap();
    let failed = run_ranks(2, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let mut engine = initialize(Net::new(), &frozen_middle(&plan), group.clone())?;
        (0..6).try_for_each(|number| step(&mut engine, number).map(drop))?;
        engine.save_checkpoint(folder.path(), SaveRequest::default())?;
        drop(engine);
        let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
        let mut engine = initialize(Net::new(), &plan, group)?;
        engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
        Ok::<_, TrainingCheckpointError>(())
    });
    let message = failed.unwrap_err().to_string();
    for part in ["middle.", "was frozen", "cannot start with new states", "freeze it"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn groups_that_do_not_fit_are_refused_on_all_ranks() {
    for (pattern, expected) in [
        ("^heads", "param_groups[0]: no parameter of the model is in it (params \"^heads\")"),
        (".", "the module has no trainable parameter"),
    ] {
        let groups = vec![group(&[pattern], &[], GroupUpdate::Frozen)];
        let param_groups = ParamGroups { groups, no_decay: NoDecay::Nothing };
        let plan = Plan { param_groups, ..plan("adamw", 3, 2) };
        let failed = run_ranks(2, Duration::from_secs(60), |member| {
            initialize(Net::new(), &plan, Group::<Flex>::new(member)).map(|_| ())
        });
        let message = failed.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}
