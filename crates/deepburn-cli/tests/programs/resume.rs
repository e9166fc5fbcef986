//! Runs that are interrupted and go on: from checkpoints, bit for bit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use deepburn::checkpoint::{Checkpoint, Slot};
use serde_json::{Value, json};

use crate::job::{Job, STAGES, Trained, tensors};
use crate::program::{Ending, deepburn, finetune, program};

fn dropout() -> Value {
    json!({"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1})
}

fn checkpoints(job: &Job) -> PathBuf {
    job.folder().join("output/checkpoints")
}

fn tags(job: &Job) -> Vec<String> {
    let all = Checkpoint::all(&checkpoints(job)).unwrap();
    all.iter().map(|checkpoint| checkpoint.tag().to_string()).collect()
}

/// Goes on with a job that was run before.
fn resume(job: &Job, more: &[&str]) -> Ending {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    finetune(job.folder(), &[&["--config", "job.json", "--resume"], more].concat())
}

const STEPS: u64 = 6;

/// A job that ends at step 6 with dropout, shuffling, a schedule, and an evaluation.
fn long() -> Job {
    Job::uneven()
        .with("data.shuffle", true)
        .with("data.splits", json!({"train": "90%", "eval": "10%"}))
        .with("model.config.resid_pdrop", 0.1)
        .with("training.max_steps", STEPS)
        .with("training.eval_steps", 2)
        .with("deepspeed.scheduler", json!({"type": "WarmupDecayLR", "params": {
            "warmup_num_steps": 3, "total_num_steps": STEPS, "warmup_max_lr": 0.01}}))
}

/// The same run in pieces: it is as if a process ended after each checkpoint.
#[track_caller]
fn same_in_pieces(name: &str, job: impl Fn() -> Job) {
    let straight = job().train();
    let job = job().with("training.save_steps", 2);
    assert_eq!(job.train().numbers(), straight.numbers(), "{name}: saving changes the run");
    assert_eq!(tags(&job), ["step-00000002", "step-00000004", "step-00000006"]);
    for step in [4, 2] {
        // What came later is gone, but for the record.
        for later in (step + 1..=STEPS).map(|step| format!("step-{step:08}")) {
            let _ = fs::remove_dir_all(checkpoints(&job).join(later));
        }
        let _ = fs::remove_file(checkpoints(&job).join("latest"));
        fs::remove_dir_all(job.folder().join("output/model")).unwrap();
        resume(&job, &[&format!("step-{step:08}")]).succeeded();
        let resumed = Trained::read(&job.folder().join("output"));
        assert_eq!(resumed.numbers(), straight.numbers(), "{name}: from step {step}");
        assert_eq!(resumed.evaluations, straight.evaluations, "{name}: from step {step}");
    }
}

#[test]
fn every_stage_and_precision_goes_on_to_the_bit() {
    let precisions = [
        ("fp32", json!({})),
        ("bf16", json!({"bf16": {"enabled": true}})),
        ("fp16", json!({"fp16": {"enabled": true, "initial_scale_power": 24, "hysteresis": 1,
            "loss_scale_window": 2}})),
    ];
    for (name, keys) in precisions {
        for stage in STAGES {
            same_in_pieces(&format!("{name}, stage {stage}"), || {
                let mut job = long().sharded(stage, 3);
                for (key, value) in keys.as_object().unwrap() {
                    job = job.with(&format!("deepspeed.{key}"), value.clone());
                }
                job
            });
        }
    }
}
