//! Jobs with pipeline stages, compared with one stage.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::golden;
use crate::program::{deepburn, finetune};

/// Trains a small model, and returns its losses, norms, evaluations and weights.
fn train(model: &Value, stages: usize, more: &Value) -> (Vec<[Value; 3]>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let mut job = json!({
        "model": model,
        "data": {"sequence_length": 24, "splits": {"train": "90%", "eval": "10%"}},
        "training": {"max_steps": 4, "ranks": 2 * stages, "pipeline_stages": stages, "eval_steps": 2,
            "output_dir": "output"},
        "deepspeed": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    });
    for (key, value) in more.as_object().unwrap() {
        job["deepspeed"][key] = value.clone();
    }
    fs::write(folder.path().join("job.json"), job.to_string()).unwrap();
    finetune(folder.path(), &["--config", "job.json"]).succeeded();
    (rows(folder.path()), fs::read(folder.path().join("output/model/model.safetensors")).unwrap())
}

fn rows(folder: &Path) -> Vec<[Value; 3]> {
    let text = fs::read_to_string(folder.join("output/metrics.jsonl")).unwrap();
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        ["loss", "grad_norm", "eval_loss"].map(|key| row[key].clone())
    };
    text.lines().map(row).collect()
}

/// Compares a job of two and three stages with one stage: every digit of the losses, norms and
/// evaluations, and every bit of the saved model.
#[track_caller]
fn assert_same_bits(model: &Value, more: &Value) {
    let expected = train(model, 1, more);
    assert!(expected.0.len() >= 6, "{:?}", expected.0);
    for stages in [2, 3] {
        let found = train(model, stages, more);
        assert_eq!(found.0, expected.0, "{stages} stages, {more}");
        assert!(found.1 == expected.1, "{stages} stages, {more}: the saved model differs");
    }
}

fn gpt2() -> Value {
    json!({"architecture": "gpt2", "config": {"n_layer": 3, "n_embd": 24, "n_head": 2, "n_positions": 24}})
}

#[test]
fn stages_of_gpt2_do_not_change_bits() {
    assert_same_bits(&gpt2(), &json!({"zero_optimization": {"stage": 1}}));
    assert_same_bits(
        &gpt2(),
        &json!({"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}),
    );
}

#[test]
fn stages_are_described_and_too_many_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let job = |stages: usize| {
        json!({"model": gpt2(), "data": {"sequence_length": 24},
            "training": {"max_steps": 1, "ranks": stages, "pipeline_stages": stages, "output_dir": "output"},
            "deepspeed": {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}})
    };
    let run = |stages: usize| {
        fs::write(folder.path().join("job.json"), job(stages).to_string()).unwrap();
        finetune(folder.path(), &["--config", "job.json"])
    };
    let refused = run(9);
    assert_eq!(refused.status, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("9 pipeline stages for a model of 7 blocks"), "{refused:?}");
    assert!(!folder.path().join("output").exists());
    let counted = ["--config", "job.json", "--set", "deepspeed.flops_profiler.enabled=true"];
    fs::write(folder.path().join("job.json"), job(2).to_string()).unwrap();
    finetune(folder.path(), &counted).failed(2, &["flops_profiler", "first stage"]);
    deepburn(folder.path(), &[&["tune"][..], &counted].concat())
        .failed(2, &["flops_profiler", "one stage"]);
    let ending = run(2).succeeded();
    assert!(ending.stderr.contains("pipeline stage 1: ") && ending.stderr.contains(" to wte, "));
}

#[test]
fn stages_of_preferences_do_not_change_losses() {
    let Some(golden) = golden("llm") else { return };
    let folder = tempfile::tempdir().unwrap();
    let rows = (0..30).map(|i| {
        json!({"prompt": format!("a {i}"), "chosen": format!(" yes {i}"), "rejected": " no"})
            .to_string()
    });
    let rows: Vec<_> = rows.collect();
    fs::write(folder.path().join("pairs.jsonl"), rows.join("\n")).unwrap();
    let losses = |stages: usize| {
        let output = format!("output{stages}");
        let job = json!({"model": {"pretrained": golden.join("models/qwen2")},
            "data": {"kind": "preference", "path": "pairs.jsonl", "sequence_length": 32},
            "training": {"objective": "dpo", "max_steps": 2, "ranks": stages, "pipeline_stages": stages,
                "output_dir": output},
            "deepspeed": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}});
        fs::write(folder.path().join("job.json"), job.to_string()).unwrap();
        finetune(folder.path(), &["--config", "job.json"]).succeeded();
        let text = fs::read_to_string(folder.path().join(output).join("metrics.jsonl")).unwrap();
        let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let keys = ["loss", "grad_norm", "rewards_chosen", "rewards_margins"];
        rows.map(|row| keys.map(|key| row[key].clone())).collect::<Vec<_>>()
    };
    assert_eq!(losses(2), losses(1));
}

#[test]
fn stages_of_a_llama_do_not_change_bits() {
    let llama = json!({"architecture": "llama", "config": {"num_hidden_layers": 3, "hidden_size": 24,
        "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1,
        "max_position_embeddings": 24, "tie_word_embeddings": false}});
    let recomputed = json!({"zero_optimization": {"stage": 2}, "fp16": {"enabled": true},
        "activation_checkpointing": {"policy": "full"}});
    assert_same_bits(&llama, &recomputed);
}

/// Compares with DeepSpeed's pipelines, and with plain PyTorch where DeepSpeed clips with the norm
/// of the first stage only. In fp32 only the order of additions differs. bfloat16 has 8 bits of
/// precision.
#[test]
fn traces_of_deepspeed_are_reproduced() {
    let Some(golden) = golden("llm") else { return };
    let golden = golden.parent().unwrap().to_owned();
    let read = |name: &str| -> Value {
        let path = golden.join(format!("pipeline/{name}.json"));
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    };
    for (name, reference, loss_bound, norm_bound) in [
        ("p2_m4_s0_noclip", "p2_m4_s0_noclip", 1e-5, 1e-4),
        ("p2_m4_s0_clip", "p2_m4_s0_clip.plain", 1e-5, 1e-4),
        ("p2_dp2_m4_s1_clip", "p2_dp2_m4_s1_clip", 1e-5, 1e-4),
        ("p2_m4_s1_bf16", "p2_m4_s1_bf16", 5e-3, 2e-2),
        ("p3_m6_s1_uniform", "p3_m6_s1_uniform", 1e-5, 1e-4),
    ] {
        let (trace, reference) = (read(name), read(reference));
        let expected = reference["rows"].as_array().unwrap();
        let mut deepspeed = trace["ds"].clone();
        deepspeed["pipeline"] = json!({"partition": trace["pipeline"]["partition"]});
        let job = json!({
            "model": {"pretrained": golden.join("models/tiny")},
            "data": {"kind": "tokens", "path": golden.join("tokens.bin"), "shuffle": false,
                "sequence_length": trace["seq"]},
            "training": {"max_steps": expected.len(), "ranks": trace["world"], "output_dir": "output",
                "pipeline_stages": trace["pipeline"]["stages"], "no_decay": "nothing"},
            "deepspeed": deepspeed,
        });
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("job.json"), job.to_string()).unwrap();
        finetune(folder.path(), &["--config", "job.json"]).succeeded();
        let found = rows(folder.path());
        assert_eq!(found.len(), expected.len(), "{name}");
        for ([loss, norm, _], row) in found.iter().zip(expected) {
            let number = |value: &Value| value.as_f64().unwrap();
            let difference = (number(loss) - number(&row["loss"])).abs();
            assert!(difference < loss_bound, "{name}: {loss} and {row}");
            let names = ["grad_norm", "deepspeed_grad_norm"];
            let expected = names.iter().find_map(|name| row[name].as_f64()).unwrap();
            assert!((number(norm) / expected - 1.0).abs() < norm_bound, "{name}: {norm} and {row}");
        }
    }
}
