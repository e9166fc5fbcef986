//! Runs against the record of PyTorch with DeepSpeed on the same model, data and configuration.

use std::fs;

use serde_json::Value;

use crate::job::{Job, data};

/// A trace and the job that must reproduce it.
fn job(trace: &Value) -> Job {
    Job::tiny()
        .with("deepspeed", trace["ds"].clone())
        .with("data.sequence_length", trace["seq"].clone())
        .with("training.ranks", trace["world"].clone())
        .with("training.max_steps", trace["rows"].as_array().unwrap().len())
}

/// Losses to 1e-4, learning rates to 1e-9, norms to 1e-3 of themselves.
fn reproduces(name: &str) {
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(data(&format!("traces/{name}.json"))).unwrap())
            .unwrap();
    let expected = trace["rows"].as_array().unwrap();
    for stage in crate::job::STAGES {
        let steps = job(&trace).zero("stage", stage).train().steps;
        assert_eq!(steps.len(), expected.len());
        for (row, expected) in steps.iter().zip(expected) {
            let number = |key: &str| expected[key].as_f64();
            let what = format!("{name} at stage {stage}, step {}: {row:?}", row.step);
            assert_eq!(Some(row.step as f64), number("step"), "{what}");
            assert!((row.loss - number("loss").unwrap()).abs() < 1e-4, "{what}");
            assert!((row.lr - number("lr").unwrap()).abs() < 1e-9, "{what}");
            assert_eq!(Some(row.loss_scale), number("loss_scale"), "{what}");
            assert_eq!(Some(row.skipped), expected["skipped"].as_bool(), "{what}");
            // DeepSpeed keeps no norm at stage 0.
            if let Some(norm) = number("grad_norm") {
                assert!((row.grad_norm.unwrap() - norm).abs() < 1e-3 * norm, "{what}");
            }
        }
    }
}

#[test]
fn one_rank_without_sharding() {
    reproduces("s0_n1");
}

#[test]
fn two_ranks_with_accumulation_and_clipping() {
    reproduces("s3_n2_g2_clip");
}
