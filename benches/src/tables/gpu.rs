//! Checks and measures the programs on an NVIDIA GPU, on a machine that has neither Rust nor a
//! network.
//!
//! `benches/gpu/build` builds the programs, and `benches/gpu/run` starts this benchmark on the
//! other machine, which may be at hand for minutes only. So each program has a time limit, a
//! failure does not end the other programs, and the file of results is written after each row:
//!
//! ```text
//! recording.rs   time left, kernels that CubeCL stores, rows and failures → gpu-<card>.json
//! checks.rs      smoke: does it train as on the CPU?   tests: tests, ranks, stages and precisions
//! speed.rs       speed: GPT-2 124M beside PyTorch      batches: its largest micro-batch
//!                                                      large: GPT-2 XL with offload
//! kernels.rs     profile: time of each kernel          sanitizer: NVIDIA's checks of kernels
//! card.rs        nvidia-smi
//! ```
//!
//! Measurement errors: each row is measured once. Steps are timed by the programs, which wait for
//! the device before the update of a step, for its loss and its norm: the next step's time
//! contains the update. PyTorch's script waits at the end of a step. See also `card.rs` and
//! `kernels.rs`.

mod card;
mod checks;
mod kernels;
mod recording;
mod speed;

use std::path::PathBuf;

use clap::ValueEnum;

use super::*;
use recording::GpuRecording;

pub(super) const BENCH: Bench = Bench {
    name: "gpu",
    title: "On an NVIDIA GPU",
    about: "Tiny models are compared with the backend `flex` on the same machine, and ZeRO stages with each other, bit \
        by bit. Ranks are threads that share the GPU. In bf16, DeepBurn keeps f32 master weights, and PyTorch f32 \
        weights under autocast. The GPU's memory is sampled every 100 ms; device memory is DeepBurn's own count, and peak \
        memory the host's. Each row is one run.",
    run,
};

/// Options of the benchmark `gpu`. `benches/gpu/run` sets the first two.
#[derive(Debug, clap::Args)]
pub(crate) struct GpuOptions {
    /// Folder of programs that benches/gpu/build has built. Nothing is built then.
    #[arg(long, value_name = "DIR")]
    pub(crate) programs: Option<PathBuf>,
    /// Backend that `gpu` measures.
    #[arg(long, default_value = "cuda")]
    pub(crate) backend: String,
    /// Steps of `gpu`, separated by commas [default: smoke,tests,speed,profile,batches].
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    pub(crate) only: Vec<GpuStep>,
    /// Time limit of `gpu` in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 560)]
    pub(crate) limit: u64,
    /// Folder of results [default: benches/results].
    #[arg(long, value_name = "DIR")]
    pub(crate) results: Option<PathBuf>,
}

/// A step of the benchmark `gpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GpuStep {
    /// Train a tiny model three times.
    Smoke,
    /// Run the tests of kernels and programs, and compare ranks, stages and precisions.
    Tests,
    /// Measure GPT-2 124M beside PyTorch.
    Speed,
    /// Measure the time of each kernel.
    Profile,
    /// Double the micro-batch until it does not fit.
    Batches,
    /// Run the tests of kernels under compute-sanitizer.
    Sanitizer,
    /// Measure GPT-2 XL with offload.
    Large,
}

impl GpuStep {
    /// The steps of a run without `--only`. The others need most of a run for themselves.
    const FIRST: [Self; 5] = [Self::Smoke, Self::Tests, Self::Speed, Self::Profile, Self::Batches];

    /// Returns the name of the step on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs the steps. A step that fails is recorded in `results`.
///
/// # Errors
/// Returns an error if the file of results cannot be written.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let only = &suite.options.gpu.only;
    let steps = if only.is_empty() { &GpuStep::FIRST[..] } else { only };
    name_results(suite, results, steps);
    let mut recording = GpuRecording::new(suite, results)?;
    for step in steps {
        let name = step.name();
        eprintln!("--- {name}: {} s left", recording.left().as_secs());
        let done = match step {
            GpuStep::Smoke => checks::smoke(&mut recording),
            GpuStep::Tests => checks::tests(&mut recording),
            GpuStep::Speed => speed::small(&mut recording),
            GpuStep::Profile => kernels::profile(&mut recording),
            GpuStep::Batches => speed::batches(&mut recording),
            GpuStep::Sanitizer => kernels::sanitizer(&mut recording),
            GpuStep::Large => speed::large(&mut recording),
        };
        if let Err(error) = done {
            recording.fail(&name, &error)?;
        }
    }
    recording.write()
}

/// Records the GPU and the command, and names the results `gpu-<card>`. Results of selected steps
/// have another name, so that they do not replace the results of all steps.
fn name_results(suite: &Suite, results: &mut Results, steps: &[GpuStep]) {
    let options = &suite.options.gpu;
    if options.backend == "cuda" {
        match card::query() {
            Ok(gpu) => results.machine.gpu = Some(gpu),
            Err(error) => results.failures.push(error.to_string()),
        }
    }
    let card = results.machine.gpu.as_ref().map_or(&options.backend, |gpu| &gpu.name);
    results.command = String::from("benches/gpu/run");
    results.bench = format!("gpu-{}", card::file_name(card));
    if suite.options.quick {
        results.command += " --quick";
    }
    if !options.only.is_empty() {
        let names: Vec<_> = steps.iter().map(|step| step.name()).collect();
        results.command += &format!(" --only {}", names.join(","));
        results.bench += &format!("-{}", names.join("-"));
    }
}
