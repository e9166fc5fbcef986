//! Tests of model states on NVMe: the same numbers as in memory, resuming, and invalid folders.

use std::fs;

use serde_json::json;

use crate::job::{Job, STAGES};
use crate::resume::{STEPS, assert_same, checkpoints, long, resume};

/// Returns the job with its optimizer states on NVMe, in a folder inside the job's folder.
fn swapped(job: Job, overlaps: bool) -> Job {
    let folder = job.folder().join("swap");
    fs::create_dir_all(&folder).unwrap();
    job.zero(
        "offload_optimizer",
        json!({
            "device": "nvme", "nvme_path": folder,
            "pipeline_read": overlaps, "pipeline_write": overlaps,
        }),
    )
}

/// Returns the job with its parameters on NVMe, too.
pub(crate) fn all_swapped(job: Job, max_in_cpu: u64) -> Job {
    let job = swapped(job, true).zero("stage3_max_live_parameters", json!(2000));
    job.zero("offload_param", json!({"device": "nvme", "max_in_cpu": max_in_cpu}))
}

/// The job also evaluates between steps.
#[test]
fn parameters_on_nvme_change_no_bit() {
    for (ranks, precision) in [(1, "fp32"), (2, "fp32"), (3, "bf16"), (2, "fp16"), (1, "fp16")] {
        let job = || long().in_precision(precision);
        let plain = job().sharded(3, ranks).train();
        for max_in_cpu in [0, 3000] {
            let swapped = all_swapped(job().sharded(3, ranks), max_in_cpu);
            let what = format!("{ranks} ranks, {precision}, {max_in_cpu} in memory");
            assert_same(&swapped.train(), &plain, &what);
        }
    }
}

/// A run can resume with its parameters on another tier, also from a checkpoint that was saved
/// asynchronously.
#[test]
fn runs_change_the_place_of_their_parameters() {
    let expected = long().sharded(3, 2).train();
    for (before, after) in [(true, true), (true, false), (false, true)] {
        let placed = |job: Job, on_nvme| if on_nvme { all_swapped(job, 0) } else { job };
        let job = long().sharded(3, 2).with("training.save_steps", 3);
        let job = placed(job.with("training.async_save", true), before);
        job.train();
        for step in 4..=STEPS {
            let _ = fs::remove_dir_all(checkpoints(&job).join(format!("step-{step:08}")));
        }
        let none = json!({"device": "none"});
        let job = job.zero("offload_optimizer", none.clone()).zero("offload_param", none);
        let job = placed(job, after);
        resume(&job, &["step-00000003"]).succeeded();
        let trained = crate::job::Trained::read(&job.folder().join("output"));
        assert_same(&trained, &expected, &format!("{before} to {after}"));
    }
}

#[test]
fn states_on_nvme_change_no_bit() {
    let precisions = ["fp32", "bf16", "fp16"];
    for (index, stage) in STAGES.into_iter().skip(1).enumerate() {
        for (ranks, precision) in [1, 2, 3].into_iter().zip(precisions) {
            let job = || long().in_precision(precision);
            let plain = job().sharded(stage, ranks).train();
            let swapped = swapped(job().sharded(stage, ranks), index != 1);
            let what = format!("stage {stage}, {ranks} ranks, {precision}");
            assert_same(&swapped.train(), &plain, &what);
            let left = fs::read_dir(swapped.folder().join("swap")).unwrap().count();
            assert_eq!(left, 0, "{what}");
        }
    }
}

/// A checkpoint of states on NVMe can be loaded to memory, and the other way round. An asynchronous
/// save has the states of its own step, even if later steps are taken while it is written.
#[test]
fn runs_change_between_nvme_and_memory() {
    let expected = long().sharded(2, 2).train();
    for (before, after) in [(true, true), (true, false), (false, true)] {
        let placed = |job: Job, on_nvme| if on_nvme { swapped(job, true) } else { job };
        let job = long().sharded(2, 2).with("training.save_steps", 3);
        let job = placed(job.with("training.async_save", true), before);
        job.train();
        for step in 4..=STEPS {
            let _ = fs::remove_dir_all(checkpoints(&job).join(format!("step-{step:08}")));
        }
        let job = job.zero("offload_optimizer", json!({"device": "none"}));
        let job = placed(job, after);
        let ending = resume(&job, &["step-00000003"]);
        ending.succeeded();
        let trained = crate::job::Trained::read(&job.folder().join("output"));
        assert_same(&trained, &expected, &format!("{before} to {after}"));
    }
}

#[test]
fn unusable_folders_are_refused() {
    let job = || long().sharded(2, 2);
    let file = job().folder().join("file");
    for (folder, reason) in
        [("/nowhere/at/all".into(), "not found"), ("/dev/shm".into(), "tmpfs"), (file, "not found")]
    {
        let job = job().zero("offload_optimizer", json!({"device": "nvme", "nvme_path": folder}));
        job.run().failed(2, &["offload_optimizer.nvme_path", reason]);
        assert!(!job.folder().join("output").exists(), "something was written");
    }
}
