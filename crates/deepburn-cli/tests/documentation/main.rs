//! Checks the README and the book in `docs/`: links resolve, commands and keys exist,
//! configurations can be loaded, and the chapter "Configuration keys" is up to date. The Rust code
//! is compiled by doc tests of `deepburn` and `deepburn-train`.

mod commands;
mod common_keys;
mod configurations;
mod links;
mod markdown;
mod shell;

use std::fs;
use std::process::Command;

use markdown::{Page, root};

/// Runs `deepburn` in the root of the repository and returns its output.
fn deepburn(arguments: &[&str]) -> Result<String, String> {
    run(env!("CARGO_BIN_EXE_deepburn"), arguments)
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .env("HF_HUB_OFFLINE", "1")
        .env_remove("RUST_LOG")
        .output()
        .unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

#[test]
fn the_chapter_of_keys_is_current() {
    let committed = fs::read_to_string(root().join("docs/src/keys.md")).unwrap();
    assert!(
        deepburn(&["keys", "--markdown"]).unwrap() == committed,
        "docs/src/keys.md is out of date; run \
         `cargo run --release --bin deepburn -- keys --markdown > docs/src/keys.md`"
    );
}

#[test]
fn rust_code_is_compiled_by_doc_tests() {
    let crates = ["crates/deepburn", "crates/deepburn-train"];
    let included: String = crates
        .map(|path| fs::read_to_string(root().join(path).join("src/documentation.rs")).unwrap())
        .concat();
    for page in Page::all() {
        let has_rust = page.blocks().iter().any(|block| block.language.starts_with("rust"));
        let include = format!("{}\")]", page.path);
        assert!(!has_rust || included.contains(&include), "no doc test includes {}", page.path);
    }
}

#[test]
fn the_readme_is_short() {
    let lines = fs::read_to_string(root().join("README.md")).unwrap().lines().count();
    assert!(lines <= 130, "README.md has {lines} lines; move text to docs/src");
}
