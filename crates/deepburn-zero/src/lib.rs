//! ZeRO for Burn: sharded parameters, gradients and optimizer states.
//!
//! [`Sharded<B>`](Sharded) decorates a backend below autodiff, [`Staged<B>`](Staged) runs its ops
//! on the stages of a pipeline, and [`Autocast`] converts the operands of each op to one element
//! type above autodiff. Models train on [`Training<B>`](Training) and are evaluated on
//! [`Zero<B>`](Zero).
//!
//! [`ModelStates::shard`] replaces the parameters of any module with handles. [`ModelStates`] keeps
//! their values, replicated or sharded over the ranks of a [`Group`] according to the ZeRO stage.
//! Tensor ops gather the parameters that they read. Gradients are reduced as soon as autodiff has
//! computed them, and [`ModelStates::step`] updates the elements that this rank owns. With 16-bit
//! parameters the optimizer keeps f32 master weights of these elements. A [`Ledger`] counts the
//! memory of the model states, temporary buffers and activations. On a backend without data, it
//! predicts what a real run needs.
//!
//! ```text
//!  shard                   once: broadcast and shard parameters, replace them with handles
//!  start_training_pass     create new autodiff leaves, start the gather schedule
//!    forward               ops gather parameters; finished blocks free activations
//!  start_backward
//!    backward              ops gather again; final gradients are reduced and freed
//!  finish_pass             release gathered parameters
//!  step                    norm, clipping, update of owned elements, all-gather (stages 1 and 2)
//! ```
//!
//! The modules, each with its main types. A module uses only modules below it:
//!
//! | Module | Contents |
//! |---|---|
//! | `states` | [`ModelStates`]: creation, passes, the step, states for checkpoints |
//! | `sharding` | replaces the parameters of a module; initial values, [buffers](Buffer), plain tensors, tiers |
//! | [`inference`] | modules whose matrices are in the formats of GGUF files |
//! | `decorator` | [`Sharded`], [`ZeroTensor`] and all ops; [`Staged`], [`PlacedTensor`]; [`Autocast`] |
//! | `pipeline` | [`PipelineLayout`], and the place of a rank in a pipeline, [`Stages`] |
//! | `optimizer` | optimizer states and updates of the owned elements |
//! | `gradient` | buckets, reduction and accumulation of gradients |
//! | `deferred` | ops that run after their backward pass, [`DeferredTensor`] |
//! | `recompute` | activation checkpointing: blocks and tapes |
//! | `parameter` | [`Parameter`], shards, gathering and prefetching |
//! | `offload` | arrays in host memory or on NVMe |
//! | `session` | the context of a model on its thread; random streams, counted tensors |
//! | `group` | [`Group`] and the arrays that it exchanges, [`DeviceArray`] and [`RowGradient`] |
//! | `ledger` | [`Ledger`]: memory and operations of a rank |
//! | `module` | Burn's modules, and the path of a position in one |
//! | `holders` | sets of pipeline stages, [`Holders`] |
//! | [`assignment`] | the optimizer and settings of each parameter |
//!
//! The model states that a rank holds between two passes, without offload:
//!
//! | Stage | Parameters | Gradients | Optimizer states |
//! |---|---|---|---|
//! | 0 | full | full | full |
//! | 1 | full | full | shard |
//! | 2 | full | shard | shard |
//! | 3 | shard | shard | shard |
//!
//! [`ModelStates::shard`] returns an error if a parameter is not f32, or if the module has no
//! trainable parameter. A step whose gradients contain an infinity or NaN leaves parameters and
//! optimizer states unchanged. [`ModelStates`] is not `Send`: it stays on the thread that created
//! it.
//!
//! Running statistics (Burn's `RunningState`, in batch norm) and integer and bool parameters are
//! [buffers](Buffer). Every rank keeps complete buffers in their original element type and starts
//! with rank 0's values. After each backward pass [`ModelStates::agree_buffers`] averages running
//! statistics over the ranks, in rank order. The average is exact for a running mean. For a running
//! variance it is the mean of the ranks' variances. A rank whose update is not finite (from an
//! empty micro-batch) contributes the previous value. Rank threads may shard clones of the same
//! module. Burn treats a tensor field that is not a `Param` as a constant, and so does this crate:
//! each rank keeps its own tensor, and checkpoints do not contain it.
#![recursion_limit = "256"]

pub mod assignment;
mod decorator;
mod deferred;
mod error;
mod gradient;
mod group;
mod holders;
pub mod inference;
mod ledger;
mod module;
mod offload;
mod optimizer;
mod parameter;
mod pipeline;
mod recompute;
mod session;
mod sharding;
mod states;

pub use decorator::{
    Autocast, Bools, Floats, Ints, PlacedTensor, ReducedGradient, Sharded, Staged, StagedTensor,
    TensorKind, TracksParameters, Training, Zero, ZeroTensor,
};
pub use deepburn_comm::Partition;
pub use deepburn_nvme::{
    IoStatistics, SwapError, check_folder, measured_bandwidth as disk_bandwidth,
};
pub use deferred::DeferredTensor;
pub use error::ZeroError;
pub use group::{DeviceArray, Group, RowGradient, ZeroGroup};
pub use holders::{Holders, MAX_STAGES};
pub use ledger::{Category, Lease, Ledger, ModuleOperations, ParameterRead, Tier, Usage};
pub use optimizer::{Rates, moments};
pub use parameter::{Parameter, ParameterView, RowOrder};
pub use pipeline::{PipelineLayout, Stages, WeightGradients};
pub use recompute::activation_checkpoint;
pub use recompute::blocks::pipeline_units;
pub use recompute::tape::RecordedTensor;
pub use session::{ContextGuard, FullTensor, Leased, Pass, RandomStream};
pub use sharding::{Buffer, BufferKind, ParameterSize, PlainTensor, swap_bytes};
pub use states::{
    GradientSum, ModelStates, OwnedArray, OwnedState, Policy, RandomState, StateArray,
    StateSegment, StepOutcome, StreamPosition,
};
