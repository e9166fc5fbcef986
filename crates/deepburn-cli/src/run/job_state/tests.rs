use deepburn_models::Architecture;
use deepburn_models::gpt2::Gpt2Config;
use serde_json::json;

use super::*;

fn state(job: Value) -> Value {
    let export = serde_json::to_value(Gpt2Config::small().hf_export()).unwrap();
    json!({ "job": job, "samples": 8, "publication": export })
}

fn compare(then: Value, now: Value) -> Result<(), String> {
    let [then, now] = [then, now].map(|job| JobState::parse(&state(job)).unwrap());
    then.compare(&now)
}

#[test]
fn older_states_are_read_with_defaults() {
    let read = JobState::parse(&state(json!({}))).unwrap();
    assert_eq!((read.format, read.launch, &*read.version), (1, None, ""));
}

#[test]
fn rejects_a_later_format_and_another_program() {
    let mut later = state(json!({}));
    later["format"] = json!(FORMAT + 1);
    later["version"] = json!("9.1.0");
    let error = JobState::parse(&later).unwrap_err();
    assert!(error.contains("9.1.0") && error.contains("format 3"), "{error}");
    let error = JobState::parse(&json!({"step": 3})).unwrap_err();
    assert!(error.contains("was not saved by finetune"), "{error}");
}

#[test]
fn keys_without_effect_on_numbers_may_change() {
    let job = |cache| json!({"data": {"token_cache": cache, "kind": "text"}});
    assert_eq!(compare(job(true), job(false)), Ok(()));
    // A key that this program added.
    assert_eq!(compare(json!({"data": {}}), json!({"data": {"new": 3}})), Ok(()));
    assert_eq!(compare(json!({"training": {}}), json!({"training": {"new": 3}})), Ok(()));
}

/// What changes between two jobs, as warnings show it.
fn deepspeed_changes(then: &Value, now: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let (then, now) = with_deepspeed_defaults(then, now);
    differ("deepspeed", Some(&then), Some(&now), &mut found);
    let text = |value: Option<Value>| shown(&value.unwrap_or_default());
    found.into_iter().map(|it| format!("{} {} {}", it.path, text(it.then), text(it.now))).collect()
}

#[test]
fn spelled_out_defaults_are_no_change() {
    let plan =
        json!({"plan": {"batch": {"gradient_accumulation_steps": 1, "micro_batch_size": 2}}});
    let job = |deepspeed: Value| json!({"deepspeed": deepspeed, "resolved": plan});
    let before = job(json!({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}));
    let spelled = job(json!({
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {
            "lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": null,
        }},
        "gradient_clipping": 1, "zero_optimization": {"stage": 0}, "bf16": {"enabled": false},
    }));
    assert_eq!(deepspeed_changes(&before, &spelled), [""; 0]);
    assert_eq!(deepspeed_changes(&spelled, &before), [""; 0]);
    let other = job(json!({
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
        "gradient_accumulation_steps": 2, "communication_data_type": "fp16",
        "zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"},
    }));
    let expected = [
        "deepspeed.optimizer.params.eps 1e-8 1e-6",
        "deepspeed.gradient_accumulation_steps 1 2",
        "deepspeed.zero_optimization.stage 0 2",
        "deepspeed.communication_data_type unset \"fp16\"",
        "deepspeed.scheduler unset {\"type\":\"WarmupLR\"}",
    ];
    let mut changes = deepspeed_changes(&before, &other);
    let mut expected = expected.map(str::to_owned);
    changes.sort();
    expected.sort();
    assert_eq!(changes, expected);
}

#[test]
fn sections_that_resolve_to_the_same_plan_are_no_change() {
    let job = |kind: &str, steps: usize| json!({"deepspeed": {"optimizer": {"type": kind}}, "resolved": {"plan": {"steps": steps}}});
    assert_eq!(compare(job("AdamW", 1), job("adamw", 1)), Ok(()));
    assert!(compare(job("AdamW", 1), job("adamw", 2)).is_err());
}

#[test]
fn splits_have_the_words_of_the_job() {
    let job = |eval: f64| json!({"data": {"splits": {"from": "shares", "path": "a.txt", "train": 0.9, "eval": eval, "test": 0.0}}});
    let error = compare(job(0.1), job(0.05)).unwrap_err();
    assert!(error.starts_with("data.splits.eval changed from \"10%\" to \"5%\""), "{error}");
    let error = compare(job(0.1), job(0.0)).unwrap_err();
    assert!(error.starts_with("data.splits.eval changed from \"10%\" to unset"), "{error}");
}

#[test]
fn parameters_of_a_schedule_that_are_unset_are_not_shown() {
    let job = |parameters: Value| json!({"training": {"lr_scheduler_kwargs": parameters}});
    let unset = || json!({"power": null, "num_cycles": null});
    for (then, now) in [(Value::Null, unset()), (unset(), Value::Null), (unset(), unset())] {
        assert_eq!(changes::written(&job(then)), changes::written(&job(now)));
    }
    let given = changes::written(&job(json!({"power": 2.0, "num_cycles": null})));
    assert_eq!(given, job(json!({"power": 2.0})));
}

#[test]
fn older_checkpoints_decayed_all_weights() {
    let changed = |now: &str| {
        let (then, now) = (json!({}), json!({ "no_decay": now }));
        let mut found = Vec::new();
        differ("training", Some(&then), Some(&now), &mut found);
        found.into_iter().map(|it| (it.path, it.then, it.now)).collect::<Vec<_>>()
    };
    assert_eq!(changed("nothing"), []);
    let path = "training.no_decay".to_owned();
    let expected = (path, Some(json!("nothing")), Some(json!("biases_and_norms")));
    assert_eq!(changed("biases_and_norms"), [expected]);
}

#[test]
fn older_checkpoints_did_not_smooth_labels() {
    let changed = |now: f64| {
        let (then, now) = (json!({}), json!({ "label_smoothing_factor": now }));
        let mut found = Vec::new();
        differ("training", Some(&then), Some(&now), &mut found);
        found.into_iter().map(|it| (it.path, it.then, it.now)).collect::<Vec<_>>()
    };
    assert_eq!(changed(0.0), []);
    let path = "training.label_smoothing_factor".to_owned();
    assert_eq!(changed(0.1), [(path, Some(json!(0.0)), Some(json!(0.1)))]);
}

#[test]
fn answers_that_were_found_by_turns_are_no_change() {
    let job =
        |answers: Value| json!({"data": {"kind": {"chat": {"assistant_only_loss": answers}}}});
    assert_eq!(compare(job(json!(true)), job(json!("turns"))), Ok(()));
    assert_eq!(compare(job(json!("turns")), job(json!(true))), Ok(()));
    for answers in [json!(true), json!("turns")] {
        let error = compare(job(json!(false)), job(answers)).unwrap_err();
        assert!(error.contains("assistant_only_loss changed from false"), "{error}");
    }
}

#[test]
fn the_former_name_of_the_encoder_is_no_change() {
    let job = |name: &str| json!({"model": {"architecture": name}});
    assert_eq!(compare(job("imdb_encoder"), job("encoder")), Ok(()));
    let error = compare(job("imdb_encoder"), job("gpt2")).unwrap_err();
    assert!(error.contains("model.architecture changed from \"encoder\" to"), "{error}");
}

#[test]
fn rejects_other_data_of_the_same_size() {
    let with = |data: Option<&str>| {
        let state = JobState::parse(&state(json!({}))).unwrap();
        JobState { data: data.map(str::to_owned), ..state }
    };
    assert_eq!(with(Some("a")).compare(&with(Some("a"))), Ok(()));
    // Older checkpoints have no hash.
    assert_eq!(with(None).compare(&with(Some("a"))), Ok(()));
    let error = with(Some("a")).compare(&with(Some("b"))).unwrap_err();
    assert!(error.contains("other training data"), "{error}");
}

#[test]
fn columns_and_sizes_that_lead_to_other_tokens_are_named() {
    let with = |pointer: &str, value: Value, data: &str| {
        let mut job = json!({"data": {
            "kind": {"classification": {"text_field": "text", "label_field": "label"}},
            "sequence_length": 64, "vocab_size": 300,
        }});
        if !pointer.is_empty() {
            *job.pointer_mut(pointer).unwrap() = value;
        }
        let state = JobState::parse(&state(job)).unwrap();
        JobState { data: Some(data.to_owned()), ..state }
    };
    let before = with("", Value::Null, "a");
    for (name, pointer, value) in [
        ("text_field", "/data/kind/classification/text_field", json!("body")),
        ("label_field", "/data/kind/classification/label_field", json!("stars")),
        ("sequence_length", "/data/sequence_length", json!(32)),
        ("vocab_size", "/data/vocab_size", json!(400)),
    ] {
        let error = before.compare(&with(pointer, value.clone(), "b")).unwrap_err();
        assert!(error.starts_with(&format!("data.{name} changed from")), "{error}");
        assert!(error.contains(&format!("to {value}, so the data has other")), "{error}");
    }
}

#[test]
fn keys_that_lead_to_other_tokens_are_named() {
    let with = |join: &str, eos: Value, is_new: bool, data: &str, samples: usize| {
        let job = json!({"data": {"kind": {"text": {"join": join}}, "eos_token": eos, "new_vocabulary": is_new}});
        let state = JobState::parse(&state(job)).unwrap();
        JobState { data: Some(data.to_owned()), samples, ..state }
    };
    let before = with("end_of_text", Value::Null, false, "a", 8);
    for (now, expected) in [
        (
            with("nothing", Value::Null, false, "b", 7),
            "data.join changed from \"end_of_text\" to \"nothing\"",
        ),
        (
            with("end_of_text", json!("</s>"), false, "b", 8),
            "data.eos_token changed from unset to \"</s>\"",
        ),
        (
            with("end_of_text", Value::Null, true, "b", 9),
            "data.new_vocabulary changed from false to true",
        ),
    ] {
        let error = before.compare(&now).unwrap_err();
        assert!(error.contains(expected) && error.contains("set it back"), "{error}");
    }
    let other = before.compare(&with("end_of_text", Value::Null, false, "a", 9)).unwrap_err();
    assert!(other.contains("8 samples of training data and this job has 9"), "{other}");
}

/// Returns the job of conversations with a setting of `data` and one of its kind.
fn chat(own: (&str, Value), of_kind: (&str, Value)) -> Value {
    let mut kind = json!({"text_field": "text", "messages_field": null, "chat_template": null,
        "packing": "padded", "pad_token": null});
    kind[of_kind.0] = of_kind.1;
    let mut data = json!({"kind": {"chat": kind}, "sequence_length": 64, "drop_last": false, "eos_token": null});
    data[own.0] = own.1;
    json!({ "data": data })
}

#[test]
fn changes_have_the_words_of_the_job_file() {
    let with = |job: Value, data: &str| {
        let state = JobState::parse(&state(job)).unwrap();
        JobState { data: Some(data.to_owned()), ..state }
    };
    let none = || ("sequence_length", json!(64));
    let now = |key, value| chat(none(), (key, value));
    let before = with(now("packing", json!("padded")), "a");
    let text = json!({"data": {"kind": {"text": {"text_field": "text", "join": "nothing"}}}});
    let template = json!({"file": "a.jinja"});
    for (now, expected) in [
        (now("packing", json!({"packed": "bfd"})), "data.packing changed from false to true"),
        (now("packing", json!("padding_free")), "data.padding_free changed from false to true"),
        (
            now("skip_invalid_rows", json!(true)),
            "data.skip_invalid_rows changed from false to true",
        ),
        (now("chat_template", template), "data.chat_template changed from unset to \"a.jinja\""),
        (text, "data.kind changed from \"chat\" to \"text\""),
    ] {
        // With the same data, another packing is refused too.
        let error = before.compare(&with(now.clone(), "b")).unwrap_err();
        assert!(error.starts_with(expected) && error.contains("set it back"), "{error}");
    }
    let packed = with(now("packing", json!({"packed": "bfd"})), "a");
    let error = before.compare(&packed).unwrap_err();
    assert!(error.starts_with("data.packing changed from false to true; set it back"), "{error}");
    let error = packed.compare(&with(now("packing", json!({"packed": "wrapped"})), "a"));
    let expected = "data.packing_strategy changed from \"bfd\" to \"wrapped\"";
    assert!(error.clone().unwrap_err().starts_with(expected), "{error:?}");
}

#[test]
fn defaults_may_be_named() {
    let with = |job: Value, data: Option<&str>| {
        let state = JobState::parse(&state(job)).unwrap();
        JobState { data: data.map(str::to_owned), ..state }
    };
    let none = || ("packing", json!("padded"));
    let before = || chat(("sequence_length", json!(64)), none());
    for now in [
        chat(("eos_token", json!("</s>")), none()),
        chat(("drop_last", json!(true)), none()),
        chat(("sequence_length", json!(4096)), none()),
        chat(("drop_last", json!(false)), ("messages_field", json!("messages"))),
        chat(("drop_last", json!(false)), ("pad_token", json!("</s>"))),
    ] {
        let same = with(before(), Some("a")).compare(&with(now.clone(), Some("a")));
        assert_eq!(same, Ok(()), "{now}");
    }
    // Without a hash, nothing says that the data is the same. A stream is cut at its length.
    let longer = || chat(("sequence_length", json!(4096)), none());
    assert!(with(before(), None).compare(&with(longer(), Some("a"))).is_err());
    let stream = |length: usize| json!({"data": {"kind": "tokens", "sequence_length": length}});
    assert!(with(stream(8), Some("a")).compare(&with(stream(9), Some("a"))).is_err());
}

#[test]
fn places_that_lead_to_other_tokens_are_named() {
    let shares = |train: f64, eval: f64| json!({"from": "shares", "path": "a.txt", "train": train, "eval": eval, "test": 0.0});
    let paths =
        json!({"from": "paths", "train": "b.txt", "eval": null, "eval_share": 0.07, "test": null});
    let with =
        |tokenizer: Value, splits: Value, size: usize, data: Option<&str>, samples: usize| {
            let job =
                json!({"data": {"tokenizer": tokenizer, "splits": splits, "vocab_size": size}});
            let state = JobState::parse(&state(job)).unwrap();
            JobState { data: data.map(str::to_owned), samples, ..state }
        };
    let before = with(Value::Null, shares(0.9, 0.1), 512, Some("a"), 8);
    let tokenizer = "data.tokenizer changed from unset to \"words\"";
    let splits = "data.splits changed from {\"train\":\"90%\",\"eval\":\"10%\"} to";
    for (now, expected) in [
        // The vocabulary size has no effect with this tokenizer.
        (
            with(json!("words"), shares(0.9, 0.1), 300, Some("b"), 9),
            &[tokenizer, "and the data has other tokens", "set it back"][..],
        ),
        (
            with(Value::Null, shares(0.07, 0.1), 512, Some("b"), 8),
            &[splits, "{\"train\":\"7%\",\"eval\":\"10%\"}", "set it back"],
        ),
        (
            with(Value::Null, paths, 512, Some("b"), 8),
            &[
                "data.path changed from \"a.txt\" to unset",
                splits,
                "{\"train\":\"b.txt\",\"eval\":\"7%\"}",
                "set them back",
            ],
        ),
        (with(Value::Null, shares(0.9, 0.1), 512, Some("b"), 8), &["other training data"]),
    ] {
        let error = before.compare(&now).unwrap_err();
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    }
    // The same tokens may have moved.
    let moved = with(json!("words"), shares(0.9, 0.1), 512, Some("a"), 8);
    assert_eq!(before.compare(&moved), Ok(()));
    let older = with(Value::Null, shares(0.9, 0.1), 512, None, 8);
    assert_eq!(older.compare(&moved), Ok(()));
}

#[test]
fn rejects_another_model_order_or_data_with_both_values() {
    for (then, now) in [
        (json!({"data": {"shuffle": true}}), json!({"data": {"shuffle": false}})),
        (json!({"training": {"seed": 1}}), json!({"training": {"seed": 2}})),
    ] {
        let error = compare(then, now).unwrap_err();
        assert!(error.contains("changed from"), "{error}");
    }
}

#[test]
fn models_are_compared_by_their_resulting_configuration() {
    let state = |config: Value| {
        let mut state = state(json!({ "model": { "config": config } }));
        state["publication"]["documents"]["config.json"]["resid_pdrop"] = json!(0.1);
        JobState::parse(&state).unwrap()
    };
    // The same sizes, once set and once left to the default.
    let given = state(json!({"vocab_size": 50257}));
    assert_eq!(state(json!({})).compare(&given), Ok(()));
    let mut other = state(json!({}));
    let config = other.hf_export.documents.get_mut("config.json").unwrap();
    config.insert("pad_token_id".to_owned(), json!(3));
    assert_eq!(given.compare(&other), Ok(()));
    let config = other.hf_export.documents.get_mut("config.json").unwrap();
    config.insert("resid_pdrop".to_owned(), json!(0.5));
    let error = given.compare(&other).unwrap_err();
    assert!(error.contains("model.config.resid_pdrop to 0.1"), "{error}");
    // A missing problem_type is single-label classification.
    let typed = |value: Value| {
        let mut state = state(json!({}));
        let config = state.hf_export.documents.get_mut("config.json").unwrap();
        config.insert("problem_type".to_owned(), value);
        state
    };
    assert_eq!(given.compare(&typed(Value::Null)), Ok(()));
    assert_eq!(typed(json!("single_label_classification")).compare(&given), Ok(()));
    let error = given.compare(&typed(json!("regression"))).unwrap_err();
    let expected = "model.config.problem_type to \"single_label_classification\"";
    assert!(error.contains(expected), "{error}");
    let error = typed(json!("regression")).compare(&given).unwrap_err();
    assert!(error.contains("model.config.problem_type to \"regression\""), "{error}");
}

/// A checkpoint without a whole model has no weights for `model.pretrained`.
#[test]
fn a_new_run_starts_from_what_the_checkpoint_has() {
    let seed = |seed: u64| json!({"training": {"seed": seed}});
    let error = compare(seed(1), seed(2)).unwrap_err();
    assert!(error.ends_with("start a new run from its weights with model.pretrained"), "{error}");
    let [then, now] = [1, 2].map(|it| {
        let mut state = JobState::parse(&state(seed(it))).unwrap();
        state.hf_export.documents.insert(ADAPTER_CONFIG.to_owned(), Map::new());
        state
    });
    let error = then.compare(&now).unwrap_err();
    assert!(error.ends_with("start a new run from its adapter with model.adapter"), "{error}");
    let encoder = |width: u64| {
        let job = json!({"model": {"architecture": "encoder"}});
        let mut state = JobState::parse(&state(job)).unwrap();
        state.hf_export.documents.get_mut("config.json").unwrap()["n_embd"] = json!(width);
        state
    };
    let error = encoder(48).compare(&encoder(64)).unwrap_err();
    assert!(error.ends_with("set model.config.n_embd to 48, or start a new run"), "{error}");
}
