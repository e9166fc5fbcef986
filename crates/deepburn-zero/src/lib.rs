//! ZeRO for Burn: parameters, gradients and optimizer states in pieces.
//!
//! [`Zero<B>`](Zero) decorates a backend below autodiff. [`ModelStates::shard`] turns the parameters
//! of any module into handles on values that live here, whole or cut over the ranks of a [`Group`]
//! as the stage says; tensor ops gather what they need, autodiff's gradients are reduced as they
//! become final, and [`ModelStates::step`] updates what this rank owns. With 16-bit parameters the
//! optimizer keeps f32 masters of what it updates. A [`Ledger`] counts the bytes of all that, and
//! [`estimate`] predicts them.
//!
//! Refused: modules whose parameters are not f32 before sharding, a model without anything to train.
//! A step on gradients that are not finite changes nothing. A [`ModelStates`] stays on the thread that made it.
//!
//! Running statistics (Burn's `RunningState`, in batch norm) are buffers: they start from rank 0's
//! values and are then each rank's own. Clones of a module share them between threads, so every rank
//! builds such a module itself.
#![recursion_limit = "256"]

mod array;
mod backend;
mod backward_watch;
mod error;
pub mod estimate;
mod gather;
mod group;
mod ledger;
mod operations;
mod ops;
mod optimizer;
mod parameter;
mod partition;
mod precision;
mod publish;
mod random;
mod reduce;
mod rows;
mod session;
mod sharding;
mod share;
mod states;
mod tensor;
mod trace;
mod view;

pub use array::DeviceArray;
pub use backend::Zero;
pub use error::ZeroError;
pub use gather::Pass;
pub use group::{Group, ZeroGroup};
pub use ledger::{Category, Lease, Ledger, Usage};
pub use operations::ModuleOperations;
pub use optimizer::{Rates, moments};
pub use parameter::Parameter;
pub use partition::Partition;
pub use random::RandomStream;
pub use rows::RowGradient;
pub use sharding::Training;
pub use states::{
    GradientSum, ModelStates, OwnedArray, Piece, Policy, RandomState, StateArray, StepOutcome,
};
pub use tensor::{FullTensor, ParameterView, ReducedGradient, ZeroTensor};
