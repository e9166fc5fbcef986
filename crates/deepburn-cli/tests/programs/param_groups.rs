//! Tests of parameter groups: frozen weights do not change, all stages agree, and invalid groups are errors.

use std::fs;

use serde_json::{Value, json};

use crate::job::{Job, Trained, tensors, tiny_model};

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
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let arguments = ["--config", "job.json", "--resume"];
    crate::program::finetune(job.folder(), &arguments).succeeded();
    assert_eq!(Trained::read(&job.folder().join("output")).numbers(), whole.numbers());
    // The checkpoint has no moments of a parameter that was frozen.
    let job = job.with("training.param_groups", json!([])).with("training.max_steps", 8);
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let ending = crate::program::finetune(job.folder(), &arguments);
    ending.failed(1, &["no optimizer states of parameter wte.weight", "freeze it"]);
}
