//! Time that a step waits for the data loader.
//!
//! Batches are prepared by a thread while the step before computes, so a step should find its batch ready.
//! The share of `seconds.data` in `step_seconds` of rank 0 shows whether it does, for three kinds of data:
//! raw tokens, which are only copied; a text that is tokenized; and labelled texts, which are padded and
//! whose lengths differ.
//!
//! Training the tokenizer and encoding the text happen before the first step and do not count. Steps of GPT-2 124M
//! take more than a second on the CPU of the report; a faster device would wait for a larger share with the same
//! loader.

use std::path::Path;

use serde_json::json;

use super::Bench;
use super::batching::classifier;
use crate::Outcome;
use crate::data::{write_reviews, write_text};
use crate::job::{Job, Workload};
use crate::quantity::Quantity;
use crate::results::Bound::AtMost;
use crate::results::Results;
use crate::rounds::{Variant, measure};
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "loader",
    title: "Data loader",
    about: "Share of a step that rank 0 spends waiting for its batch, on two ranks: raw tokens, a text that is tokenized \
        by a trained tokenizer, and texts with a class that are padded to the longest of a batch.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 8;
/// Steps at the start that do not count: the loader has not had time to work ahead.
const UNCOUNTED: usize = 2;
/// Ranks, each of which has a loader of its own.
const RANKS: usize = 2;
/// Texts of the encoder's micro-batch on each rank.
const TEXTS: usize = 16;
/// Tokens of a text, at most.
const TEXT_LENGTH: usize = 256;

/// Measures the three kinds of data. Each may wait for at most 1 % of a step.
///
/// # Errors
/// When the data cannot be written. Runs that fail are noted in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload =
        suite.pick(Workload::gpt2_small(2, 128), Workload::gpt2("GPT-2 2M", 128, 2, 2, 64));
    let text = suite.file("text.txt", |path| write_text(path, suite.pick(400_000, 40_000)))?;
    let reviews = suite.file("loader.jsonl", |path| write_reviews(path, suite.pick(4_000, 400)))?;
    let tokens = Job::new(&workload, &suite.tokens(&workload)?, STEPS).ranks(RANKS).stage(3);
    let jobs = [
        ("GPT-2, tokens", tokens.clone()),
        ("GPT-2, text", on_text(tokens, &text)),
        ("encoder, texts with a class", classifier(&reviews, TEXT_LENGTH, TEXTS, STEPS)),
    ];
    let variant = |(name, job): &(&str, Job)| {
        let job = job.clone();
        Variant::new(*name, move || suite.observe(&job, UNCOUNTED))
    };
    let variants: Vec<_> = jobs.iter().map(variant).collect();
    let columns = [Quantity::DataWait, Quantity::Step];
    let Workload { name, sequences, length, .. } = &workload;
    let title = format!(
        "{RANKS} ranks: {name}, {sequences} × {length} tokens; encoder, {TEXTS} texts of up to {TEXT_LENGTH} tokens"
    );
    let mut table = measure(results, &title, suite.rounds(2), &columns, &variants);
    for (name, _) in &jobs {
        table.check(Quantity::DataWait, name, suite.bound(AtMost(0.01)));
    }
    results.tables.push(table);
    Ok(())
}

/// Returns the job with a text in place of tokens, and a tokenizer of 4,096 tokens that is trained on it.
fn on_text(job: Job, text: &Path) -> Job {
    let length = job.file["data"]["sequence_length"].clone();
    job.set(
        "data",
        json!({ "kind": "text", "path": text, "sequence_length": length, "vocab_size": 4096 }),
    )
}
