//! Tests that runs which exceed a memory limit fail before anything is written.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::job::Job;
use crate::program::{Ending, command};

/// Runs a job with an address space limit of `kibibytes`.
#[cfg(target_os = "linux")]
fn run_within(job: &Job, kibibytes: u64) -> Ending {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let limited = format!("ulimit -v {kibibytes}; exec \"$@\"");
    let program = env!("CARGO_BIN_EXE_finetune");
    let arguments = ["-c", &limited, "sh", program, "--config", "job.json"];
    let mut shell: Command = command("sh", job.folder(), &arguments);
    Ending::of(shell.output().unwrap())
}

/// The model has 604 million parameters: 9.7 GB of model states on two ranks, including 4.8 GB of
/// optimizer states.
#[cfg(target_os = "linux")]
#[test]
fn model_states_beyond_a_limit_are_refused() {
    let config =
        json!({"n_layer": 3, "n_embd": 4096, "n_head": 8, "n_positions": 64, "vocab_size": 512});
    let job = Job::tiny().with("model.pretrained", Value::Null).with("model.config", config);
    let within = [
        (9_000_000, r#"set "offload_optimizer": {"device": "nvme""#),
        (4_500_000, r#""offload_param": {"device": "nvme""#),
    ];
    for (kibibytes, remedy) in within {
        let needed = "model states of 2 ranks on this host need 9.71 GB";
        run_within(&job, kibibytes).failed(2, &[needed, "ulimit -v", remedy]);
        assert!(!job.folder().join("output").exists(), "something was written");
    }
}

#[test]
fn the_forecast_is_logged() {
    let ending = Job::tiny().with("training.max_steps", 1).run().succeeded();
    let forecasts = ending.stderr.matches("memory forecast, 2 ranks on this host").count();
    assert_eq!(forecasts, 1, "{}", ending.stderr);
}
