//! The model states of one rank: parameters, gradients, optimizer states, and what moves them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn_backend::{Backend, Shape, TensorData};
use deepburn_comm::{CommError, Tag};
use deepburn_config::{GatherPlan, OptimizerPlan, ReductionPlan, Stage, ZeroPlan};
use deepburn_kernels::{sum_of_squares, unscale_and_clip};

use crate::array::{DeviceArray, flat_range};
use crate::error::ZeroError;
use crate::gather::{Gatherer, Pass};
use crate::group::Group;
use crate::host_data::{float_from_host, float_into_host, read_float};
use crate::ledger::Ledger;
use crate::optimizer::Optimizer;
use crate::parameter::Parameter;
use crate::random::RandomStream;
use crate::reduce::GradientReducer;
use crate::session::{self, Binding};
use crate::sharding::{Marker, Sharder, Table, Training, in_shape};

/// How the states of a model are kept.
#[derive(Debug, Clone)]
pub struct Policy {
    /// What is sharded, and how it travels.
    pub zero: ZeroPlan,
    /// How gradients of different ranks become one.
    pub reduction: ReductionPlan,
    /// The optimizer.
    pub optimizer: OptimizerPlan,
}

/// What an optimizer step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Global L2 norm of the gradients before clipping.
    pub gradient_norm: f64,
}

/// The states of a sharded model on one rank. Bound to the thread that made it.
pub struct ModelStates<B: Backend> {
    group: Group<B>,
    share: Share,
    parameters: Arc<[Arc<Parameter<B>>]>,
    indices: HashMap<ParamId, usize>,
    gatherer: Arc<Gatherer<B>>,
    /// Parameters that stay whole at stage 3.
    resident: Vec<usize>,
    reducer: Rc<RefCell<GradientReducer<B>>>,
    optimizer: Optimizer,
    allgather_bucket_size: usize,
    ignore_unused: bool,
    ledger: Ledger,
    binding: Binding,
}

impl<B: Backend> ModelStates<B> {
    /// Shards `module` over `group` as `policy` says; every rank starts from the values of rank 0.
    /// The returned module is used like the one passed in.
    ///
    /// # Errors
    /// When a parameter is not f32, nothing is trainable, or the ranks' modules differ.
    pub fn shard<M: Module<Training<B>>>(
        module: M,
        policy: Policy,
        group: Group<B>,
    ) -> Result<(M, Self), ZeroError> {
        let Policy { zero, reduction, optimizer } = policy;
        let (rank, stage, ledger) = (group.rank(), zero.stage, Ledger::new());
        let gatherer = Arc::new(Gatherer::new(group.clone(), zero.parameters, ledger.clone()));
        let through = stage.shards_parameters().then(|| Arc::downgrade(&gatherer));
        let sharder = Sharder::new(group.clone(), through, ledger.clone());
        let (module, Table { parameters, indices }) = sharder.shard(module)?;
        gatherer.serve(parameters.clone());

        let reducer = Rc::new(RefCell::new(GradientReducer::new(
            group.clone(),
            parameters.clone(),
            zero.gradients,
            &reduction,
            stage.shards_gradients(),
            ledger.clone(),
        )));
        let share = Share { stage, rank };
        let owned = |p: &Arc<Parameter<B>>| p.is_trainable().then(|| share.updated(p).len());
        let owned: Vec<_> = parameters.iter().map(owned).collect();
        let optimizer = Optimizer::new(optimizer, &owned, &ledger);
        let random = RandomStream::new(0, rank);
        let binding = Binding::new(reducer.clone(), ledger.clone(), random, group.clone());
        let resident = match stage {
            Stage::Parameters => resident(&parameters, &zero.parameters),
            _ => Vec::new(),
        };
        gatherer.refresh_resident(&resident)?;
        let states = Self {
            group,
            share,
            parameters,
            indices,
            gatherer,
            resident,
            reducer,
            optimizer,
            allgather_bucket_size: zero.allgather_bucket_size,
            ignore_unused: zero.gradients.ignore_unused_parameters,
            ledger,
            binding,
        };
        Ok((module, states))
    }

    /// Starts this rank's random stream (dropout) anew from a seed that all ranks share.
    pub fn seed(&self, seed: u64) {
        session::reseed(seed);
    }

    /// Prepares `module` for a forward and backward pass.
    pub fn start_training_pass<M: Module<Training<B>>>(&self, module: M) -> Result<M, ZeroError> {
        self.gatherer.start_pass(Pass::Train)?;
        let mark = |index| self.binding.mark(index);
        Ok(module.map(&mut Marker { indices: &self.indices, mark }))
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
        self.gatherer.start_backward();
    }

    /// Ends a pass: nothing stays gathered but resident parameters.
    pub fn finish_pass(&self) -> Result<(), ZeroError> {
        Ok(self.gatherer.release_all()?)
    }

    /// Whether gradients are reduced as they come; see the engine's `no_sync`.
    pub fn set_synchronise(&self, on: bool) {
        self.reducer.borrow_mut().set_synchronise(on);
    }

    /// Forgets all accumulated gradients.
    pub fn zero_grad(&self) {
        self.reducer.borrow_mut().clear();
    }

    /// Updates the parameters with the accumulated gradients and clears them. All ranks call this
    /// together. `betas` replace the optimizer's own where a schedule cycles momentum.
    ///
    /// # Errors
    /// When a gradient is not finite: then nothing was updated.
    pub fn step(
        &mut self,
        lr: f64,
        betas: Option<[f64; 2]>,
        clip: Option<f64>,
    ) -> Result<StepReport, ZeroError> {
        let gradients = self.take_gradients()?;
        let gradient_norm = self.global_norm(&gradients)?;
        let scale = unscale_and_clip(gradient_norm, 1.0, clip) as f32;
        self.update(gradients, lr, betas, scale)?;
        self.gatherer.refresh_resident(&self.resident)?;
        Ok(StepReport { gradient_norm })
    }

    /// The parameters in the order of the module.
    pub fn parameters(&self) -> &[Arc<Parameter<B>>] {
        &self.parameters
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

    /// The whole values of parameter `index`. All ranks call this together.
    pub fn parameter_data(&self, index: usize) -> Result<TensorData, ZeroError> {
        let parameter = &self.parameters[index];
        let whole = match parameter.shard() {
            Some(_) if !parameter.is_resident() => self.gatherer.gather_once(index)?,
            _ => parameter.read(),
        };
        Ok(read_float::<B>(whole))
    }

    /// The whole accumulated gradient of the parameter at `path`; `None` if it got none. All
    /// ranks call this together, between backward and step.
    pub fn gradient_data(&self, path: &str) -> Result<Option<TensorData>, ZeroError> {
        let parameter = self.parameters.iter().find(|parameter| parameter.path() == path);
        let Some(parameter) = parameter else {
            return Err(ZeroError::UnknownParameter { path: path.to_owned() });
        };
        let Some(sum) = self.reducer.borrow().accumulated(parameter.index()) else {
            return Ok(None);
        };
        let flat = if self.share.stage.shards_gradients() {
            let tag = Tag::new("gradient data", parameter.index() as u64);
            let chunks = vec![DeviceArray::Dense(sum)];
            let group = self.group.arrays();
            let mut whole = group.all_gather(tag, chunks, vec![parameter.numel()])?.wait()?;
            whole.swap_remove(0).into_flat()
        } else {
            sum
        };
        Ok(Some(read_float::<B>(in_shape::<B>(flat, parameter.shape()))))
    }

    /// The accumulated gradients as host memory, by parameter index; a parameter that was not
    /// used counts as zero.
    fn take_gradients(&self) -> Result<Vec<Option<Vec<f32>>>, ZeroError> {
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
        Ok(taken.into_iter().map(|sum| sum.map(float_into_host::<B>)).collect())
    }

    /// L2 norm over all parameters: each rank sums the squares it owns, padding excluded, and the
    /// ranks' sums are added in rank order. The cut is the same at every stage, and so is the sum.
    fn global_norm(&self, gradients: &[Option<Vec<f32>>]) -> Result<f64, ZeroError> {
        let mut squares = 0.0;
        let mut first_bad = None;
        for (parameter, gradient) in self.parameters.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                let owned = parameter.partition().owned(self.share.rank);
                let sum = sum_of_squares(&gradient[self.share.in_gradient(owned)]);
                squares += sum;
                if !sum.is_finite() && first_bad.is_none() {
                    first_bad = Some(parameter.index());
                }
            }
        }
        let total = self.group.sum(Tag::new("gradient norm", 0), vec![squares])?[0];
        if total.is_finite() {
            return Ok(total.sqrt());
        }
        // The smallest index over the ranks, as the largest negative one.
        let mine = first_bad.map_or(f64::NEG_INFINITY, |index| -(index as f64));
        let first = -self.group.max(Tag::new("gradient norm", 1), vec![mine])?[0];
        let path = self.parameters[first as usize].path().to_owned();
        Err(ZeroError::GradientNotFinite { path })
    }

    /// Updates every trainable parameter, then hands updated shards round where they are not
    /// what a rank keeps (stages 1 and 2).
    fn update(
        &mut self,
        gradients: Vec<Option<Vec<f32>>>,
        lr: f64,
        betas: Option<[f64; 2]>,
        scale: f32,
    ) -> Result<(), ZeroError> {
        let share = self.share;
        let mut publisher = Publisher::new(&self.group, self.allgather_bucket_size);
        let mut update = self.optimizer.start_step(lr, betas, scale);
        for (parameter, gradient) in self.parameters.iter().zip(gradients) {
            if !parameter.is_trainable() {
                continue;
            }
            let updated = share.updated(parameter);
            let unused = || vec![0.0; share.gradient_len(parameter)];
            let gradient = gradient.unwrap_or_else(unused);
            let mut values = share.take_values(parameter);
            let range = share.in_gradient(updated.clone());
            update(parameter.index(), &mut values[..updated.len()], &gradient[range]);
            drop(gradient);
            match share.put_values(parameter, values) {
                Some(shard) => publisher.enter(parameter, shard)?,
                None => continue,
            }
        }
        publisher.flush()?;
        Ok(())
    }
}

/// What one rank keeps and updates of a parameter at a stage.
#[derive(Debug, Clone, Copy)]
struct Share {
    stage: Stage,
    rank: usize,
}

impl Share {
    /// Elements that this rank updates: all at stage 0, those it owns from stage 1 on.
    fn updated<B: Backend>(self, parameter: &Parameter<B>) -> Range<usize> {
        if self.stage.shards_optimizer() {
            parameter.partition().owned(self.rank)
        } else {
            0..parameter.numel()
        }
    }

    /// Elements of the gradient that this rank keeps.
    fn gradient_len<B: Backend>(self, parameter: &Parameter<B>) -> usize {
        if self.stage.shards_gradients() {
            parameter.partition().shard_len()
        } else {
            parameter.numel()
        }
    }

    /// Where elements `range` of the parameter are in the kept gradient.
    fn in_gradient(self, range: Range<usize>) -> Range<usize> {
        if self.stage.shards_gradients() { 0..range.len() } else { range }
    }

    /// Takes the updated elements out of a parameter, perhaps with padding behind them. Whole
    /// parameters of stages 1 and 2 are let go here, before their successors arrive.
    fn take_values<B: Backend>(self, parameter: &Parameter<B>) -> Vec<f32> {
        let stored = parameter.take();
        match self.stage {
            Stage::Disabled | Stage::Parameters => float_into_host::<B>(stored),
            Stage::OptimizerStates | Stage::Gradients => {
                float_into_host::<B>(flat_range::<B>(&stored, self.updated(parameter)))
            }
        }
    }

    /// Puts updated elements back, or returns them as a shard for the other ranks.
    fn put_values<B: Backend>(
        self,
        parameter: &Parameter<B>,
        mut values: Vec<f32>,
    ) -> Option<B::FloatTensorPrimitive> {
        let shape = match self.stage {
            Stage::Disabled => parameter.shape().clone(),
            _ => {
                values.resize(parameter.partition().shard_len(), 0.0);
                Shape::from(vec![values.len()])
            }
        };
        let tensor = float_from_host::<B>(TensorData::new(values, shape), parameter.device());
        match self.stage {
            Stage::Disabled | Stage::Parameters => {
                parameter.put(tensor);
                None
            }
            Stage::OptimizerStates | Stage::Gradients => Some(tensor),
        }
    }
}

/// All-gathers updated shards into whole parameters, many in one message.
struct Publisher<'a, B: Backend> {
    group: &'a Group<B>,
    bucket_size: usize,
    bucket: Vec<(Arc<Parameter<B>>, B::FloatTensorPrimitive)>,
}

impl<'a, B: Backend> Publisher<'a, B> {
    fn new(group: &'a Group<B>, bucket_size: usize) -> Self {
        Self { group, bucket_size, bucket: Vec::new() }
    }

    fn enter(
        &mut self,
        parameter: &Arc<Parameter<B>>,
        shard: B::FloatTensorPrimitive,
    ) -> Result<(), CommError> {
        let held: usize = self.bucket.iter().map(|(parameter, _)| parameter.numel()).sum();
        if held > 0 && held + parameter.numel() > self.bucket_size {
            self.flush()?;
        }
        self.bucket.push((parameter.clone(), shard));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CommError> {
        let Some((first, _)) = self.bucket.first() else {
            return Ok(());
        };
        let tag = Tag::new("updated parameters", first.index() as u64);
        let numels = self.bucket.iter().map(|(parameter, _)| parameter.numel()).collect();
        let (parameters, shards): (Vec<_>, Vec<_>) = self
            .bucket
            .drain(..)
            .map(|(parameter, shard)| (parameter, DeviceArray::Dense(shard)))
            .unzip();
        let whole = self.group.arrays().all_gather(tag, shards, numels)?.wait()?;
        for (parameter, array) in parameters.into_iter().zip(whole) {
            parameter.put(in_shape::<B>(array.into_flat(), parameter.shape()));
        }
        Ok(())
    }
}

/// Parameters small enough to stay whole, in model order until the limit for all is reached.
fn resident<B: Backend>(parameters: &[Arc<Parameter<B>>], plan: &GatherPlan) -> Vec<usize> {
    let mut total = 0usize;
    let small = parameters.iter().filter(|p| p.numel() <= plan.persistence_threshold);
    small
        .take_while(|parameter| {
            total = total.saturating_add(parameter.numel());
            total <= plan.model_persistence_threshold
        })
        .map(|parameter| parameter.index())
        .collect()
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
