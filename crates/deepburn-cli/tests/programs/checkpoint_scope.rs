//! Tests of checkpoints without the frozen parameters of the pretrained model
//! (`training.checkpoint_scope`).

use std::fs;
use std::path::Path;

use deepburn::checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::deepspeed::{small, small_job};
use crate::job::{Job, Trained, tensors, tiny_model};
use crate::program::deepburn;
use crate::resume::{assert_same, checkpoints, resume};

/// Returns a job of 4 steps that trains everything except the embedding. Its base model is in its
/// folder.
fn job(scope: &str) -> Job {
    let job =
        Job::tiny().with("training.param_groups", json!([{ "params": "^wte", "frozen": true }]));
    copy(&tiny_model(), &job.folder().join("base"));
    job.with("model.pretrained", "base").with("training.save_steps", 2).scope(scope)
}

impl Job {
    fn scope(self, scope: &str) -> Self {
        self.with("training.checkpoint_scope", scope)
    }

    /// Runs the first two steps.
    #[track_caller]
    fn first_half(self) -> Self {
        let job = self.with("training.max_steps", 2);
        job.run().succeeded();
        job.with("training.max_steps", 4)
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

/// Changes the first value of the embedding in a model folder.
fn change(folder: &Path) {
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let name = file.names().into_iter().find(|name| name.ends_with("wte.weight")).unwrap();
    let at = file.tensor(name).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
    // The exponent, so that bf16 changes too.
    bytes[at + 3] ^= 1;
    fs::write(path, bytes).unwrap();
}

fn output(job: &Job) -> Trained {
    Trained::read(&job.folder().join("output"))
}

/// Returns the number of parameters that the latest checkpoint omits, and the size of its tensors
/// in bytes.
fn latest(job: &Job) -> (usize, u64) {
    let checkpoint = Checkpoint::open_intact(&checkpoints(job), None).unwrap();
    let files = fs::read_dir(checkpoint.path()).unwrap().map(|file| file.unwrap().path());
    let files = files.filter(|file| file.extension().is_some_and(|it| it == "safetensors"));
    (checkpoint.omitted().count(), files.map(|file| file.metadata().unwrap().len()).sum())
}

#[test]
fn a_resumed_run_reads_the_rest_from_its_pretrained_model() {
    for (stage, ranks, section) in [
        (0, 1, json!(null)),
        (1, 2, json!(null)),
        (2, 3, json!({"enabled": true})),
        (3, 2, json!({"enabled": true})),
        (3, 3, json!(null)),
    ] {
        let what = format!("stage {stage}, {ranks} ranks, bf16 {section}");
        let job = |scope| {
            let job = job(scope).sharded(stage, ranks);
            if section.is_null() { job } else { job.with("deepspeed.bf16", section.clone()) }
        };
        let whole = job("all");
        let expected = whole.train();
        let parts = job("trained").first_half();
        let stderr = resume(&parts, &[]).succeeded().stderr;
        assert!(!stderr.contains("checkpoint_scope"), "{what}: {stderr}");
        assert_same(&output(&parts), &expected, &what);
        let ((all, large), (omitted, small)) = (latest(&whole), latest(&parts));
        assert_eq!((all, omitted), (0, 1), "{what}");
        // 512 tokens of width 48.
        let embedding = 512 * 48 * if section.is_null() { 4 } else { 2 };
        // Headers have a name less.
        assert!(
            (embedding..embedding + 1000).contains(&(large - small)),
            "{what}: {large} {small}"
        );
        // Any number of ranks and stage.
        let parts = parts.sharded(3 - stage, 4 - ranks).with("training.max_steps", 5);
        resume(&parts, &[]).succeeded();
    }
}

#[test]
fn another_pretrained_model_is_refused_before_anything_is_written() {
    let job = job("trained").first_half();
    let metrics = fs::read(job.folder().join("output/metrics.jsonl")).unwrap();
    let other = job.folder().join("other");
    copy(&tiny_model(), &other);
    change(&other);
    let job = job.with("model.pretrained", "other");
    let parts = ["--resume", "step-00000002", "parameter wte.weight", "have the hash", "other)"];
    resume(&job, &[]).failed(2, &parts);
    // The scope of later checkpoints does not matter.
    resume(&job, &["--set", "training.checkpoint_scope=all"]).failed(2, &parts);
    let config = fs::read_to_string(tiny_model().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let sizes = [
        "n_layer",
        "n_embd",
        "n_head",
        "n_positions",
        "vocab_size",
        "n_inner",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
    ];
    let sizes: Value =
        sizes.map(|name| (name.to_owned(), config[name].clone())).into_iter().collect();
    let job = job.with("model.pretrained", Value::Null).with("model.config", sizes).scope("all");
    resume(&job, &["--set", "model.architecture=gpt2"])
        .failed(2, &["omits the frozen parameter wte.weight", "set model.pretrained"]);
    let job = job.with("model.pretrained", "base").with("model.config", json!({}));
    let job = job.with("deepspeed.bf16", json!({"enabled": true}));
    resume(&job, &[]).failed(2, &["hashed as F32 and are BF16", "use the same precision"]);
    assert_eq!(fs::read(job.folder().join("output/metrics.jsonl")).unwrap(), metrics);
}

#[test]
fn consolidated_weights_are_complete() {
    for section in [json!({"enabled": false}), json!({"enabled": true})] {
        let job = job("trained").with("deepspeed.bf16", section);
        let trained = job.train();
        let folder = job.folder();
        deepburn(folder, &["consolidate", "output", "whole"]).succeeded();
        let weights =
            |name: &str| tensors(&fs::read(folder.join(name).join("model.safetensors")).unwrap());
        assert_eq!(weights("whole"), trained.tensors());
        let shown = deepburn(folder, &["inspect", "output"]).succeeded().stdout;
        assert!(shown.contains("omitted     24576 elements"), "{shown}");
        fs::rename(folder.join("base"), folder.join("moved")).unwrap();
        deepburn(folder, &["consolidate", "output", "early"])
            .failed(2, &["--base", "such as wte.weight", "which is not there", "give the folder"]);
        let consolidate =
            |out| deepburn(folder, &["consolidate", "output", out, "--base", "moved"]);
        consolidate("again").succeeded();
        assert_eq!(weights("again"), weights("whole"));
        change(&folder.join("moved"));
        consolidate("other").failed(2, &["parameter wte.weight", "have the hash"]);
        assert!(!folder.join("other/config.json").exists());
    }
    let job = job("all").first_half();
    deepburn(job.folder(), &["consolidate", "output", "whole", "--base", "base"])
        .failed(2, &["--base: has no effect", "contains all parameters"]);
}

#[test]
fn the_values_decide_what_is_omitted() {
    let all = json!([]);
    let frozen = json!([{ "params": "^wte", "frozen": true }]);
    let job = job("trained").first_half();
    assert_eq!(latest(&job).0, 1);
    // Released, the embedding is trained.
    let job = job.with("training.param_groups", all.clone()).with("training.max_steps", 3);
    let warning = "has no effect: no parameter is frozen";
    let stderr = resume(&job, &[]).succeeded().stderr;
    assert!(stderr.contains(warning), "{stderr}");
    assert_eq!(latest(&job).0, 0);
    let released = output(&job).tensors();
    // Frozen again, it differs from the pretrained model.
    let job = job.with("training.param_groups", frozen.clone()).with("training.max_steps", 4);
    resume(&job, &[]).succeeded();
    assert_eq!(latest(&job).0, 0);
    let embedding = |tensors: &[(String, Vec<f32>)]| {
        tensors.iter().find(|(name, _)| name.contains("wte")).unwrap().1.clone()
    };
    assert_eq!(embedding(&output(&job).tensors()), embedding(&released));
    deepburn(job.folder(), &["consolidate", "output", "whole"]).succeeded();

    // A run that saved everything omits the embedding when it resumes, and the other way round.
    for (scopes, counts) in [(["all", "trained"], [0, 1]), (["trained", "all"], [1, 0])] {
        let job = self::job(scopes[0]).first_half();
        assert_eq!(latest(&job).0, counts[0]);
        let job = job.scope(scopes[1]);
        let stderr = resume(&job, &[]).succeeded().stderr;
        assert!(!stderr.contains("training.checkpoint_scope changes"), "{stderr}");
        assert_eq!(latest(&job).0, counts[1]);
    }
}

#[test]
fn the_best_model_is_loaded_at_the_end() {
    let job = |scope| {
        let tokens = crate::job::data("tokens.bin");
        job(scope)
            .with("data.path", Value::Null)
            .with("data.splits", json!({"train": tokens, "eval": tokens}))
            .with("training.max_steps", 3)
            .with("training.eval_steps", 1)
            .with("training.eval_max_samples", 8)
            .with("training.load_best_model_at_end", true)
            .with("training.save_total_limit", 1)
            .with("training.save_steps", 1)
            .with("deepspeed.optimizer.params.lr", 0.5)
    };
    let trained = job("trained").train();
    assert_same(&trained, &job("all").train(), "scope");
    let losses: Vec<_> = trained.evaluations.iter().map(|row| row.eval_loss).collect();
    assert!(losses[2] > losses[0] || losses[2] > losses[1], "the last is the best: {losses:?}");
}

#[test]
fn parameters_that_the_pretrained_model_lacks_are_contained() {
    let job = job("trained").with("model.config.vocab_size", 520).with("training.max_steps", 2);
    let stderr = job.run().succeeded().stderr;
    assert!(stderr.contains("training.checkpoint_scope has no effect"), "{stderr}");
    assert_eq!(latest(&job).0, 0);
}

#[test]
fn parameters_that_deepspeed_trained_are_contained() {
    let folder = small("s2");
    let job = small_job(&folder)
        .with("training.param_groups", json!([{ "params": "^wte", "frozen": true }]))
        .with("training.save_steps", 3);
    let job = job.scope("trained");
    resume(&job, &[folder.to_str().unwrap()]).succeeded();
    assert_eq!(latest(&job).0, 0);
}
