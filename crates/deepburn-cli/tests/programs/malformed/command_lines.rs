//! Tests of invalid command lines of both programs.

use std::fs;

use super::{Job, fault, none};
use crate::job::tiny_model;
use crate::program::deepburn;

#[test]
fn rejects_wrong_command_lines_of_finetune() {
    let with_job: [(&[&str], &[&str]); 37] = [
        (&["--set", "training.max_steps"], &["training.max_steps", "path.to.key=VALUE"]),
        (&["--set", "=3"], &["path.to.key=VALUE"]),
        (&["--set", ""], &["path.to.key=VALUE"]),
        (&["--set", "training..ranks=3"], &["path.to.key=VALUE"]),
        (&["--set", ".=3"], &["path.to.key=VALUE"]),
        (&["--set", "training.max_step=3"], &["training.max_step", "max_steps"]),
        (&["--set", "trainng.max_steps=3"], &["trainng", "training"]),
        (&["--set", "training.max_steps.more=3"], &["training.max_steps"]),
        (&["--set", "training.max_steps=many"], &["training.max_steps"]),
        (&["--set", "training.max_steps=0"], &["training.max_steps"]),
        (&["--set", "training.max_steps="], &["training.max_steps"]),
        (&["--set", "training=3"], &["training"]),
        (&["--set", "training.seed=-1"], &["training.seed"]),
        (&["--set", "data.sequence_length=1000"], &["data.sequence_length"]),
        (&["--set", "data.splits={\"train\": 1"], &["data.splits"]),
        (&["--set", "model.config.n_layer={}"], &["n_layer"]),
        (&["--set", "model.config.n_layr=1"], &["n_layr", "n_layer"]),
        (&["--set", "deepspeed.zero_optimization.stage=4"], &["zero_optimization.stage"]),
        (&["--set", "deepspeed.zero_optimization.level=1"], &["zero_optimization.level"]),
        (&["--set", "deepspeed.optimizer.params.lr=nan"], &["optimizer.params.lr"]),
        (&["--set", "deepspeed.optimizer.params.rate=1"], &["rate"]),
        (&["--set", "deepspeed.fp16.enabled=1"], &["fp16.enabled"]),
        (&["--set", "deepspeed=nowhere.json"], &["nowhere.json"]),
        (&["--set", "training.resume=latest"], &["training.resume"]),
        (&["--ranks", "0"], &["training.ranks"]),
        (&["--ranks", "1025"], &["training.ranks"]),
        (&["--ranks", "-1"], &["--ranks"]),
        (&["--ranks", "two"], &["--ranks"]),
        (&["--num_gpus", "99999999999999999999999"], &["--ranks"]),
        (&["--ranks", "2", "--ranks", "3"], &["--ranks"]),
        (&["--backend", "metal"], &["training.backend", "metal"]),
        (&["--deepspeed", "nowhere.json"], &["nowhere.json"]),
        (&["--output-dir", ""], &["output"]),
        (&["--output-dir", "job.json/x"], &["training.output_dir", "job.json/x"]),
        (&["--resume", "latest"], &["--resume"]),
        (&["--learning-rate", "3"], &["--learning-rate"]),
        (&["more"], &["more"]),
    ];
    let mut faults: Vec<_> = with_job
        .iter()
        .map(|(more, parts)| {
            let job = Job::tiny();
            fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
            let arguments = [&["--config", "job.json"], *more].concat();
            (format!("{more:?}"), fault(&job, &arguments, parts))
        })
        .collect();
    let alone: [(&[&str], &[&str]); 8] = [
        (&[], &["--config"]),
        (&["--config"], &["--config"]),
        (&["--config", ""], &["--config"]),
        (&["--config", "nowhere.json"], &["nowhere.json", "configs/nowhere.json"]),
        (&["--config", "."], &["directory"]),
        (&["--config", "/dev/zero"], &["/dev/zero"]),
        (&["--config", "/proc/self/mem"], &["/proc/self/mem"]),
        (&["job.json"], &["job.json"]),
    ];
    faults.extend(alone.iter().map(|(arguments, parts)| {
        (format!("{arguments:?}"), fault(&Job::tiny(), arguments, parts))
    }));
    none(faults);
}

#[test]
fn rejects_wrong_command_lines_of_deepburn() {
    let model = tiny_model();
    let model = model.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("empty.json", "");
    write("list.json", "[]");
    write("good.json", r#"{"train_micro_batch_size_per_gpu": 1}"#);
    write("mamba.json", r#"{"model_type": "mamba"}"#);
    write("odd.json", r#"{"n_embd": 10, "n_head": 3}"#);
    let cases: Vec<(Vec<&str>, &[&str])> = vec![
        (vec!["trainn"], &["trainn"]),
        (vec!["check-config"], &["CONFIG"]),
        (vec!["check-config", "nowhere.json"], &["nowhere.json"]),
        (vec!["check-config", "empty.json"], &["empty.json"]),
        (vec!["check-config", "list.json"], &["list.json"]),
        (vec!["check-config", "."], &["."]),
        (vec!["check-config", ""], &[]),
        (vec!["check-config", "!!!!"], &["!!!!"]),
        (vec!["check-config", "eyJ0cmFpbl9iYXRjaF9zaXplIjog"], &["base64"]),
        (vec!["check-config", "AAAAAAAAAAAAAAAA"], &["base64"]),
        (vec!["check-config", "/w=="], &[]),
        (vec!["check-config", "{\"stage\": 3}"], &["stage"]),
        (vec!["check-config", "{\"train_batch_size\": 1"], &["inline"]),
        (vec!["check-config", "good.json", "--ranks", "0"], &["--ranks"]),
        (vec!["check-config", "good.json", "--ranks", "x"], &["--ranks"]),
        (vec!["estimate", "--model", "nowhere"], &["--model", "nowhere"]),
        (vec!["estimate", "--model", "empty.json"], &["--model", "empty.json"]),
        (vec!["estimate", "--model", "mamba.json"], &["--model", "model_type"]),
        (vec!["estimate", "--model", "odd.json"], &["--model", "n_head"]),
        (vec!["estimate", "--model", "."], &["--model", "config.json"]),
        (vec!["estimate", "--stage", "4"], &["--stage", "0 to 3"]),
        (vec!["estimate", "--stage", "-1"], &["--stage"]),
        (vec!["estimate", "--ranks", "0"], &["--ranks"]),
        (vec!["estimate", "--deepspeed", "list.json"], &["list.json"]),
        (vec!["generate", "--model", model], &["--prompt"]),
        (vec!["generate", "--model", "nowhere", "--prompt", "x"], &["nowhere"]),
        (vec!["generate", "--model", model, "--prompt", "x"], &["tokenizer"]),
    ];
    let faults = cases.into_iter().map(|(arguments, parts)| {
        let ending = deepburn(folder.path(), &arguments);
        (format!("{arguments:?}"), ending.fault(2, parts))
    });
    none(faults.collect());
}

/// The model is valid, but the sampling options are out of range.
#[test]
fn rejects_invalid_sampling_options() {
    let job = Job::uneven()
        .with(
            "data",
            serde_json::json!({"kind": "synthetic", "sequence_length": 32, "vocab_size": 280}),
        )
        .with("model.config.vocab_size", 280)
        .with("training.max_steps", 1);
    job.train();
    let start = ["generate", "--model", "output/model", "--prompt"];
    let cases: [(&[&str], &str); 10] = [
        (&[""], "prompt"),
        (&["x", "--temperature", "0", "--top-k", "5"], "temperature"),
        (&["x", "--temperature", "NaN", "--top-k", "5"], "temperature"),
        (&["x", "--temperature", "-1", "--top-p", "0.5"], "temperature"),
        (&["x", "--min-p", "1.5"], "min_p"),
        (&["x", "--repetition-penalty", "0"], "repetition_penalty"),
        (&["x", "--top-p", "0"], "top_p"),
        (&["x", "--top-p", "1.5"], "top_p"),
        (&["x", "--top-p", "NaN"], "top_p"),
        (&["x", "--top-k", "-1"], "--top-k"),
    ];
    let faults = cases.into_iter().map(|(more, part)| {
        let length: &[&str] = &["--max-new-tokens", "4"];
        let ending = deepburn(job.folder(), &[&start, more, length].concat());
        (format!("{more:?}"), ending.fault(2, &[part]))
    });
    none(faults.collect());
}
