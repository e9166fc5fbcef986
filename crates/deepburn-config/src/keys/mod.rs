//! The keys of DeepSpeed's JSON, of the job file and of Accelerate's YAML: each is declared once,
//! in its section.
//!
//! The sections hold the keys of DeepSpeed 0.19 and those that older files still carry.
//! [`crate::rules`] turns them into the plan.

pub(crate) mod accelerate;
pub(crate) mod activations;
pub(crate) mod data;
pub(crate) mod job;
pub(crate) mod monitor;
pub(crate) mod offload;
pub(crate) mod optimizer;
pub(crate) mod precision;
pub(crate) mod scheduler;
pub(crate) mod unsupported;
pub(crate) mod zero;

use activations::Activations;
use data::{Curriculum, DataEfficiency};
use monitor::{CsvMonitor, FlopsProfiler, Profiling, Tensorboard};
use offload::Aio;
use optimizer::Optimizer;
use precision::{Bf16, DataTypes, Fp16, TorchAutocast};
use scheduler::Scheduler;
use unsupported::{
    Amp, Autotuning, Checkpoint, Comet, CommsLogger, Compile, CompressionTraining, Elasticity,
    ExpertParallel, HybridEngine, Pipeline, ProgressiveLayerDrop, TensorParallel, Timers, Wandb,
};
use zero::{CHECKPOINTS, Zero};

use crate::plan::{GradientReduction, Precision};
use crate::spec::*;

/// Why keys that only occur in DeepSpeed's own code are ignored.
const UNREAD: &str = "DeepSpeed does not read this key either";

/// Where an editor finds the schema of the file.
const SCHEMA: Spec<Option<&str>> = opt_text()
    .inert("editors read it; deepburn keys --schema prints one")
    .doc("Path of the JSON Schema, for editors.");

section! {
    /// A DeepSpeed configuration.
    pub(crate) struct DeepSpeed<'a> {
        /// Samples of one optimizer step over all ranks.
        train_batch_size: Option<i64> = opt_integer().unit("samples").auto(),
        /// Samples of one forward and backward pass on one rank.
        train_micro_batch_size_per_gpu: Option<i64> = opt_integer().unit("samples").auto(),
        /// Forward and backward passes of one optimizer step.
        gradient_accumulation_steps: Option<i64> = opt_integer().unit("passes").auto(),
        optimizer: Optimizer<'a> = section().auto(),
        scheduler: Scheduler<'a> = section().auto(),
        /// Largest global L2 norm of the gradients that is let through; 0 turns clipping off.
        gradient_clipping: f64 = real(NotNegative, 1.0).auto(),
        zero_optimization: Zero<'a> = section(),
        /// How the gradients of all ranks become one; `sum` needs stage 0, 1 or 2.
        gradient_allreduce_op: GradientReduction = choice("mean"),
        /// Divide gradients by the world size before they are summed, not after.
        prescale_gradients: bool = flag(false),
        /// Part of that division made before the sum, against overflow in 16 bits.
        gradient_predivide_factor: f64 = real(Positive, 1.0),
        /// Data type of communicated gradients; by default the model's.
        communication_data_type: Option<Precision> = opt_choice(),
        data_types: DataTypes<'a> = section(),
        fp16: Fp16<'a> = section(),
        bf16: Bf16<'a> = section().spelled(&[Alias("bfloat16")]),
        /// Optimizer steps between two printed lines; none are printed without it.
        steps_per_print: Option<usize> = opt_positive().unit("steps"),
        /// Time forward, backward and step apart.
        wall_clock_breakdown: bool = flag(false),
        /// Print the memory in use at every phase.
        memory_breakdown = flag(false)
            .unavailable(
                "the printed memory breakdown", Differs,
                "set it to false; metrics.jsonl holds the memory by category of every step",
            ),
        /// Print the resolved configuration.
        dump_state = flag(false).inert("job.json always holds the resolved configuration"),
        profiling: Profiling<'a> = section(),
        flops_profiler: FlopsProfiler<'a> = section(),
        comms_logger = section::<CommsLogger>()
            .unavailable("the communication log", Enabled, "set comms_logger.enabled to false"),
        tensorboard: Tensorboard<'a> = section(),
        wandb = section::<Wandb>()
            .unavailable(
                "the Weights & Biases monitor", Enabled,
                "set it to false and tensorboard.enabled to true: no maintained Rust library writes W&B's run \
                 folder, but `wandb sync` uploads a TensorBoard folder",
            ),
        csv_monitor: CsvMonitor<'a> = section(),
        comet = section::<Comet>()
            .unavailable(
                "the Comet monitor", Enabled,
                "set it to false and tensorboard.enabled or csv_monitor.enabled to true: Comet has no library \
                 for Rust",
            ),
        timers = section::<Timers>().inert("throughput is always measured"),
        /// Level of DeepSpeed's own log.
        log_level = opt_text().inert("the program that trains decides what is logged"),
        /// Let ZeRO shard optimizers that DeepSpeed has not tested.
        zero_allow_untested_optimizer = flag(false)
            .inert("each optimizer here has been tested at the stages that it supports"),
        /// Refuse an optimizer that the caller made when offloading.
        zero_force_ds_cpu_optimizer = flag(true).inert("the optimizer is always made from this file"),
        /// Drop the samples that do not fill a last global batch. `data.drop_last` of a job file
        /// comes first.
        dataloader_drop_last: bool = flag(false),
        checkpoint = section::<Checkpoint>().inert(CHECKPOINTS),
        activation_checkpointing: Activations<'a> = section(),
        aio: Aio<'a> = section(),
        amp = section::<Amp>()
            .unavailable(
                "Apex mixed precision", Enabled, "set amp.enabled to false, or use torch_autocast instead",
            ),
        torch_autocast: TorchAutocast<'a> = section(),
        pipeline = section::<Pipeline>().inert("pipeline parallelism is not available in this version"),
        tensor_parallel = section::<TensorParallel>()
            .inert("tensor parallelism is not available in this version"),
        expert_parallel = section::<ExpertParallel>()
            .unavailable("expert parallelism", Enabled, "set expert_parallel.enabled to false"),
        /// Ranks that share a sequence.
        sequence_parallel_size = positive(1).unavailable("sequence parallelism", Differs, "set it to 1"),
        /// Type in which sequence-parallel gradients travel.
        seq_parallel_communication_data_type = text("fp32").inert("there is no sequence parallelism"),
        /// Order of the ranks.
        use_data_before_expert_parallelism = flag(false).inert("there is no expert parallelism"),
        hybrid_engine = section::<HybridEngine>()
            .unavailable("the hybrid engine", Enabled, "set hybrid_engine.enabled to false"),
        compile = section::<Compile>().inert("compilation is not available in this version"),
        elasticity = section::<Elasticity>()
            .unavailable("elasticity", Enabled, "set elasticity.enabled to false and give the batch sizes"),
        autotuning = section::<Autotuning>()
            .unavailable("autotuning", Enabled, "set autotuning.enabled to false"),
        data_efficiency: DataEfficiency<'a> = section(),
        curriculum_learning: Curriculum<'a> = section(),
        progressive_layer_drop = section::<ProgressiveLayerDrop>()
            .unavailable("progressive layer drop", Enabled, "set progressive_layer_drop.enabled to false"),
        compression_training = section::<CompressionTraining>()
            .unavailable("compression", AnyEnabled, "remove compression_training"),
        schema as "$schema" = SCHEMA,
        /// Devices that a launcher shows.
        cuda_visible_devices = free()
            .ignored("the environment says which devices are visible; training.devices chooses"),
        /// DeepSpeed's name for comms_logger inside its code.
        comms_config = free().ignored(UNREAD),
        /// DeepSpeed's name for all monitors inside its code.
        monitor_config = free()
            .ignored(
                "DeepSpeed does not read this key either; tensorboard, wandb and csv_monitor are keys of the \
                 top level",
            ),
        /// A remark.
        comment as "_comment" = free().ignored(UNREAD),
        /// Mixture of quantisation.
        quantize_training = free().unavailable("quantised training", Present, "remove it"),
        /// Quantisation of weights for inference.
        weight_quantization = free().unavailable("weight quantisation", Present, "remove it"),
        /// Eigenvalues for mixture of quantisation.
        eigenvalue = free().unavailable("quantised training", AnyEnabled, "remove it"),
        /// Sparse attention.
        sparse_attention = free().unavailable("sparse attention", Present, "remove it"),
        /// Send embedding gradients as sparse tensors.
        sparse_gradients = flag(false)
            .unavailable("sparse gradients", Differs, "set it to false; they are reduced dense"),
        /// Checkpoints through a service.
        nebula = free().unavailable("Nebula checkpoints", AnyEnabled, "remove it"),
        /// Asynchronous checkpoints.
        datastates_ckpt = free().unavailable("DataStates checkpoints", Present, "remove it"),
        /// Record CUDA graphs.
        graph_harvesting = flag(false).unavailable("CUDA graphs", Differs, "set it to false"),
        /// Let the engine count micro-batches.
        managed_gradient_accumulation = flag(true)
            .unavailable("accumulation counted by the caller", Differs, "set it to true"),
        /// Keep DeepSpeed from using all-gather.
        disable_allgather = flag(false).inert("in-process ranks hand tensors over directly"),
        /// Turn Python's garbage collector off while training.
        disable_python_gc = flag(false).inert("there is no Python"),
        /// Only warns when it is not a multiple of 8.
        vocabulary_size = count(0).inert("the vocabulary comes from the model"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::key::entries;
    use crate::keys::accelerate::Accelerate;
    use crate::keys::job::JobFile;
    use crate::section::Section;

    #[test]
    fn every_default_is_of_its_kind_and_every_key_is_described() {
        for table in [DeepSpeed::KEYS, JobFile::KEYS, Accelerate::KEYS] {
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
        for entry in entries(DeepSpeed::KEYS) {
            let section = entry.path.rsplit_once('.').map_or("", |(section, _)| section);
            for name in entry.key.names() {
                assert!(seen.insert(format!("{section}.{name}")), "{section}.{name}");
            }
        }
        assert!(seen.len() > 350, "only {} keys", seen.len());
    }
}
