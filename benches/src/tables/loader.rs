//! Measures the time for which a step waits for the data loader.
//!
//! A thread assembles batches while the previous step computes, so a step should not have to wait.
//! The quantity is `seconds.data` of rank 0 as a fraction of `step_seconds`. There are three kinds
//! of data: raw tokens, which are only copied, a text, which is tokenized, and labeled texts of
//! different lengths, which are padded.
//!
//! The tokenizer is trained and the text is tokenized before the first step, which is not measured.
//! Steps of GPT-2 124M take more than a second on the CPU of the report. On a faster device, the
//! fraction would be larger with the same loader.

use std::path::Path;

use super::batching::classifier;
use super::*;
use crate::data::{write_reviews, write_text};

pub(super) const BENCH: Bench = Bench {
    name: "loader",
    title: "Data loader",
    about: "Fraction of a step for which rank 0 waits for its batch, on two ranks. The data is raw tokens, a text with \
        a tokenizer that is trained on it, or labeled texts, which are padded to the longest text of a batch.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 8;
/// Number of first steps that are not counted, in which the loader has not yet assembled batches in
/// advance.
const UNCOUNTED: usize = 2;
/// Number of ranks. Each of them has its own loader.
const RANKS: usize = 2;
/// Texts of the encoder's micro-batch on each rank.
const TEXTS: usize = 16;
/// Maximum number of tokens of a text.
const TEXT_LENGTH: usize = 256;

/// Measures the three kinds of data. The bound is 1 % of a step for each of them.
///
/// # Errors
/// Returns an error if the data cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload = gpt2(suite, (2, 128), (2, 64));
    let text = suite.file("text.txt", |path| write_text(path, suite.pick(400_000, 40_000)))?;
    let reviews = suite.file("loader.jsonl", |path| write_reviews(path, suite.pick(4_000, 400)))?;
    let tokens = BenchJob::new(&workload, &suite.tokens(&workload)?, STEPS).ranks(RANKS).stage(3);
    let jobs = [
        ("GPT-2, tokens", tokens.clone()),
        ("GPT-2, text", on_text(tokens, &text)),
        ("encoder, texts with a class", classifier(&reviews, TEXT_LENGTH, TEXTS, STEPS)),
    ];
    let names = jobs.each_ref().map(|(name, _)| *name);
    let mut variants = Variants::new(suite);
    for (name, job) in jobs {
        variants.train(name, job, UNCOUNTED);
    }
    let columns = [Quantity::DataWait, Quantity::Step];
    let Workload { name, sequences, length, .. } = &workload;
    let title = format!(
        "{RANKS} ranks: {name}, {sequences} × {length} tokens; encoder, {TEXTS} texts of up to {TEXT_LENGTH} tokens"
    );
    let mut table = variants.measure(results, &title, 2, &columns);
    for name in names {
        table.check(Quantity::DataWait, name, suite.bound(AtMost(0.01)));
    }
    results.tables.push(table);
    Ok(())
}

/// Returns the job with a text instead of tokens, and a tokenizer with 4,096 tokens that is trained
/// on it.
fn on_text(job: BenchJob, text: &Path) -> BenchJob {
    // The section is replaced as a whole, but sequences keep their length.
    let length = job.file["data"]["sequence_length"].clone();
    job.set(
        "data",
        json!({ "kind": "text", "path": text, "sequence_length": length, "vocab_size": 4096 }),
    )
}
