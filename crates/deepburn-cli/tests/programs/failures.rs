//! Tests of jobs that fail while running, with status 1 and one message that names the rank and the
//! step.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::json;

use crate::job::{Job, STAGES};

#[test]
fn a_non_finite_loss_names_step_and_parameter() {
    for stage in STAGES {
        let job = Job::tiny()
            .sharded(stage, 3)
            .with("deepspeed.optimizer", json!({"type": "SGD", "params": {"lr": 1e38}}));
        let ending = job.run().failed(1, &["rank ", "step 2", "wte.weight", "not finite"]);
        assert!(!job.folder().join("output/model").exists(), "{}", ending.stderr);
        // The steps before the failure are in metrics.jsonl.
        let metrics = fs::read_to_string(job.folder().join("output/metrics.jsonl")).unwrap();
        assert_eq!(metrics.lines().count(), 1, "{metrics}");
    }
}

/// If `metrics.jsonl` still cannot be written at the end, the run fails on all ranks, after the
/// model is saved.
#[test]
fn a_full_disk_names_rank_step_and_file() {
    let job = Job::tiny();
    fs::create_dir(job.folder().join("output")).unwrap();
    symlink("/dev/full", job.folder().join("output/metrics.jsonl")).unwrap();
    job.run().failed(1, &["training continues", "rank 0", "step 4", "metrics.jsonl"]);
    let expected = Job::tiny().train().weights;
    assert!(fs::read(job.folder().join("output/model/model.safetensors")).unwrap() == expected);
}

/// After a failed run there is no report, not even the report of an earlier run.
#[test]
fn a_failed_run_leaves_no_report() {
    let optimizer = json!({"type": "SGD", "params": {"lr": 1e38}});
    let job = Job::tiny().with("deepspeed.optimizer", optimizer);
    fs::create_dir(job.folder().join("output")).unwrap();
    fs::write(job.folder().join("output/report.html"), "an earlier run's").unwrap();
    job.run().failed(1, &["step 2"]);
    assert!(!job.folder().join("output/report.html").exists());
}

/// With a static loss scale and gradients that always overflow, the run fails instead of skipping
/// all steps.
#[test]
fn a_run_that_skips_every_step_ends() {
    let ends = |steps: u64| {
        Job::tiny()
            .with("deepspeed.fp16", json!({"enabled": true, "loss_scale": 2_f64.powi(40)}))
            .with("training.max_steps", steps)
            .sharded(2, 2)
    };
    let job = ends(120);
    job.run().failed(1, &["step 100", "100 steps in a row were skipped", "fp16.loss_scale"]);
    assert!(!job.folder().join("output/model").exists());
    let ending = ends(3).run().succeeded();
    assert!(ending.stderr.contains("3 of 3 steps were skipped"), "{}", ending.stderr);
}

/// The model is written under temporary names first, so existing files are kept if the export
/// fails.
#[test]
fn a_failed_model_export_names_rank_step_and_file() {
    let job = Job::tiny();
    fs::create_dir_all(job.folder().join("output/model/generation_config.json")).unwrap();
    job.run().failed(1, &["rank 0", "step 4", "generation_config.json"]);
    // What every model has is checked before the start.
    fs::create_dir_all(job.folder().join("other/model/model.safetensors")).unwrap();
    let job = job.with("training.output_dir", "other");
    job.run().failed(2, &["training.output_dir", "model.safetensors is in the way"]);
}
