//! Runs the benchmark `gpu` with programs that fail and hang.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Writes a shell script that stands in for a program.
fn program(folder: &Path, name: &str, script: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("an own file");
}

/// Returns the failures in a file of results.
fn failures(path: &Path) -> Vec<String> {
    let results: Value =
        serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON");
    serde_json::from_value(results["failures"].clone()).expect("texts")
}

#[test]
fn programs_that_fail_and_hang_are_recorded() {
    let folder = tempfile::tempdir().expect("a folder");
    let programs = folder.path();
    program(programs, "finetune", "echo no device >&2; exit 1");
    // It keeps the results so far, which a run that is cut off would leave.
    program(programs, "programs", "cp ../../results/gpu-flex.json ../../early.json; sleep 60");
    let source = r#"{"commit": {"hash": "0123456789", "dirty": false}, "rustc": "rustc 1"}"#;
    fs::write(programs.join("build.json"), source).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_deepburn-benches"))
        .args(["gpu", "--quick", "--backend", "flex", "--limit", "9", "--programs"])
        .arg(programs)
        .arg("--results")
        .arg(programs.join("results"))
        .output()
        .expect("started");
    let table = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{table}");
    assert!(table.contains("## On an NVIDIA GPU") && table.contains("Failed:"), "{table}");
    // A reply of 12,000 characters has to hold it, with the failures that follow it.
    assert!(table.len() < 8_000, "{} characters", table.len());

    let early = failures(&programs.join("early.json"));
    assert!(early[0].starts_with("smoke: ") && early[0].contains("no device"), "{early:?}");
    let all = failures(&programs.join("results/gpu-flex.json"));
    assert!(all.iter().any(|it| it.contains("programs") && it.contains("killed after")), "{all:?}");
    assert!(all.iter().any(|it| it.contains("fp16, 2 ranks")), "{all:?}");
    assert!(all.len() > early.len());
}
