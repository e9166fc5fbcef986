//! The keys of DeepSpeed's JSON, of the job file and of Accelerate's YAML: each is declared once,
//! in its section.
//!
//! The sections contain the keys of DeepSpeed 0.19, and older keys that are still in use.
//! [`crate::rules`] turns them into the plan.

pub(crate) mod accelerate;
mod activations;
mod autotuning;
mod data;
pub(crate) mod job;
mod monitor;
mod offload;
mod optimizer;
mod pipeline;
mod precision;
mod scheduler;
mod unsupported;
mod zero;

pub(crate) use activations::*;
pub(crate) use autotuning::*;
pub(crate) use data::*;
pub(crate) use monitor::*;
pub(crate) use offload::*;
pub(crate) use optimizer::*;
pub(crate) use pipeline::*;
pub(crate) use precision::*;
pub(crate) use scheduler::*;
use unsupported::*;
pub(crate) use zero::*;

use crate::plan::{GradientReduction, Precision};
use crate::spec::*;

/// The reason why keys that only occur in DeepSpeed's code are ignored.
const UNREAD: &str = "DeepSpeed does not read this key either";

shared! {
    // Editors read the schema of the file from this key.
    /// JSON Schema of the file, for editors.
    SCHEMA: Option<&str> = opt_text().inert("only editors use it; deepburn keys --schema prints a schema");
}

section! {
    /// DeepSpeed configuration.
    pub(crate) struct DeepSpeed<'a> {
        /// Global batch size per optimizer step: micro-batch size times accumulation steps times
        /// data-parallel ranks, which are the ranks of a pipeline stage. Unset: derived from the
        /// other two.
        train_batch_size: Option<i64> = opt_integer().unit("samples").auto(),
        /// Micro-batch size per rank: samples in one forward and backward pass. Larger values need
        /// more activation memory. Unset: derived from train_batch_size.
        train_micro_batch_size_per_gpu: Option<i64> = opt_integer().unit("samples").auto(),
        /// Number of micro-batches per optimizer step, also of a pipeline. Raises train_batch_size
        /// without more activation memory. Unset: derived from the batch sizes.
        gradient_accumulation_steps: Option<i64> = opt_integer().unit("passes").auto(),
        optimizer: Optimizer<'a> = section().auto(),
        scheduler: Scheduler<'a> = section().auto(),
        //= deepspeed 0.19.8 runtime/constants.py GRADIENT_CLIPPING_DEFAULT
        /// Maximum global L2 norm of the gradients; larger gradients are scaled down. 0 disables
        /// clipping.
        gradient_clipping: f64 = real(NotNegative, 1.0).auto(),
        zero_optimization: Zero<'a> = section(),
        /// Reduction of gradients over ranks: "mean" or "sum". "sum" is not supported at ZeRO stage
        /// 3.
        gradient_allreduce_op: GradientReduction = choice("mean"),
        /// Divide gradients by the number of ranks before the reduction instead of after it. Only
        /// for gradient_allreduce_op "mean".
        prescale_gradients: bool = flag(false),
        /// Divide gradients by this factor before the reduction, and by ranks / factor after it,
        /// which avoids overflow in 16 bits. No effect with prescale_gradients or
        /// gradient_allreduce_op "sum".
        gradient_predivide_factor: f64 = real(Positive, 1.0),
        /// Data type of communicated gradients: "fp32", "fp16" or "bf16". 16 bits halve the traffic
        /// of fp32 and lose precision. Unset: the data type of the parameters.
        communication_data_type: Option<Precision> = opt_choice(),
        data_types: DataTypes<'a> = section(),
        fp16: Fp16<'a> = section(),
        bf16: Bf16<'a> = section().alias("bfloat16"),
        /// Optimizer steps between log lines; training.logging_steps of a job file takes
        /// precedence. Unset: finetune shows a progress bar on a terminal and about 20 lines
        /// elsewhere.
        steps_per_print: Option<usize> = opt_positive().unit("steps"),
        /// Add the time of each phase of a step, such as forward and backward, to log lines.
        wall_clock_breakdown: bool = flag(false),
        /// Print memory usage in every phase.
        memory_breakdown = flag(false)
            .unavailable("the printed memory breakdown", Differs,
                "set it to false; metrics.jsonl contains the memory of every step by category"),
        /// Print the resolved configuration.
        dump_state = flag(false).inert("job.json always contains the resolved configuration"),
        profiling: Profiling<'a> = section(),
        flops_profiler: FlopsProfiler<'a> = section(),
        comms_logger = switched_off::<CommsLogger>("communication logging", "set comms_logger.enabled to false"),
        tensorboard: Tensorboard<'a> = section(),
        wandb: Wandb<'a> = section(),
        csv_monitor: CsvMonitor<'a> = section(),
        comet = switched_off::<Comet>(
            "the Comet monitor",
            "set it to false and tensorboard.enabled or csv_monitor.enabled to true: Comet has no library \
             for Rust",
        ),
        timers = section::<Timers>().inert("throughput is always measured"),
        /// Level of DeepSpeed's log.
        log_level = opt_text().inert("RUST_LOG sets the log level"),
        /// Allow ZeRO with optimizers that DeepSpeed has not tested.
        zero_allow_untested_optimizer = flag(false)
            .inert("all optimizers are tested at the stages that they support"),
        /// Require DeepSpeed's CPU optimizer for offload.
        zero_force_ds_cpu_optimizer = flag(true).inert("the optimizer is always created from this configuration"),
        /// Leave out the last step if training.epochs ends before its global batch is full.
        /// data.drop_last of a job file takes precedence.
        dataloader_drop_last: bool = flag(false),
        checkpoint = section::<CheckpointSection>().inert(CHECKPOINTS),
        activation_checkpointing: Activations<'a> = section(),
        aio: Aio<'a> = section(),
        amp = switched_off::<Amp>("Apex mixed precision", "set amp.enabled to false, or use torch_autocast instead").removed(),
        torch_autocast: TorchAutocast<'a> = section(),
        pipeline: Pipeline<'a> = section(),
        tensor_parallel = section::<TensorParallel>()
            .inert("tensor parallelism is not available in this version"),
        expert_parallel = switched_off::<ExpertParallel>("expert parallelism", "set expert_parallel.enabled to false"),
        /// Number of ranks in a sequence-parallel group.
        sequence_parallel_size = positive(1).unavailable("sequence parallelism", Differs, "set it to 1"),
        /// Data type of sequence-parallel communication.
        seq_parallel_communication_data_type = text("fp32").inert("sequence parallelism is not supported"),
        /// Order ranks by data-parallel group before expert-parallel group.
        use_data_before_expert_parallelism = flag(false).inert("expert parallelism is not supported"),
        hybrid_engine = switched_off::<HybridEngine>("the hybrid engine", "set hybrid_engine.enabled to false"),
        compile = section::<Compile>().inert("compilation is not available in this version"),
        elasticity = switched_off::<Elasticity>("elasticity", "set elasticity.enabled to false and give the batch sizes").removed(),
        autotuning: Autotuning<'a> = section(),
        data_efficiency: DataEfficiency<'a> = section(),
        curriculum_learning: Curriculum<'a> = section().removed(),
        progressive_layer_drop = switched_off::<ProgressiveLayerDrop>(
            "progressive layer drop", "set progressive_layer_drop.enabled to false").removed(),
        compression_training = section::<CompressionTraining>()
            .unavailable("compression", AnyEnabled, "remove compression_training").removed(),
        schema as "$schema" = SCHEMA,
        /// Visible CUDA devices.
        cuda_visible_devices = free()
            .ignored(
                "the environment variable CUDA_VISIBLE_DEVICES sets the visible devices; training.devices \
                 selects among them",
            ),
        /// Internal name of comms_logger in DeepSpeed.
        comms_config = free().ignored(UNREAD),
        /// Internal name of the monitor sections in DeepSpeed.
        monitor_config = free()
            .ignored(
                "DeepSpeed does not read this key either; tensorboard, wandb and csv_monitor are keys of the \
                 top level",
            ),
        /// Comment. So is every other key of the top level whose name starts with _, # or //.
        comment as "_comment" = free().inert(UNREAD),
        /// Found in published files; not a key of DeepSpeed.
        log = free().inert(UNREAD),
        /// All-reduce gradients in fp32; a key of early versions of DeepSpeed.
        fp32_allreduce = free()
            .ignored("DeepSpeed no longer reads this key; communication_data_type sets the data type"),
        /// Mixture-of-quantization training (MoQ).
        quantize_training = absent("mixture-of-quantization training").removed(),
        /// Weight quantization for inference.
        weight_quantization = absent("weight quantization"),
        /// Eigenvalue computation for mixture-of-quantization training (MoQ).
        eigenvalue = free().unavailable("mixture-of-quantization training", AnyEnabled, "remove it").removed(),
        /// Sparse attention kernels.
        sparse_attention = absent("sparse attention").removed(),
        /// Communicate embedding gradients as sparse tensors.
        sparse_gradients = flag(false)
            .unavailable("sparse gradients", Differs, "set it to false; all gradients are reduced as dense tensors").removed(),
        /// Checkpoints through Microsoft's Nebula service.
        nebula = free().unavailable("Nebula checkpoints", AnyEnabled, "remove it").removed(),
        /// Asynchronous checkpoints with DataStates.
        datastates_ckpt = absent("DataStates checkpoints"),
        /// Capture CUDA graphs.
        graph_harvesting = fixed(false, "CUDA graphs").removed(),
        /// Let the engine count the micro-batches of a step.
        managed_gradient_accumulation = fixed(true, "gradient accumulation managed by the caller"),
        /// Use broadcasts instead of all-gathers.
        disable_allgather = flag(false).inert("updated parameters are always all-gathered"),
        /// Disable Python's garbage collector during training.
        disable_python_gc = flag(false).inert("DeepBurn does not run Python code"),
        /// Vocabulary size. DeepSpeed only warns if it is not a multiple of 8.
        vocabulary_size = count(0).inert("the model sets the vocabulary size"),
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
