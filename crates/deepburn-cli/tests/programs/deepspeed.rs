//! Compares runs that resume from DeepSpeed checkpoints with the same runs in DeepSpeed.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::job::{Job, STAGES, Trained, data};
use crate::program::{Ending, finetune};
use crate::traces::{FP32, Nearness, assert_near};

/// Returns the folder of checkpoints of the tiny model.
fn golden(name: &str) -> PathBuf {
    data("deepspeed").join(name)
}

/// Returns the folder of checkpoints of a smaller model, `mini`, which has its own tokens.
pub(crate) fn small(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deepburn-deepspeed/tests/data").join(name)
}

pub(crate) fn trace(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("trace.json")).unwrap()).unwrap()
}

/// Returns the job that saved the checkpoint in `folder`.
fn job(folder: &Path) -> Job {
    let trace = trace(folder);
    let last = trace["resumed"].as_array().unwrap().last().unwrap()["step"].clone();
    Job::tiny()
        .with("deepspeed", trace["ds"].clone())
        .with("data.sequence_length", trace["seq"].clone())
        .with("training.ranks", trace["world"].clone())
        .with("training.max_steps", last)
        .with("training.no_decay", "nothing")
}

pub(crate) fn small_job(folder: &Path) -> Job {
    job(folder)
        .with("model.pretrained", json!(small("mini")))
        .with("data.path", json!(small("tokens.bin")))
}

/// Runs the job with `--resume` and the folder `from`.
fn resume_from(job: &Job, from: &Path) -> Ending {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let from = from.to_str().unwrap();
    finetune(job.folder(), &["--config", "job.json", "--resume", from])
}

#[track_caller]
fn follows(job: &Job, folder: &Path, nearness: &Nearness, what: &str) {
    resume_from(job, folder).succeeded();
    let steps = Trained::read(&job.folder().join("output")).steps;
    assert_near(&steps, trace(folder)["resumed"].as_array().unwrap(), nearness, what);
}

/// A checkpoint of any stage resumes at any other stage.
#[test]
fn the_golden_model_resumes_along_its_trace() {
    for name in ["s2", "s3"] {
        for stage in STAGES {
            let job = job(&golden(name)).zero("stage", stage);
            follows(&job, &golden(name), &FP32, &format!("golden {name} at stage {stage}"));
        }
    }
}

#[test]
fn every_stage_and_precision_resumes_along_its_trace() {
    // The limits are the same as for the traces from the beginning. s0_fp16 is not compared: at
    // stage 0, DeepSpeed unscales gradients whose loss it has not scaled. In step 11 of s2_fp16,
    // the gradient of the tied embedding overflows on one rank in DeepSpeed. DeepBurn adds the
    // gradient's two parts, and the other rank's parts, in f32, which can hold the sum.
    let fp16 = Nearness { loss: 3e-3, norm: 1e-2, steps: 4 };
    let bf16 = Nearness { loss: 5e-3, norm: 2e-2, steps: usize::MAX };
    for (name, nearness) in [
        ("s0", &FP32),
        ("s1", &FP32),
        ("s2", &FP32),
        ("s3", &FP32),
        ("s2_fp16", &fp16),
        ("s1_bf16", &bf16),
        ("s3_bf16", &bf16),
    ] {
        follows(&small_job(&small(name)), &small(name), nearness, name);
    }
}

/// The checkpoints of pipelines have the names of their layers. They resume without a pipeline, and
/// in one of any number of stages.
#[test]
fn pipelines_resume_along_their_trace() {
    let bf16 = Nearness { loss: 5e-3, norm: 2e-2, steps: usize::MAX };
    // At stage 0, DeepSpeed unscales gradients whose loss it has not scaled, so its later steps are
    // others.
    let fp16 = Nearness { loss: 3e-3, norm: 1e-2, steps: 1 };
    for (name, nearness) in
        [("p2_s0", &FP32), ("p2_s1", &FP32), ("p3_s0_fp16", &fp16), ("p3_s1_bf16", &bf16)]
    {
        let folder = small(name);
        let replicas = trace(&folder)["world"].as_u64().unwrap();
        for (stages, zero) in [(1, 0), (1, 3), (2, 1)] {
            let job = small_job(&folder)
                .zero("stage", zero)
                .with("training.ranks", stages * replicas)
                .with("training.pipeline_stages", stages);
            follows(&job, &folder, nearness, &format!("{name} at stage {zero}, {stages} stages"));
        }
    }
}

#[test]
fn a_pipeline_of_another_model_is_refused() {
    let folder = small("p2_s1");
    // The tiny model has other sizes, and four blocks.
    resume_from(&job(&folder), &folder).failed(2, &["global_step6", "layer", "of its pipeline"]);
}

/// The checkpoints have two parameter groups, one of them without weight decay, as by default with
/// `training.no_decay`.
#[test]
fn parameter_groups_resume_along_their_trace() {
    for name in ["s2_groups", "s3_groups"] {
        for stage in STAGES {
            let job = small_job(&small(name)).zero("stage", stage);
            let job = job.with("training.no_decay", "biases_and_norms");
            follows(&job, &small(name), &FP32, &format!("{name} at stage {stage}"));
        }
    }
}

/// With another number of ranks the order of samples differs, but the initial weights are the same.
#[test]
fn any_number_of_ranks_starts_from_the_same_weights() {
    let folder = small("s3");
    let evaluated = |stage: u8, ranks: usize| {
        let job = small_job(&folder)
            .with("data.splits", json!({"train": "80%", "test": "20%"}))
            .with("training.max_steps", 6)
            .with("deepspeed.train_micro_batch_size_per_gpu", 1)
            .sharded(stage, ranks);
        resume_from(&job, &folder.join("global_step6")).succeeded();
        Trained::read(&job.folder().join("output")).weights
    };
    let expected = evaluated(3, 3);
    for (stage, ranks) in [(0, 1), (1, 2), (2, 4), (3, 1), (3, 5)] {
        assert!(evaluated(stage, ranks) == expected, "stage {stage}, {ranks} ranks");
    }
}

/// After resuming from DeepSpeed, a run saves its own checkpoints and can resume from them.
#[test]
fn a_run_resumed_from_deepspeed_saves_its_own_checkpoints() {
    let folder = small("s2");
    let job = small_job(&folder).with("training.save_steps", 3);
    follows(&job, &folder, &FP32, "with checkpoints");
    let straight = Trained::read(&job.folder().join("output"));
    fs::remove_dir_all(job.folder().join("output/checkpoints/step-00000012")).unwrap();
    fs::remove_file(job.folder().join("output/checkpoints/latest")).unwrap();
    finetune(job.folder(), &["--config", "job.json", "--resume"]).succeeded();
    let resumed = Trained::read(&job.folder().join("output"));
    assert_eq!(resumed.numbers().0, straight.numbers().0);
    assert!(resumed.weights == straight.weights);
    // Resuming from DeepSpeed fails if the output folder already has checkpoints.
    resume_from(&job, &folder).failed(2, &["training.output_dir", "earlier run"]);
}

#[test]
fn unsupported_settings_are_refused() {
    let folder = small("s2");
    let names = ["global_step6"];
    let short = small_job(&folder).with("training.max_steps", 5);
    resume_from(&short, &folder).failed(2, &["--resume", "step 6", "training.max_steps"]);
    let other = small_job(&folder)
        .with("deepspeed.optimizer", json!({"type": "Lion", "params": {"lr": 1e-3}}));
    resume_from(&other, &folder).failed(2, &[&names[..], &["exp_avg_sq"]].concat());
    resume_from(&job(&folder), &folder).failed(2, &[&names[..], &["shape"]].concat());

    let copy = tempfile::tempdir().unwrap();
    for name in [
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_2_mp_rank_00_optim_states.pt",
    ] {
        let bytes = fs::read(folder.join("global_step6").join(name)).unwrap();
        fs::write(copy.path().join(name), bytes).unwrap();
    }
    let file = copy.path().join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let job = small_job(&folder);
    resume_from(&job, copy.path()).failed(2, &["--resume", "zero_pp_rank_1", "damaged"]);
    // An intact file of another rank.
    fs::copy(copy.path().join("zero_pp_rank_0_mp_rank_00_optim_states.pt"), &file).unwrap();
    resume_from(&job, copy.path())
        .failed(2, &["--resume", "zero_pp_rank_1", "saved as zero_pp_rank_0"]);
    fs::remove_file(&file).unwrap();
    resume_from(&job, copy.path()).failed(2, &["--resume", "ranks"]);
    assert!(!job.folder().join("output").exists());
}
