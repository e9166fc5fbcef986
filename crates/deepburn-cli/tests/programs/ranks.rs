//! Compares several ranks with one rank that has the concatenated batch.
//!
//! In sequential order, rank r of W takes the sequences r, r + W and so on. So W ranks together
//! have the same samples as one rank with W times as large micro-batches. A step of plain SGD with
//! learning rate 1 subtracts the gradient, so the gradients are equal if the weights after the step
//! are equal.

use serde_json::json;

use crate::job::{Job, STAGES, Trained};

/// Creates a job. It is a function, because every job has its own folder.
type NewJob = fn() -> Job;

/// Trains one step on `ranks` ranks with 12 sequences in each of two micro-batches over all ranks.
fn step(kind: NewJob, stage: u8, ranks: usize) -> Trained {
    kind()
        .sharded(stage, ranks)
        .with("training.max_steps", 1)
        .with("deepspeed.train_micro_batch_size_per_gpu", 12 / ranks)
        .with("deepspeed.gradient_clipping", 0)
        .with("deepspeed.optimizer", json!({"type": "SGD", "params": {"lr": 1.0}}))
        .train()
}

#[test]
fn gradients_equal_one_rank_with_the_whole_batch() {
    let kinds: [(&str, NewJob); 3] = [
        ("tied", Job::uneven),
        ("untied", || Job::uneven().with("model.config.tie_word_embeddings", false)),
        ("tiny", Job::tiny),
    ];
    for (name, kind) in kinds {
        let alone = step(kind, 0, 1);
        for (stage, ranks) in STAGES.iter().flat_map(|stage| [1, 2, 3, 4].map(|n| (*stage, n))) {
            let shared = step(kind, stage, ranks);
            let what = format!("{name}, stage {stage}, {ranks} ranks");
            let (one, many) = (alone.steps[0], shared.steps[0]);
            assert_eq!(one.tokens, many.tokens, "{what}");
            assert!((one.loss - many.loss).abs() < 1e-5, "{what}: {one:?} {many:?}");
            let norms = one.grad_norm.unwrap() - many.grad_norm.unwrap();
            assert!(norms.abs() < 1e-5, "{what}: {one:?} {many:?}");
            for ((path, one), (_, many)) in alone.tensors().iter().zip(&shared.tensors()) {
                let worst = one.iter().zip(many).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-5, "{what}: {path} differs by {worst}");
            }
        }
    }
}

/// An epoch on 3 ranks has the tokens of all sequences.
#[test]
fn an_epoch_sees_every_sequence() {
    let job = Job::uneven().with("training.max_steps", json!(null)).with("training.epochs", 1);
    let job = job.with("deepspeed.gradient_accumulation_steps", 1).sharded(1, 3);
    // 4000 tokens are 125 sequences of 32. Each rank takes 42 of them, in micro-batches of 2.
    let steps = job.train().steps;
    assert_eq!(steps.len(), 21);
    assert!(steps.iter().all(|row| row.tokens == 3 * 2 * 32), "{steps:?}");
}
