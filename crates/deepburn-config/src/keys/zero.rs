//! `zero_optimization`: what is sharded, and how it travels.
//!
//! Sizes are counted in elements. Keys that only choose DeepSpeed's algorithm are accepted and
//! noted; ZeRO++ and MiCS are refused.

use crate::keys::offload::{Aio, OffloadOptimizer, OffloadParam};
use crate::spec::*;

/// DeepSpeed counts sizes in elements, whatever their type.
const ELEMENTS: &str = "elements";
/// Feature of the keys `zero_quantized_*` and others.
const ZERO_PP: &str = "ZeRO++ (quantised or hierarchical communication)";
/// Feature of the keys `mics_*`.
const MICS: &str = "MiCS (sharding inside groups of ranks)";
/// Why keys about checkpoints change nothing.
pub(super) const CHECKPOINTS: &str = "training checkpoints have a layout of their own";
/// Why the granularity of gathers cannot be chosen.
const JOINED: &str = "gathers are joined in the order in which parameters are used";

/// Default of `sub_group_size`, in elements. Parameters are updated one by one here, whatever it
/// is.
pub(crate) const LARGEST_SUB_GROUP: i64 = 1_000_000_000;

section! {
    /// What is sharded over the ranks, and how it travels.
    pub(crate) struct Zero<'a> {
        /// 0 shards nothing, 1 the optimizer states, 2 the gradients too, 3 the parameters too.
        stage: usize = count_in(0, 3, 0),
        /// Gradients collected before a bucket is reduced. A larger gradient travels alone; at 0
        /// every one does.
        reduce_bucket_size: usize = count(500_000_000).unit(ELEMENTS).auto(),
        /// Let backward go on while a bucket is reduced; by default at stage 3. Numbers do not
        /// depend on it.
        overlap_comm: Option<bool> = opt_flag().spelled(&[Outdated("overlap_reduce")]).auto(),
        /// Flatten each gradient that joins a bucket, so that no view keeps a larger block alive.
        contiguous_gradients: bool = flag(true).auto(),
        /// Reduce each share at its owner only, rather than all-reduce and keep the share.
        reduce_scatter: bool = flag(true).at_stages(2, 3).auto(),
        /// A parameter without a gradient counts as zero; otherwise it is an error.
        ignore_unused_parameters: bool = flag(true),
        /// Join the shares of several owners in one collective.
        use_multi_rank_bucket_allreduce = flag(true).inert("the exchange chooses its own messages"),
        /// Deal parameters to owners in turn, which copies faster to the host.
        round_robin_gradients = flag(false).inert("it changes DeepSpeed's layout, not the numbers"),
        /// Compute the gradients' norm without clipping too.
        compute_grad_norm = flag(true).inert("the norm is computed and reported at every step"),
        /// Updated parameters in one all-gather; even at stages 1 and 2, as DeepSpeed requires.
        allgather_bucket_size: usize = positive(500_000_000).unit(ELEMENTS).at_stages(1, 2).auto(),
        /// All-gather the updated parameters, rather than broadcast every share.
        allgather_partitions = flag(true).at_stages(1, 2).auto().inert("they are always all-gathered"),
        /// Most elements of offloaded optimizer states that are updated at a time; 0 updates each
        /// parameter separately.
        sub_group_size: usize = count(LARGEST_SUB_GROUP).unit(ELEMENTS).auto(),
        /// Parameters gathered ahead of their use; the last one may exceed it, and 0 gathers none.
        stage3_prefetch_bucket_size: usize = count(50_000_000).spelled(&[Alias("prefetch_bucket_size")])
            .unit(ELEMENTS).at_stages(3, 3).auto(),
        /// Parameters up to this size stay gathered.
        stage3_param_persistence_threshold: usize = count(100_000)
            .spelled(&[Alias("param_persistence_threshold")]).unit(ELEMENTS).at_stages(3, 3).auto(),
        /// Limit of all persistent parameters together.
        stage3_model_persistence_threshold: usize = count(i64::MAX)
            .spelled(&[Alias("model_persistence_threshold")]).unit(ELEMENTS).at_stages(3, 3).auto(),
        /// Most elements that are kept gathered at a time.
        stage3_max_live_parameters: usize = count(1_000_000_000).spelled(&[Alias("max_live_parameters")])
            .unit(ELEMENTS).at_stages(3, 3).auto(),
        /// A parameter used again within this many elements is not released.
        stage3_max_reuse_distance: usize = count(1_000_000_000).spelled(&[Alias("max_reuse_distance")])
            .unit(ELEMENTS).at_stages(3, 3).auto(),
        /// Let a 16-bit copy of the whole model be gathered for saving.
        stage3_gather_16bit_weights_on_model_save: bool = flag(false)
            .spelled(&[
                Alias("gather_16bit_weights_on_model_save"),
                Outdated("stage3_gather_fp16_weights_on_model_save"),
            ])
            .at_stages(3, 3).auto(),
        /// Gather small modules as a whole.
        stage3_module_granularity_threshold = count(0).spelled(&[Alias("module_granularity_threshold")])
            .unit("elements per layer").inert(JOINED),
        /// Gather parameters by all-reduce.
        stage3_use_all_reduce_for_fetch_params = flag(false)
            .spelled(&[Alias("use_all_reduce_for_fetch_params")]).inert("parameters are always all-gathered"),
        /// Gather parameters one by one.
        stage3_allgather_sequential = flag(false).spelled(&[Alias("allgather_sequential")])
            .inert(JOINED),
        leaf_module = section::<LeafModule>().inert("each operation gathers the parameters it needs"),
        /// Use DeepSpeed's linear layer.
        memory_efficient_linear = flag(true).inert("layers are never replaced"),
        /// Gather parameters in Module.apply.
        override_module_apply = flag(true).inert("there is no such hook"),
        /// Warn when the order of uses changes.
        log_trace_cache_warnings = flag(false).inert("the order may change freely"),
        /// Check the state of parameters.
        enable_sanity_checks = flag(false).inert("collectives are always checked against each other"),
        /// Align parameters in flat buffers.
        parameter_alignment = flag(false).inert("alignment is the kernels' own matter"),
        offload_optimizer: OffloadOptimizer<'a> = section(),
        offload_param: OffloadParam<'a> = section(),
        /// Older form of offload_optimizer with device cpu.
        cpu_offload: Option<bool> = opt_flag(),
        /// Older form of offload_param with device cpu.
        cpu_offload_param: Option<bool> = opt_flag(),
        /// Older form of pin_memory.
        cpu_offload_use_pin_memory = opt_flag().inert("nothing is copied between a host and a device"),
        /// Another place of the section aio of the top level.
        aio: Aio<'a> = section(),
        /// Update the important gradients first, the rest later.
        zenflow = free().unavailable("ZenFlow", Present, "remove it"),
        /// Take master weights from the checkpoint's fp32 copy.
        load_from_fp32_weights = flag(true).inert(CHECKPOINTS),
        /// Older layout of checkpoints.
        elastic_checkpoint = flag(false).inert(CHECKPOINTS),
        /// Load checkpoints in a pipeline.
        pipeline_loading_checkpoint = flag(false).inert(CHECKPOINTS),
        /// Older implementation of stage 1.
        legacy_stage1 = flag(false).inert("there is one implementation"),
        /// Keep Muon's momentum in memory.
        save_muon_momentum_buffer_in_memory = flag(false).unavailable("Muon", Differs, "set it to false"),
        /// Ranks of a secondary shard group.
        zero_hpz_partition_size = positive(1).unit("ranks")
            .unavailable(ZERO_PP, Differs, "set it to 1"),
        /// Quantise parameters when they are gathered.
        zero_quantized_weights = flag(false)
            .unavailable(ZERO_PP, Differs, "set it to false"),
        /// Quantise frozen parameters.
        zero_quantized_nontrainable_weights = flag(false)
            .unavailable(ZERO_PP, Differs, "set it to false"),
        /// Quantise gradients when they are reduced.
        zero_quantized_gradients = flag(false)
            .unavailable(ZERO_PP, Differs, "set it to false"),
        /// Error feedback of quantised gradients.
        zeropp_loco_param = free()
            .unavailable(ZERO_PP, Present, "remove it"),
        /// Ranks of a shard group.
        mics_shard_size = integer(-1).unit("ranks")
            .unavailable(MICS, Differs, "set it to -1"),
        /// Gather inside a node first.
        mics_hierarchical_params_gather = flag(false)
            .unavailable(MICS, Differs, "set it to false"),
    }

    /// Modules that are gathered whole.
    pub(crate) enum LeafModule {
        /// Classes that are gathered whole.
        classes = free(),
        /// Modules that are gathered whole.
        names = free(),
        /// Ends of the names of modules that are gathered whole.
        name_suffixes = free(),
    }
}
