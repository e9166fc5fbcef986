//! Tests of the best model of a run: keeping its checkpoint, saving and consolidating it, and
//! resuming.

use std::fs;

use serde_json::{Value, json};

use crate::job::{Job, Trained, data, tensors};
use crate::program::{deepburn, finetune};
use crate::resume::checkpoints;

/// Returns a job that evaluates on the test data after every step. Its learning rate is so high
/// that the loss increases again.
fn job() -> Job {
    Job::tiny()
        .with("data.path", Value::Null)
        .with(
            "data.splits",
            json!({"train": data("tokens.bin"), "eval": data("tokens.bin"), "test": data("tokens.bin")}),
        )
        .with("training.max_steps", 3)
        .with("training.eval_steps", 1)
        .with("training.eval_max_samples", 8)
        .with("deepspeed.optimizer.params.lr", 0.5)
}

#[test]
fn the_best_model_is_saved() {
    for (stage, ranks) in [(0, 1), (3, 2)] {
        let job = job().sharded(stage, ranks).with("training.load_best_model_at_end", true);
        let trained = job.train();
        let best = trained
            .evaluations
            .iter()
            .min_by(|left, right| left.eval_loss.total_cmp(&right.eval_loss))
            .unwrap();
        assert!(best.step < 3, "the last model is the best one: {:?}", trained.evaluations);
        let out = job.folder().join("best");
        deepburn(job.folder(), &["consolidate", "output", "best", "--best"]).succeeded();
        let consolidated = fs::read(out.join("model.safetensors")).unwrap();
        assert_eq!(tensors(&consolidated), trained.tensors());
        // The same job without it saves the last model.
        fs::remove_dir_all(job.folder().join("output")).unwrap();
        let last = job.with("training.load_best_model_at_end", false).train();
        assert_eq!(last.evaluations, trained.evaluations);
        assert_ne!(last.weights, trained.weights);
    }
}

#[test]
fn a_resumed_run_ends_with_the_same_best_model() {
    let options = |job: Job| {
        job.with("training.load_best_model_at_end", true)
            .with("training.save_steps", 2)
            .with("training.save_total_limit", 1)
    };
    let whole = options(job()).train();
    let parts = options(job());
    fs::write(parts.folder().join("job.json"), parts.json().to_string()).unwrap();
    let arguments = ["--config", "job.json"];
    let short = ["--set", "training.max_steps=2"];
    finetune(parts.folder(), &[&arguments[..], &short].concat()).succeeded();
    finetune(parts.folder(), &[&arguments[..], &["--resume"]].concat()).succeeded();
    let resumed = Trained::read(&parts.folder().join("output"));
    assert_eq!(resumed.weights, whole.weights);
    assert_eq!(resumed.evaluations, whole.evaluations);
}

#[test]
fn a_run_whose_best_model_was_not_saved_ends_with_the_last_one() {
    let last = job().train();
    let job = job().with("training.load_best_model_at_end", true);
    fs::create_dir(job.folder().join("output")).unwrap();
    // No checkpoint can be saved, as on a full disk.
    std::os::unix::fs::symlink("nowhere/checkpoints", checkpoints(&job)).unwrap();
    let ending = job.run().succeeded();
    let output = job.folder().join("output");
    assert!(Trained::read(&output).weights == last.weights, "not the last model");
    let [best, last] = [0, 2].map(|index| last.evaluations[index]);
    assert!(best.eval_loss < last.eval_loss);
    for part in [
        "WARN load_best_model_at_end: the best model, of step 1, cannot be loaded",
        &format!("the saved model is the last one: step 3, eval loss {:.4}", last.eval_loss),
        &format!("it is not the best one (step 1, eval loss {:.4})", best.eval_loss),
    ] {
        assert!(ending.stderr.contains(part), "{part}: {}", ending.stderr);
    }
    let record = fs::read_to_string(output.join("job.json")).unwrap();
    let saved = &serde_json::from_str::<Value>(&record).unwrap()["saved_model"];
    assert_eq!((&saved["step"], &saved["is_best"]), (&json!(3), &json!(false)));
    assert_eq!(saved["best_step"], 1);
    let report = fs::read_to_string(output.join("report.html")).unwrap();
    assert!(report.contains("saved_model.is_best"));
}

#[test]
fn training_stops_early() {
    let job = job()
        .with("training.max_steps", 12)
        .with("training.early_stopping_patience", 2)
        .with("training.early_stopping_threshold", 100.0);
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains("stopped early after step 3"), "{}", ending.stderr);
    let trained = Trained::read(&job.folder().join("output"));
    assert_eq!((trained.steps.len(), trained.evaluations.len()), (3, 3));
}

#[test]
fn an_evaluation_takes_the_first_samples() {
    let tokens = fs::read(data("tokens.bin")).unwrap();
    let short =
        |job: &Job| fs::write(job.folder().join("short.bin"), &tokens[..5 * 32 * 2]).unwrap();
    let evaluated = |job: Job| {
        short(&job);
        job.train().evaluations.iter().map(|row| row.eval_loss.to_bits()).collect::<Vec<_>>()
    };
    let splits = |eval: Value| json!({"train": data("tokens.bin"), "eval": eval});
    let all = job().sharded(0, 1).with("training.eval_max_samples", Value::Null);
    let whole_file = evaluated(all.with("data.splits", splits(json!("short.bin"))));
    let limited = job().sharded(0, 1).with("training.eval_max_samples", 5);
    let first = evaluated(limited.with("data.splits", splits(json!(data("tokens.bin")))));
    assert_eq!(first, whole_file);
}

#[test]
fn a_job_without_evaluations_has_no_best_model() {
    for key in ["load_best_model_at_end", "early_stopping_patience"] {
        let value = if key == "early_stopping_patience" { json!(1) } else { json!(true) };
        let job = Job::tiny().with(&format!("training.{key}"), value);
        job.run().failed(2, &[&format!("training.{key}"), "training.eval_steps"]);
    }
    let job = job().with("training.metric_for_best_model", "accuracy");
    job.run().failed(2, &["training.metric_for_best_model", "classifier"]);
}
