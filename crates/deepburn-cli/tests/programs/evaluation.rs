//! Compares an evaluation with the numbers of `transformers`.

use std::fs;
#[cfg(unix)]
use std::process::Stdio;

use serde_json::{Value, json};

#[cfg(unix)]
use crate::job::Trained;
use crate::job::{Job, data};
use crate::lora_tools::copy_of_tiny;
use crate::program::finetune;
#[cfg(unix)]
use crate::program::{Ending, finetune_command, terminate};

/// Mean cross-entropy of the small model over its tokens in sequences of 32, computed with
/// `transformers` 5 and torch 2.9 in f64.
const LOSS: f64 = 6.263568922407208;

/// Products of 48 values in f32 differ by about 1e-7 from products in f64, and so does a mean over
/// thousands of them. The documented tolerance is 1e-4.
const TOLERANCE: f64 = 1e-6;

#[test]
fn the_loss_matches_transformers() {
    for (stage, ranks) in [(0, 1), (2, 3), (3, 2)] {
        let job = Job::tiny()
            .with("data.path", Value::Null)
            .with(
                "data.splits",
                json!({"train": data("tokens.bin"), "eval": data("tokens.bin"), "test": data("tokens.bin")}),
            )
            .with("training.max_steps", 1)
            .with("deepspeed.optimizer.params", json!({"lr": 0.0, "weight_decay": 0.0}))
            .sharded(stage, ranks);
        let evaluated = job.train().evaluations[0].eval_loss;
        assert!((evaluated - LOSS).abs() < TOLERANCE, "stage {stage}: {evaluated}");
        let record = fs::read_to_string(job.folder().join("output/test.json")).unwrap();
        let record: Value = serde_json::from_str(&record).unwrap();
        assert!((record["test_loss"].as_f64().unwrap() - LOSS).abs() < TOLERANCE);
        assert!((record["perplexity"].as_f64().unwrap() - LOSS.exp()).abs() < 1e-3);
        assert_eq!(record["targets"], 1250 * 31);
    }
}

/// The weights are finite, and what the model computes with them is not.
#[test]
fn an_evaluation_without_a_number_fails() {
    let job = |factor: f32| {
        let splits = json!({"train": data("tokens.bin"), "eval": data("tokens.bin"), "test": data("tokens.bin")});
        let job = Job::tiny()
            .with("data.path", Value::Null)
            .with("data.splits", splits)
            .with("model.pretrained", "large")
            .with("training.max_steps", 1);
        copy_of_tiny(&job.folder().join("large"), |value| value * factor);
        job
    };
    let large = job(1e36);
    fs::write(large.folder().join("job.json"), large.json().to_string()).unwrap();
    finetune(large.folder(), &["--config", "job.json", "--evaluate"]).failed(
        1,
        &[
            "the loss of the eval split is ",
            " and the loss of the test split is ",
            "check the weights and the rope fields of model.pretrained, and lora_alpha",
        ],
    );
    // The first step is skipped in fp16, and the model is saved.
    let large = job(1e3).with("deepspeed.fp16.enabled", true);
    let stderr = large.run().succeeded().stderr;
    for part in
        ["the evaluation after step 1 has a loss of ", "WARN the loss of the test split is "]
    {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    assert!(large.folder().join("output/model/model.safetensors").exists());
}

/// The whole evaluation would take minutes, but the signal is handled after one batch, which takes
/// milliseconds.
#[cfg(unix)]
#[test]
fn a_signal_in_an_evaluation_is_answered() {
    let job = Job::tiny()
        .with("data.path", Value::Null)
        .with("data.splits", json!({"train": data("tokens.bin"), "eval": "long.bin"}))
        .with("training.max_steps", 2)
        .with("training.eval_steps", 1);
    let tokens = fs::read(data("tokens.bin")).unwrap();
    fs::write(job.folder().join("long.bin"), tokens.repeat(200)).unwrap();
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let mut command = finetune_command(job.folder(), &["--config", "job.json"]);
    let mut running = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    // The first row is written before the evaluation of step 1 begins.
    let metrics = job.folder().join("output/metrics.jsonl");
    while !fs::read_to_string(&metrics).is_ok_and(|rows| rows.contains('\n')) {
        assert!(running.try_wait().unwrap().is_none(), "it ended before its first step");
        std::thread::yield_now();
    }
    terminate(&running);
    let ending = Ending::of(running.wait_with_output().unwrap());
    assert_eq!(ending.status, Some(143), "{}", ending.stderr);
    assert!(ending.stderr.contains("stopped by SIGTERM"), "{}", ending.stderr);
    let rows = fs::read_to_string(&metrics).unwrap();
    assert!(!rows.contains("eval_loss"), "{rows}");
    // The resumed run repeats the evaluation first, here with fewer samples.
    let resumed = ["--config", "job.json", "--resume", "--set", "training.eval_max_samples=4"];
    finetune(job.folder(), &resumed).succeeded();
    let rows = Trained::read(&job.folder().join("output"));
    let evaluated: Vec<_> = rows.evaluations.iter().map(|row| row.step).collect();
    assert_eq!((rows.steps.len(), evaluated), (2, vec![1, 2]));
}

/// The message names the checkpoint that `--resume` starts from. Without `save_steps`, only the
/// best model has one.
#[cfg(unix)]
#[test]
fn a_signal_in_the_test_is_answered_with_the_checkpoint() {
    let tokens = fs::read(data("tokens.bin")).unwrap();
    for (saves, lr, expected) in [
        (false, 1e-2, "there is no checkpoint; set training.save_steps"),
        (true, 1e-2, "give the same command with --resume to test it"),
        // No evaluation is better than the first one.
        (true, 0.0, "the latest checkpoint is of step 1: the same command with --resume repeats"),
    ] {
        let splits =
            json!({"train": data("tokens.bin"), "eval": data("tokens.bin"), "test": "long.bin"});
        let job = Job::tiny()
            .with("data.path", Value::Null)
            .with("data.splits", splits)
            .with("training.max_steps", 2)
            .with("training.eval_steps", 1)
            .with("training.eval_max_samples", 16)
            .with("training.load_best_model_at_end", saves)
            .with("deepspeed.optimizer.params", json!({"lr": lr, "weight_decay": 0.0}));
        fs::write(job.folder().join("long.bin"), tokens.repeat(200)).unwrap();
        fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
        let mut command = finetune_command(job.folder(), &["--config", "job.json"]);
        let mut running = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        // The model is saved before the test.
        while !job.folder().join("output/model/deepburn.json").exists() {
            assert!(running.try_wait().unwrap().is_none(), "it ended before its test");
            std::thread::yield_now();
        }
        terminate(&running);
        let ending = Ending::of(running.wait_with_output().unwrap());
        assert_eq!(ending.status, Some(143), "{}", ending.stderr);
        assert!(ending.stderr.contains("stopped by SIGTERM in the test"), "{}", ending.stderr);
        assert!(ending.stderr.contains(expected), "{}", ending.stderr);
    }
}
