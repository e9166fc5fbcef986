//! Tests of LoRA: `model.lora`, `model.adapter` and `deepburn merge`.

use std::fs;
use std::path::{Path, PathBuf};

use deepburn::checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::job::{Job, STAGES, Trained, golden, tensors, tiny_model};
use crate::outputs::{read_json, text_model};
use crate::program::deepburn;
use crate::resume::{assert_same, checkpoints, resume};
use crate::traces::{FP32, Nearness, assert_near, job as job_of_trace};

/// Returns a job that trains an adapter of the tiny GPT-2.
fn job() -> Job {
    Job::tiny()
        .with("model.lora", json!({ "r": 4, "target_modules": "all-linear", "lora_dropout": 0.1 }))
}

fn adapter(job: &Job) -> PathBuf {
    job.folder().join("output/adapter")
}

/// PEFT's traces: 10 steps of plain PyTorch, and of DeepSpeed at stages 2 and 3 on 2 ranks. They
/// are in `golden/llm`, which is beside the folder that `DEEPBURN_TEST_DATA` names.
#[test]
fn traces_of_peft() {
    let Some(golden) = golden("llm") else { return };
    let mut count = 0;
    for folder in fs::read_dir(golden.join("lora")).unwrap() {
        let folder = folder.unwrap().path();
        let read = |name: &str| -> Option<Value> {
            serde_json::from_str(&fs::read_to_string(folder.join(name)).ok()?).ok()
        };
        let main = read("trace.json").unwrap();
        for (name, stages) in [
            ("trace.json", &[0, 3][..]),
            ("trace_s2_n2.json", &[2, 0]),
            ("trace_s3_n2.json", &[3, 1]),
        ] {
            let Some(trace) = read(name) else { continue };
            for stage in stages {
                reproduces(&golden, &folder, &main, &trace, *stage);
                count += 1;
            }
        }
    }
    assert!(count > 40, "{count}");
}

/// In bfloat16, PyTorch keeps and updates the adapters in bfloat16, or computes them in f32.
const BF16: Nearness = Nearness { loss: 2e-2, norm: 3e-2, steps: 10 };

fn reproduces(golden: &Path, folder: &Path, main: &Value, trace: &Value, stage: u8) {
    let base = golden.join("models").join(main["base"].as_str().unwrap());
    // The tiny GPT-2 is beside the other golden files.
    let tokens = [base.join("tokens.bin"), golden.join("../tokens.bin")];
    let tokens = tokens.into_iter().find(|path| path.exists()).unwrap();
    let is_bf16 = main["base_dtype"] == "bfloat16";
    let job = job_of_trace(trace)
        .with("model", json!({ "pretrained": base, "adapter": folder.join("adapter_init") }))
        .with("data.path", tokens.display().to_string())
        .with("training.ranks", trace["world"].as_u64().unwrap_or(1))
        .zero("stage", stage);
    let job = job.in_precision(if is_bf16 { "bf16" } else { "fp32" });
    let what = format!("{} at stage {stage}", folder.display());
    let trained = job.train();
    let nearness = if is_bf16 { BF16 } else { FP32 };
    assert_near(&trained.steps, trace["rows"].as_array().unwrap(), &nearness, &what);
    if is_bf16 || trace["world"] != 1 {
        return;
    }
    // The adapter after ten steps. Adam divides by tiny moments, so single elements differ more
    // than losses.
    let expected = tensors(&fs::read(folder.join("adapter_10/adapter_model.safetensors")).unwrap());
    let found = trained.tensors();
    for (name, found) in &found {
        let (_, expected) = expected.iter().find(|(own, _)| own == name).unwrap();
        let square = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|value| f64::from(value).powi(2)).sum::<f64>()
        };
        let differences = square(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        let norm = square(&mut expected.iter().copied());
        assert!(
            differences.sqrt() <= 2e-3 * norm.sqrt() + 1e-6,
            "{what} {name}: {differences} {norm}"
        );
    }
}

#[test]
fn stages_and_ranks_agree_to_the_bit() {
    for (ranks, precision) in [(1, "fp32"), (2, "bf16"), (3, "fp32")] {
        let run = |stage| {
            let job = job().sharded(stage, ranks);
            job.in_precision(precision).train()
        };
        let first = run(0);
        let trained = first.tensors();
        // Four factors of each of three layers, in PEFT's names, and none of them is empty or 0.
        assert_eq!(trained.len(), 24);
        for (name, values) in &trained {
            assert!(name.starts_with("base_model.model.transformer.h."), "{name}");
            assert!(values.iter().any(|value| *value != 0.0), "{name}");
        }
        for stage in &STAGES[1..] {
            assert_eq!(run(*stage).numbers(), first.numbers(), "stage {stage}, {ranks} ranks");
        }
    }
}

/// The first tokens of the data are 3 and 486, so that both rows are looked up.
#[test]
fn rows_of_tokens_are_trained_at_every_stage() {
    for (ranks, precision) in [(1, "fp32"), (2, "fp32"), (2, "bf16")] {
        let run = |stage| {
            let lora = json!({ "r": 4, "trainable_token_indices": [3, 486, 300] });
            let job = Job::tiny().with("model.lora", lora).sharded(stage, ranks);
            job.in_precision(precision).train()
        };
        let first = run(0);
        let trained = first.tensors();
        let name = "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta";
        let (_, rows) = trained.iter().find(|(own, _)| own == name).unwrap();
        let base = tensors(&fs::read(tiny_model().join("model.safetensors")).unwrap());
        let (_, table) = base.iter().find(|(own, _)| own.ends_with("wte.weight")).unwrap();
        // Tied rows learn from the head, even if no text contains their token.
        for (token, row) in [3, 486, 300].into_iter().zip(rows.chunks_exact(48)) {
            let differ = row.iter().zip(&table[token * 48..]).filter(|(a, b)| a != b);
            assert_eq!(differ.count(), 48, "{token}");
        }
        for stage in &STAGES[1..] {
            assert_eq!(run(*stage).numbers(), first.numbers(), "stage {stage}, {ranks} ranks");
        }
    }
}

#[test]
fn checkpoints_have_the_adapter_alone_and_resume_on_other_ranks() {
    let whole = job().with("training.save_steps", 2).sharded(3, 2);
    let expected = whole.train();
    let parts = job().with("training.save_steps", 2).sharded(3, 2).with("training.max_steps", 2);
    parts.run().succeeded();
    let checkpoint = Checkpoint::open_intact(&checkpoints(&parts), None).unwrap();
    assert_eq!(
        checkpoint.omitted().count(),
        40,
        "of 3 layers of 12, 2 embeddings and 2 of the last norm"
    );
    drop(checkpoint);
    let parts = parts.with("training.max_steps", 4);
    resume(&parts, &[]).succeeded();
    assert_same(&Trained::read(&parts.folder().join("output")), &expected, "resumed");
    // On another number of ranks and at another stage.
    let parts = parts
        .sharded(1, 3)
        .with("training.max_steps", 5)
        .with("deepspeed.gradient_accumulation_steps", 1);
    resume(&parts, &[]).succeeded();
    // Another adapter is refused.
    let other = parts.with("model.lora.lora_alpha", 32).with("training.max_steps", 6);
    resume(&other, &[]).failed(2, &["lora_alpha changed from 8 to 32", "model.lora.lora_alpha"]);
    let other = other.with("model.lora", Value::Null);
    resume(&other, &[]).failed(2, &["has an adapter, and this job has none"]);
}

/// If the embedding of a tied model is trained alone, the head is a frozen parameter of its own,
/// which the base model has as its embedding.
#[test]
fn frozen_heads_of_tied_models_are_found_in_the_base() {
    for (family, stage, ranks, quantized) in [
        ("gpt2", 3, 2, false),
        ("llama", 0, 1, false),
        ("qwen2", 1, 2, false),
        ("qwen2", 3, 2, true),
        ("qwen3", 2, 3, false),
        ("mistral", 3, 1, false),
        ("phi3", 3, 3, false),
        ("gemma2", 2, 2, false),
        ("gemma3_text", 3, 2, false),
    ] {
        let what = format!("{family} at stage {stage} on {ranks} ranks");
        let base = Job::uneven().with("model.architecture", family).with("training.max_steps", 1);
        let (embedding, base) = match family {
            "gpt2" => ("wte", base),
            _ => ("embed_tokens", base.with("model.config", tied_config())),
        };
        base.run().succeeded();
        let base = base.folder().join("output/model");
        let job = || {
            let lora =
                json!({ "r": 4, "target_modules": "all-linear", "modules_to_save": [embedding] });
            let job = Job::uneven().with("training.save_steps", 2).sharded(stage, ranks);
            job.with("model", json!({ "pretrained": base, "lora": lora }))
        };
        let job = || match quantized {
            true => job().with("model.quantization_config", json!({ "load_in_8bit": true })),
            false => job(),
        };
        let expected = job().train();
        let parts = job().with("training.max_steps", 2);
        parts.run().succeeded();
        let parts = parts.with("training.max_steps", 4);
        resume(&parts, &[]).succeeded();
        let folder = parts.folder();
        assert_same(&Trained::read(&folder.join("output")), &expected, &what);
        deepburn(folder, &["consolidate", "output", "exported"]).succeeded();
        for name in ["adapter_model.safetensors", "deepburn.json"] {
            let read = |from: &str| fs::read(folder.join(from).join(name)).unwrap();
            assert!(read("exported") == read("output/adapter"), "{what}: {name} differs");
        }
        assert!(read_json(&folder.join("exported/deepburn.json"))["base_model_hash"].is_string());
        fs::rename(&base, folder.join("moved")).unwrap();
        deepburn(folder, &["consolidate", "output", "again", "--base", "moved"]).succeeded();
    }
}

/// Returns the sizes of a small model of any family but GPT-2.
fn tied_config() -> Value {
    json!({
        "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "head_dim": 12,
        "num_key_value_heads": 2, "intermediate_size": 37, "max_position_embeddings": 33,
        "vocab_size": 131, "tie_word_embeddings": true,
    })
}

#[test]
fn the_tool_merges_as_the_run_does() {
    let job = job().with("training.save_merged", true);
    job.run().succeeded();
    let output = job.folder().join("output");
    let merged = fs::read(output.join("model/model.safetensors")).unwrap();
    // The tool writes the same file.
    let out = job.folder().join("merged");
    let arguments = ["merge", "output", "merged"];
    deepburn(job.folder(), &arguments).succeeded();
    assert_eq!(fs::read(out.join("model.safetensors")).unwrap(), merged);
    deepburn(job.folder(), &arguments)
        .failed(2, &["merged/config.json exists and is not overwritten"]);
    // W + s A B, in f64.
    let factors = tensors(&fs::read(adapter(&job).join("adapter_model.safetensors")).unwrap());
    let base = tensors(&fs::read(tiny_model().join("model.safetensors")).unwrap());
    let find = |list: &[(String, Vec<f32>)], name: &str| {
        list.iter().find(|(own, _)| own.ends_with(name)).unwrap().1.clone()
    };
    let name = "h.1.mlp.c_fc";
    let [a, b] = ["A", "B"].map(|it| find(&factors, &format!("{name}.lora_{it}.weight")));
    let weight = find(&base, &format!("{name}.weight"));
    let merged = find(&tensors(&merged), &format!("{name}.weight"));
    // PyTorch's layout: A [4, 48], B [192, 4]; GPT-2's weight is [48, 192]. s = 8 / 4.
    for row in 0..48 {
        for column in 0..192 {
            let product: f64 =
                (0..4).map(|k| f64::from(a[k * 48 + row]) * f64::from(b[column * 4 + k])).sum();
            let expected = (f64::from(weight[row * 192 + column]) + 2.0 * product) as f32;
            assert!((merged[row * 192 + column] - expected).abs() < 1e-7);
        }
    }
}

/// The text of an adapter and its base model is the text of the merged model.
#[test]
fn adapters_generate_texts() {
    let job = text_model()
        .with(
            "model.lora",
            json!({ "r": 4, "target_modules": "all-linear", "init_lora_weights": false }),
        )
        .with("training.save_merged", true);
    job.run().succeeded();
    let generate = |model: &str, more: &[&str]| {
        let start = ["generate", "--model", model, "--prompt", "The cat", "--max-new-tokens", "12"];
        deepburn(job.folder(), &[&start[..], more].concat())
    };
    let text = |model: &str, more: &[&str]| generate(model, more).succeeded().stdout;
    let merged = text("output/model", &[]);
    assert_eq!(text("output/adapter", &[]), merged);
    assert_ne!(text("base", &[]), merged);
    // The folder of a run with a merged model means that model. Without one, it means the adapter,
    // even if an earlier model is there.
    assert_eq!(text("output", &[]), merged);
    job.run().succeeded();
    let again = job.with("training.save_merged", false).with("training.seed", 7);
    again.run().succeeded();
    let job = again;
    let generate = |model: &str, more: &[&str]| {
        let start = ["generate", "--model", model, "--prompt", "The cat", "--max-new-tokens", "12"];
        deepburn(job.folder(), &[&start[..], more].concat())
    };
    let own = generate("output/adapter", &[]).succeeded().stdout;
    assert_eq!(generate("output", &[]).succeeded().stdout, own);
    generate("base", &["--base", "base"])
        .failed(2, &["--base: has no effect: base has no adapter"]);
    fs::rename(job.folder().join("base"), job.folder().join("moved")).unwrap();
    let parts = ["base_model_name_or_path is", "which does not exist; give its folder with --base"];
    generate("output", &[]).failed(2, &parts);
    assert_eq!(generate("output", &["--base", "moved"]).succeeded().stdout, own);
}

/// Parameters and gradients take 2 bytes in bf16, and the master copy and two moments of a trained
/// value 12.
#[test]
fn estimates_know_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny_model().display().to_string();
    let section = r#"{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}"#;
    let estimate = |fields: &str| {
        let start =
            ["estimate", "--model", &model, "--stage", "0", "--json", "--deepspeed", section];
        deepburn(folder.path(), &[&start[..], &["--lora", fields]].concat())
    };
    let ending = estimate(r#"{"r": 4, "target_modules": ["c_attn"]}"#).succeeded();
    let record: Value = serde_json::from_str(&ending.stdout).unwrap();
    let bytes = |name: &str| record[0][name].as_u64().unwrap();
    // 112,560 values of the tiny model, and 4 x (48 + 144) for each of 3 layers.
    let trained = 3 * 4 * (48 + 144);
    assert_eq!(bytes("parameters"), 2 * (112_560 + trained), "{record}");
    assert_eq!(bytes("gradients"), 2 * trained, "{record}");
    assert_eq!(bytes("optimizer"), 12 * trained, "{record}");
    estimate(r#"{"rank": 4}"#).failed(2, &["--lora: `rank` is not a field of LoRA"]);
}

const FOUR_BITS: &str = r#"{"load_in_4bit": true, "bnb_4bit_use_double_quant": true}"#;

#[test]
fn estimates_know_quantization() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny_model().display().to_string();
    let section = r#"{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}"#;
    let estimate = |fields: &str| {
        let start = ["estimate", "--model", &model, "--stage", "0", "--json"];
        let lora = ["--deepspeed", section, "--lora", r#"{"r": 4, "target_modules": ["c_attn"]}"#];
        deepburn(folder.path(), &[&start[..], &lora, &["--quantization", fields]].concat())
    };
    let bytes = |fields: &str| {
        let record: Value = serde_json::from_str(&estimate(fields).succeeded().stdout).unwrap();
        record[0]["parameters"].as_u64().unwrap()
    };
    // Matrices of the tiny model: 512 and 64 rows of 48, and 12 x 48 x 48 in each of 3 layers. All
    // are blocks of 64.
    let matrices = [512 * 48, 64 * 48]
        .into_iter()
        .chain((0..3).flat_map(|_| [48 * 144, 48 * 48, 48 * 192, 192 * 48]));
    let matrices: Vec<u64> = matrices.collect();
    let (numel, trained) = (matrices.iter().sum::<u64>(), 3 * 4 * (48 + 144));
    let others = 2 * (112_560 - numel + trained);
    assert_eq!(bytes(r#"{"load_in_4bit": true}"#), others + numel / 64 * 36);
    assert_eq!(bytes(r#"{"load_in_8bit": true}"#), others + numel / 64 * 68);
    assert_eq!(bytes("{}"), others + 2 * numel);
    let double: u64 = matrices
        .iter()
        .map(|numel| numel / 64)
        .map(|blocks| 32 * blocks + 4 * (blocks.div_ceil(4) + blocks.div_ceil(256) + 1))
        .sum();
    assert_eq!(bytes(FOUR_BITS), others + double);
    let skip = r#"{"load_in_4bit": true, "llm_int8_skip_modules": ["lm_head"]}"#;
    assert_eq!(bytes(skip), others + (numel - 512 * 48) / 64 * 36 + 2 * 512 * 48);
    for (fields, part) in [
        (r#"{"load_in_4bit": 1}"#, "--quantization: "),
        (r#"{"bits": 4}"#, "unknown key"),
        (r#"{"load_in_4bit": true, "bnb_4bit_quant_type": "fp4"}"#, "\"fp4\" is not supported"),
        (r#"{"load_in_8bit": true, "llm_int8_skip_modules": ["wtf"]}"#, "selects no module"),
    ] {
        estimate(fields).failed(2, &[part]);
    }
}

#[test]
fn a_quantized_base_trains_the_same_adapter_at_every_stage() {
    let fields: Value = serde_json::from_str(FOUR_BITS).unwrap();
    let job =
        |stage: u8| job().with("model.quantization_config", fields.clone()).zero("stage", stage);
    let plain = self::job().train();
    let first = job(0).train();
    assert_ne!(first.steps[0].loss, plain.steps[0].loss);
    // 4 bits change the random weights of the tiny model by about 10 %, and its loss by little.
    let rows = first.steps.iter().zip(&plain.steps);
    assert!(rows.clone().all(|(row, other)| (row.loss - other.loss).abs() < 0.05 * other.loss));
    let parameters = |trained: &Trained| trained.steps[0].memory.parameters;
    assert!(parameters(&first) < parameters(&plain) / 3);
    for stage in STAGES {
        let trained = job(stage).train();
        assert_eq!(trained.weights, first.weights, "stage {stage}");
    }
}

/// A frozen factor is not quantized, because the adapter's file has its exact values.
#[test]
fn frozen_factors_beside_a_quantized_base_are_exact() {
    let fields: Value = serde_json::from_str(FOUR_BITS).unwrap();
    let first = job().with("training.max_steps", 1).train();
    let job = job()
        .with("model.quantization_config", fields)
        .with("training.param_groups", json!([{"params": "lora_A", "frozen": true}]));
    let trained = job.train();
    // Factors are drawn from the seed. In the first step, A has no gradient, because B is still 0.
    let of_a = |trained: &Trained| -> Vec<_> {
        trained.tensors().into_iter().filter(|(name, _)| name.contains("lora_A")).collect()
    };
    assert!(!of_a(&trained).is_empty());
    let decayed = 1.0 - 1e-2 * 0.1;
    for ((name, values), (_, first)) in of_a(&trained).iter().zip(of_a(&first)) {
        // The other run decays A once, and rounds the result in f32.
        let near =
            |(value, first): (&f32, &f32)| (value * decayed - first).abs() <= 1e-6 * value.abs();
        assert!(values.iter().zip(&first).all(near), "{name}");
    }
}

#[test]
fn runs_with_a_quantized_base_resume() {
    let fields: Value = serde_json::from_str(FOUR_BITS).unwrap();
    let job = || job().with("model.quantization_config", fields.clone()).sharded(3, 2);
    let expected = job().with("training.max_steps", 4).train();
    let parts = job().with("training.max_steps", 2).with("training.save_steps", 2);
    parts.run().succeeded();
    // The checkpoint is verified with the values of the pretrained model before they were
    // quantized.
    let checkpoint = Checkpoint::open_intact(&checkpoints(&parts), None).unwrap();
    assert!(checkpoint.omitted().count() > 0);
    drop(checkpoint);
    let parts = parts.with("training.max_steps", 4);
    resume(&parts, &[]).succeeded();
    assert_same(&Trained::read(&parts.folder().join("output")), &expected, "resumed");
    let other = parts
        .with("model.quantization_config", json!({"load_in_8bit": true}))
        .with("training.max_steps", 6);
    resume(&other, &[]).failed(2, &["model.quantization_config changed from", "set it back"]);
}

#[test]
fn an_adapter_is_trained_further() {
    let first = job().with("training.max_steps", 2);
    first.run().succeeded();
    let start = Trained::read(&first.folder().join("output"));
    let next = Job::tiny()
        .with("model.adapter", adapter(&first).display().to_string())
        .with("deepspeed.optimizer.params.lr", 0.0)
        .train();
    // Without a learning rate, it is saved as it was read.
    assert_eq!(next.weights, start.weights);
}

/// Ends with status 2 and one message, and leaves nothing.
#[track_caller]
fn refused(job: &Job, parts: &[&str]) {
    job.run().failed(2, parts);
    assert!(!job.folder().join("output").exists());
}

#[test]
fn adapters_that_cannot_be_trained_are_refused() {
    let lora = |fields: Value| Job::tiny().with("model.lora", fields);
    for (fields, part) in [
        (json!(8), "must be a section of PEFT's fields"),
        (json!({"r": 0}), "model.lora: `r` is 0"),
        (json!({"rank": 8}), "`rank` is not a field of LoRA"),
        (
            json!({"target_modules": ["q_proj"]}),
            "no module is called `q_proj`; the model has wte, wpe",
        ),
        (
            json!({"trainable_token_indices": [1, 512]}),
            "token 512 has no row in `transformer.wte`, which has 512; give ids below 512",
        ),
        (json!({"init_lora_weights": "pissa"}), "`init_lora_weights` is \"pissa\""),
    ] {
        refused(&lora(fields), &[part]);
    }
    let any = || lora(json!({}));
    refused(&any().with("model.pretrained", Value::Null), &["model.lora", "give model.pretrained"]);
    refused(&any().with("model.adapter", "output"), &["model.adapter"]);
    refused(&any().with("model.config", json!({"vocab_size": 600})), &["adds 88 rows"]);
    refused(
        &any().with("model.config", json!({"layer_norm_epsilon": 0.1})),
        &["cannot be changed with an adapter"],
    );
    refused(
        &any().with("training.checkpoint_scope", "all"),
        &["training.checkpoint_scope", "another base model"],
    );
    refused(
        &lora(json!({"lora_bias": true, "target_modules": "all-linear"}))
            .with("model.pretrained", Value::Null),
        &["give model.pretrained"],
    );
    refused(&lora(json!({"target_modules": ["lm_head"]})), &["`lm_head` is the output projection"]);
    refused(&any().with("data.kind", "classification"), &["language models only"]);
    let quantized = |fields: Value| any().with("model.quantization_config", fields);
    for (fields, parts) in [
        (json!({"load_in_4bit": true, "load_in_8bit": true}), ["load_in_8bit", "has one format"]),
        (
            json!({"load_in_4bit": true, "bnb_4bit_quant_type": "fp4"}),
            ["bnb_4bit_quant_type", "\"fp4\" is not supported"],
        ),
        (
            json!({"load_in_4bit": true, "bnb_4bit_compute_dtype": "bfloat16"}),
            ["bnb_4bit_compute_dtype", "which is float32 here"],
        ),
        (
            json!({"load_in_8bit": true, "llm_int8_has_fp16_weight": true}),
            ["llm_int8_has_fp16_weight", "set it to false"],
        ),
        (
            json!({"load_in_8bit": true, "llm_int8_skip_modules": ["q_proj"]}),
            ["llm_int8_skip_modules: \"q_proj\"", "selects no module"],
        ),
        (json!({"bits": 4}), ["model.quantization_config", "unknown key"]),
        (json!({"quant_method": "gptq"}), ["quant_method", "bitsandbytes"]),
    ] {
        refused(&quantized(fields), &parts);
    }
    let four = json!({"load_in_4bit": true});
    refused(
        &Job::tiny().with("model.quantization_config", four.clone()),
        &["model.quantization_config", "all weights are trained", "give model.lora"],
    );
    refused(&Job::tiny().with("model.adapter", "nothing"), &["model.adapter", "no such file"]);
}

#[test]
fn damaged_adapters_are_refused() {
    let source = job().with("training.max_steps", 1);
    source.run().succeeded();
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("adapter");
    let copy = || {
        fs::create_dir_all(&place).unwrap();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(adapter(&source).join(name), place.join(name)).unwrap();
        }
    };
    let job = || Job::tiny().with("model.adapter", place.display().to_string());
    let change = |name: &str, value: Value| {
        copy();
        let path = place.join("adapter_config.json");
        let mut fields: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        fields[name] = value;
        fs::write(path, fields.to_string()).unwrap();
    };
    for (name, value, part) in [
        ("r", json!(3), "expected [3, 48] of F32, F16 or BF16, found [4, 48]"),
        ("target_modules", json!(["c_attn"]), "expected no such tensor"),
        ("use_dora", json!(true), "lora_magnitude_vector`: expected"),
        ("bias", json!("all"), "base_layer.bias`: expected"),
        ("use_qalora", json!(true), "`use_qalora` is true, which is not supported"),
        ("peft_type", json!("IA3"), "`peft_type` is \"IA3\""),
        ("peft_type", Value::Null, "`peft_type` is missing, but it must be \"LORA\""),
        ("kasa_config", json!({}), "`kasa_config` is {}, which is not supported"),
    ] {
        change(name, value);
        refused(&job(), &["adapter", part]);
    }
    // PEFT takes it, but the adapter may be the one of a larger model.
    change("layers_to_transform", json!([0, 1, 2, 9]));
    let stderr = job().with("training.max_steps", 1).run().succeeded().stderr;
    assert!(stderr.contains("`layers_to_transform: 9` of the adapter selects nothing"), "{stderr}");
    copy();
    let weights = place.join("adapter_model.safetensors");
    let whole = fs::read(&weights).unwrap();
    fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    refused(&job(), &["adapter_model.safetensors"]);
    let mut wrong = whole.clone();
    let end = wrong.len();
    wrong[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, wrong).unwrap();
    refused(&job(), &["model.adapter: ", "expected finite values"]);
    fs::remove_file(&weights).unwrap();
    refused(&job(), &["has no adapter_model.safetensors"]);
    fs::write(place.join("adapter_config.json"), "{").unwrap();
    refused(&job(), &["adapter_config.json"]);
}
