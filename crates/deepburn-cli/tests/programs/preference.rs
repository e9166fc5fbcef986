//! Tests of preference optimization: `data.kind` "preference".

use std::fs;
use std::path::Path;

use deepburn::metrics::StepRow;
use serde_json::{Value, json};

use crate::chat::{assert_near, read};
use crate::job::{Job, STAGES, Trained, data, golden};
use crate::program::{deepburn, finetune};
use crate::resume::{assert_same, resume};

/// Of a reward. The log-probabilities are sums over up to 20 tokens, of which each has the error of
/// a loss.
const REWARD: f64 = 1e-4;

/// Returns the job of a run of TRL's `DPOTrainer`.
fn job_of_trl(golden: &Path, trace: &Value) -> Job {
    let text = |field: &str| trace[field].as_str().unwrap();
    let options = trace["options"].as_object().unwrap();
    let size = options.get("per_device_train_batch_size").and_then(Value::as_u64).unwrap_or(2);
    let job = Job::tiny()
        .with("model.pretrained", json!(golden.join("models").join(text("model"))))
        .with(
            "data",
            json!({
                "kind": "preference", "shuffle": false,
                "path": golden.join(format!("sft/data/{}.jsonl", text("data"))),
            }),
        )
        .with("training.max_steps", 5)
        .with("training.lr_scheduler_type", "linear")
        .with("deepspeed.train_micro_batch_size_per_gpu", size)
        .with("deepspeed.gradient_accumulation_steps", 1)
        .with("deepspeed.gradient_clipping", 1.0)
        .with("deepspeed.optimizer.params", json!({ "lr": 2e-3, "weight_decay": 0.0 }))
        .sharded(0, 1);
    options.iter().fold(job, |job, (key, value)| match (key.as_str(), value) {
        ("per_device_train_batch_size", _) => job,
        (_, Value::Array(only)) => job.with(&format!("training.dpo.{key}"), only[0].clone()),
        _ => job.with(&format!("training.dpo.{key}"), value.clone()),
    })
}

/// Compares the rewards of all steps with TRL's log.
fn assert_rewards_near(steps: &[StepRow], expected: &[Value], what: &str) {
    for (row, expected) in steps.iter().zip(expected) {
        for (found, name) in [
            (row.rewards_chosen, "rewards/chosen"),
            (row.rewards_rejected, "rewards/rejected"),
            (row.rewards_margins, "rewards/margins"),
            (row.rewards_accuracies, "rewards/accuracies"),
        ] {
            let difference = found.unwrap() - expected[name].as_f64().unwrap();
            assert!(difference.abs() < REWARD, "{what}, {name}: {row:?}, expected {expected}");
        }
    }
}

//= trl 1.16.0 trainer/dpo_trainer.py sigmoid
//= trl 1.16.0 trainer/dpo_trainer.py ipo
#[test]
fn traces_of_trl() {
    let Some(golden) = golden("llm") else { return };
    for name in ["dpo", "dpo_chat", "dpo_ipo", "dpo_smoothed"] {
        let trace = read(&golden.join(format!("sft/traces/{name}.json")));
        let rows = trace["log"].as_array().unwrap();
        let job = job_of_trl(&golden, &trace);
        let whole = job.train();
        assert_near(&whole.steps, rows, name);
        assert_rewards_near(&whole.steps, rows, name);
        let size = job.json()["deepspeed"]["train_micro_batch_size_per_gpu"].as_u64().unwrap();
        if size.is_multiple_of(2) {
            let job = job.with("deepspeed.train_micro_batch_size_per_gpu", size / 2).sharded(3, 2);
            let steps = job.train().steps;
            assert_near(&steps, rows, &format!("{name} at stage 3"));
            assert_rewards_near(&steps, rows, &format!("{name} at stage 3"));
        }
    }
}

/// The reference of an adapter that is trained further is a copy of it.
#[test]
fn a_trace_of_trl_with_an_adapter() {
    let Some(golden) = golden("llm") else { return };
    let trace = read(&data("dpo_lora.json"));
    let rows = trace["log"].as_array().unwrap();
    let job = job_of_trl(&golden, &trace)
        .with("model.adapter", json!(golden.join("sft/traces/lora_all_linear_adapter_init")))
        .with("deepspeed.optimizer.params.lr", 2e-2);
    let sharded = job_of_trl(&golden, &trace)
        .with("model.adapter", json!(golden.join("sft/traces/lora_all_linear_adapter_init")))
        .with("deepspeed.optimizer.params.lr", 2e-2)
        .with("deepspeed.train_micro_batch_size_per_gpu", 1)
        .sharded(3, 2);
    for (job, what) in [(job, "whole"), (sharded, "sharded")] {
        let steps = job.train().steps;
        assert_near(&steps, rows, what);
        assert_rewards_near(&steps, rows, what);
    }
}

/// Returns a job on twelve pairs, in steps of four pairs on one rank.
fn job_on_pairs(golden: &Path) -> Job {
    Job::tiny()
        .with("model.pretrained", json!(golden.join("models/qwen2")))
        .with(
            "data",
            json!({ "kind": "preference", "path": golden.join("sft/data/preference_chat.jsonl") }),
        )
        .with("training.max_steps", 6)
        .with("training.save_steps", 2)
        .with("deepspeed.train_micro_batch_size_per_gpu", 4)
        .with("deepspeed.gradient_accumulation_steps", 1)
        .sharded(0, 1)
}

//= trl 1.16.0 trainer/dpo_trainer.py sigmoid
#[test]
fn the_first_step_starts_at_the_reference() {
    let Some(golden) = golden("llm") else { return };
    let lora = json!({ "r": 4, "target_modules": "all-linear", "lora_dropout": 0.5 });
    let half = |job: Job| job.with("deepspeed.bf16.enabled", true);
    for job in [
        job_on_pairs(&golden),
        half(job_on_pairs(&golden)),
        job_on_pairs(&golden).with("model.lora", lora.clone()),
        half(job_on_pairs(&golden).with("model.lora", lora)),
    ] {
        let steps = job.sharded(3, 2).train().steps;
        let first = &steps[0];
        assert!((first.loss - 2f64.ln()).abs() < 1e-6, "{first:?}");
        // The model is compared with itself, by the same ops.
        assert_eq!(first.rewards_margins, Some(0.0), "{first:?}");
        assert!(steps.last().unwrap().loss < first.loss, "{steps:?}");
    }
}

#[test]
fn settings_of_an_adapter_without_an_effect_are_named() {
    let Some(golden) = golden("llm") else { return };
    let lora = json!({ "r": 4, "lora_dropout": 0.5, "loftq_config": { "loftq_bits": 4 } });
    let job = job_on_pairs(&golden).with("model.lora", lora).with("training.max_steps", 1);
    let said = job.run().succeeded().stderr;
    for name in ["lora_dropout", "loftq_config"] {
        assert!(said.contains(&format!("model.lora.{name} has no effect: ")), "{said}");
    }
}

#[test]
fn stages_agree_to_the_bit_with_a_rank_without_pairs() {
    let Some(golden) = golden("llm") else { return };
    // Twelve pairs on five ranks: in the last step of an epoch, some ranks have none. Each row of a
    // batch reads the head, which no rank keeps here.
    for pairs in [1, 2] {
        let run = |stage| {
            let zero = json!({ "stage": stage, "stage3_param_persistence_threshold": 0 });
            let job = job_on_pairs(&golden).with("deepspeed.train_micro_batch_size_per_gpu", pairs);
            job.sharded(stage, 5).with("deepspeed.zero_optimization", zero).train()
        };
        let first = run(0);
        assert!(first.steps.iter().all(|row| row.rewards_chosen.is_some()));
        for stage in &STAGES[1..] {
            assert_eq!(run(*stage).numbers(), first.numbers(), "stage {stage}, {pairs} pairs");
        }
    }
}

#[test]
fn a_run_that_resumes_has_the_same_reference() {
    let Some(golden) = golden("llm") else { return };
    let lora = json!({ "r": 4, "target_modules": "all-linear" });
    for lora in [Value::Null, lora.clone()] {
        let job = || job_on_pairs(&golden).with("model.lora", lora.clone());
        let expected = job().train();
        let parts = job().with("training.max_steps", 4);
        parts.run().succeeded();
        let parts = parts.with("training.max_steps", 6);
        resume(&parts, &[]).succeeded();
        assert_same(&Trained::read(&parts.folder().join("output")), &expected, "resumed");
    }
    // A reference with other weights.
    let parts = job_on_pairs(&golden).with("training.max_steps", 2);
    parts.run().succeeded();
    // A run must not replace its base, so it is moved.
    let other = parts.folder().join("other");
    fs::rename(parts.folder().join("output/model"), &other).unwrap();
    let other = json!(other);
    let parts = parts.with("training.max_steps", 4).with("model.pretrained", other);
    resume(&parts, &[]).failed(2, &["--resume", "another reference"]);
    // Other ranks, and a stage that shards the reference.
    let job = || job_on_pairs(&golden).with("model.lora", lora.clone());
    let expected = job().train();
    let parts = job().with("training.max_steps", 2);
    parts.run().succeeded();
    let parts = parts
        .with("training.max_steps", 6)
        .with("deepspeed.train_micro_batch_size_per_gpu", 2)
        .sharded(3, 2);
    resume(&parts, &[]).succeeded();
    let found = Trained::read(&parts.folder().join("output"));
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        assert!((found.loss - expected.loss).abs() < 1e-5, "{found:?} {expected:?}");
        let (left, right) = (found.rewards_margins.unwrap(), expected.rewards_margins.unwrap());
        assert!((left - right).abs() < REWARD, "{found:?} {expected:?}");
    }
}

#[test]
fn evaluations_have_rewards() {
    let Some(golden) = golden("llm") else { return };
    let file = golden.join("sft/data/preference_chat.jsonl");
    let job = job_on_pairs(&golden)
        .with("data.splits", json!({ "train": file, "eval": file, "test": file }))
        .with("data.path", Value::Null)
        .with("training.eval_steps", 3)
        .sharded(3, 2);
    let trained = job.train();
    let last = trained.evaluations.last().unwrap();
    assert!(last.eval_loss < 2f64.ln(), "{last:?}");
    assert!(last.rewards_margins.unwrap() > 0.0, "{last:?}");
    let test = read(&job.folder().join("output/test.json"));
    assert_eq!(test["test_loss"].as_f64(), Some(last.eval_loss));
    assert_eq!(test["test_rewards/margins"].as_f64(), last.rewards_margins);
    assert_eq!(test["targets"], 12);
    assert!(test.get("perplexity").is_none(), "{test}");
}

#[test]
fn pairs_are_shown() {
    let Some(golden) = golden("llm") else { return };
    let job = job_on_pairs(&golden);
    job.run().succeeded();
    let shown = deepburn(job.folder(), &["show-data", "--config", "job.json", "--rows", "1"]);
    let shown = shown.succeeded().stdout;
    assert!(shown.contains("[[Now is the winter of our discontent<|im_end|>"), "{shown}");
    assert!(shown.contains("[[Cowards die many tim<|im_end|>"), "{shown}");
    assert!(shown.contains("train split: 12 of 12 pairs"), "{shown}");
}

#[test]
fn rows_and_settings_that_have_no_preference_are_refused() {
    let Some(golden) = golden("llm") else { return };
    let job = job_on_pairs(&golden);
    let rows = job.folder().join("rows.jsonl");
    for (row, part) in [
        (r#"{"messages": []}"#, "has no column `chosen`"),
        (r#"{"prompt": "a", "chosen": "b"}"#, "has no column `rejected`"),
        (r#"{"prompt": "a", "chosen": "b", "rejected": 1}"#, "rejected"),
        (r#"{"prompt": "", "chosen": "b", "rejected": "c"}"#, "`prompt` has no token"),
    ] {
        fs::write(&rows, row).unwrap();
        let job = job_on_pairs(&golden).with("data.path", json!(rows));
        job.run().failed(2, &[part, "rows.jsonl"]);
    }
    for (key, value, part) in [
        ("data.kind", json!("chat"), "training.objective"),
        ("data.sequence_length", json!(2), "data.sequence_length"),
        ("model.lora", json!({ "init_lora_weights": false }), "init_lora_weights"),
        (
            "training.batch_size_schedule",
            json!({ "from_step": [2], "train_batch_size": [8] }),
            "training.batch_size_schedule",
        ),
    ] {
        let job = job_on_pairs(&golden).with("training.objective", "dpo").with(key, value);
        job.run().failed(2, &[part]);
    }
    let job = job_on_pairs(&golden).with("training.max_steps", 1);
    job.run().succeeded();
    let arguments = ["--config", "job.json", "--evaluate", "--output-dir", "other"];
    let evaluated = finetune(job.folder(), &arguments);
    evaluated.failed(2, &["--evaluate", "preference"]);
}
