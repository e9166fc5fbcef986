//! Keys of a job file that have no effect because of other keys: each one is reported.
//!
//! The tables have a line for every key of a job file. A new key needs a job in which it has no
//! effect and the report about it ([`WITHOUT_EFFECT`]), or the reason why it always has one
//! ([`ALWAYS`]).

use std::fs;
use std::path::Path;

use deepburn_config::{Job, JobRequest, Status, job_keys, resolve};
use serde_json::{Value, json};

/// A key, the sections of a job in which it has no effect, and a part of the finding about it.
const WITHOUT_EFFECT: &[(&str, &str, &str)] = &[
    (
        "model.quantization_config.bnb_4bit_quant_type",
        r#"{"model": {"quantization_config": {"bnb_4bit_quant_type": "nf4"}}}"#,
        "has no effect: load_in_4bit is not true",
    ),
    (
        "model.quantization_config.bnb_4bit_use_double_quant",
        r#"{"model": {"quantization_config": {"bnb_4bit_use_double_quant": true}}}"#,
        "has no effect: load_in_4bit is not true",
    ),
    (
        "model.quantization_config.bnb_4bit_compute_dtype",
        r#"{"model": {"quantization_config": {"bnb_4bit_compute_dtype": "float32"}}}"#,
        "has no effect: load_in_4bit is not true",
    ),
    (
        "model.quantization_config.llm_int8_skip_modules",
        r#"{"model": {"quantization_config": {"llm_int8_skip_modules": ["lm_head"]}}}"#,
        "has no effect: nothing is quantized",
    ),
    (
        "model.quantization_config.load_in_4bit",
        r#"{"model": {"quantization_config": {"load_in_4bit": true}}}"#,
        "all weights are trained",
    ),
    (
        "model.quantization_config.load_in_8bit",
        r#"{"model": {"quantization_config": {"load_in_8bit": true}}}"#,
        "all weights are trained",
    ),
    (
        "training.report_to",
        r#"{"training": {"report_to": "none"}, "deepspeed": {"tensorboard": {"enabled": true}}}"#,
        "does not disable tensorboard of the deepspeed section",
    ),
    ("data.kind", r#"{"data": {"kind": "text"}}"#, "reads the embedded synthetic text"),
    (
        "data.text_field",
        r#"{"data": {"kind": "tokens", "path": "t.bin", "text_field": "x"}}"#,
        "only classification, chat and text from files read it",
    ),
    ("data.text_field", r#"{"data": {"text_field": "x"}}"#, "has no effect"),
    (
        "data.text_field",
        r#"{"data": {"kind": "classification", "text_field": "x"}}"#,
        "has no effect",
    ),
    (
        "data.label_field",
        r#"{"data": {"path": "t.txt", "label_field": "x"}}"#,
        "only classification of texts from files reads it",
    ),
    ("data.path", r#"{"data": {"kind": "synthetic", "path": "t.txt"}}"#, "reads no files"),
    ("data.name", r#"{"data": {"path": "t.txt", "name": "x"}}"#, "data.path is not a data set"),
    (
        "data.join",
        r#"{"data": {"kind": "tokens", "path": "t.bin", "join": "nothing"}}"#,
        "only text from files is joined",
    ),
    ("data.join", r#"{"data": {"join": "nothing"}}"#, "has no effect"),
    (
        "data.token_cache",
        r#"{"data": {"kind": "tokens", "path": "t.bin", "token_cache": false}}"#,
        "only text from files is tokenized and cached",
    ),
    ("data.token_cache", r#"{"data": {"token_cache": false}}"#, "has no effect"),
    (
        "data.messages_field",
        r#"{"data": {"path": "t.txt", "messages_field": "x"}}"#,
        "only data of kind \"chat\" reads it",
    ),
    (
        "data.chat_template",
        r#"{"data": {"path": "t.txt", "chat_template": "{{ x }}"}}"#,
        "only data of kind \"chat\" or \"preference\" reads it",
    ),
    (
        "data.skip_invalid_rows",
        r#"{"data": {"path": "t.txt", "skip_invalid_rows": true}}"#,
        "only data of kind \"chat\" or \"preference\" reads it",
    ),
    (
        "data.assistant_only_loss",
        r#"{"data": {"path": "t.txt", "assistant_only_loss": true}}"#,
        "only data of kind \"chat\" reads it",
    ),
    (
        "data.completion_only_loss",
        r#"{"data": {"path": "t.txt", "completion_only_loss": true}}"#,
        "only data of kind \"chat\" reads it",
    ),
    (
        "data.packing",
        r#"{"data": {"path": "t.txt", "packing": true}}"#,
        "only data of kind \"chat\" reads it",
    ),
    (
        "data.packing_strategy",
        r#"{"data": {"path": "t.txt", "packing_strategy": "wrapped"}}"#,
        "only data of kind \"chat\" reads it",
    ),
    (
        "data.padding_free",
        r#"{"data": {"path": "t.txt", "padding_free": true}}"#,
        "only data of kind \"chat\" reads it",
    ),
    (
        "data.pad_token",
        r#"{"data": {"path": "t.txt", "pad_token": "x"}}"#,
        "only data of kind \"chat\" or \"preference\" reads it",
    ),
    (
        "data.packing",
        r#"{"data": {"kind": "preference", "path": "t.jsonl", "tokenizer": "folder", "packing": true}}"#,
        "only data of kind \"chat\" reads it",
    ),
    (
        "data.text_field",
        r#"{"data": {"kind": "preference", "path": "t.jsonl", "tokenizer": "folder", "text_field": "x"}}"#,
        "only classification, chat and text from files read it",
    ),
    (
        "training.objective",
        r#"{"data": {"path": "t.txt"}, "training": {"objective": "dpo"}}"#,
        "set data.kind to \"preference\"",
    ),
    (
        "training.dpo.beta",
        r#"{"training": {"dpo": {"beta": 0.2}}}"#,
        "only data of kind \"preference\" reads it",
    ),
    (
        "training.dpo.loss_type",
        r#"{"training": {"dpo": {"loss_type": "ipo"}}}"#,
        "only data of kind \"preference\" reads it",
    ),
    (
        "training.label_smoothing_factor",
        r#"{"data": {"kind": "preference", "path": "t.jsonl", "tokenizer": "folder"}, "training": {"label_smoothing_factor": 0.1}}"#,
        "predicts no single token",
    ),
    (
        "data.packing_strategy",
        r#"{"data": {"kind": "chat", "path": "t.jsonl", "tokenizer": "folder", "packing_strategy": "bfd"}}"#,
        "not packed without data.packing",
    ),
    (
        "data.padding_free",
        r#"{"data": {"kind": "chat", "path": "t.jsonl", "tokenizer": "folder", "packing": true, "padding_free": true}}"#,
        "always joined without padding",
    ),
    (
        "data.padding_free",
        r#"{"data": {"kind": "chat", "path": "t.jsonl", "tokenizer": "folder", "packing": true, "packing_strategy": "wrapped", "padding_free": true}}"#,
        "see each other",
    ),
    (
        "data.pad_token",
        r#"{"data": {"kind": "chat", "path": "t.jsonl", "tokenizer": "folder", "packing": true, "pad_token": "x"}}"#,
        "no sample is padded",
    ),
    ("data.splits.train", r#"{"data": {"splits": {"train": "0%"}}}"#, "nothing would train"),
    (
        "data.splits.eval",
        r#"{"data": {"splits": {"train": "90%", "eval": "0%"}}}"#,
        "\"0%\" holds no samples",
    ),
    (
        "data.splits.eval",
        r#"{"data": {"splits": {"train": "90%", "eval": "0.0 %"}}, "training": {"eval_steps": 1}}"#,
        "\"0.0 %\" holds no samples",
    ),
    (
        "data.splits.eval",
        r#"{"data": {"kind": "classification", "splits": {"train": "t.txt", "eval": "0%"}}}"#,
        "\"0%\" holds no samples",
    ),
    (
        "data.splits.test",
        r#"{"data": {"splits": {"train": "90%", "test": "0%"}}}"#,
        "\"0%\" holds no samples",
    ),
    (
        "data.vocab_size",
        r#"{"data": {"kind": "tokens", "path": "t.bin", "vocab_size": 300}}"#,
        "tokens need no tokenizer",
    ),
    (
        "data.vocab_size",
        r#"{"data": {"tokenizer": "folder", "vocab_size": 300}}"#,
        "the given tokenizer or the pretrained model's is used",
    ),
    (
        "data.vocab_size",
        r#"{"model": {"pretrained": "folder"}, "data": {"path": "t.txt", "vocab_size": 300}}"#,
        "the given tokenizer or the pretrained model's is used",
    ),
    (
        "data.drop_last",
        r#"{"data": {"drop_last": true}, "training": {"max_steps": 1}}"#,
        "training ends after training.max_steps",
    ),
    (
        "data.drop_last",
        r#"{"data": {"kind": "chat", "path": "t.jsonl", "tokenizer": "folder", "drop_last": true}}"#,
        "an epoch of samples ends with a step",
    ),
    (
        "training.pipeline_schedule",
        r#"{"training": {"ranks": 2, "pipeline_schedule": "gpipe"}}"#,
        "there is one pipeline stage",
    ),
    (
        "training.float32_matmul_precision",
        r#"{"training": {"float32_matmul_precision": "high"}}"#,
        "only the backend \"cuda\" multiplies",
    ),
    (
        "training.float32_matmul_precision",
        r#"{"training": {"backend": "wgpu", "float32_matmul_precision": "medium"}}"#,
        "only the backend \"cuda\" multiplies",
    ),
    ("training.devices", r#"{"training": {"devices": [1]}}"#, "has one device, the CPU"),
    (
        "training.collective_timeout",
        r#"{"training": {"collective_timeout": 5}}"#,
        "one rank does not wait for others",
    ),
    ("training.eval_steps", r#"{"training": {"eval_steps": 1}}"#, "there is nothing to evaluate"),
    (
        "training.sample_prompts",
        r#"{"training": {"sample_prompts": ["x"]}}"#,
        "there is no evaluation",
    ),
    (
        "training.sample_prompts",
        r#"{"data": {"kind": "classification", "path": "t.csv", "splits": {"train": "90%", "eval": "10%"}},
            "training": {"sample_prompts": "x"}}"#,
        "a classifier generates no text",
    ),
    (
        "training.sample_rows",
        r#"{"data": {"path": "t.txt", "splits": {"train": "90%", "eval": "10%"}}, "training": {"sample_rows": 2}}"#,
        "write training.sample_prompts, or remove it",
    ),
    (
        "training.sample_max_new_tokens",
        r#"{"training": {"sample_max_new_tokens": 8}}"#,
        "neither sample_prompts nor sample_rows asks for a text",
    ),
    (
        "training.eval_max_samples",
        r#"{"training": {"eval_max_samples": 1}}"#,
        "data.splits.eval is not given",
    ),
    ("data.new_vocabulary", r#"{"data": {"new_vocabulary": true}}"#, "has no effect"),
    (
        "data.eos_token",
        r#"{"data": {"kind": "tokens", "path": "t.bin", "eos_token": "</s>"}}"#,
        "has no effect",
    ),
    (
        "training.load_best_model_at_end",
        r#"{"training": {"load_best_model_at_end": true}}"#,
        "it has no training.eval_steps and data.splits.eval",
    ),
    (
        "training.load_best_model_at_end",
        r#"{"data": {"splits": {"train": "90%", "eval": "10%"}}, "training": {"load_best_model_at_end": true}}"#,
        "it has no training.eval_steps; add training.eval_steps, or remove it",
    ),
    (
        "training.load_best_model_at_end",
        r#"{"training": {"eval_steps": 1, "load_best_model_at_end": true}}"#,
        "it has no data.splits.eval; add data.splits.eval, or remove it",
    ),
    (
        "training.early_stopping_patience",
        r#"{"training": {"early_stopping_patience": 1}}"#,
        "it has no training.eval_steps and data.splits.eval",
    ),
    (
        "training.load_best_model_at_end",
        r#"{"data": {"splits": {"train": "90%", "eval": "10%"}},
            "training": {"eval_strategy": "no", "eval_steps": 1, "load_best_model_at_end": true}}"#,
        "add training.eval_strategy \"steps\" or \"epoch\", or remove it",
    ),
    (
        "training.eval_strategy",
        r#"{"data": {"splits": {"train": "90%", "eval": "10%"}}, "training": {"eval_strategy": "no"}}"#,
        "still evaluated after the last step",
    ),
    (
        "training.metric_for_best_model",
        r#"{"training": {"metric_for_best_model": "loss"}}"#,
        "models are only compared for load_best_model_at_end",
    ),
    (
        "training.early_stopping_threshold",
        r#"{"training": {"early_stopping_threshold": 0.1}}"#,
        "only stops early with training.early_stopping_patience",
    ),
    (
        "training.save_merged",
        r#"{"training": {"save_merged": true}}"#,
        "neither model.lora nor model.adapter is given",
    ),
    ("training.async_save", r#"{"training": {"async_save": true}}"#, "no checkpoints are saved"),
    (
        "training.save_total_limit",
        r#"{"training": {"save_total_limit": 1}}"#,
        "no checkpoints are saved",
    ),
    (
        "training.save_best_limit",
        r#"{"training": {"save_best_limit": 1}}"#,
        "all checkpoints are kept",
    ),
    (
        "training.checkpoint_scope",
        r#"{"training": {"checkpoint_scope": "trained"}}"#,
        "no parameter is frozen",
    ),
    (
        "training.learning_rate",
        r#"{"training": {"learning_rate": 0.1}, "deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 0.2}}}}"#,
        "0.2 is used, not training.learning_rate 0.1",
    ),
    (
        "training.learning_rate",
        r#"{"training": {"learning_rate": 0.1}, "deepspeed": {"scheduler": {"type": "OneCycle",
            "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2}}}}"#,
        "0.1 has no effect: the schedule sets the learning rate, 0.2 at its peak",
    ),
    (
        "training.micro_batch_size",
        r#"{"training": {"micro_batch_size": 3}}"#,
        "3 has no effect: the micro-batch is 1, because of train_micro_batch_size_per_gpu",
    ),
    (
        "training.micro_batch_size",
        r#"{"training": {"micro_batch_size": 3}, "deepspeed": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": null}}"#,
        "3 has no effect: the micro-batch is 8, because of train_batch_size",
    ),
    (
        "training.gradient_checkpointing",
        r#"{"training": {"gradient_checkpointing": false}, "deepspeed": {"activation_checkpointing": {"policy": "full"}}}"#,
        "contradicts training.gradient_checkpointing: false",
    ),
    (
        "training.warmup_steps",
        r#"{"training": {"warmup_steps": 5}}"#,
        "has no effect: the learning rate is constant",
    ),
    (
        "training.warmup_steps",
        r#"{"training": {"warmup_steps": 5}, "deepspeed": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}}"#,
        "has no effect: scheduler.params.warmup_num_steps is 7",
    ),
    (
        "training.warmup_ratio",
        r#"{"training": {"warmup_ratio": 0.1}}"#,
        "has no effect: the learning rate is constant",
    ),
    (
        "training.per_device_eval_batch_size",
        r#"{"training": {"per_device_eval_batch_size": 2}}"#,
        "has no effect: this job evaluates nothing",
    ),
    (
        "training.save_steps",
        r#"{"training": {"save_strategy": "epoch", "save_steps": 2}}"#,
        "has no effect: training.save_strategy is \"epoch\"",
    ),
    (
        "training.lr_scheduler_kwargs.num_cycles",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_cycles": 0.5}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.power",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 0.5}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.lr_end",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"lr_end": 0.5}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.timescale",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"timescale": 1}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.min_lr",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"min_lr": 0.5}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.min_lr_rate",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.warmup_lr_rate",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"warmup_lr_rate": 0.5}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.num_decay_steps",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_decay_steps": 1}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.num_stable_steps",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_stable_steps": 1}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.warmup_type",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"warmup_type": "linear"}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.decay_type",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"decay_type": "linear"}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.lr_scheduler_kwargs.min_lr_ratio",
        r#"{"training": {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"min_lr_ratio": 0.5}}}"#,
        "is not a parameter of \"linear\"",
    ),
    (
        "training.no_decay",
        r#"{"training": {"no_decay": "nothing"}}"#,
        "no parameter has a weight decay",
    ),
    (
        "training.param_groups[].params",
        r#"{"training": {"param_groups": [{"params": "wte"}]}}"#,
        "the group has no effect",
    ),
    (
        "training.param_groups[].lr",
        r#"{"training": {"param_groups": [{"params": "wte", "frozen": true, "lr": 1}]}}"#,
        "has no effect in a frozen group",
    ),
    (
        "training.param_groups[].lr_factor",
        r#"{"training": {"param_groups": [{"params": "wte", "frozen": true, "lr_factor": 2}]}}"#,
        "has no effect in a frozen group",
    ),
    (
        "training.param_groups[].weight_decay",
        r#"{"training": {"param_groups": [{"params": "wte", "frozen": true, "weight_decay": 1}]}}"#,
        "has no effect in a frozen group",
    ),
    (
        "training.param_groups[].betas",
        r#"{"training": {"param_groups": [{"params": "wte", "frozen": true, "betas": [0, 0]}]}}"#,
        "has no effect in a frozen group",
    ),
    (
        "training.param_groups[].muon_matrices",
        r#"{"training": {"param_groups": [{"params": "wte", "frozen": true, "muon_matrices": 1}]}}"#,
        "has no effect in a frozen group",
    ),
];

/// Keys that have an effect in every job, or whose effect depends on files that are not read here,
/// with the reason.
const ALWAYS: &[(&str, &str)] = &[
    ("model.architecture", "it selects the model"),
    ("model.pretrained", "it selects the weights; encoder refuses it"),
    (
        "model.lora",
        "unknown fields are errors, and settings that select nothing are reported with the model",
    ),
    ("model.adapter", "it is refused without model.pretrained and beside model.lora"),
    ("model.config", "unknown fields are reported when the model is built"),
    ("data.tokenizer", "it sets the vocabulary and is exported with the model"),
    ("data.sequence_length", "every kind of data has samples of at most this length"),
    ("data.shuffle", "finetune notes that dynamic batching replaces it"),
    ("training.epochs", "training ends at this or max_steps, whichever comes first"),
    ("training.max_steps", "training ends at this or epochs, whichever comes first"),
    ("training.seed", "it seeds weights, sample order and dropout"),
    ("training.ranks", "every job has ranks"),
    (
        "training.pipeline_stages",
        "every job has stages; another number than the deepspeed section's is an error",
    ),
    ("training.backend", "every job has a backend"),
    ("training.output_dir", "every job writes metrics and a model"),
    ("training.batch_size_schedule.from_step", "finetune warns of a change after the last step"),
    ("training.batch_size_schedule.train_batch_size", "it is a pair with from_step"),
    ("training.logging_steps", "every run prints lines"),
    (
        "training.eval_strategy",
        "it selects when the model is evaluated; without data it is an error",
    ),
    ("training.save_strategy", "it selects when checkpoints are saved"),
    ("training.lr_scheduler_type", "it selects the schedule; beside another one it is an error"),
    ("training.param_groups[].dims", "it selects parameters; selecting none is an error"),
    ("training.param_groups[].frozen", "false is the state without the key"),
];

/// Returns all findings about a job, one per line, of any severity.
fn findings(sections: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    for name in ["t.txt", "t.bin", "t.jsonl"] {
        fs::write(folder.path().join(name), "text").unwrap();
    }
    fs::create_dir(folder.path().join("folder")).unwrap();
    let mut job: Value = serde_json::from_str(sections).unwrap();
    let mut deepspeed = json!({"train_micro_batch_size_per_gpu": 1});
    for (key, value) in job["deepspeed"].as_object().into_iter().flatten() {
        deepspeed[key] = value.clone();
    }
    job["deepspeed"] = deepspeed;
    let text = job.to_string();
    match Job::parse(&text, "job.json", Path::new(folder.path()), &JobRequest::default()) {
        Err(error) => error.to_string(),
        Ok((job, written)) => match resolve(&written, &job.run_context()) {
            Err(report) => report.to_string(),
            Ok(resolved) => {
                let notes = job.notes.iter().chain(&resolved.notes);
                notes.map(|note| format!("{note}\n")).collect()
            }
        },
    }
}

#[test]
fn every_key_without_effect_is_reported() {
    for (key, sections, part) in WITHOUT_EFFECT {
        let (all, path) = (findings(sections), key.replace("[]", "[0]"));
        let found = all.lines().any(|line| line.contains(&path) && line.contains(part));
        assert!(found, "{sections}: no line with {path} and {part:?} in\n{all}");
    }
}

#[test]
fn every_key_of_the_job_file_is_in_a_table() {
    let known: Vec<_> =
        WITHOUT_EFFECT.iter().map(|row| row.0).chain(ALWAYS.iter().map(|row| row.0)).collect();
    let keys = job_keys();
    let own = keys.iter().filter(|entry| {
        let is_value = entry.key.keys().is_empty();
        is_value && !entry.path.starts_with("deepspeed.") && matches!(entry.status, Status::Honored)
    });
    let own: Vec<_> = own.map(|entry| entry.path.as_str()).collect();
    for path in &own {
        assert!(known.contains(path), "{path} is in no table: when does it have no effect?");
    }
    for path in known {
        assert!(own.contains(&path), "{path} is not a key");
    }
}

#[test]
fn an_initialization_that_pretrained_weights_replace_is_reported() {
    let with = |kind: &str, pretrained: &str| {
        findings(&format!(
            r#"{{"model": {{"pretrained": {pretrained}, "config": {{"initializer_range": 0.1}}}}, "data": {{"kind": "{kind}"}}}}"#
        ))
    };
    let expected = "warning: model.config.initializer_range: has no effect: all weights come from model.pretrained";
    let all = with("text", r#""folder""#);
    assert!(all.contains(expected), "{all}");
    for all in [with("classification", r#""folder""#), with("text", "null")] {
        assert!(!all.contains("initializer_range"), "{all}");
    }
}

#[test]
fn a_default_without_effect_is_a_note_and_another_value_a_warning() {
    for (sections, expected) in [
        (r#"{"data": {"join": "end_of_text"}}"#, "note: data.join "),
        (r#"{"data": {"join": "nothing"}}"#, "warning: data.join "),
        (r#"{"training": {"no_decay": "biases_and_norms"}}"#, "note: training.no_decay "),
        (
            r#"{"training": {"early_stopping_threshold": 0}}"#,
            "note: training.early_stopping_threshold ",
        ),
    ] {
        let all = findings(sections);
        assert!(all.contains(expected), "{sections}: {all}");
    }
}

/// What a job uses is not reported.
#[test]
fn keys_with_an_effect_are_not_reported() {
    for sections in [
        r#"{"data": {"path": "t.txt", "text_field": "x", "join": "nothing", "vocab_size": 300, "token_cache": false}}"#,
        r#"{"data": {"kind": "classification", "path": "t.txt", "text_field": "x", "label_field": "y"}}"#,
        r#"{"data": {"drop_last": true}, "training": {"epochs": 1, "max_steps": 2, "ranks": 2, "collective_timeout": 9}}"#,
        r#"{"data": {"splits": {"train": "90%", "eval": "10%"}}, "training": {"eval_steps": 1, "eval_max_samples": 1,
            "metric_for_best_model": "loss", "early_stopping_patience": 1, "early_stopping_threshold": 0.1}}"#,
        r#"{"training": {"learning_rate": 0.1, "warmup_steps": 0, "no_decay": "nothing"}, "deepspeed": {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}}"#,
        r#"{"training": {"backend": "cuda", "float32_matmul_precision": "high"}}"#,
        r#"{"training": {"param_groups": [{"params": "wte", "weight_decay": 0.1}], "no_decay": "nothing"}}"#,
        r#"{"training": {"report_to": "wandb"}, "deepspeed": {"wandb": {"project": "x", "enabled": false}}}"#,
        r#"{"training": {"micro_batch_size": 3}, "deepspeed": {"train_micro_batch_size_per_gpu": "auto"}}"#,
    ] {
        let all = findings(sections);
        assert!(!all.contains("has no effect"), "{sections}: {all}");
        assert!(!all.contains("error"), "{sections}: {all}");
    }
}

/// Keys of the DeepSpeed section that other keys of the section switch off.
#[test]
fn keys_of_the_deepspeed_section_without_effect_are_reported() {
    let cycle = r#""optimizer": {"type": "AdamW"}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1,
        "cycle_max_lr": 0.2, "#;
    for (deepspeed, expected) in [
        (
            r#""prescale_gradients": true, "gradient_allreduce_op": "sum""#.to_owned(),
            "warning: deepspeed.prescale_gradients (line 1",
        ),
        (
            r#""gradient_predivide_factor": 8, "prescale_gradients": true"#.to_owned(),
            "8 has no effect: only gradient_allreduce_op \"mean\"",
        ),
        (
            r#""fp16": {"enabled": true, "loss_scale": 128, "hysteresis": 2}"#.to_owned(),
            "has no effect: loss_scale 128 never changes",
        ),
        (format!("{cycle} \"decay_lr_rate\": 0.5}}}}"), "0.5 has no effect: decay_step_size is 0"),
        (
            format!("{cycle} \"cycle_momentum\": false, \"cycle_min_mom\": 0.5}}}}"),
            "0.5 has no effect: the momentum does not change",
        ),
        (
            r#""zero_optimization": {"stage": 1, "stage3_max_live_parameters": 5}"#.to_owned(),
            "5 has no effect at stage 1",
        ),
        (r#""dataloader_drop_last": true"#.to_owned(), "training ends after training.max_steps"),
        (
            r#""pipeline": {"partition": "uniform"}"#.to_owned(),
            "\"uniform\" has no effect: there is one pipeline stage",
        ),
    ] {
        let sections =
            format!(r#"{{"training": {{"max_steps": 9}}, "deepspeed": {{{deepspeed}}}}}"#);
        let all = findings(&sections);
        assert!(all.contains(expected), "{deepspeed}: {all}");
    }
}

/// Keys in a section that `enabled` turns off: one rule for all sections.
#[test]
fn keys_in_a_disabled_section_are_reported() {
    for (deepspeed, expected) in [
        (
            r#""fp16": {"loss_scale": 128}"#,
            "warning: deepspeed.fp16.loss_scale (line 1, column 71): has no effect: fp16.enabled is false by \
             default; set fp16.enabled to true, or remove it\n",
        ),
        (
            r#""fp16": {"enabled": false, "loss_scale": 128}"#,
            "note: deepspeed.fp16.loss_scale (line 1, column 87): has no effect: fp16.enabled is false\n",
        ),
        (r#""fp16": {"enabled": "auto", "auto_cast": true}"#, "fp16.enabled is false\n"),
        (r#""tensorboard": {"output_path": "x"}"#, "tensorboard.enabled is false by default"),
        (r#""csv_monitor": {"enabled": false, "job_name": "x"}"#, "csv_monitor.enabled is false"),
        (r#""flops_profiler": {"top_modules": 3}"#, "flops_profiler.enabled is false by default"),
        (
            r#""torch_autocast": {"dtype": "bfloat16"}"#,
            "torch_autocast.enabled is false by default",
        ),
        (r#""profiling": {"profile_steps": [1, 2]}"#, "profiling.enabled is false by default"),
        (
            r#""wandb": {"project": "x"}"#,
            "wandb.enabled is false by default; set wandb.enabled to true, or remove it\n",
        ),
        (
            r#""data_efficiency": {"data_sampling": {"dynamic_batching": {"max_tokens": 8}}}"#,
            "data_efficiency.enabled is false by default",
        ),
    ] {
        let all = findings(&format!(r#"{{"deepspeed": {{{deepspeed}}}}}"#));
        assert_eq!(all.matches("has no effect: ").count(), 1, "{deepspeed}: {all}");
        assert!(all.contains(expected), "{deepspeed}: {all}");
    }
    for silent in [
        r#""fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}"#,
        r#""fp16": {"loss_scale": "auto"}, "tensorboard": {}, "csv_monitor": null"#,
        r#""fp16": {"enabled": true, "loss_scale": 128}"#,
        // Sections without any effect are noted as such.
        r#""compile": {"backend": "x"}"#,
    ] {
        let all = findings(&format!(r#"{{"deepspeed": {{{silent}}}}}"#));
        assert!(!all.contains("has no effect"), "{silent}: {all}");
    }
}

/// The learning rate of the optimizer is reported where a schedule sets another.
#[test]
fn a_rate_that_the_schedule_replaces_is_reported() {
    let with = |schedule: &str| {
        findings(&format!(
            r#"{{"deepspeed": {{"optimizer": {{"type": "AdamW", "params": {{"lr": 2e-4}}}}, "scheduler": {schedule}}}}}"#
        ))
    };
    // As in DeepSpeed, the peak of WarmupDecayLR is 0.001 unless it is given.
    let decay = with(r#"{"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}"#);
    let expected = "0.0002 has no effect: the schedule sets the learning rate, 0.001 at its peak; set \
                    scheduler.params.warmup_max_lr to \"auto\"";
    assert!(decay.contains(expected), "{decay}");
    // transformers' learning rate for "auto" is not the peak either.
    let auto = findings(
        r#"{"deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}}}"#,
    );
    assert!(auto.contains("5e-5 has no effect") && auto.contains("0.001 at its peak"), "{auto}");
    for used in [
        r#"{"type": "WarmupLR", "params": {}}"#,
        r#"{"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}}"#,
        r#"{"type": "WarmupDecayLR", "params": {"total_num_steps": 2000, "warmup_max_lr": "auto"}}"#,
        r#"{"type": "WarmupCosineLR", "params": {"total_num_steps": 2000}}"#,
    ] {
        assert!(!with(used).contains("has no effect"), "{used}");
    }
}
