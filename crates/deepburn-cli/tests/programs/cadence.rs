//! The Trainer's words for the length of training, its evaluations, its checkpoints and its
//! learning rate.

use std::f64::consts::PI;
use std::fs;

use serde_json::{Value, json};

use crate::job::{Job, Trained, data};
use crate::program::finetune;

/// Returns a job of 2.5 epochs of 20 sequences, in steps of 8: the epochs end in steps 3, 5 and,
/// halfway, 7.
fn job() -> Job {
    let job = Job::tiny()
        .with("data.path", Value::Null)
        .with(
            "data.splits",
            json!({"train": "short.bin", "eval": "short.bin", "test": "short.bin"}),
        )
        .with("training.max_steps", Value::Null)
        .with("training.num_train_epochs", 2.5);
    let tokens = fs::read(data("tokens.bin")).unwrap();
    fs::write(job.folder().join("short.bin"), &tokens[..20 * 32 * 2]).unwrap();
    job
}

/// Returns the steps of the evaluations.
fn evaluated(trained: &Trained) -> Vec<u64> {
    trained.evaluations.iter().map(|row| row.step).collect()
}

/// Returns the names of the checkpoints, in order.
fn checkpoints(job: &Job) -> Vec<String> {
    let entries = fs::read_dir(job.folder().join("output/checkpoints")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    names
}

fn record(job: &Job) -> Value {
    serde_json::from_str(&fs::read_to_string(job.folder().join("output/job.json")).unwrap())
        .unwrap()
}

#[test]
fn an_interval_that_is_longer_than_the_run_is_noted() {
    let with = |eval: Value, save: Value, patience: Value| {
        let job = job()
            .with("training.num_train_epochs", Value::Null)
            .with("training.max_steps", 2)
            .with("training.eval_steps", eval)
            .with("training.save_steps", save)
            .with("training.early_stopping_patience", patience);
        job.run().succeeded().stderr
    };
    let late = with(json!(3), json!(4), json!(1));
    for expected in [
        "training.eval_steps: is 3, but the run has 2 steps: the model is only evaluated after the last one",
        "training.save_steps: is 4, but the run has 2 steps: the model is only saved after the last one",
        "training.early_stopping_patience: is 1, but the run has 1 evaluation: training never stops early",
    ] {
        assert!(late.contains(expected), "{late}");
    }
    let reached = with(json!(1), json!(2), json!(1));
    assert!(!reached.contains("but the run has"), "{reached}");
    let by_ratio = with(json!(0.9), json!(0.9), Value::Null);
    assert!(!by_ratio.contains("but the run has"), "{by_ratio}");
}

#[test]
fn epochs_end_in_the_step_with_their_last_sample() {
    let by_epoch =
        job().with("training.eval_strategy", "epoch").with("training.save_strategy", "epoch");
    let trained = by_epoch.train();
    assert_eq!((trained.steps.len(), evaluated(&trained)), (7, vec![3, 5, 7]));
    assert_eq!(checkpoints(&by_epoch), ["step-00000003", "step-00000005", "step-00000007"]);
    let record = record(&by_epoch);
    assert_eq!((&record["total_steps"], &record["samples_per_epoch"]), (&json!(7), &json!(20)));
    assert_eq!(record["training"]["epochs"], 2.5);
    // Without the last step, which has only 2 of 8 samples.
    let dropped = job().with("training.eval_strategy", "epoch").with("data.drop_last", true);
    assert_eq!(evaluated(&dropped.train()), [3, 5, 6]);
    // Steps of 8, 8, then 16 samples: the epochs end in steps 3 (32) and 4 (48).
    let growing = job()
        .with("training.eval_strategy", "epoch")
        .with("training.batch_size_schedule", json!({"from_step": [3], "train_batch_size": [16]}));
    assert_eq!(evaluated(&growing.train()), [3, 4, 5]);
}

#[test]
fn a_resumed_run_counts_epochs_from_the_start() {
    let job = job().with("training.eval_strategy", "epoch").with("training.save_strategy", "epoch");
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let arguments = ["--config", "job.json"];
    let short = ["--set", "training.max_steps=4"];
    finetune(job.folder(), &[&arguments[..], &short].concat()).succeeded();
    finetune(job.folder(), &[&arguments[..], &["--resume"]].concat()).succeeded();
    // The last step of the first run is evaluated too.
    assert_eq!(evaluated(&Trained::read(&job.folder().join("output"))), [3, 4, 5, 7]);
}

/// Trains `steps` steps with the values `first`, then resumes with the values `later`. Returns the
/// number of all steps.
fn steps_after_a_change(job: Job, steps: u64, first: &[&str], later: &[&str]) -> usize {
    let job = job.with("training.save_strategy", "epoch");
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let run = |values: &[&str], more: &[&str]| {
        let sets = values.iter().flat_map(|value| ["--set", value]);
        let arguments: Vec<&str> = ["--config", "job.json"].into_iter().chain(sets).collect();
        finetune(job.folder(), &[&arguments[..], more].concat())
    };
    run(first, &["--set", &format!("training.max_steps={steps}")]).succeeded();
    run(later, &["--resume"]).succeeded();
    let trained = Trained::read(&job.folder().join("output"));
    assert_eq!(record(&job)["total_steps"], trained.steps.len());
    trained.steps.len()
}

/// The samples before the checkpoint count as they were: a run of 8 epochs has 160 samples, in
/// steps of any size.
#[test]
fn epochs_end_after_the_same_samples_with_another_batch_size() {
    let job = |epochs: f64| job().with("training.num_train_epochs", epochs);
    let small: &[&str] = &["training.ranks=1"];
    let large = &["training.ranks=1", "deepspeed.gradient_accumulation_steps=4"];
    let ranks = &["training.ranks=2"];
    assert_eq!(steps_after_a_change(job(8.0), 10, small, small), 40);
    assert_eq!(steps_after_a_change(job(8.0), 10, small, large), 10 + 15);
    assert_eq!(steps_after_a_change(job(8.0), 5, large, small), 5 + 30);
    assert_eq!(steps_after_a_change(job(8.0), 10, small, ranks), 10 + 15);
    assert_eq!(steps_after_a_change(job(8.0), 5, ranks, small), 5 + 30);
    // 50 samples: 20 in steps of 4, then 30 in steps of 8.
    assert_eq!(steps_after_a_change(job(2.5), 5, small, large), 5 + 4);
    let dropped = job(2.5).with("data.drop_last", true);
    assert_eq!(steps_after_a_change(dropped, 5, small, large), 5 + 3);
}

#[test]
fn epochs_that_end_before_the_checkpoint_are_refused() {
    let job = job().with("training.save_strategy", "epoch");
    job.train();
    let arguments = ["--config", "job.json", "--resume", "--set", "training.num_train_epochs=1"];
    let ending = finetune(job.folder(), &arguments);
    ending.failed(2, &["--resume", "step 7", "after 56 samples", "ends after 20", "raise"]);
}

#[test]
fn ratios_are_rounded_up_to_steps() {
    let job = job()
        .with("training.max_steps", 7)
        .with("training.num_train_epochs", Value::Null)
        .with("training.eval_steps", 0.3)
        .with("training.save_steps", 0.5)
        .with("training.save_total_limit", 9);
    // ceil(0.3 * 7) = 3, ceil(0.5 * 7) = 4
    assert_eq!(evaluated(&job.train()), [3, 6, 7]);
    assert_eq!(checkpoints(&job), ["step-00000004", "step-00000007"]);
    let record = record(&job);
    let training = &record["training"];
    assert_eq!((&training["eval_steps"], &training["save_steps"]), (&json!(3), &json!(4)));
    // Checkpoints of step 4 have no evaluation.
    let job = job.with("training.save_best_limit", 1).with("training.output_dir", "other");
    let ending = job.run();
    ending.failed(2, &["training.save_best_limit", "every 4", "every 3"]);
    assert!(!job.folder().join("other").exists());
}

#[test]
fn the_batch_size_of_evaluations_does_not_change_their_loss() {
    let of = |rows: Value| {
        let job = job()
            .with("training.num_train_epochs", 0.5)
            .with("training.per_device_eval_batch_size", rows);
        let trained = job.train();
        let test = fs::read_to_string(job.folder().join("output/test.json")).unwrap();
        let test: Value = serde_json::from_str(&test).unwrap();
        assert_eq!(test["targets"], 20 * 31);
        (trained.weights, [trained.evaluations[0].eval_loss, test["test_loss"].as_f64().unwrap()])
    };
    let (weights, losses) = of(Value::Null);
    for rows in [1, 3, 64] {
        let (same, others) = of(json!(rows));
        assert_eq!(same, weights);
        for (loss, other) in losses.iter().zip(others) {
            // Sums of f32 losses in another order.
            assert!((loss - other).abs() < 1e-6 * loss, "{rows}: {loss} and {other}");
        }
    }
    job()
        .with("training.per_device_eval_batch_size", 1_u64 << 40)
        .run()
        .failed(2, &["training.per_device_eval_batch_size", "and a batch has at most"]);
}

#[test]
fn the_learning_rate_follows_the_schedule_of_transformers() {
    let job = job()
        .with("training.num_train_epochs", 4)
        .with("training.learning_rate", 1e-2)
        .with("training.lr_scheduler_type", "cosine")
        .with("training.warmup_ratio", 0.15);
    // 80 samples are 10 steps, of which ceil(1.5) are the warm-up.
    let factor = |i: f64| match i < 2.0 {
        true => i / 2.0,
        false => 0.5 * (1.0 + (PI * (i - 2.0) / 8.0).cos()),
    };
    let steps = job.train().steps;
    assert_eq!(steps.len(), 10);
    for (i, row) in steps.iter().enumerate() {
        let expected = 1e-2 * factor(i as f64);
        assert!((row.lr - expected).abs() < 1e-12, "step {}: {} is not {expected}", i + 1, row.lr);
    }
    let schedule = &record(&job)["resolved"]["plan"]["schedule"];
    assert_eq!((&schedule["warmup_steps"], &schedule["total_steps"]), (&json!(2), &json!(10)));
}
