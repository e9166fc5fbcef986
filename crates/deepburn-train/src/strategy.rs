//! The training strategy that runs a Learner on the ranks of a plan.
//!
//! Main type: [`ShardedStrategy`].
//!
//! ```text
//! train   check plan, Learner and settings ─► Burn's own `train` ─► fit
//! fit     split model and data by rank ─► one thread per rank runs a `Worker` ─► whole model of rank 0
//! ```
//!
//! The Learner's model is copied once per rank and then emptied. Each copy is consumed while its
//! engine shards it. At the start, each rank therefore holds the complete model; later, only its
//! shards and the states that the stage replicates.
//!
//! Burn's interface returns no errors. A failure therefore panics, after the renderer has restored
//! the terminal.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_train::checkpoint::{
    CheckpointingStrategy, ComposedCheckpointingStrategy, KeepLastNCheckpoints,
    MetricCheckpointingStrategy,
};
use burn_train::metric::LossMetric;
use burn_train::metric::store::{Aggregate, Direction, Split};
use burn_train::{
    EventProcessorTraining, Learner, LearningComponentsTypes, LearningResult,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents,
    TrainingStrategy, ValidLoader,
};
use deepburn::BoxError;
use deepburn::COLLECTIVE_TIMEOUT;
use deepburn::comm::Placement;
use deepburn::config::{BatchPlan, Plan};
use deepburn::ops::{OptimizerOps, StreamOps};
use deepburn::zero::Training;

use crate::loaders::{equal_ranges, exact_ranges, slices};
use crate::optimizer::check_optimizer;
use crate::outputs::{Outputs, lock};
use crate::refusal::{Refusal, check_plan, check_settings};
use crate::worker::{Epochs, InitialState, LearnerRun, Worker};

/// A strategy that trains a `Learner` sharded over the ranks of a plan. See the [crate's
/// documentation](crate).
pub struct ShardedStrategy<B: Backend> {
    /// The resolved configuration, which sets the number of ranks.
    plan: Plan,
    /// The devices of the ranks; empty uses the device of the Learner's model.
    devices: Vec<B::Device>,
    /// The seed of the random streams.
    seed: Option<u64>,
    /// The folder of checkpoints.
    folder: Option<PathBuf>,
    /// The strategy that decides which checkpoints are kept. Burn passes strategies by shared
    /// reference, hence the lock.
    keep: Mutex<Box<dyn CheckpointingStrategy>>,
}

impl<B: Backend> ShardedStrategy<B> {
    /// Creates a strategy from a resolved configuration, which sets the number of ranks.
    pub fn new(plan: Plan) -> Self {
        let best = MetricCheckpointingStrategy::new(
            &LossMetric::<B>::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
        );
        let keep = ComposedCheckpointingStrategy::builder()
            .add(KeepLastNCheckpoints::new(2))
            .add(best)
            .build();
        Self {
            plan,
            devices: Vec::new(),
            seed: None,
            folder: None,
            keep: Mutex::new(Box::new(keep)),
        }
    }

    /// Sets the folder in which checkpoints are saved and from which training resumes. Without a
    /// folder nothing is saved.
    #[must_use]
    pub fn checkpoints(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Sets the strategy that decides after which epochs a checkpoint is saved and which ones are
    /// deleted. By default the last two are kept, and the one with the lowest validation loss if
    /// `LossMetric` is registered.
    #[must_use]
    pub fn keep(mut self, strategy: impl CheckpointingStrategy + 'static) -> Self {
        self.keep = Mutex::new(Box::new(strategy));
        self
    }

    /// Places rank `r` on `devices[r % devices.len()]`. By default all ranks use the device of the
    /// Learner's model.
    #[must_use]
    pub fn devices(mut self, devices: Vec<B::Device>) -> Self {
        self.devices = devices;
        self
    }

    /// Seeds the random streams of the ranks, for example for dropout. Each rank derives its own
    /// stream. The default is 0; seeding the backend has no effect on ranks.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Returns the device of each rank.
    fn rank_devices(&self, of_model: &[B::Device]) -> Vec<B::Device> {
        let devices = if self.devices.is_empty() { of_model } else { &self.devices };
        let ranks = 0..self.plan.mesh.world_size();
        ranks
            .map(|rank| devices.get(rank % devices.len().max(1)).cloned().unwrap_or_default())
            .collect()
    }
}

impl<B, LC> From<ShardedStrategy<B>> for TrainingStrategy<LC>
where
    B: OptimizerOps + StreamOps,
    LC: LearningComponentsTypes<Backend = Training<B>> + Send + 'static,
{
    fn from(strategy: ShardedStrategy<B>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

impl<B, LC> SupervisedLearningStrategy<LC> for ShardedStrategy<B>
where
    B: OptimizerOps + StreamOps,
    LC: LearningComponentsTypes<Backend = Training<B>> + Send + 'static,
{
    /// Checks the settings, then trains like Burn's own strategies.
    ///
    /// # Panics
    /// Panics before training starts if the Learner and the plan cannot be combined, and later if a
    /// rank fails.
    fn train(
        &self,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        settings: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        if let Err(refusal) = self.check(&learner, &train, &settings) {
            give_up::<LC>(settings.event_processor, &refusal);
        }
        CheckedStrategy(self).train(learner, train, valid, settings)
    }

    /// Trains without checking the settings.
    ///
    /// # Panics
    /// Panics if a rank fails.
    fn fit(
        &self,
        settings: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (LC::TrainingModel, SupervisedTrainingEventProcessor<LC>) {
        CheckedStrategy(self).fit(settings, learner, train, valid, starting_epoch)
    }
}

/// A strategy whose settings were checked. It gives access to Burn's provided `train`, which a type
/// that overrides it cannot call.
struct CheckedStrategy<'a, B: Backend>(&'a ShardedStrategy<B>);

impl<B, LC> SupervisedLearningStrategy<LC> for CheckedStrategy<'_, B>
where
    B: OptimizerOps + StreamOps,
    LC: LearningComponentsTypes<Backend = Training<B>> + Send + 'static,
{
    /// Trains on all ranks and returns the complete model.
    ///
    /// # Panics
    /// Panics if a rank fails.
    fn fit(
        &self,
        settings: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (LC::TrainingModel, SupervisedTrainingEventProcessor<LC>) {
        let ShardedStrategy { plan, seed, folder, keep, .. } = self.0;
        let ranks = plan.mesh.world_size();
        let devices = self.0.rank_devices(&learner.model().devices());
        let states = split(&mut learner, &train, &valid, &devices);
        // Every rank has its own copy, so these values would only occupy memory.
        drop((learner, train, valid));
        // A rank takes its own state, which then is dropped with the rank.
        let states: Vec<_> = states.into_iter().map(|state| Mutex::new(Some(state))).collect();
        // All ranks borrow the processor, and the caller gets it back after the run.
        let processor = Mutex::new(settings.event_processor);
        let run = LearnerRun {
            plan,
            seed: *seed,
            epochs: Epochs {
                first: starting_epoch,
                last: settings.num_epochs,
                resume: settings.checkpoint,
            },
            interrupter: &settings.interrupter,
            processor: &processor,
            store: &settings.event_store,
            early_stopping: Mutex::new(settings.early_stopping),
            folder: folder.as_deref(),
            keep,
            train_outputs: Outputs::new(ranks),
            valid_outputs: Outputs::new(ranks),
        };
        let trained = deepburn::Ranks::threads().run::<B, _>(ranks, COLLECTIVE_TIMEOUT, |group| {
            let rank = group.rank();
            let Some(initial) = lock(&states[rank]).take() else {
                return Err(BoxError::from("a rank ran twice"));
            };
            Worker::<B, LC>::new(&run, initial, devices[rank].clone(), group)?.fit()
        });
        drop(run);
        let processor = processor.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failure = match trained {
            Ok(models) => match models.into_iter().flatten().next() {
                Some(model) => return (model, processor),
                None => "no rank returned a model".to_owned(),
            },
            Err(failure) => failure.to_string(),
        };
        give_up::<LC>(processor, &failure)
    }
}

impl<B: OptimizerOps + StreamOps> ShardedStrategy<B> {
    /// Checks Learner, plan and settings before any rank starts.
    ///
    /// # Errors
    /// Returns the first setting that is not supported or contradicts another one.
    fn check<LC>(
        &self,
        learner: &Learner<LC>,
        train: &TrainLoader<LC>,
        settings: &TrainingComponents<LC>,
    ) -> Result<(), Refusal>
    where
        LC: LearningComponentsTypes<Backend = Training<B>>,
    {
        if let Some(Placement { launcher, world_size, .. }) = Placement::detect()?
            && world_size > 1
        {
            return Err(Refusal::Launched { launcher, world_size });
        }
        check_plan(&self.plan)?;
        check_settings(&self.plan, settings, self.folder.is_some())?;
        if train.num_items() == 0 {
            return Err(Refusal::NoData);
        }
        // The scheduler takes one step per update.
        let BatchPlan { micro_batch_size, gradient_accumulation_steps, data_parallel_size, .. } =
            self.plan.batch;
        let batches = train.num_items().div_ceil(data_parallel_size).div_ceil(micro_batch_size);
        let updates = batches.div_ceil(gradient_accumulation_steps);
        // A schedule that was sized for the batches of one device would end early.
        tracing::info!(
            "an epoch has {updates} updates, and the learning-rate scheduler takes one step for each"
        );
        check_optimizer(learner, &self.plan.optimizer, updates * settings.num_epochs)
    }
}

/// Returns the initial state of each rank. The Learner keeps no parameters, because they would stay
/// in memory in addition to the shards.
fn split<B, LC>(
    learner: &mut Learner<LC>,
    train: &TrainLoader<LC>,
    valid: &ValidLoader<LC>,
    devices: &[B::Device],
) -> Vec<InitialState<LC>>
where
    B: OptimizerOps,
    LC: LearningComponentsTypes<Backend = Training<B>>,
{
    let whole = learner.model();
    // The copies are made without autodiff. Plain clones would share running statistics and the
    // leaves of autodiff, which would join the graphs of the ranks.
    let models: Vec<_> = devices
        .iter()
        .map(|device| LC::TrainingModel::from_inner(whole.valid()).fork(device))
        .collect();
    learner.load_model(whole.map(&mut Hollow).into_record());
    let trains = slices(train, devices, equal_ranges);
    let valids = slices(valid, devices, exact_ranges);
    // One item is enough, because its result is discarded.
    let filler = valid.slice(0, valid.num_items().min(1));
    let loaders = trains.into_iter().zip(valids);
    let states = models.into_iter().zip(loaders).zip(devices);
    states
        .map(|((model, (train, valid)), device)| InitialState {
            model,
            learner: learner.clone(),
            train,
            valid,
            filler: filler.to_device(device),
        })
        .collect()
}

/// A mapper that replaces each trainable parameter with an empty tensor.
struct Hollow;

impl<B: AutodiffBackend> ModuleMapper<B> for Hollow {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        // A parameter that is not trained may be a running statistic, which clones of the module
        // share.
        let tensor = match tensor.is_require_grad() {
            true => Tensor::empty([0; D], &tensor.device()).require_grad(),
            false => tensor,
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Closes the renderer, which restores the terminal, and panics with `reason`.
fn give_up<LC: LearningComponentsTypes>(
    processor: SupervisedTrainingEventProcessor<LC>,
    reason: &dyn Display,
) -> ! {
    // If the processor's own thread has panicked, this call panics too.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(processor.renderer())));
    panic!("sharded training: {reason}");
}
