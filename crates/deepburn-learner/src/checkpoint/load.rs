//! Loads training checkpoints. Every rank reads the slices that it owns at its stage, from all
//! files that contain them.
//!
//! Loading has two phases. First every rank checks the checkpoint against its engine without
//! changing anything, and the ranks exchange the results (`exchange`): either all of them continue
//! or all of them return an error. Parameters that the checkpoint omits are then compared with
//! their hashes (`scope.rs`) and keep their values. Then every rank reads its slices:
//!
//! ```text
//! 1 weights            working copies, masters and persistent copies follow from them
//! 2 buffers
//! 3 moments, scalars, loss scale   with optimizer_states
//! 4 errors, local      1-bit optimizers; need the second moments of 3
//! 5 gradients          in the middle of an accumulation, with their loss scale
//! 6 schedule, random streams
//! ```
//!
//! With hybrid sharding, every replica reads the same files. In a pipeline, a rank reads what its
//! stage holds. The ranks with the same position in their stages have the same data and therefore
//! the same random stream, so all stages load the streams of stage 0.

use std::collections::{BTreeMap, HashSet};

use burn::module::AutodiffModule;
use burn::tensor::TensorData;
use deepburn_checkpoint::{Checkpoint, EntryKind, ParamEntry, StateKind};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{
    GradientSum, RandomState, StateArray, StateSegment, StreamPosition, Training, ZeroError,
};

use super::buffers::{check_buffer, read_buffer, warn_of_missing};
use super::element::{data_of, dtype_of};
use super::optimizer_states::{check_states, log_changes};
use super::save::state_kind;
use super::saved_states::{ClientStates, Saved};
use super::state::{EngineState, GradientRecord, Random, RankState, Stream};
use super::{TrainingCheckpointError, entry_of, unfit};
use crate::exchange::exchange;
use crate::{Engine, EngineError};

/// What to do with a checkpoint whose accumulation in progress does not fit.
const REMEDY: &str = "finish the step there and save again, or load the module only (LoadPlan::ModuleOnly), which \
                      starts a new run";

/// The parts of a checkpoint to load. They correspond to DeepSpeed's `load_module_only`,
/// `load_optimizer_states` and `load_lr_scheduler_states`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadPlan {
    /// The weights and buffers only. Counters, optimizer states, schedule and random streams stay
    /// as they are, so a new engine trains from step 0.
    ModuleOnly,
    /// The weights, the counters, the random streams, and the parts selected here. In the middle of
    /// an accumulation, also the gradients of the micro-batches so far and their loss scale, so
    /// that no sample is lost.
    Training {
        /// Loads moments and loss scale.
        optimizer_states: bool,
        /// Loads the position of the learning-rate schedule.
        lr_scheduler_states: bool,
    },
}

impl LoadPlan {
    /// Loads everything.
    pub const ALL: Self = Self::Training { optimizer_states: true, lr_scheduler_states: true };
}

/// What a checkpoint has of the moments of a parameter.
pub(super) struct StoredMoments {
    /// Whether the parameter was frozen, so that it had none.
    pub(super) was_frozen: bool,
    /// Whether there are none, for this or another reason.
    pub(super) is_empty: bool,
    /// The number of applied steps before the first step of the parameter.
    pub(super) start: u64,
}

/// A checkpoint that all ranks have verified, and the parts of it to load.
pub(crate) struct CheckedCheckpoint<'c> {
    checkpoint: &'c Checkpoint,
    plan: LoadPlan,
    /// The JSON states.
    saved: Saved,
}

impl CheckedCheckpoint<'_> {
    /// Reads a segment of an array, converted to tensor data.
    fn read(&self, segment: &StateSegment<'_>) -> Result<TensorData, TrainingCheckpointError> {
        let StateSegment { path, array, range } = segment;
        Ok(data_of(self.checkpoint.read(path, &state_kind(*array), range.clone())?))
    }
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Resumes from `checkpoint`, which may have been saved at any stage, number of ranks and
    /// number of pipeline stages. All ranks call this together with the same checkpoint.
    ///
    /// With the number of ranks that saved it (of ranks of a pipeline stage), all later steps are
    /// bit-identical to an uninterrupted run. With more ranks, the additional ranks start their
    /// dropout streams from the beginning.
    ///
    /// # Errors
    /// Returns an error if the checkpoint is damaged or does not match the model or the optimizer;
    /// the engine is then unchanged. If reading or a collective fails after these checks, the
    /// engine is left partly loaded and must not be used.
    pub fn load_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        plan: LoadPlan,
    ) -> Result<ClientStates, TrainingCheckpointError> {
        let checked = self.check_together(Ok(checkpoint), plan)?;
        self.adopt_checked(&checked)?;
        Ok(checked.saved.into())
    }

    /// Checks on all ranks that the checkpoint is intact and matches the engine. Nothing is
    /// changed. All ranks call this together and get the same result.
    ///
    /// `found` is the checkpoint, or the reason why this rank has none.
    ///
    /// # Errors
    /// Returns the first problem of this rank, or else of the lowest rank that has one, or an error
    /// if the ranks found different checkpoints.
    pub(crate) fn check_together<'c>(
        &self,
        found: Result<&'c Checkpoint, TrainingCheckpointError>,
        plan: LoadPlan,
    ) -> Result<CheckedCheckpoint<'c>, TrainingCheckpointError> {
        self.check_settled("load_checkpoint")?;
        // There must be no early return before the exchange, because the other ranks would wait for
        // this rank.
        let checked = found.and_then(|checkpoint| self.check(checkpoint, plan));
        let mut own = None;
        let tag = checked.map(|checked| {
            let checkpoint = checked.checkpoint;
            own = Some(checked);
            (checkpoint.tag().clone(), checkpoint.run().step)
        });
        // Each rank has opened the checkpoint itself, and `latest` may have changed in between.
        let tags = exchange(self.group(), "checkpoint to load", Some(tag))?;
        let Some(checked) = own else { unreachable!("a rank that failed has returned") };
        if let Some(other) = tags.iter().find(|tag| **tag != tags[0]) {
            let reason = format!("rank 0 loads {}, another rank {}", tags[0].0, other.0);
            return Err(unfit(checked.checkpoint.path(), reason));
        }
        self.check_base(checked.checkpoint)?;
        Ok(checked)
    }

    /// Checks that `checkpoint` is intact and matches this engine. Nothing is changed.
    ///
    /// Every file is read once to verify its checksum.
    ///
    /// # Errors
    /// Returns the first problem that was found.
    fn check<'c>(
        &self,
        checkpoint: &'c Checkpoint,
        plan: LoadPlan,
    ) -> Result<CheckedCheckpoint<'c>, TrainingCheckpointError> {
        // Checksums come first: a damaged file must not be reported as a model that differs.
        checkpoint.verify()?;
        let saved = Saved::read(checkpoint)?;
        let fits = self.check_model(checkpoint).and_then(|()| match plan {
            LoadPlan::Training { optimizer_states, .. } => {
                if optimizer_states {
                    self.check_moments(checkpoint)?;
                }
                self.check_accumulation(checkpoint, &saved.engine)
            }
            LoadPlan::ModuleOnly => Ok(()),
        });
        fits.map_err(|reason| unfit(checkpoint.path(), reason))?;
        Ok(CheckedCheckpoint { checkpoint, plan, saved })
    }

    /// Checks that model and checkpoint have the same parameters and buffers.
    ///
    /// If a tied parameter has several paths, any of them may match.
    ///
    /// # Errors
    /// Returns the first difference, as the reason in an error message.
    fn check_model(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        for parameter in self.parameters() {
            let path = parameter.path();
            let Some(ParamEntry { shape, kind, .. }) = entry_of(checkpoint, path) else {
                return Err(format!("it has no parameter {path}, but this model has one"));
            };
            if *kind == EntryKind::Buffer {
                return Err(format!(
                    "{path} is a buffer there and a float parameter of this model: load it into the \
                     model that it was saved from"
                ));
            }
            if shape[..] != parameter.shape()[..] {
                let own = parameter.shape().to_vec();
                return Err(format!(
                    "its parameter {path} has shape {shape:?}, but this model's has {own:?}"
                ));
            }
        }
        self.buffers().iter().try_for_each(|buffer| check_buffer(checkpoint, buffer))?;
        let mut entries = checkpoint.layout().entries().iter();
        let known = |entry: &ParamEntry| {
            let paths = || [&entry.path].into_iter().chain(&entry.aliases);
            self.parameters().iter().any(|own| paths().any(|path| own.path() == path))
                || self.buffers().iter().any(|own| paths().any(|path| own.path() == path))
        };
        match entries.find(|entry| !known(entry)) {
            Some(entry) => {
                Err(format!("it has a parameter {}, but this model has none", entry.path))
            }
            None => Ok(()),
        }
    }

    /// Checks that the optimizer states of all trained parameters are in the checkpoint or can be
    /// new.
    ///
    /// # Errors
    /// Returns the first difference, as the reason in an error message.
    fn check_moments(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        for (index, parameter) in self.parameters().iter().enumerate() {
            let entry = entry_of(checkpoint, parameter.path());
            if let (Some(optimizer), Some(entry)) = (self.states().optimizer_of(index), entry) {
                check_states(parameter.path(), entry, optimizer)?;
            }
        }
        Ok(())
    }

    /// Checks that the engine can continue an accumulation in progress: with the same batch sizes,
    /// element type, loss scale and trained parameters.
    ///
    /// # Errors
    /// Returns the first difference, as the reason in an error message.
    fn check_accumulation(
        &self,
        checkpoint: &Checkpoint,
        saved: &EngineState,
    ) -> Result<(), String> {
        if !saved.step_state().is_accumulating() {
            return Ok(());
        }
        if self.is_pipeline() {
            return Err(format!(
                "it was saved during gradient accumulation, and a pipeline runs all micro-batches of a step \
                 together: {REMEDY}"
            ));
        }
        if self.states().replicas() > 1 {
            return Err(format!(
                "it was saved during gradient accumulation, and hybrid sharding keeps these gradients apart in every \
                 shard group: {REMEDY}"
            ));
        }
        let (then, now) = (saved.batch, self.batch_state());
        if then != now {
            return Err(format!(
                "it was saved during gradient accumulation with {then:?}, and this run has {now:?}: use the same \
                 batches, {REMEDY}"
            ));
        }
        let (working, compute) = (checkpoint.run().working, self.states().compute_type());
        if dtype_of(working) != compute {
            return Err(format!(
                "it was saved during gradient accumulation, computing in {working}, and this run computes in \
                 {}: use the same type, {REMEDY}",
                compute.name()
            ));
        }
        // A dynamic scale is loaded with the gradients.
        let is_loaded = saved.loss_scale.is_some() && self.scaler.is_dynamic();
        if let Some(then) = saved.gradient_scale().filter(|_| !is_loaded)
            && then != self.scaler.scale()
        {
            return Err(format!(
                "it was saved during gradient accumulation with a loss scale of {then}, and this run has {}: use the \
                 same scale, {REMEDY}",
                self.scaler.scale()
            ));
        }
        self.check_accumulated_parameters(checkpoint)
    }

    /// Checks that the parameters with gradients in progress are those that this engine trains.
    ///
    /// # Errors
    /// Returns the first difference, as the reason in an error message.
    fn check_accumulated_parameters(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        for parameter in self.parameters() {
            let entry = entry_of(checkpoint, parameter.path());
            if entry.is_some_and(|entry| entry.trainable != parameter.is_trainable()) {
                let trained = |is: bool| if is { "trained" } else { "frozen" };
                return Err(format!(
                    "it was saved during gradient accumulation with parameter {} {}, and here it is {}: train the \
                     same parameters, {REMEDY}",
                    parameter.path(),
                    trained(!parameter.is_trainable()),
                    trained(parameter.is_trainable())
                ));
            }
        }
        Ok(())
    }

    /// Loads weights, buffers and the parts of the training state that the plan of a checkpoint
    /// from [`check_together`](Self::check_together) selects. All ranks call this together.
    ///
    /// The order matters: loading moments resets the states that 1-bit optimizers derive from them,
    /// so compression errors and local states are loaded afterwards.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or a collective fails. The engine is then partly
    /// loaded.
    pub(crate) fn adopt_checked(
        &mut self,
        checked: &CheckedCheckpoint<'_>,
    ) -> Result<(), TrainingCheckpointError> {
        let CheckedCheckpoint { checkpoint, plan, saved } = checked;
        // Gradients of the old weights must not enter the first step with the new ones.
        self.zero_grad();
        // A parameter of the base model may be omitted.
        let is_stored =
            |path: &str| entry_of(checkpoint, path).is_none_or(|entry| entry.base.is_none());
        self.states.load_weights(is_stored, |segment| checked.read(segment))?;
        self.keep_unchanged_base(is_stored)?;
        if self.rank() == 0 {
            warn_of_missing(checkpoint, self.buffers());
            self.warn_of_plain_tensors(checkpoint, &saved.engine);
        }
        self.load_buffers(|buffer| read_buffer(checkpoint, buffer))?;
        let LoadPlan::Training { optimizer_states, lr_scheduler_states } = *plan else {
            return Ok(());
        };
        self.progress = saved.engine.progress.of_engine();
        // The size was set for the next optimizer step, which comes after the load.
        self.overrides.size = saved.engine.next_size;
        if optimizer_states {
            self.adopt_optimizer_states(checked)?;
        }
        if saved.engine.step_state().is_accumulating() {
            self.adopt_accumulation(checked)?;
        }
        if lr_scheduler_states {
            self.schedule.seek(saved.engine.schedule);
        }
        self.adopt_random_state(&saved.ranks);
        Ok(())
    }

    /// Warns of plain tensors of the module with other values than in the run that saved the
    /// checkpoint. Older checkpoints have no hashes.
    fn warn_of_plain_tensors(&self, checkpoint: &Checkpoint, saved: &EngineState) {
        let now = self.plain_tensors();
        for (path, hash) in &saved.plain_tensors {
            if !now.contains(&(path.clone(), *hash)) {
                tracing::warn!(
                    "{}: the plain tensor {path} of the model had other values there; checkpoints do not contain \
                     tensor fields that are not a `Param`",
                    checkpoint.path().display()
                );
            }
        }
    }

    /// Loads optimizer states, compression errors and the loss scale.
    fn adopt_optimizer_states(
        &mut self,
        checked: &CheckedCheckpoint<'_>,
    ) -> Result<(), TrainingCheckpointError> {
        let read = |segment: &StateSegment<'_>| checked.read(segment);
        let CheckedCheckpoint { checkpoint, saved, .. } = checked;
        let EngineState { optimizer_steps, loss_scale, state_starts, .. } = &saved.engine;
        let stored_moments = |path: &str| {
            let entry = entry_of(checkpoint, path);
            let start = entry.and_then(|entry| state_starts.get(&entry.path));
            StoredMoments {
                was_frozen: entry.is_some_and(|it| !it.trainable),
                is_empty: !entry.is_some_and(has_moments),
                start: start.copied().unwrap_or(0),
            }
        };
        self.load_moments(*optimizer_steps, stored_moments, read)?;
        self.states.load_scalars(|path, name| {
            let path = &entry_of(checkpoint, path)?.path;
            Some(f64::from_bits(*saved.engine.scalars.get(path)?.get(name)?))
        });
        // The stored errors are of what the last step compressed. The next step may compress
        // something else: 0/1 Adam changes from gradients to updates, and the run may have another
        // optimizer.
        let quantity = self.states.compressed_quantity(*optimizer_steps + 1);
        let is_same = saved.engine.compressed_quantity.as_deref() == quantity;
        let has_errors = checkpoint.layout().entries().iter().any(|entry| num_errors(entry) > 0);
        if has_errors && !is_same && self.rank() == 0 {
            tracing::warn!(
                "the compression errors in the checkpoint are dropped: they are of another quantity than the next \
                 step compresses"
            );
        }
        let workers = |path: &str| {
            let entry = entry_of(checkpoint, path).filter(|_| is_same);
            entry.map_or(0, num_errors)
        };
        self.states.load_errors(workers, read)?;
        let local_rates = saved.engine.local_rates_bits.map(f64::from_bits);
        self.states.load_local(local_rates, local_ranks(checkpoint), read)?;
        if let Some(state) = loss_scale {
            self.scaler.restore(*state);
        }
        Ok(())
    }

    /// Loads the gradients of an accumulation in progress. They are multiplied by the loss scale of
    /// the saved run, so it is loaded too.
    fn adopt_accumulation(
        &mut self,
        checked: &CheckedCheckpoint<'_>,
    ) -> Result<(), TrainingCheckpointError> {
        let sums = self.gradient_sums(checked);
        self.states.load_gradients(&sums, |segment| checked.read(segment))?;
        self.step_state = checked.saved.engine.step_state();
        if let Some(state) = checked.saved.engine.loss_scale {
            self.scaler.restore(state);
        }
        Ok(())
    }

    /// Loads the moments of a checkpoint after `steps` applied steps. Parameters that were frozen
    /// when it was saved get new ones. `stored` returns what it has of the parameter at a module
    /// path.
    pub(super) fn load_moments(
        &mut self,
        steps: u64,
        stored: impl Fn(&str) -> StoredMoments,
        read: impl Fn(&StateSegment<'_>) -> Result<TensorData, TrainingCheckpointError>,
    ) -> Result<(), TrainingCheckpointError> {
        let (mut new, mut unused, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (index, parameter) in self.parameters().iter().enumerate() {
            let StoredMoments { was_frozen, is_empty, start } = stored(parameter.path());
            let sized = (parameter.path(), parameter.numel());
            match (parameter.is_trainable(), was_frozen) {
                (true, true) if !self.states().moments(index).is_empty() => new.push(sized),
                (false, false) if !is_empty => unused.push(sized),
                _ => {}
            }
            // New moments are corrected for their bias as in a first step, so the parameter starts
            // now.
            starts.push(if was_frozen { steps } else { start });
        }
        if self.rank() == 0 {
            log_changes(&new, &unused);
        }
        let new: HashSet<String> = new.into_iter().map(|(path, _)| path.to_owned()).collect();
        self.states.load_moments(steps, |segment: &StateSegment<'_>| {
            match new.contains(segment.path) {
                true => Ok(TensorData::zeros::<f32, _>([segment.range.len()])),
                false => read(segment),
            }
        })?;
        for (index, start) in starts.into_iter().enumerate() {
            self.states.set_states_start(index, start);
        }
        Ok(())
    }

    /// Restores the random streams of this rank. A rank that the saved run did not have starts new
    /// streams from the seed of rank 0.
    fn adopt_random_state(&mut self, ranks: &[RankState]) {
        let random = match ranks.get(self.data_rank()) {
            Some(state) => Some(state.random),
            None => ranks.first().map(|state| Random {
                position: 0,
                between_calls: state.random.between_calls.map(|it| Stream { position: 0, ..it }),
                ..state.random
            }),
        };
        if let Some(Random { seed, model, position, between_calls }) = random {
            let between_calls =
                between_calls.map(|Stream { seed, position }| StreamPosition { seed, position });
            self.states.set_random_state(RandomState { seed, model, position, between_calls });
        }
    }

    /// Returns the state of each accumulated gradient, by parameter index.
    ///
    /// `peak` decides whether the next step is skipped for an overflow. With a different number of
    /// ranks, a rank may own elements for which another rank recorded the peak. Every rank
    /// therefore gets the largest peak of all ranks, and the step is skipped on all ranks or on
    /// none.
    fn gradient_sums(&self, checked: &CheckedCheckpoint<'_>) -> Vec<Option<GradientSum>> {
        let mut records = BTreeMap::<&str, GradientRecord>::new();
        for (path, record) in checked.saved.ranks.iter().flat_map(|rank| &rank.gradients) {
            // The number of micro-batches is the same on all ranks; only the peaks differ.
            let known = records.entry(path).or_insert(*record);
            let peaks = [known.peak_bits, record.peak_bits].map(|bits| bits.map(f32::from_bits));
            let peak = peaks.into_iter().flatten().reduce(larger);
            known.peak_bits = peak.map(f32::to_bits);
        }
        let sum = |path: &str| {
            let entry = entry_of(checked.checkpoint, path)?;
            let record = records.get(entry.path.as_str())?;
            Some(GradientSum {
                micro_batches: record.micro_batches,
                dtype: dtype_of(entry.element_of(&StateKind::Gradient)?),
                peak: record.peak_bits.map(f32::from_bits),
            })
        };
        self.parameters().iter().map(|parameter| sum(parameter.path())).collect()
    }
}

/// Returns the larger of two magnitudes. NaN counts as the largest.
fn larger(left: f32, right: f32) -> f32 {
    if left.is_nan() || left > right { left } else { right }
}

/// Returns true if the checkpoint has moments of a parameter.
fn has_moments(entry: &ParamEntry) -> bool {
    entry.states.iter().any(|stored| matches!(stored.kind, StateKind::Moment(_)))
}

/// Returns the stored arrays of a parameter that differ between ranks.
fn arrays_of_ranks(entry: &ParamEntry) -> impl Iterator<Item = StateArray> {
    entry.states.iter().filter_map(|stored| StateArray::of_ranks(stored.kind.as_str()))
}

/// Returns the number of ranks that stored their compression error of a parameter.
fn num_errors(entry: &ParamEntry) -> usize {
    arrays_of_ranks(entry).filter(|array| matches!(array, StateArray::WorkerError(_))).count()
}

/// Returns the number of ranks that stored states of local steps.
fn local_ranks(checkpoint: &Checkpoint) -> usize {
    let ranks =
        checkpoint.layout().entries().iter().flat_map(arrays_of_ranks).filter_map(|array| {
            match array {
                StateArray::Local(_, rank) => Some(rank + 1),
                _ => None,
            }
        });
    ranks.max().unwrap_or(0)
}

impl From<ZeroError> for TrainingCheckpointError {
    fn from(error: ZeroError) -> Self {
        EngineError::from(error).into()
    }
}
