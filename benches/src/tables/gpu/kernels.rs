//! Measures the time of each kernel, and runs the tests of kernels under NVIDIA's
//! compute-sanitizer: the steps `profile` and `sanitizer`.
//!
//! CubeCL logs the time of each launch. Measurement errors: while it logs, it waits for the end of
//! each launch, so that short kernels look slower than they are. Copies are not logged. The first
//! step includes the compilation of kernels, but their times do not.

use std::collections::BTreeMap;
use std::fs;

use super::super::*;
use super::checks::{observe_tests, test_program};
use super::recording::{GpuRecording, TableHead};

/// Optimizer steps that are profiled.
const STEPS: usize = 3;
/// Number of kernels in the table.
const SHOWN: usize = 16;
/// Maximum number of characters of a kernel's name.
const NAME: usize = 70;
/// Time limit of the profiled run in seconds.
const LIMIT: u64 = 90;
/// Time limit of a tool of compute-sanitizer in seconds. Kernels are many times slower under it.
const TOOL_LIMIT: u64 = 70;
/// The tools of compute-sanitizer.
const TOOLS: [&str; 4] = ["memcheck", "racecheck", "synccheck", "initcheck"];
/// The tests that run under it, one of each family of kernels. Attention has two: one with every
/// mask, and one in 16 bits.
const TESTS: [&str; 14] = [
    "attention_in_16_bits",
    "attention_with_every_mask",
    "casts_round",
    "columns_follow",
    "copies_are",
    "flat_arrays",
    "gelu_follows",
    "layer_norm_follows",
    "losses_leave_padding",
    "rotations_follow",
    "rows_are_added",
    "stats_see_every",
    "steps_of_many",
    "sums_of_parts",
];

/// Trains GPT-2 124M in bf16 and adds up the log of CubeCL.
pub(super) fn profile(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    let workload = gpt2(recording.suite, (8, 1024), (2, 32));
    let table = TableHead {
        title: format!("Kernels of a step: {}, bf16", workload.title(1)),
        columns: vec![Quantity::KernelTime, Quantity::KernelShare, Quantity::Launches],
    };
    if recording.backend() != "cuda" {
        return recording.lacks(&table.title, "only CUDA's kernels are profiled");
    }
    let log = recording.suite.scratch().join("profile.log");
    let logger = format!("[profiling]\nlogger = {{ level = \"basic\", file = {} }}\n", json!(log));
    let folder = recording.folder("profile", &(recording.caching_in("cached") + &logger))?;
    let job = BenchJob::new(&workload, &recording.suite.tokens(&workload)?, STEPS)
        .precision(RunPrecision::Bf16)
        .set("training.backend", recording.backend())
        .in_folder(&folder)
        .within(recording.limit(LIMIT)?);
    recording.suite.train(&job, recording.suite.output()?, &[])?;
    let kernels = kernels_in(&fs::read_to_string(log)?);
    let total: f64 = kernels.iter().map(|(_, _, seconds)| seconds).sum();
    let launches = kernels.iter().map(|(_, launches, _)| launches).sum();
    let all = ("all kernels".to_owned(), launches, total);
    for (name, launches, seconds) in [all].into_iter().chain(kernels.into_iter().take(SHOWN)) {
        recording.row(&table, &name, false, |_| {
            Ok(Observations::of(Quantity::KernelTime, seconds / STEPS as f64)
                .with(Quantity::KernelShare, seconds / total)
                .with(Quantity::Launches, launches / STEPS as f64))
        })?;
    }
    Ok(())
}

/// Returns name, number of launches and seconds of each kernel in a log, the slowest first.
///
/// A line of the log is `| 12.3µs | name`. Other lines are the tables at the end, and the rest of
/// names that have several lines.
fn kernels_in(log: &str) -> Vec<(String, f64, f64)> {
    let mut kernels = BTreeMap::<String, (f64, f64)>::new();
    let launches = log.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    for (duration, name) in launches {
        let Some(seconds) = seconds(duration.trim()) else { continue };
        // In backticks, because Markdown would take `<f32>` for HTML.
        let name = format!("`{}`", name.trim().chars().take(NAME).collect::<String>());
        let kernel = kernels.entry(name).or_default();
        *kernel = (kernel.0 + 1.0, kernel.1 + seconds);
    }
    let mut kernels: Vec<_> =
        kernels.into_iter().map(|(name, (launches, seconds))| (name, launches, seconds)).collect();
    kernels.sort_by(|left, right| right.2.total_cmp(&left.2));
    kernels
}

/// Returns the seconds of a duration as Rust prints it. Returns `None` for other texts.
fn seconds(duration: &str) -> Option<f64> {
    // `s` is the end of all others.
    let units = [("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let (unit, factor) = units.into_iter().find(|(unit, _)| duration.ends_with(unit))?;
    Some(duration.strip_suffix(unit)?.parse::<f64>().ok()? * factor)
}

/// Runs tests of kernels under each tool of compute-sanitizer.
pub(super) fn sanitizer(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    let table = TableHead {
        title: "Tests of kernels under compute-sanitizer".into(),
        columns: vec![Quantity::Tests, Quantity::Program],
    };
    if recording.backend() != "cuda" {
        return recording.lacks(&table.title, "it only runs CUDA's kernels");
    }
    let folder = recording.caching("sanitizer")?;
    for tool in TOOLS {
        recording.row(&table, tool, false, |recording| {
            let command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"];
            let limit = recording.limit(TOOL_LIMIT)?;
            observe_tests(
                &test_program(recording.suite, &command, "cube", &TESTS, &folder, limit).run()?,
            )
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_added_up_by_kernel() {
        let log = "| 1.5ms      | matmul<f32>\n  f32\n| 500ns      | cast\n| 2µs        | matmul<f32>\n\
            |⎺⎺⎺|\n| Name   | Duration | Num Computed | Ratio |\n| matmul | 1.502ms | 2 | 100 % |\n";
        let kernels = kernels_in(log);
        assert_eq!(kernels[0].0, "`matmul<f32>`");
        assert_eq!((kernels[0].1, kernels[1].1, kernels.len()), (2.0, 1.0, 2));
        // Sums of floats are rounded.
        assert!((kernels[0].2 - 1.502e-3).abs() < 1e-12, "{kernels:?}");
        assert_eq!(seconds("Duration"), None);
    }
}
