//! Sections of features that do not exist in this version: known by name, refused when asked for.
//!
//! Each is accepted as long as it is switched off, so that a file that carries it unused works.
//! Nothing reads these sections: each key is its line in the table.

use crate::spec::*;

section! {
    /// How training checkpoints are written.
    pub(crate) enum Checkpoint {
        /// What to do when ranks save under different tags.
        tag_validation = one_of(&["Ignore", "Warn", "Fail"], "Warn"),
        /// Load a universal checkpoint.
        load_universal = flag(false).unavailable("loading universal checkpoints", Differs, "set it to false"),
        /// Every node writes to its own disk.
        use_node_local_storage = flag(false),
        parallel_write = section::<ParallelWrite>(),
        /// Writer of checkpoints.
        writer = free()
            .unavailable(
                "the checkpoint writer", Present,
                "remove it; training.async_save in the job file saves while training continues",
            ),
    }

    /// Who writes.
    pub(crate) enum ParallelWrite {
        /// Pipeline stages write at the same time.
        pipeline_stage = flag(false),
    }

    /// NVIDIA's Apex mixed precision.
    pub(crate) enum Amp {
        /// Whether it is on.
        enabled = flag(false),
        /// Level of NVIDIA's Apex.
        opt_level = opt_text(),
        /// Apex's loss scale.
        loss_scale = free(),
        /// Keep batch norm in fp32.
        keep_batchnorm_fp32 = free(),
        /// Type of the model.
        cast_model_type = free(),
        /// Type of the outputs.
        cast_model_outputs = free(),
    }

    /// Pipeline parallelism.
    pub(crate) enum Pipeline {
        /// Pipeline stages.
        stages = positive(1).auto().unavailable("pipeline parallelism", Differs, "set it to 1"),
        /// How layers are dealt to stages.
        partition = text("best"),
        /// Seed every layer.
        seed_layers = flag(false),
        /// Layers between two checkpoints.
        activation_checkpoint_interval = count(0).unavailable("pipeline parallelism", Differs, "set it to 0"),
        /// Shard what stages send.
        pipe_partitioned = flag(true),
        /// Shard the gradients that stages send.
        grad_partitioned = flag(true),
        /// Which of PyTorch's checkpoints to use.
        use_reentrant = flag(true),
    }

    /// Tensor parallelism.
    pub(crate) enum TensorParallel {
        /// Ranks that share a layer; 0 for none.
        autotp_size = count(0).unavailable("tensor parallelism", Differs, "set it to 0"),
        /// Tensor-parallel group.
        tp = free().unavailable("tensor parallelism", Present, "remove it"),
        /// Tensor-parallel group.
        tensor_parallel = free().unavailable("tensor parallelism", Present, "remove it"),
        /// Communicate while computing.
        tp_overlap_comm = flag(false),
        /// Known model to shard.
        preset_model = opt_text(),
        /// How layers are sharded.
        partition_config = free(),
        /// Layers whose outputs are reduced.
        injection_policy_tuple = free(),
        /// Type of the weights.
        dtype = opt_text(),
        /// Shard the output layer.
        vocab_parallel_lm_head = free(),
        /// Loss of the sharded output layer.
        vocab_parallel_ce_backend = opt_text(),
    }

    /// Expert parallelism.
    pub(crate) enum ExpertParallel {
        /// Whether it is on.
        enabled = flag(false),
        /// Ranks that share the experts.
        autoep_size = opt_count(),
        /// Ranks that share one expert.
        expert_tensor_parallel_size = opt_count(),
        /// Known model to shard.
        preset_model = free(),
        /// Check the routing.
        validate_folding_routing = free(),
        /// Plan splits ahead.
        async_split_plan = free(),
        /// Names of the layers.
        moe_layer_pattern = free(),
        /// Names of the experts.
        expert_pattern = free(),
        /// Names of the routers.
        router_pattern = free(),
        /// Multiply all experts at once.
        use_grouped_mm = free(),
        /// Without Triton.
        disable_triton_grouped_mm = free(),
        /// Normalise the routes.
        route_norm = free(),
        /// Scale of the routes.
        route_scale = free(),
    }

    /// Generation while training.
    pub(crate) enum HybridEngine {
        /// Whether it is on.
        enabled = flag(false),
        /// Longest answer.
        max_out_tokens = opt_real(Any),
        /// Ranks that share a layer.
        inference_tp_size = opt_real(Any),
        /// Free the cache after generation.
        release_inference_cache = free(),
        /// Page-lock the parameters.
        pin_parameters = free(),
        /// Parameters gathered at once.
        tp_gather_partition_size = opt_real(Any),
        /// Record CUDA graphs.
        enable_cuda_graph = free(),
    }

    /// Compilation of the model.
    pub(crate) enum Compile {
        /// Compile the distributed graph.
        deepcompile = flag(false).unavailable("DeepCompile", Differs, "set it to false"),
        /// Compile the model.
        enabled = free().unavailable("compilation", Present, "set it to false"),
        /// Do not compile; read by PyTorch.
        disable = free().ignored("nothing is compiled"),
        /// Compiler.
        backend = free(),
        /// Arguments of the compiler.
        kwargs = free(),
        /// Compile around experts.
        autoep_non_moe = free(),
        /// Free activations early.
        free_activation = free(),
        /// Smallest activation freed early.
        free_activation_threshold = free(),
        /// Keep activations in host memory.
        offload_activation = free(),
        /// Page-lock them.
        offload_activation_pin_memory = free(),
        /// Keep optimizer states in host memory.
        offload_opt_states = free(),
        /// Two buffers.
        double_buffer = free(),
        /// Memory at equal addresses.
        symmetric_memory = free(),
        /// Write the graphs.
        debug_log = free(),
        /// Keep parameters in host memory.
        offload_parameters = free(),
        /// Wait before a reduction.
        sync_before_reduce = free(),
        /// Wait after a reduction.
        sync_after_reduce = free(),
        /// Wait before a gather.
        sync_before_allgather = free(),
        /// Wait after a gather.
        sync_after_allgather = free(),
        /// Keep integer inputs.
        keep_int_input_tensors = free(),
        /// Keep all inputs.
        keep_all_input_tensors = free(),
        /// Passes of the compiler.
        passes = free(),
    }

    /// Batch sizes for any number of ranks.
    pub(crate) enum Elasticity {
        /// Whether it is on.
        enabled = flag(false),
        /// Largest global batch.
        max_train_batch_size = positive(2000).unit("samples"),
        /// Micro-batches to choose from.
        micro_batch_sizes = list(),
        /// Fewest ranks.
        min_gpus = positive(1).unit("ranks"),
        /// Most ranks.
        max_gpus = positive(10_000).unit("ranks"),
        /// Shortest run.
        min_time = count(0).unit("minutes"),
        /// Version of the algorithm.
        version = real(Positive, 0.2),
        /// On a tie the larger batch.
        prefer_larger_batch = flag(true),
        /// Let it override the batch sizes.
        ignore_non_elastic_batch_info = flag(false),
        /// Ranks of a node.
        num_gpus_per_node = positive(1).unit("ranks"),
        /// Ranks that share a layer.
        model_parallel_size = positive(1).unit("ranks"),
    }

    /// Search for fast settings.
    pub(crate) enum Autotuning {
        /// Whether it is on.
        enabled = flag(false),
        /// Tune the micro-batch only.
        fast = flag(true),
        /// Folder of the results.
        results_dir = text("autotuning_results"),
        /// Folder of the trials.
        exps_dir = text("autotuning_exps"),
        /// Overwrite them.
        overwrite = flag(true),
        /// First measured step.
        start_profile_step = positive(3),
        /// Last measured step.
        end_profile_step = positive(5),
        /// File of the metric.
        metric_path = opt_text(),
        /// What is made best.
        metric = text("throughput"),
        /// How trials are chosen.
        tuner_type = text("gridsearch"),
        /// Trials without a gain.
        tuner_early_stopping = positive(5),
        /// Most trials.
        tuner_num_trials = positive(50),
        /// Arguments of the script.
        arg_mappings = free(),
        /// Largest global batch.
        max_train_batch_size = opt_real(Any),
        /// Smallest global batch.
        min_train_batch_size = opt_real(Any),
        /// Largest micro-batch.
        max_train_micro_batch_size_per_gpu = opt_real(Any),
        /// Smallest micro-batch.
        min_train_micro_batch_size_per_gpu = opt_real(Any),
        /// Micro-batches that are tried.
        num_tuning_micro_batch_sizes = positive(3),
        /// Ranks that share a layer.
        mp_size = opt_real(Any),
        /// Size of the model.
        model_info = free(),
        /// File of the size of the model.
        model_info_path = opt_text(),
    }

    /// Drop layers more and more.
    pub(crate) enum ProgressiveLayerDrop {
        /// Whether it is on.
        enabled = flag(false),
        /// Share of layers kept at the end.
        theta = opt_real(Any),
        /// Speed of the decline.
        gamma = opt_real(Any),
    }

    /// Quantisation and pruning.
    pub(crate) enum CompressionTraining {
        /// Keep fewer layers.
        layer_reduction = free(),
        /// Quantise weights.
        weight_quantization = free(),
        /// Quantise activations.
        activation_quantization = free(),
        /// Prune single weights.
        sparse_pruning = free(),
        /// Prune rows.
        row_pruning = free(),
        /// Prune heads.
        head_pruning = free(),
        /// Prune channels.
        channel_pruning = free(),
    }

    /// Weights & Biases monitor.
    pub(crate) enum Wandb {
        /// Send metrics to Weights & Biases.
        enabled = flag(false),
        /// Group of the run.
        group = opt_text(),
        /// Team of the run.
        team = opt_text(),
        /// Project of the run.
        project = text("deepspeed"),
    }

    /// Comet monitor.
    pub(crate) enum Comet {
        /// Send metrics to Comet.
        enabled = flag(false),
        /// Samples between two messages.
        samples_log_interval = positive(100).unit("samples"),
        /// Project of the run.
        project = opt_text(),
        /// Workspace of the project.
        workspace = opt_text(),
        /// Key of the account.
        api_key = opt_text(),
        /// Name of the run.
        experiment_name = opt_text(),
        /// Identity of a run to go on with.
        experiment_key = opt_text(),
        /// Send at once rather than keep for later.
        online = opt_flag(),
        /// Whether to create a run or go on with one.
        mode = opt_text(),
    }

    /// Log of collectives.
    pub(crate) enum CommsLogger {
        /// Log collectives.
        enabled = flag(false),
        /// Log each one as it happens.
        verbose = flag(false),
        /// Log all kinds.
        prof_all = flag(true),
        /// Kinds that are logged.
        prof_ops = list(),
        /// Name the caller.
        debug = flag(false),
    }

    /// Timers.
    pub(crate) enum Timers {
        throughput = section::<Throughput>(),
    }

    /// The throughput timer.
    pub(crate) enum Throughput {
        /// Measure throughput.
        enabled = flag(true),
        /// Wait for the device before the time is taken.
        synchronized = flag(true),
    }
}
