//! Tests of the texts that the model generates after evaluations, and of what evaluations say about
//! tokens.

use std::fs;
#[cfg(unix)]
use std::io::{BufRead, BufReader};
use std::path::Path;
#[cfg(unix)]
use std::process::Stdio;

use serde_json::{Value, json};

use crate::chat::read;
use crate::job::{Job, STAGES, Trained, golden};
use crate::program::deepburn;
#[cfg(unix)]
use crate::program::{finetune_command, terminate};
use crate::resume::{assert_same, resume};

/// Returns a job on conversations: 6 steps of two, and evaluations on four others.
fn job_on_chats(golden: &Path) -> Job {
    let job = Job::tiny();
    let rows = fs::read_to_string(golden.join("sft/data/messages.jsonl")).unwrap();
    let lines: Vec<&str> = rows.lines().collect();
    fs::write(job.folder().join("train.jsonl"), lines[..8].join("\n")).unwrap();
    fs::write(job.folder().join("eval.jsonl"), lines[8..].join("\n")).unwrap();
    job.with("model.pretrained", json!(golden.join("models/qwen2")))
        .with(
            "data",
            json!({"kind": "chat", "splits": {"train": "train.jsonl", "eval": "eval.jsonl"}}),
        )
        .with("training.max_steps", 6)
        .with("training.eval_steps", 3)
        .with("deepspeed.train_micro_batch_size_per_gpu", 2)
        .with("deepspeed.gradient_accumulation_steps", 1)
        .sharded(0, 1)
}

fn with_texts(job: Job) -> Job {
    job.with("training.sample_prompts", json!(["Line 3?"]))
        .with("training.sample_rows", 2)
        .with("training.sample_max_new_tokens", 12)
}

/// Returns the rows of `generated.jsonl`.
fn generated(job: &Job) -> Vec<Value> {
    let text = fs::read_to_string(job.folder().join("output/generated.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn what_the_model_says_is_recorded_after_each_evaluation() {
    let Some(golden) = golden("llm") else { return };
    let plain = job_on_chats(&golden).train();
    let job = with_texts(job_on_chats(&golden));
    let ending = job.run().succeeded();
    // Training is the same with and without texts.
    assert_same(&Trained::read(&job.folder().join("output")), &plain, "with texts");
    let texts = generated(&job);
    let steps: Vec<_> = texts.iter().map(|text| text["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [3, 3, 3, 6, 6, 6]);
    assert_eq!(texts[0]["prompt"], "Line 3?");
    assert!(texts[0].get("expected").is_none(), "{}", texts[0]);
    let row: Value = serde_json::from_str(
        fs::read_to_string(job.folder().join("eval.jsonl")).unwrap().lines().next().unwrap(),
    )
    .unwrap();
    let messages = row["messages"].as_array().unwrap();
    let answer = messages.iter().find(|message| message["role"] == "assistant").unwrap();
    assert_eq!(texts[1]["expected"], answer["content"]);
    let question = messages.iter().find(|message| message["role"] == "user").unwrap();
    assert!(texts[1]["prompt"].as_str().unwrap().contains(question["content"].as_str().unwrap()));
    assert!(ending.stderr.contains("step 6: generated text 3: "), "{}", ending.stderr);
    let report = fs::read_to_string(job.folder().join("output/report.html")).unwrap();
    assert!(report.contains("Generated text 3") && report.contains("Step 6"));
    // The trained model says the same.
    let said = deepburn(
        job.folder(),
        &[
            "generate",
            "--model",
            "output/model",
            "--chat",
            "--prompt",
            "Line 3?",
            "--greedy",
            "--max-new-tokens",
            "12",
        ],
    );
    assert_eq!(said.succeeded().stdout.trim_end_matches('\n'), texts[3]["text"].as_str().unwrap());
}

#[test]
fn stages_ranks_and_resumed_runs_say_the_same() {
    let Some(golden) = golden("llm") else { return };
    let run = |stage, ranks| {
        let job = with_texts(job_on_chats(&golden)).sharded(stage, ranks);
        let job = job.with("deepspeed.train_micro_batch_size_per_gpu", 1);
        job.run().succeeded();
        generated(&job)
    };
    let expected = run(0, 2);
    for stage in &STAGES[1..] {
        assert_eq!(run(*stage, 2), expected, "stage {stage}");
    }
    let job = || with_texts(job_on_chats(&golden)).with("training.save_steps", 2);
    let whole = job();
    whole.run().succeeded();
    // The texts of step 6 are of an earlier end and have to be written again.
    let parts = job();
    parts.run().succeeded();
    resume(&parts, &["step-00000004"]).succeeded();
    assert_eq!(generated(&parts), generated(&whole));
    // A new run without texts leaves none of an earlier run.
    fs::remove_dir_all(parts.folder().join("output/checkpoints")).unwrap();
    let again = parts.with("training.sample_prompts", Value::Null).with("training.sample_rows", 0);
    again.run().succeeded();
    assert!(!again.folder().join("output/generated.jsonl").exists());
}

#[test]
fn adapters_pairs_and_plain_text_have_prompts_too() {
    let Some(golden) = golden("llm") else { return };
    let job = with_texts(job_on_chats(&golden)).with("model.lora", json!({"r": 2})).sharded(3, 2);
    job.with("deepspeed.train_micro_batch_size_per_gpu", 1).run().succeeded();
    let job = Job::tiny();
    let pairs = golden.join("sft/data/preference_chat.jsonl");
    let job = job
        .with("model.pretrained", json!(golden.join("models/qwen3")))
        .with(
            "data",
            json!({"kind": "preference", "path": pairs, "splits": {"train": "50%", "eval": "50%"}}),
        )
        .with("deepspeed.train_micro_batch_size_per_gpu", 1);
    let job = with_texts(job);
    job.run().succeeded();
    assert_eq!(generated(&job).len(), 3);
    let text = Job::tiny();
    fs::write(text.folder().join("text.txt"), "The quick brown fox jumps. ".repeat(400)).unwrap();
    let text = text
        .with("model.pretrained", json!(golden.join("models/llama3_tied")))
        .with(
            "data",
            json!({
                "path": "text.txt", "sequence_length": 16, "join": "nothing",
                "splits": {"train": "90%", "eval": "10%"},
            }),
        )
        .with("training.sample_prompts", json!("The quick"))
        .with("training.sample_max_new_tokens", 5);
    text.run().succeeded();
    assert_eq!(generated(&text).len(), 1);
    text.with("training.sample_rows", 1).run().failed(2, &["training.sample_rows", "has prompts"]);
}

#[test]
fn prompts_that_cannot_be_continued_are_refused() {
    let Some(golden) = golden("llm") else { return };
    for (key, value, parts) in [
        (
            "training.sample_prompts",
            json!(["ok", " "]),
            &["training.sample_prompts", "without text"],
        ),
        (
            "training.sample_prompts",
            json!("a ".repeat(600)),
            &["training.sample_prompts", "shorten"],
        ),
        ("training.sample_max_new_tokens", json!(4000), &["training.sample_", "fewer tokens"]),
    ] {
        let parts = parts.map(|part| part.replace("shorten", "change the prompt"));
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        with_texts(job_on_chats(&golden)).with(key, value).run().failed(2, &parts);
    }
    let job = with_texts(job_on_chats(&golden)).with("training.sample_max_new_tokens", 4000);
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    deepburn(job.folder(), &["show-data", "--config", "job.json"]).succeeded();
    // Without prompts of the job, the data's do not fit.
    let job = with_texts(job_on_chats(&golden)).with("training.sample_prompts", Value::Null);
    let job = job.with("training.sample_max_new_tokens", 4000);
    job.run().failed(2, &["training.sample_rows", "no sample of the eval split has a prompt"]);
}

#[test]
fn schedules_of_batches_and_lengths_say_what_chats_have_instead() {
    let Some(golden) = golden("llm") else { return };
    let dynamic = json!({"enabled": true, "max_tokens": 1024});
    let curriculum = json!({
        "enabled": true, "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 8},
    });
    for (key, value, parts) in [
        (
            "deepspeed.data_efficiency",
            json!({"enabled": true, "data_sampling": {"enabled": true, "dynamic_batching": dynamic}}),
            ["dynamic_batching.enabled", "data.packing"],
        ),
        ("deepspeed.curriculum_learning", curriculum, ["cut off the answers", "data.shuffle"]),
        (
            "training.batch_size_schedule",
            json!({"from_step": [3], "train_batch_size": [4]}),
            ["training.batch_size_schedule", "gradient_accumulation_steps"],
        ),
    ] {
        job_on_chats(&golden).with(key, value).run().failed(2, &parts);
    }
}

/// TRL logs the accuracy of a batch before its update. The sixth batch has the last two
/// conversations, the tenth has the seventh and the eighth.
#[test]
fn the_accuracy_of_tokens_is_trls() {
    let Some(golden) = golden("llm") else { return };
    let log = &read(&golden.join("sft/traces/messages.json"))["log"];
    let rows = fs::read_to_string(golden.join("sft/data/messages.jsonl")).unwrap();
    let lines: Vec<&str> = rows.lines().collect();
    for (eval_steps, batch, lines) in [(5, 5, &lines[10..12]), (9, 9, &lines[6..8])] {
        let job = Job::tiny();
        fs::write(job.folder().join("eval.jsonl"), lines.join("\n")).unwrap();
        let trained = job
            .with("model.pretrained", json!(golden.join("models/qwen2")))
            .with(
                "data",
                json!({
                    "kind": "chat", "shuffle": false,
                    "splits": {"train": golden.join("sft/data/messages.jsonl"), "eval": "eval.jsonl"},
                }),
            )
            .with("training.max_steps", 10)
            .with("training.eval_steps", eval_steps)
            .with("training.lr_scheduler_type", "linear")
            .with("deepspeed.train_micro_batch_size_per_gpu", 2)
            .with("deepspeed.gradient_accumulation_steps", 1)
            .with("deepspeed.gradient_clipping", 1.0)
            .with("deepspeed.optimizer.params", json!({ "lr": 2e-3, "weight_decay": 0.0 }))
            .sharded(0, 1)
            .train();
        let row = &trained.evaluations[0];
        let expected = log[batch]["mean_token_accuracy"].as_f64().unwrap();
        assert!(expected > 0.1);
        // TRL's number is a ratio of counts in float32.
        assert!((row.token_accuracy.unwrap() - expected).abs() < 1e-6, "{row:?} {expected}");
        assert!((row.eval_loss - log[batch]["loss"].as_f64().unwrap()).abs() < 1e-4, "{row:?}");
    }
}

#[test]
fn invalid_rows_are_left_out_where_that_is_asked_for() {
    let Some(golden) = golden("llm") else { return };
    let expected = job_on_chats(&golden).train();
    let job = job_on_chats(&golden);
    let rows = fs::read_to_string(job.folder().join("train.jsonl")).unwrap();
    let mut lines: Vec<&str> = rows.lines().collect();
    lines.insert(3, r#"{"messages": [{"role": "user", "content": 7}]}"#);
    lines.insert(0, r#"{"messages": ["#);
    fs::write(job.folder().join("train.jsonl"), lines.join("\n")).unwrap();
    job.run().failed(2, &["train.jsonl", "line 1"]);
    let job = job.with("data.skip_invalid_rows", true);
    let ending = job.run().succeeded();
    for part in ["skipped invalid rows", "line 1", "count=2"] {
        assert!(ending.stderr.contains(part), "{part}: {}", ending.stderr);
    }
    assert_same(&Trained::read(&job.folder().join("output")), &expected, "without invalid rows");
    // If no row is valid, the reason is more than the count.
    let job = job.with("data.messages_field", "chat");
    job.run().failed(2, &["all of its 10 rows are invalid", "the first one is", "line 1"]);
}

/// JSON has no NaN, and Python's `json` writes it.
#[test]
fn columns_that_are_not_read_may_have_any_values() {
    let Some(golden) = golden("llm") else { return };
    let expected = with_texts(job_on_chats(&golden)).train();
    let job = with_texts(job_on_chats(&golden));
    for file in ["train.jsonl", "eval.jsonl"] {
        let path = job.folder().join(file);
        let rows = fs::read_to_string(&path).unwrap();
        let more = r#", "score": NaN, "meta": {"at": [-Infinity, null]}}"#;
        let rows: Vec<_> =
            rows.lines().map(|row| format!("{}{more}", &row[..row.len() - 1])).collect();
        fs::write(path, rows.join("\n")).unwrap();
    }
    assert_same(&job.train(), &expected, "with other columns");
    // The columns that are read are still checked.
    let path = job.folder().join("train.jsonl");
    fs::write(path, r#"{"messages": NaN, "other": 1}"#).unwrap();
    job.run().failed(2, &["train.jsonl", "line 1", "messages"]);
}

/// The row of `<|im_end|>` in the embedding is set to 0.
#[test]
fn turn_tokens_that_nothing_learns_are_named() {
    let Some(golden) = golden("llm") else { return };
    let model = tempfile::tempdir().unwrap();
    for file in fs::read_dir(golden.join("models/qwen2")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), model.path().join(file.file_name())).unwrap();
    }
    let tokenizer = read(&model.path().join("tokenizer.json"));
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let end = added.iter().find(|token| token["content"] == "<|im_end|>").unwrap();
    let end = end["id"].as_u64().unwrap() as usize;
    let weights = model.path().join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let length = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..length]).unwrap();
    let embedding = &header["model.embed_tokens.weight"];
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let [start, stop] = [0, 1].map(|at| length + number(&embedding["data_offsets"][at]));
    let row = (stop - start) / number(&embedding["shape"][0]);
    bytes[start + end * row..start + (end + 1) * row].fill(0);
    fs::write(&weights, bytes).unwrap();
    let warning = format!("model.lora.trainable_token_indices to [{end}]");
    let run = |lora: Value| {
        let job = job_on_chats(&golden).with("model.pretrained", json!(model.path()));
        job.with("model.lora", lora).run().succeeded().stderr
    };
    let said = run(json!({"r": 2}));
    assert!(said.contains(&warning) && said.contains("<|im_end|>"), "{said}");
    let said = run(json!({"r": 2, "trainable_token_indices": [end]}));
    assert!(!said.contains("not learned by the base model"), "{said}");
}

/// The signal comes while the first evaluation generates the first of many texts, and again when
/// the run resumes.
#[cfg(unix)]
#[test]
fn texts_of_an_interrupted_evaluation_are_generated_when_the_run_resumes() {
    let Some(golden) = golden("llm") else { return };
    let job = || {
        let prompts: Vec<_> = (0..100).map(|line| format!("Line {line}?")).collect();
        with_texts(job_on_chats(&golden))
            .with("training.sample_prompts", prompts)
            .with("training.save_steps", 2)
            .with("training.load_best_model_at_end", true)
            .with("deepspeed.train_micro_batch_size_per_gpu", 1)
            .sharded(3, 2)
    };
    let whole = job();
    whole.run().succeeded();
    // An evaluation without a checkpoint of its own, and the last one.
    for step in [3, 6] {
        let parts = job();
        fs::write(parts.folder().join("job.json"), parts.json().to_string()).unwrap();
        for more in [&[][..], &["--resume"]] {
            let printed = stopped_while_generating(&parts, step, more);
            assert!(printed.contains("will be generated when the run resumes"), "{printed}");
        }
        resume(&parts, &[]).succeeded();
        assert_eq!(generated(&parts), generated(&whole), "step {step}");
        let report = fs::read_to_string(parts.folder().join("output/report.html")).unwrap();
        assert_eq!(report.matches("Generated text 100").count(), 1);
        let [parts, whole] =
            [&parts, &whole].map(|job| Trained::read(&job.folder().join("output")));
        assert_same(&parts, &whole, "with interruptions");
    }
}

/// Runs a job until it has evaluated the model of `step`, and sends a signal while it generates
/// texts. Returns what the program printed.
#[cfg(unix)]
fn stopped_while_generating(job: &Job, step: u64, more: &[&str]) -> String {
    let mut command = finetune_command(job.folder(), &[&["--config", "job.json"], more].concat());
    let mut running = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(running.stderr.take().unwrap()).lines();
    // A run that resumes generates the texts first. The others print the loss of the evaluation
    // before them.
    let begin = if more.is_empty() {
        format!("step {step}: eval loss")
    } else {
        "resuming from".to_owned()
    };
    let is_begin = |line: &String| line.contains(&begin);
    let mut printed: Vec<String> = Vec::new();
    while !printed.last().is_some_and(is_begin) {
        printed.push(lines.next().expect("it ended before its texts").unwrap());
    }
    terminate(&running);
    printed.extend(lines.map(Result::unwrap));
    assert_eq!(running.wait().unwrap().code(), Some(143), "{printed:?}");
    printed.join("\n")
}
