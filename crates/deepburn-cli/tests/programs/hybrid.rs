//! Jobs with hybrid sharding (`mics_shard_size`) and secondary shards (`zero_hpz_partition_size`).

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::job::{Job, STAGES, Trained, tiny_model};
use crate::program::deepburn;
use crate::resume::{assert_same, long, resume, same_in_pieces};

/// Returns a job with shuffled data of uneven sizes on four ranks, in groups of two.
pub(crate) fn replicated(stage: u8) -> Job {
    Job::uneven()
        .with("data.shuffle", true)
        .with("data.splits", json!({"train": "90%", "eval": "10%"}))
        .with("training.eval_steps", 2)
        .sharded(stage, 4)
        .zero("mics_shard_size", 2)
}

/// Returns a job on four ranks with secondary shards over two of them.
pub(crate) fn secondary() -> Job {
    replicated(3).zero("mics_shard_size", -1).zero("zero_hpz_partition_size", 2)
}

#[test]
fn stages_of_a_mesh_train_the_same_model() {
    for types in [json!({}), json!({"bf16": {"enabled": true}})] {
        let train = |stage| {
            let mut job = replicated(stage);
            for (key, value) in types.as_object().unwrap() {
                job = job.with(&format!("deepspeed.{key}"), value.clone());
            }
            job.train()
        };
        let expected = train(0);
        for stage in &STAGES[1..] {
            assert_same(&train(*stage), &expected, &format!("stage {stage}, {types}"));
        }
    }
}

#[test]
fn secondary_shards_train_the_model_of_stage_3() {
    let plain = replicated(3).zero("mics_shard_size", -1).train();
    assert_same(&secondary().train(), &plain, "hpZ");
}

#[test]
fn meshes_resume_to_the_bit() {
    same_in_pieces("groups", false, || long().sharded(3, 4).zero("mics_shard_size", 2));
    same_in_pieces("hpZ", true, || long().sharded(3, 4).zero("zero_hpz_partition_size", 2));
}

/// Trains the last steps on other meshes than the first ones, from the same checkpoint.
#[test]
fn a_checkpoint_of_one_mesh_resumes_on_another() {
    let job = |size: i64, hpz: u64| {
        long()
            .sharded(3, 4)
            .with("training.save_steps", 4)
            .zero("mics_shard_size", size)
            .zero("zero_hpz_partition_size", hpz)
    };
    for from in [2, -1] {
        let saved = job(from, 1);
        saved.train();
        let resumed = |size, hpz| {
            let other = job(size, hpz);
            let (from, to) = (saved.folder().join("output"), other.folder().join("output"));
            let copied = Command::new("cp").arg("-r").args([&from, &to]).status();
            assert!(copied.unwrap().success());
            fs::remove_dir_all(to.join("model")).unwrap();
            resume(&other, &["step-00000004"]).succeeded();
            Trained::read(&to)
        };
        let plain = resumed(-1, 1);
        assert_same(&resumed(-1, 2), &plain, "hpZ resumes as plain stage 3");
        let groups = resumed(2, 1);
        assert_eq!(groups.steps.len(), plain.steps.len());
        assert!(groups.steps.iter().all(|row| row.loss.is_finite()));
    }
}

#[test]
fn groups_are_described_and_estimated() {
    let ending = replicated(3).run().succeeded();
    let text = "ZeRO stage 3 over groups of 2 ranks (2 replicas), 4 ranks";
    assert!(ending.stderr.contains(text), "{}", ending.stderr);
    let ending = secondary().run().succeeded();
    let text = "ZeRO stage 3, in backward over groups of 2 ranks (hpZ), 4 ranks";
    assert!(ending.stderr.contains(text), "{}", ending.stderr);
}

#[test]
fn settings_that_do_not_fit_are_refused_before_the_run() {
    let one_bit = json!({"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}});
    let key = "zero_optimization.mics_shard_size";
    for (job, parts) in [
        (replicated(3).zero("mics_shard_size", 3), [key, "3 does not divide the 4"]),
        (
            replicated(0).with("deepspeed.optimizer", one_bit),
            [key, "OneBitAdam is not supported with shard groups"],
        ),
        (
            secondary().zero("zero_hpz_partition_size", 3),
            ["zero_hpz_partition_size", "3 does not divide the 4"],
        ),
        (
            secondary().zero("mics_shard_size", 2),
            ["zero_hpz_partition_size", "is given together with mics_shard_size"],
        ),
        (
            replicated(3).zero("mics_hierarchical_params_gather", true),
            ["mics_hierarchical_params_gather", "set it to false"],
        ),
        (secondary().zero("zero_quantized_weights", true), ["zero_quantized_weights", "ZeRO++"]),
    ] {
        job.run().failed(2, &parts);
        assert!(!job.folder().join("output").exists());
    }
}

/// A group of two ranks has the same states as a run of two ranks, and secondary shards are
/// gathered parameters.
#[test]
fn an_estimate_counts_the_shards_of_a_replica() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny_model().display().to_string();
    let bytes = |ranks: &str, more: &str, name: &str| {
        let section = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3,
                "stage3_param_persistence_threshold": 0{more}}}}}"#
        );
        let arguments = ["estimate", "--model", &model, "--ranks", ranks, "--deepspeed", &section];
        let ending = deepburn(folder.path(), &[&arguments[..], &["--json"]].concat()).succeeded();
        let record: Value = serde_json::from_str(&ending.stdout).unwrap();
        record[0][name].as_u64().unwrap()
    };
    let group = r#", "mics_shard_size": 2"#;
    for name in ["optimizer", "gradients", "parameters"] {
        assert_eq!(bytes("4", group, name), bytes("2", "", name), "{name}");
        assert!(bytes("4", group, name) > bytes("4", "", name), "{name}");
    }
    let hpz = r#", "zero_hpz_partition_size": 2"#;
    assert_eq!(bytes("4", hpz, "optimizer"), bytes("4", "", "optimizer"));
    assert!(bytes("4", hpz, "gathered") > bytes("4", "", "gathered"));
}
