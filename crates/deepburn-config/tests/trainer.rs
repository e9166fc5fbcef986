//! The words of transformers' Trainer in a job file.

use std::path::Path;

use deepburn_config::{
    Cadence, Job, JobRequest, Resolved, RunContext, SchedulePlan, StepCount, resolve,
};
use serde_json::{Value, json};

/// Resolves a job with the given sections `training` and `deepspeed`.
fn resolved(training: Value, deepspeed: Value) -> Result<(Job, Resolved), String> {
    let mut deepspeed = deepspeed;
    deepspeed["train_micro_batch_size_per_gpu"] = 1.into();
    let text = json!({ "training": training, "deepspeed": deepspeed }).to_string();
    let (job, written) = Job::parse(&text, "job", Path::new(""), &JobRequest::default())
        .map_err(|error| error.to_string())?;
    let context =
        RunContext { total_steps: job.training.length.max_steps.or(Some(95)), ..job.run_context() };
    let resolved = resolve(&written, &context).map_err(|error| error.to_string())?;
    Ok((job, resolved))
}

fn schedule(training: Value, deepspeed: Value) -> SchedulePlan {
    resolved(training, deepspeed).unwrap().1.plan.schedule
}

#[test]
fn the_warmup_is_a_number_or_a_ratio_of_the_run() {
    for (training, expected) in [
        (json!({ "warmup_steps": 7 }), 7),
        (json!({ "warmup_steps": 0 }), 0),
        // ceil(0.1 * 95)
        (json!({ "warmup_ratio": 0.1 }), 10),
        (json!({ "warmup_steps": 0.1 }), 10),
        (json!({ "warmup_ratio": 0.1, "max_steps": 20 }), 2),
        (json!({ "warmup_ratio": 1 }), 95),
        (json!({ "warmup_ratio": 0.1, "warmup_steps": 0 }), 10),
        (json!({ "warmup_ratio": 0.0, "warmup_steps": 3 }), 3),
        (json!({}), 0),
    ] {
        let mut training = training;
        training["lr_scheduler_type"] = "linear".into();
        let plan = schedule(training.clone(), json!({}));
        assert_eq!(plan.warmup_steps(), expected, "{training}");
    }
    // "auto" of a schedule of DeepSpeed, whose shortest warm-up is 2 steps.
    let deepspeed = json!({ "scheduler":
        { "type": "WarmupDecayLR", "params": { "warmup_num_steps": "auto", "total_num_steps": "auto" } } });
    for (training, expected) in [
        (json!({ "warmup_ratio": 0.25 }), 24),
        (json!({ "warmup_steps": 5 }), 5),
        (json!({ "warmup_steps": 0 }), 2),
    ] {
        assert_eq!(schedule(training, deepspeed.clone()).warmup_steps(), expected);
    }
}

/// The run has 95 steps.
#[test]
fn a_warmup_that_the_run_does_not_finish_is_a_warning() {
    let params =
        |kind: &str, params: Value| json!({ "scheduler": { "type": kind, "params": params } });
    let warnings = |training: Value, deepspeed: Value| {
        let notes = resolved(training, deepspeed).unwrap().1.notes;
        let said = notes.iter().filter(|note| note.message.contains("95 steps of the run"));
        said.map(|note| note.key.clone()).collect::<Vec<_>>()
    };
    let key = "deepspeed.scheduler.params.warmup_num_steps";
    // The default is 1000 steps.
    assert_eq!(warnings(json!({}), params("WarmupLR", json!({}))), [key]);
    for (kind, steps, expected) in [
        ("WarmupLR", json!({ "warmup_num_steps": 95 }), vec![]),
        ("WarmupLR", json!({ "warmup_num_steps": 96 }), vec![key]),
        ("WarmupDecayLR", json!({ "warmup_num_steps": 96, "total_num_steps": 200 }), vec![key]),
        ("WarmupCosineLR", json!({ "warmup_num_steps": 96, "total_num_steps": "auto" }), vec![key]),
    ] {
        assert_eq!(warnings(json!({}), params(kind, steps.clone())), expected, "{kind} {steps}");
    }
    let auto = params("WarmupLR", json!({ "warmup_num_steps": "auto" }));
    assert_eq!(warnings(json!({ "warmup_steps": 100 }), auto), [key]);
    let cycle = json!({ "cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 96 });
    assert_eq!(
        warnings(json!({}), params("OneCycle", cycle)),
        ["deepspeed.scheduler.params.cycle_first_step_size"]
    );
}

#[test]
fn a_learning_rate_of_zero_is_a_warning() {
    let adamw = |lr: Value| json!({ "optimizer": { "type": "AdamW", "params": { "lr": lr } } });
    let warmup = |lr: f64| json!({ "scheduler": { "type": "WarmupLR", "params": { "warmup_max_lr": lr, "warmup_num_steps": 5 } } });
    let mut both = adamw(json!(0));
    both["scheduler"] = warmup(0.1)["scheduler"].clone();
    let zero = json!({ "learning_rate": 0.0 });
    for (training, deepspeed, expected) in [
        (json!({}), adamw(json!(0)), vec!["deepspeed.optimizer.params.lr"]),
        (zero.clone(), adamw(json!("auto")), vec!["training.learning_rate"]),
        (zero, json!({}), vec!["training.learning_rate"]),
        (json!({}), warmup(0.0), vec!["deepspeed.scheduler.params"]),
        (json!({}), both, vec![]),
        (json!({}), adamw(json!(1e-5)), vec![]),
    ] {
        let notes = resolved(training, deepspeed.clone()).unwrap().1.notes;
        let said = notes.iter().filter(|note| note.message.contains("the learning rate is 0"));
        let keys: Vec<_> = said.map(|note| note.key.as_str()).collect();
        assert_eq!(keys, expected, "{deepspeed}");
    }
}

#[test]
fn without_a_schedule_the_rate_is_constant() {
    assert_eq!(schedule(json!({}), json!({})), SchedulePlan::Constant { lr: 1e-3 });
    let constant = json!({ "lr_scheduler_type": "constant", "learning_rate": 0.5 });
    assert_eq!(schedule(constant, json!({})), SchedulePlan::Constant { lr: 0.5 });
}

#[test]
fn contradictions_and_unknown_words_are_errors() {
    let warmup = json!({ "scheduler": { "type": "WarmupLR", "params": {} } });
    for (training, deepspeed, parts) in [
        (
            json!({ "lr_scheduler_type": "cosine" }),
            warmup,
            vec!["training.lr_scheduler_type", "deepspeed.scheduler", "\"cosine\""],
        ),
        (
            json!({ "warmup_steps": 5, "warmup_ratio": 0.1 }),
            json!({}),
            vec!["training.warmup_ratio", "warmup_steps", "only one"],
        ),
        (
            json!({ "warmup_ratio": 1.5 }),
            json!({}),
            vec!["training.warmup_ratio", "1.5 is out of range", "from 0 to 1"],
        ),
        (
            json!({ "warmup_steps": 2.5 }),
            json!({}),
            vec![
                "training.warmup_steps",
                "2.5",
                "an integer of at least 0, or a ratio above 0 and below 1",
            ],
        ),
        (
            json!({ "warmup_steps": -1 }),
            json!({}),
            vec!["training.warmup_steps", "-1 is out of range"],
        ),
        (
            json!({ "lr_scheduler_type": "constant", "warmup_ratio": 0.1 }),
            json!({}),
            vec!["training.warmup_steps", "has no effect", "constant_with_warmup"],
        ),
        (
            json!({ "lr_scheduler_type": "reduce_lr_on_plateau" }),
            json!({}),
            vec!["training.lr_scheduler_type", "not a known value", "inverse_sqrt"],
        ),
        (
            json!({ "lr_scheduler_type": "greedy" }),
            json!({}),
            vec!["training.lr_scheduler_type", "not a known value"],
        ),
        (
            json!({ "lr_scheduler_kwargs": { "num_cycles": 2 } }),
            json!({}),
            vec!["training.lr_scheduler_kwargs", "training.lr_scheduler_type, which is not given"],
        ),
        (
            json!({ "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": { "power": 2 } }),
            json!({}),
            vec![
                "training.lr_scheduler_kwargs.power",
                "not a parameter of \"cosine\"",
                "has num_cycles",
            ],
        ),
        (
            json!({ "lr_scheduler_type": "linear", "lr_scheduler_kwargs": { "num_cycle": 2 } }),
            json!({}),
            vec!["training.lr_scheduler_kwargs.num_cycle", "unknown key; did you mean num_cycles?"],
        ),
        (
            json!({ "lr_scheduler_type": "cosine_with_min_lr" }),
            json!({}),
            vec!["training.lr_scheduler_kwargs.min_lr", "needs min_lr or min_lr_rate"],
        ),
        (
            json!({ "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": { "min_lr": 0.1, "min_lr_rate": 0.1 } }),
            json!({}),
            vec!["training.lr_scheduler_kwargs.min_lr", "only one"],
        ),
        (
            json!({ "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": { "min_lr": 0.1 } }),
            json!({}),
            vec!["training.lr_scheduler_kwargs.min_lr", "0.1 is not below the learning rate 0.001"],
        ),
        (
            json!({ "lr_scheduler_type": "polynomial", "learning_rate": 1e-8 }),
            json!({}),
            vec!["training.lr_scheduler_kwargs.lr_end", "1e-7 is not below"],
        ),
        (
            json!({ "lr_scheduler_type": "warmup_stable_decay" }),
            json!({}),
            vec!["training.lr_scheduler_kwargs.num_decay_steps", "is missing"],
        ),
    ] {
        let message = resolved(training.clone(), deepspeed).expect_err(&training.to_string());
        for part in parts {
            assert!(message.contains(part), "{training}: {part}: {message}");
        }
    }
}

#[test]
fn a_warmup_without_effect_is_said() {
    let of = |name: &str, params: Value| json!({ "scheduler": { "type": name, "params": params } });
    for (deepspeed, part) in [
        (json!({}), "the learning rate is constant"),
        (of("StepLR", json!({ "step_size": 3 })), "\"StepLR\" has no warm-up"),
        (of("WarmupLR", json!({ "warmup_num_steps": 8 })), "warmup_num_steps is 8"),
        (of("WarmupLR", json!({})), "warmup_num_steps is 1000"),
    ] {
        let (_, found) = resolved(json!({ "warmup_ratio": 0.1 }), deepspeed).unwrap();
        let note = found.notes.iter().find(|note| note.key.contains("training.warmup_ratio"));
        assert!(note.is_some_and(|note| note.message.contains(part)), "{part}: {:?}", found.notes);
    }
    for (training, deepspeed) in [
        (json!({ "warmup_steps": 0 }), json!({})),
        (json!({ "warmup_steps": 8 }), of("WarmupLR", json!({ "warmup_num_steps": 8 }))),
        (json!({ "warmup_steps": 8 }), of("WarmupLR", json!({ "warmup_num_steps": "auto" }))),
    ] {
        let (_, found) = resolved(training.clone(), deepspeed).unwrap();
        let note = found.notes.iter().find(|note| note.key.contains("training.warmup_steps"));
        assert!(
            note.is_none_or(|note| !note.message.contains("no effect")),
            "{training}: {note:?}"
        );
    }
}

/// Reads a job with validation data and the keys `training`.
fn evaluated(training: &Value) -> Result<Job, String> {
    let text =
        json!({ "training": training, "data": { "splits": { "train": "90%", "eval": "10%" } } });
    Job::parse(&text.to_string(), "job", Path::new(""), &JobRequest::default())
        .map(|(job, _)| job)
        .map_err(|error| error.to_string())
}

#[test]
fn evaluations_and_checkpoints_are_due_by_steps_ratios_or_epochs() {
    let every = |steps| Some(Cadence::Every(StepCount::Steps(steps)));
    for (strategy, steps, expected) in [
        (json!(null), json!(null), None),
        (json!(null), json!(5), every(5)),
        (json!("steps"), json!(5), every(5)),
        (json!("steps"), json!(0.1), Some(Cadence::Every(StepCount::Ratio(0.1)))),
        (json!("epoch"), json!(null), Some(Cadence::Epoch)),
        // The number of steps has no effect, with a warning.
        (json!("epoch"), json!(5), Some(Cadence::Epoch)),
        (json!("no"), json!(5), None),
    ] {
        let training = json!({ "eval_strategy": strategy, "eval_steps": steps,
            "save_strategy": strategy, "save_steps": steps, "max_steps": 45 });
        let mut job = evaluated(&training).unwrap();
        assert_eq!(job.training.evaluation.eval_steps, expected, "{training}");
        assert_eq!(job.training.saving.save_steps, expected, "{training}");
        let unused = strategy.is_string() && strategy != "steps" && steps.is_number();
        let said = job.notes.iter().filter(|note| note.message.contains("has no effect"));
        assert_eq!(said.count(), 2 * usize::from(unused), "{training}: {:?}", job.notes);
        // ceil(0.1 * 45)
        job.training.set_total_steps(45);
        let resolved = if steps == json!(0.1) { every(5) } else { expected };
        assert_eq!(job.training.evaluation.eval_steps, resolved);
    }
    let old = evaluated(&json!({ "evaluation_strategy": "epoch" })).unwrap();
    assert_eq!(old.training.evaluation.eval_steps, Some(Cadence::Epoch));
}

#[test]
fn invalid_cadences_are_errors() {
    for (training, parts) in [
        (
            json!({ "eval_strategy": "steps" }),
            ["training.eval_strategy", "training.eval_steps is missing"],
        ),
        (
            json!({ "save_strategy": "steps" }),
            ["training.save_strategy", "training.save_steps is missing"],
        ),
        (json!({ "save_strategy": "best" }), ["training.save_strategy", "load_best_model_at_end"]),
        (json!({ "eval_strategy": "best" }), ["training.eval_strategy", "one of no, steps, epoch"]),
        (json!({ "eval_steps": 1.5 }), ["training.eval_steps", "at least 1, or a ratio above 0"]),
        (json!({ "eval_steps": 0 }), ["training.eval_steps", "out of range"]),
        (json!({ "save_steps": 0.0 }), ["training.save_steps", "0.0"]),
        (json!({ "logging_steps": -0.5 }), ["training.logging_steps", "out of range"]),
        (
            json!({ "epochs": 2, "num_train_epochs": 3 }),
            ["training.epochs", "two names of one key"],
        ),
        (json!({ "num_train_epochs": -0.5 }), ["training.num_train_epochs", "above 0"]),
        (
            json!({ "eval_strategy": "epoch", "save_steps": 2, "save_total_limit": 1, "save_best_limit": 1 }),
            ["training.save_best_limit", "judged by an evaluation"],
        ),
        (
            json!({ "eval_strategy": "no", "eval_steps": 2, "load_best_model_at_end": true }),
            ["training.load_best_model_at_end", "this job has none"],
        ),
        (
            json!({ "label_smoothing_factor": 1 }),
            ["training.label_smoothing_factor", "a number from 0 to below 1"],
        ),
        (
            json!({ "label_smoothing_factor": -0.1 }),
            ["training.label_smoothing_factor", "a number from 0 to below 1"],
        ),
    ] {
        let message = evaluated(&training).expect_err(&training.to_string());
        for part in parts {
            assert!(message.contains(part), "{training}: {part}: {message}");
        }
    }
    let no_data = json!({ "training": { "eval_strategy": "epoch" } }).to_string();
    let request = JobRequest::default();
    let message = Job::parse(&no_data, "job", Path::new(""), &request).unwrap_err().to_string();
    assert!(message.contains("training.eval_strategy: there is nothing to evaluate"), "{message}");
    for training in [
        json!({ "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1, "save_best_limit": 1 }),
        json!({ "epochs": 2.5, "label_smoothing_factor": 0 }),
    ] {
        evaluated(&training).unwrap();
    }
    let job = evaluated(&json!({ "label_smoothing_factor": 0.1 })).unwrap();
    assert_eq!(job.training.objective.label_smoothing_factor, 0.1);
    let notes = job.notes.iter().filter(|note| note.key == "training.label_smoothing_factor");
    let notes: Vec<_> = notes.map(ToString::to_string).collect();
    assert!(notes.len() == 1 && notes[0].contains("exponential of the smoothed loss"), "{notes:?}");
    let job = evaluated(&json!({ "num_train_epochs": 0.5 })).unwrap();
    assert_eq!(job.training.objective.label_smoothing_factor, 0.0);
    assert_eq!(job.training.length.epochs, Some(0.5));
}

#[test]
fn an_evaluation_batch_has_an_effect_on_the_last_evaluation_too() {
    let says = |training: &Value| {
        let notes = evaluated(training).unwrap().notes;
        notes.iter().any(|note| note.key == "training.per_device_eval_batch_size")
    };
    assert!(!says(&json!({ "per_device_eval_batch_size": 3 })));
    assert!(!says(&json!({ "per_device_eval_batch_size": 3, "eval_steps": 3 })));
}
