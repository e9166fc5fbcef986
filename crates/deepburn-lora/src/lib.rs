//! LoRA adapters in the format of PEFT.
//!
//! A low-rank adapter (Hu et al. 2021) adds two small matrices to a linear layer of a frozen model:
//!
//! ```text
//! y = x W + b + s (dropout(x) A) B        A: [in, r], B: [r, out], s = alpha / r
//! ```
//!
//! - [`LoraConfig`] is the content of `adapter_config.json`, under the names of PEFT.
//! - [`Adapter`] is the result of applying it to the modules of a model: which of them are adapted,
//!   with which rank and scale, and the map of all parameters that are trained and saved.
//! - [`merge`] computes the weight of a layer whose adapter is merged.
//!
//! The crate has no tensors. `deepburn-models` computes adapted layers.
//!
//! The map of an adapted model is the model's, with the factors after the parameters of their
//! module. Parameters that are not trained have the origin `Frozen`. For modules of other
//! libraries, `deepburn::lora::Lora` adds the factors to the weights for each pass instead.

mod adapter;
mod config;
mod error;
pub mod merge;
mod pattern;

pub use adapter::{
    ADAPTER_BIAS, AdaptedModule, Adapter, MAGNITUDE, ModelModule, ModuleKind, TOKEN_ROWS,
};
pub use config::{InitialFactors, LoraConfig, Targets, TrainedBiases, TrainedTokens};
pub use error::LoraError;
pub use pattern::{ModulePattern, PatternMap};
