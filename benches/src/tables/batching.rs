//! Dynamic batching against fixed micro-batches.
//!
//! A small encoder classifies generated texts whose lengths are distributed like IMDB's reviews. A fixed micro-batch
//! has a number of texts and is padded to its longest one. A dynamic one has a budget of `rows × length` tokens with
//! padding, so it has as many texts as fit.
//!
//! The quantity is tokens a second without padding, as `metrics.jsonl` counts them: this is the useful
//! work. Seconds of a step are not comparable between the two, because a dynamic step has more texts.
//! Lengths vary from step to step, so a run has more steps than in other benches.

use std::path::Path;

use serde_json::json;

use super::Bench;
use crate::Outcome;
use crate::data::write_reviews;
use crate::job::{Features, Job};
use crate::quantity::Quantity;
use crate::results::{Plot, Results};
use crate::rounds::{Variant, measure};
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "batching",
    title: "Dynamic batching",
    about: "A small encoder classifies generated texts as long as IMDB's reviews, on two ranks. Fixed micro-batches are \
        shuffled and padded to the longest text of each; dynamic ones have the same budget of tokens, padding \
        included. Tokens a second do not count padding.",
    run,
};

/// Optimizer steps of a run; half of them in a quick run.
const STEPS: usize = 24;
/// The first steps fill caches, and lengths vary.
const UNCOUNTED: usize = 4;
/// Row of the usual data loader.
const FIXED: &str = "fixed micro-batches";
/// Row of `data_sampling.dynamic_batching`.
const DYNAMIC: &str = "dynamic micro-batches";

/// Measures both loaders on the same texts, two ranks and the same budget of tokens.
///
/// # Errors
/// When the texts cannot be written. Runs that fail are noted in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let (length, rows) = suite.pick((1024, 16), (256, 4));
    let reviews =
        suite.file("reviews.jsonl", |path| write_reviews(path, suite.pick(6_000, 600)))?;
    let fixed = classifier(&reviews, length, rows, suite.pick(STEPS, STEPS / 2));
    // A random order keeps what a fixed batch has: texts of any length share a batch. Picking by length would
    // save more padding, but train on other batches.
    let batching =
        json!({ "enabled": true, "max_tokens": rows * length, "sequence_picking_order": "random" });
    let sampling = json!({ "enabled": true, "dynamic_batching": batching });
    let efficiency = json!({ "enabled": true, "data_sampling": sampling });
    let dynamic = fixed.clone().set("deepspeed.data_efficiency", efficiency);
    let variants = [
        Variant::new(FIXED, || suite.observe(&fixed, UNCOUNTED)),
        Variant::new(DYNAMIC, || suite.observe(&dynamic, UNCOUNTED)),
    ];
    let title = format!("Encoder, 2 ranks, at most {rows} × {length} tokens a micro-batch");
    let columns = [Quantity::Throughput, Quantity::Step, Quantity::Peak];
    let mut table = measure(results, &title, suite.rounds(3), &columns, &variants);
    table.compare(Quantity::Throughput, DYNAMIC, FIXED, None);
    table.plot = Some(Plot::Bars(Quantity::Throughput));
    results.tables.push(table);
    Ok(())
}

/// Returns a job in which an encoder learns the classes of `texts`, as `configs/imdb_cpu.json` does.
///
/// It has two ranks at stage 2, micro-batches of `rows` texts on each, and at most `length` tokens of a
/// text. A tokenizer of 8,192 tokens is trained at the start of the run.
pub(super) fn classifier(texts: &Path, length: usize, rows: usize, steps: usize) -> Job {
    let file = json!({
        "model": {
            "architecture": "imdb_encoder",
            "config": {
                "embed_dim": 64, "num_heads": 4, "num_layers": 2, "hidden_dim": 256, "max_len": length,
                "dropout": 0.1, "initializer_range": 0.3,
            },
        },
        "data": { "kind": "classification", "path": texts, "vocab_size": 8192, "sequence_length": length },
        "training": { "ranks": 2, "max_steps": steps, "seed": 42 },
        "deepspeed": {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 1,
            "optimizer": { "type": "Adam", "params": { "lr": 2e-3 } },
            "zero_optimization": { "stage": 2 },
        },
    });
    Job { file, features: Features::Default, processes: false }
}
