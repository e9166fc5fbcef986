//! The model states of one rank: parameters, gradients and optimizer states.
//!
//! Main type: `ModelStates`. It owns everything that ZeRO shards and binds it
//! to the thread, because Burn's backend functions are static and cannot
//! receive it.
//!
//! ```text
//! stage                      0        1        2        3
//! parameter                  whole    whole    whole    shard
//! accumulated gradient       whole    whole    shard    shard
//! optimizer states, masters  whole    shard    shard    shard
//! ```
//!
//! With offloaded optimizer states, gradients are shards at stage 1 too. A
//! shard is the flat, zero-padded slice that `Partition` assigns to a rank, for
//! each parameter separately and with the same boundaries at every stage. A
//! training step takes these calls, on all ranks in the same order:
//!
//! ```text
//! start_training_pass ─► forward ─► start_backward ─► backward ─► finish_pass     per micro-batch
//! step                                                                            per optimizer step
//! ```
//!
//! Gathers and reductions run in between, started by the tensor ops themselves.
//! Gathered parameters are freed during the pass, gradients in the step, shards
//! and optimizer states when `ModelStates` is dropped. The submodules contain
//! the step, the exchanges of optimizers that need more than a gradient, and
//! the access of checkpoints.

mod buffers;
mod compression;
mod creation;
mod directions;
mod errors;
mod local;
mod pieces;
mod rank_arrays;
mod step;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use burn::module::{Module, ParamId};
use burn_backend::{Backend, FloatDType, TensorData};
use deepburn_comm::CollectiveTag;
use deepburn_config::{
    ActivationPlan, OptimizerPlan, ParamGroups, PrecisionPlan, ReductionPlan, Stage, ZeroPlan,
};
use deepburn_nvme::IoStatistics;
use deepburn_ops::{OptimizerOps, read_float};

use crate::array::DeviceArray;
use crate::buffers::BufferTable;
use crate::error::ZeroError;
use crate::flat::in_shape;
use crate::gather::Gatherer;
use crate::group::Group;
use crate::ledger::Ledger;
use crate::operations::{Counter, ModuleOperations};
use crate::optimizer::Optimizer;
use crate::parameter::Parameter;
use crate::parked::{ActivationStore, Store};
use crate::parking::Parking;
use crate::pass::Pass;
use crate::recompute::BlockRecorder;
use crate::reduce::{GradientReducer, Types};
use crate::session::{self, Binding, ContextGuard};
use crate::shard_spec::ShardSpec;
use crate::sharding::Marker;
use crate::training::Training;
use compression::ErrorFeedback;

pub(crate) use compression::error_bytes;
pub use pieces::{GradientSum, OwnedArray, RandomState, StateArray, StateSegment, StreamPosition};
pub use rank_arrays::OwnedState;
pub use step::StepOutcome;

/// The settings of sharded training.
///
/// It is the part of a resolved plan that concerns model states. All ranks of a
/// group must have the same policy; a difference shows as collectives that do
/// not match, which is an error.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Which states are sharded or offloaded, and how they are exchanged.
    pub zero: ZeroPlan,
    /// How the gradients of all ranks are combined.
    pub reduction: ReductionPlan,
    /// The element types.
    pub precision: PrecisionPlan,
    /// The optimizer.
    pub optimizer: OptimizerPlan,
    /// Parameters with different optimizer settings.
    pub param_groups: ParamGroups,
    /// Which activations are recomputed in backward, and where the others are
    /// kept.
    pub activations: ActivationPlan,
}

/// The states of a sharded model on one rank. They belong to the thread that
/// created them.
pub struct ModelStates<B: Backend> {
    /// The ranks among which states are sharded.
    group: Group<B>,
    /// The stage and the rank, which determine the slices that this rank keeps.
    share: ShardSpec,
    /// The parameters in module order. A parameter's index in this list is its
    /// index everywhere.
    parameters: Arc<[Arc<Parameter<B>>]>,
    /// Running statistics, integer and bool parameters, which stay in the
    /// module.
    buffers: BufferTable<B>,
    /// Additional paths of tied parameters, by parameter index.
    aliases: Vec<Vec<String>>,
    /// The index of each of Burn's parameter ids. Tied parameters have one.
    indices: HashMap<ParamId, usize>,
    /// Gathers sharded parameters for ops; idle below stage 3.
    gatherer: Arc<Gatherer<B>>,
    /// Parameters of which every rank keeps a complete copy at stage 3.
    persistent: Vec<usize>,
    /// Reduces and accumulates gradients. The backward pass reaches it through
    /// `binding`, so it is shared.
    reducer: Rc<RefCell<GradientReducer<B>>>,
    /// Records blocks for activation checkpointing.
    recorder: Rc<BlockRecorder<B>>,
    /// The optimizer states of the slices that this rank updates.
    optimizer: Optimizer<B>,
    /// Compression errors by parameter index; set after the first exchange.
    errors: Vec<Option<ErrorFeedback>>,
    /// The host memory or NVMe file of offloaded states; `None` without
    /// offload.
    parking: Option<Parking>,
    /// The element type in which ops compute.
    compute: FloatDType,
    /// The element types in which gradients travel and accumulate.
    types: Types,
    /// The largest number of elements in an all-gather of updated parameters.
    allgather_bucket_size: usize,
    /// Whether a step accepts trainable parameters without a gradient.
    ignore_unused: bool,
    /// The memory of this model on this rank.
    ledger: Ledger,
    /// The registration on this thread, which ends when the states are dropped.
    binding: Binding,
}

impl<B: OptimizerOps> ModelStates<B> {
    /// Makes this the current model of the thread until the guard is dropped.
    /// Calls can be nested.
    ///
    /// Ops then count in its ledger and draw from its random stream, and only
    /// its own parameters get gradients. In a `pass` of the model, ops also use
    /// the plan's autocast, and the activations of a training pass are
    /// recomputed according to the plan.
    pub fn enter(&self, pass: Option<Pass>) -> ContextGuard {
        self.binding.enter(pass)
    }

    /// Restarts this rank's random stream from a seed that all ranks share. The
    /// oldest model of a thread also restarts the thread's stream for random
    /// ops outside of calls.
    pub fn seed(&self, seed: u64) {
        self.binding.reseed(seed);
    }

    /// Prepares `module` for a forward and backward pass: gives each trainable
    /// parameter a new autodiff leaf and starts the gather schedule of a
    /// training pass.
    ///
    /// # Errors
    ///
    /// Returns an error if a pending gather of an earlier pass fails.
    pub fn start_training_pass<M: Module<Training<B>>>(&self, module: M) -> Result<M, ZeroError> {
        self.binding.with_counter(Counter::start_forward);
        self.recorder.start_forward();
        self.gatherer.start_pass(Pass::Train)?;
        self.binding.open_pass();
        Ok(module.map(&mut Marker::new(&self.indices, |index| self.binding.mark(index))))
    }

    /// Returns true if the backward pass of a training pass has not started
    /// yet.
    pub fn has_open_pass(&self) -> bool {
        self.binding.has_open_pass()
    }

    /// Ends the training pass, whose backward pass runs now or not at all.
    /// Returns false if there was none.
    pub fn close_training_pass(&self) -> bool {
        self.binding.close_pass()
    }

    /// Returns true if another model on this thread has read this one in a
    /// training pass whose backward pass has not run. An optimizer step now
    /// would change the values that this backward pass reads.
    pub fn is_read_by_open_pass(&self) -> bool {
        session::open_pass_reads(&self.ledger)
    }

    /// Prepares for a forward pass without backward pass.
    ///
    /// # Errors
    ///
    /// Returns an error if a pending gather of an earlier pass fails.
    pub fn start_evaluation_pass(&self) -> Result<(), ZeroError> {
        Ok(self.gatherer.start_pass(Pass::Evaluate)?)
    }

    /// Prepares for a pass that reads parameters in order to save them.
    ///
    /// # Errors
    ///
    /// Returns an error if a pending gather of an earlier pass fails.
    pub fn start_saving_pass(&self) -> Result<(), ZeroError> {
        Ok(self.gatherer.start_pass(Pass::Save)?)
    }

    /// Marks the end of forward and the start of backward.
    ///
    /// From now on gathers follow the recorded order of backward, recomputation
    /// is allowed, and operations count as backward. Exchanges nothing.
    pub fn start_backward(&self) {
        self.binding.with_counter(Counter::start_backward);
        self.gatherer.start_backward();
        self.recorder.start_backward();
        session::refresh_recording();
    }

    /// Detects the start of the next backward pass by its first completed
    /// gradient. For callers that cannot call
    /// [`start_backward`](Self::start_backward).
    pub fn watch_for_backward(&self) {
        // The closure outlives this call, so it shares these instead of
        // borrowing the states.
        let (gatherer, recorder) = (self.gatherer.clone(), self.recorder.clone());
        self.reducer.borrow_mut().watch_for_backward(Box::new(move || {
            session::with_counter(Counter::start_backward);
            gatherer.start_backward();
            recorder.start_backward();
            session::refresh_recording();
        }));
    }

    /// Returns the number of completed backward passes that reported gradients
    /// of this model.
    pub fn backward_passes(&self) -> u64 {
        self.reducer.borrow().backward_passes()
    }

    /// Returns the number of gradients of this model that were reported since
    /// the last call of [`watch_for_backward`](Self::watch_for_backward).
    pub fn gradients_reported(&self) -> usize {
        self.reducer.borrow().gradients_reported()
    }

    /// Returns the time at which the last watched backward pass started; `None`
    /// if it was not detected.
    pub fn backward_began(&self) -> Option<Instant> {
        self.reducer.borrow().backward_began()
    }

    /// Returns the index of the parameter with this id; `None` if it belongs to
    /// another module.
    pub fn parameter_index(&self, id: ParamId) -> Option<usize> {
        self.indices.get(&id).copied()
    }

    /// Starts to count the floating-point operations of forward and backward.
    ///
    /// Products of matrices count, element-wise ops do not
    /// ([`ModuleOperations`]).
    pub fn start_counting(&self) {
        self.binding.start_counting();
    }

    /// Ends the count and returns the operations of this rank by module.
    pub fn stop_counting(&self) -> Vec<ModuleOperations> {
        self.binding.stop_counting()
    }

    /// Ends a pass and releases all gathered parameters except persistent ones.
    ///
    /// Fetches on their way are awaited first, in the order in which they were
    /// started, so that all ranks agree on what was exchanged. Idle I/O buffers
    /// return to the system.
    ///
    /// # Errors
    ///
    /// Returns an error if a fetch fails.
    pub fn finish_pass(&self) -> Result<(), ZeroError> {
        self.gatherer.release_all()?;
        self.stores().for_each(Store::release_idle);
        Ok(())
    }

    /// Sets whether gradients are reduced as they become final; see the
    /// engine's `no_sync`.
    ///
    /// While it is off, gradients are added up on this rank alone and keep
    /// their full size at every stage.
    pub fn set_synchronise(&self, on: bool) {
        self.reducer.borrow_mut().set_synchronise(on);
    }

    /// Returns true if the optimizer exchanges momenta instead of gradients, at
    /// least in late steps.
    pub fn exchanges_momentum(&self) -> bool {
        self.optimizer.exchanges_momentum()
    }

    /// Returns the names and values of a parameter's scalars. Only 1-bit LAMB
    /// has any.
    pub fn scalars(&self, index: usize) -> Vec<(&'static str, f64)> {
        self.optimizer.scalars(index)
    }

    /// Replaces all scalars with the values that `read` returns for a module
    /// path and a name, or with initial values if it returns `None`. Call it
    /// after [`load_moments`](Self::load_moments).
    pub fn load_scalars(&mut self, read: impl Fn(&str, &str) -> Option<f64>) {
        for parameter in self.parameters.iter() {
            self.optimizer.set_scalars(parameter.index(), |name| read(parameter.path(), name));
        }
    }

    /// Returns true if the ranks of the optimizer take local steps, at least in
    /// late steps (0/1 Adam).
    pub fn takes_local_steps(&self) -> bool {
        self.optimizer.takes_local_steps()
    }

    /// Returns the name of the quantity that optimizer step `step` (from 1)
    /// compresses; `None` without compression. Compression errors of one
    /// quantity are useless for another.
    pub fn compressed_quantity(&self, step: u64) -> Option<&'static str> {
        self.optimizer.compressed_quantity(step)
    }

    /// Returns true if the current step averages gradients over ranks.
    /// Otherwise each rank keeps its own gradients, and a 1-bit optimizer
    /// averages momenta in the step.
    pub fn takes_mean_gradients(&self) -> bool {
        self.reducer.borrow().takes_mean()
    }

    /// Sets the number of micro-batches per step, starting with the next step.
    /// It is 1 initially.
    pub fn set_micro_batches(&self, count: usize) {
        self.reducer.borrow_mut().set_micro_batches(count);
    }

    /// Drops all accumulated gradients.
    pub fn zero_grad(&self) {
        self.reducer.borrow_mut().clear();
    }

    /// Returns the parameters in module order.
    pub fn parameters(&self) -> &[Arc<Parameter<B>>] {
        &self.parameters
    }

    /// Checks that the group has not ended, without an exchange.
    ///
    /// # Errors
    ///
    /// Returns the failure that ended the group.
    pub fn check(&self) -> Result<(), ZeroError> {
        Ok(self.group.check()?)
    }

    /// Returns the I/O counts of offloaded states and activations; `None`
    /// without files.
    pub fn io_statistics(&self) -> Option<IoStatistics> {
        self.stores().filter_map(Store::io_statistics).reduce(|sum, of_one| sum + of_one)
    }

    /// Returns the stores of offloaded states and activations.
    fn stores(&self) -> impl Iterator<Item = &Store> {
        let states = self.parking.as_ref().map(|parking| parking.store());
        let activations = self.recorder.store().map(ActivationStore::store);
        states.into_iter().chain(activations)
    }

    /// Returns the process group.
    pub fn group(&self) -> &Group<B> {
        &self.group
    }

    /// Returns the ZeRO stage.
    pub fn stage(&self) -> Stage {
        self.share.stage
    }

    /// Returns the memory ledger of this rank.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the complete values of parameter `index` in the type in which
    /// ops compute. All ranks call this together.
    ///
    /// While ranks of 0/1 Adam take local steps
    /// ([`local_rates`](Self::local_rates)), the values are this rank's own.
    ///
    /// The result has the parameter's shape and takes the memory of the whole
    /// parameter, on the host and briefly on the device.
    ///
    /// # Errors
    ///
    /// Returns an error if the all-gather or the disk fails.
    pub fn parameter_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let parameter = &self.parameters[index];
        // A persistent parameter is complete on every rank, so it is read
        // without a collective.
        let whole = match parameter.shard() {
            Some(_) if !parameter.is_persistent() => self.gatherer.gather_once(index)?,
            _ => parameter.read(),
        };
        Ok(read_float::<B>(whole))
    }

    /// Returns the complete values of parameter `index` in f32: its masters if
    /// ops compute in 16 bits. All ranks call this together.
    ///
    /// A frozen parameter has no masters, so its 16-bit values are returned.
    /// While ranks of 0/1 Adam take local steps, the values are this rank's
    /// own.
    ///
    /// # Errors
    ///
    /// Returns an error if the all-gather or the disk fails.
    pub fn master_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let Some(master) = self.optimizer.master(index)? else {
            return self.parameter_data(index);
        };
        let parameter = &self.parameters[index];
        let flat = if self.share.stage.shards_optimizer() {
            let shard = vec![DeviceArray::Dense(master.clone())];
            let tag = CollectiveTag::new("masters", index as u64).naming([parameter.shared_path()]);
            let group = self.group.arrays();
            group
                .all_gather(tag, shard, vec![parameter.numel()])?
                .wait()?
                .swap_remove(0)
                .into_flat()
        } else {
            master.clone()
        };
        Ok(read_float::<B>(in_shape::<B>(flat, parameter.shape())))
    }

    /// Returns the complete accumulated gradient of the parameter at `path`;
    /// `None` if it has none. All ranks call this together, between backward
    /// and step.
    ///
    /// It is the mean or sum that the plan asks for, still multiplied by the
    /// loss scale and not clipped. Its type is the plan's accumulation type.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no parameter at `path`, or if the
    /// all-gather or the disk fails.
    pub fn gradient_data(&self, path: &str) -> Result<Option<TensorData>, ZeroError> {
        let parameter = self.parameters.iter().find(|parameter| parameter.path() == path);
        let Some(parameter) = parameter else {
            return Err(ZeroError::UnknownParameter { path: path.to_owned() });
        };
        let reducer = self.reducer.borrow();
        let Some(sum) = reducer.accumulated(parameter.index()) else { return Ok(None) };
        let sum = sum.tensor(parameter.device())?;
        let flat = if self.share.cuts_gradients {
            let tag = CollectiveTag::new("gradient data", parameter.index() as u64)
                .naming([parameter.shared_path()]);
            let chunks = vec![DeviceArray::Dense(sum)];
            let group = self.group.arrays();
            let mut whole = group.all_gather(tag, chunks, vec![parameter.numel()])?.wait()?;
            whole.swap_remove(0).into_flat()
        } else {
            sum
        };
        // The type does not depend on the number of micro-batches.
        let flat = B::cast(flat, self.types.accumulation);
        Ok(Some(read_float::<B>(in_shape::<B>(flat, parameter.shape()))))
    }
}

impl<B: Backend> std::fmt::Debug for ModelStates<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelStates")
            .field("group", &self.group)
            .field("stage", &self.share.stage)
            .field("parameters", &self.parameters.len())
            .finish_non_exhaustive()
    }
}
