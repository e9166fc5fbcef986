//! Errors of sharded training.

use deepburn_comm::{CommError, MeshError};
use deepburn_nvme::SwapError;

use crate::assignment::AssignmentError;

/// An error of sharded training.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ZeroError {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The NVMe file of the offloaded states cannot be created, read or written.
    #[error("offload to NVMe: {0}")]
    Swap(#[from] SwapError),
    /// A parameter group does not fit the optimizer, or the groups or the optimizer do not fit the
    /// model.
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    /// The pipeline stages or the shard groups do not divide the ranks.
    #[error("the ranks do not form the pipeline stages and shard groups of the plan: {0}")]
    Mesh(#[from] MeshError),
    /// The secondary shard groups of hpZ do not divide the ranks of a shard group.
    #[error(
        "secondary_partition_size: {size} does not divide the {ranks} ranks that shard the parameters; use a \
         divisor, or none"
    )]
    SecondaryPartition {
        /// The number of ranks of a secondary shard group.
        size: usize,
        /// The number of ranks of a shard group.
        ranks: usize,
    },
    /// Ranks that update the same parameter hold different values of it.
    #[error(
        "parameter {path} has other values on ranks {ranks:?} than on rank {first}, so the ranks train different \
         models: change parameters on all ranks or on none, and start again from a checkpoint. If the program changes \
         none, the devices of these ranks compute differently: use equal devices, or stage 1, 2 or 3 without shard groups"
    )]
    Disagreement {
        /// The path of the parameter.
        path: String,
        /// The first rank that holds the parameter.
        first: usize,
        /// The ranks whose values differ from the values of that rank.
        ranks: Vec<usize>,
    },
    /// The pipeline layout lacks a parameter of the module.
    #[error(
        "parameter {path} is on no pipeline stage: the layout was made for another model; make it from this one"
    )]
    UnplacedParameter {
        /// Module path of the parameter.
        path: String,
    },
    /// The model or the plan cannot be trained in a pipeline.
    #[error(
        "pipeline parallelism does not support this model: {reason}; train it without a pipeline"
    )]
    Pipeline {
        /// What is not supported.
        reason: String,
    },
    /// This plan cannot offload parameters.
    #[error(
        "parameter_shards: offloaded parameters need {needed}; offload these too, or keep parameters on the \
         device"
    )]
    ParameterOffload {
        /// The missing offload settings.
        needed: &'static str,
    },
    /// This plan cannot exchange compressed momenta.
    #[error(
        "1-bit Adam, 0/1 Adam and 1-bit LAMB need whole gradients and optimizer states on the device of every rank, and \
         {reason}: use ZeRO stage 0 without offload, or AdamW"
    )]
    MomentumExchange {
        /// The conflicting setting of the plan: sharding or offload.
        reason: String,
    },
    /// A parameter has a type that cannot be trained.
    #[error(
        "parameter {path} is stored as {dtype}: sharded training keeps parameters in f32; cast \
         the module to f32 before sharding it"
    )]
    ParameterType {
        /// Module path of the parameter.
        path: String,
        /// Its element type.
        dtype: &'static str,
    },
    /// The backend cannot hold quantized parameters.
    #[error(
        "quantization: frozen matrices in 8 or 4 bits are supported on flex, the CPU backend, and not on {backend}: remove \
         the plan's quantization, or use flex"
    )]
    QuantizationBackend {
        /// The name of the backend.
        backend: String,
    },
    /// The values of a quantized parameter cannot be replaced or saved.
    #[error(
        "parameter {path} is stored in 8 or 4 bits, and checkpoints cannot contain it: omit the frozen parameters of the \
         base model (Engine::omit_base; training.checkpoint_scope \"trained\"), or add its path to the plan's skipped \
         parameters"
    )]
    QuantizedParameter {
        /// Module path of the parameter.
        path: String,
    },
    /// The initial value of a parameter could not be generated or loaded.
    #[error("parameter {path} could not be initialized: {reason}")]
    Initialization {
        /// Module path of the parameter.
        path: String,
        /// The panic message of its initialization.
        reason: String,
    },
    /// A parameter has different shapes in the modules of the ranks.
    #[error(
        "parameter {path} has shape {found:?} here and {expected:?} on rank 0: build the same module \
         on all ranks"
    )]
    ShapesDiffer {
        /// Module path of the parameter.
        path: String,
        /// Its shape on this rank.
        found: Vec<usize>,
        /// Its shape on rank 0.
        expected: Vec<usize>,
    },
    /// A parameter is trained on some ranks and frozen on others, so that the ranks would exchange
    /// different gradients.
    #[error(
        "parameter {path} is {} here and {} on rank 0: freeze the same parameters on all ranks",
        training(*trainable),
        training(!*trainable)
    )]
    TrainabilityDiffers {
        /// Module path of the parameter.
        path: String,
        /// Whether this rank trains it.
        trainable: bool,
    },
    /// The device does not support the requested type.
    #[error(
        "{backend} does not compute in {dtype} on this device: train in another type (fp16, bf16 or \
         neither) or on another backend"
    )]
    UnsupportedType {
        /// The backend's name.
        backend: String,
        /// The element type.
        dtype: &'static str,
    },
    /// The module has no trainable parameter.
    #[error(
        "the module has no trainable parameter: call `require_grad` on the parameters to train, or freeze fewer \
         parameter groups"
    )]
    NothingTrainable,
    /// `Module::map` reached a parameter that `Module::visit` did not reach.
    #[error(
        "parameter {path} appears only while the module is mapped: `visit` and `map` of a module go through the same \
         parameters; derive Module, or let both of them reach it"
    )]
    UnvisitedParameter {
        /// The module path of the parameter.
        path: String,
    },
    /// A gradient is infinite or NaN.
    #[error(
        "the gradient of parameter {path} is not finite, so the step was not taken: lower the \
         learning rate, clip gradients, communicate and accumulate them in fp32, or look for a \
         division by zero: in the loss, or by an optimizer's eps of 0"
    )]
    GradientNotFinite {
        /// Module path of the first such parameter, in the model's order.
        path: String,
    },
    /// A parameter has no gradient although `ignore_unused_parameters` is false.
    #[error(
        "{} received no gradient and `ignore_unused_parameters` is false: freeze them or set it to \
         true, which counts them as zero",
        .paths.join(", ")
    )]
    UnusedParameters {
        /// Module paths.
        paths: Vec<String>,
    },
    /// The loss does not depend on the model.
    #[error(
        "no parameter got a gradient: compute the loss from the module that the engine hands out, \
         without detaching it"
    )]
    NoGradients,
    /// A loaded segment has a different number of values than the parameter expects.
    #[error(
        "parameter {path}: {found} values of {array} were given for {expected}: load states of a \
         model of the same shape"
    )]
    SegmentLength {
        /// Module path.
        path: String,
        /// The array.
        array: &'static str,
        /// The number of values that were given.
        found: usize,
        /// The number of values that the parameter expects.
        expected: usize,
    },
    /// The accumulated gradient in a checkpoint has a type that this configuration does not use.
    #[error(
        "parameter {path}: its gradient was accumulated in {dtype}, and this configuration adds up \
         in another type: use the types that it started with until the step is complete"
    )]
    GradientType {
        /// Module path.
        path: String,
        /// The type of the stored gradient.
        dtype: &'static str,
    },
    /// Two layers share a running statistic.
    #[error(
        "running statistic {other} is the same as {path}: two layers of the module are clones of \
         one; build each layer separately, or keep one layer and call it twice"
    )]
    SharedStatistic {
        /// Module path of the first occurrence.
        path: String,
        /// Module path of the second one.
        other: String,
    },
    /// The ranks' modules have different parameters.
    #[error("rank {rank} has {other} where rank 0 has {first}: build the same module on all ranks")]
    ParametersDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first parameter in which they differ, on rank 0.
        first: String,
        /// The parameter on the other rank.
        other: String,
    },
    /// The ranks' modules have different buffers.
    #[error("rank {rank} has {other} where rank 0 has {first}: build the same module on all ranks")]
    BuffersDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first buffer in which they differ, on rank 0.
        first: String,
        /// The buffer on the other rank.
        other: String,
    },
    /// A tensor field of the module has different values on different ranks.
    #[error(
        "the plain tensor {tensor} differs between rank 0 and rank {rank}: a tensor field that is not a \
         `Param` is created by each rank and never exchanged or saved; make it a \
         `Param` with `set_require_grad(false)`, or create it from the same values on all ranks"
    )]
    PlainTensorsDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The field and its shape.
        tensor: String,
    },
    /// The shape of a running statistic was changed.
    #[error(
        "running statistic {path} was updated with a tensor of shape {found:?} instead of \
         {expected:?}: keep its shape"
    )]
    BufferShape {
        /// Module path.
        path: String,
        /// Shape of the update.
        found: Vec<usize>,
        /// The original shape.
        expected: Vec<usize>,
    },
    /// No buffer has this path.
    #[error("the model has no buffer {path}: buffers are named by their module path")]
    UnknownBuffer {
        /// The path as given.
        path: String,
    },
    /// No parameter has this path.
    #[error("the model has no parameter {path}: parameters are named by their module path")]
    UnknownParameter {
        /// The path as given.
        path: String,
    },
}

/// Returns "trained" or "frozen".
fn training(trainable: bool) -> &'static str {
    if trainable { "trained" } else { "frozen" }
}
