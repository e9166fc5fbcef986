//! A value that a message proposes is of the right kind, and does not ask for an unsupported
//! feature.

use std::path::Path;

use deepburn_config::{Job, JobRequest, RawConfig, RunContext, job_keys, resolve};
use serde_json::{Map, Value, json};

/// Returns the errors about `path` in a job file that sets it to `value`.
fn errors(path: &str, value: &Value) -> Vec<String> {
    let mut root = Map::new();
    put(&mut root, path, value.clone());
    let text = Value::Object(root.clone()).to_string();
    let report = Job::parse(&text, "job.json", Path::new(""), &JobRequest::default());
    let mut report = report.err().map(|error| error.to_string()).unwrap_or_default();
    if let Some(section @ Value::Object(_)) = root.get("deepspeed") {
        let config = RawConfig::from_json(&section.to_string()).unwrap();
        let error = resolve(&config, &RunContext::on_host(1)).err();
        report.extend(error.map(|error| error.to_string()));
    }
    let plain = path.split('[').next().unwrap_or(path);
    let start = format!("error: {}", plain.trim_start_matches("deepspeed."));
    report
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with(&start))
        .map(str::to_owned)
        .collect()
}

/// Sets the value at a path. `params[AdamW]` is written as `params`, with the type next to it.
fn put(section: &mut Map<String, Value>, path: &str, value: Value) {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let (name, variant) = name.split_once('[').unwrap_or((name, ""));
    if !variant.is_empty() {
        section.insert("type".into(), variant.trim_end_matches(']').into());
    }
    match rest {
        None => drop(section.insert(name.into(), value)),
        Some(rest) => {
            let inner = section.entry(name).or_insert_with(|| json!({}));
            put(inner.as_object_mut().unwrap(), rest, value);
        }
    }
}

#[test]
fn a_proposed_value_does_not_lead_to_the_next_error() {
    let values = json!([
        0, 1, 3, -1, 0.5, true, "3", "true", "abc", "auto ", "cpu", "0.9,0.99", [], [3], ["3"], {},
        {"enabled": 3}, "{\"stage\": 2}"
    ]);
    let is_next = |error: &String| {
        ["must be", "not available", "no such file"].iter().any(|part| error.contains(part))
    };
    let mut proposals = 0;
    // No value of these keys is available yet, other than the default.
    let is_refused = |doc: &str| doc.contains("This version refuses");
    let keys = job_keys();
    let keys = keys.iter().filter(|it| !it.path.contains("[]") && !is_refused(it.key.doc));
    for entry in keys {
        for value in values.as_array().unwrap() {
            let errors_now = errors(&entry.path, value);
            let proposed = errors_now.iter().filter_map(|error| error.rsplit_once("; write "));
            for proposed in proposed.filter_map(|(_, json)| serde_json::from_str(json).ok()) {
                proposals += 1;
                let mut next = errors(&entry.path, &proposed);
                next.retain(is_next);
                assert!(next.is_empty(), "{}: {value}, {proposed}: {next:?}", entry.path);
            }
        }
    }
    assert!(proposals > 500, "{proposals}");
}
