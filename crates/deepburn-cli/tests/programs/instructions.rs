//! Tests of `DEEPBURN_INSTRUCTIONS`, the widest instructions that CPU kernels may use.

use std::fs;

use deepburn::kernels::Instructions;

use crate::job::{Job, Trained, left};
use crate::program::{Ending, command, finetune_command};

const VARIABLE: &str = "DEEPBURN_INSTRUCTIONS";

/// Writes the job file and runs it with a value of the variable.
fn run(job: &Job, value: &str) -> Ending {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let mut finetune = finetune_command(job.folder(), &["--config", "job.json"]);
    Ending::of(finetune.env(VARIABLE, value).output().unwrap())
}

/// Returns the levels of this processor, the narrowest first.
fn levels() -> impl Iterator<Item = Instructions> {
    Instructions::ALL.into_iter().filter(|level| *level <= Instructions::of_processor())
}

#[test]
fn every_level_trains_alike() {
    for (precision, tolerance) in [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 2e-2)] {
        let losses = |level: Instructions| {
            let job = Job::uneven().in_precision(precision);
            let ending = run(&job, level.name()).succeeded();
            let line = format!("CPU kernels: {level}");
            assert!(ending.stderr.contains(&line), "{}", ending.stderr);
            let steps = Trained::read(&job.folder().join("output")).steps;
            steps.iter().map(|row| row.loss).collect::<Vec<_>>()
        };
        let widest = losses(Instructions::of_processor());
        for level in levels() {
            for (loss, expected) in losses(level).iter().zip(&widest) {
                // Products round at other points: to f32 or to bf16, with 2^-24 or 2^-9.
                let error = (loss - expected).abs();
                assert!(error < tolerance, "{precision}, {level}: {loss}, not {expected}");
            }
        }
    }
}

#[test]
fn a_narrower_level_is_named_with_its_reason() {
    let Some(narrower) = levels().find(|level| *level < Instructions::of_processor()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut env = command(env!("CARGO_BIN_EXE_deepburn"), folder.path(), &["env"]);
    let text = Ending::of(env.env(VARIABLE, narrower.name()).output().unwrap()).succeeded().stdout;
    let widest = Instructions::of_processor();
    let line =
        format!("CPU kernels: {narrower} ({VARIABLE}; the processor has {widest}); products");
    assert!(text.contains(&line), "{text}");
}

#[test]
fn a_level_that_cannot_be_honored_is_refused_before_training() {
    let unsupported = Instructions::ALL.into_iter().find(|it| *it > Instructions::of_processor());
    let lacking = unsupported.map(|level| (level.name(), "which this processor lacks; set it to"));
    for (value, rule) in [("avx", "allowed are portable, avx2,")].into_iter().chain(lacking) {
        let job = Job::tiny();
        let message = format!("{VARIABLE} is ");
        run(&job, value).failed(2, &[&message, value, rule, "unset it"]);
        assert_eq!(left(&job.folder().join("output")), [""; 0]);
        let mut tool = command(env!("CARGO_BIN_EXE_deepburn"), job.folder(), &["env"]);
        Ending::of(tool.env(VARIABLE, value).output().unwrap()).failed(2, &[&message, rule]);
    }
}
