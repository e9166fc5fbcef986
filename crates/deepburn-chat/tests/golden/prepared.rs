//! Training examples that TRL prepared: ids and labels of fine-tuning, prompts and completions of
//! DPO.

use std::fs;
use std::path::Path;

use deepburn_chat::{
    AssistantOnlyLoss, ChatTemplates, Day, EncodeOptions, EncodedRow, NestedNulls, Row, RowEncoder,
    RowReader, SpecialTokens,
};
use serde_json::{Value, json};

use crate::hf_tokenizer::HfTokenizer;
use crate::{files, golden, json, lines};

/// Returns the encoder of a trace, with TRL's default length.
fn encoder(golden: &Path, trace: &Value, options: EncodeOptions) -> RowEncoder<HfTokenizer> {
    let folder = golden.join("models").join(trace["model"].as_str().unwrap());
    let templates = match trace["template"].as_str() {
        Some(name) => {
            let source =
                fs::read_to_string(golden.join(format!("sft/templates/{name}.jinja"))).unwrap();
            ChatTemplates::single(&source, Day::today())
        }
        None => ChatTemplates::of_folder(&folder, Day::today()),
    };
    let tokenizer = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let mut tokens = SpecialTokens::of_folder(&folder).unwrap();
    if let Some(eos) = trace["options"]["eos_token"].as_str() {
        tokens = SpecialTokens::new([("eos_token", eos)]);
    }
    RowEncoder::new(HfTokenizer::new(tokenizer).unwrap(), templates.ok(), tokens, options).unwrap()
}

fn options(trace: &Value) -> EncodeOptions {
    let options = &trace["options"];
    let is_packed = options["packing"] == true;
    let limit =
        options.get("max_length").map_or(Some(1024), |it| it.as_u64().map(|it| it as usize));
    EncodeOptions {
        completion_only_loss: options["completion_only_loss"].as_bool(),
        assistant_only_loss: match options["assistant_only_loss"] == true {
            true => AssistantOnlyLoss::Marked,
            false => AssistantOnlyLoss::Off,
        },
        max_length: limit.filter(|_| !is_packed),
    }
}

/// Reads the rows as TRL does: `datasets` adds the fields of other rows as null.
fn rows(golden: &Path, trace: &Value) -> Vec<Row> {
    let rows = lines(&golden.join(format!("sft/data/{}.jsonl", trace["data"].as_str().unwrap())));
    let mut reader = RowReader::of_row(&rows[0]).unwrap();
    reader.nested_nulls = NestedNulls::Remove;
    rows.iter().map(|it| reader.read(it).unwrap().row).collect()
}

fn labels(sample: &EncodedRow) -> Value {
    sample.labels().map(|it| it.map_or(-100, i64::from)).collect()
}

//= trl 1.16.0 trainer/sft_trainer.py completion_mask
//= trl 1.16.0 trainer/sft_trainer.py assistant_masks
//= trl 1.16.0 trainer/sft_trainer.py add_eos
#[test]
fn prepares_like_the_sft_trainer() {
    let Some(golden) = golden() else { return };
    let (mut traces, mut packed) = (0, 0);
    for path in files(&golden.join("sft/traces")) {
        let trace = json(&path);
        let name = trace["name"].as_str().unwrap();
        if trace["kind"] == "dpo"
            || trace.get("error").is_some()
            || name == "messages_swapped_template"
        {
            continue;
        }
        let encoder = encoder(&golden, &trace, options(&trace));
        let encoded = rows(&golden, &trace).into_iter().map(|it| encoder.encode(&it).unwrap());
        let samples: Vec<EncodedRow> = encoded.filter(EncodedRow::has_labels).collect();
        let prepared = trace["prepared"].as_array().unwrap();
        if trace["options"]["packing"] == true {
            // The packer orders and divides them. Without truncation, it keeps all tokens.
            if trace["options"]["packing_strategy"].is_string() {
                let sorted = |mut ids: Vec<u64>| {
                    ids.sort();
                    ids
                };
                let ours = samples.iter().flat_map(|it| it.ids.iter().map(|id| u64::from(*id)));
                let theirs = prepared.iter().flat_map(|it| it["input_ids"].as_array().unwrap());
                assert_eq!(
                    sorted(ours.collect()),
                    sorted(theirs.map(|it| it.as_u64().unwrap()).collect()),
                    "{name}"
                );
            }
            packed += 1;
            continue;
        }
        assert_eq!(samples.len(), prepared.len(), "{name}");
        for (sample, prepared) in samples.iter().zip(prepared) {
            assert_eq!(json!(sample.ids), prepared["input_ids"], "{name}");
            assert_eq!(labels(sample), prepared["labels"], "{name}");
        }
        traces += 1;
    }
    assert_eq!((traces, packed), (20, 4));
}

//= trl 1.16.0 trainer/dpo_trainer.py tokenize_fn
#[test]
fn prepares_like_the_dpo_trainer() {
    let Some(golden) = golden() else { return };
    let mut count = 0;
    for path in files(&golden.join("sft/traces")) {
        let trace = json(&path);
        if trace["kind"] != "dpo" {
            continue;
        }
        let encoder = encoder(
            &golden,
            &trace,
            EncodeOptions { max_length: Some(1024), ..Default::default() },
        );
        for (row, prepared) in
            rows(&golden, &trace).iter().zip(trace["prepared"].as_array().unwrap())
        {
            let sample = encoder.encode_preference(row).unwrap();
            assert_eq!(json!(sample.prompt), prepared["prompt_ids"], "{}", trace["name"]);
            assert_eq!(json!(sample.chosen), prepared["chosen_ids"], "{}", trace["name"]);
            assert_eq!(json!(sample.rejected), prepared["rejected_ids"], "{}", trace["name"]);
            assert_eq!(sample.findings, []);
            count += 1;
        }
    }
    assert_eq!(count, 48);
}

fn trace(golden: &Path, name: &str) -> Value {
    json(&golden.join(format!("sft/traces/{name}.json")))
}

fn turns(trace: &Value) -> EncodeOptions {
    EncodeOptions { assistant_only_loss: AssistantOnlyLoss::Turns, ..options(trace) }
}

/// TRL rejects rows with `from` and `value`. With turns, they have the labels of the same rows as
/// `messages`.
#[test]
fn senders_are_roles() {
    let Some(golden) = golden() else { return };
    let refused = trace(&golden, "sharegpt_assistant_refused");
    assert!(refused["error"].as_str().unwrap().contains("not conversational"));
    let like_trl = encoder(&golden, &refused, options(&refused));
    let encoder = encoder(&golden, &refused, turns(&refused));
    let check = |encoder: &RowEncoder<HfTokenizer>, row: Value| {
        encoder.check_form(RowReader::of_row(&row).unwrap().read(&row).unwrap().notes)
    };
    let message = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let sender = json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]);
    for row in [
        json!({"conversations": sender}),
        json!({"conversations": message}),
        json!({"messages": sender}),
        json!({"prompt": sender, "completion": message}),
        json!({"instruction": "a", "output": "b"}),
    ] {
        let error = check(&like_trl, row.clone()).unwrap_err().to_string();
        assert!(error.contains("assistant_only_loss") && error.contains("\"turns\""), "{error}");
        assert_eq!(check(&encoder, row), Ok(()));
    }
    for row in [json!({"messages": message}), json!({"prompt": message, "completion": message})] {
        assert_eq!(check(&like_trl, row), Ok(()));
    }
    for row in lines(&golden.join("sft/data/sharegpt.jsonl")) {
        let Value::Array(turns) = &row["conversations"] else { panic!() };
        let message = |it: &Value| json!({"role": it["from"], "content": it["value"]});
        let same: Vec<Value> = turns.iter().map(message).collect();
        let sample = encoder.encode(&Row::read(&row).unwrap()).unwrap();
        assert_eq!(
            sample,
            encoder.encode(&Row::read(&json!({"messages": same})).unwrap()).unwrap()
        );
        assert!(sample.has_labels() && sample.trained.contains(&false));
    }
}

/// TRL rejects a template without marks that it does not know. The turns can be found in its text.
#[test]
fn unmarked_templates_train_the_assistant() {
    let Some(golden) = golden() else { return };
    let refused = trace(&golden, "messages_no_markers");
    assert!(refused["error"].as_str().unwrap().contains("not supported for this template"));
    let like_trl = encoder(&golden, &refused, options(&refused));
    for row in rows(&golden, &refused) {
        let error = like_trl.encode(&row).unwrap_err().to_string();
        assert!(error.contains("assistant_only_loss") && error.contains("\"turns\""), "{error}");
    }
    let encoder = encoder(&golden, &refused, turns(&refused));
    let tokenizer =
        tokenizers::Tokenizer::from_file(golden.join("models/qwen2/tokenizer.json")).unwrap();
    for row in rows(&golden, &refused) {
        let sample = encoder.encode(&row).unwrap();
        let trained: Vec<u32> = sample.labels().flatten().collect();
        let Row::Chat { messages, .. } = row else { panic!() };
        let answers = messages.iter().filter(|it| it.role() == "assistant");
        let expected: String = answers
            .map(|it| format!("{}<|im_end|>\n", it.fields()["content"].as_str().unwrap()))
            .collect();
        let text = tokenizer.decode(&trained, false).unwrap().replace("<think>\n\n</think>\n", "");
        assert_eq!(text, expected);
        assert_eq!(sample.findings, []);
    }
}

/// TRL replaces Qwen3's template by one that prints reasoning in all turns. The examples with one
/// answer are the same.
#[test]
fn replaced_template() {
    let Some(golden) = golden() else { return };
    let replaced = trace(&golden, "messages_swapped_template");
    let encoder = encoder(&golden, &replaced, options(&replaced));
    let (mut same, mut other) = (0, 0);
    for (row, prepared) in
        rows(&golden, &replaced).iter().zip(replaced["prepared"].as_array().unwrap())
    {
        let sample = encoder.encode(row).unwrap();
        let Row::Chat { messages, .. } = row else { panic!() };
        if messages.iter().filter(|it| it.role() == "assistant").count() == 1 {
            assert_eq!(json!(sample.ids), prepared["input_ids"]);
            assert_eq!(labels(&sample), prepared["labels"]);
            same += 1;
        } else {
            assert_ne!(json!(sample.ids), prepared["input_ids"]);
            other += 1;
        }
    }
    assert_eq!((same, other), (9, 3));
}
