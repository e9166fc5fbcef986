//! DeepSpeed's JSON, key by key: one file a section, each with its table and its rules.
//!
//! The tables hold the keys of DeepSpeed 0.19 and those that older files still carry. A rule turns a
//! section into its part of the plan. A rule that reports an error still returns a value; the
//! verdict discards it together with the rest of the plan.

pub(crate) mod activation_checkpointing;
pub(crate) mod autocast;
pub(crate) mod batch;
pub(crate) mod curriculum;
pub(crate) mod data_efficiency;
pub(crate) mod elsewhere;
pub(crate) mod job;
pub(crate) mod monitor;
mod muon;
pub(crate) mod offload;
pub(crate) mod one_bit;
mod one_bit_lamb;
pub(crate) mod one_cycle;
pub(crate) mod optimizer;
pub(crate) mod parallel;
pub(crate) mod precision;
pub(crate) mod report;
pub(crate) mod scheduler;
pub(crate) mod torch_schedules;
pub(crate) mod zero;
mod zero_one;

use crate::key::{Key, Literal, Spelling};

use crate::kind::{Kind, Reals};

/// Why keys about checkpoints change nothing.
const CHECKPOINTS: &str = "training checkpoints have a layout of their own";

/// Where an editor finds the schema of the file.
pub(crate) const SCHEMA: Key =
    Key::optional("$schema", Kind::Text, "Path of the JSON Schema, for editors.")
        .inert("editors read it; deepburn keys --schema prints one");

/// The top level of a DeepSpeed configuration.
pub(crate) const DEEPSPEED: &[Key] = &[
    batch::TRAIN_BATCH_SIZE,
    batch::MICRO_BATCH_SIZE,
    batch::ACCUMULATION_STEPS,
    Key::section("optimizer", optimizer::KEYS, "The optimizer. AdamW when there is none.").auto(),
    Key::section(
        "scheduler",
        scheduler::KEYS,
        "The learning-rate schedule. Constant when there is none.",
    )
    .auto(),
    Key::real(
        "gradient_clipping",
        Reals::NotNegative,
        1.0,
        "Largest global L2 norm of the gradients that is let through; 0 turns clipping off.",
    )
    .auto(),
    Key::section(
        "zero_optimization",
        zero::KEYS,
        "What is sharded over the ranks, and how it travels.",
    ),
    Key::new(
        "gradient_allreduce_op",
        Kind::Choice(&["mean", "sum"]),
        Literal::Text("mean"),
        "How the gradients of all ranks become one; `sum` needs stage 0, 1 or 2.",
    ),
    Key::flag(
        "prescale_gradients",
        false,
        "Divide gradients by the world size before they are summed, not after.",
    ),
    Key::real(
        "gradient_predivide_factor",
        Reals::Positive,
        1.0,
        "Part of that division made before the sum, against overflow in 16 bits.",
    ),
    precision::COMMUNICATION,
    Key::section("data_types", precision::DATA_TYPES, "Types of what is kept besides the weights."),
    Key::section("fp16", precision::FP16, "Half precision with loss scaling and fp32 masters."),
    Key::section("bf16", precision::BF16, "bfloat16 training with fp32 master weights.")
        .spelled(&[Spelling::Alias("bfloat16")]),
    report::STEPS_PER_PRINT,
    report::WALL_CLOCK_BREAKDOWN,
    report::MEMORY_BREAKDOWN,
    report::DUMP_STATE,
    monitor::PROFILING,
    monitor::FLOPS_PROFILER,
    report::COMMS_LOGGER,
    monitor::TENSORBOARD,
    monitor::WANDB,
    monitor::CSV_MONITOR,
    monitor::COMET,
    report::TIMERS,
    report::LOG_LEVEL,
    Key::flag(
        "zero_allow_untested_optimizer",
        false,
        "Let ZeRO shard optimizers that DeepSpeed has not tested.",
    )
    .inert("each optimizer here has been tested at the stages that it supports"),
    Key::flag(
        "zero_force_ds_cpu_optimizer",
        true,
        "Refuse an optimizer that the caller made when offloading.",
    )
    .inert("the optimizer is always made from this file"),
    Key::flag(
        "dataloader_drop_last",
        false,
        "Drop the samples that do not fill a last global batch. `data.drop_last` of a job file \
            comes first.",
    ),
    Key::section("checkpoint", elsewhere::CHECKPOINT, "How training checkpoints are written.")
        .inert(CHECKPOINTS),
    Key::section(
        "activation_checkpointing",
        activation_checkpointing::KEYS,
        "Recompute activations in backward.",
    ),
    Key::section("aio", offload::AIO, "Asynchronous reads and writes of NVMe offload."),
    elsewhere::AMP,
    autocast::TORCH_AUTOCAST,
    parallel::PIPELINE,
    parallel::TENSOR_PARALLEL,
    parallel::EXPERT_PARALLEL,
    parallel::SEQUENCE_PARALLEL_SIZE,
    parallel::SEQUENCE_PARALLEL_DATA_TYPE,
    parallel::DATA_BEFORE_EXPERT,
    elsewhere::HYBRID_ENGINE,
    elsewhere::COMPILE,
    elsewhere::ELASTICITY,
    elsewhere::AUTOTUNING,
    Key::section("data_efficiency", data_efficiency::KEYS, "Dynamic batches of ragged samples."),
    Key::section("curriculum_learning", curriculum::KEYS, "Short sequences first."),
    elsewhere::PROGRESSIVE_LAYER_DROP,
    elsewhere::COMPRESSION_TRAINING,
    SCHEMA,
    elsewhere::CUDA_VISIBLE_DEVICES,
    elsewhere::COMMS_CONFIG,
    elsewhere::MONITOR_CONFIG,
    elsewhere::COMMENT,
    elsewhere::QUANTIZE_TRAINING,
    elsewhere::WEIGHT_QUANTIZATION,
    elsewhere::EIGENVALUE,
    elsewhere::SPARSE_ATTENTION,
    elsewhere::SPARSE_GRADIENTS,
    elsewhere::NEBULA,
    elsewhere::DATASTATES,
    elsewhere::GRAPH_HARVESTING,
    elsewhere::MANAGED_ACCUMULATION,
    Key::flag("disable_allgather", false, "Keep DeepSpeed from using all-gather.")
        .inert("in-process ranks hand tensors over directly"),
    Key::flag("disable_python_gc", false, "Turn Python's garbage collector off while training.")
        .inert("there is no Python"),
    Key::count("vocabulary_size", 0, "Only warns when it is no multiple of 8.")
        .inert("the vocabulary comes from the model"),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::key::entries;

    #[test]
    fn every_default_is_of_its_kind_and_every_key_is_described() {
        for table in [DEEPSPEED, job::JOB, crate::accelerate::KEYS] {
            for entry in entries(table) {
                let default = entry.key.default.node();
                let fits = default.is_null() || entry.key.kind.accepts(&default).is_ok();
                assert!(fits, "{}: default {}", entry.path, entry.key.default);
                assert!(entry.key.doc.ends_with('.'), "{}: {:?}", entry.path, entry.key.doc);
                assert!(!entry.key.required || default.is_null(), "{}", entry.path);
            }
        }
    }

    #[test]
    fn no_name_is_declared_twice_in_a_section() {
        let mut seen = HashSet::new();
        for entry in entries(DEEPSPEED) {
            let section = entry.path.rsplit_once('.').map_or("", |(section, _)| section);
            for name in entry.key.names() {
                assert!(seen.insert(format!("{section}.{name}")), "{section}.{name}");
            }
        }
        assert!(seen.len() > 350, "only {} keys", seen.len());
    }
}
