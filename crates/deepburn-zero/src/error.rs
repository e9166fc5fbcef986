//! What can go wrong while training in pieces.

use deepburn_comm::CommError;
use deepburn_config::ParamGroupError;
use deepburn_nvme::SwapError;

/// A failure of sharded training.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ZeroError {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Offloaded states cannot be kept, read or written.
    #[error("offload to NVMe: {0}")]
    Swap(#[from] SwapError),
    /// Parameter groups do not fit the module or the optimizer.
    #[error(transparent)]
    ParamGroups(#[from] ParamGroupError),
    /// Parameters cannot be offloaded by this plan.
    #[error(
        "parameter_shards: offloaded parameters need {needed}; offload these too, or keep parameters on the \
         device"
    )]
    ParameterOffload {
        /// What is missing.
        needed: &'static str,
    },
    /// Ranks cannot agree on momenta with this plan.
    #[error(
        "1-bit Adam, 0/1 Adam and 1-bit LAMB need whole gradients and optimizer states on the device of every rank, and \
         {reason}: use ZeRO stage 0 without offload, or AdamW"
    )]
    MomentumExchange {
        /// What the plan does to them.
        reason: String,
    },
    /// A parameter is of a type that cannot be trained.
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
    /// The first value of a parameter could not be drawn or read.
    #[error("parameter {path} could not be initialised: {reason}")]
    Initialisation {
        /// Module path of the parameter.
        path: String,
        /// What its initialisation said when it panicked.
        reason: String,
    },
    /// The ranks' modules have a parameter of different shapes.
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
    /// The device does not compute in the type that was asked for.
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
    /// Nothing to train.
    #[error(
        "the module has no trainable parameter: call `require_grad` on what is to be trained, or freeze fewer \
         parameter groups"
    )]
    NothingTrainable,
    /// A parameter was met while the module was sharded, and not when it was visited before.
    #[error(
        "parameter {path} appears only while the module is mapped: `visit` and `map` of a module go through the same \
         parameters; derive Module, or let both of them reach it"
    )]
    UnvisitedParameter {
        /// Its module path.
        path: String,
    },
    /// A gradient is infinite or NaN.
    #[error(
        "the gradient of parameter {path} is not finite, so the step was not taken: lower the \
         learning rate, clip gradients, communicate and accumulate them in fp32, or look for a \
         division by zero in the loss"
    )]
    GradientNotFinite {
        /// Module path of the first such parameter, in the model's order.
        path: String,
    },
    /// A parameter took no part in the loss although the configuration rules that out.
    #[error(
        "{} got no gradient and `ignore_unused_parameters` is false: freeze them or set it to \
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
    /// Values of another number than a parameter has.
    #[error(
        "parameter {path}: {found} values of {array} were given for {expected}: load states of a \
         model of the same shape"
    )]
    PieceLength {
        /// Module path.
        path: String,
        /// Which of its arrays.
        array: &'static str,
        /// Values that were given.
        found: usize,
        /// Values that are needed.
        expected: usize,
    },
    /// An accumulated gradient in a type that this configuration does not accumulate in.
    #[error(
        "parameter {path}: its gradient was accumulated in {dtype}, and this configuration adds up \
         in another type: use the types it was begun with until the step is complete"
    )]
    GradientType {
        /// Module path.
        path: String,
        /// The type of what was accumulated.
        dtype: &'static str,
    },
    /// Two layers have one running statistic.
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
    /// The ranks' modules have different buffers.
    #[error("rank {rank} has {other} where rank 0 has {first}: build the same module on all ranks")]
    BuffersDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first buffer in which they differ, on rank 0.
        first: String,
        /// That on the other rank.
        other: String,
    },
    /// A running statistic was replaced by one of another shape.
    #[error(
        "running statistic {path} was updated with a tensor of shape {found:?} instead of \
         {expected:?}: keep its shape"
    )]
    BufferShape {
        /// Module path.
        path: String,
        /// Shape of the update.
        found: Vec<usize>,
        /// Shape it had.
        expected: Vec<usize>,
    },
    /// A path that names no buffer.
    #[error("the model has no buffer {path}: buffers are named by their module path")]
    UnknownBuffer {
        /// The path as given.
        path: String,
    },
    /// A path that names no parameter.
    #[error("the model has no parameter {path}: parameters are named by their module path")]
    UnknownParameter {
        /// The path as given.
        path: String,
    },
}
