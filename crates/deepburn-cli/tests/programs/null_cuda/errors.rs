//! Machines on which CUDA is not installed properly, and devices without memory. The program ends
//! with one message, which names the cause and a remedy.

use std::fs;
use std::path::Path;

use deepburn_null_cuda as driver;
use serde_json::json;

use super::{NullCuda, gpt2, job};
use crate::backends::has_nvidia_gpu;
use crate::job::{Job, left};
use crate::program::Ending;

/// Checks that the program refuses the device before it writes anything.
#[track_caller]
fn refused(cuda: &NullCuda, status: i32, variables: &[(&str, &Path)], parts: &[&str]) {
    let job = job("gpt2", gpt2(1, 0.0));
    let mut command = cuda.command(&job);
    command.env_remove("DEEPBURN_SELF_TEST").envs(variables.iter().copied());
    let ending = ended(&mut command, status, parts);
    assert!(ending.stderr.contains("training.backend: \"cuda\""), "{}", ending.stderr);
    assert!(!job.folder().join("output").exists(), "{}", ending.stderr);
}

/// Runs a command that fails, and checks that its message is the last line.
#[track_caller]
fn ended(command: &mut std::process::Command, status: i32, parts: &[&str]) -> Ending {
    let ending = Ending::of(command.output().unwrap()).failed(status, parts);
    let last = ending.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: ") && last.len() < 600, "{}", ending.stderr);
    ending
}

#[test]
fn a_machine_without_the_driver_is_refused() {
    let Some(cuda) = NullCuda::find() else { return };
    if !has_nvidia_gpu() {
        let compiler = cuda.toolkit.join("lib");
        let variables = [("LD_LIBRARY_PATH", compiler.as_path())];
        refused(&cuda, 2, &variables, &["sees no device", "libcuda.so", "driver"]);
    }
}

/// On a machine with CUDA, the program finds its compiler in a standard folder. The driver then
/// computes zeros, and the message names the compiler too.
#[test]
fn a_machine_without_the_compiler_is_refused() {
    let Some(cuda) = NullCuda::find() else { return };
    let libraries = cuda.libraries(false);
    let variables = [("LD_LIBRARY_PATH", Path::new(&libraries))];
    refused(&cuda, 1, &variables, &["libnvrtc.so", "LD_LIBRARY_PATH", "self-test"]);
}

#[test]
fn a_machine_without_headers_is_refused() {
    let Some(cuda) = NullCuda::find() else { return };
    let empty = tempfile::tempdir().unwrap();
    let expected = ["header cuda_runtime.h was not found", "set CUDA_PATH"];
    refused(&cuda, 1, &[("CUDA_PATH", empty.path())], &expected);
}

#[test]
fn a_driver_that_is_older_than_the_compiler_is_refused() {
    let Some(cuda) = NullCuda::find() else { return };
    let expected = ["the driver is older than CUDA's compiler", "update the driver"];
    refused(&cuda, 1, &[(driver::VERSION, Path::new("12000"))], &expected);
}

/// Functions are loaded when they are first called: some when devices are counted, others by the
/// self-test.
#[test]
fn a_driver_without_a_function_is_refused() {
    let Some(cuda) = NullCuda::find() else { return };
    let library = cuda.folder.path().join("driver").join(driver::FILE_NAME);
    let complete = fs::read(&library).unwrap();
    fs::remove_file(&library).unwrap();
    for (name, status) in [("cuDeviceGetCount", 2), ("cuMemAllocAsync", 1)] {
        fs::write(&library, without_function(&complete, name)).unwrap();
        refused(&cuda, status, &[], &[&format!("no function {name}"), "update NVIDIA's driver"]);
    }
}

/// Returns a library in which the function `name` has another name.
fn without_function(library: &[u8], name: &str) -> Vec<u8> {
    let (old, mut changed) = (format!("\0{name}\0").into_bytes(), library.to_vec());
    let places: Vec<_> = (0..library.len()).filter(|at| library[*at..].starts_with(&old)).collect();
    assert!(!places.is_empty(), "the driver has no function {name}");
    for place in places {
        changed[place + 1] = b'_';
    }
    changed
}

/// A driver that computes nothing does not pass the self-test.
#[test]
fn a_device_that_computes_zeros_is_refused() {
    let Some(cuda) = NullCuda::find() else { return };
    refused(&cuda, 1, &[], &["1256 of 1256 results are wrong", "libnvrtc.so", "CUDA_PATH"]);
}

/// Returns a job of four steps on a device with `memory` bytes.
fn limited(cuda: &NullCuda, job: &Job, memory: u64) -> std::process::Command {
    let mut command = cuda.command(job);
    command.env(driver::MEMORY, memory.to_string());
    command
}

#[test]
fn a_device_without_memory_for_the_model_ends_the_run() {
    let Some(cuda) = NullCuda::find() else { return };
    for (stage, ranks) in [(0, 1), (3, 2)] {
        let job = job("gpt2", gpt2(1, 0.0)).sharded(stage, ranks);
        let expected = ["rank ", "the device could not allocate an array of", "ZeRO stage"];
        let ending = ended(&mut limited(&cuda, &job, 200_000), 1, &expected);
        let output = left(&job.folder().join("output"));
        assert!(!output.contains(&"model") && !output.contains(&"report.html"), "{ending:?}");
    }
}

/// The evaluation after the second step has larger batches than training.
#[test]
fn a_device_without_memory_for_an_evaluation_ends_the_run() {
    let Some(cuda) = NullCuda::find() else { return };
    let job = job("gpt2", gpt2(1, 0.0))
        .with("data.splits", json!({"train": "50%", "eval": "50%"}))
        .with("training.eval_steps", 2)
        .with("training.per_device_eval_batch_size", 512);
    let expected = ["rank 0", "the device could not allocate an array of"];
    let ending = ended(&mut limited(&cuda, &job, 16 << 20), 1, &expected);
    let output = job.folder().join("output");
    let metrics = fs::read_to_string(output.join("metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 2, "{metrics}{}", ending.stderr);
    assert!(!left(&output).contains(&"model"), "{}", ending.stderr);
}
