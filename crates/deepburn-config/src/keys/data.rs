//! `data_efficiency` and `curriculum_learning`: dynamic batching, and a curriculum over the
//! sequence length.
//!
//! Both are from DeepSpeed's data efficiency library. Lengths are read from the samples, so keys
//! about a separate analysis of the data set have no effect or are errors.

use crate::plan::LrScaling;
use crate::spec::*;

/// DeepSpeed's schedules. `custom` is not supported.
const SCHEDULES: &[&str] = &["fixed_discrete", "fixed_linear", "fixed_root", "custom"];

section! {
    /// Data efficiency: dynamic batching.
    pub(crate) struct DataEfficiency<'a> {
        /// Enable data efficiency. Required by data_sampling.dynamic_batching.
        enabled: bool = flag(false),
        /// Random seed of the sample order if sequence_picking_order is "random".
        seed: usize = count(1234),
        data_sampling: DataSampling<'a> = section(),
        data_routing = section::<DataRouting>()
            .unavailable("token dropping (random-LTD)", AnyEnabled, "set every `enabled` in it to false"),
    }

    /// Data sampling: dynamic batching.
    pub(crate) struct DataSampling<'a> {
        /// Enable data sampling. Required by dynamic_batching.
        enabled: bool = flag(false),
        /// Maximum number of epochs.
        num_epochs = positive(1000).inert("training.epochs and training.max_steps set the length of training"),
        /// Number of data-loader workers.
        num_workers = count(0).inert("one background thread prepares batches"),
        /// Keep batches in page-locked memory.
        pin_memory = flag(false).inert("batches are never page-locked"),
        /// Curriculum learning by metrics of DeepSpeed's data analyzer.
        curriculum_learning = free()
            .unavailable(
                "curriculum learning by analyzed metrics", AnyEnabled,
                "set its `enabled` to false; for a curriculum by sequence length use curriculum_learning at the top \
                 level",
            ),
        dynamic_batching: DynamicBatching<'a> = section(),
    }

    /// Dynamic batching: a micro-batch has as many samples as fit into a token budget.
    pub(crate) struct DynamicBatching<'a> {
        /// Enable dynamic batching. Requires max_tokens, and enabled in both enclosing sections.
        enabled: bool = flag(false),
        /// Folder of the sample lengths written by DeepSpeed's data analyzer.
        metrics_path = opt_text().inert("lengths are read from the samples"),
        /// Scaling of the learning rate with the number of samples in a step: "linear", "sqrt" or
        /// "none". The scheduled rate applies to train_batch_size samples.
        lr_scaling as "lr_scaling_method": LrScaling = choice("linear"),
        /// Minimum number of samples in a micro-batch. The last micro-batches of an epoch may have
        /// fewer.
        min_batch_size: usize = positive(1).unit("samples"),
        /// Maximum number of samples in a micro-batch. Unset: only max_tokens limits it.
        max_batch_size: Option<usize> = opt_positive().unit("samples"),
        /// Sample order: "dataloader" (as in the data), "random" (shuffled every epoch) or "seqlen"
        /// (shortest first).
        sequence_picking_order: &'a str = one_of(&["dataloader", "random", "seqlen"], "dataloader"),
        /// Maximum number of tokens in a micro-batch, including padding. Replaces
        /// train_micro_batch_size_per_gpu. Required if dynamic batching is enabled.
        max_tokens: Option<usize> = opt_positive().unit("tokens"),
        /// Log the samples, steps, tokens and padding of up to ten epochs.
        verbose: bool = flag(false),
    }

    /// Data routing: token dropping.
    pub(crate) enum DataRouting {
        /// Enable data routing.
        enabled = flag(false),
        /// Random layerwise token dropping (random-LTD).
        random_ltd = free(),
    }

    /// Curriculum learning: start with short sequences and lengthen them during training.
    pub(crate) struct Curriculum<'a> {
        /// Enable curriculum learning. Requires min_difficulty, max_difficulty and schedule_type.
        enabled: bool = flag(false),
        /// Difficulty metric: "seqlen", the sequence length.
        curriculum_type = one_of(&["seqlen"], "seqlen"),
        /// Sequence length at the start. Longer sequences are truncated to the current length.
        min_difficulty: Option<usize> = opt_positive().unit("tokens"),
        /// Sequence length at the end.
        max_difficulty: Option<usize> = opt_positive().unit("tokens"),
        /// Schedule of the sequence length: "fixed_discrete" (stages), "fixed_linear" or
        /// "fixed_root". "custom" is not supported.
        schedule_type: Option<&'a str> = opt_one_of(SCHEDULES),
        schedule_config: ScheduleConfig<'a> = section(),
    }

    /// Parameters of the curriculum schedule.
    pub(crate) struct ScheduleConfig<'a> {
        /// Sequence length of each stage, in ascending order (fixed_discrete).
        difficulty: Option<Vec<usize>> = opt_positives().unit("tokens"),
        /// Last step of each stage except the final one (fixed_discrete). Skipped steps do not
        /// count.
        max_step: Option<Vec<usize>> = opt_positives().unit("steps"),
        /// Steps until max_difficulty is reached (fixed_linear, fixed_root).
        total_curriculum_step: Option<usize> = opt_positive().unit("steps"),
        /// Step size of the sequence length: lengths are multiples of it, except max_difficulty
        /// (fixed_linear, fixed_root). Multiples of 8 are fastest on tensor cores.
        difficulty_step: Option<usize> = opt_positive().unit("tokens"),
        /// Degree of the root (fixed_root). 1 is linear; larger values lengthen sequences faster at
        /// the start.
        root_degree: Option<f64> = opt_real(Positive),
    }
}
