//! Compares the memory ledger of a run with the formulas of the ZeRO paper and with
//! `deepburn estimate`.

use deepburn::metrics::MemoryRow;
use deepburn_models::Architecture;
use deepburn_models::LanguageModelConfig;
use deepburn_models::gpt2::Gpt2Config;
use serde_json::{Map, Value, json};

use crate::job::{Job, STAGES};
use crate::program::deepburn;

const RANKS: u64 = 4;

/// A model with 0.2 million parameters, so that the padding of the last shard does not matter.
fn model() -> Value {
    json!({"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 512})
}

fn job() -> Job {
    let job = Job::tiny().with("model", json!({"config": model()}));
    job.with("training.max_steps", 2).zero("stage3_param_persistence_threshold", 0)
}

fn config() -> Gpt2Config {
    let Value::Object(overrides) = model() else { unreachable!("it is an object") };
    Gpt2Config::small().with_overrides(&overrides).unwrap()
}

fn num_parameters() -> u64 {
    config().parameters().iter().map(|it| it.shape.iter().product::<usize>() as u64).sum()
}

fn memory(job: Job, stage: u8) -> MemoryRow {
    let steps = job.sharded(stage, RANKS as usize).train().steps;
    assert_eq!(steps[0].memory.optimizer, steps[1].memory.optimizer);
    steps[1].memory
}

/// The formulas of Rajbhandari et al. (2020) with fp32 parameters and gradients: 4 + 4 + 8 bytes
/// per parameter.
#[test]
fn model_states_match_the_formulas() {
    let psi = num_parameters();
    for (stage, formula) in [
        (0, 16 * psi),
        (1, 8 * psi + 8 * psi / RANKS),
        (2, 4 * psi + 12 * psi / RANKS),
        (3, 16 * psi / RANKS),
    ] {
        let MemoryRow { parameters, gradients, optimizer, .. } = memory(job(), stage);
        let states = (parameters + gradients + optimizer) as f64;
        let off = (states / formula as f64 - 1.0).abs();
        assert!(off < 0.05, "stage {stage}: {states} bytes, formula {formula}");
    }
}

/// Returns what `deepburn estimate` predicts for a job, in bytes.
fn predicted(job: &Job, stage: u8) -> Value {
    let Value::Object(fields) = &job.json()["model"]["config"] else { unreachable!("see above") };
    let mut fields: Map<String, Value> = fields.clone();
    fields.insert("model_type".to_owned(), json!("gpt2"));
    std::fs::write(job.folder().join("config.json"), Value::from(fields).to_string()).unwrap();
    let deepspeed = job.json()["deepspeed"].to_string();
    std::fs::write(job.folder().join("ds.json"), deepspeed).unwrap();
    let (stage, ranks) = (stage.to_string(), RANKS.to_string());
    let length = job.json()["data"]["sequence_length"].to_string();
    let arguments = ["estimate", "--json", "--model", "config.json", "--deepspeed", "ds.json"];
    let numbers = ["--ranks", &ranks, "--stage", &stage, "--sequence-length", &length];
    let ending = deepburn(job.folder(), &[&arguments[..], &numbers].concat());
    let stages: Value = serde_json::from_str(&ending.succeeded().stdout).unwrap();
    stages[0].clone()
}

/// The rows of an estimate that a run reports too.
const ROWS: [&str; 5] = ["parameters", "gradients", "optimizer", "gathered", "activations"];

fn reported(memory: &MemoryRow) -> [u64; 5] {
    let MemoryRow { parameters, gradients, optimizer, gathered_peak, activations_peak, .. } =
        *memory;
    [parameters, gradients, optimizer, gathered_peak, activations_peak]
}

#[test]
fn the_estimate_matches_the_ledger_to_the_byte() {
    let adam = json!({"type": "AdamW", "params": {"lr": 1e-3}});
    let sgd = |momentum| json!({"type": "SGD", "params": {"lr": 1e-3, "momentum": momentum}});
    for (optimizer, precision, micro_batches, threshold) in [
        (adam.clone(), "fp32", 2, 0),
        (adam.clone(), "fp32", 2, 100_000),
        (adam.clone(), "fp32", 1, 200),
        (adam.clone(), "bf16", 1, 200),
        (adam, "bf16", 2, 0),
        (sgd(0.0), "fp32", 2, 200),
        (sgd(0.9), "fp32", 2, 0),
        (json!({"type": "Lion", "params": {"lr": 1e-4}}), "fp16", 2, 0),
        (json!({"type": "Lamb", "params": {"lr": 1e-3}}), "bf16", 1, 0),
        (json!({"type": "Muon"}), "fp32", 2, 200),
    ] {
        for stage in STAGES {
            let job = job()
                .with("deepspeed.optimizer", optimizer.clone())
                .with("deepspeed.gradient_accumulation_steps", micro_batches)
                .zero("stage3_param_persistence_threshold", threshold)
                .in_precision(precision)
                .sharded(stage, RANKS as usize);
            let predicted = predicted(&job, stage);
            let ledger = job.train().steps[1].memory;
            assert_eq!(
                reported(&ledger),
                ROWS.map(|row| predicted[row].as_u64().unwrap()),
                "{optimizer} in {precision} at stage {stage}, threshold {threshold}"
            );
        }
    }
}

/// Offloaded states take no memory on the device.
#[test]
fn the_estimate_accounts_for_offload() {
    for (stage, precision) in [(1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")] {
        let job = job().in_precision(precision).sharded(stage, RANKS as usize);
        let nvme = json!({"device": "nvme", "nvme_path": job.folder(), "max_in_cpu": 5000});
        let states = json!({"device": "nvme", "nvme_path": job.folder()});
        let mut job = job.zero("offload_optimizer", states);
        if stage == 3 {
            job = job.zero("offload_param", nvme).zero("stage3_param_persistence_threshold", 200);
        }
        let predicted = predicted(&job, stage);
        let ledger = job.train().steps[1].memory;
        assert_eq!(
            reported(&ledger),
            ROWS.map(|row| predicted[row].as_u64().unwrap()),
            "{precision} at stage {stage}"
        );
        assert_eq!([ledger.gradients, ledger.optimizer], [0, 0]);
        assert!(predicted["disk"].as_u64().unwrap() > 0);
    }
}

/// The limit on live parameters is kept, unless a single parameter that an op needs is larger.
#[test]
fn gathered_parameters_stay_below_their_limit() {
    let free = memory(job(), 3).gathered_peak;
    let job = job().zero("stage3_max_live_parameters", 60_000).zero("stage3_max_reuse_distance", 0);
    let limited = memory(job.zero("stage3_prefetch_bucket_size", 0), 3).gathered_peak;
    assert!(limited <= 4 * 60_000, "{limited} bytes");
    assert!(limited < free, "{limited} bytes limited, {free} free");
}
