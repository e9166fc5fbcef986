//! `zero_optimization`: sharding, communication and offload of model states.
//!
//! Sizes are in elements. Keys that only select an algorithm of DeepSpeed are accepted with a note.
//! ZeRO++'s quantization is not supported.

use crate::keys::{Aio, OffloadOptimizer, OffloadParam};
use crate::spec::*;

/// DeepSpeed counts sizes in elements, whatever their type.
const ELEMENTS: &str = "elements";
/// Feature of the keys `zero_quantized_*` and others.
const ZERO_PP: &str = "ZeRO++ (quantized communication)";
/// The reason why keys about checkpoints have no effect.
pub(crate) const CHECKPOINTS: &str = "training checkpoints have a layout of their own";
/// The reason why the granularity of gathers cannot be selected.
const JOINED: &str = "parameters are gathered in the order of use, several in one all-gather";

/// Default of `sub_group_size`, in elements. Parameters are updated one by one here, whatever it
/// is.
pub(crate) const LARGEST_SUB_GROUP: i64 = 1_000_000_000;

/// A number of elements that has an effect at stage 3, with the name it has without `stage3_`.
const fn at_stage_3(default: i64, alias: &'static str) -> Spec<usize> {
    count(default).alias(alias).unit(ELEMENTS).at_stages(3, 3).auto()
}

section! {
    //= deepspeed 0.19.8 runtime/zero/config.py DeepSpeedZeroConfig
    /// ZeRO: sharding of optimizer states, gradients and parameters over the ranks.
    pub(crate) struct Zero<'a> {
        /// ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
        /// Higher stages need less memory; stage 3 communicates more.
        stage: usize = count_in(0, 3, 0),
        /// Elements of the gradients reduced together, at most 1/16 of the trainable elements.
        /// Larger buckets need fewer messages and more memory; a larger gradient is reduced alone,
        /// and 0 reduces every gradient alone. "auto": hidden size squared.
        reduce_bucket_size: usize = count(500_000_000).unit(ELEMENTS).auto(),
        /// Overlap the gradient reduction with backward. Needs memory for a second bucket; results
        /// do not change. Unset: true at stage 3, otherwise false.
        overlap_comm: Option<bool> = opt_flag().outdated("overlap_reduce").auto(),
        /// Copy gradients to contiguous memory when they enter a bucket, which avoids keeping
        /// larger blocks alive.
        contiguous_gradients: bool = flag(true).auto(),
        /// Use reduce-scatter instead of all-reduce for sharded gradients, which communicates less.
        reduce_scatter: bool = flag(true).at_stages(2, 3).auto(),
        /// Treat the gradient of an unused parameter as zero. If false, an unused parameter is an
        /// error.
        ignore_unused_parameters: bool = flag(true).auto(),
        /// Combine the reductions of several ranks in one all-reduce.
        use_multi_rank_bucket_allreduce = flag(true).inert("each bucket is always reduced in one collective").auto(),
        /// Distribute gradients over ranks in turn, which speeds up copies to the host.
        round_robin_gradients = flag(false).inert("each rank always owns a part of every parameter").auto(),
        /// Compute the gradient norm even if clipping is off.
        compute_grad_norm = flag(true).inert("the norm is computed and reported in every step").auto(),
        /// Elements of updated parameters per all-gather. Larger buckets need fewer messages and
        /// more memory. Must be even at stages 1 and 2, as in DeepSpeed.
        allgather_bucket_size: usize = positive(500_000_000).unit(ELEMENTS).at_stages(1, 2).auto(),
        /// All-gather updated parameters instead of broadcasting each partition.
        allgather_partitions = flag(true).at_stages(1, 2).auto().inert("updated parameters are always all-gathered"),
        /// Maximum number of elements of offloaded optimizer states to update at once. Smaller
        /// values need less memory and more transfers. 0 and values above 1048576 mean 1048576.
        sub_group_size: usize = count(LARGEST_SUB_GROUP).unit(ELEMENTS).auto(),
        /// Number of elements to prefetch, that is to gather ahead of use. Larger values hide more
        /// communication and need more memory; the last parameter may exceed the value. 0 disables
        /// prefetching. "auto": 0.9 times hidden size squared.
        stage3_prefetch_bucket_size: usize = at_stage_3(50_000_000, "prefetch_bucket_size"),
        /// Maximum number of elements of a persistent parameter, which stays gathered on every
        /// rank. Larger values need less communication and more memory. "auto": 10 times hidden
        /// size.
        stage3_param_persistence_threshold: usize = at_stage_3(100_000, "param_persistence_threshold"),
        /// Maximum number of elements of all persistent parameters together. A parameter that would
        /// exceed it is skipped; later, smaller ones may still fit.
        stage3_model_persistence_threshold: usize = at_stage_3(i64::MAX, "model_persistence_threshold"),
        /// Maximum number of elements to keep gathered or prefetched at a time. Smaller values need
        /// less memory and more communication; a parameter in use may exceed the limit.
        max_live_parameters as "stage3_max_live_parameters": usize = at_stage_3(1_000_000_000, "max_live_parameters"),
        /// Keep a parameter gathered if it is used again within this many elements. Smaller values
        /// need less memory and more communication.
        max_reuse_distance as "stage3_max_reuse_distance": usize = at_stage_3(1_000_000_000, "max_reuse_distance"),
        /// Allow save_16bit_model to gather a 16-bit copy of the model. finetune saves fp32 in any
        /// case.
        gather_16bit_weights_on_model_save as "stage3_gather_16bit_weights_on_model_save": bool = flag(false)
            .alias("gather_16bit_weights_on_model_save").outdated("stage3_gather_fp16_weights_on_model_save")
            .at_stages(3, 3).auto(),
        /// Gather modules below this granularity as a whole; 0 gathers parameters individually.
        stage3_module_granularity_threshold = count(0).alias("module_granularity_threshold")
            .unit("elements per layer").inert(JOINED).auto(),
        /// Gather parameters by all-reduce.
        stage3_use_all_reduce_for_fetch_params = flag(false)
            .alias("use_all_reduce_for_fetch_params").inert("parameters are always all-gathered").auto(),
        /// Gather parameters one at a time.
        stage3_allgather_sequential = flag(false).alias("allgather_sequential")
            .inert(JOINED).auto(),
        leaf_module = section::<LeafModule>().inert("each operation gathers the parameters that it needs").auto(),
        /// Replace linear layers by DeepSpeed's memory-efficient implementation.
        memory_efficient_linear = flag(true).inert("layers are never replaced").auto(),
        /// Gather parameters in Module.apply.
        override_module_apply = flag(true).inert("DeepBurn has no such hook").auto(),
        /// Log a warning if the order of parameter uses changes.
        log_trace_cache_warnings = flag(false).inert("the order of uses may change at any step").auto(),
        /// Check the internal state of parameters and collectives.
        enable_sanity_checks = flag(false).inert("collectives are always checked across ranks").auto(),
        /// Align parameters in flat buffers.
        parameter_alignment = flag(false).inert("parameters are not joined into flat buffers").auto(),
        offload_optimizer: OffloadOptimizer<'a> = section(),
        offload_param: OffloadParam<'a> = section(),
        /// Older form of offload_optimizer with device "cpu".
        cpu_offload: Option<bool> = opt_flag().auto(),
        /// Older form of offload_param with device "cpu".
        cpu_offload_param: Option<bool> = opt_flag().auto(),
        /// Older form of pin_memory.
        cpu_offload_use_pin_memory = opt_flag().inert("offloaded data is never page-locked").auto(),
        /// I/O options of NVMe offload; DeepSpeed has this section at the top level.
        aio: Aio<'a> = section(),
        /// Update important gradients on the GPU at once and the others on the CPU later (ZenFlow).
        zenflow = absent("ZenFlow").auto(),
        /// Load master weights from the fp32 copy in a checkpoint instead of the 16-bit weights.
        load_from_fp32_weights = flag(true).inert(CHECKPOINTS).auto(),
        /// Use the older elastic checkpoint layout.
        elastic_checkpoint = flag(false).inert(CHECKPOINTS).auto(),
        /// Load checkpoints in a pipeline.
        pipeline_loading_checkpoint = flag(false).inert(CHECKPOINTS).auto(),
        /// Use the older implementation of stage 1.
        legacy_stage1 = flag(false).inert("there is one implementation of stage 1").auto(),
        /// Keep Muon's momentum buffer in memory if optimizer states are offloaded.
        save_muon_momentum_buffer_in_memory = fixed(false, "a momentum buffer kept in memory").auto(),
        /// Number of ranks in a secondary shard group (hpZ of ZeRO++), which must divide the number
        /// of data-parallel ranks. The group keeps the parameters between forward and the step, so
        /// that backward gathers them inside the group. Results do not change. 1 disables hpZ.
        zero_hpz_partition_size: usize = positive(1).unit("ranks").at_stages(3, 3).auto(),
        /// Quantize parameters for all-gathers (ZeRO++).
        zero_quantized_weights = fixed(false, ZERO_PP).auto(),
        /// Quantize frozen parameters for all-gathers (ZeRO++).
        zero_quantized_nontrainable_weights = fixed(false, ZERO_PP).auto(),
        /// Quantize gradients for reductions (ZeRO++).
        zero_quantized_gradients = fixed(false, ZERO_PP).auto(),
        /// Options of error feedback for quantized gradients (LoCo).
        zeropp_loco_param = absent(ZERO_PP).auto().removed(),
        /// Number of ranks in a shard group (MiCS, hybrid sharding), which must divide the number
        /// of data-parallel ranks. States are sharded inside a group, and groups add up their
        /// gradients once per step. Larger groups need less memory and communicate more. Results
        /// depend on the size in their last bits. -1: all data-parallel ranks.
        mics_shard_size: i64 = integer_in(-1, i64::MAX, -1).unit("ranks").auto().removed(),
        /// Gather parameters hierarchically, first within a node (MiCS). true is not supported.
        mics_hierarchical_params_gather: bool = flag(false).auto().removed(),
    }

    /// Modules that are gathered as a whole.
    pub(crate) enum LeafModule: auto {
        /// Class names of modules to gather as a whole.
        classes = free(),
        /// Names of modules to gather as a whole.
        names = free(),
        /// Name suffixes of modules to gather as a whole.
        name_suffixes = free(),
    }
}
