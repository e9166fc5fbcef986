//! `data_efficiency` and `curriculum_learning`: dynamic batches and short sequences first.
//!
//! Both came from DeepSpeed's data efficiency library. Lengths are taken from the samples
//! themselves, so that keys about a separate analysis of the data set change nothing or are
//! refused.

use crate::dynamic_batching::LrScaling;
use crate::spec::*;

/// DeepSpeed's schedules; `custom` is known and refused.
const SCHEDULES: &[&str] = &["fixed_discrete", "fixed_linear", "fixed_root", "custom"];

section! {
    /// Dynamic batches of ragged samples.
    pub(crate) struct DataEfficiency<'a> {
        /// Whether it is on.
        enabled: bool = flag(false),
        /// Seed of the random order of samples.
        seed: usize = count(1234),
        data_sampling: DataSampling<'a> = section(),
        data_routing = section::<DataRouting>()
            .unavailable("token dropping (random-LTD)", AnyEnabled, "set every `enabled` in it to false"),
    }

    /// Which samples come when.
    pub(crate) struct DataSampling<'a> {
        /// Whether it is on.
        enabled: bool = flag(false),
        /// Most epochs.
        num_epochs = positive(1000).inert("the job says how long to train"),
        /// Workers of the loader.
        num_workers = count(0).inert("one thread assembles batches ahead of their use"),
        /// Page-lock the batches.
        pin_memory = flag(false).inert("batches are handed over as they are"),
        /// Easy samples first, by metrics of an analysis.
        curriculum_learning = free()
            .unavailable(
                "curricula over analysed metrics", AnyEnabled,
                "set its `enabled` to false; for sequences that grow longer use curriculum_learning at the \
                 top level",
            ),
        dynamic_batching: DynamicBatching<'a> = section(),
    }

    /// As many samples as a token budget holds.
    pub(crate) struct DynamicBatching<'a> {
        /// Whether it is on.
        enabled: bool = flag(false),
        /// Lengths of the samples, as DeepSpeed's analyzer writes them.
        metrics_path = opt_text().inert("lengths are taken from the samples"),
        /// How the learning rate follows the samples of a step; the schedule's rate is for
        /// train_batch_size samples.
        lr_scaling_method: LrScaling = choice("linear"),
        /// Fewest samples of a micro-batch.
        min_batch_size: usize = positive(1).unit("samples"),
        /// Most samples of a micro-batch.
        max_batch_size: Option<usize> = opt_positive().unit("samples"),
        /// Order of the samples: as they lie, another each epoch, or the shortest first.
        sequence_picking_order: &'a str = one_of(&["dataloader", "random", "seqlen"], "dataloader"),
        /// Most tokens of a micro-batch, padding included. It takes the place of
        /// train_micro_batch_size_per_gpu.
        max_tokens: Option<usize> = opt_positive().unit("tokens"),
        /// Print how the samples of an epoch are batched.
        verbose: bool = flag(false),
    }

    /// Which tokens go where.
    pub(crate) enum DataRouting {
        /// Whether it is on.
        enabled = flag(false),
        /// Drop tokens in the middle layers.
        random_ltd = free(),
    }

    /// Short sequences first.
    pub(crate) struct Curriculum<'a> {
        /// Whether it is on.
        enabled: bool = flag(false),
        /// What rises: the length of sequences.
        curriculum_type = one_of(&["seqlen"], "seqlen"),
        /// Shortest length.
        min_difficulty: Option<usize> = opt_positive().unit("tokens"),
        /// Longest length.
        max_difficulty: Option<usize> = opt_positive().unit("tokens"),
        /// How it rises.
        schedule_type: Option<&'a str> = opt_one_of(SCHEDULES),
        schedule_config: ScheduleConfig<'a> = section(),
    }

    /// Parameters of the rise.
    pub(crate) struct ScheduleConfig<'a> {
        /// fixed_discrete: length of sequences in each stage.
        difficulty: Option<Vec<usize>> = opt_positives().unit("tokens"),
        /// fixed_discrete: last step of each stage but the last one.
        max_step: Option<Vec<usize>> = opt_positives().unit("steps"),
        /// fixed_linear and fixed_root: steps until the longest sequences.
        total_curriculum_step: Option<usize> = opt_positive().unit("steps"),
        /// fixed_linear and fixed_root: lengths are multiples of it.
        difficulty_step: Option<usize> = opt_positive().unit("tokens"),
        /// fixed_root: degree of the root.
        root_degree: Option<f64> = opt_real(Positive),
    }
}
