//! The model states of one rank: parameters, gradients, optimizer states, and what moves them.

mod buffers;
mod compression;
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

use burn::module::{AutodiffModule, Module, ParamId};
use burn_backend::{Backend, FloatDType, TensorData};
use deepburn_comm::Tag;
use deepburn_config::{
    ActivationPlan, OptimizerOffload, OptimizerPlan, ParamGroups, Precision, PrecisionPlan,
    ReductionPlan, Stage, UpdateSettings, ZeroPlan,
};
use deepburn_nvme::IoStatistics;
use deepburn_ops::{OptimizerOps, read_float};

use crate::array::DeviceArray;
use crate::buffers::BufferTable;
use crate::error::ZeroError;
use crate::estimate::ParameterSize;
use crate::gather::{Gatherer, Pass};
use crate::group::Group;
use crate::ledger::Ledger;
use crate::operations::{Counter, ModuleOperations};
use crate::optimizer::Optimizer;
use crate::parameter::Parameter;
use crate::parked::{ActivationStore, Store};
use crate::persistence::persistent_parameters;
use crate::precision::element_type;
use crate::recompute::BlockRecorder;
use crate::reduce::{GradientChecker, GradientReducer, ReducerPolicy, SumHome, Types};
use crate::session::{self, Binding, ContextGuard};
use crate::sharding::{
    Marker, ModuleParameter, ShardHomes, Sharder, Table, Training, Updates, in_shape, parameters_of,
};
use crate::share::Share;
use compression::ErrorFeedback;

use crate::tiers::{Parking, ShardTiers, StateTiers, swap_bytes};

pub(crate) use compression::error_bytes;
pub use pieces::{GradientSum, OwnedArray, Piece, RandomState, StateArray, StreamPosition};
pub use rank_arrays::OwnedState;
pub use step::StepOutcome;

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
    /// Parameters that are updated in another way.
    pub param_groups: ParamGroups,
    /// Which activations backward computes again, and where the others wait for it.
    pub activations: ActivationPlan,
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
    recorder: Rc<BlockRecorder<B>>,
    optimizer: Optimizer<B>,
    /// Compression errors by parameter index, after the first exchange.
    errors: Vec<Option<ErrorFeedback>>,
    /// Where states are that are not on the device.
    parking: Option<Parking>,
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
    /// When a parameter is not f32 or cannot be initialised, nothing is trainable, parameter groups do not fit
    /// the module, two layers share a running statistic, or the ranks' modules differ.
    pub fn shard<M: AutodiffModule<Training<B>>>(
        module: M,
        policy: Policy,
        group: Group<B>,
    ) -> Result<(M, Self), ZeroError> {
        let Policy { zero, reduction, precision, optimizer, param_groups, activations } = policy;
        if optimizer.exchanges_momentum() {
            check_whole_states(&zero)?;
        }
        let (compute, cuts_gradients) = (element_type(precision.compute), zero.shards_gradients());
        let (rank, stage, ledger) = (group.rank(), zero.stage, Ledger::new());
        let gatherer = Arc::new(Gatherer::new(group.clone(), zero.parameters, ledger.clone()));
        let share = Share { stage, rank, cuts_gradients };
        let working = (precision.compute != Precision::Fp32).then_some(compute);
        let types = Types {
            communication: element_type(precision.communication),
            accumulation: element_type(precision.accumulation),
        };
        let (module, buffers) = BufferTable::prepare(module, &group, &ledger)?;
        let known = parameters_of(&module, &buffers);
        let layers = known.iter().map(|it| (it.path.clone(), it.layer.clone())).collect();
        let updates = Updates { optimizer: &optimizer, groups: &param_groups, layers: &layers };
        let sizes = updated_sizes(&known, updates)?;
        let bytes = swap_bytes(&sizes, &zero, group.world_size(), &precision);
        let parking = Parking::new(&zero, &precision, bytes)?;
        let homes = ShardHomes {
            gatherer: stage.shards_parameters().then(|| Arc::downgrade(&gatherer)),
            parking: parking.as_ref(),
            tiers: ShardTiers::new(&zero),
            state_tiers: StateTiers::new(&sizes, &zero),
        };
        let states = Optimizer::new(working, parking.as_ref());
        let sharder =
            Sharder::new(group.clone(), share, homes, states, updates, ledger.clone(), &buffers);
        let (module, Table { parameters, indices, optimizer, aliases }) = sharder.shard(module)?;
        gatherer.serve(parameters.clone());

        let reducer = Rc::new(RefCell::new(GradientReducer::new(
            group.clone(),
            parameters.clone(),
            ReducerPolicy {
                plan: zero.gradients,
                reduction,
                types,
                shards: cuts_gradients,
                checker: GradientChecker::new(share, compute),
            },
            sum_homes(&parameters, share, &optimizer, parking.as_ref(), &ledger)?,
            ledger.clone(),
        )));
        let autocast = precision.autocast.map(element_type);
        let paths = parameters.iter().map(|parameter| parameter.path());
        let store = ActivationStore::new(
            &activations.offload,
            B::is_contiguous,
            group.clone(),
            ledger.clone(),
        )?;
        let recompute = activations.recompute;
        let recorder = Rc::new(BlockRecorder::new(recompute, store, ledger.clone(), paths));
        let binding = Binding::new(
            reducer.clone(),
            recorder.clone(),
            ledger.clone(),
            group.clone(),
            autocast,
        );
        let resident = match stage {
            Stage::Parameters => resident_parameters(&parameters, &group, &zero),
            _ => Vec::new(),
        };
        gatherer.refresh_resident(&resident)?;
        reducer.borrow_mut().set_mean(optimizer.takes_mean_gradients());
        let errors = parameters.iter().map(|_| None).collect();
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
            recorder,
            errors,
            optimizer,
            parking,
            compute,
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
    /// alone. In a `pass` of the model they also run under the plan's autocast, and the activations of a
    /// training pass are recomputed as the plan says. Calls nest.
    pub fn enter(&self, pass: Option<Pass>) -> ContextGuard {
        self.binding.enter(pass)
    }

    /// Starts this rank's random stream (dropout) anew from a seed that all ranks share. The oldest
    /// model on the thread also starts the stream of draws outside of calls.
    pub fn seed(&self, seed: u64) {
        self.binding.reseed(seed);
    }

    /// Prepares `module` for a forward and backward pass.
    pub fn start_training_pass<M: Module<Training<B>>>(&self, module: M) -> Result<M, ZeroError> {
        self.binding.with_counter(Counter::start_forward);
        self.recorder.start_forward();
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
        self.recorder.start_backward();
        session::refresh_recording();
    }

    /// Notices by itself when the backward pass of the present training pass begins: with its first
    /// final gradient. For callers that cannot call [`start_backward`](Self::start_backward).
    pub fn watch_for_backward(&self) {
        let (gatherer, recorder) = (self.gatherer.clone(), self.recorder.clone());
        self.reducer.borrow_mut().watch_for_backward(Box::new(move || {
            session::with_counter(Counter::start_backward);
            gatherer.start_backward();
            recorder.start_backward();
            session::refresh_recording();
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
        self.gatherer.release_all()?;
        self.stores().for_each(Store::release_idle);
        Ok(())
    }

    /// Whether gradients are reduced as they come; see the engine's `no_sync`.
    pub fn set_synchronise(&self, on: bool) {
        self.reducer.borrow_mut().set_synchronise(on);
    }

    /// Returns whether the optimizer replaces the reduction of gradients by an exchange of its own, at least in late
    /// steps.
    pub fn exchanges_momentum(&self) -> bool {
        self.optimizer.exchanges_momentum()
    }

    /// Names and values of the scalars that are kept of a parameter beside arrays: those of 1-bit LAMB, none otherwise.
    pub fn scalars(&self, index: usize) -> Vec<(&'static str, f64)> {
        self.optimizer.scalars(index)
    }

    /// Replaces all scalars by what `read` gives for a module path and a name, or by those of a new run, after
    /// [`load_moments`](Self::load_moments).
    pub fn load_scalars(&mut self, read: impl Fn(&str, &str) -> Option<f64>) {
        for parameter in self.parameters.iter() {
            self.optimizer.set_scalars(parameter.index(), |name| read(parameter.path(), name));
        }
    }

    /// Whether the optimizer is one whose ranks take steps of their own, at least in late steps.
    pub fn takes_local_steps(&self) -> bool {
        self.optimizer.takes_local_steps()
    }

    /// Returns the name of the quantity that optimizer step number `step` compresses, from 1, or `None` without
    /// compression. Compression errors of one quantity are of no use for another.
    pub fn compressed_quantity(&self, step: u64) -> Option<&'static str> {
        self.optimizer.compressed_quantity(step)
    }

    /// Returns whether the current step averages gradients over ranks. Otherwise each rank keeps its own, and a 1-bit
    /// optimizer averages momenta in the step.
    pub fn takes_mean_gradients(&self) -> bool {
        self.reducer.borrow().takes_mean()
    }

    /// How many micro-batches make a step, from the next one on; 1 before this is called.
    pub fn set_micro_batches(&self, count: usize) {
        self.reducer.borrow_mut().set_micro_batches(count);
    }

    /// Forgets all accumulated gradients.
    pub fn zero_grad(&self) {
        self.reducer.borrow_mut().clear();
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

    /// What was read from and written to the files of offloaded states and activations; `None` where there
    /// are none.
    pub fn io_statistics(&self) -> Option<IoStatistics> {
        self.stores().filter_map(Store::io_statistics).reduce(|sum, of_one| sum + of_one)
    }

    /// Where states and activations are offloaded to.
    fn stores(&self) -> impl Iterator<Item = &Store> {
        let states = self.parking.as_ref().map(|parking| parking.store());
        let activations = self.recorder.store().map(ActivationStore::store);
        states.into_iter().chain(activations)
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

    /// The whole values of parameter `index` in the type that ops use: between two exchanges of 0/1 Adam
    /// ([`local_rates`](Self::local_rates)) those of this rank. All ranks call this together.
    pub fn parameter_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let parameter = &self.parameters[index];
        let whole = match parameter.shard() {
            Some(_) if !parameter.is_resident() => self.gatherer.gather_once(index)?,
            _ => parameter.read(),
        };
        Ok(read_float::<B>(whole))
    }

    /// The whole values of parameter `index` in full precision: its masters where ops use 16 bits.
    /// A frozen parameter has none, and gives what ops use. Between two exchanges of 0/1 Adam they are those of
    /// this rank. All ranks call this together.
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
        let reducer = self.reducer.borrow();
        let Some(sum) = reducer.accumulated(parameter.index()) else { return Ok(None) };
        let sum = sum.tensor(parameter.device())?;
        let flat = if self.share.cuts_gradients {
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
}

/// Refuses plans that shard or offload states. A compressed exchange needs them whole, on the device.
fn check_whole_states(zero: &ZeroPlan) -> Result<(), ZeroError> {
    let reason = match zero.stage {
        Stage::Disabled if zero.optimizer_states == OptimizerOffload::Device => return Ok(()),
        Stage::Disabled => "this plan offloads them".to_owned(),
        stage => format!("ZeRO stage {} shards them", stage.number()),
    };
    Err(ZeroError::MomentumExchange { reason })
}

/// The sizes of all parameters, once it is clear how each is updated.
fn updated_sizes(
    parameters: &[ModuleParameter],
    Updates { optimizer, groups, .. }: Updates<'_>,
) -> Result<Vec<ParameterSize>, ZeroError> {
    let known: Vec<_> = parameters.iter().map(ModuleParameter::described).collect();
    let trained: Vec<_> = groups
        .assign(optimizer, &known)?
        .into_iter()
        .zip(parameters)
        .map(|(settings, parameter)| settings.filter(|_| parameter.is_trainable))
        .collect();
    let is_muon = matches!(optimizer, OptimizerPlan::Muon(_));
    if is_muon && !trained.iter().flatten().any(|settings| settings.matrices.is_some()) {
        return Err(ParamGroups::no_matrix(&known).into());
    }
    let size = |(parameter, settings): (&ModuleParameter, &Option<UpdateSettings>)| {
        let numel = parameter.shape.iter().product::<usize>() as u64;
        ParameterSize::new(numel, settings.as_ref().map(|settings| &settings.optimizer))
    };
    Ok(parameters.iter().zip(&trained).map(size).collect())
}

/// Parameters of which every rank keeps a whole copy beside its shard. On one rank a shard on the device is that
/// copy.
fn resident_parameters<B: Backend>(
    parameters: &[Arc<Parameter<B>>],
    group: &Group<B>,
    zero: &ZeroPlan,
) -> Vec<usize> {
    let numels = parameters.iter().map(|parameter| parameter.numel() as u64);
    let mut resident = persistent_parameters(numels, &zero.parameters);
    resident.retain(|index| group.world_size() > 1 || parameters[*index].parked().is_some());
    resident
}

/// Where the gradient sums of all parameters are kept: with the optimizer states.
fn sum_homes<B: OptimizerOps>(
    parameters: &[Arc<Parameter<B>>],
    share: Share,
    optimizer: &Optimizer<B>,
    parking: Option<&Parking>,
    ledger: &Ledger,
) -> Result<Vec<SumHome>, ZeroError> {
    let home = |parameter: &Arc<Parameter<B>>| match parking {
        Some(parking) if optimizer.is_parked(parameter.index()) => {
            Ok(parking.sum_home(share.len(parameter.partition()), ledger)?)
        }
        _ => Ok(SumHome::Device),
    };
    parameters.iter().map(home).collect()
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
