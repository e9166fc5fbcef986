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
