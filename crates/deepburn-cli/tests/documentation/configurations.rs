//! Checks that configurations in the documentation can be loaded, and that all keys in it exist.

use std::fs;

use serde_json::{Value, json};

use crate::deepburn;
use crate::markdown::Page;

const SECTIONS: [&str; 4] = ["model", "data", "training", "deepspeed"];
const BATCH_SIZES: [&str; 2] = ["train_batch_size", "train_micro_batch_size_per_gpu"];

/// Adds required sections to an incomplete configuration.
fn completed(mut config: Value) -> Value {
    let is_job = SECTIONS.iter().any(|section| config.get(section).is_some());
    if is_job {
        for section in ["training", "deepspeed"] {
            if config.get(section).is_none() {
                config[section] = json!({});
            }
        }
        let training = &mut config["training"];
        if training.get("max_steps").is_none() && training.get("epochs").is_none() {
            training["max_steps"] = json!(1);
        }
    }
    let deepspeed = if is_job { &mut config["deepspeed"] } else { &mut config };
    if BATCH_SIZES.iter().all(|size| deepspeed.get(size).is_none()) {
        deepspeed["train_micro_batch_size_per_gpu"] = json!(1);
    }
    config
}

#[test]
fn json_blocks_are_configurations() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let mut checked = 0;
    for page in Page::all() {
        for block in page.blocks().iter().filter(|block| block.language == "json") {
            let config: Value =
                serde_json::from_str(&block.code).unwrap_or_else(|e| panic!("{}: {e}", page.path));
            if let Some(path) = config["data"]["path"].as_str() {
                fs::write(folder.path().join(path), "Once upon a time").unwrap();
            }
            fs::write(&file, completed(config).to_string()).unwrap();
            let result = deepburn(&["check-config", file.to_str().unwrap(), "--ranks", "2"]);
            result.unwrap_or_else(|message| panic!("{}: {message}\n{}", page.path, block.code));
            checked += 1;
        }
    }
    assert!(checked > 5, "only {checked} blocks");
}

/// Returns a function that returns whether a key of a job file exists.
pub(crate) fn known_keys() -> impl Fn(&str) -> bool {
    let listing = deepburn(&["keys"]).unwrap();
    let paths = listing.lines().filter(|line| !line.starts_with(' ')).map(without_variant);
    let paths: Vec<String> = paths.collect();
    move |key| key.starts_with("model.config.") || paths.iter().any(|path| path == key)
}

fn without_variant(path: &str) -> String {
    match path.split_once('[').and_then(|(before, rest)| Some((before, rest.split_once(']')?.1))) {
        Some((before, after)) => format!("{before}{after}"),
        None => path.to_owned(),
    }
}

#[test]
fn named_keys_exist() {
    let is_known = known_keys();
    for page in Page::all() {
        for code in page.inline_code() {
            let starts = SECTIONS.iter().any(|section| code.starts_with(&format!("{section}.")));
            let is_path = code.chars().all(|c| c.is_ascii_alphanumeric() || "._".contains(c));
            let is_file = code == "model.safetensors";
            assert!(
                !starts || !is_path || is_file || is_known(&code),
                "{}: no key {code}",
                page.path
            );
        }
    }
}
