//! The model states of one rank: parameters, gradients and optimizer states.
//!
//! Main type: `ModelStates`. It owns everything that ZeRO shards. The states are registered on the
//! thread, because Burn's backend functions are static and cannot take them as arguments.
//!
//! ```text
//! stage                      0        1        2        3
//! parameter                  whole    whole    whole    shard
//! accumulated gradient       whole    whole    shard    shard
//! optimizer states, masters  whole    shard    shard    shard
//! ```
//!
//! With offloaded optimizer states, gradients are also sharded at stage 1. A shard is the flat,
//! zero-padded slice of a parameter that `Partition` assigns to a rank. Each parameter is
//! partitioned separately, with the same boundaries at every stage. A training step consists of
//! these calls, in the same order on all ranks:
//!
//! ```text
//! start_training_pass ─► forward ─► start_backward ─► backward ─► finish_pass     per micro-batch
//! step                                                                            per optimizer step
//! ```
//!
//! The tensor ops start the gathers and reductions in between. Gathered parameters are freed during
//! the pass, gradients in the step, and shards and optimizer states when `ModelStates` is dropped.
//! The submodules contain the step, the exchanges of optimizers that exchange more than gradients,
//! and the access to states for checkpoints.
//!
//! This is the entry point of the crate: `creation.rs` shards a module (`sharding`) and connects
//! gatherer (`parameter`), reducer (`gradient`), recorder (`recompute`) and optimizer (`optimizer`)
//! with the context of the model (`session`). No other module depends on it.

mod agreement;
mod buffers;
mod compression;
mod creation;
mod directions;
mod errors;
mod local;
mod rank_arrays;
mod segments;
mod state_array;
mod step;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use burn_backend::{Backend, DType, FloatDType, TensorData};
use deepburn_comm::{CollectiveTag, CommError, MeshAxis, MessageTag};
use deepburn_config::{
    ActivationPlan, OptimizerPlan, ParamGroups, PrecisionPlan, QuantizationPlan, ReductionPlan,
    Stage, ZeroPlan,
};
use deepburn_nvme::IoStatistics;
use deepburn_ops::{OptimizerOps, SumOps, view_float};

use crate::decorator::Training;
use crate::error::ZeroError;
use crate::gradient::{GradientReducer, Types};
use crate::group::{DeviceArray, Group, MeshGroups, elements_to_come};
use crate::ledger::{Ledger, ModuleOperations, OperationCounter, ParameterRead};
use crate::module::{Module, ParamId};
use crate::offload::{ActivationStore, Parking, Store};
use crate::optimizer::Optimizer;
use crate::parameter::{Gatherer, Parameter, Phase, ShardSpec};
use crate::pipeline::{PipelineLayout, Stages, WeightGradients};
use crate::recompute::BlockRecorder;
use crate::session::{self, Binding, ContextGuard, Pass};
use crate::sharding::{BufferTable, Marker, PlainTensor};
use compression::ErrorFeedback;

pub use rank_arrays::OwnedState;
pub use segments::{GradientSum, OwnedArray, RandomState, StateSegment, StreamPosition};
pub use state_array::StateArray;
pub use step::StepOutcome;

/// The settings of sharded training.
///
/// This is the part of a resolved plan that affects model states. All ranks of a group must have
/// the same policy. Otherwise their collectives do not match, which is an error.
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
    /// Frozen matrices in 8 or 4 bits.
    pub quantization: Option<QuantizationPlan>,
    /// The activations that are recomputed in backward, and the tier of the others.
    pub activations: ActivationPlan,
    /// The stages of the model; `None` without a pipeline.
    pub pipeline: Option<PipelineLayout>,
    /// The number of consecutive ranks that divide the model states among them (hybrid sharding).
    /// It divides the number of data-parallel ranks, and every such group has all states. `None`:
    /// all data-parallel ranks.
    pub shard_size: Option<usize>,
}

/// The states of a sharded model on one rank. They must stay on the thread that created them.
pub struct ModelStates<B: SumOps> {
    /// The groups along the axes of the device mesh.
    groups: MeshGroups<B>,
    /// The place of this rank in the pipeline; `None` without one.
    stages: Option<Rc<Stages<B>>>,
    settings: StateSettings,
    /// The parameters in module order. The index in this list identifies a parameter in the whole
    /// crate.
    parameters: Arc<[Arc<Parameter<B>>]>,
    module: ModuleContents<B>,
    /// Gathers sharded parameters for ops; idle below stage 3.
    gatherer: Arc<Gatherer<B>>,
    /// Reduces and accumulates gradients. It is shared, because the backward pass accesses it
    /// through `binding`.
    reducer: Rc<RefCell<GradientReducer<B>>>,
    /// Records blocks for activation checkpointing.
    recorder: Rc<BlockRecorder<B>>,
    /// The optimizer with the states of the slices that this rank updates.
    optimizer: Optimizer<B>,
    /// Compression errors by parameter index; set after the first exchange.
    errors: Vec<Option<ErrorFeedback>>,
    /// The host memory or NVMe file of offloaded states; `None` without offload.
    parking: Option<Parking>,
    /// The registration on this thread, which ends when the states are dropped. It has the ledger.
    binding: Binding,
}

/// The settings of the states on this rank.
#[derive(Debug, Clone, Copy)]
struct StateSettings {
    /// The stage and the rank in the shard group, which determine the slices that this rank keeps.
    share: ShardSpec,
    /// The element type in which ops compute.
    compute: FloatDType,
    /// The element types of gradient communication and accumulation.
    types: Types,
    /// The largest number of elements in an all-gather of updated parameters.
    allgather_bucket_size: usize,
    /// Whether a step accepts trainable parameters without a gradient.
    ignore_unused: bool,
}

/// The tensors of the module other than parameters, and its names of the parameters.
struct ModuleContents<B: Backend> {
    /// Running statistics, integer and bool parameters, which stay in the module.
    buffers: BufferTable<B>,
    /// Tensor fields that are not parameters, in module order.
    plain_tensors: Vec<PlainTensor>,
    /// Additional paths of tied parameters, by parameter index.
    aliases: Vec<Vec<String>>,
    /// The parameter index of each of Burn's parameter ids. Tied parameters have the same id.
    indices: HashMap<ParamId, usize>,
}

impl<B: OptimizerOps> ModelStates<B> {
    /// Makes this the current model of the thread until the guard is dropped. Calls can be nested.
    ///
    /// Ops are then counted in the ledger of this model and use its random stream, and only its own
    /// parameters get gradients. If `pass` is set, ops also use the plan's autocast, and the
    /// activations of a training pass are recomputed according to the plan.
    pub fn enter(&self, pass: Option<Pass>) -> ContextGuard {
        self.binding.enter(pass)
    }

    /// Restarts this rank's random stream from a seed that all ranks share. The oldest model of a
    /// thread also restarts the thread's stream for random ops outside of calls.
    pub fn seed(&self, seed: u64) {
        self.binding.reseed(seed);
    }

    /// Prepares `module` for a forward and backward pass: gives each trainable parameter a new
    /// autodiff leaf and starts the gather schedule of a training pass. With hybrid sharding, it
    /// waits until all ranks call it.
    ///
    /// # Errors
    /// Returns an error if a pending gather of an earlier pass or a collective fails.
    pub fn start_training_pass<M: Module<Training<B>>>(&self, module: M) -> Result<M, ZeroError> {
        // [Note: Barrier before forward] A rank thread that is still in autodiff's clean-up of the
        // last backward pass waits for the locks of all graphs. A rank in its next backward pass
        // would hold such a lock while it waits for the first rank at the end. Gathers over all
        // ranks prevent this, but with hybrid sharding a forward pass may wait for the ranks of its
        // group only. A pipeline has a barrier before each backward pass.
        let gathers_in_groups = self.groups.replicas().is_some() || self.gatherer.has_secondary();
        if gathers_in_groups && self.stages.is_none() {
            self.groups.data().barrier(CollectiveTag::new("start of forward", 0))?;
        }
        self.binding.with_counter(OperationCounter::start_forward);
        self.recorder.start_forward();
        self.gatherer.start_pass(Pass::Train)?;
        self.binding.open_pass();
        Ok(module.map(&mut Marker::new(&self.module.indices, |index| self.binding.mark(index))))
    }

    /// Returns true if the backward pass of a training pass has not started yet.
    pub fn has_open_pass(&self) -> bool {
        self.binding.has_open_pass()
    }

    /// Closes the open training pass, so that it no longer waits for a backward pass. Call it right
    /// before the backward pass, after a closure that ran both passes, or to abandon the pass.
    /// Returns false if no pass was open.
    pub fn close_training_pass(&self) -> bool {
        self.binding.close_pass()
    }

    /// Returns true if another model on this thread has read this model in a training pass whose
    /// backward pass has not run yet. An optimizer step of this model would change the values that
    /// the backward pass needs.
    pub fn is_read_by_open_pass(&self) -> bool {
        session::open_pass_reads(self.binding.ledger())
    }

    /// Prepares for a forward pass without a backward pass.
    ///
    /// # Errors
    /// Returns an error if a pending gather of an earlier pass fails.
    pub fn start_evaluation_pass(&self) -> Result<(), ZeroError> {
        self.enter_other_pass();
        Ok(self.gatherer.start_pass(Pass::Evaluate)?)
    }

    /// Prepares for a pass that reads parameters in order to save them.
    ///
    /// # Errors
    /// Returns an error if a pending gather of an earlier pass fails.
    pub fn start_saving_pass(&self) -> Result<(), ZeroError> {
        self.enter_other_pass();
        Ok(self.gatherer.start_pass(Pass::Save)?)
    }

    /// Starts a pass other than of a micro-batch at the first stage of a pipeline. Without one it
    /// does nothing.
    fn enter_other_pass(&self) {
        if let Some(stages) = &self.stages {
            stages.enter_other();
        }
    }

    /// Marks the end of forward and the start of backward.
    ///
    /// Gathers then follow the recorded order of backward, freed activations are recomputed, and
    /// operations count as backward. Uses no collective.
    pub fn start_backward(&self) {
        self.binding.with_counter(OperationCounter::start_backward);
        self.gatherer.start_backward();
        self.recorder.start_backward();
        session::refresh_call();
    }

    /// Ends the forward pass of a micro-batch in a pipeline, whose backward pass comes after passes
    /// of other micro-batches. Releases gathered parameters and frees the activations that backward
    /// recomputes.
    ///
    /// # Errors
    /// Returns an error if a fetch fails.
    pub fn end_separate_forward(&self) -> Result<(), ZeroError> {
        self.binding.close_pass();
        self.recorder.end_separate_forward();
        session::refresh_call();
        self.finish_pass()
    }

    /// Starts the backward pass of micro-batch `pass` in a pipeline, after all later stages have
    /// ended it and all ranks of this stage are here. [`reduce_deferred`](Self::reduce_deferred)
    /// computes the gradients of weights that it leaves.
    ///
    /// # Errors
    /// Returns an error if another rank fails or does not arrive in time.
    pub fn start_separate_backward(
        &self,
        pass: u64,
        weights: WeightGradients,
    ) -> Result<(), ZeroError> {
        if let Some(stages) = &self.stages {
            stages.await_later(pass)?;
            // No rank of the stage waits for another one while it holds the lock of its graph,
            // unless both are in backward.
            self.groups.data().barrier(CollectiveTag::new("start of backward", pass))?;
            stages.enter(Phase::Backward, pass);
            stages.set_weight_gradients(weights);
        }
        self.binding.with_counter(OperationCounter::start_backward);
        self.gatherer.start_separate_backward()?;
        self.recorder.start_backward();
        session::refresh_call();
        Ok(())
    }

    /// Ends the backward pass of micro-batch `pass` in a pipeline. Waits for the parts of gradients
    /// that earlier stages send in passes that they have ended or can end.
    ///
    /// # Errors
    /// Returns an error if a fetch fails, an earlier stage fails, or the group has ended.
    pub fn end_separate_backward(&self, pass: u64) -> Result<(), ZeroError> {
        self.finish_pass()?;
        if let Some(stages) = &self.stages {
            stages.announce_end(pass)?;
            // The first stage is as many passes behind as there are stages between. Waiting for a
            // later one would be a deadlock if a forward pass reads a value: the first stage then
            // waits for this one.
            self.reducer.borrow_mut().reduce_late(stages.stage())?;
        }
        Ok(())
    }

    /// Computes and reduces the gradients that the oldest backward pass of a pipeline has deferred.
    /// All ranks of a stage call it at the same point of their schedule.
    ///
    /// # Errors
    /// Returns an error if another rank fails, or a parked sum cannot be read or written.
    ///
    /// # Panics
    /// Panics with a [`CommError`] if the process group has ended.
    pub fn reduce_deferred(&self) -> Result<(), ZeroError> {
        self.reducer.borrow_mut().reduce_deferred()?;
        self.stores().for_each(Store::release_idle);
        Ok(())
    }

    /// Starts the forward pass of micro-batch `pass` at the first stage of a pipeline. Without one
    /// it does nothing.
    pub fn enter_forward(&self, pass: u64) {
        if let Some(stages) = &self.stages {
            stages.enter(Phase::Forward, pass);
        }
    }

    /// Detects the start of the next backward pass by its first completed gradient. This is for
    /// callers that cannot call [`start_backward`](Self::start_backward).
    pub fn watch_for_backward(&self) {
        // The closure outlives this call, so it cannot borrow the states.
        let (gatherer, recorder) = (self.gatherer.clone(), self.recorder.clone());
        self.reducer.borrow_mut().watch.arm(Box::new(move || {
            session::with_counter(OperationCounter::start_backward);
            gatherer.start_backward();
            recorder.start_backward();
            session::refresh_call();
        }));
    }

    /// Returns the number of completed backward passes that reported gradients of this model.
    pub fn backward_passes(&self) -> u64 {
        self.reducer.borrow().watch.completed()
    }

    /// Returns the number of gradients of this model that were reported since the last call of
    /// [`watch_for_backward`](Self::watch_for_backward).
    pub fn gradients_reported(&self) -> usize {
        self.reducer.borrow().watch.reported()
    }

    /// Returns the time at which the last watched backward pass started; `None` if it was not
    /// detected.
    pub fn backward_began(&self) -> Option<Instant> {
        self.reducer.borrow().watch.began()
    }

    /// Returns the index of the parameter with this id; `None` for a parameter of another module.
    pub fn parameter_index(&self, id: ParamId) -> Option<usize> {
        self.module.indices.get(&id).copied()
    }

    /// Starts to count the floating-point operations of forward and backward.
    ///
    /// Matrix products, convolutions and attention are counted; element-wise ops are not
    /// ([`ModuleOperations`]).
    pub fn start_counting(&self) {
        self.binding.start_counting();
    }

    /// Returns the reads of parameters in forward passes since the count began, in the order of
    /// execution.
    pub fn parameter_reads(&self) -> Vec<ParameterRead> {
        let mut reads = Vec::new();
        self.binding.with_counter(|counter| reads.extend_from_slice(counter.reads()));
        reads
    }

    /// Ends the count and returns the operations of this rank by module.
    pub fn stop_counting(&self) -> Vec<ModuleOperations> {
        self.binding.stop_counting()
    }

    /// Ends a pass and releases all gathered parameters except persistent ones.
    ///
    /// Pending fetches are first awaited in the order in which they were started, so that all ranks
    /// complete the same collectives. Idle I/O buffers are returned to the system.
    ///
    /// # Errors
    /// Returns an error if a fetch fails.
    pub fn finish_pass(&self) -> Result<(), ZeroError> {
        self.gatherer.release_all()?;
        self.stores().for_each(Store::release_idle);
        Ok(())
    }

    /// Sets whether gradients are reduced during backward; see the engine's `no_sync`.
    ///
    /// While this is off, gradients are accumulated on this rank alone and have their full size at
    /// every stage.
    pub fn set_synchronize(&self, on: bool) {
        self.reducer.borrow_mut().set_synchronize(on);
    }

    /// Returns true if the optimizer has steps in which ranks exchange momenta instead of gradients
    /// (1-bit optimizers).
    pub fn exchanges_momentum(&self) -> bool {
        self.optimizer.exchanges_momentum()
    }

    /// Returns the names and values of a parameter's scalars. Only 1-bit LAMB has any.
    pub fn scalars(&self, index: usize) -> Vec<(&'static str, f64)> {
        self.optimizer.scalars(index)
    }

    /// Replaces all scalars with the values that `read` returns for a module path and a name, or
    /// with initial values if it returns `None`. Call it after
    /// [`load_moments`](Self::load_moments).
    pub fn load_scalars(&mut self, read: impl Fn(&str, &str) -> Option<f64>) {
        for parameter in self.parameters.iter() {
            self.optimizer.set_scalars(parameter.index(), |name| read(parameter.path(), name));
        }
    }

    /// Returns true if the optimizer has local steps, in which each rank updates its parameters
    /// without an exchange (0/1 Adam).
    pub fn takes_local_steps(&self) -> bool {
        self.optimizer.takes_local_steps()
    }

    /// Returns the name of the quantity that optimizer step `step` compresses; `None` without
    /// compression. Steps are counted from 1. Compression errors of one quantity cannot be used for
    /// another.
    pub fn compressed_quantity(&self, step: u64) -> Option<&'static str> {
        self.optimizer.compressed_quantity(step)
    }

    /// Returns true if the current step averages gradients over ranks. Otherwise each rank keeps
    /// its own gradients, and a 1-bit optimizer averages momenta in the step.
    pub fn takes_mean_gradients(&self) -> bool {
        self.reducer.borrow().takes_mean()
    }

    /// Sets the number of micro-batches per step, starting with the next step. The initial number
    /// is 1.
    pub fn set_micro_batches(&self, count: usize) {
        self.reducer.borrow_mut().set_micro_batches(count);
    }

    /// Drops all gradients, including those that a failed backward pass left behind. Uses no
    /// collective. All ranks must call it at the same point.
    pub fn zero_grad(&self) {
        self.reducer.borrow_mut().clear();
    }

    /// Returns true if a backward pass has reported gradients of this model and failed before its
    /// end.
    pub fn is_backward_incomplete(&self) -> bool {
        self.reducer.borrow().watch.is_reporting()
    }

    /// Returns the tensor fields of the module that are not a `Param`, with a hash of their values.
    /// They are the same on all ranks.
    pub fn plain_tensors(&self) -> &[PlainTensor] {
        &self.module.plain_tensors
    }

    /// Returns the parameters in module order.
    pub fn parameters(&self) -> &[Arc<Parameter<B>>] {
        &self.parameters
    }

    /// Checks that the group has not ended. Uses no collective.
    ///
    /// # Errors
    /// Returns the failure that ended the group.
    pub fn check(&self) -> Result<(), ZeroError> {
        Ok(self.groups.world().check()?)
    }

    /// Returns the I/O statistics of offloaded states and activations; `None` without NVMe files.
    pub fn io_statistics(&self) -> Option<IoStatistics> {
        self.stores().filter_map(Store::io_statistics).reduce(|sum, of_one| sum + of_one)
    }

    /// Returns the stores of offloaded states and activations.
    fn stores(&self) -> impl Iterator<Item = &Store> {
        let states = self.parking.as_ref().map(|parking| &parking.store);
        let activations = self.recorder.store().map(ActivationStore::store);
        states.into_iter().chain(activations)
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &Group<B> {
        self.groups.world()
    }

    /// Returns the group of the ranks that have different data: all ranks, or the ranks of a
    /// pipeline stage.
    pub fn data_group(&self) -> &Group<B> {
        self.groups.data()
    }

    /// Returns the number of replicas: groups of data-parallel ranks that each have all model
    /// states of the stage. It is 1 without hybrid sharding.
    ///
    /// With more than one replica, accumulated gradients are sums over the ranks of a replica until
    /// the step adds the replicas up.
    pub fn replicas(&self) -> usize {
        self.groups.mesh().size(MeshAxis::Replicate)
    }

    /// Returns the place of this rank in the pipeline; `None` without one.
    pub fn stages(&self) -> Option<&Stages<B>> {
        self.stages.as_deref()
    }

    /// Returns the ZeRO stage.
    pub fn stage(&self) -> Stage {
        self.settings.share.stage
    }

    /// Waits until the device of this rank has done all work that was queued so far. A failure of
    /// the device is reported by the next read, not here.
    pub fn wait_for_device(&self) {
        // All parameters are on the device of the rank.
        if let Some(parameter) = self.parameters.first() {
            let _ = B::sync(parameter.device());
        }
    }

    /// Returns the memory ledger of this rank.
    pub fn ledger(&self) -> &Ledger {
        self.binding.ledger()
    }

    /// Returns the complete values of parameter `index` in the type in which ops compute. A
    /// quantized parameter is dequantized. All ranks call this together.
    ///
    /// Between two averages of 0/1 Adam ([`local_rates`](Self::local_rates)), the result has the
    /// values of this rank, which differ between ranks.
    ///
    /// The result has the parameter's shape. It takes the memory of the whole parameter on the host
    /// and, during the call, on the device.
    ///
    /// # Errors
    /// Returns an error if the all-gather or the disk fails.
    pub fn parameter_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let parameter = &self.parameters[index];
        let whole =
            self.read_at_owner(parameter, parameter.dtype(), || self.read_here(parameter))?;
        Ok(view_float::<B>(whole))
    }

    /// Returns what [`parameter_data`](Self::parameter_data) returns, for a parameter that this
    /// rank's pipeline stage holds. All ranks of the stage call this together.
    ///
    /// # Errors
    /// Returns an error if the all-gather or the disk fails.
    pub fn stage_parameter_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        Ok(view_float::<B>(self.read_here(&self.parameters[index])?))
    }

    /// Returns the complete values of a parameter that this rank's stage holds.
    fn read_here(&self, parameter: &Parameter<B>) -> Result<B::FloatTensorPrimitive, ZeroError> {
        // A persistent parameter is complete on every rank, so it is read without a collective.
        Ok(match parameter.shard() {
            Some(_) if !parameter.is_persistent() => {
                parameter.elements(self.gatherer.gather_once(parameter.index())?)
            }
            _ => parameter.read(),
        })
    }

    /// Returns the complete values of parameter `index` in f32: its masters if ops compute in 16
    /// bits. All ranks call this together.
    ///
    /// A frozen parameter has no masters, so its 16-bit values are returned. Between two averages
    /// of 0/1 Adam, the result has the values of this rank, which differ between ranks.
    ///
    /// # Errors
    /// Returns an error if the all-gather or the disk fails.
    pub fn master_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let parameter = &self.parameters[index];
        if !parameter.is_trainable() || DType::from(self.settings.compute) == DType::F32 {
            return self.parameter_data(index);
        }
        let whole = self.read_at_owner(parameter, DType::F32, || {
            let Some(master) = self.optimizer.master(index)? else {
                unreachable!("a trained 16-bit parameter has a master")
            };
            let flat = match self.settings.share.stage.shards_optimizer() {
                true => self.gathered("masters", parameter, master)?,
                false => master,
            };
            Ok(B::float_reshape(flat, parameter.shape().clone()))
        })?;
        Ok(view_float::<B>(whole))
    }

    /// Returns the complete array of a parameter that `read` returns on the ranks of its owner's
    /// stage. They send it to the other stages of a pipeline. All ranks call this together.
    ///
    /// # Errors
    /// Returns the errors of `read`, or an error if a message cannot be sent or received.
    fn read_at_owner(
        &self,
        parameter: &Parameter<B>,
        dtype: DType,
        read: impl FnOnce() -> Result<B::FloatTensorPrimitive, ZeroError>,
    ) -> Result<B::FloatTensorPrimitive, ZeroError> {
        let Some(stages) = &self.stages else { return read() };
        // Every stage takes part, so that a program can read any parameter on any rank.
        let owner = parameter.owner();
        let tag = MessageTag::new("whole parameter", parameter.index() as u64);
        let arrays = self.groups.world().arrays();
        if owner != stages.stage() {
            let like = elements_to_come::<B>(parameter.numel(), dtype.into(), parameter.device());
            let like = vec![DeviceArray::Dense(like)];
            let mut whole = arrays.receive(stages.rank_of(owner), tag, like)?.wait()?;
            let flat = whole.swap_remove(0).into_flat();
            return Ok(B::float_reshape(flat, parameter.shape().clone()));
        }
        let whole = read()?;
        for other in (0..stages.count()).filter(|stage| *stage != owner) {
            let whole = vec![DeviceArray::Dense(whole.clone())];
            arrays.send(stages.rank_of(other), tag.clone(), whole)?;
        }
        Ok(whole)
    }

    /// Returns the complete accumulated gradient of the parameter at `path`; `None` if the
    /// parameter has no gradient. All ranks call this together, between backward and step.
    ///
    /// The gradient is the mean or sum over ranks, depending on the plan. It is still multiplied by
    /// the loss scale, and it is not clipped. Its type is the plan's accumulation type.
    ///
    /// # Errors
    /// Returns an error if there is no parameter at `path`, or if the all-gather or the disk fails.
    pub fn gradient_data(&self, path: &str) -> Result<Option<TensorData>, ZeroError> {
        let parameter = self.parameters.iter().find(|parameter| parameter.path() == path);
        let Some(parameter) = parameter else {
            return Err(ZeroError::UnknownParameter { path: path.to_owned() });
        };
        let reducer = self.reducer.borrow();
        let Some(sum) = reducer.accumulated(parameter.index()) else { return Ok(None) };
        let sum = sum.tensor(parameter.device())?;
        // Before the step, a sum only covers the ranks of one replica.
        let sum = reducer.sum_of_replicas(parameter.tag("gradient data of replicas"), vec![sum])?;
        let sum = sum.wait()?.swap_remove(0).into_flat();
        let flat = match self.settings.share.cuts_gradients {
            true => self.gathered("gradient data", parameter, sum)?,
            false => sum,
        };
        // The cast makes the type independent of the number of micro-batches.
        let flat = B::cast(flat, self.settings.types.accumulation);
        Ok(Some(view_float::<B>(B::float_reshape(flat, parameter.shape().clone()))))
    }

    /// Gathers the shards of an array that is partitioned like `parameter`, and returns all of its
    /// elements, flat.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    fn gathered(
        &self,
        what: &'static str,
        parameter: &Parameter<B>,
        shard: B::FloatTensorPrimitive,
    ) -> Result<B::FloatTensorPrimitive, CommError> {
        let (shard, numels) = (vec![DeviceArray::Dense(shard)], vec![parameter.numel()]);
        let group = self.groups.shard().arrays();
        let pending = group.all_gather(parameter.tag(what), shard, numels)?;
        Ok(pending.wait()?.swap_remove(0).into_flat())
    }
}

impl<B: SumOps> std::fmt::Debug for ModelStates<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelStates")
            .field("mesh", &self.groups.mesh())
            .field("rank", &self.groups.world().rank())
            .field("stage", &self.settings.share.stage)
            .field("parameters", &self.parameters.len())
            .finish_non_exhaustive()
    }
}
