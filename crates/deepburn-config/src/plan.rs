//! The resolved plan: what a DeepSpeed configuration means for one job.
//!
//! Nothing here is optional unless "off" is a real choice: every default is filled in, every
//! derived number is derived, and the rest of DeepBurn reads only these small policy values.

mod activations;
mod curriculum;
mod dynamic_batching;
mod monitor;
mod optimizer;
mod param_groups;

use std::path::PathBuf;

use serde::Serialize;

pub use activations::*;
pub use curriculum::*;
pub use dynamic_batching::*;
pub use monitor::*;
pub use optimizer::*;
pub use param_groups::*;

use crate::choice::{Choice, choices};

/// Everything a training run needs to know, resolved for one world size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// How many samples make a micro-batch, a rank's step and a global step.
    pub batch: BatchPlan,
    /// Batches by a budget of tokens; `None` where they have a fixed number of samples.
    pub dynamic_batching: Option<DynamicBatchingPlan>,
    /// Short sequences first; `None` where they are all as long as the data has them.
    pub curriculum: Option<CurriculumPlan>,
    /// The optimizer and its hyper-parameters.
    pub optimizer: OptimizerPlan,
    /// Parameters that are updated in another way. A DeepSpeed configuration has none.
    pub param_groups: ParamGroups,
    /// The learning-rate schedule; constant when the configuration names none.
    pub schedule: SchedulePlan,
    /// What is sharded, and how it travels.
    pub zero: ZeroPlan,
    /// Element types, and what keeps small gradients from vanishing in them.
    pub precision: PrecisionPlan,
    /// Largest global gradient norm let through; `None` when clipping is off (0 in the file).
    pub gradient_clipping: Option<f64>,
    /// How gradients of different ranks become one.
    pub reduction: ReductionPlan,
    /// Which activations backward computes again, and where the others wait for it.
    pub activations: ActivationPlan,
    /// What is printed and measured while training.
    pub report: ReportPlan,
    /// What is written for other programs to read.
    pub monitor: MonitorPlan,
}

/// The batch triple, consistent by construction:
/// `train_batch_size == micro_batch_size * gradient_accumulation_steps * world_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BatchPlan {
    /// Samples per optimizer step over all ranks.
    pub train_batch_size: usize,
    /// Samples per rank in one forward and backward pass.
    pub micro_batch_size: usize,
    /// Forward and backward passes per optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Data-parallel ranks.
    pub world_size: usize,
}

/// Shape of the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmupShape {
    /// `ln(i + 1) / ln(N)`.
    Log,
    /// `i / N`.
    Linear,
}

choices!(WarmupShape { "log" => Log, "linear" => Linear });

/// The learning-rate schedule with every default filled in.
///
/// Formulae have `i` for the number of applied steps before a step, and `N` for the warm-up's steps.
/// DeepSpeed's schedules with a warm-up take `i - 1`, at least 0, in its place: the first two steps
/// have one rate. A step that is skipped for an overflow advances no schedule.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SchedulePlan {
    /// The optimizer's own learning rate throughout.
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
        /// Learning rate after it.
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
    /// After the warm-up the rise is multiplied by `(total_steps - i) / (total_steps - N)`, and is
    /// 0 from `total_steps` on.
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
    /// `min_lr * (1 + step_rate * i / step_size)`. The loss over such a run shows the largest learning
    /// rate that still trains.
    LrRangeTest {
        /// Learning rate at the start.
        min_lr: f64,
        /// Applied steps per unit of `step_rate`.
        step_size: usize,
        /// Rise per `step_size` steps, as a fraction of `min_lr`.
        step_rate: f64,
        /// Rise in steps rather than continuously.
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
}

impl SchedulePlan {
    /// Applied steps in which the learning rate rises at first; 0 for schedules without warm-up.
    pub fn warmup_steps(&self) -> usize {
        match self {
            Self::Warmup { warmup_steps, .. }
            | Self::WarmupDecay { warmup_steps, .. }
            | Self::WarmupCosine { warmup_steps, .. } => *warmup_steps,
            _ => 0,
        }
    }

    /// Whether it sets the optimizer's momentum, or Adam's beta1, in every step.
    pub fn cycles_momentum(&self) -> bool {
        matches!(self, Self::OneCycle(OneCyclePlan { momentum: Some(_), .. }))
    }
}

/// Parameters of the one-cycle policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OneCyclePlan {
    /// Learning rate at both ends of the cycle.
    pub min_lr: f64,
    /// Learning rate at its top.
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

/// How much of the model states is sharded (Rajbhandari et al. 2020).
///
/// Bytes of each rank for `p` parameters in fp32 with Adam, on `n` ranks:
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
    /// Every stage, at the place of its number.
    pub(crate) const ALL: [Self; 4] =
        [Self::Disabled, Self::OptimizerStates, Self::Gradients, Self::Parameters];

    /// The number users know: 0 to 3.
    pub fn number(self) -> u8 {
        self as u8
    }
    /// Whether each rank keeps only its share of the gradients.
    pub fn shards_gradients(self) -> bool {
        self >= Self::Gradients
    }
    /// Whether each rank keeps only its share of the optimizer states.
    pub fn shards_optimizer(self) -> bool {
        self >= Self::OptimizerStates
    }
    /// Whether each rank keeps only its share of the parameters.
    pub fn shards_parameters(self) -> bool {
        self == Self::Parameters
    }
}

/// What is sharded and how it travels; sizes are counted in elements, as DeepSpeed does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ZeroPlan {
    /// What is sharded.
    pub stage: Stage,
    /// How gradients are collected and reduced.
    pub gradients: GradientPlan,
    /// Elements of one all-gather of updated parameters (stages 1 and 2).
    pub allgather_bucket_size: usize,
    /// How parameters come and go (stage 3).
    pub parameters: GatherPlan,
    /// Where optimizer states and accumulated gradients are kept.
    pub optimizer_states: OptimizerOffload,
    /// Where the shards of parameters are kept (stage 3).
    pub parameter_shards: ParameterOffload,
}

/// Where the parameter shards of a rank are kept (`offload_param`). They leave the device only
/// where optimizer states do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ParameterOffload {
    /// On the device.
    Device,
    /// In host memory, beside the device.
    Host,
    /// In the file of the optimizer states.
    Nvme {
        /// Elements of shards that stay in host memory. They belong to the first parameters of the
        /// model, up to the first one that does not fit.
        max_in_cpu: usize,
        /// Whether that memory is the device's own.
        device_is_host: bool,
    },
}

impl ZeroPlan {
    /// Whether each rank keeps only its share of the gradients: at stage 1 where they leave the
    /// device with the optimizer states.
    pub fn shards_gradients(&self) -> bool {
        let offloaded = self.optimizer_states != OptimizerOffload::Device;
        self.stage.shards_gradients() || offloaded && self.stage.shards_optimizer()
    }
}

/// Where the optimizer states and accumulated gradients of a rank are kept (`offload_optimizer`).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum OptimizerOffload {
    /// On the device of the parameters.
    Device,
    /// In host memory, where the CPU updates them.
    Host {
        /// Most elements that are updated at a time.
        sub_group_size: usize,
        /// Share of the trainable elements whose states and gradients are kept there, from 0 to 1.
        /// It is taken from the last parameters; the others stay on the device.
        ratio: f64,
    },
    /// In a file, which the CPU updates piece by piece.
    Nvme(NvmePlan),
}

/// Optimizer states in a file of each rank on NVMe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NvmePlan {
    /// The file.
    pub file: SwapFilePlan,
    /// Most elements that are updated at a time.
    pub sub_group_size: usize,
    /// Read what comes next while a piece is updated.
    pub pipeline_read: bool,
    /// Go on while a piece is written.
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
    /// Elements collected before a bucket is reduced; a larger gradient travels alone.
    pub reduce_bucket_size: usize,
    /// Let backward go on while a bucket is being reduced.
    pub overlap_comm: bool,
    /// Flatten each gradient that joins a bucket, so that no view keeps a larger block alive.
    pub contiguous_gradients: bool,
    /// Reduce each share at its owner only; otherwise all-reduce and keep the share.
    pub reduce_scatter: bool,
    /// A parameter that got no gradient counts as zero; otherwise it is an error.
    pub ignore_unused_parameters: bool,
}

/// How sharded parameters come and go (stage 3); counted in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GatherPlan {
    /// Elements gathered ahead of their use; the last parameter may exceed them. 0 gathers none
    /// ahead.
    pub prefetch_bucket_size: usize,
    /// Parameters up to this size stay gathered.
    pub persistence_threshold: usize,
    /// Limit of all persistent parameters together; `usize::MAX` for none. A parameter that does
    /// not fit is passed over, and later ones are still tried.
    pub model_persistence_threshold: usize,
    /// Most elements gathered at a time.
    pub max_live_parameters: usize,
    /// A parameter used again within this many elements is not released.
    pub max_reuse_distance: usize,
    /// Whether a 16-bit copy of the whole model may be gathered for saving.
    pub gather_16bit_weights_on_model_save: bool,
}

/// A float type as configurations name it.
///
/// ```
/// use deepburn_config::Precision;
///
/// assert_eq!((Precision::Bf16.name(), Precision::Bf16.bytes()), ("bf16", 2));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
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
    /// The name that configurations use.
    pub fn name(self) -> &'static str {
        self.first_name()
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Self::Fp32 { 4 } else { 2 }
    }
}

/// Element types of what is kept and of what travels. The optimizer always works in fp32.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PrecisionPlan {
    /// Type of the parameters that forward and backward use; in 16 bits the optimizer keeps fp32
    /// masters beside them.
    pub compute: Precision,
    /// Type of matrix products and convolutions under autocast, `Bf16` or `Fp16`; `None` runs each
    /// op in the type of its operands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autocast: Option<Precision>,
    /// Type in which gradients travel between ranks.
    pub communication: Precision,
    /// Type in which the gradients of micro-batches add up.
    pub accumulation: Precision,
    /// Factor of the loss.
    pub loss_scale: LossScalePlan,
    /// What becomes of a step whose gradients are not finite.
    pub overflow: OverflowPlan,
}

impl PrecisionPlan {
    /// Everything in fp32; a gradient that is not finite ends the run.
    pub const FP32: Self = Self {
        compute: Precision::Fp32,
        autocast: None,
        communication: Precision::Fp32,
        accumulation: Precision::Fp32,
        loss_scale: LossScalePlan::Static { scale: 1.0 },
        overflow: OverflowPlan::End,
    };

    /// Whether parameters or autocast ops are fp16, so that the loss has a scale.
    pub fn uses_fp16(&self) -> bool {
        self.compute == Precision::Fp16 || self.autocast == Some(Precision::Fp16)
    }
}

/// The factor of the loss that keeps small gradients above the smallest number of their type.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LossScalePlan {
    /// The same throughout; 1 unless parameters or autocast are fp16.
    Static {
        /// The factor.
        scale: f64,
    },
    /// As large as gradients allow.
    Dynamic(DynamicScalePlan),
}

/// How the dynamic loss scale moves.
///
/// Gradients of fp16 below 6e-8 are lost, and those above 65504 are infinite. The scale multiplies the
/// loss, so that gradients lie between the two, and the optimizer divides by it. No fixed scale fits
/// all of training, so this one follows the gradients:
///
/// - A step whose gradients are all finite is applied. After `window` of them in a row the scale
///   doubles.
/// - A step that overflows is skipped. After `hysteresis` of them the scale halves, because a single
///   one may have been an outlier.
/// - An overflow at `min_scale` ends the run: no smaller scale would help.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DynamicScalePlan {
    /// Scale of the first step.
    pub initial_scale: f64,
    /// Good steps before the scale doubles.
    pub window: u64,
    /// Overflows before the scale halves, for the first time and after each doubling.
    pub hysteresis: u64,
    /// Whether every good step refills the hysteresis.
    pub consecutive_hysteresis: bool,
    /// The scale never goes below; an overflow there ends the run.
    pub min_scale: f64,
    /// When the scale doubles.
    #[serde(skip_serializing_if = "ScaleGrowth::is_deepspeed")]
    pub growth: ScaleGrowth,
}

/// Which of a row of good steps doubles the loss scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleGrowth {
    /// The one after `window` of them: DeepSpeed's scaler.
    #[default]
    AfterWindow,
    /// The last of `window`: PyTorch's `torch.amp.GradScaler`. A scale beyond f32 stays.
    AtWindow,
}

impl ScaleGrowth {
    /// Whether it is DeepSpeed's rule, which `job.json` does not name.
    fn is_deepspeed(&self) -> bool {
        *self == Self::AfterWindow
    }
}

/// What becomes of a step whose gradients are not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OverflowPlan {
    /// It is left out on all ranks.
    Skip,
    /// It ends the run with the name of the parameter.
    End,
}

/// How the gradients of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ReductionPlan {
    /// Mean or sum.
    pub op: GradientReduction,
    /// Divide before the sum (by the world size) rather than after it.
    pub prescale: bool,
    /// Part of the division that is made before the sum, against overflow.
    pub predivide_factor: f64,
}

/// Mean or sum over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientReduction {
    /// Mean over the ranks.
    Mean,
    /// Sum over the ranks.
    Sum,
}

choices!(GradientReduction { "mean" => Mean, "sum" => Sum });

/// What is printed and measured while training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ReportPlan {
    /// Optimizer steps between two printed lines; `None` prints none.
    pub steps_per_print: Option<usize>,
    /// Time forward, backward and step apart.
    pub wall_clock_breakdown: bool,
}
