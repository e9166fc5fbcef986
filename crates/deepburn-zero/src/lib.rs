//! ZeRO for Burn: sharded parameters, gradients and optimizer states.
//!
//! [`Sharded<B>`](Sharded) decorates a backend below autodiff, and [`Autocast`]
//! converts the operands of each op to one element type above it. Models train
//! on [`Training<B>`](Training) and are evaluated on [`Zero<B>`](Zero).
//!
//! [`ModelStates::shard`] replaces the parameters of any module with handles.
//! Their values are kept here, replicated or sharded over the ranks of a
//! [`Group`] according to the ZeRO stage. Tensor ops gather what they read,
//! gradients are reduced as soon as autodiff has completed them, and
//! [`ModelStates::step`] updates the elements that this rank owns. With 16-bit
//! parameters the optimizer keeps f32 masters of these elements. A [`Ledger`]
//! counts the memory of all of this, and [`estimate`] predicts it.
//!
//! ```text
//!  shard                   once: broadcast, cut, replace parameters by handles
//!  start_training_pass     new autodiff leaves, start of the gather schedule
//!    forward               ops gather parameters; blocks free their activations
//!  start_backward
//!    backward              ops gather again; final gradients are reduced and freed
//!  finish_pass             gathered parameters are released
//!  step                    norm, clip, update of the owned elements, publication
//! ```
//!
//! What a rank holds between two passes, without offload:
//!
//! | Stage | Parameters | Gradients | Optimizer states |
//! |---|---|---|---|
//! | 0 | whole | whole | whole |
//! | 1 | whole | whole | shard |
//! | 2 | whole | shard | shard |
//! | 3 | shard | shard | shard |
//!
//! A module whose parameters are not f32 before sharding, or that has nothing
//! to train, is an error. A step on gradients that are not finite changes
//! nothing. [`ModelStates`] stays on the thread that created it.
//!
//! Running statistics (Burn's `RunningState`, in batch norm) and integer and
//! bool parameters are [buffers](Buffer). Every rank keeps complete buffers in
//! their own type and starts with rank 0's values. After each backward pass
//! [`ModelStates::agree_buffers`] averages running statistics over the ranks in
//! rank order. This is exact for a running mean; for a running variance it is
//! the mean of the ranks' variances. A non-finite update (from an empty
//! micro-batch) counts as the previous value. Ranks may pass clones of one
//! module. Tensors that are fields of a module without being a `Param` are
//! constants to Burn, and also here: each rank keeps its own, and checkpoints
//! do not contain them.
#![recursion_limit = "256"]

mod array;
pub mod assignment;
mod autocast;
mod backend;
mod backward_watch;
mod buffers;
pub mod cost;
mod error;
pub mod estimate;
mod fetch;
mod flat;
mod gather;
mod group;
mod initial;
mod leased;
mod ledger;
mod operations;
mod ops;
mod optimizer;
mod parameter;
mod parameter_size;
mod parked;
mod parking;
mod pass;
mod persistence;
mod precision;
mod publish;
mod random;
mod recompute;
mod reduce;
mod rows;
mod same_module;
mod session;
mod shard;
mod shard_spec;
mod sharding;
mod states;
mod tensor;
mod tiers;
mod trace;
mod training;
mod view;

pub use array::DeviceArray;
pub use autocast::{Autocast, TracksParameters};
pub use backend::Sharded;
pub use buffers::{Buffer, BufferKind};
pub use deepburn_comm::Partition;
pub use deepburn_nvme::{IoStatistics, SwapError, check_folder};
pub use error::ZeroError;
pub use group::{Group, ZeroGroup};
pub use leased::{FullTensor, Leased};
pub use ledger::{Category, Lease, Ledger, Tier, Usage};
pub use operations::ModuleOperations;
pub use optimizer::{Rates, moments};
pub use parameter::{Parameter, ParameterView};
pub use pass::Pass;
pub use random::RandomStream;
pub use recompute::activation_checkpoint;
pub use recompute::tape::RecordedTensor;
pub use rows::RowGradient;
pub use session::ContextGuard;
pub use states::{
    GradientSum, ModelStates, OwnedArray, OwnedState, Policy, RandomState, StateArray,
    StateSegment, StepOutcome, StreamPosition,
};
pub use tensor::{ReducedGradient, ZeroTensor};
pub use tiers::swap_bytes;
pub use training::{Training, Zero};
