//! Tests of label smoothing: stages agree, 0 is the loss without the key, and evaluations are
//! smoothed too.

use std::fs;

use serde_json::{Value, json};

use crate::job::{Job, data};
use crate::resume::{assert_same, resume};

const KEY: &str = "training.label_smoothing_factor";

/// Returns a job that evaluates on the test data in its last step. Its output layer is tied if
/// `is_tied`.
fn job(stage: u8, is_tied: bool) -> Job {
    Job::uneven()
        .with("model.config.tie_word_embeddings", is_tied)
        .with("data.path", Value::Null)
        .with("data.splits", json!({"train": "uneven.bin", "eval": "uneven.bin"}))
        .with("training.max_steps", 2)
        .with("training.eval_steps", 2)
        .with("training.eval_max_samples", 4)
        .sharded(stage, 2)
}

#[test]
fn stages_agree_and_0_changes_nothing() {
    for is_tied in [true, false] {
        let plain = job(0, is_tied).train();
        let zero = job(0, is_tied).with(KEY, 0.0).train();
        assert_same(&zero, &plain, "factor 0");
        let smoothed = job(0, is_tied).with(KEY, 0.1).train();
        assert_ne!(smoothed.steps[0].loss, plain.steps[0].loss);
        assert_ne!(smoothed.evaluations, plain.evaluations);
        assert!(smoothed.weights != plain.weights, "the weights are those without smoothing");
        let sharded = job(3, is_tied).with(KEY, 0.1).train();
        assert_same(&sharded, &smoothed, &format!("stage 3, tied: {is_tied}"));
    }
}

/// Training with mixed precision and activation checkpointing has the same bits at all stages, too.
#[test]
fn stages_agree_in_bf16_with_checkpointing() {
    let job = |stage| {
        job(stage, true)
            .with(KEY, 0.1)
            .with("deepspeed.bf16", json!({"enabled": true}))
            .with("training.gradient_checkpointing", true)
    };
    assert_same(&job(3).train(), &job(0).train(), "bf16");
}

/// An evaluation with another factor is not comparable, so that the search for the best model
/// starts over.
#[test]
fn the_factor_may_change_when_a_run_resumes() {
    let job = Job::tiny()
        .with("data.path", Value::Null)
        .with("data.splits", json!({"train": data("tokens.bin"), "eval": data("tokens.bin")}))
        .with("training.max_steps", 1)
        .with("training.eval_steps", 1)
        .with("training.eval_max_samples", 4)
        .with("training.load_best_model_at_end", true)
        .with("training.save_steps", 1)
        // The later steps make the model worse.
        .with("deepspeed.optimizer.params.lr", 0.5);
    job.train();
    let record = || {
        let text = fs::read_to_string(job.folder().join("output/job.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["saved_model"].clone()
    };
    assert_eq!(record()["step"], 1);
    let more = ["--set", "training.max_steps=2", "--set", "training.label_smoothing_factor=0.1"];
    let ending = resume(&job, &more).succeeded();
    let warning = "training.label_smoothing_factor changes from 0.0 in the checkpoint to 0.1";
    assert!(ending.stderr.contains(warning), "{}", ending.stderr);
    // Step 1 was judged without smoothing.
    assert_eq!(record()["step"], 2, "{}", ending.stderr);
}
