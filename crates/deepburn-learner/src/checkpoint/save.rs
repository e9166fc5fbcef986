//! Saves training checkpoints. Every rank writes its owned slices, and rank 0 commits the
//! checkpoint.
//!
//! ```text
//! check ─► [average buffers] ─► layout ─► [errors of 1-bit optimizers] ─► rank 0 begins [ticket]
//!       ─► snapshot of handles ─► writer threads (`in_progress.rs`) ─► [records] ─► rank 0 commits [folder]
//! ```
//!
//! Steps in brackets are collectives. Every rank computes the layout from the same sizes, so only
//! the ticket (the temporary folder) has to be exchanged.
//!
//! In a pipeline, the ranks of a parameter's last stage write its arrays, and the ranks of stage 0
//! the buffers, which all stages have. With hybrid sharding, only the first replica of a stage
//! does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::AutodiffModule;
use deepburn_checkpoint::{
    CheckpointError, EntryKind, Layout, ParamEntry, Run, Save, Segment, StateKind, StoredState, Tag,
};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{
    GradientSum, OwnedArray, OwnedState, RandomState, Stages, StateArray, StreamPosition, Training,
    ZeroError,
};
use serde_json::{Value, json};

use super::TrainingCheckpointError;
use super::buffers::buffer_entry;
use super::element::element_type;
use super::in_progress::{SaveInProgress, Snapshot};
use super::state::{
    BatchSizes, EngineState, GradientRecord, Random, RankState, SavedCounters, Stream,
};
use crate::best::LoopState;
use crate::exchange::exchange;
use crate::step_state::LossWeights;
use crate::{Engine, EngineError};

/// Options of a checkpoint and the state that the caller adds to it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SaveRequest {
    /// The name of the checkpoint. Unset: the name of the step, such as `step-00000010`, or
    /// `step-00000010.2` and so on if that name is taken.
    pub tag: Option<Tag>,
    /// The name of the run.
    pub job: String,
    /// The number by which retention compares checkpoints, such as the evaluation loss. Lower is
    /// better.
    pub metric: Option<f64>,
    /// State that is the same on all ranks; the value of rank 0 is saved.
    pub client_state: Value,
    /// State of this rank only, such as the position of its data loader.
    pub rank_state: Value,
    /// The state of the training loop outside the engine.
    pub loop_state: LoopState,
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Saves a checkpoint in the folder `root` and returns the checkpoint's own folder. All ranks
    /// call this together, after a step or between two of its micro-batches.
    ///
    /// A checkpoint is complete or does not exist, and an existing one is never overwritten.
    ///
    /// # Errors
    /// Returns an error if the checkpoint cannot be written, for example because the disk is full.
    /// Earlier checkpoints are unchanged, and training can continue
    /// ([`is_recoverable`](TrainingCheckpointError::is_recoverable)). Also returns an error between
    /// forward and backward, and before gradients of `no_sync` were reduced.
    pub fn save_checkpoint(
        &self,
        root: &Path,
        request: SaveRequest,
    ) -> Result<PathBuf, TrainingCheckpointError> {
        self.start_save(root, request)?.finish(self.group())
    }

    /// Starts to save a checkpoint and lets a thread of each rank write it.
    ///
    /// Training continues at once; the checkpoint contains the state at the time of this call.
    /// [`SaveInProgress::finish`] commits the checkpoint. Until then no other save can start in
    /// `root`.
    ///
    /// # Errors
    /// Returns the errors of [`save_checkpoint`](Self::save_checkpoint), except for errors while
    /// writing, which `finish` returns.
    pub fn start_save(
        &self,
        root: &Path,
        request: SaveRequest,
    ) -> Result<SaveInProgress, TrainingCheckpointError> {
        self.check_settled("start_save")?;
        if self.is_pipeline() && self.step_state.is_accumulating() {
            let when = "after a step of a pipeline that failed half-way: call zero_grad before";
            return Err(EngineError::Order { call: "start_save", when }.into());
        }
        let ranks = self.group().world_size();
        if ranks > 1 && !self.states().takes_mean_gradients() && self.step_state.is_accumulating() {
            let when = "between two micro-batches of a step, whose gradients 1-bit optimizers keep apart on every rank and no \
                        checkpoint holds: save after the step's last micro-batch";
            return Err(EngineError::Order { call: "start_save", when }.into());
        }
        if self.states().replicas() > 1 && self.step_state.is_accumulating() {
            let when = "between two micro-batches of a step, whose gradients hybrid sharding keeps apart in every shard \
                        group and no checkpoint holds: save after the step's last micro-batch";
            return Err(EngineError::Order { call: "start_save", when }.into());
        }
        // Running statistics are averaged over the ranks before they are saved.
        self.agree_buffers()?;
        let SaveRequest { tag, job, metric, client_state, rank_state, loop_state } = request;
        let step = self.global_steps();
        let layout = Arc::new(self.layout()?);
        let buffers = self.states().owned_buffers(self.module()).map_err(EngineError::from)?;
        // Compression errors and states of local steps are alike for the file: arrays of a rank,
        // with its number in their names.
        let mut errors = self.states().owned_errors().map_err(EngineError::from)?;
        let local = self.states().owned_local().map_err(EngineError::from)?;
        errors.iter_mut().zip(local).for_each(|(errors, local)| errors.extend(local));

        let mut save = None;
        // Only rank 0 accesses the shared folder. All ranks receive its ticket or its error.
        let begun = (self.rank() == 0).then(|| {
            let begun = match tag {
                Some(tag) => Save::begin(root, tag, layout.clone())?,
                None => Save::begin_step(root, step, layout.clone())?,
            };
            let ticket = begun.ticket().clone();
            save = Some(begun);
            Ok::<_, TrainingCheckpointError>(ticket)
        });
        let ticket = exchange(self.group(), "checkpoint begun", begun)?.swap_remove(0);

        let run = Run {
            step,
            stage: self.states().stage().number(),
            working: element_type(self.states().compute_type())?,
            job,
            metric,
            state: json!(self.engine_state(client_state, loop_state)),
        };
        let commit = save.map(|save| (save, run));
        let snapshot = self.snapshot(layout, buffers, errors, rank_state);
        Ok(SaveInProgress::start(ticket, snapshot, step, commit))
    }

    /// Returns an error if the engine has state that checkpoints do not contain: an open pass,
    /// gradients of a failed backward pass, undivided gradients of `train_pass`, or unreduced
    /// gradients of `no_sync`.
    pub(super) fn check_settled(&self, call: &'static str) -> Result<(), EngineError> {
        self.check_group()?;
        if self.states().has_open_pass() {
            return Err(EngineError::Order { call, when: "between forward and backward" });
        }
        self.check_backward(call)?;
        if self.step_state.weights() == LossWeights::Undivided && self.step_state.is_accumulating()
        {
            let when = "during gradient accumulation with train_pass, whose sums are not part of a checkpoint";
            return Err(EngineError::Order { call, when });
        }
        if !self.states().gradients_are_settled() {
            let when = "after no_sync, before a backward that reduces gradients";
            return Err(EngineError::Order { call, when });
        }
        Ok(())
    }

    /// Returns the layout of the checkpoint: parameters in module order, then buffers. Parameters
    /// that a base model has are omitted.
    ///
    /// # Errors
    /// Returns an error if a quantized parameter is not omitted, because its values are not exact.
    fn layout(&self) -> Result<Layout, TrainingCheckpointError> {
        let states = self.states();
        let is_omitted = |index: usize| self.omitted.contains_key(&index);
        let mut quantized = self.parameters().iter().filter(|it| it.is_quantized());
        if let Some(contained) = quantized.find(|it| !is_omitted(it.index())) {
            let path = contained.path().to_owned();
            return Err(EngineError::from(ZeroError::QuantizedParameter { path }).into());
        }
        let entry = |index: usize| {
            let (parameter, base) = (&self.parameters()[index], self.omitted.get(&index));
            let stored = states.arrays(index).into_iter().map(|(array, dtype)| {
                Ok(StoredState { kind: state_kind(array), element: element_type(dtype)? })
            });
            Ok(ParamEntry {
                path: parameter.path().to_owned(),
                shape: parameter.shape().to_vec(),
                kind: EntryKind::Parameter,
                trainable: parameter.is_trainable(),
                aliases: states.aliases(index).to_vec(),
                states: match base {
                    Some(_) => vec![],
                    None => stored.collect::<Result<_, CheckpointError>>()?,
                },
                base: base.cloned(),
                pipeline_stage: parameter.owner(),
            })
        };
        // Parameters come first, so that an entry's index is the parameter's (`snapshot`).
        let entries = (0..self.parameters().len()).map(entry);
        let entries = entries.chain(self.buffers().iter().map(buffer_entry));
        let entries = entries.collect::<Result<Vec<_>, CheckpointError>>()?;
        let stages = states.stages().map_or(1, Stages::count);
        Ok(Layout::of_mesh(entries, self.group().world_size(), stages, states.replicas())?)
    }

    /// Takes a snapshot of everything that this rank saves.
    ///
    /// Arrays are shared with the engine, not copied. An optimizer step that overwrites one
    /// allocates a new array. `errors` holds this rank's compression errors and other states that
    /// differ between ranks, by parameter.
    fn snapshot(
        &self,
        layout: Arc<Layout>,
        buffers: Vec<OwnedArray<B>>,
        errors: Vec<Vec<OwnedState<B>>>,
        client: Value,
    ) -> Snapshot<B> {
        let (states, rank) = (self.states(), self.rank());
        let parameters = self.parameters().len();
        let owned = |segment: &Segment| {
            if let Some(buffer) = segment.entry.checked_sub(parameters) {
                return buffers[buffer].clone();
            }
            let (array, _) = states.arrays(segment.entry)[segment.state];
            let error = || errors[segment.entry].iter().find(|(error, _)| *error == array);
            match states.owned(segment.entry, array).or_else(|| Some(error()?.1.clone())) {
                Some(owned) => owned,
                None => unreachable!("the layout was made of what there is"),
            }
        };
        let arrays = layout.segments(rank).iter().map(owned).collect();
        Snapshot { layout, rank, arrays, state: json!(self.rank_state(client)) }
    }

    /// Returns the state that all ranks share.
    fn engine_state(&self, client: Value, training_loop: LoopState) -> EngineState {
        let states = self.states();
        let optimizer_steps = states.optimizer_steps();
        let quantity = states.compressed_quantity(optimizer_steps);
        EngineState {
            progress: SavedCounters::new(self.progress, self.step_state.ended()),
            optimizer_steps,
            compressed_quantity: quantity.map(str::to_owned),
            local_rates_bits: states.local_rates().map(f64::to_bits),
            loss_scale: self.scaler.state(),
            schedule: self.schedule.position(),
            batch: self.batch_state(),
            backward_passes: Some(self.step_state.passes()),
            gradient_scale_bits: Some(self.scaler.scale().to_bits()),
            loss_weights: self.step_state.weights(),
            next_size: self.overrides.size,
            scalars: self.scalars(),
            state_starts: self.state_starts(),
            plain_tensors: self.plain_tensors(),
            training_loop,
            client,
        }
    }

    /// Returns the optimizer's scalars by path and name, as the bits of an `f64`.
    fn scalars(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let scalars = |index: usize| {
            let scalars = self.states().scalars(index).into_iter();
            let bits = scalars.map(|(name, value)| (name.to_owned(), value.to_bits()));
            (self.parameters()[index].path().to_owned(), bits.collect::<BTreeMap<_, _>>())
        };
        let all = (0..self.parameters().len()).map(scalars);
        all.filter(|(_, scalars)| !scalars.is_empty()).collect()
    }

    /// Returns the number of applied steps before the first step of each parameter with new states,
    /// by path.
    fn state_starts(&self) -> BTreeMap<String, u64> {
        let parameters = self.parameters().iter().enumerate();
        let starts = parameters.map(|(index, parameter)| {
            (parameter.path().to_owned(), self.states().states_start(index))
        });
        starts.filter(|(_, start)| *start > 0).collect()
    }

    /// Returns the path and the hash of each plain tensor.
    pub(super) fn plain_tensors(&self) -> Vec<(String, u64)> {
        let tensors = self.states().plain_tensors().iter();
        tensors.map(|tensor| (tensor.path().to_owned(), tensor.hash())).collect()
    }

    /// Returns the batch sizes, which must match if an accumulation is resumed.
    pub(super) fn batch_state(&self) -> BatchSizes {
        let batch = self.batch();
        BatchSizes {
            micro_batch_size: batch.micro_batch_size,
            gradient_accumulation_steps: batch.gradient_accumulation_steps,
            world_size: batch.data_parallel_size,
        }
    }

    /// Returns the state of this rank: random streams and the state of accumulated gradients.
    fn rank_state(&self, client: Value) -> RankState {
        let RandomState { seed, model, position, between_calls } = self.states().random_state();
        let between_calls =
            between_calls.map(|StreamPosition { seed, position }| Stream { seed, position });
        let gradient = |index: usize| {
            let GradientSum { micro_batches, peak, .. } = self.states().gradient_sum(index)?;
            let record = GradientRecord { micro_batches, peak_bits: peak.map(f32::to_bits) };
            Some((self.parameters()[index].path().to_owned(), record))
        };
        let gradients = (0..self.parameters().len()).filter_map(gradient).collect();
        RankState { random: Random { seed, model, position, between_calls }, gradients, client }
    }
}

/// Returns the kind of state under which an array is stored.
pub(super) fn state_kind(array: StateArray) -> StateKind {
    match array {
        StateArray::Weights => StateKind::Weights,
        StateArray::Gradient => StateKind::Gradient,
        of_optimizer => StateKind::moment(&of_optimizer.stored_name()),
    }
}
