//! Tests of data sets and models from the cache of the Hub, and of the token cache.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::job::{Job, tiny_model};
use crate::reviews::reviews;

/// A commit hash, which is the name of a snapshot in the cache.
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Writes files to the cache in the layout of `huggingface_hub`.
fn cache(job: &Job, repository: &str, files: &[(&str, String)]) {
    let home = job.folder().join("hf/hub").join(repository);
    fs::create_dir_all(home.join("refs")).unwrap();
    fs::write(home.join("refs/main"), COMMIT).unwrap();
    for (name, content) in files {
        let path = home.join("snapshots").join(COMMIT).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

fn rows(count: usize) -> String {
    let rows = (0..count).map(|i| {
        let text = format!("review {i}: {}", ["what a bore", "what a joy"][i % 2]);
        format!("{}\n", json!({"text": text, "label": i % 2}))
    });
    rows.collect()
}

/// Returns a job on a data set of reviews with two configurations.
fn named_reviews() -> Job {
    let job = reviews()
        .with("data.path", "acme/reviews")
        .with("data.name", "short")
        .with("data.splits", json!({"train": "train", "eval": "25%", "test": "test"}))
        .with("data.sequence_length", 16)
        .with("training.max_steps", 2);
    let files = [
        ("short/train-00000-of-00001.jsonl", rows(80)),
        ("short/test-00000-of-00001.jsonl", rows(12)),
        ("long/train-00000-of-00001.jsonl", rows(500)),
    ];
    cache(&job, "datasets--acme--reviews", &files);
    job
}

#[test]
fn splits_are_found_by_their_names() {
    let job = named_reviews();
    let trained = job.train();
    assert!(trained.evaluations[0].eval_accuracy.is_some());
    let record = fs::read_to_string(job.folder().join("output/test.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&record).unwrap()["targets"], 12);
    let resolved = fs::read_to_string(job.folder().join("output/job.json")).unwrap();
    let resolved: Value = serde_json::from_str(&resolved).unwrap();
    assert_eq!(resolved["data"]["splits"]["path"], "acme/reviews");

    // The same data in a local folder, and with fractions of the train split.
    let folder = job.folder().join("hf/hub/datasets--acme--reviews/snapshots").join(COMMIT);
    let local = named_reviews().with("data.path", folder.to_str().unwrap());
    assert_eq!(local.train().numbers(), trained.numbers());
    let shares = named_reviews().with("data.splits", json!({"train": "75%", "eval": "25%"}));
    assert_eq!(shares.train().numbers(), trained.numbers());
}

#[test]
fn text_tokenizers_and_models_have_names_too() {
    let job = Job::tiny()
        .with(
            "data",
            json!({
                "kind": "text", "path": "acme/prose", "join": "blank_line", "sequence_length": 16,
                "splits": {"train": "validation", "test": "test"}, "tokenizer": "acme/tokens@main",
            }),
        )
        .with("model.pretrained", "acme/tiny")
        .with("training.max_steps", 2);
    let prose = |count| rows(count).replace("review", "chapter");
    let files = [("validation.jsonl", prose(60)), ("test.jsonl", prose(9))];
    cache(&job, "datasets--acme--prose", &files);
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    cache(&job, "models--acme--tiny", &[("config.json", read(&tiny_model().join("config.json")))]);
    let snapshot = job.folder().join("hf/hub/models--acme--tiny/snapshots").join(COMMIT);
    fs::copy(tiny_model().join("model.safetensors"), snapshot.join("model.safetensors")).unwrap();
    // A tokenizer that fits the vocabulary of the model.
    let trained = reviews().with("training.max_steps", 1);
    trained.train();
    let tokenizer = read(&trained.folder().join("output/model/tokenizer.json"));
    cache(&job, "models--acme--tokens", &[("tokenizer.json", tokenizer)]);

    let first = job.train();
    // The tokens of train and test are cached. A damaged file is written again.
    let kept = || {
        let files = fs::read_dir(job.folder().join("cache/deepburn/tokens")).unwrap();
        let files = files.map(|file| file.unwrap().path());
        // Each entry has a second file with its source.
        let is_entry = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "bin");
        let mut paths: Vec<_> = files.filter(is_entry).collect();
        paths.sort();
        paths
    };
    let files = kept();
    assert_eq!(files.len(), 2);
    let mut bytes = fs::read(&files[0]).unwrap();
    bytes[3] ^= 1;
    fs::write(&files[0], bytes).unwrap();
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains("damaged"), "{}", ending.stderr);
    assert_eq!((kept(), job.train().numbers()), (files, first.numbers()));
    let uncached = job.with("data.token_cache", false);
    fs::remove_dir_all(uncached.folder().join("cache")).unwrap();
    assert_eq!(uncached.train().numbers(), first.numbers());
    assert!(!uncached.folder().join("cache").exists());
}

#[test]
fn missing_repositories_are_named_offline() {
    for (path, value, parts) in [
        ("data.path", "acme/nothing", &["acme/nothing", "train-*.parquet", "HF_HUB_OFFLINE"][..]),
        ("data.path", "acme/reviews@v2", &["acme/reviews", "v2", "HF_HUB_OFFLINE"]),
        ("data.path", "acme/reviews@../..", &["acme/reviews@../..", "owner/name"]),
        ("data.name", "longest", &["longest", "`long`, `short`"]),
        ("data.splits.train", "dev", &["dev", "only"]),
        ("data.tokenizer", "acme/tokens", &["acme/tokens", "tokenizer.json", "HF_HUB_OFFLINE"]),
    ] {
        let job = named_reviews().with(path, value);
        let ending = job.run().failed(2, parts);
        assert!(!job.folder().join("output").exists(), "{}", ending.stderr);
    }
    let ending = Job::tiny().with("model.pretrained", "acme/tiny").run();
    ending.failed(2, &["acme/tiny", "config.json", "model.safetensors", "HF_HUB_OFFLINE"]);
}
