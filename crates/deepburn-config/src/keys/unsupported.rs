//! Sections of features that are not supported in this version. Requesting one is an error that
//! names the feature.
//!
//! A disabled section is accepted, so that files that contain it can be used. No code reads these
//! sections; a key is only an entry in the table.

use crate::spec::*;

section! {
    /// Checkpoint options.
    pub(crate) enum CheckpointSection {
        /// Reaction to different tags across ranks: "Ignore", "Warn" or "Fail".
        tag_validation = one_of(&["Ignore", "Warn", "Fail"], "Warn"),
        /// Load universal checkpoints.
        load_universal = fixed(false, "loading universal checkpoints"),
        /// Write checkpoints to the local storage of each node.
        use_node_local_storage = flag(false),
        parallel_write = section::<ParallelWrite>(),
        /// Checkpoint writer.
        writer = free()
            .unavailable("the checkpoint writer", Present,
                "remove it; training.async_save in the job file saves checkpoints in the background"),
    }

    /// Parallel checkpoint writing.
    pub(crate) enum ParallelWrite {
        /// Write checkpoints of pipeline stages in parallel.
        pipeline_stage = flag(false),
    }

    /// Mixed precision with NVIDIA Apex.
    pub(crate) enum Amp {
        /// Enable Apex mixed precision.
        enabled = flag(false),
        /// Apex optimization level.
        opt_level = opt_text(),
        /// Loss scale of Apex.
        loss_scale = free(),
        /// Keep batch normalization in fp32.
        keep_batchnorm_fp32 = free(),
        /// Data type to which the model is cast.
        cast_model_type = free(),
        /// Data type to which the model's outputs are cast.
        cast_model_outputs = free(),
    }

    /// Tensor parallelism.
    pub(crate) enum TensorParallel: auto {
        /// Number of ranks in a tensor-parallel group of AutoTP; 0 disables it.
        autotp_size = count(0).unavailable("tensor parallelism", Differs, "set it to 0"),
        /// Options of the tensor-parallel group.
        tp = absent("tensor parallelism"),
        /// Options of the tensor-parallel group.
        tensor_parallel = absent("tensor parallelism"),
        /// Overlap communication and computation.
        tp_overlap_comm = flag(false),
        /// Model whose predefined partitioning is used.
        preset_model = opt_text(),
        /// Partitioning of layers.
        partition_config = free(),
        /// Layers whose outputs are all-reduced.
        injection_policy_tuple = free(),
        /// Data type of the weights.
        dtype = opt_text(),
        /// Shard the output layer over the vocabulary.
        vocab_parallel_lm_head = free(),
        /// Implementation of the cross-entropy loss for a sharded output layer.
        vocab_parallel_ce_backend = opt_text(),
    }

    /// Expert parallelism.
    pub(crate) enum ExpertParallel {
        /// Enable expert parallelism.
        enabled = flag(false),
        /// Number of ranks in an expert-parallel group.
        autoep_size = opt_count(),
        /// Number of ranks that share one expert.
        expert_tensor_parallel_size = opt_count(),
        /// Model whose predefined layer names are used.
        preset_model = free(),
        /// Validate the routing of tokens.
        validate_folding_routing = free(),
        /// Compute split sizes asynchronously.
        async_split_plan = free(),
        /// Pattern for the names of mixture-of-experts layers.
        moe_layer_pattern = free(),
        /// Pattern for the names of experts.
        expert_pattern = free(),
        /// Pattern for the names of routers.
        router_pattern = free(),
        /// Use grouped matrix multiplication.
        use_grouped_mm = free(),
        /// Disable Triton's grouped matrix multiplication.
        disable_triton_grouped_mm = free(),
        /// Normalize the routing weights.
        route_norm = free(),
        /// Scale of the routing weights.
        route_scale = free(),
    }

    /// Hybrid engine: training and text generation with one model (RLHF).
    pub(crate) enum HybridEngine: auto {
        /// Enable the hybrid engine.
        enabled = flag(false),
        /// Maximum number of generated tokens.
        max_out_tokens = opt_real(Any),
        /// Number of tensor-parallel ranks for generation.
        inference_tp_size = opt_real(Any),
        /// Release the cache after generation.
        release_inference_cache = free(),
        /// Keep parameters in page-locked memory.
        pin_parameters = free(),
        /// Number of parameters to gather at once.
        tp_gather_partition_size = opt_real(Any),
        /// Capture CUDA graphs.
        enable_cuda_graph = free(),
    }

    /// Model compilation.
    pub(crate) enum Compile: auto {
        /// Enable DeepCompile, which also compiles communication.
        deepcompile = fixed(false, "DeepCompile"),
        /// Compile the model.
        enabled = fixed(false, "model compilation"),
        /// Disable compilation in PyTorch.
        disable = free().ignored("nothing is compiled"),
        /// Compiler backend.
        backend = free(),
        /// Arguments of the compiler backend.
        kwargs = free(),
        /// Compile the model except for expert layers.
        autoep_non_moe = free(),
        /// Free activations early.
        free_activation = free(),
        /// Minimum size of an activation to be freed early.
        free_activation_threshold = free(),
        /// Offload activations to host memory.
        offload_activation = free(),
        /// Keep offloaded activations in page-locked memory.
        offload_activation_pin_memory = free(),
        /// Offload optimizer states to host memory.
        offload_opt_states = free(),
        /// Use double buffering.
        double_buffer = free(),
        /// Use symmetric memory for communication.
        symmetric_memory = free(),
        /// Log the compiled graphs.
        debug_log = free(),
        /// Offload parameters to host memory.
        offload_parameters = free(),
        /// Synchronize before each reduction.
        sync_before_reduce = free(),
        /// Synchronize after each reduction.
        sync_after_reduce = free(),
        /// Synchronize before each all-gather.
        sync_before_allgather = free(),
        /// Synchronize after each all-gather.
        sync_after_allgather = free(),
        /// Keep integer input tensors.
        keep_int_input_tensors = free(),
        /// Keep all input tensors.
        keep_all_input_tensors = free(),
        /// Passes of DeepCompile.
        passes = free(),
    }

    /// Elastic training: batch sizes that fit many numbers of GPUs.
    pub(crate) enum Elasticity {
        /// Enable elastic training.
        enabled = flag(false),
        /// Maximum global batch size.
        max_train_batch_size = positive(2000).unit("samples"),
        /// Candidate micro-batch sizes.
        micro_batch_sizes = list(),
        /// Minimum number of GPUs.
        min_gpus = positive(1).unit("ranks"),
        /// Maximum number of GPUs.
        max_gpus = positive(10_000).unit("ranks"),
        /// Minimum running time before the run is rescaled.
        min_time = count(0).unit("minutes"),
        /// Version of the elasticity algorithm.
        version = real(Positive, 0.2),
        /// Prefer the larger batch size if several fit equally many numbers of GPUs.
        prefer_larger_batch = flag(true),
        /// Ignore batch sizes set elsewhere in the configuration.
        ignore_non_elastic_batch_info = flag(false),
        /// Number of GPUs per node.
        num_gpus_per_node = positive(1).unit("ranks"),
        /// Number of model-parallel ranks.
        model_parallel_size = positive(1).unit("ranks"),
    }

    /// Progressive layer dropping.
    pub(crate) enum ProgressiveLayerDrop {
        /// Enable progressive layer dropping.
        enabled = flag(false),
        /// Fraction of layers kept at the end.
        theta = opt_real(Any),
        /// Rate at which the kept fraction decreases.
        gamma = opt_real(Any),
    }

    /// Model compression: quantization, pruning and layer reduction.
    pub(crate) enum CompressionTraining {
        /// Reduction of the number of layers.
        layer_reduction = free(),
        /// Weight quantization.
        weight_quantization = free(),
        /// Activation quantization.
        activation_quantization = free(),
        /// Pruning of individual weights.
        sparse_pruning = free(),
        /// Pruning of rows.
        row_pruning = free(),
        /// Pruning of attention heads.
        head_pruning = free(),
        /// Pruning of channels.
        channel_pruning = free(),
    }

    /// Comet monitor.
    pub(crate) enum Comet: auto {
        /// Send metrics to Comet.
        enabled = flag(false),
        /// Number of samples between two logged points.
        samples_log_interval = positive(100).unit("samples"),
        /// Project of the experiment.
        project = opt_text(),
        /// Workspace of the project.
        workspace = opt_text(),
        /// API key of the account.
        api_key = opt_text(),
        /// Name of the experiment.
        experiment_name = opt_text(),
        /// Key of an experiment to resume.
        experiment_key = opt_text(),
        /// Send metrics while training instead of storing them for later.
        online = opt_flag(),
        /// Mode of the experiment: create a new one or resume an existing one.
        mode = opt_text(),
    }

    /// Communication logging.
    pub(crate) enum CommsLogger: auto {
        /// Log collectives.
        enabled = flag(false),
        /// Log every collective as it happens.
        verbose = flag(false),
        /// Log all kinds of collectives.
        prof_all = flag(true),
        /// Kinds of collectives to log.
        prof_ops = text_list(),
        /// Log the calling function.
        debug = flag(false),
    }

    /// Timers.
    pub(crate) enum Timers {
        throughput = section::<Throughput>(),
    }

    /// Throughput timer.
    pub(crate) enum Throughput: auto {
        /// Measure throughput.
        enabled = flag(true),
        /// Synchronize the device before reading the time.
        synchronized = flag(true),
    }
}
