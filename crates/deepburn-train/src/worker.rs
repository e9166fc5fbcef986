//! The training loop of one rank under burn-train.
//!
//! Main type: `Worker`. Each rank is a thread with its own engine. All ranks run the same
//! collectives, which are shown in brackets:
//!
//! ```text
//! next batch ─► [agree: stop? batches? items?] ─► rank 0 reports the outputs of the previous micro-batch
//!            ─► scheduler step, at the first micro-batch of an update
//!            ─► TrainStep::step on the sharded module [gathers, gradients]
//!            ─► engine.step, at an accumulation boundary [norm, parameters]
//!            ─► deposit the output
//! end        ─► update with the micro-batches of an incomplete accumulation [norm, parameters]
//! ```
//!
//! The metrics are computed by Burn's event processor, which only rank 0 calls. It is another
//! thread, where reading a sharded parameter is an error instead of a hang. Outputs of a
//! micro-batch are complete once the ranks have agreed on the next one, so they are reported one
//! micro-batch late.
//!
//! The engine trains, and the Learner's scheduler and strategies control it: the scheduler takes
//! one step per update, and its learning rate is set before the update. Rank 0 queries the
//! strategies for early stopping and checkpoints and shares their decisions.

use std::path::Path;
use std::sync::Mutex;

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn_train::checkpoint::{CheckpointingAction, CheckpointingStrategy};
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner,
    LearnerEvent, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader,
    TrainStep, TrainingItem, ValidLoader,
};
use deepburn::comm::CollectiveTag;
use deepburn::config::Plan;
use deepburn::ops::OptimizerOps;
use deepburn::zero::{Group, Training};
use deepburn::{BoxError, Engine};

use crate::checkpoints::{self, LearnerState};
use crate::gradients::check_gradients;
use crate::outputs::{EpochItems, Output, Outputs, lock};

/// The output of a training step, for metrics.
type TrainItem<LC> = <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Output;
/// The output of a validation step, for metrics.
type ValidItem<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;
/// An early-stopping strategy of any type.
pub(crate) type BoxEarlyStopping = Box<dyn CloneEarlyStoppingStrategy>;

/// The state that all ranks of a run share. Only rank 0 uses the values behind a lock.
pub(crate) struct LearnerRun<'a, LC: LearningComponentsTypes> {
    /// The resolved configuration.
    pub(crate) plan: &'a Plan,
    /// The seed of the random streams; `None` for the default.
    pub(crate) seed: Option<u64>,
    /// The epochs of the run.
    pub(crate) epochs: Epochs,
    /// Requests the end of training, from any thread.
    pub(crate) interrupter: &'a Interrupter,
    /// Burn's event processor, which updates metrics and the renderer.
    pub(crate) processor: &'a Mutex<SupervisedTrainingEventProcessor<LC>>,
    /// The metrics so far, which strategies read.
    pub(crate) store: &'a EventStoreClient,
    /// The early-stopping strategy, if there is one.
    pub(crate) early_stopping: Mutex<Option<BoxEarlyStopping>>,
    /// The folder of checkpoints; `None` saves nothing.
    pub(crate) folder: Option<&'a Path>,
    /// The strategy that decides which checkpoints are saved and deleted.
    pub(crate) keep: &'a Mutex<Box<dyn CheckpointingStrategy>>,
    /// The training outputs of all ranks that were not reported yet.
    pub(crate) train_outputs: Outputs<TrainItem<LC>>,
    /// The validation outputs of all ranks that were not reported yet.
    pub(crate) valid_outputs: Outputs<ValidItem<LC>>,
}

/// The epochs of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epochs {
    /// The number of the first epoch.
    pub(crate) first: usize,
    /// The number of the last epoch, from 1.
    pub(crate) last: usize,
    /// The epoch after which to resume; `None` for a new run.
    pub(crate) resume: Option<usize>,
}

/// The initial state of a rank.
pub(crate) struct InitialState<LC: LearningComponentsTypes> {
    /// The model, which the engine shards.
    pub(crate) model: LC::TrainingModel,
    /// Used for its scheduler; its model holds no parameters.
    pub(crate) learner: Learner<LC>,
    /// The training data of this rank.
    pub(crate) train: TrainLoader<LC>,
    /// The validation data of this rank.
    pub(crate) valid: ValidLoader<LC>,
    /// Arbitrary validation items. A rank without a batch evaluates them while other ranks still
    /// have batches.
    pub(crate) filler: ValidLoader<LC>,
}

/// The values on which ranks agree before a micro-batch.
struct Agreement {
    /// Whether a rank was asked to stop.
    stop: bool,
    /// The number of ranks that have a batch.
    with_batch: usize,
    /// The number of items over all ranks.
    items: usize,
}

/// The decisions of rank 0 at the end of an epoch.
struct Decision {
    /// Whether to save a checkpoint of this epoch.
    save: bool,
    /// Whether training ends early.
    stop: bool,
    /// The epochs whose checkpoints are deleted.
    delete: Vec<usize>,
}

/// The state of one rank.
pub(crate) struct Worker<'a, B: OptimizerOps, LC: LearningComponentsTypes<Backend = Training<B>>> {
    /// The state that all ranks share.
    run: &'a LearnerRun<'a, LC>,
    /// The sharded model with its optimizer.
    engine: Engine<B, LC::TrainingModel>,
    /// The Learner, for its scheduler.
    learner: Learner<LC>,
    /// The training data of this rank.
    train: TrainLoader<LC>,
    /// The validation data of this rank.
    valid: ValidLoader<LC>,
    /// Validation items for a rank without a batch.
    filler: ValidLoader<LC>,
    /// The device of this rank.
    device: B::Device,
    /// The number of steps that the scheduler has taken, which checkpoints store.
    scheduler_steps: u64,
}

impl<'a, B, LC> Worker<'a, B, LC>
where
    B: OptimizerOps,
    LC: LearningComponentsTypes<Backend = Training<B>>,
{
    /// Shards the model and, if requested, loads a checkpoint.
    pub(crate) fn new(
        run: &'a LearnerRun<'a, LC>,
        initial: InitialState<LC>,
        device: B::Device,
        group: Group<B>,
    ) -> Result<Self, BoxError> {
        let InitialState { model, learner, train, valid, filler } = initial;
        let mut engine = deepburn::initialize(model, run.plan, group)?;
        if let Some(seed) = run.seed {
            engine.seed(seed);
        }
        let mut worker =
            Self { run, engine, learner, train, valid, filler, device, scheduler_steps: 0 };
        if let (Some(epoch), Some(folder)) = (run.epochs.resume, run.folder) {
            worker.resume(folder, epoch)?;
        }
        Ok(worker)
    }

    /// Trains all epochs and returns the complete model on rank 0.
    ///
    /// # Errors
    /// Returns the first failure of this rank.
    pub(crate) fn fit(mut self) -> Result<Option<LC::TrainingModel>, BoxError> {
        let Epochs { first, last, .. } = self.run.epochs;
        for epoch in first..=last {
            let progress = Progress::new(epoch, last);
            if self.train_epoch(&progress)? {
                let reason = self.run.interrupter.get_message();
                let reason = reason.as_deref().unwrap_or("no reason given");
                tracing::info!("training was interrupted in epoch {epoch}: {reason}");
                break;
            }
            // A loss on a part of the validation data would rank the checkpoint wrongly.
            if self.validate(&progress)? || self.end_epoch(epoch)? {
                break;
            }
        }
        Ok(self.engine.whole_module()?)
    }

    /// Restores the state of engine, scheduler and data loaders after `epoch`.
    ///
    /// The scheduler repeats its steps. Each loader is started once for every completed epoch,
    /// because starting a loader advances its shuffling.
    ///
    /// # Errors
    /// Returns an error if the checkpoint of the epoch is missing or does not match.
    fn resume(&mut self, folder: &Path, epoch: usize) -> Result<(), BoxError> {
        let state = checkpoints::load(&mut self.engine, folder, epoch)?;
        for _ in 0..state.scheduler_steps {
            self.learner.lr_step();
        }
        self.scheduler_steps = state.scheduler_steps;
        // A loader shuffles whenever an iteration starts. Loaders with worker threads shuffle in a
        // thread, and have finished when they return the first batch.
        for _ in 0..epoch {
            drop(self.train.iter().next());
            drop(self.valid.iter().next());
        }
        Ok(())
    }

    /// Trains one epoch. Returns true if it was interrupted.
    ///
    /// The epoch ends before the first micro-batch that some ranks do not have, because a rank
    /// without data could not take part in the collectives. The micro-batches of an incomplete
    /// accumulation are used for a last update.
    ///
    /// # Errors
    /// Returns a failure of the engine, of a step's gradients, or of a collective.
    fn train_epoch(&mut self, epoch: &Progress) -> Result<bool, BoxError> {
        let run = self.run;
        let mut reports = EpochItems::new(&run.train_outputs, epoch.clone(), self.ranks());
        let loader = self.train.clone();
        let mut batches = loader.iter();
        let (mut micro_batch, mut items) = (0, 0);
        let interrupted = loop {
            let (batch, found) = next(&mut *batches);
            let agreed = self.agree(micro_batch, batch.is_some(), found)?;
            if micro_batch > 0 {
                self.report(|processor| {
                    each(reports.next_items(), |item| processor.process_train(item));
                });
            }
            if micro_batch == 0 {
                self.check_batch_size(found, &batches.progress());
            }
            if agreed.with_batch < self.ranks() && agreed.with_batch > 0 {
                tracing::warn!(
                    "epoch {}: only {} of {} ranks have a batch after {micro_batch}; the rest of \
                     the data is left out",
                    epoch.items_processed,
                    agreed.with_batch,
                    self.ranks()
                );
            }
            let Some(batch) = batch.filter(|_| agreed.with_batch == self.ranks() && !agreed.stop)
            else {
                break agreed.stop;
            };
            items += agreed.items;
            let output = self.train_step(batch, &mut items)?;
            let lr = Some(self.learner.lr_current());
            let output = Output { item: output, progress: batches.progress(), lr };
            run.train_outputs.deposit(self.engine.rank(), Some(output));
            micro_batch += 1;
        };
        self.finish_accumulation(items)?;
        if micro_batch > 0 {
            self.report(|processor| {
                processor.process_train(LearnerEvent::EndEpoch(epoch.items_processed));
            });
        }
        Ok(interrupted)
    }

    /// Runs a micro-batch and, at an accumulation boundary, the optimizer step. `items` counts the
    /// items of all ranks since the last step.
    ///
    /// # Errors
    /// Returns an error if the engine fails, or if the step returned other gradients than it
    /// computed.
    fn train_step(
        &mut self,
        batch: <LC::TrainingModel as TrainStep>::Input,
        items: &mut usize,
    ) -> Result<TrainItem<LC>, BoxError> {
        // The scheduler advances once per update. It does so at the first micro-batch, so that all
        // micro-batches of an update report its learning rate.
        if self.engine.accumulated_micro_batches() == 0 {
            self.learner.lr_step();
            self.scheduler_steps += 1;
        }
        // The step runs forward and backward itself, so its loss cannot be scaled or weighted.
        let output = self.engine.train_pass(|model| TrainStep::step(model, batch))?;
        check_gradients(&self.engine, &output.grads)?;
        if self.engine.is_gradient_accumulation_boundary() {
            self.prepare_update(std::mem::take(items))?;
        }
        self.engine.step()?;
        self.settle()?;
        Ok(output.item)
    }

    /// Sets the learning rate of the next update and its number of items over all ranks.
    ///
    /// # Errors
    /// Returns an error if the scheduler's learning rate is negative or not finite.
    fn prepare_update(&mut self, items: usize) -> Result<(), BoxError> {
        self.engine.set_learning_rate(self.learner.lr_current())?;
        // The engine counts samples; the learning rate is the scheduler's and is not scaled.
        self.engine.size_next_step(items as u64, 1.0);
        Ok(())
    }

    /// Updates the weights with the mean over the micro-batches since the last update, if there are
    /// any. Burn drops them.
    ///
    /// # Errors
    /// Returns a failure of the engine.
    fn finish_accumulation(&mut self, items: usize) -> Result<(), BoxError> {
        if self.engine.accumulated_micro_batches() > 0 {
            self.prepare_update(items)?;
            self.engine.finish_accumulation()?;
            self.settle()?;
        }
        Ok(())
    }

    /// Evaluates the validation data. Returns true if it was interrupted.
    ///
    /// Ranks may have different numbers of batches. The loop ends when no rank has a batch left.
    ///
    /// # Errors
    /// Returns a failure of the engine or of a collective.
    fn validate(&mut self, epoch: &Progress) -> Result<bool, BoxError> {
        let run = self.run;
        let mut reports = EpochItems::new(&run.valid_outputs, epoch.clone(), self.ranks());
        let loader = self.valid.clone();
        let mut batches = loader.iter();
        let mut micro_batch = 0;
        let interrupted = loop {
            let (batch, found) = next(&mut *batches);
            let agreed = self.agree(micro_batch, batch.is_some(), found)?;
            if micro_batch > 0 {
                self.report(|processor| {
                    each(reports.next_items(), |item| processor.process_valid(item));
                });
            }
            if agreed.with_batch == 0 || agreed.stop {
                break agreed.stop && agreed.with_batch > 0;
            }
            let output = self.evaluate(batch)?.map(|item| {
                let progress = batches.progress();
                Output { item, progress, lr: None }
            });
            run.valid_outputs.deposit(self.engine.rank(), output);
            micro_batch += 1;
        };
        self.report(|processor| {
            processor.process_valid(LearnerEvent::EndEpoch(epoch.items_processed));
        });
        Ok(interrupted)
    }

    /// Evaluates a batch. Without a batch, evaluates filler items and returns `None`, because the
    /// other ranks gather parameters together with this rank and would wait for it.
    fn evaluate(
        &self,
        batch: Option<<LC::InferenceModel as InferenceStep>::Input>,
    ) -> Result<Option<ValidItem<LC>>, BoxError> {
        let reports = batch.is_some();
        let batch = batch.or_else(|| self.filler.iter().next());
        let Some(batch) = batch else {
            return Err("the validation data loader gave no batch when it was read again".into());
        };
        let output = self.engine.evaluate(|model| InferenceStep::step(model, batch))?;
        self.settle()?;
        Ok(reports.then_some(output))
    }

    /// Saves and deletes checkpoints. Returns true if training ends early.
    ///
    /// All ranks take part in a save, although only rank 0 decides. A failed save is reported and
    /// skipped, and old checkpoints are then kept.
    ///
    /// # Errors
    /// Returns an error if a collective or the engine fails.
    fn end_epoch(&mut self, epoch: usize) -> Result<bool, BoxError> {
        let decision = (self.engine.rank() == 0).then(|| self.decide(epoch));
        let flag = |of: fn(&Decision) -> bool| f64::from(decision.as_ref().is_some_and(of));
        let flags = vec![flag(|decision| decision.save), flag(|decision| decision.stop)];
        // Only rank 0 has queried the strategies, so the maximum is its decision.
        let flags =
            self.engine.group().max(CollectiveTag::new("end of epoch", epoch as u64), flags)?;
        if let (Some(folder), true) = (self.run.folder, flags[0] > 0.0) {
            let state = LearnerState { epoch, scheduler_steps: self.scheduler_steps };
            match checkpoints::save(&self.engine, folder, state) {
                // The states in memory are intact, so training continues. The message is also
                // printed, because Burn redirects logs to a file.
                Err(error) if error.is_recoverable() => {
                    if self.engine.rank() == 0 {
                        tracing::error!("the checkpoint of epoch {epoch} was not saved: {error}");
                        eprintln!(
                            "the checkpoint of epoch {epoch} was not saved, and training \
                             continues: {error}"
                        );
                    }
                    return Ok(flags[1] > 0.0);
                }
                saved => saved?,
            }
        }
        let old = decision.map(|decision| decision.delete).unwrap_or_default();
        for (folder, old) in self.run.folder.iter().flat_map(|f| old.iter().map(move |o| (f, *o))) {
            if let Err(error) = checkpoints::delete(folder, old) {
                tracing::warn!("the checkpoint of epoch {old} was not deleted: {error}");
            }
        }
        Ok(flags[1] > 0.0)
    }

    /// Queries the Learner's strategies on rank 0.
    fn decide(&self, epoch: usize) -> Decision {
        // Another thread processes events from a channel with one slot. Once the second of two
        // empty events is in the channel, all earlier events have been processed, and the
        // strategies see the complete epoch.
        self.report(|processor| {
            processor.process_valid(LearnerEvent::Start);
            processor.process_valid(LearnerEvent::Start);
        });
        let mut decision = Decision { save: false, stop: false, delete: Vec::new() };
        if self.run.folder.is_some() {
            for action in lock(self.run.keep).checkpointing(epoch, self.run.store) {
                match action {
                    CheckpointingAction::Save => decision.save = true,
                    CheckpointingAction::Delete(old) => decision.delete.push(old),
                }
            }
        }
        // The checkpoint of this epoch may be about to be saved, even if the strategy deletes it.
        decision.delete.retain(|old| *old != epoch);
        if let Some(early_stopping) = lock(&self.run.early_stopping).as_mut() {
            decision.stop = early_stopping.should_stop(epoch, self.run.store);
        }
        decision
    }

    /// Combines the flags of all ranks. This is the first collective of a micro-batch, so all ranks
    /// stop before the same one.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    fn agree(
        &self,
        micro_batch: u64,
        has_batch: bool,
        items: usize,
    ) -> Result<Agreement, BoxError> {
        let flag = |set: bool| if set { 1.0 } else { 0.0 };
        let mine = vec![flag(self.run.interrupter.should_stop()), flag(has_batch), items as f64];
        let sums = self.engine.group().sum(CollectiveTag::new("micro-batch", micro_batch), mine)?;
        let [stop, with_batch, items] = [sums[0], sums[1], sums[2]];
        Ok(Agreement { stop: stop > 0.0, with_batch: with_batch as usize, items: items as usize })
    }

    /// Waits until the device has completed its work, because another thread reads the results.
    ///
    /// # Errors
    /// Returns an error if the device reports one.
    fn settle(&self) -> Result<(), BoxError> {
        Ok(B::sync(&self.device).map_err(|error| format!("the device failed: {error:?}"))?)
    }

    /// Calls the event processor on rank 0.
    fn report(&self, events: impl FnOnce(&mut SupervisedTrainingEventProcessor<LC>)) {
        if self.engine.rank() == 0 {
            events(&mut lock(self.run.processor));
        }
    }

    /// Warns if the loader's batch size differs from the plan's.
    fn check_batch_size(&self, found: usize, progress: &Progress) {
        let planned = self.run.plan.batch.micro_batch_size;
        let is_last = progress.items_processed >= progress.items_total;
        if self.engine.rank() == 0 && found != planned && !(is_last && found < planned) {
            tracing::warn!(
                "the training data loader gives batches of {found} items and the plan has \
                 train_micro_batch_size_per_gpu {planned}: set both to the same number"
            );
        }
    }

    /// Returns the number of ranks.
    fn ranks(&self) -> usize {
        self.run.plan.mesh.world_size()
    }
}

/// Returns the next batch and its number of items.
fn next<I>(batches: &mut (dyn DataLoaderIterator<I> + '_)) -> (Option<I>, usize) {
    let before = batches.progress().items_processed;
    let batch = batches.next();
    let items = batches.progress().items_processed.saturating_sub(before);
    (batch, items)
}

/// Passes each item to `process`.
fn each<T>(items: Vec<TrainingItem<T>>, process: impl FnMut(LearnerEvent<T>)) {
    items.into_iter().map(LearnerEvent::ProcessedItem).for_each(process);
}
