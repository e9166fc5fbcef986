//! What `show-data` says about rows that train, but perhaps not what was meant.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::{Job, golden};
use crate::program::deepburn;

/// Returns what `show-data` prints and logs about rows on a model of the golden folder, from the
/// second look on, which reads the cache.
fn shown(golden: &Path, model: &str, rows: &[Value], data: Value) -> [String; 2] {
    let mut fields = json!({ "kind": "chat", "path": "rows.jsonl", "shuffle": false });
    fields.as_object_mut().unwrap().extend(data.as_object().unwrap().clone());
    let job = Job::tiny()
        .with("model.pretrained", json!(golden.join("models").join(model)))
        .with("data", fields)
        .with("training.max_steps", 1);
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(job.folder().join("rows.jsonl"), lines).unwrap();
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let show = || {
        let shown = deepburn(job.folder(), &["show-data", "--config", "job.json", "--rows", "1"]);
        let shown = shown.succeeded();
        [shown.stdout, shown.stderr]
    };
    let first = show();
    // Times differ.
    let notes = |[_, log]: &[String; 2]| log.matches("of the data:").count();
    let second = show();
    assert_eq!((&first[0], notes(&first)), (&second[0], notes(&second)));
    second
}

fn call(arguments: Value) -> Value {
    let function = json!({ "name": "f", "arguments": arguments });
    json!({ "messages": [
        { "role": "user", "content": "q" },
        { "role": "assistant", "content": null, "tool_calls": [{ "type": "function", "function": function }] },
    ] })
}

#[test]
fn nulls_of_a_schema_are_named() {
    let Some(golden) = golden("llm") else { return };
    let rows =
        [json!({ "a": 1, "b": 2 }), json!({ "a": 1, "b": null }), json!({ "a": 1, "b": null })];
    let [_, log] = shown(&golden, "qwen2", &rows.map(call), json!({}));
    for part in [
        "2 rows of the data: `messages[].tool_calls[].function.arguments.b` is null, and has a value elsewhere",
        "write them as Parquet",
        "the first one is `rows.jsonl` line 2",
    ] {
        assert!(log.contains(part), "{log}");
    }
    // A null that only some calls have was written by hand.
    let meant = [json!({ "a": 1, "b": 2 }), json!({ "a": 1, "b": null }), json!({ "a": 1 })];
    let [shown, log] = shown(&golden, "qwen2", &meant.map(call), json!({}));
    assert!(!log.contains("is null") && shown.contains("\"b\": 2"), "{shown}{log}");
}

/// Prints answers between marks and the end of a turn behind them.
const MARKED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}\
                      {{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}";

fn answer(text: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": "a b" }, { "role": "assistant", "content": text }] })
}

#[test]
fn rows_that_may_not_be_meant_are_named_with_a_remedy() {
    let Some(golden) = golden("llm") else { return };
    let tagged = "{% for m in messages %}{{ m.content }}{% for t in m.tool_calls %}{{ t.function.name }}{% endfor %}\
                  <|im_end|>{% endfor %}";
    let twice = "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}";
    let marked = json!({ "chat_template": MARKED, "assistant_only_loss": true });
    let parsed = "{\"zz\": 1}";
    for (model, row, data, parts) in [
        (
            "qwen2",
            answer("Hello"),
            marked.clone(),
            &["instead of a special token", "before {% endgeneration %}"][..],
        ),
        (
            "qwen2",
            answer("<tool_call>\nx\n</tool_call>"),
            marked,
            &["the trained text ends with `</tool_call>` instead of a special token"],
        ),
        (
            "qwen2",
            call(json!({ "zz": 1 })),
            json!({ "chat_template": tagged }),
            &["`messages[1].tool_calls[0].function.arguments`", "use a template that does"],
        ),
        ("qwen2", call(json!(parsed)), json!({}), &["JSON in a text", "write them as an object"]),
        (
            "qwen2",
            answer("<|im_end|>"),
            json!({}),
            &["contains the special token", "remove it from the message"],
        ),
        ("qwen2", answer(" "), json!({}), &["is empty", "write the answer, or remove the row"]),
        (
            "llama3_tied",
            answer("Hello"),
            json!({ "chat_template": twice }),
            &["the chat template prints both", "remove one from the template"],
        ),
    ] {
        let [_, log] = shown(&golden, model, &[row], data);
        for part in
            [parts, &["1 row of the data: ", "the first one is `rows.jsonl` line 1"]].concat()
        {
            assert!(log.contains(part), "{part}: {log}");
        }
    }
}

#[test]
fn templates_that_change_texts_print_them() {
    let Some(golden) = golden("llm") else { return };
    let template = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}";
    let [_, log] =
        shown(&golden, "qwen2", &[answer("Hello there")], json!({ "chat_template": template }));
    assert!(!log.contains("of the data:"), "{log}");
    // As in TRL, although there are none.
    let tools = "{% if tools is not none %}TOOLS {% endif %}";
    let template = format!("{tools}{}", template.replace(" | upper", ""));
    let mut row = answer("b");
    row["tools"] = json!([]);
    let [shown, _] = shown(&golden, "qwen2", &[row], json!({ "chat_template": template }));
    assert!(shown.contains("T[[OOLS a b"), "{shown}");
}

#[test]
fn tokens_that_an_adapter_cannot_learn_are_named() {
    let Some(golden) = golden("llm") else { return };
    let job = Job::tiny();
    let base = job.folder().join("base");
    fs::create_dir(&base).unwrap();
    for file in fs::read_dir(golden.join("models/qwen2")).unwrap() {
        let file = file.unwrap();
        fs::write(base.join(file.file_name()), fs::read(file.path()).unwrap()).unwrap();
    }
    // The row of `<|im_end|>`.
    let weights = base.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let embedding = &header["model.embed_tokens.weight"];
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let [first, end] = [0, 1].map(|it| number(&embedding["data_offsets"][it]));
    let row = (end - first) / number(&embedding["shape"][0]);
    let start = data + first + 379 * row;
    bytes[start..start + row].fill(0);
    fs::write(&weights, bytes).unwrap();
    fs::write(job.folder().join("rows.jsonl"), format!("{}\n", answer("b"))).unwrap();
    let job = job
        .with(
            "model",
            json!({ "pretrained": "base", "lora": { "r": 2, "target_modules": "all-linear" } }),
        )
        .with("data", json!({ "kind": "chat", "path": "rows.jsonl" }));
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let log = deepburn(job.folder(), &["show-data", "--config", "job.json"]).succeeded().stderr;
    let warning = "the base model has not learned \"<|im_end|>\" of the data";
    assert!(log.contains(warning) && log.contains("trainable_token_indices to "), "{log}");
}

#[test]
fn messages_about_long_names_are_short() {
    let Some(golden) = golden("llm") else { return };
    let long = "k".repeat(100_000);
    let raise = format!("{{{{ raise_exception('{long}') }}}}");
    let mut named = answer("b");
    named["messages"][0][&long] = json!(1);
    for (row, data) in [
        (named, json!({})),
        (json!({ long.clone(): 1 }), json!({})),
        (answer("b"), json!({ "chat_template": raise })),
    ] {
        let mut fields = json!({ "kind": "chat", "path": "rows.jsonl" });
        fields.as_object_mut().unwrap().extend(data.as_object().unwrap().clone());
        let job = Job::tiny()
            .with("model.pretrained", json!(golden.join("models/qwen2")))
            .with("data", fields);
        fs::write(job.folder().join("rows.jsonl"), format!("{row}\n")).unwrap();
        let log = job.run().failed(2, &["rows.jsonl", "kkk...", "; "]).stderr;
        assert!(log.len() < 5000, "{}", log.len());
    }
}
