//! Values on the command line: `--set` and other options, and names from other programs.

use std::fs;
use std::path::Path;

use deepburn_config::{Job, JobRequest, RawConfig, SchedulePlan, resolve};
use serde_json::json;

fn parse(text: &str, folder: &Path, sets: &[&str]) -> Result<(Job, RawConfig), String> {
    let request = JobRequest {
        sets: sets.iter().map(|set| set.to_string()).collect(),
        ..JobRequest::default()
    };
    Job::parse(text, "job.json", folder, &request).map_err(|error| error.to_string())
}

/// The learning rate of the plan, and every warning.
fn rate(text: &str, sets: &[&str]) -> (f64, Vec<String>) {
    let (job, written) = parse(text, Path::new(""), sets).unwrap();
    let resolved =
        resolve(&written, &job.run_context()).unwrap_or_else(|report| panic!("{report}"));
    let notes = resolved.notes.iter().map(ToString::to_string);
    let warnings =
        notes.filter(|note| note.starts_with("warning") && note.contains("learning_rate"));
    (resolved.plan.optimizer.lr(), warnings.collect())
}

#[test]
fn the_learning_rate_that_is_typed_last_wins() {
    let text = r#"{"training": {"learning_rate": 1e-3}, "deepspeed": {"train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}}"#;
    let (of_file, warnings) = rate(text, &[]);
    assert_eq!((of_file, warnings.len()), (1e-4, 1), "the file contradicts itself");
    assert_eq!(rate(text, &["training.learning_rate=0.5"]), (0.5, vec![]));
    let optimizer = "deepspeed.optimizer.params.lr=0.25";
    assert_eq!(rate(text, &[optimizer, "training.learning_rate=0.5"]), (0.5, vec![]));
    let (last, warnings) = rate(text, &["training.learning_rate=0.5", optimizer]);
    assert_eq!((last, warnings.len()), (0.25, 1));
    // The peak of a schedule follows the learning rate, unless it is set by a later option.
    let scheduled = r#"{"deepspeed": {"train_batch_size": 1, "scheduler": {"type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-4}}}}"#;
    let peak = "deepspeed.scheduler.params.warmup_max_lr=0.25";
    for (sets, expected) in [
        (&["training.learning_rate=0.5"][..], 0.5),
        (&[peak, "training.learning_rate=0.5"], 0.5),
        (&["training.learning_rate=0.5", peak], 0.25),
    ] {
        let (job, written) = parse(scheduled, Path::new(""), sets).unwrap();
        let schedule = resolve(&written, &job.run_context()).unwrap().plan.schedule;
        let SchedulePlan::Warmup { max_lr, .. } = schedule else { panic!("{schedule:?}") };
        assert_eq!(max_lr, expected, "{sets:?}");
    }
}

#[test]
fn what_is_wrong_with_an_option_names_the_option() {
    let errors = |sets: &[&str], backend: Option<&str>| {
        let request = JobRequest {
            sets: sets.iter().map(|set| set.to_string()).collect(),
            backend: backend.map(str::to_owned),
            ..JobRequest::default()
        };
        let text = r#"{"deepspeed": {"train_batch_size": 1}}"#;
        let parsed = Job::parse(text, "job.json", Path::new(""), &request);
        match parsed.map(|(job, written)| resolve(&written, &job.run_context())) {
            Ok(resolved) => resolved.unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
    };
    for (sets, backend, part) in [
        (
            &["training.max_steps=no"][..],
            None,
            "training.max_steps (--set training.max_steps=no): ",
        ),
        (&["data.splits={\"train\": }"], None, "--set data.splits="),
        (
            &["deepspeed.zero_optimization.stage=4"],
            None,
            "zero_optimization.stage (--set deepspeed.zero_optimization.stage=4): 4 is out of range",
        ),
        (&["training.seed=1", "training.seed=-1"], None, "(--set training.seed=-1)"),
        (&["training={\"sed\": 1}"], None, "training.sed (--set training={"),
        (
            &["deepspeed={\"train_batch_size\": 0}"],
            None,
            "(--set deepspeed={\"train_batch_size\": 0})",
        ),
        (
            &["deepspeed.zero_optimization.max_live_parameters=-1"],
            None,
            "stage3_max_live_parameters (--set deepspeed.zero_optimization.max_live_parameters=-1)",
        ),
        (&[], Some("gpu"), "training.backend (--backend gpu)"),
    ] {
        let message = errors(sets, backend);
        assert!(message.contains(part), "{sets:?}: {message}");
        assert!(!message.contains("line 1, column 1)"), "{message}");
    }
}

#[test]
fn other_programs_names_are_known() {
    for (text, part) in [
        (r#"{"training": {"num_epochs": 3}}"#, "write training.epochs"),
        (r#"{"lr_scheduler_type": "cosine"}"#, "training.lr_scheduler_type"),
        (r#"{"training": {"logger": true}}"#, "training.report_to"),
        (
            r#"{"training": {"report_to": "all"}}"#,
            "training.report_to (line 1, column 28): \"all\" is not supported; must be \"wandb\", \"tensorboard\" or \"none\"",
        ),
        (r#"{"report_to": "wandb"}"#, "did you mean training.report_to?"),
        (r#"{"gradient_checkpointing": true}"#, "training.gradient_checkpointing"),
        (r#"{"per_device_eval_batch_size": 3}"#, "training.per_device_eval_batch_size"),
        (r#"{"per_device_train_batch_size": 3}"#, "training.micro_batch_size"),
        (r#"{"max_epochs": 3}"#, "training.epochs"),
        (r#"{"training": {"accumulate_grad_batches": 3}}"#, "gradient_accumulation_steps"),
        (r#"{"training": {"gradient_clip_val": 3}}"#, "gradient_clipping"),
        (r#"{"mixed_precision": "bf16"}"#, "bf16.enabled"),
        (r#"{"num_processes": 2}"#, "training.ranks"),
        (r#"{"deepspeed": {"num_train_epochs": 2, "train_batch_size": 1}}"#, "training.epochs"),
    ] {
        let message = match parse(text, Path::new(""), &[]) {
            Err(message) => message,
            Ok((job, written)) => resolve(&written, &job.run_context()).unwrap_err().to_string(),
        };
        assert!(message.contains(part), "{text}: {message}");
    }
}

#[test]
fn a_lightning_strategy_takes_the_place_of_a_file() {
    let (_, written) =
        parse(r#"{"deepspeed": "deepspeed_stage_2_offload"}"#, Path::new(""), &[]).unwrap();
    assert_eq!(written.to_json()["zero_optimization"]["offload_optimizer"]["device"], "cpu");
    let request =
        JobRequest { deepspeed: Some("deepspeed_stage_3".into()), ..JobRequest::default() };
    let (_, written) = Job::parse("{}", "job", Path::new(""), &request).unwrap();
    assert_eq!(written.to_json()["zero_optimization"]["stage"], 3);
    let message = parse(r#"{"deepspeed": "deepspeed_stage_4"}"#, Path::new(""), &[]).unwrap_err();
    assert!(message.contains("deepspeed_stage_3_offload"), "{message}");
    // A file of that name takes precedence.
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("deepspeed_stage_1"), r#"{"train_batch_size": 8}"#).unwrap();
    let (_, written) = parse(r#"{"deepspeed": "deepspeed_stage_1"}"#, folder.path(), &[]).unwrap();
    assert_eq!(written.to_json(), json!({"train_batch_size": 8}));
}
