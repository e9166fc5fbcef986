//! Tests of invalid inputs. Each one leads to a single message with status 2, before anything is
//! written.

mod checkpoints;
mod command_lines;
mod data;
mod job_files;
mod values;

use std::fs;

use crate::job::{Job, left};
use crate::program::{Ending, finetune};

/// Runs an invalid job. Returns the difference from a correctly reported mistake, if there is one.
fn fault(job: &Job, arguments: &[&str], parts: &[&str]) -> Option<String> {
    let ending = finetune(job.folder(), arguments);
    fault_of(job, &ending, parts)
}

fn fault_of(job: &Job, ending: &Ending, parts: &[&str]) -> Option<String> {
    let partial = left(&job.folder().join("output"));
    ending.fault(2, parts).or_else(|| {
        (!partial.is_empty()).then(|| format!("{partial:?} left behind\n{}", ending.stderr))
    })
}

/// Writes the job file and runs it.
fn fault_of_job(job: &Job, parts: &[&str]) -> Option<String> {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    fault(job, &["--config", "job.json"], parts)
}

/// Panics with all faults at once, each with the name of its case.
#[track_caller]
fn none(faults: Vec<(String, Option<String>)>) {
    let faults: Vec<_> = faults
        .into_iter()
        .filter_map(|(case, fault)| fault.map(|fault| format!("== {case}\n{fault}")))
        .collect();
    assert!(faults.is_empty(), "{} cases:\n{}", faults.len(), faults.join("\n"));
}
