//! Tests of parameter groups: frozen weights do not change, all stages agree, and invalid groups
//! are errors.

use std::fs;

use serde_json::{Value, json};

use crate::job::{Job, Trained, tensors, tiny_model};
use crate::resume::resume;

fn grouped(stage: u8, ranks: usize) -> Job {
    let groups = json!([
        { "params": "^wte", "frozen": true },
        { "params": "^h\\.", "dims": [2], "lr_factor": 0.5, "betas": [0.8, 0.95] },
    ]);
    Job::tiny().sharded(stage, ranks).with("training.param_groups", groups)
}

fn record(job: &Job) -> Value {
    let text = fs::read_to_string(job.folder().join("output/job.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn frozen_weights_stay_and_stages_agree() {
    let before = tensors(&fs::read(tiny_model().join("model.safetensors")).unwrap());
    let unlike = |trained: &Trained| -> Vec<String> {
        let changed = trained.tensors().into_iter().zip(&before).filter(|(after, before)| {
            assert_eq!(after.0, before.0);
            after.1 != before.1
        });
        changed.map(|(after, _)| after.0).collect()
    };
    let expected = grouped(0, 2).train();
    let changed = unlike(&expected);
    assert!(!changed.iter().any(|name| name.contains("wte")), "{changed:?}");
    assert_eq!(changed.len(), before.len() - 1, "{changed:?}");
    for stage in 1..=3 {
        let job = grouped(stage, 2);
        let trained = job.train();
        assert_eq!(trained.numbers(), expected.numbers(), "stage {stage}");
        // Neither the measured nor the forecast memory has optimizer states of the frozen table.
        let memory = trained.steps.last().unwrap().memory;
        let all = Job::tiny().sharded(stage, 2).train().steps.last().unwrap().memory;
        assert!(memory.optimizer < all.optimizer, "stage {stage}");
    }
}

#[test]
fn groups_of_replicas_agree_at_all_stages() {
    let trained = |stage| grouped(stage, 4).zero("mics_shard_size", 2).train();
    let expected = trained(0);
    let before = tensors(&fs::read(tiny_model().join("model.safetensors")).unwrap());
    for ((name, after), (_, before)) in expected.tensors().iter().zip(&before) {
        assert_eq!(after == before, name.contains("wte"), "{name}");
    }
    for stage in 1..=3 {
        let found = trained(stage);
        assert_eq!(found.numbers(), expected.numbers(), "stage {stage}");
        assert_eq!(found.tensors(), expected.tensors(), "stage {stage}");
    }
}

#[test]
fn biases_and_norms_do_not_decay_by_default() {
    let job = Job::tiny();
    let spared = job.train();
    assert_eq!(record(&job)["training"]["no_decay"], "biases_and_norms");
    let job = Job::tiny().with("training.no_decay", "nothing");
    let decayed = job.train();
    assert_eq!(record(&job)["training"]["no_decay"], "nothing");
    // The loss of the first step is computed with the same initial weights.
    assert_eq!(spared.steps[0].loss, decayed.steps[0].loss);
    assert_ne!(spared.weights, decayed.weights);
    let groups = json!([{ "dims": [1], "weight_decay": 0.0 }]);
    let grouped = Job::tiny().with("training.no_decay", "nothing");
    let grouped = grouped.with("training.param_groups", groups).train();
    assert_eq!(grouped.numbers(), spared.numbers());
}

#[test]
fn groups_that_do_not_fit_the_model_are_refused_before_anything_is_written() {
    for (groups, expected) in [
        (
            json!([{ "params": "^wtf" }]),
            "training.param_groups[0]: no parameter of the model is in it",
        ),
        (json!([{ "params": "wte" }, { "dims": [2] }]), "parameter wte.weight is in both"),
        (
            json!([{ "dims": [1], "frozen": true }, { "dims": [2], "frozen": true }]),
            "training.param_groups: the frozen groups match all",
        ),
    ] {
        let job = Job::tiny().with("training.param_groups", groups);
        job.run().failed(2, &[expected]);
        assert!(!job.folder().join("output").exists());
    }
}

#[test]
fn a_run_resumes_with_its_groups() {
    let whole = grouped(3, 2).with("training.max_steps", 6).train();
    let job = grouped(3, 2).with("training.save_steps", 3).with("training.max_steps", 3);
    job.train();
    let job = job.with("training.max_steps", 6);
    resume(&job, &[]).succeeded();
    assert_eq!(Trained::read(&job.folder().join("output")).numbers(), whole.numbers());
    // A parameter that was frozen gets new moments.
    let job = job.with("training.param_groups", json!([])).with("training.max_steps", 8);
    let before = Trained::read(&job.folder().join("output")).tensors();
    let ending = resume(&job, &[]).succeeded();
    for part in [
        "new optimizer states for 1 parameter (24576 elements: wte.weight)",
        "training.param_groups changes from",
    ] {
        assert!(ending.stderr.contains(part), "{part}: {}", ending.stderr);
    }
    let after = Trained::read(&job.folder().join("output")).tensors();
    let wte = |tensors: &[(String, Vec<f32>)]| {
        tensors.iter().find(|(name, _)| name.contains("wte")).unwrap().1.clone()
    };
    assert_ne!(wte(&before), wte(&after));
    // Frozen again, its moments are not used.
    let groups = json!([{ "params": "wte", "frozen": true }]);
    let job = job.with("training.param_groups", groups).with("training.max_steps", 9);
    let ending = resume(&job, &[]).succeeded();
    let part = "the optimizer states of 1 parameter (24576 elements: wte.weight) in the checkpoint";
    assert!(ending.stderr.contains(part), "{}", ending.stderr);
    let frozen = Trained::read(&job.folder().join("output")).tensors();
    assert_eq!(wte(&after), wte(&frozen));
}

/// Returns the content and the time of the last change of each file of the run.
fn files(job: &Job) -> Vec<(String, std::time::SystemTime)> {
    let all = fs::read_dir(job.folder().join("output")).unwrap().map(Result::unwrap);
    let mut files: Vec<_> = all
        .map(|file| {
            let changed = file.metadata().unwrap().modified().unwrap();
            (file.file_name().to_string_lossy().into_owned(), changed)
        })
        .collect();
    files.sort();
    files
}

#[test]
fn optimizer_states_that_do_not_fit_are_refused_before_anything_starts() {
    let frozen = json!([{ "params": "wte", "frozen": true }]);
    let one_bit = json!({"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}});
    let sgd = |momentum| json!({"type": "SGD", "params": {"lr": 1e-3, "momentum": momentum}});
    for (stage, first, second, parts) in [
        (0, (&frozen, one_bit.clone()), (&json!([]), one_bit), ["wte.weight", "new states"]),
        (2, (&json!([]), sgd(0.0)), (&json!([]), sgd(0.9)), ["kept nothing", "momentum_buffer"]),
    ] {
        let with = |job: Job, (groups, optimizer): (&Value, Value)| {
            job.with("training.param_groups", groups.clone())
                .with("deepspeed.optimizer", optimizer)
                .with("deepspeed.gradient_clipping", 0.0)
        };
        let job = with(Job::tiny().sharded(stage, 2), first).with("training.save_steps", 4);
        job.run().succeeded();
        let before = files(&job);
        let job = with(job, second).with("training.max_steps", 6);
        resume(&job, &[]).failed(2, &[&["--resume", "step-00000004"][..], &parts].concat());
        assert_eq!(files(&job), before);
    }
}
