//! Compiled kernels are kept for the next run, in a folder for each process.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{NullCuda, gpt2, job};

/// Returns the files of a folder and of its folders with their lengths, in order.
fn files(folder: &Path) -> Vec<(PathBuf, u64)> {
    let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let below = |path: PathBuf| match path.is_dir() {
        true => files(&path),
        false => vec![(path.clone(), fs::metadata(&path).unwrap().len())],
    };
    let mut all: Vec<_> = entries.flat_map(below).collect();
    all.sort();
    all
}

#[test]
fn the_second_run_compiles_nothing() {
    let Some(cuda) = NullCuda::find() else { return };
    let kernels = cuda.folder.path().join("deepburn/kernels");
    let train = |layers| cuda.run(&job("gpt2", gpt2(layers, 0.0)).with("training.max_steps", 1));
    let first = train(1);
    let kept = files(&kernels);
    let bytes: u64 = kept.iter().map(|(_, len)| len).sum();
    assert!(bytes > 10_000, "{kept:?}");
    assert_eq!(train(1).kernels, first.kernels);
    assert_eq!(files(&kernels), kept, "one run after the other uses one folder");
}

#[test]
fn the_cache_can_be_turned_off_and_the_users_has_precedence() {
    let Some(cuda) = NullCuda::find() else { return };
    let train = |job: &crate::job::Job, switch: &str| {
        let output = cuda.command(job).env("DEEPBURN_KERNEL_CACHE", switch).output().unwrap();
        crate::program::Ending::of(output).succeeded();
    };
    let tiny = || job("gpt2", gpt2(1, 0.0)).with("training.max_steps", 1);
    train(&tiny(), "off");
    let own = tiny();
    let folder = own.folder().join("kernels");
    let settings = format!("[compilation]\ncache = {{ file = {} }}\n", json!(folder));
    fs::write(own.folder().join("cubecl.toml"), settings).unwrap();
    train(&own, "on");
    assert!(!files(&folder).is_empty());
    assert!(!cuda.folder.path().join("deepburn/kernels").exists());
}

#[test]
fn settings_that_cannot_be_read_are_refused() {
    let Some(cuda) = NullCuda::find() else { return };
    let job = job("gpt2", gpt2(1, 0.0));
    fs::write(job.folder().join("cubecl.toml"), "[compilation\ncache = garbage").unwrap();
    let output = cuda.command(&job).output().unwrap();
    crate::program::Ending::of(output).failed(2, &["\"cuda\" sees no device: "]);
}
