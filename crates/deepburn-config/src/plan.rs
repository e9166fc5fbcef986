//! The resolved plan of a DeepSpeed configuration for one job.
//!
//! All defaults and derived numbers are filled in. A value is optional only if the feature can be
//! off. The rest of DeepBurn reads these plans and never the configuration.

mod activations;
mod autotuning;
mod curriculum;
mod dynamic_batching;
mod mesh;
mod monitor;
mod optimizer;
mod param_groups;
mod quantization;
mod trainer_schedule;

use std::path::PathBuf;

use serde::Serialize;

pub use activations::*;
pub use autotuning::*;
pub use curriculum::*;
pub use dynamic_batching::*;
pub use mesh::*;
pub use monitor::*;
pub use optimizer::*;
pub use param_groups::*;
pub use quantization::*;
pub use trainer_schedule::*;

use crate::choice::choices;
use crate::counted::counted;

/// Returns whether a value is the default, which is omitted in `job.json`.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// All settings of a training run, resolved for one world size.
///
/// The fields of the groups are fields of the plan in `job.json`, in the order of declaration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The arrangement of the ranks.
    pub mesh: MeshPlan,
    /// Pipeline parallelism; `None` for one stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<PipelinePlan>,
    /// Batch sizes and gradient accumulation.
    pub batch: BatchPlan,
    /// The number and the length of the samples of a step, if they change during training.
    #[serde(flatten)]
    pub data_efficiency: DataEfficiencyPlan,
    /// The optimizer and its hyper-parameters.
    pub optimizer: OptimizerPlan,
    /// Parameter groups. A DeepSpeed configuration cannot define any.
    pub param_groups: ParamGroups,
    /// Frozen matrices in 8 or 4 bits; `None` for parameters in their type. A DeepSpeed
    /// configuration cannot define it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<QuantizationPlan>,
    /// The learning-rate schedule; constant if the configuration does not have one.
    pub schedule: SchedulePlan,
    /// Sharding, communication and offload of model states.
    pub zero: ZeroPlan,
    /// Data types and loss scaling.
    pub precision: PrecisionPlan,
    /// The activations that backward reads, and what becomes of its gradients.
    #[serde(flatten)]
    pub backward: BackwardPlan,
    /// What the run shows and writes.
    #[serde(flatten)]
    pub outputs: OutputPlan,
}

/// The number and the length of the samples of a step, if they change during training.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataEfficiencyPlan {
    /// Dynamic batching by a token budget; `None` for batches with a fixed number of samples.
    pub dynamic_batching: Option<DynamicBatchingPlan>,
    /// Curriculum learning with increasing sequence lengths; `None` for sequences of full length.
    pub curriculum: Option<CurriculumPlan>,
}

/// The activations that backward reads, and what becomes of its gradients.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BackwardPlan {
    /// Maximum global gradient norm; `None` if clipping is off (0 in the file).
    pub gradient_clipping: Option<f64>,
    /// The reduction of gradients over the ranks.
    pub reduction: ReductionPlan,
    /// Activation checkpointing and activation offload.
    pub activations: ActivationPlan,
}

/// What a run shows and writes in addition to its metrics.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OutputPlan {
    /// Console output and timing during training.
    pub report: ReportPlan,
    /// Outputs for monitoring programs.
    pub monitor: MonitorPlan,
}

impl Plan {
    /// Describes the groups of ranks over which states are sharded, such as
    /// ` over groups of 2 ranks (4 replicas)` or `, in backward over groups of 2 ranks (hpZ)`;
    /// empty if these are all data-parallel ranks.
    pub fn sharding(&self) -> String {
        let MeshPlan { replicate, shard, .. } = self.mesh;
        match self.zero.parameters.secondary_partition_size {
            Some(size) => format!(", in backward over groups of {} (hpZ)", counted(size, "rank")),
            None if replicate > 1 => {
                format!(" over groups of {} ({replicate} replicas)", counted(shard, "rank"))
            }
            None => String::new(),
        }
    }

    /// Changes the number of data-parallel ranks and with it the global batch size. Shard groups
    /// and secondary shard groups keep their size if it is a divisor of `ranks`. Otherwise states
    /// are sharded over all ranks of a stage.
    pub fn set_data_parallel_size(&mut self, ranks: usize) {
        let MeshPlan { replicate, shard, .. } = self.mesh;
        let shard = if replicate > 1 && ranks.is_multiple_of(shard) { shard } else { ranks };
        let replicate = ranks.checked_div(shard).unwrap_or(1);
        self.mesh = MeshPlan { replicate, shard, ..self.mesh };
        // A secondary group of all ranks is the same as none.
        let secondary = &mut self.zero.parameters.secondary_partition_size;
        *secondary = secondary.filter(|size| *size < ranks && ranks.is_multiple_of(*size));
        self.batch.data_parallel_size = ranks;
        self.batch = self.batch.resized(self.batch.gradient_accumulation_steps);
    }
}

/// The batch triple, consistent by construction:
/// `train_batch_size == micro_batch_size * gradient_accumulation_steps * data_parallel_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BatchPlan {
    /// Samples per optimizer step over all ranks.
    pub train_batch_size: usize,
    /// Samples per data-parallel rank in one forward and backward pass.
    pub micro_batch_size: usize,
    /// Forward and backward passes per optimizer step: the micro-batches of a pipeline.
    pub gradient_accumulation_steps: usize,
    /// Data-parallel ranks: ranks with samples of their own.
    pub data_parallel_size: usize,
}

impl BatchPlan {
    /// Returns a batch with the same micro-batches, but another number of them.
    pub fn resized(self, gradient_accumulation_steps: usize) -> Self {
        let micro_batches = gradient_accumulation_steps * self.data_parallel_size;
        let train_batch_size = self.micro_batch_size * micro_batches;
        Self { train_batch_size, gradient_accumulation_steps, ..self }
    }
}

/// Shape of the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmupShape {
    /// `ln(i + 1) / ln(N)`.
    Log,
    /// `i / N`.
    Linear,
}

choices!(WarmupShape { "log" => Log, "linear" => Linear });

/// The learning-rate schedule with every default filled in.
///
/// In the formulae, `i` is the number of applied steps before a step, and `N` is the number of
/// warm-up steps. DeepSpeed's schedules with a warm-up use `max(i - 1, 0)` instead of `i`, so the
/// first two steps have the same rate. A step that is skipped because of an overflow does not
/// advance the schedule.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SchedulePlan {
    /// A constant learning rate: the optimizer's.
    Constant {
        /// Learning rate.
        lr: f64,
    },
    /// DeepSpeed's WarmupLR.
    ///
    /// `min_lr + (max_lr - min_lr) * shape(i)` up to step `N`, then `max_lr`.
    Warmup {
        /// Learning rate before the warm-up.
        min_lr: f64,
        /// Learning rate after the warm-up.
        max_lr: f64,
        /// Applied steps until `max_lr` (at least 2).
        warmup_steps: usize,
        /// Shape of the rise.
        shape: WarmupShape,
        /// Index of the last step before training; -1 for a new run.
        last_batch_iteration: i64,
    },
    /// DeepSpeed's WarmupDecayLR: warm-up, then linear to `min_lr`.
    ///
    /// After the warm-up, the difference to `min_lr` is multiplied by
    /// `(total_steps - i) / (total_steps - N)`, and is 0 from `total_steps` on.
    WarmupDecay {
        /// Learning rate before the warm-up and at the end.
        min_lr: f64,
        /// Learning rate at the end of the warm-up.
        max_lr: f64,
        /// Applied steps until `max_lr`.
        warmup_steps: usize,
        /// Applied steps of the whole schedule.
        total_steps: usize,
        /// Shape of the rise.
        shape: WarmupShape,
        /// Index of the last step before training; -1 for a new run.
        last_batch_iteration: i64,
    },
    /// DeepSpeed's WarmupCosineLR: ratios of the optimizer's learning rate.
    ///
    /// After the warm-up the ratio falls from 1 to `cos_min_ratio` along half a cosine.
    WarmupCosine {
        /// Learning rate that the ratios multiply.
        lr: f64,
        /// Ratio at the start of the warm-up.
        warmup_min_ratio: f64,
        /// Ratio at the end of the schedule.
        cos_min_ratio: f64,
        /// Applied steps of the warm-up.
        warmup_steps: usize,
        /// Applied steps of the whole schedule.
        total_steps: usize,
        /// Shape of the rise.
        shape: WarmupShape,
        /// Index of the last step before training; -1 for a new run.
        last_batch_iteration: i64,
    },
    /// DeepSpeed's LRRangeTest.
    ///
    /// `min_lr * (1 + step_rate * i / step_size)`. The loss over such a run shows the largest
    /// learning rate that still trains.
    LrRangeTest {
        /// Learning rate at the start.
        min_lr: f64,
        /// Applied steps per unit of `step_rate`.
        step_size: usize,
        /// Rise per `step_size` steps, as a fraction of `min_lr`.
        step_rate: f64,
        /// Whether the rate rises in steps rather than continuously.
        staircase: bool,
        /// Index of the last step before training; -1 for a new run.
        last_batch_iteration: i64,
    },
    /// DeepSpeed's OneCycle, learning rate and (optionally) momentum.
    OneCycle(OneCyclePlan),
    /// PyTorch's StepLR, counted in applied steps.
    ///
    /// `lr * gamma^floor(i / step_size)`.
    Step {
        /// Learning rate of the first step.
        lr: f64,
        /// Applied steps between two decays.
        step_size: usize,
        /// Factor of each decay.
        gamma: f64,
    },
    /// PyTorch's CosineAnnealingLR, counted in applied steps.
    ///
    /// `eta_min + (lr - eta_min) * (1 + cos(pi i / t_max)) / 2`. It rises again after `t_max`.
    CosineAnnealing {
        /// Learning rate of the first step.
        lr: f64,
        /// Applied steps of half a period.
        t_max: usize,
        /// Learning rate at the end of half a period.
        eta_min: f64,
    },
    /// PyTorch's LinearLR, counted in applied steps.
    ///
    /// `lr` times a factor that goes from `start_factor` to `end_factor` in `total_iters` steps.
    Linear {
        /// Learning rate that the factors multiply.
        lr: f64,
        /// Factor at the first step.
        start_factor: f64,
        /// Factor at the end.
        end_factor: f64,
        /// Applied steps from one factor to the other.
        total_iters: usize,
    },
    /// PyTorch's ExponentialLR, counted in applied steps.
    ///
    /// `lr * gamma^i`.
    Exponential {
        /// Learning rate of the first step.
        lr: f64,
        /// Factor of each step.
        gamma: f64,
    },
    /// A schedule of transformers' Trainer, counted in applied steps.
    Trainer(TrainerSchedule),
}

impl SchedulePlan {
    /// Returns the number of warm-up steps, in applied steps; 0 for schedules without a warm-up.
    pub fn warmup_steps(&self) -> usize {
        match self {
            Self::Warmup { warmup_steps, .. }
            | Self::WarmupDecay { warmup_steps, .. }
            | Self::WarmupCosine { warmup_steps, .. } => *warmup_steps,
            Self::Trainer(schedule) => schedule.warmup_steps,
            _ => 0,
        }
    }

    /// Returns whether the schedule sets the optimizer's momentum, or Adam's beta1, in every step.
    pub fn cycles_momentum(&self) -> bool {
        matches!(self, Self::OneCycle(OneCyclePlan { momentum: Some(_), .. }))
    }
}

/// Parameters of the one-cycle policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OneCyclePlan {
    /// Learning rate at both ends of the cycle.
    pub min_lr: f64,
    /// Learning rate at the top of the cycle.
    pub max_lr: f64,
    /// Decay of the learning rate after the cycle, per decay interval.
    pub decay_lr_rate: f64,
    /// Applied steps of the rise.
    pub first_step_size: usize,
    /// Applied steps of the fall.
    pub second_step_size: usize,
    /// Stairs of the rise; 0 for a continuous one.
    pub first_stair_count: usize,
    /// Stairs of the fall; 0 for a continuous one.
    pub second_stair_count: usize,
    /// Applied steps of a decay interval; 0 for no decay.
    pub decay_step_size: usize,
    /// The momentum cycle, `None` when `cycle_momentum` is off.
    pub momentum: Option<MomentumCycle>,
    /// Index of the last step before training; -1 for a new run.
    pub last_batch_iteration: i64,
}

/// Momentum (Adam's beta1) over one cycle, opposite to the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MomentumCycle {
    /// Momentum at the top of the learning rate.
    pub min: f64,
    /// Momentum at both ends of the cycle.
    pub max: f64,
    /// Growth of the momentum after the cycle, per decay interval; the value is kept below 1.
    pub decay_rate: f64,
}

/// The ZeRO stage, which determines the model states that are sharded (Rajbhandari et al. 2020).
///
/// Bytes per rank for `p` parameters in fp32 with Adam, on `n` ranks:
///
/// | Stage | Parameters | Gradients | Optimizer states |
/// |---|---|---|---|
/// | 0 | `4 p` | `4 p` | `8 p` |
/// | 1 | `4 p` | `4 p` | `8 p / n` |
/// | 2 | `4 p` | `4 p / n` | `8 p / n` |
/// | 3 | `4 p / n` | `4 p / n` | `8 p / n` |
///
/// ```
/// use deepburn_config::Stage;
///
/// assert!(Stage::Gradients.shards_optimizer() && !Stage::Gradients.shards_parameters());
/// assert_eq!(Stage::Parameters.number(), 3);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Stage {
    /// Nothing: plain data parallelism.
    #[serde(rename = "0")]
    Disabled,
    /// Optimizer states.
    #[serde(rename = "1")]
    OptimizerStates,
    /// Optimizer states and gradients.
    #[serde(rename = "2")]
    Gradients,
    /// Optimizer states, gradients and parameters.
    #[serde(rename = "3")]
    Parameters,
}

impl Stage {
    /// All stages, in the order of their numbers.
    pub const ALL: [Self; 4] =
        [Self::Disabled, Self::OptimizerStates, Self::Gradients, Self::Parameters];

    /// Returns the number of the stage, 0 to 3.
    pub fn number(self) -> u8 {
        // The variants are declared in the order of their numbers.
        self as u8
    }
    /// Returns whether each rank keeps only its shard of the gradients.
    pub fn shards_gradients(self) -> bool {
        self >= Self::Gradients
    }
    /// Returns whether each rank keeps only its shard of the optimizer states.
    pub fn shards_optimizer(self) -> bool {
        self >= Self::OptimizerStates
    }
    /// Returns whether each rank keeps only its shard of the parameters.
    pub fn shards_parameters(self) -> bool {
        self == Self::Parameters
    }
}

/// Sharding, communication and offload of model states. Sizes are in elements, as in DeepSpeed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ZeroPlan {
    /// The ZeRO stage.
    pub stage: Stage,
    /// How gradients are collected and reduced.
    pub gradients: GradientPlan,
    /// Elements of one all-gather of updated parameters (stages 1 and 2).
    pub allgather_bucket_size: usize,
    /// How parameters are gathered and released (stage 3).
    pub parameters: GatherPlan,
    /// Where optimizer states and accumulated gradients are stored.
    pub optimizer_states: OptimizerOffload,
    /// Where the shards of parameters are stored (stage 3).
    pub parameter_shards: ParameterOffload,
}

/// Where the parameter shards of a rank are stored (`offload_param`). They are offloaded only if
/// the optimizer states are offloaded too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ParameterOffload {
    /// On the device.
    Device,
    /// In host memory.
    Host,
    /// In the file of the optimizer states.
    Nvme {
        /// Maximum number of elements that stay in host memory: the shards of the first parameters
        /// of the model, up to the first parameter that does not fit.
        max_in_cpu: usize,
        /// Whether the device itself uses host memory.
        device_is_host: bool,
    },
}

impl ZeroPlan {
    /// Returns whether each rank keeps only its shard of the gradients. At stage 1, this is the
    /// case if gradients are offloaded together with the optimizer states.
    pub fn shards_gradients(&self) -> bool {
        let offloaded = self.optimizer_states != OptimizerOffload::Device;
        self.stage.shards_gradients() || offloaded && self.stage.shards_optimizer()
    }
}

/// Where the optimizer states and accumulated gradients of a rank are stored (`offload_optimizer`).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum OptimizerOffload {
    /// On the device of the parameters.
    Device,
    /// In host memory, where the CPU updates them.
    Host {
        /// Maximum number of elements that are updated at a time.
        sub_group_size: usize,
        /// Fraction (0 to 1) of the trainable elements whose states and gradients are offloaded.
        /// The last parameters are offloaded, and the others stay on the device.
        ratio: f64,
    },
    /// In a file, which the CPU updates in sub-groups.
    Nvme(NvmePlan),
}

/// Optimizer states in a file of each rank on NVMe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NvmePlan {
    /// The file.
    pub file: SwapFilePlan,
    /// Maximum number of elements that are updated at a time.
    pub sub_group_size: usize,
    /// Whether the next sub-group is read while one is updated.
    pub pipeline_read: bool,
    /// Whether the update continues while a sub-group is written.
    pub pipeline_write: bool,
}

/// A file of each rank on NVMe, and how it is read and written (`aio`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SwapFilePlan {
    /// Folder in which ranks create their files.
    pub folder: PathBuf,
    /// Bytes of one request.
    pub block_size: usize,
    /// Requests in flight.
    pub queue_depth: usize,
}

/// How gradients are collected and reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GradientPlan {
    /// Number of elements that are collected before a bucket is reduced. A larger gradient is
    /// reduced alone.
    pub reduce_bucket_size: usize,
    /// Whether backward continues while a bucket is reduced.
    pub overlap_comm: bool,
    /// Whether each gradient in a bucket is flattened, so that no view keeps a larger allocation
    /// alive.
    pub contiguous_gradients: bool,
    /// Whether each shard is reduced at its owner only. Otherwise gradients are all-reduced, and
    /// each rank keeps its shard.
    pub reduce_scatter: bool,
    /// Whether a missing gradient of a parameter counts as zero. Otherwise it is an error.
    pub ignore_unused_parameters: bool,
}

/// How sharded parameters are gathered and released (stage 3). Sizes are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GatherPlan {
    /// Number of elements to prefetch; the last parameter may exceed it. 0 disables prefetching.
    pub prefetch_bucket_size: usize,
    /// Parameters up to this size are persistent: they stay gathered.
    pub persistence_threshold: usize,
    /// Maximum size of all persistent parameters together; `usize::MAX` for no limit. A parameter
    /// that does not fit is skipped, and later parameters are still considered.
    pub model_persistence_threshold: usize,
    /// Maximum number of elements that are gathered at a time.
    pub max_live_parameters: usize,
    /// A parameter used again within this many elements is not released.
    pub max_reuse_distance: usize,
    /// Number of consecutive ranks that together keep the parameters between forward and the step
    /// (hpZ); `None` if only all ranks together have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secondary_partition_size: Option<usize>,
    /// Whether a 16-bit copy of the whole model may be gathered for saving.
    pub gather_16bit_weights_on_model_save: bool,
}

/// A floating-point type with its name in configurations.
///
/// ```
/// use deepburn_config::Precision;
///
/// assert_eq!((Precision::Bf16.name(), Precision::Bf16.bytes()), ("bf16", 2));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// 32 bits.
    Fp32,
    /// IEEE half precision: 5 bits of exponent, largest number 65504.
    Fp16,
    /// bfloat16: the exponent of fp32 with 8 bits of precision.
    Bf16,
}

// `bfp16` is how some releases of DeepSpeed spell bfloat16.
choices!(Precision { "fp32" => Fp32, "fp16" => Fp16, "bf16" => Bf16, "bfp16" => Bf16 });

impl Precision {
    /// Returns the number of bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Self::Fp32 { 4 } else { 2 }
    }
}

/// Data types of parameters, gradients and communication. The optimizer always computes in fp32.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PrecisionPlan {
    /// Type of the parameters in forward and backward. If it has 16 bits, the optimizer also keeps
    /// fp32 master weights.
    pub compute: Precision,
    /// Type of matrix products and convolutions under autocast, `Bf16` or `Fp16`; `None` runs each
    /// op in the type of its operands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autocast: Option<Precision>,
    /// Type of gradients in communication between ranks.
    pub communication: Precision,
    /// Type in which the gradients of micro-batches are accumulated.
    pub accumulation: Precision,
    /// The loss scale.
    pub loss_scale: LossScalePlan,
    /// How a step with non-finite gradients is handled.
    pub overflow: OverflowPlan,
}

impl PrecisionPlan {
    /// Returns the precision of matrix products.
    pub fn of_products(&self) -> Precision {
        self.autocast.unwrap_or(self.compute)
    }

    /// Everything in fp32; a non-finite gradient ends the run.
    pub const FP32: Self = Self {
        compute: Precision::Fp32,
        autocast: None,
        communication: Precision::Fp32,
        accumulation: Precision::Fp32,
        loss_scale: LossScalePlan::Static { scale: 1.0 },
        overflow: OverflowPlan::End,
    };

    /// Returns whether parameters or autocast operations are in fp16, so that the loss is scaled.
    pub fn uses_fp16(&self) -> bool {
        self.compute == Precision::Fp16 || self.autocast == Some(Precision::Fp16)
    }
}

/// The loss scale, which keeps small gradients above the smallest number of their type
/// (Micikevicius et al. 2018).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LossScalePlan {
    /// A constant scale; 1 unless parameters or autocast are in fp16.
    Static {
        /// The factor.
        scale: f64,
    },
    /// A scale that is as large as the gradients allow.
    Dynamic(DynamicScalePlan),
}

/// The parameters of the dynamic loss scale.
///
/// Gradients of fp16 below 6e-8 are lost, and those above 65504 are infinite. The scale multiplies
/// the loss, so that gradients are in this range, and the optimizer divides the gradients by it. No
/// constant scale fits all of training, so the scale adapts to the gradients:
///
/// - A step whose gradients are all finite is applied. After `window` such steps in a row, the
///   scale doubles.
/// - A step that overflows is skipped. After `hysteresis` overflows, the scale is halved, because a
///   single overflow may be an outlier.
/// - An overflow at `min_scale` ends the run, because the scale cannot be reduced further.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DynamicScalePlan {
    /// Scale of the first step.
    pub initial_scale: f64,
    /// Number of steps without an overflow before the scale doubles.
    pub window: u64,
    /// Number of overflows before the scale is halved for the first time, and again after each
    /// doubling.
    pub hysteresis: u64,
    /// Whether every step without an overflow resets the hysteresis.
    pub consecutive_hysteresis: bool,
    /// Minimum scale. An overflow at this scale ends the run.
    pub min_scale: f64,
    /// When the scale doubles.
    #[serde(skip_serializing_if = "is_default")]
    pub growth: ScaleGrowth,
}

/// The step at which the loss scale doubles, in a row of steps without an overflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleGrowth {
    /// The step after `window` such steps, as in DeepSpeed.
    #[default]
    AfterWindow,
    /// The last of `window` such steps, as in PyTorch's `torch.amp.GradScaler`. The scale does not
    /// grow beyond the range of f32.
    AtWindow,
}

/// How a step with non-finite gradients is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OverflowPlan {
    /// The step is skipped on all ranks.
    Skip,
    /// The run ends with an error that names the parameter.
    End,
}

/// The reduction of gradients over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ReductionPlan {
    /// Mean or sum.
    pub op: GradientReduction,
    /// Whether gradients are divided by the world size before the sum rather than after it.
    pub prescale: bool,
    /// Divisor that is applied before the sum, to avoid an overflow.
    pub predivide_factor: f64,
}

/// Mean or sum over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientReduction {
    /// Mean over the ranks.
    Mean,
    /// Sum over the ranks.
    Sum,
}

choices!(GradientReduction { "mean" => Mean, "sum" => Sum });

/// Console output and timing during training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ReportPlan {
    /// Optimizer steps between two printed lines; `None` prints none.
    pub steps_per_print: Option<usize>,
    /// Whether forward, backward and the optimizer step are timed separately.
    pub wall_clock_breakdown: bool,
}
