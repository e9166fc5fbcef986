//! ZeRO for Burn: parameters, gradients and optimizer states in pieces.
#![recursion_limit = "256"]

mod array;
mod backend;
mod error;
pub mod estimate;
mod gather;
mod group;
mod host_data;
mod ledger;
mod ops;
mod optimizer;
mod parameter;
mod partition;
mod random;
mod reduce;
mod rows;
mod session;
mod sharding;
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
pub use parameter::Parameter;
pub use partition::Partition;
pub use random::RandomStream;
pub use rows::RowGradient;
pub use sharding::Training;
pub use states::{ModelStates, Policy, StepReport};
pub use tensor::{FullTensor, ParameterView, ReducedGradient, ZeroTensor};
