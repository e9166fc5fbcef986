//! Tests of conversations: `data.kind` "chat".

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use deepburn::metrics::StepRow;

use crate::job::{Job, STAGES, Trained, golden};
use crate::program::deepburn;
use crate::resume::{assert_same, resume};

/// Of a loss. Repeated in float64, such traces stay within 3e-5.
const LOSS: f64 = 1e-4;
/// Relative, of the norm of all gradients. Repeated in float64, they stay within 6e-5.
const NORM: f64 = 1e-3;

pub(crate) fn read(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

/// Returns the job of a run of TRL's `SFTTrainer`.
fn job_of_trl(golden: &Path, name: &str, trace: &Value) -> Job {
    let text = |field: &str| trace[field].as_str();
    let mut data = Map::new();
    let file = format!("sft/data/{}.jsonl", text("data").unwrap());
    data.insert("kind".into(), json!("chat"));
    data.insert("path".into(), json!(golden.join(file)));
    data.insert("shuffle".into(), json!(false));
    if let Some(template) = text("template") {
        let file = golden.join(format!("sft/templates/{template}.jinja"));
        data.insert("chat_template".into(), json!(file));
    }
    let options = trace["options"].as_object().unwrap();
    let number =
        |name: &str, default: u64| options.get(name).and_then(Value::as_u64).unwrap_or(default);
    for (option, value) in options {
        match option.as_str() {
            // Without a limit, the default is not reached.
            "max_length" if value.is_null() => {}
            "max_length" => _ = data.insert("sequence_length".into(), value.clone()),
            // The number of samples and of padded tokens does not change a loss.
            "per_device_train_batch_size"
            | "gradient_accumulation_steps"
            | "pad_to_multiple_of" => {}
            option => _ = data.insert(option.into(), value.clone()),
        }
    }
    let rate = trace["used"]["learning_rate"].as_f64().unwrap_or(2e-3);
    let job = Job::tiny()
        .with("model.pretrained", json!(golden.join("models").join(text("model").unwrap())))
        .with("data", data)
        .with("training.max_steps", 10)
        .with("training.lr_scheduler_type", "linear")
        .with("deepspeed.train_micro_batch_size_per_gpu", number("per_device_train_batch_size", 2))
        .with("deepspeed.gradient_accumulation_steps", number("gradient_accumulation_steps", 1))
        .with("deepspeed.gradient_clipping", 1.0)
        .with("deepspeed.optimizer.params", json!({ "lr": rate, "weight_decay": 0.0 }))
        .sharded(0, 1);
    // Its samples are longer than the model's limit, which transformers does not check.
    let job = match name {
        "tools" => job.with("model.config.max_position_embeddings", 1024),
        _ => job,
    };
    match trace["lora"].is_null() {
        true => job,
        false => {
            job.with("model.adapter", json!(golden.join(format!("sft/traces/{name}_adapter_init"))))
        }
    }
}

/// Compares all steps of a run with TRL's log.
pub(crate) fn assert_near(steps: &[StepRow], expected: &[Value], what: &str) {
    assert_eq!(steps.len(), expected.len(), "{what}");
    for (row, expected) in steps.iter().zip(expected) {
        let number = |key: &str| expected[key].as_f64().unwrap();
        let what = format!("{what}, step {}: {row:?}, expected {expected}", row.step);
        assert!((row.loss - number("loss")).abs() < LOSS, "{what}");
        assert!((row.lr - number("learning_rate")).abs() < 1e-9, "{what}");
        let norm = number("grad_norm");
        assert!((row.grad_norm.unwrap() - norm).abs() < NORM * norm, "{what}");
    }
}

//= trl 1.16.0 trainer/sft_trainer.py compute_loss
#[test]
fn traces_of_trl() {
    let Some(golden) = golden("llm") else { return };
    let mut count = 0;
    for file in fs::read_dir(golden.join("sft/traces")).unwrap() {
        let file = file.unwrap().path();
        if file.is_dir() {
            continue;
        }
        let name = file.file_stem().unwrap().to_str().unwrap();
        let trace = read(&file);
        // Other losses.
        let is_other = trace["kind"] == "dpo" || !trace["options"]["loss_type"].is_null();
        // TRL trains on another template than the model's own, which prints other text.
        if is_other || name == "messages_swapped_template" {
            continue;
        }
        let job = job_of_trl(&golden, name, &trace);
        let Some(rows) = trace["log"].as_array() else {
            // TRL refuses rows of ShareGPT and templates that it does not know. The turns of both
            // can be found.
            let part =
                if name == "messages_no_markers" { "has no {% generation %}" } else { "ShareGPT" };
            job.run().failed(2, &["`assistant_only_loss` is true", part, "line 1", "\"turns\""]);
            job.with("data.assistant_only_loss", "turns").run().succeeded();
            continue;
        };
        let whole = job.train();
        assert_near(&whole.steps, rows, name);
        count += 1;
        let per_rank = job.json()["deepspeed"]["train_micro_batch_size_per_gpu"].as_u64().unwrap();
        if !per_rank.is_multiple_of(2) {
            continue;
        }
        // Two ranks have the same samples in a step. Packed rows of two ranks are in two batches
        // instead of one.
        let job = job.with("deepspeed.train_micro_batch_size_per_gpu", per_rank / 2).sharded(3, 2);
        assert_near(&job.train().steps, rows, &format!("{name} at stage 3"));
    }
    assert_eq!(count, 23);
}

/// Returns a job on the answers of twelve conversations, in steps of five samples on one rank.
fn job_on_answers(golden: &Path) -> Job {
    Job::tiny()
        .with("model.pretrained", json!(golden.join("models/qwen2")))
        .with(
            "data",
            json!({
                "kind": "chat", "path": golden.join("sft/data/messages.jsonl"),
                "assistant_only_loss": true,
            }),
        )
        .with("training.max_steps", 8)
        .with("training.save_steps", 2)
        .with("deepspeed.train_micro_batch_size_per_gpu", 5)
        .with("deepspeed.gradient_accumulation_steps", 1)
        .sharded(0, 1)
}

/// Before the value "turns", `true` meant the same.
#[test]
fn runs_on_answers_continue_with_turns() {
    let Some(golden) = golden("llm") else { return };
    let expected = job_on_answers(&golden).train();
    let parts = job_on_answers(&golden).with("training.max_steps", 4);
    parts.run().succeeded();
    let parts = parts.with("training.max_steps", 8).with("data.assistant_only_loss", "turns");
    resume(&parts, &[]).succeeded();
    assert_same(&Trained::read(&parts.folder().join("output")), &expected, "resumed");
}

#[test]
fn shown_data_says_how_answers_are_found() {
    let Some(golden) = golden("llm") else { return };
    let template = json!(golden.join("sft/templates/cpp_HuggingFaceTB-SmolLM3-3B.jinja"));
    let unmarked = job_on_answers(&golden)
        .with("data.assistant_only_loss", "turns")
        .with("data.chat_template", template);
    for (job, part) in [
        (job_on_answers(&golden), "answers     between {% generation %}"),
        (unmarked, "answers     found by rendering"),
    ] {
        fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
        let shown = deepburn(job.folder(), &["show-data", "--config", "job.json", "--rows", "1"]);
        let shown = shown.succeeded().stdout;
        assert!(shown.contains(part), "{shown}");
    }
}

/// Steps 3, 6 and so on have the last two samples of an epoch.
#[test]
fn interrupted_runs_continue_with_the_same_samples() {
    let Some(golden) = golden("llm") else { return };
    for data in [
        json!({}),
        json!({ "packing": true, "sequence_length": 96 }),
        json!({ "padding_free": true }),
    ] {
        let job = || {
            let options = data.as_object().unwrap().iter();
            options.fold(job_on_answers(&golden), |job, (key, value)| {
                job.with(&format!("data.{key}"), value.clone())
            })
        };
        let expected = job().train();
        let parts = job().with("training.max_steps", 4);
        parts.run().succeeded();
        let parts = parts.with("training.max_steps", 8);
        resume(&parts, &[]).succeeded();
        assert_same(&Trained::read(&parts.folder().join("output")), &expected, "resumed");
        // Two micro-batches on one rank, then one on each of two ranks, from the middle of an epoch
        // on.
        let size = |job: Job, accumulation: u64| {
            job.with("deepspeed.train_micro_batch_size_per_gpu", 4)
                .with("deepspeed.gradient_accumulation_steps", accumulation)
        };
        let expected = size(job(), 2).train();
        let parts = size(job(), 2).with("training.max_steps", 3);
        parts.run().succeeded();
        let parts = size(parts, 1).with("training.max_steps", 8).sharded(3, 2);
        resume(&parts, &[]).succeeded();
        let found = Trained::read(&parts.folder().join("output"));
        for (found, expected) in found.steps.iter().zip(&expected.steps) {
            assert_eq!(found.tokens, expected.tokens, "step {}", found.step);
            assert!((found.loss - expected.loss).abs() < 1e-6, "{found:?} {expected:?}");
        }
    }
}

#[test]
fn stages_agree_to_the_bit_with_a_rank_without_data() {
    let Some(golden) = golden("llm") else { return };
    // Twelve samples on three ranks: in the last step of an epoch, one rank has none.
    let run = |stage| {
        let job = job_on_answers(&golden).with("deepspeed.train_micro_batch_size_per_gpu", 2);
        job.with("data.padding_free", true).sharded(stage, 5).train()
    };
    let first = run(0);
    for stage in &STAGES[1..] {
        assert_eq!(run(*stage).numbers(), first.numbers(), "stage {stage}");
    }
}

#[test]
fn the_template_of_the_job_is_saved_and_shown() {
    let Some(golden) = golden("llm") else { return };
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}: {% generation %}{{ m.content }}<|im_end|>\
                    {% endgeneration %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}";
    let job = job_on_answers(&golden).with("data.chat_template", template);
    job.run().succeeded();
    let model = job.folder().join("output/model");
    assert_eq!(fs::read_to_string(model.join("chat_template.jinja")).unwrap(), template);
    let shown = deepburn(job.folder(), &["show-data", "--config", "job.json", "--rows", "1"]);
    let shown = shown.succeeded().stdout;
    assert!(shown.contains("<|im_start|>user: [["), "{shown}");
    assert!(shown.contains("train split: 12 samples in 12 sequences"), "{shown}");
    let arguments = ["generate", "--model", "output/model", "--chat", "--prompt", "Hello"];
    let answer = deepburn(job.folder(), &arguments).succeeded().stdout;
    assert!(!answer.contains("Hello"), "{answer}");
}

/// The template ends turns with `<|im_end|>`, which is the end token of the model, too.
#[test]
fn ends_of_turns_that_do_not_end_a_text_are_named() {
    let Some(golden) = golden("llm") else { return };
    let job = job_on_answers(&golden).with("training.max_steps", 1);
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let shown = |more: &[&str]| {
        let show = ["show-data", "--config", "job.json", "--rows", "1"];
        deepburn(job.folder(), &[&show[..], more].concat()).succeeded().stderr
    };
    let warning = "learned text ends with \"<|im_end|>\", which does not end a text of the model";
    assert!(!shown(&[]).contains(warning));
    let said = shown(&["--set", "data.eos_token=<|endoftext|>"]);
    assert!(
        said.contains(warning) && said.contains("set data.eos_token to \"<|im_end|>\""),
        "{said}"
    );
    assert!(shown(&["--set", "model.config.eos_token_id=377"]).contains(warning));
    // A special token that begins a turn does not end it.
    let open = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}";
    let open = format!("data.chat_template={open}");
    let begins =
        ["--set", "data.eos_token=<|endoftext|>", "--set", "data.assistant_only_loss=false"];
    assert!(!shown(&[&begins[..], &["--set", &open]].concat()).contains("learned text ends with"));
    let said = job.with("model.config.eos_token_id", json!([377])).run().succeeded().stderr;
    let remedy = "(only \"<|endoftext|>\"): generation would continue after an answer; add 379 to model.config.eos_token_id";
    assert!(said.contains(warning) && said.contains(remedy), "{said}");
}

#[test]
fn variables_of_templates_beside_texts_are_named() {
    let Some(golden) = golden("llm") else { return };
    let job = job_on_answers(&golden);
    let row = r#"{"text": "a b c", "chat_template_kwargs": {"enable_thinking": false}}"#;
    fs::write(job.folder().join("rows.jsonl"), row).unwrap();
    let texts = job
        .with("data", json!({ "kind": "chat", "path": "rows.jsonl" }))
        .with("training.max_steps", 1);
    let printed = texts.run().succeeded().stderr;
    assert!(printed.contains("`chat_template_kwargs` has no effect on rows of texts"), "{printed}");
}

#[test]
fn rows_and_settings_that_cannot_be_trained_are_refused() {
    let Some(golden) = golden("llm") else { return };
    let job = job_on_answers(&golden);
    let on = |rows: &str| {
        fs::write(job.folder().join("rows.jsonl"), rows).unwrap();
        job_on_answers(&golden).with("data.path", json!(job.folder().join("rows.jsonl")))
    };
    let user = r#"{"role": "user", "content": "a"}"#;
    for (rows, part) in [
        (r#"{"messages": []}"#.to_owned(), "line 1"),
        (format!(r#"{{"messages": [{user}]}}"#), "no message of the assistant"),
        (r#"{"messages": [{"role": "user", "content": 1}]}"#.to_owned(), "content"),
        (r#"{"other": "a"}"#.to_owned(), "the columns `other` are of no known format"),
        (
            r#"{"messages": [{"role": "user", "role": "assistant"}]}"#.to_owned(),
            "two fields `role`",
        ),
        (r#"{"messages": "#.to_owned(), "line 1"),
        (r#"{"messages": null}"#.to_owned(), "`messages` is null"),
        (String::new(), "one row of data"),
    ] {
        on(&rows).run().failed(2, &[part, "rows.jsonl"]);
    }
    for (key, value, part) in [
        ("data.pad_token", json!("<none>"), "is not a token of the tokenizer"),
        ("data.chat_template", json!("{% for %}"), "data.chat_template"),
        ("data.sequence_length", json!(2), "raise data.sequence_length"),
        (
            "training.batch_size_schedule",
            json!({ "from_step": [2], "train_batch_size": [10] }),
            "training.batch_size_schedule",
        ),
    ] {
        job_on_answers(&golden).with(key, value).run().failed(2, &[part]);
    }
    let short = job_on_answers(&golden).with("model.config.max_position_embeddings", 2);
    let error = short.run().failed(2, &["none of 12 samples", "a model with more positions"]);
    assert!(!error.stderr.contains("raise data.sequence_length"), "{}", error.stderr);
}

/// The row is not at fault if the template is.
#[test]
fn errors_of_templates_have_their_own_remedy() {
    let Some(golden) = golden("llm") else { return };
    for (template, parts) in [
        ("{{ messages + 3 }}", ["line 1: the chat template failed", "correct the template"]),
        ("{{ raise_exception('no') }}", ["rejects the messages", "use another template"]),
    ] {
        let job = job_on_answers(&golden)
            .with("data.assistant_only_loss", "turns")
            .with("data.chat_template", template);
        let error = job.run().failed(2, &parts);
        assert!(!error.stderr.contains("; correct or remove the row\n"), "{}", error.stderr);
    }
}

#[test]
fn a_row_of_two_forms_is_a_warning() {
    let Some(golden) = golden("llm") else { return };
    let rows = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "prompt": "a", "completion": "b"}"#;
    let job = job_on_answers(&golden);
    fs::write(job.folder().join("rows.json"), format!("[{rows}, {rows}]")).unwrap();
    let job = job.with("data.path", "rows.json").with("training.max_steps", 1);
    let warning = "2 rows of the data: `messages` is read, and `prompt` and `completion` are not";
    let log = job.run().succeeded().stderr;
    assert!(log.contains(warning) && log.contains("the first one is `rows.json` row 1"), "{log}");
    let job = job.with("training.output_dir", "named").with("data.messages_field", "messages");
    let log = job.run().succeeded().stderr;
    assert!(!log.contains("`messages` is read"), "{log}");
}
