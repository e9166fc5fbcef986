//! Tests that activation checkpointing does not change the numbers of a run, alone and together
//! with offload.

use std::fs;

use serde_json::json;

use crate::job::{Job, STAGES, Trained};
use crate::resume::{STEPS, assert_same, checkpoints, long, resume};
use crate::swapping::all_swapped;

/// Returns a job in `precision`, or in fp32 by default.
pub(crate) fn in_precision(precision: Option<&str>) -> Job {
    // All dropouts are enabled, and products are large enough that the selective policy keeps them.
    let job = long().with("model.config.n_embd", 130).with("model.config.n_inner", 150);
    let job = job.with("model.config.attn_pdrop", 0.1).with("model.config.embd_pdrop", 0.1);
    match precision {
        // Its first steps overflow.
        Some("fp16") => {
            job.with("deepspeed.fp16", json!({"enabled": true, "loss_scale_window": 2}))
        }
        Some(precision) => job.with(&format!("deepspeed.{precision}"), json!({"enabled": true})),
        None => job,
    }
}

pub(crate) fn recomputed(job: Job, section: serde_json::Value) -> Job {
    job.with("deepspeed.activation_checkpointing", section)
}

/// Returns a section that offloads saved activations to a file in the build folder.
pub(crate) fn offloaded(policy: &str) -> serde_json::Value {
    let folder = env!("CARGO_TARGET_TMPDIR");
    json!({"policy": policy, "nvme_path": folder, "offload_threshold": 0})
}

#[test]
fn recomputed_activations_change_no_bit() {
    let precisions = [None, Some("bf16"), Some("fp16")];
    for (stage, ranks) in STAGES.into_iter().zip([1, 2, 3, 2]) {
        for precision in precisions {
            let kept = in_precision(precision).sharded(stage, ranks).train();
            let sections = [
                json!({"policy": "full"}),
                json!({"policy": "selective"}),
                json!({"every_nth_block": 2}),
                offloaded("full"),
                offloaded("selective"),
            ];
            for section in sections {
                let what = format!("stage {stage}, {ranks} ranks, {precision:?}, {section}");
                let job = recomputed(in_precision(precision).sharded(stage, ranks), section);
                assert_same(&job.train(), &kept, &what);
            }
        }
    }
}

/// Gradients, optimizer states and parameters are on NVMe, and all activations are recomputed.
#[test]
fn everything_together_changes_no_bit() {
    for (ranks, precision) in
        [(1, None), (2, None), (3, None), (2, Some("bf16")), (3, Some("fp16"))]
    {
        let kept = in_precision(precision).sharded(3, ranks).train();
        for section in [json!({"policy": "full"}), offloaded("selective")] {
            let what = format!("{ranks} ranks, {precision:?}, {section}");
            let job = recomputed(in_precision(precision).sharded(3, ranks), section);
            assert_same(&all_swapped(job, 0).train(), &kept, &what);
        }
    }
}

/// A run may resume with another policy.
#[test]
fn runs_change_what_they_recompute() {
    let expected = in_precision(None).sharded(2, 2).train();
    let job = in_precision(None).sharded(2, 2).with("training.save_steps", 3);
    let job = job.with("training.gradient_checkpointing", true);
    job.train();
    for step in 4..=STEPS {
        let _ = fs::remove_dir_all(checkpoints(&job).join(format!("step-{step:08}")));
    }
    let job = job.with("training.gradient_checkpointing", false);
    resume(&job, &["step-00000003"]).succeeded();
    assert_same(&Trained::read(&job.folder().join("output")), &expected, "from full to off");
}

/// The bytes of activations are in the row of a step.
#[test]
fn activations_take_less() {
    let peak = |job: Job| {
        let rows = job.with("training.ranks", 1).train().steps;
        rows.iter().map(|row| row.memory.activations_peak).max().unwrap()
    };
    let kept = peak(long());
    let full = peak(long().with("training.gradient_checkpointing", true));
    assert!(full < kept * 3 / 4, "{full} bytes of {kept}");
}

#[test]
fn unusable_folders_are_refused() {
    for (folder, reason) in [("/nowhere/at/all", "not found"), ("/dev/shm", "tmpfs")] {
        let job = recomputed(long().sharded(0, 2), json!({"nvme_path": folder}));
        job.run().failed(2, &["activation_checkpointing.nvme_path", reason]);
        assert!(!job.folder().join("output").exists(), "something was written");
    }
}

#[test]
fn contradictions_are_refused() {
    let job = recomputed(long(), json!({"policy": "full"}))
        .with("training.gradient_checkpointing", false);
    job.run()
        .failed(2, &["activation_checkpointing.policy", "gradient_checkpointing", "remove one"]);
}
