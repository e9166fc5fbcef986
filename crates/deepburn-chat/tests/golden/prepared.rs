//! Training examples that TRL prepared: ids and labels of fine-tuning, prompts and completions of DPO.

use std::fs;
use std::path::Path;

use deepburn_chat::{
    ChatTemplates, EncodeOptions, HfTokenizer, NestedNulls, Row, RowEncoder, RowReader, Sample,
    SpecialTokens,
};
use serde_json::{Value, json};

use crate::{files, golden, json, lines};

/// Returns the encoder of a trace, with TRL's default length.
fn encoder(golden: &Path, trace: &Value, options: EncodeOptions) -> RowEncoder<HfTokenizer> {
    let folder = golden.join("models").join(trace["model"].as_str().unwrap());
    let templates = match trace["template"].as_str() {
        Some(name) => {
            let source =
                fs::read_to_string(golden.join(format!("sft/templates/{name}.jinja"))).unwrap();
            ChatTemplates::single(&source)
        }
        None => ChatTemplates::of_folder(&folder),
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
        assistant_only_loss: options["assistant_only_loss"] == true,
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

fn labels(sample: &Sample) -> Value {
    sample.labels().map(|it| it.map_or(-100, i64::from)).collect()
}

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
        let samples: Vec<Sample> = encoded.filter(Sample::has_labels).collect();
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
