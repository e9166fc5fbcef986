//! What can go wrong while training in pieces.

use deepburn_comm::CommError;

/// A failure of sharded training.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ZeroError {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
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
    #[error("the module has no trainable parameter: call `require_grad` on what is to be trained")]
    NothingTrainable,
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
    /// A path that names no parameter.
    #[error("the model has no parameter {path}: parameters are named by their module path")]
    UnknownParameter {
        /// The path as given.
        path: String,
    },
}
