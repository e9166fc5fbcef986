//! The model states of one rank: parameters, gradients, optimizer states, and what moves them.

mod buffers;
mod pieces;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use burn::module::{AutodiffModule, Module, ParamId};
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_comm::Tag;
use deepburn_config::{OptimizerPlan, Precision, PrecisionPlan, ReductionPlan, Stage, ZeroPlan};
use deepburn_kernels::unscale_and_clip;
use deepburn_nvme::IoStatistics;
use deepburn_ops::{OptimizerOps, read_float};

use crate::array::DeviceArray;
use crate::buffers::BufferTable;
use crate::error::ZeroError;
use crate::gather::{Gatherer, Pass};
use crate::group::Group;
use crate::ledger::Ledger;
use crate::operations::{Counter, ModuleOperations};
use crate::optimizer::{Optimizer, Rates};
use crate::parameter::Parameter;
use crate::persistence::persistent_parameters;
use crate::precision::element_type;
use crate::publish::Publisher;
use crate::reduce::{Accumulated, GradientReducer, Types};
use crate::session::{self, Binding, ContextGuard};
use crate::sharding::{Marker, Sharder, Table, Training, in_shape};
use crate::share::Share;

pub use pieces::{GradientSum, OwnedArray, Piece, RandomState, StateArray, StreamPosition};

/// How the states of a model are kept.
#[derive(Debug, Clone)]
pub struct Policy {
    /// What is sharded, and how it travels.
    pub zero: ZeroPlan,
    /// How gradients of different ranks become one.
    pub reduction: ReductionPlan,
    /// Element types.
    pub precision: PrecisionPlan,
    /// The optimizer.
    pub optimizer: OptimizerPlan,
}

/// What an optimizer step did.
#[derive(Debug, Clone, PartialEq)]
pub enum StepOutcome {
    /// It updated the parameters.
    Applied {
        /// Global L2 norm of the gradients before clipping, unscaled.
        gradient_norm: f64,
    },
    /// It changed nothing on any rank, because a gradient is infinite or NaN.
    Overflow {
        /// Module path of the first such parameter, in the model's order.
        parameter: String,
    },
}

/// The states of a sharded model on one rank. Bound to the thread that made it.
pub struct ModelStates<B: Backend> {
    group: Group<B>,
    share: Share,
    parameters: Arc<[Arc<Parameter<B>>]>,
    buffers: BufferTable<B>,
    /// Further paths of tied parameters, by parameter index.
    aliases: Vec<Vec<String>>,
    indices: HashMap<ParamId, usize>,
    gatherer: Arc<Gatherer<B>>,
    /// Parameters that stay whole at stage 3.
    resident: Vec<usize>,
    reducer: Rc<RefCell<GradientReducer<B>>>,
    optimizer: Optimizer<B>,
    /// Type that ops use.
    compute: FloatDType,
    types: Types,
    allgather_bucket_size: usize,
    ignore_unused: bool,
    ledger: Ledger,
    binding: Binding,
}

impl<B: OptimizerOps> ModelStates<B> {
    /// Shards `module` over `group` as `policy` says; every rank starts from the values of rank 0,
    /// buffers included. The returned module is used like the one passed in. Ranks may pass clones
    /// of one module: the returned one shares no running statistics with them.
    ///
    /// Rank 0 alone initialises lazy parameters, one after the other, and no rank holds more than its
    /// part of them and one whole parameter.
    ///
    /// # Errors
    /// When a parameter is not f32 or cannot be initialised, nothing is trainable, two layers share a
    /// running statistic, or the ranks' modules differ.
    pub fn shard<M: AutodiffModule<Training<B>>>(
        module: M,
        policy: Policy,
        group: Group<B>,
    ) -> Result<(M, Self), ZeroError> {
        let Policy { zero, reduction, precision, optimizer } = policy;
        let (rank, stage, ledger) = (group.rank(), zero.stage, Ledger::new());
        let gatherer = Arc::new(Gatherer::new(group.clone(), zero.parameters, ledger.clone()));
        let through = stage.shards_parameters().then(|| Arc::downgrade(&gatherer));
        let share = Share { stage, rank };
        let working =
            (precision.compute != Precision::Fp32).then(|| element_type(precision.compute));
        let types = Types {
            communication: element_type(precision.communication),
            accumulation: element_type(precision.accumulation),
        };
        let (module, buffers) = BufferTable::prepare(module, &group, &ledger)?;
        let sharder =
            Sharder::new(group.clone(), share, through, working, ledger.clone(), &buffers);
        let (module, Table { parameters, indices, owned, aliases }) = sharder.shard(module)?;
        gatherer.serve(parameters.clone());

        let reducer = Rc::new(RefCell::new(GradientReducer::new(
            group.clone(),
            parameters.clone(),
            zero.gradients,
            reduction,
            types,
            stage.shards_gradients(),
            ledger.clone(),
        )));
        let optimizer = Optimizer::new(optimizer, working, &zero.optimizer_states, owned, &ledger)?;
        let autocast = precision.autocast.map(element_type);
        let binding = Binding::new(reducer.clone(), ledger.clone(), group.clone(), autocast);
        let resident = match stage {
            Stage::Parameters => {
                let numels = parameters.iter().map(|parameter| parameter.numel() as u64);
                persistent_parameters(numels, group.world_size() as u64, &zero.parameters)
            }
            _ => Vec::new(),
        };
        gatherer.refresh_resident(&resident)?;
        let states = Self {
            group,
            share,
            parameters,
            buffers,
            aliases,
            indices,
            gatherer,
            resident,
            reducer,
            optimizer,
            compute: element_type(precision.compute),
            types,
            allgather_bucket_size: zero.allgather_bucket_size,
            ignore_unused: zero.gradients.ignore_unused_parameters,
            ledger,
            binding,
        };
        Ok((module, states))
    }

    /// Makes this the model of all ops on the thread until the guard is dropped: their activations
    /// count in its ledger, they draw from its random stream, and gradients go to its own parameters
    /// alone. With `runs_model` they also run under the plan's autocast. Calls nest.
    pub fn enter(&self, runs_model: bool) -> ContextGuard {
        self.binding.enter(runs_model)
    }

    /// Starts this rank's random stream (dropout) anew from a seed that all ranks share. The oldest
    /// model on the thread also starts the stream of draws outside of calls.
    pub fn seed(&self, seed: u64) {
        self.binding.reseed(seed);
    }

    /// Prepares `module` for a forward and backward pass.
    pub fn start_training_pass<M: Module<Training<B>>>(&self, module: M) -> Result<M, ZeroError> {
        self.binding.with_counter(Counter::start_forward);
        self.gatherer.start_pass(Pass::Train)?;
        self.binding.open_pass();
        Ok(module.map(&mut Marker::new(&self.indices, |index| self.binding.mark(index))))
    }

    /// Whether a training pass waits for its backward pass.
    pub fn has_open_pass(&self) -> bool {
        self.binding.has_open_pass()
    }

    /// Ends the training pass, whose backward pass runs now or never. Returns whether there was one.
    pub fn close_training_pass(&self) -> bool {
        self.binding.close_pass()
    }

    /// Whether another model on this thread has read this one in a training pass whose backward pass
    /// is still to come. A step now would change what that backward pass reads.
    pub fn is_read_by_open_pass(&self) -> bool {
        session::open_pass_reads(&self.ledger)
    }

    /// Prepares for a forward pass without backward.
    pub fn start_evaluation_pass(&self) -> Result<(), ZeroError> {
        Ok(self.gatherer.start_pass(Pass::Evaluate)?)
    }

    /// Prepares for reading parameters in order to save them.
    pub fn start_saving_pass(&self) -> Result<(), ZeroError> {
        Ok(self.gatherer.start_pass(Pass::Save)?)
    }

    /// Says that forward is over and backward begins.
    pub fn start_backward(&self) {
        self.binding.with_counter(Counter::start_backward);
        self.gatherer.start_backward();
    }

    /// Notices by itself when the backward pass of the present training pass begins: with its first
    /// final gradient. For callers that cannot call [`start_backward`](Self::start_backward).
    pub fn watch_for_backward(&self) {
        let gatherer = self.gatherer.clone();
        self.reducer.borrow_mut().watch_for_backward(Box::new(move || {
            session::with_counter(Counter::start_backward);
            gatherer.start_backward();
        }));
    }

    /// Number of completed backward passes that reported gradients of this model.
    pub fn backward_passes(&self) -> u64 {
        self.reducer.borrow().backward_passes()
    }

    /// Number of gradients of this model that were reported since
    /// [`watch_for_backward`](Self::watch_for_backward) was last called.
    pub fn gradients_reported(&self) -> usize {
        self.reducer.borrow().gradients_reported()
    }

    /// When the last watched backward pass began, as far as it was noticed.
    pub fn backward_began(&self) -> Option<Instant> {
        self.reducer.borrow().backward_began()
    }

    /// The index of the parameter with this id in the module; `None` for one of another module.
    pub fn parameter_index(&self, id: ParamId) -> Option<usize> {
        self.indices.get(&id).copied()
    }

    /// Starts to count the operations of forward and backward.
    pub fn start_counting(&self) {
        self.binding.start_counting();
    }

    /// Ends the count: the operations of this rank since it began, by module.
    pub fn stop_counting(&self) -> Vec<ModuleOperations> {
        self.binding.stop_counting()
    }

    /// Ends a pass: nothing stays gathered but resident parameters.
    pub fn finish_pass(&self) -> Result<(), ZeroError> {
        Ok(self.gatherer.release_all()?)
    }

    /// Whether gradients are reduced as they come; see the engine's `no_sync`.
    pub fn set_synchronise(&self, on: bool) {
        self.reducer.borrow_mut().set_synchronise(on);
    }

    /// How many micro-batches make a step, from the next one on; 1 before this is called.
    pub fn set_micro_batches(&self, count: usize) {
        self.reducer.borrow_mut().set_micro_batches(count);
    }

    /// Forgets all accumulated gradients.
    pub fn zero_grad(&self) {
        self.reducer.borrow_mut().clear();
    }

    /// Updates the parameters with the accumulated gradients and clears them. All ranks call this
    /// together. `loss_scale` is the factor that the loss had in backward; the norm is clipped to
    /// `clip`.
    ///
    /// # Errors
    /// When a collective fails, or there are no gradients.
    pub fn step(
        &mut self,
        rates: Rates,
        loss_scale: f64,
        clip: Option<f64>,
    ) -> Result<StepOutcome, ZeroError> {
        // What was gathered is out of date after the update.
        self.gatherer.release_all()?;
        let gradients = self.take_gradients()?;
        let scaled_norm = match self.global_norm(&gradients)? {
            Norm::Finite(norm) => norm,
            Norm::NotFinite { first } => {
                let parameter = self.parameters[first].path().to_owned();
                return Ok(StepOutcome::Overflow { parameter });
            }
        };
        let scale = unscale_and_clip(scaled_norm, loss_scale, clip) as f32;
        self.update(gradients, rates, scale)?;
        self.gatherer.refresh_resident(&self.resident)?;
        Ok(StepOutcome::Applied { gradient_norm: scaled_norm / loss_scale })
    }

    /// The parameters in the order of the module.
    pub fn parameters(&self) -> &[Arc<Parameter<B>>] {
        &self.parameters
    }

    /// Asks whether the group still works, without exchanging anything.
    ///
    /// # Errors
    /// What ended the group.
    pub fn check(&self) -> Result<(), ZeroError> {
        Ok(self.group.check()?)
    }

    /// What was read from and written to the file of offloaded states, if there is one.
    pub fn io_statistics(&self) -> Option<IoStatistics> {
        self.optimizer.io_statistics()
    }

    /// The process group.
    pub fn group(&self) -> &Group<B> {
        &self.group
    }

    /// What is sharded.
    pub fn stage(&self) -> Stage {
        self.share.stage
    }

    /// Bytes held by this rank.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The whole values of parameter `index` in the type that ops use. All ranks call this together.
    pub fn parameter_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let parameter = &self.parameters[index];
        let whole = match parameter.shard() {
            Some(_) if !parameter.is_resident() => self.gatherer.gather_once(index)?,
            _ => parameter.read(),
        };
        Ok(read_float::<B>(whole))
    }

    /// The whole values of parameter `index` in full precision: its masters where ops use 16 bits.
    /// A frozen parameter has none, and gives what ops use. All ranks call this together.
    pub fn master_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let Some(master) = self.optimizer.master(index)? else {
            return self.parameter_data(index);
        };
        let parameter = &self.parameters[index];
        let flat = if self.share.stage.shards_optimizer() {
            let shard = vec![DeviceArray::Dense(master.clone())];
            let tag = Tag::new("masters", index as u64).naming([parameter.shared_path()]);
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

    /// The whole accumulated gradient of the parameter at `path`; `None` if it got none. All
    /// ranks call this together, between backward and step.
    pub fn gradient_data(&self, path: &str) -> Result<Option<TensorData>, ZeroError> {
        let parameter = self.parameters.iter().find(|parameter| parameter.path() == path);
        let Some(parameter) = parameter else {
            return Err(ZeroError::UnknownParameter { path: path.to_owned() });
        };
        let sum =
            self.reducer.borrow().accumulated(parameter.index()).map(|sum| sum.tensor.clone());
        let Some(sum) = sum else { return Ok(None) };
        let flat = if self.share.stage.shards_gradients() {
            let tag = Tag::new("gradient data", parameter.index() as u64)
                .naming([parameter.shared_path()]);
            let chunks = vec![DeviceArray::Dense(sum)];
            let group = self.group.arrays();
            let mut whole = group.all_gather(tag, chunks, vec![parameter.numel()])?.wait()?;
            whole.swap_remove(0).into_flat()
        } else {
            sum
        };
        // One type, however many micro-batches there were.
        let flat = B::cast(flat, self.types.accumulation);
        Ok(Some(read_float::<B>(in_shape::<B>(flat, parameter.shape()))))
    }

    /// The accumulated gradients by parameter index; `None` for one that was not used.
    fn take_gradients(&self) -> Result<Vec<Option<Accumulated<B>>>, ZeroError> {
        self.reducer.borrow_mut().reduce_rest()?;
        let taken = self.reducer.borrow_mut().take();
        if taken.iter().all(Option::is_none) {
            return Err(ZeroError::NoGradients);
        }
        let trainable = self.parameters.iter().filter(|parameter| parameter.is_trainable());
        let unused = trainable.filter(|parameter| taken[parameter.index()].is_none());
        let paths: Vec<String> = unused.map(|parameter| parameter.path().to_owned()).collect();
        if !paths.is_empty() && !self.ignore_unused {
            return Err(ZeroError::UnusedParameters { paths });
        }
        Ok(taken)
    }

    /// L2 norm over all parameters: each rank sums the squares it owns, padding excluded, and the
    /// ranks' sums are added in rank order. The cut is the same at every stage, and so is the sum.
    fn global_norm(&self, gradients: &[Option<Accumulated<B>>]) -> Result<Norm, ZeroError> {
        let (mut squares, mut first_bad) = (0.0, None);
        for (parameter, gradient) in self.parameters.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                let owned = self.share.owned_gradient::<B>(&gradient.tensor, parameter.partition());
                let stats = B::gradient_stats(owned.clone());
                squares += stats.sum_of_squares;
                if !(stats.finite && self.fits(owned, gradient.peak.as_ref())) {
                    first_bad.get_or_insert(parameter.index());
                }
            }
        }
        // One message for both: a rank whose share is finite must not go on by itself.
        let bad = if first_bad.is_some() { 1.0 } else { 0.0 };
        let sums = self.group.sum(Tag::new("gradient norm", 0), vec![squares, bad])?;
        if sums[1] == 0.0 {
            return Ok(Norm::Finite(sums[0].sqrt()));
        }
        // The smallest index over the ranks, as the largest negative one.
        let mine = first_bad.map_or(f64::NEG_INFINITY, |index| -(index as f64));
        let first = -self.group.max(Tag::new("gradient norm", 1), vec![mine])?[0];
        Ok(Norm::NotFinite { first: first as usize })
    }

    /// Whether an accumulated gradient had a place in the type that ops use, all the time. In fp16
    /// DeepSpeed adds gradients up in that type and skips a step in which they overflow; so it is
    /// here, although a sum in f32 holds them.
    fn fits(
        &self,
        gradient: B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
    ) -> bool {
        if self.compute != FloatDType::F16 || gradient.dtype() == DType::F16 {
            return true;
        }
        let fits = |tensor| B::gradient_stats(B::cast(tensor, FloatDType::F16)).finite;
        peak.is_none_or(|peak| fits(peak.clone())) && fits(gradient)
    }

    /// Updates every trainable parameter, then hands updated shards round where they are not
    /// what a rank keeps (stages 1 and 2).
    fn update(
        &mut self,
        gradients: Vec<Option<Accumulated<B>>>,
        rates: Rates,
        scale: f32,
    ) -> Result<(), ZeroError> {
        let share = self.share;
        let mut publisher = Publisher::new(&self.group, self.allgather_bucket_size);
        let mut step = self.optimizer.start_step(rates, scale)?;
        for (parameter, gradient) in self.parameters.iter().zip(gradients) {
            if !parameter.is_trainable() {
                continue;
            }
            let (index, partition) = (parameter.index(), parameter.partition());
            let gradient = match gradient {
                Some(sum) => share.of_gradient::<B>(sum.tensor, partition),
                None => {
                    let shape = Shape::from(vec![share.len(partition)]);
                    B::float_zeros(shape, parameter.device(), FloatDType::F32)
                }
            };
            let values = if step.has_master(index) {
                drop(parameter.take());
                None
            } else {
                Some(share.take_values(parameter))
            };
            let updated = step.update(index, values, gradient)?;
            publisher.store(share.stage, parameter, updated)?;
        }
        publisher.flush()?;
        Ok(())
    }
}

/// L2 norm of the gradients of all ranks.
enum Norm {
    Finite(f64),
    /// A gradient is infinite or NaN, first that of parameter `first`.
    NotFinite {
        first: usize,
    },
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
