//! What is printed and measured, and what other programs read of a run.
//!
//! Every section has an `enabled` of its own. Monitors of services that have no library for Rust
//! are in [`super::unsupported`].

use crate::spec::*;

/// Name of a run that has none.
pub(crate) const DEFAULT_JOB_NAME: &str = "DeepSpeedJobName";

section! {
    /// Loss, learning rate and loss scale as TensorBoard reads them.
    pub(crate) struct Tensorboard<'a> {
        /// Write TensorBoard events.
        enabled: bool = flag(false),
        /// Folder that contains the run's folder. Default: the job's output_dir.
        output_path: &'a str = text(""),
        /// Name of the run, and of the folder that its files are in.
        job_name: &'a str = text("DeepSpeedJobName"),
    }

    /// Loss, learning rate and loss scale as CSV files.
    pub(crate) struct CsvMonitor<'a> {
        /// Write one CSV file a metric.
        enabled: bool = flag(false),
        /// Folder that contains the run's folder. Default: the job's output_dir.
        output_path: &'a str = text(""),
        /// Name of the run, and of the folder that its files are in.
        job_name: &'a str = text("DeepSpeedJobName"),
    }

    /// A timeline of some steps and of their memory. No DeepSpeed version reads this section.
    pub(crate) struct Profiling<'a> {
        /// Profile some steps.
        enabled: bool = flag(false),
        /// Steps that are profiled: the first and the last, or a list of one, three or more.
        profile_steps: () = list(),
        /// Where the profile is written; `profile` in the job's output_dir without it.
        output_folder: Option<&'a str> = opt_text(),
    }

    /// Count of floating-point operations by module.
    pub(crate) struct FlopsProfiler<'a> {
        /// Count the floating-point operations of one step.
        enabled: bool = flag(false),
        /// Part of forward that is computed again in backward.
        recompute_fwd_factor: f64 = real(NotNegative, 0.0),
        /// The step that is profiled.
        profile_step: usize = positive(1),
        /// Depth to which the top modules are printed; -1 for all.
        module_depth: i64 = integer_in(-1, i64::MAX, -1),
        /// Modules printed per depth.
        top_modules: usize = positive(1),
        /// Print the whole tree of modules.
        detailed: bool = flag(true),
        /// File instead of the screen.
        output_file: Option<&'a str> = opt_text(),
        /// What the device can do at best, of which the share that was reached is printed.
        /// DeepSpeed has no such key.
        peak_tflops: Option<f64> = opt_real(Positive).unit("TFLOP/s"),
    }
}
