//! Evaluation against another library's numbers.

use std::fs;

use serde_json::{Value, json};

use crate::job::{Job, data};

/// Mean cross-entropy of the small model over its tokens in sequences of 32, computed with
/// `transformers` 5 and torch 2.9 in f64.
const LOSS: f64 = 6.263568922407208;

/// Products of 48 values in f32 differ by some 1e-7 from those in f64, and so does a mean over
/// thousands; the contract with users is 1e-4.
const TOLERANCE: f64 = 1e-6;

#[test]
fn the_loss_is_that_of_transformers() {
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
