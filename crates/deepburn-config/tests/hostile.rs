//! Arbitrary input results in a plan or an error message, never in a panic.

use std::path::Path;

use deepburn_config::{Job, JobRequest, RawConfig, RunContext, deepspeed_keys, resolve};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Values that are valid for some keys and invalid for others.
fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3i64..40).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![
            Just("auto"),
            Just("cpu"),
            Just("AdamW"),
            Just("OneCycle"),
            Just("sum"),
            Just("50%")
        ]
        .prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!([0.9, 0.999])),
    ]
}

/// A known path; all paths have the same probability.
fn known_path() -> impl Strategy<Value = String> {
    let paths: Vec<_> = deepspeed_keys().into_iter().map(|entry| entry.path).collect();
    proptest::sample::select(paths)
}

/// Sets the value at a path. `params[AdamW]` is written as `params`, with the type next to it.
fn put(root: &mut Map<String, Value>, path: &str, value: Value) {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let (name, variant) = name.split_once('[').unwrap_or((name, ""));
    if !variant.is_empty() {
        root.insert("type".into(), variant.trim_end_matches(']').into());
    }
    match rest {
        None => drop(root.insert(name.into(), value)),
        Some(rest) => {
            let inner = root.entry(name).or_insert_with(|| json!({}));
            if let Value::Object(inner) = inner {
                put(inner, rest, value);
            }
        }
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::btree_map("[a-z_]{1,8}", inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_text(text in "\\PC*") {
        let _ = RawConfig::from_json(&text);
        let _ = RawConfig::from_argument(&text);
        let _ = Job::parse(&text, "job", Path::new(""), &JobRequest::default());
        let _ = Job::parse("{}", "job", Path::new(""), &JobRequest { sets: vec![text], ..JobRequest::default() });
    }

    #[test]
    fn any_text_of_json_signs(text in "[\\[\\]{}:,\"0-9a-e.\\\\/* \n-]{0,60}") {
        let _ = RawConfig::from_json(&text);
    }

    #[test]
    fn any_value(json in any_json(), world in 0usize..9) {
        let written = RawConfig::from_value(&json).unwrap();
        if let Err(report) = resolve(&written, &RunContext::on_host(world)) {
            prop_assert!(report.errors().next().is_some());
        }
        let _ = Job::parse(&json.to_string(), "job", Path::new(""), &JobRequest::default());
    }

    #[test]
    fn any_value_at_known_paths(values in proptest::collection::vec((known_path(), leaf()), 1..8), world in 0usize..9) {
        let mut root = Map::new();
        for (path, value) in values {
            put(&mut root, &path, value);
        }
        let written = RawConfig::from_value(&Value::Object(root)).unwrap();
        match resolve(&written, &RunContext { hidden_size: Some(usize::MAX), ..RunContext::on_host(world) }) {
            Ok(resolved) => {
                let batch = resolved.plan.batch;
                prop_assert_eq!(batch.train_batch_size, batch.micro_batch_size * batch.gradient_accumulation_steps * world);
            }
            Err(report) => prop_assert!(report.errors().all(|error| !error.message.is_empty() && !error.remedy.is_empty())),
        }
    }

    #[test]
    fn any_triple(train in any::<i64>(), micro in any::<i64>(), steps in any::<i64>(), world in 0usize..9, small in any::<bool>()) {
        let shrink = |size: i64| if small { size % 9 } else { size };
        let json = json!({"train_batch_size": shrink(train), "train_micro_batch_size_per_gpu": shrink(micro), "gradient_accumulation_steps": shrink(steps)});
        let _ = resolve(&RawConfig::from_value(&json).unwrap(), &RunContext::on_host(world));
    }

    #[test]
    fn integral_floats_are_integers(size in 1i64..1 << 50, exponent in 0u32..4) {
        let spelled = format!("{size}e{exponent}");
        let text = format!("{{\"train_batch_size\": 1, \"zero_optimization\": {{\"reduce_bucket_size\": {spelled}}}}}");
        let plan = resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(1)).unwrap().plan;
        let expected = size as usize * 10usize.pow(exponent);
        // Beyond 2^53 a spelling with an exponent is the nearest double.
        prop_assert_eq!(plan.zero.gradients.reduce_bucket_size as f64, expected as f64);
    }
}

#[test]
fn a_value_in_memory_may_be_deep() {
    let mut deep = json!(1);
    for _ in 0..100 {
        deep = json!({ "a": deep });
    }
    assert!(
        RawConfig::from_value(&deep).unwrap_err().to_string().contains("nested deeper than 64")
    );
}
