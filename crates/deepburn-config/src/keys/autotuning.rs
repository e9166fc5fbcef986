//! `autotuning`: how `deepburn tune` searches for the fastest configuration.
//!
//! A training run cannot use the section (`rules/autotuning.rs`). The tuner reads it, and removes
//! it before it resolves the configurations that it tries.

use crate::plan::TuningMetric;
use crate::spec::*;

section! {
    /// Autotuning: search for the fastest configuration that fits, with `deepburn tune`. A training
    /// run refuses it.
    pub(crate) struct Autotuning<'a> {
        /// Enable autotuning. A training run needs false.
        enabled: bool = flag(false),
        /// Tune only ZeRO stages and micro-batch sizes. If it is not given, offload, recomputation
        /// and buffers are tuned too.
        fast: bool = flag(true),
        /// Folder of the results.
        results_dir: &'a str = text("autotuning_results"),
        /// Folder of the experiments: one configuration in each file.
        exps_dir: &'a str = text("autotuning_exps"),
        /// Replace earlier results. With false, a folder with results is an error.
        overwrite: bool = flag(true),
        /// First measured step; the steps before it are a warm-up. `deepburn tune` measures steps 2
        /// and 3 unless this or end_profile_step is given.
        start_profile_step: usize = positive(3).unit("steps"),
        /// Last measured step.
        end_profile_step: usize = positive(5).unit("steps"),
        /// File of the measured metric.
        metric_path = opt_text().inert("the tuner measures steps itself"),
        /// Metric to optimize: "throughput" (samples per second), "latency" (seconds of a step) or
        /// "flops" (which orders configurations of a model as throughput does). The smallest
        /// latency is the best; DeepSpeed keeps the largest.
        metric: TuningMetric = choice("throughput"),
        /// Search strategy: "gridsearch", "random" or "model_based".
        tuner_type = one_of(&["gridsearch", "random", "model_based"], "gridsearch")
            .inert("forecasts choose the configurations that are measured"),
        /// Number of measurements without improvement after which the search stops.
        tuner_early_stopping: usize = positive(5).unit("measurements"),
        /// Maximum number of measurements. `deepburn tune` takes 6 unless it is given.
        tuner_num_trials: usize = positive(50).unit("measurements"),
        /// Script arguments for tuned values.
        arg_mappings = free().inert("programs read tuned values from the DeepSpeed configuration"),
        /// Maximum global batch size. Without it and min_train_batch_size, the batch size is kept.
        max_train_batch_size: Option<usize> = opt_positive().unit("samples"),
        /// Minimum global batch size.
        min_train_batch_size: Option<usize> = opt_positive().unit("samples"),
        /// Maximum micro-batch size.
        max_train_micro_batch_size_per_gpu: Option<usize> = opt_positive().unit("samples"),
        /// Minimum micro-batch size.
        min_train_micro_batch_size_per_gpu: Option<usize> = opt_positive().unit("samples"),
        /// Maximum number of micro-batch sizes, of which the largest are tried. Unset: all.
        num_tuning_micro_batch_sizes: usize = positive(3),
        /// Number of model-parallel ranks.
        mp_size = positive(1).unavailable("model parallelism", Differs, "set it to 1"),
        /// Size of the model.
        model_info = free().inert("dry runs count the parameters and activations of the model"),
        /// File with the size of the model.
        model_info_path = opt_text().inert("dry runs count the parameters and activations of the model"),
    }
}
