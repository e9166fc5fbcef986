//! Parallelism beside ZeRO: pipeline, tensor, expert and sequence. None exists in this version;
//! every degree is accepted as long as it is 1 or switched off.

use crate::key::{Asks, Key, Literal};
use crate::keys::elsewhere::{ENABLED, free, text};
use crate::kind::{Integers, Kind};

const PIPELINE_PARALLEL: &str = "pipeline parallelism";

pub(crate) const PIPELINE: Key = Key::section(
    "pipeline",
    &[
        Key::new(
            "stages",
            Kind::Integer(Integers::POSITIVE),
            Literal::Integer(1),
            "Pipeline stages.",
        )
        .auto()
        .unavailable(PIPELINE_PARALLEL, Asks::Differs, "set it to 1"),
        Key::new("partition", Kind::Text, Literal::Text("best"), "How layers are dealt to stages."),
        Key::flag("seed_layers", false, "Seed every layer."),
        Key::count("activation_checkpoint_interval", 0, "Layers between two checkpoints.")
            .unavailable("pipeline parallelism", Asks::Differs, "set it to 0"),
        Key::flag("pipe_partitioned", true, "Shard what stages send."),
        Key::flag("grad_partitioned", true, "Shard the gradients that stages send."),
        Key::flag("use_reentrant", true, "Which of PyTorch's checkpoints to use."),
    ],
    "Pipeline parallelism.",
);

const DEGREE: Kind = Kind::Integer(Integers::COUNT);

pub(crate) const TENSOR_PARALLEL: Key = Key::section(
    "tensor_parallel",
    &[
        Key::new(
            "autotp_size",
            DEGREE,
            Literal::Integer(0),
            "Ranks that share a layer; 0 for none.",
        )
        .unavailable("tensor parallelism", Asks::Differs, "set it to 0"),
        free("tp", "Tensor-parallel group.").unavailable(
            "tensor parallelism",
            Asks::Present,
            "remove it",
        ),
        free("tensor_parallel", "Tensor-parallel group.").unavailable(
            "tensor parallelism",
            Asks::Present,
            "remove it",
        ),
        Key::flag("tp_overlap_comm", false, "Communicate while computing."),
        text("preset_model", "Known model to shard."),
        free("partition_config", "How layers are sharded."),
        free("injection_policy_tuple", "Layers whose outputs are reduced."),
        text("dtype", "Type of the weights."),
        free("vocab_parallel_lm_head", "Shard the output layer."),
        text("vocab_parallel_ce_backend", "Loss of the sharded output layer."),
    ],
    "Tensor parallelism.",
);

pub(crate) const EXPERT_PARALLEL: Key = Key::section(
    "expert_parallel",
    &[
        ENABLED,
        Key::optional("autoep_size", DEGREE, "Ranks that share the experts."),
        Key::optional("expert_tensor_parallel_size", DEGREE, "Ranks that share one expert."),
        free("preset_model", "Known model to shard."),
        free("validate_folding_routing", "Check the routing."),
        free("async_split_plan", "Plan splits ahead."),
        free("moe_layer_pattern", "Names of the layers."),
        free("expert_pattern", "Names of the experts."),
        free("router_pattern", "Names of the routers."),
        free("use_grouped_mm", "Multiply all experts at once."),
        free("disable_triton_grouped_mm", "Without Triton."),
        free("route_norm", "Normalise the routes."),
        free("route_scale", "Scale of the routes."),
    ],
    "Expert parallelism.",
)
.unavailable("expert parallelism", Asks::Enabled, "set expert_parallel.enabled to false");

pub(crate) const SEQUENCE_PARALLEL_SIZE: Key = Key::positive(
    "sequence_parallel_size",
    1,
    "Ranks that share a sequence.",
)
.unavailable("sequence parallelism", Asks::Differs, "set it to 1");

pub(crate) const SEQUENCE_PARALLEL_DATA_TYPE: Key = Key::new(
    "seq_parallel_communication_data_type",
    Kind::Text,
    Literal::Text("fp32"),
    "Type in which sequence-parallel gradients travel.",
)
.inert("there is no sequence parallelism");

pub(crate) const DATA_BEFORE_EXPERT: Key =
    Key::flag("use_data_before_expert_parallelism", false, "Order of the ranks.")
        .inert("there is no expert parallelism");
