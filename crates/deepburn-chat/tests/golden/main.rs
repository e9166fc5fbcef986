//! Compares chat templates, masks and training examples with files that `transformers` 5.23 and TRL
//! 1.16 wrote.
//!
//! The files are in `golden/llm/sft` beside the folder that `DEEPBURN_TEST_DATA` names. Without the
//! variable, the tests are skipped.

mod chat;
mod hf_tokenizer;
mod prepared;
mod turns;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Returns the folder with the golden files of language models.
fn golden() -> Option<PathBuf> {
    let data = std::env::var_os("DEEPBURN_TEST_DATA").map(PathBuf::from);
    let golden = data
        .and_then(|data| Some(data.parent()?.join("golden/llm")))
        .filter(|it| it.join("sft").is_dir());
    if golden.is_none() {
        eprintln!("skipped: DEEPBURN_TEST_DATA does not name a folder beside golden/llm");
    }
    golden
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|it| serde_json::from_str(it).unwrap()).collect()
}

/// Returns the JSON files of a folder, sorted by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|it| it.extension().is_some_and(|it| it == "json")).collect();
    files.sort();
    files
}
