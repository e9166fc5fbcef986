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
use deepburn_learner::{LoadPlan, SaveRequest, TrainingCheckpointError, initialize};
use deepburn_zero::Group;
use serde_json::{Value, json};

use crate::mlp::{Net, losses, step};

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
