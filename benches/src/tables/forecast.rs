//! Compares the memory forecast of `finetune` with the memory of its runs.
//!
//! Each case is a job of two steps. `finetune` writes its forecast to `job.json` before it trains,
//! and the peaks of its ledger to `metrics.jsonl`. The row has the forecast divided by the
//! measurement for each tier that the run uses. If the ratio is below 1, the forecast is too low,
//! and a job may run out of memory.
//!
//! Cases differ in stage, precision, ranks, activation checkpointing, dropout, gradient
//! accumulation, offload and task, because each of these has its own formula.
//!
//! Measurement errors: activations, device and NVMe are compared with the ledger of rank 0, which
//! is exact, so these ratios are the same in each run. The resident set is compared with the
//! largest sampled PSS of the process. It includes free memory of the allocator and all memory that
//! the ledger does not count, and may miss a short peak.

use std::fs;
use std::path::Path;

use super::*;
use crate::data::{write_reviews, write_text};
use crate::metrics::LedgerBytes;

pub(super) const BENCH: Bench = Bench {
    name: "forecast",
    title: "Memory forecast",
    about: "The forecast that `finetune` logs and writes to `job.json`, divided by what two steps of the run measure. \
        Activations, device and NVMe are from rank 0's ledger; the resident set covers the process.",
    run,
};

/// One configuration whose forecast is checked: the name, the ranks, the sequences or texts of a
/// micro-batch on each rank, the ZeRO stage, and additional keys of the DeepSpeed section.
///
/// The words `dropout` and `classifier` in the name change the job. Ranks are threads, and the
/// forecast of the resident set includes all of them.
type Case = (&'static str, usize, usize, usize, Value);

/// Returns all cases. `nvme` is the folder for offloaded states.
fn cases(nvme: &Path) -> Vec<Case> {
    let bf16 = json!({ "enabled": true });
    let recompute = |policy: &str| json!({ "policy": policy });
    let disk = json!({ "device": "nvme", "nvme_path": nvme });
    let parameters = json!({ "device": "nvme", "nvme_path": nvme, "max_in_cpu": 0 });
    let all_on_disk = json!({
        "offload_optimizer": disk.clone(), "offload_param": parameters,
        "stage3_max_live_parameters": 10_000_000, "stage3_prefetch_bucket_size": 5_000_000,
    });
    let full = json!({ "activation_checkpointing": recompute("full") });
    let selective = json!({ "activation_checkpointing": recompute("selective") });
    let bf16_full = json!({ "bf16": bf16, "activation_checkpointing": recompute("full") });
    let bf16_selective =
        json!({ "bf16": bf16, "activation_checkpointing": recompute("selective") });
    let fp16 = json!({ "fp16": { "enabled": true }, "gradient_accumulation_steps": 2 });
    let nvme_full =
        json!({ "zero_optimization": all_on_disk, "activation_checkpointing": recompute("full") });
    let on_disk = json!({ "zero_optimization": { "offload_optimizer": disk } });
    vec![
        ("fp32", 1, 4, 0, json!({})),
        ("fp32", 2, 2, 1, json!({})),
        ("fp32, full, dropout", 1, 8, 3, full),
        ("fp32, selective", 1, 6, 2, selective),
        ("fp32", 2, 2, 3, json!({})),
        ("bf16, dropout", 1, 4, 2, json!({ "bf16": bf16 })),
        ("bf16, full", 2, 4, 3, bf16_full),
        ("fp16, 2 micro-batches", 2, 2, 2, fp16),
        ("optimizer on NVMe", 1, 4, 2, on_disk),
        ("parameters on NVMe", 1, 4, 3, nvme_full),
        ("classifier, fp32", 1, 6, 1, json!({})),
        ("classifier, bf16, selective", 2, 6, 3, bf16_selective),
    ]
}

/// Runs all cases on a generated text and generated reviews. A quick run has only the first three
/// cases.
///
/// # Errors
/// Returns an error if the data cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let text = suite.file("text.txt", |path| write_text(path, 200_000))?;
    // Two steps need few texts.
    let passages = suite.file("passages.jsonl", |path| write_reviews(path, 300))?;
    let mut cases = cases(suite.scratch());
    cases.truncate(suite.pick(cases.len(), 3));
    let width = suite.pick(512, 128);
    let mut variants = Variants::new(suite);
    for case in &cases {
        let (job, (name, ranks, _, stage, _)) = (job(case, &text, &passages, width), case);
        let plural = if *ranks == 1 { "" } else { "s" };
        let name = format!("{name}, stage {stage}, {ranks} rank{plural}");
        variants.own(name, move || compare(&suite.train(&job, suite.output()?, &[])?));
    }
    let columns = [
        Quantity::ActivationsForecast,
        Quantity::DeviceForecast,
        Quantity::DiskForecast,
        Quantity::ResidentForecast,
    ];
    let title = format!("GPT-2 and classifiers on it, width {width}, 8 layers, up to 256 tokens");
    let table = variants.measure(results, &title, 1, &columns);
    results.tables.push(table);
    Ok(())
}

/// Returns the job of a case: a GPT-2 with 8 layers of `width` on `text`, or a classifier on
/// `passages`.
fn job(case: &Case, text: &Path, passages: &Path, width: usize) -> BenchJob {
    let (name, ranks, sequences, stage, deepspeed) = case;
    // Dropout is part of some cases, because its masks are activations.
    let dropout = if name.contains("dropout") { 0.1 } else { 0.0 };
    let is_classifier = name.contains("classifier");
    let (kind, path) = if is_classifier { ("classification", passages) } else { ("text", text) };
    let file = json!({
        "model": {
            "architecture": "gpt2",
            "pretrained": null,
            "config": {
                "n_embd": width, "n_layer": 8, "n_head": 8, "n_positions": 256,
                "embd_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": dropout,
            },
        },
        "data": { "kind": kind, "path": path, "sequence_length": 256, "vocab_size": 4096 },
        "training": { "ranks": ranks, "max_steps": 2 },
        "deepspeed": {
            "train_micro_batch_size_per_gpu": sequences,
            "gradient_accumulation_steps": 1,
            "optimizer": { "type": "AdamW", "params": { "lr": 1e-4 } },
        },
    });
    let mut job = BenchJob::of_file(file);
    for (key, value) in deepspeed.as_object().into_iter().flatten() {
        job = job.set(&format!("deepspeed.{key}"), value.clone());
    }
    // The section of a case may replace `zero_optimization` as a whole, so the stage is set
    // afterwards.
    job.stage(*stage)
}

/// Returns the forecast divided by the measurement for each tier that the run used.
///
/// A tier without memory, such as NVMe without offload, has no ratio.
///
/// # Errors
/// Returns an error if `job.json` cannot be read or lacks a forecast.
fn compare(trained: &TrainingRun) -> Outcome<Observations> {
    let job = fs::read_to_string(trained.output.path().join("run/job.json"))?;
    let forecast = serde_json::from_str::<Value>(&job)?["memory_forecast"].clone();
    let most = |of: fn(&LedgerBytes) -> f64| {
        trained.rows.iter().map(|row| of(&row.memory)).fold(0.0, f64::max)
    };
    let tiers = [
        (Quantity::ActivationsForecast, "activations", most(|memory| memory.activations_peak)),
        (Quantity::DeviceForecast, "device", most(|memory| memory.device_peak)),
        (Quantity::DiskForecast, "disk", most(|memory| memory.disk_peak)),
        (Quantity::ResidentForecast, "rss", trained.run.peak_bytes as f64),
    ];
    let mut found = Observations::default();
    for (quantity, name, measured) in tiers.into_iter().filter(|(_, _, measured)| *measured > 0.0) {
        let bytes = forecast[name]
            .as_f64()
            .ok_or_else(|| format!("job.json has no memory_forecast.{name}"))?;
        found.push(quantity, bytes / measured);
    }
    Ok(found)
}
