//! End-to-end tests of every schedule and every optimizer.

use deepburn::schedule::Schedule;
use serde_json::{Value, json};

use crate::job::Job;

const STEPS: usize = 14;

/// Returns all schedules, each with an end, a cycle or a staircase step within 14 steps.
fn schedules() -> Vec<Value> {
    let of = |kind: &str, params: Value| json!({"type": kind, "params": params});
    vec![
        of("WarmupLR", json!({"warmup_num_steps": 6, "warmup_max_lr": 0.01})),
        of(
            "WarmupLR",
            json!({"warmup_num_steps": 6, "warmup_type": "linear",
                              "warmup_min_lr": 1e-4}),
        ),
        of(
            "WarmupLR",
            json!({"warmup_num_steps": "auto", "warmup_max_lr": "auto",
                              "warmup_min_lr": "auto"}),
        ),
        of("WarmupDecayLR", json!({"warmup_num_steps": 4, "total_num_steps": 10})),
        of("WarmupDecayLR", json!({"warmup_num_steps": 4, "total_num_steps": "auto"})),
        of("WarmupCosineLR", json!({"warmup_num_steps": 4, "total_num_steps": 12})),
        of(
            "WarmupCosineLR",
            json!({"warmup_num_steps": 3, "total_num_steps": "auto",
                                    "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}),
        ),
        of("LRRangeTest", json!({"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3})),
        of(
            "LRRangeTest",
            json!({"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3,
                                 "lr_range_test_staircase": true}),
        ),
        of(
            "OneCycle",
            json!({"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2,
                              "cycle_first_step_size": 4, "decay_step_size": 2,
                              "decay_lr_rate": 0.5}),
        ),
        of(
            "OneCycle",
            json!({"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2,
                              "cycle_first_step_size": 4, "cycle_second_step_size": 6,
                              "cycle_first_stair_count": 2, "cycle_momentum": false}),
        ),
        of("StepLR", json!({"step_size": 3, "gamma": 0.5})),
        of("CosineAnnealingLR", json!({"T_max": 10, "eta_min": 1e-4})),
        of("LinearLR", json!({"start_factor": 0.1, "total_iters": 8})),
        of("ExponentialLR", json!({"gamma": 0.9})),
    ]
}

/// The reported learning rates are the ones of the plan in `job.json`.
#[test]
fn every_schedule_gives_its_learning_rates() {
    for schedule in schedules() {
        let job = Job::tiny()
            .with("training.max_steps", STEPS)
            .with("training.warmup_steps", 5)
            .with("deepspeed.gradient_accumulation_steps", 1)
            .with("deepspeed.scheduler", schedule.clone());
        let steps = job.train().steps;
        assert_eq!(steps.len(), STEPS);
        let mut expected = Schedule::new(&plan(&job).schedule);
        for row in &steps {
            let off = row.lr - expected.learning_rate();
            // Printing and parsing may change the last digit.
            assert!(off.abs() <= 1e-12 * row.lr, "{schedule}, step {}: {off}", row.step);
            expected.advance();
        }
        assert!(steps.windows(2).any(|rows| rows[0].lr != rows[1].lr), "{schedule} is constant");
    }
}

/// Returns the plan of a job, which is resolved in the same way as by the program.
fn plan(job: &Job) -> deepburn::config::Plan {
    let written = deepburn::config::RawConfig::from_json(&job.json()["deepspeed"].to_string());
    let facts = deepburn::config::RunContext {
        total_steps: Some(STEPS),
        warmup_steps: Some(deepburn::config::StepCount::Steps(5)),
        hidden_size: Some(48),
        ..deepburn::config::RunContext::on_host(2)
    };
    deepburn::config::resolve(&written.unwrap(), &facts).unwrap().plan
}

/// Every optimizer lowers the loss, with the same bits at every stage.
#[test]
fn every_optimizer_learns() {
    for optimizer in [
        json!({"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}),
        json!({"type": "AdamW", "params": {"lr": 2e-3, "bias_correction": false}}),
        json!({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.01, "adam_w_mode": false}}),
        json!({"type": "SGD", "params": {"lr": 0.5}}),
        json!({"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9, "nesterov": true}}),
        json!({"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}),
        json!({"type": "Adagrad", "params": {"lr": 1e-2}}),
    ] {
        let at = |stage| {
            let job = Job::tiny().with("training.max_steps", 7).sharded(stage, 3);
            job.with("deepspeed.optimizer", optimizer.clone()).train()
        };
        let plain = at(0);
        let (first, last) = (plain.steps[0].loss, plain.steps[6].loss);
        assert!(last < first - 0.02, "{optimizer}: from {first} to {last}");
        for stage in [1, 2, 3] {
            assert!(at(stage).numbers() == plain.numbers(), "{optimizer} at stage {stage}");
        }
    }
}
