//! Compares dynamic batching with fixed micro-batches.
//!
//! A small encoder classifies generated texts whose lengths are distributed like the lengths of
//! IMDB reviews. A fixed micro-batch has a fixed number of texts and is padded to the longest one.
//! A dynamic micro-batch has as many texts as fit in a budget of `rows × length` tokens, including
//! padding.
//!
//! The compared quantity is tokens per second without padding, as in `metrics.jsonl`, which is the
//! useful work. Step times are not comparable, because a dynamic step has more texts. The lengths
//! of texts vary between steps, so a run has more steps than in other benchmarks.

use std::path::Path;

use super::*;
use crate::data::write_reviews;

pub(super) const BENCH: Bench = Bench {
    name: "batching",
    title: "Dynamic batching",
    about: "A small encoder classifies generated texts on two ranks. The lengths of the texts are distributed like the \
        lengths of IMDB reviews. Fixed micro-batches are shuffled and padded to their longest text. Dynamic \
        micro-batches have a budget of as many tokens, including padding. Padding is not included in tokens/s.",
    run,
};

/// Optimizer steps of a full run. A quick run has half of them.
const STEPS: usize = 24;
/// Number of first steps that are not counted, in which caches are filled.
const UNCOUNTED: usize = 4;
/// Row of the data loader with fixed micro-batches.
const FIXED: &str = "fixed micro-batches";
/// Row of `data_sampling.dynamic_batching`.
const DYNAMIC: &str = "dynamic micro-batches";

/// Measures both data loaders on the same texts with the same token budget, on two ranks.
///
/// # Errors
/// Returns an error if the texts cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let (length, rows) = suite.pick((1024, 16), (256, 4));
    let reviews =
        suite.file("reviews.jsonl", |path| write_reviews(path, suite.pick(6_000, 600)))?;
    let fixed = classifier(&reviews, length, rows, suite.pick(STEPS, STEPS / 2));
    // In every epoch, `random` shuffles the texts and then sorts them by length within windows, so
    // that batches need little padding.
    let batching =
        json!({ "enabled": true, "max_tokens": rows * length, "sequence_picking_order": "random" });
    let sampling = json!({ "enabled": true, "dynamic_batching": batching });
    let efficiency = json!({ "enabled": true, "data_sampling": sampling });
    let dynamic = fixed.clone().set("deepspeed.data_efficiency", efficiency);
    let mut variants = Variants::new(suite);
    variants.train(FIXED, fixed, UNCOUNTED);
    variants.train(DYNAMIC, dynamic, UNCOUNTED);
    let title = format!("Encoder, 2 ranks, at most {rows} × {length} tokens a micro-batch");
    let columns = [Quantity::Throughput, Quantity::Step, Quantity::Peak];
    let mut table = variants.measure(results, &title, 3, &columns);
    // Without a bound, because the gain depends on how the lengths are distributed.
    table.compare(Quantity::Throughput, DYNAMIC, FIXED, None);
    table.plot = Some(Plot::Bars(Quantity::Throughput));
    results.tables.push(table);
    Ok(())
}

/// Returns a job that trains an encoder on the labeled texts `texts`, similar to
/// `configs/imdb_cpu.json`.
///
/// It has two ranks at stage 2 and micro-batches of `rows` texts, which are truncated to `length`
/// tokens. A tokenizer with 8,192 tokens is trained at the start of the run.
pub(super) fn classifier(texts: &Path, length: usize, rows: usize, steps: usize) -> BenchJob {
    let file = json!({
        "model": {
            "architecture": "encoder",
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
    BenchJob::of_file(file)
}
