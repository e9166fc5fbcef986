//! Tests of dynamic batching, curricula and batch-size schedules.

use serde_json::{Value, json};

use crate::job::{Job, STAGES, Trained};
use crate::resume::resume;
use crate::reviews::{reviews, test_record};

/// Returns a job that trains on reviews with a token budget for one epoch.
pub(crate) fn budgeted(ranks: usize) -> Job {
    reviews()
        .with("training.max_steps", Value::Null)
        .with("training.epochs", 1)
        .with("deepspeed.train_batch_size", 32 * ranks)
        .with("deepspeed.train_micro_batch_size_per_gpu", 16)
        .with("deepspeed.gradient_accumulation_steps", 2)
        .with(
            "deepspeed.data_efficiency",
            json!({
                "enabled": true,
                "data_sampling": {"enabled": true, "dynamic_batching": {
                    "enabled": true, "max_tokens": 4096, "sequence_picking_order": "random",
                    "lr_scaling_method": "sqrt",
                }},
            }),
        )
        .sharded(2, ranks)
}

fn tokens(trained: &Trained) -> Vec<u64> {
    trained.steps.iter().map(|row| row.tokens).collect()
}

/// With any number of ranks, an epoch has every text once, so the number of tokens is the same.
#[test]
fn an_epoch_has_every_token_once_on_any_number_of_ranks() {
    let fixed = reviews()
        .with("training.max_steps", Value::Null)
        .with("training.epochs", 1)
        .sharded(2, 1)
        .train();
    let expected: u64 = tokens(&fixed).iter().sum();
    for ranks in 1..=4 {
        let job = budgeted(ranks);
        let trained = job.train();
        assert_eq!(tokens(&trained).iter().sum::<u64>(), expected, "{ranks} ranks");
        let most = 4096 * 2 * ranks as u64;
        assert!(tokens(&trained).iter().all(|tokens| *tokens <= most));
        // There are fewer steps than with 16 texts per micro-batch, because more short texts fit
        // into a budget.
        assert!(trained.steps.len() * ranks < fixed.steps.len());
        assert_eq!(test_record(&job)["targets"], 400);
    }
}

#[test]
fn the_rate_follows_the_samples_of_a_step_and_stages_agree_to_the_bit() {
    let trained =
        STAGES.map(|stage| budgeted(2).with("training.max_steps", 3).zero("stage", stage).train());
    for (stage, other) in trained.iter().enumerate() {
        assert_eq!(other.numbers(), trained[0].numbers(), "stage {stage}");
    }
    let rates: Vec<f64> = trained[0].steps.iter().map(|row| row.lr).collect();
    // (rate / base)^2 is the number of samples divided by 64, the batch size for which the rate is
    // not scaled.
    for rate in &rates {
        let samples = (rate / 5e-3).powi(2) * 64.0;
        assert!((samples - samples.round()).abs() < 1e-9 && samples >= 2.0, "{rates:?}");
    }
    assert!(rates.iter().any(|rate| *rate != rates[0]), "{rates:?}");
}

#[test]
fn sequences_grow_with_a_curriculum() {
    let section = |config: Value| {
        json!({
            "enabled": true, "curriculum_type": "seqlen", "min_difficulty": 8,
            "max_difficulty": 32, "schedule_type": "fixed_linear", "schedule_config": config,
        })
    };
    let plan = section(json!({"total_curriculum_step": 4, "difficulty_step": 8}));
    let job = Job::tiny().with("deepspeed.curriculum_learning", plan.clone());
    let job = job.with("training.max_steps", 6);
    // 2 ranks, 2 micro-batches of 2 sequences.
    let lengths: Vec<u64> = tokens(&job.train()).iter().map(|tokens| tokens / 8).collect();
    assert_eq!(lengths, [8, 16, 24, 32, 32, 32]);

    let texts = reviews().with("deepspeed.curriculum_learning", plan).with("training.max_steps", 2);
    let steps = tokens(&texts.train());
    assert!(steps[0] <= 8 * 64 && steps[1] > steps[0], "{steps:?}");
}

#[test]
fn batch_sizes_follow_their_schedule() {
    let schedule = json!({"from_step": [2, 4], "train_batch_size": [8, 16]});
    let job = Job::tiny()
        .with("deepspeed.gradient_accumulation_steps", 1)
        .with("training.batch_size_schedule", schedule)
        .with("training.max_steps", 4);
    let trained = job.train();
    assert_eq!(tokens(&trained), [4 * 32, 8 * 32, 8 * 32, 16 * 32]);
    for stage in STAGES {
        let schedule = json!({"from_step": [2, 4], "train_batch_size": [8, 16]});
        let other = Job::tiny()
            .with("deepspeed.gradient_accumulation_steps", 1)
            .with("training.batch_size_schedule", schedule)
            .zero("stage", stage);
        assert_eq!(other.train().numbers(), trained.numbers(), "stage {stage}");
    }
    // 1,250 sequences in steps of 4, 8, 8 and then 16.
    let epoch = Job::tiny()
        .with("deepspeed.gradient_accumulation_steps", 1)
        .with(
            "training.batch_size_schedule",
            json!({"from_step": [2, 4], "train_batch_size": [8, 16]}),
        )
        .with("training.max_steps", Value::Null)
        .with("training.epochs", 1);
    assert_eq!(epoch.train().steps.len(), 3 + (1250_usize - 20).div_ceil(16));
}

#[test]
fn unsupported_dynamic_batching_is_named() {
    let dynamic = |key: &str, value: Value| {
        let at = format!("deepspeed.data_efficiency.data_sampling.dynamic_batching.{key}");
        budgeted(2).with(&at, value)
    };
    let plan = budgeted(2).json()["deepspeed"]["data_efficiency"].clone();
    for (job, parts) in [
        (dynamic("max_tokens", json!(100)), &["max_tokens", "100", "truncate"][..]),
        (dynamic("max_tokens", Value::Null), &["max_tokens", "is missing"]),
        (dynamic("min_batch_size", json!(100)), &["max_tokens", "min_batch_size"]),
        (dynamic("lr_scaling_method", json!("cubic")), &["lr_scaling_method", "cubic"]),
        (
            Job::tiny().with("deepspeed.data_efficiency", plan),
            &["dynamic_batching.enabled", "classification"],
        ),
        (
            budgeted(2).with(
                "training.batch_size_schedule",
                json!({"from_step": [1], "train_batch_size": [64]}),
            ),
            &["training.batch_size_schedule", "dynamic batching"],
        ),
        (
            Job::tiny().with(
                "training.batch_size_schedule",
                json!({"from_step": [1], "train_batch_size": [9]}),
            ),
            &["training.batch_size_schedule", "9", "8 and 12"],
        ),
        (
            Job::tiny().with(
                "training.batch_size_schedule",
                json!({"from_step": [3, 2], "train_batch_size": [8, 16]}),
            ),
            &["training.batch_size_schedule", "order of their steps"],
        ),
        (budgeted(2).with("training.epochs", 1_000_000), &["training.epochs", "max_steps"]),
    ] {
        let ending = job.run().failed(2, parts);
        assert!(!job.folder().join("output").exists(), "{}", ending.stderr);
    }
}

/// The steps of a token budget have other samples on another number of ranks. A step at the place
/// of the checkpoint may be repeated, and no text is left out.
#[test]
fn a_budget_ends_with_its_epochs_after_a_change_of_ranks() {
    let job = |ranks| budgeted(ranks).with("training.epochs", 2);
    let expected: u64 = tokens(&job(1).train()).iter().sum();
    for (first, later) in [(1, 2), (2, 1), (1, 1)] {
        let short = job(first).with("training.max_steps", 5).with("training.save_steps", 1000);
        short.train();
        let longer = short
            .with("training.max_steps", Value::Null)
            .with("deepspeed.train_batch_size", 32 * later)
            .with("training.ranks", later);
        resume(&longer, &[]).succeeded();
        let trained = Trained::read(&longer.folder().join("output"));
        let repeated = tokens(&trained).iter().sum::<u64>() - expected;
        let most = if first == later { 0 } else { 4096 * 2 * later as u64 };
        assert!(repeated <= most, "{first} to {later}: {repeated} tokens more than {expected}");
    }
}
