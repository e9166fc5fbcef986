//! The search of `deepburn tune`, as a DeepSpeed configuration describes it.

use std::path::PathBuf;

use serde::Serialize;

use crate::choice::choices;

/// What the section `autotuning` asks of a tuner. The default is a configuration without the
/// section.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AutotuningPlan {
    /// Folder of the results.
    pub results_dir: PathBuf,
    /// Folder of the experiments.
    pub exps_dir: PathBuf,
    /// Whether earlier results are replaced.
    pub overwrite: bool,
    /// Whether only ZeRO stages and micro-batch sizes are tuned.
    pub fast: bool,
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// Measured steps, at least 1.
    pub measured_steps: usize,
    /// What is optimized.
    pub metric: TuningMetric,
    /// Maximum number of measurements.
    pub trials: usize,
    /// Measurements without improvement after which the search stops; `None` without a limit.
    pub patience: Option<usize>,
    /// Limits of the global batch size, in samples; `None` keeps the batch size of the
    /// configuration.
    pub batch_sizes: Option<SizeLimits>,
    /// Limits of the micro-batch size, in samples.
    pub micro_batch_sizes: SizeLimits,
    /// Maximum number of micro-batch sizes; `None` for all.
    pub num_micro_batch_sizes: Option<usize>,
}

/// The smallest and the largest size that is tried, in samples; `None` without a limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SizeLimits {
    /// The smallest size.
    pub min: Option<usize>,
    /// The largest size.
    pub max: Option<usize>,
}

/// What a tuner optimizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TuningMetric {
    /// Samples per second, as many as possible.
    Throughput,
    /// Seconds of an optimizer step, as few as possible.
    Latency,
    /// Floating-point operations per second, as many as possible.
    Flops,
}

choices!(TuningMetric { "throughput" => Throughput, "latency" => Latency, "flops" => Flops });

impl SizeLimits {
    /// Returns whether `size` is within the limits.
    pub fn contains(&self, size: usize) -> bool {
        self.min.is_none_or(|min| min <= size) && self.max.is_none_or(|max| size <= max)
    }
}

impl Default for AutotuningPlan {
    fn default() -> Self {
        Self {
            results_dir: "autotuning_results".into(),
            exps_dir: "autotuning_exps".into(),
            overwrite: true,
            fast: false,
            warmup_steps: 1,
            measured_steps: 2,
            metric: TuningMetric::Throughput,
            trials: 6,
            patience: None,
            batch_sizes: None,
            micro_batch_sizes: SizeLimits::default(),
            num_micro_batch_sizes: None,
        }
    }
}
