//! Monitors and profilers.
//!
//! Every section has a key `enabled`. Monitors of services without a Rust library are in
//! [`super::unsupported`].

use crate::spec::*;

/// Default name of a run.
pub(crate) const DEFAULT_JOB_NAME: &str = "DeepSpeedJobName";
/// Default project of a W&B run.
pub(crate) const DEFAULT_PROJECT: &str = "deepspeed";

section! {
    /// TensorBoard monitor: loss, learning rate and loss scale as event files.
    pub(crate) struct Tensorboard<'a>: auto {
        /// Write TensorBoard event files.
        enabled: bool = flag(false),
        /// Parent folder of the event files. Empty (default): the job's output_dir.
        output_path: &'a str = text(""),
        /// Name of the run, and of its folder in output_path.
        job_name: &'a str = text("DeepSpeedJobName"),
    }

    /// CSV monitor: loss, learning rate and loss scale as CSV files.
    pub(crate) struct CsvMonitor<'a>: auto {
        /// Write one CSV file per metric.
        enabled: bool = flag(false),
        /// Parent folder of the CSV files. Empty (default): the job's output_dir.
        output_path: &'a str = text(""),
        /// Name of the run, and of its folder in output_path.
        job_name: &'a str = text("DeepSpeedJobName"),
    }

    /// Weights & Biases monitor: an offline run in the folder wandb of the job's output_dir, which
    /// `wandb sync` uploads. Training never uses the network for it.
    pub(crate) struct Wandb<'a>: auto {
        /// Write a W&B offline run.
        enabled: bool = flag(false),
        /// Group of the run.
        group: Option<&'a str> = opt_text(),
        /// Team (entity) of the run. Unset: the default of the account that uploads the run.
        team: Option<&'a str> = opt_text(),
        /// Project of the run.
        project: &'a str = text("deepspeed"),
    }

    /// Step profiler: a trace and the memory usage of selected steps. DeepBurn extension.
    pub(crate) struct Profiling<'a> {
        /// Profile the steps in profile_steps.
        enabled: bool = flag(false),
        /// Steps to profile: two numbers are the first and the last step of a range, any other
        /// count lists single steps. Required if profiling is enabled.
        profile_steps: () = list(),
        /// Output folder of the profile. Unset: profile in the job's output_dir.
        output_folder: Option<&'a str> = opt_text(),
    }

    /// FLOPS profiler: floating-point operations per module.
    pub(crate) struct FlopsProfiler<'a> {
        /// Count the floating-point operations of profile_step.
        enabled: bool = flag(false),
        /// Fraction of forward that backward recomputes, for example 1.0 with full activation
        /// checkpointing. Added to the operations of the step.
        recompute_fwd_factor: f64 = real(NotNegative, 0.0),
        /// Optimizer step to profile, counted from 1.
        profile_step: i64 = integer(1),
        /// Depth to which the largest modules are listed; -1 for all depths.
        module_depth: i64 = integer_in(-1, i64::MAX, -1),
        /// Number of modules listed per depth.
        top_modules: usize = positive(1),
        /// Print the complete module tree.
        detailed: bool = flag(true),
        /// Output file of the profile. Unset: standard error.
        output_file: Option<&'a str> = opt_text(),
        /// Peak rate of the device. If set, the profile also reports model FLOPs utilization (MFU).
        /// DeepBurn extension.
        peak_tflops: Option<f64> = opt_real(Positive).unit("TFLOP/s"),
    }
}
