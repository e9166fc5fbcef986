//! Sections of features that do not exist in this version: known by name, refused when asked for.
//!
//! Each is accepted as long as it is switched off, so that a file that carries it unused works.

use crate::key::{Asks, Key, Literal};

use crate::kind::{Kind, Reals};

pub(super) const ENABLED: Key = Key::flag("enabled", false, "Whether it is on.");
pub(super) const fn text(name: &'static str, doc: &'static str) -> Key {
    Key::optional(name, Kind::Text, doc)
}
pub(super) const fn free(name: &'static str, doc: &'static str) -> Key {
    Key::optional(name, Kind::Free, doc)
}
pub(super) const fn number(name: &'static str, doc: &'static str) -> Key {
    Key::optional(name, Kind::Real(Reals::Any), doc)
}

pub(crate) const CHECKPOINT: &[Key] = &[
    Key::new(
        "tag_validation",
        Kind::Choice(&["Ignore", "Warn", "Fail"]),
        Literal::Text("Warn"),
        "What to do when ranks save under different tags.",
    ),
    Key::flag("load_universal", false, "Load a universal checkpoint.").unavailable(
        "loading universal checkpoints",
        Asks::Differs,
        "set it to false",
    ),
    Key::flag("use_node_local_storage", false, "Every node writes to its own disk."),
    Key::section(
        "parallel_write",
        &[Key::flag("pipeline_stage", false, "Pipeline stages write at the same time.")],
        "Who writes.",
    ),
    free("writer", "Writer of checkpoints.").unavailable(
        "the checkpoint writer",
        Asks::Present,
        "remove it; training.async_save in the job file saves while training goes on",
    ),
];

pub(crate) const AMP: Key = Key::section(
    "amp",
    &[
        ENABLED,
        text("opt_level", "Level of NVIDIA's Apex."),
        free("loss_scale", "Apex's loss scale."),
        free("keep_batchnorm_fp32", "Keep batch norm in fp32."),
        free("cast_model_type", "Type of the model."),
        free("cast_model_outputs", "Type of the outputs."),
    ],
    "NVIDIA's Apex mixed precision.",
)
.unavailable(
    "Apex mixed precision",
    Asks::Enabled,
    "set amp.enabled to false, or use torch_autocast instead",
);

pub(crate) const HYBRID_ENGINE: Key = Key::section(
    "hybrid_engine",
    &[
        ENABLED,
        number("max_out_tokens", "Longest answer."),
        number("inference_tp_size", "Ranks that share a layer."),
        free("release_inference_cache", "Free the cache after generation."),
        free("pin_parameters", "Page-lock the parameters."),
        number("tp_gather_partition_size", "Parameters gathered at once."),
        free("enable_cuda_graph", "Record CUDA graphs."),
    ],
    "Generation while training.",
)
.unavailable("the hybrid engine", Asks::Enabled, "set hybrid_engine.enabled to false");

pub(crate) const COMPILE: Key = Key::section(
    "compile",
    &[
        Key::flag("deepcompile", false, "Compile the distributed graph.").unavailable(
            "DeepCompile",
            Asks::Differs,
            "set it to false",
        ),
        free("enabled", "Compile the model.").unavailable(
            "compilation",
            Asks::Present,
            "set it to false",
        ),
        free("disable", "Do not compile; read by PyTorch.").ignored("nothing is compiled"),
        free("backend", "Compiler."),
        free("kwargs", "Arguments of the compiler."),
        free("autoep_non_moe", "Compile around experts."),
        free("free_activation", "Free activations early."),
        free("free_activation_threshold", "Smallest activation freed early."),
        free("offload_activation", "Keep activations in host memory."),
        free("offload_activation_pin_memory", "Page-lock them."),
        free("offload_opt_states", "Keep optimizer states in host memory."),
        free("double_buffer", "Two buffers."),
        free("symmetric_memory", "Memory at equal addresses."),
        free("debug_log", "Write the graphs."),
        free("offload_parameters", "Keep parameters in host memory."),
        free("sync_before_reduce", "Wait before a reduction."),
        free("sync_after_reduce", "Wait after a reduction."),
        free("sync_before_allgather", "Wait before a gather."),
        free("sync_after_allgather", "Wait after a gather."),
        free("keep_int_input_tensors", "Keep integer inputs."),
        free("keep_all_input_tensors", "Keep all inputs."),
        free("passes", "Passes of the compiler."),
    ],
    "Compilation of the model.",
);

pub(crate) const ELASTICITY: Key = Key::section(
    "elasticity",
    &[
        ENABLED,
        Key::positive("max_train_batch_size", 2000, "Largest global batch.").unit("samples"),
        Key::optional("micro_batch_sizes", Kind::List, "Micro-batches to choose from."),
        Key::positive("min_gpus", 1, "Fewest ranks.").unit("ranks"),
        Key::positive("max_gpus", 10_000, "Most ranks.").unit("ranks"),
        Key::count("min_time", 0, "Shortest run.").unit("minutes"),
        Key::real("version", Reals::Positive, 0.2, "Version of the algorithm."),
        Key::flag("prefer_larger_batch", true, "On a tie the larger batch."),
        Key::flag("ignore_non_elastic_batch_info", false, "Let it override the batch sizes."),
        Key::positive("num_gpus_per_node", 1, "Ranks of a node.").unit("ranks"),
        Key::positive("model_parallel_size", 1, "Ranks that share a layer.").unit("ranks"),
    ],
    "Batch sizes for any number of ranks.",
)
.unavailable(
    "elasticity",
    Asks::Enabled,
    "set elasticity.enabled to false and give the batch sizes",
);

pub(crate) const AUTOTUNING: Key = Key::section(
    "autotuning",
    &[
        ENABLED,
        Key::flag("fast", true, "Tune the micro-batch only."),
        Key::new(
            "results_dir",
            Kind::Text,
            Literal::Text("autotuning_results"),
            "Folder of the results.",
        ),
        Key::new("exps_dir", Kind::Text, Literal::Text("autotuning_exps"), "Folder of the trials."),
        Key::flag("overwrite", true, "Overwrite them."),
        Key::positive("start_profile_step", 3, "First measured step."),
        Key::positive("end_profile_step", 5, "Last measured step."),
        text("metric_path", "File of the metric."),
        Key::new("metric", Kind::Text, Literal::Text("throughput"), "What is made best."),
        Key::new("tuner_type", Kind::Text, Literal::Text("gridsearch"), "How trials are chosen."),
        Key::positive("tuner_early_stopping", 5, "Trials without a gain."),
        Key::positive("tuner_num_trials", 50, "Most trials."),
        free("arg_mappings", "Arguments of the script."),
        number("max_train_batch_size", "Largest global batch."),
        number("min_train_batch_size", "Smallest global batch."),
        number("max_train_micro_batch_size_per_gpu", "Largest micro-batch."),
        number("min_train_micro_batch_size_per_gpu", "Smallest micro-batch."),
        Key::positive("num_tuning_micro_batch_sizes", 3, "Micro-batches that are tried."),
        number("mp_size", "Ranks that share a layer."),
        free("model_info", "Size of the model."),
        text("model_info_path", "File of the size of the model."),
    ],
    "Search for fast settings.",
)
.unavailable("autotuning", Asks::Enabled, "set autotuning.enabled to false");

pub(crate) const PROGRESSIVE_LAYER_DROP: Key = Key::section(
    "progressive_layer_drop",
    &[
        ENABLED,
        number("theta", "Share of layers kept at the end."),
        number("gamma", "Speed of the decline."),
    ],
    "Drop layers more and more.",
)
.unavailable(
    "progressive layer drop",
    Asks::Enabled,
    "set progressive_layer_drop.enabled to false",
);

pub(crate) const COMPRESSION_TRAINING: Key = Key::section(
    "compression_training",
    &[
        free("layer_reduction", "Keep fewer layers."),
        free("weight_quantization", "Quantise weights."),
        free("activation_quantization", "Quantise activations."),
        free("sparse_pruning", "Prune single weights."),
        free("row_pruning", "Prune rows."),
        free("head_pruning", "Prune heads."),
        free("channel_pruning", "Prune channels."),
    ],
    "Quantisation and pruning.",
)
.unavailable("compression", Asks::AnyEnabled, "remove compression_training");

const UNREAD: &str = "DeepSpeed does not read this key either";

pub(crate) const CUDA_VISIBLE_DEVICES: Key =
    free("cuda_visible_devices", "Devices that a launcher shows.")
        .ignored("the environment says which devices are visible; training.devices chooses");
pub(crate) const COMMS_CONFIG: Key =
    free("comms_config", "DeepSpeed's name for comms_logger inside its code.").ignored(UNREAD);
pub(crate) const MONITOR_CONFIG: Key =
    free("monitor_config", "DeepSpeed's name for all monitors inside its code.").ignored(
        "DeepSpeed does not read this key either; tensorboard, wandb and csv_monitor are keys of the top level",
    );
pub(crate) const COMMENT: Key = free("_comment", "A remark.").ignored(UNREAD);

pub(crate) const QUANTIZE_TRAINING: Key = free("quantize_training", "Mixture of quantisation.")
    .unavailable("quantised training", Asks::Present, "remove it");
pub(crate) const WEIGHT_QUANTIZATION: Key = free(
    "weight_quantization",
    "Quantisation of weights for inference.",
)
.unavailable("weight quantisation", Asks::Present, "remove it");
pub(crate) const EIGENVALUE: Key = free("eigenvalue", "Eigenvalues for mixture of quantisation.")
    .unavailable("quantised training", Asks::AnyEnabled, "remove it");
pub(crate) const SPARSE_ATTENTION: Key = free("sparse_attention", "Sparse attention.").unavailable(
    "sparse attention",
    Asks::Present,
    "remove it",
);
pub(crate) const SPARSE_GRADIENTS: Key =
    Key::flag("sparse_gradients", false, "Send embedding gradients as sparse tensors.")
        .unavailable("sparse gradients", Asks::Differs, "set it to false; they are reduced dense");
pub(crate) const NEBULA: Key = free("nebula", "Checkpoints through a service.").unavailable(
    "Nebula checkpoints",
    Asks::AnyEnabled,
    "remove it",
);
pub(crate) const DATASTATES: Key = free("datastates_ckpt", "Asynchronous checkpoints.")
    .unavailable("DataStates checkpoints", Asks::Present, "remove it");
pub(crate) const GRAPH_HARVESTING: Key = Key::flag(
    "graph_harvesting",
    false,
    "Record CUDA graphs.",
)
.unavailable("CUDA graphs", Asks::Differs, "set it to false");
pub(crate) const MANAGED_ACCUMULATION: Key =
    Key::flag("managed_gradient_accumulation", true, "Let the engine count micro-batches.")
        .unavailable("accumulation counted by the caller", Asks::Differs, "set it to true");
