//! ZeRO for Burn: parameters, gradients and optimizer states in pieces.
//!
//! [`Sharded<B>`](Sharded) decorates a backend below autodiff, and [`Autocast`] brings the operands of
//! each op to one element type above it; models train on [`Training<B>`](Training) and are evaluated on
//! [`Zero<B>`](Zero). [`ModelStates::shard`] turns the parameters
//! of any module into handles on values that live here, whole or cut over the ranks of a [`Group`]
//! as the stage says; tensor ops gather what they need, autodiff's gradients are reduced as they
//! become final, and [`ModelStates::step`] updates what this rank owns. With 16-bit parameters the
//! optimizer keeps f32 masters of what it updates. A [`Ledger`] counts the bytes of all that, and
//! [`estimate`] predicts them.
//!
//! Refused: modules whose parameters are not f32 before sharding, a model without anything to train.
//! A step on gradients that are not finite changes nothing. A [`ModelStates`] stays on the thread that made it.
//!
//! Running statistics (Burn's `RunningState`, in batch norm) and integer and bool parameters are
//! [buffers](Buffer): every rank keeps them whole and in their own type, and starts from rank 0's
//! values. After each backward pass [`ModelStates::agree_buffers`] averages running statistics over
//! the ranks, in rank order: exact for a running mean, and for a running variance the mean of the
//! ranks' variances. A non-finite update (an empty micro-batch) counts as the previous value. Ranks
//! may be given clones of one module. Tensors that are fields of a module without being `Param`s are
//! constants to Burn, and here too: each rank keeps its own, and no checkpoint has them.
#![recursion_limit = "256"]

mod array;
mod autocast;
mod backend;
mod backward_watch;
mod buffers;
pub mod cost;
mod error;
pub mod estimate;
mod gather;
mod group;
mod initial;
mod ledger;
mod operations;
mod ops;
mod optimizer;
mod parameter;
mod parked;
mod persistence;
mod precision;
mod publish;
mod random;
mod recompute;
mod reduce;
mod rows;
mod session;
mod sharding;
mod share;
mod states;
mod tensor;
mod tiers;
mod trace;
mod view;

pub use array::DeviceArray;
pub use autocast::{Autocast, TracksParameters};
pub use backend::Sharded;
pub use buffers::{Buffer, BufferKind};
pub use deepburn_comm::Partition;
pub use deepburn_nvme::{IoStatistics, SwapError, check_folder};
pub use error::ZeroError;
pub use gather::Pass;
pub use group::{Group, ZeroGroup};
pub use ledger::{Category, Lease, Ledger, Tier, Usage};
pub use operations::ModuleOperations;
pub use optimizer::{Rates, moments};
pub use parameter::Parameter;
pub use random::RandomStream;
pub use recompute::activation_checkpoint;
pub use recompute::tape::RecordedTensor;
pub use rows::RowGradient;
pub use session::ContextGuard;
pub use sharding::Training;
pub use sharding::Zero;
pub use states::{
    GradientSum, ModelStates, OwnedArray, OwnedState, Piece, Policy, RandomState, StateArray,
    StepOutcome, StreamPosition,
};
pub use tensor::{FullTensor, Leased, ParameterView, ReducedGradient, ZeroTensor};
pub use tiers::swap_bytes;
