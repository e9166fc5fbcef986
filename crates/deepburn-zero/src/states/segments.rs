//! Saves and loads model states by segment, for checkpoints.
//!
//! Each rank saves its owned elements of each array, without padding. The partition is the same at
//! every stage. Each rank loads the range that it keeps at its own stage and number of ranks.
//! States can therefore be loaded at another stage than they were saved at. After loading, working
//! copies, masters, and complete and persistent parameters are the same as in an uninterrupted run.
//!
//! ```text
//! a parameter of 10 elements on 4 ranks, shards of 3 elements
//! saved by      rank 0: 0..3   rank 1: 3..6   rank 2: 6..9   rank 3: 9..10
//! loaded by 2 ranks, sharded   rank 0: 0..5   rank 1: 5..10
//! loaded by 2 ranks, whole     rank 0: 0..10  rank 1: 0..10
//! ```
//!
//! Saving does not copy arrays. An `OwnedArray` shares the tensor or the parked array with the
//! model, and a step copies an array that is still shared. Working copies, gathered and persistent
//! parameters are not saved, because loading recomputes them from the weights with the casts and
//! collectives of an optimizer step.
//!
//! In a pipeline, the ranks of a parameter's last stage own its arrays. Every stage that holds the
//! parameter reads its weights.
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{DType, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_config::{OptimizerPlan, Stage};
use deepburn_ops::{
    OptimizerOps, SumOps, float_bytes, float_from_host, float_into_host, read_float,
};

use super::ModelStates;
use super::state_array::StateArray;
use crate::error::ZeroError;
use crate::gradient::{NewSum, SumElements};
use crate::group::flat::{flat_range, narrow};
use crate::offload::{ParkedCopy, WriteBehind};
use crate::optimizer::KeptArray;
use crate::parameter::{Parameter, Publisher, Shard};
use crate::session;
use crate::session::RandomStream;

/// A segment of an array that this rank reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSegment<'a> {
    /// The module path of the parameter.
    pub path: &'a str,
    /// The array.
    pub array: StateArray,
    /// The range of elements in the flat parameter; empty for a rank that holds only padding.
    pub range: Range<usize>,
}

/// A snapshot of the elements of an array that a rank owns.
///
/// Later steps do not change the snapshot. It takes no memory until a step updates the array, which
/// is then copied. A snapshot can be sent to another thread.
#[derive(Debug, Clone)]
pub struct OwnedArray<B: SumOps>(pub(super) Elements<B>);

/// The location of an array's elements.
#[derive(Debug, Clone)]
pub(super) enum Elements<B: SumOps> {
    /// On the device.
    Float(B::FloatTensorPrimitive),
    /// Offloaded.
    Parked(Arc<ParkedCopy>),
    /// In host memory: integers, and bools of one byte each.
    Host(TensorData),
}

impl<B: SumOps> OwnedArray<B> {
    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        match &self.0 {
            Elements::Float(tensor) => tensor.shape().num_elements(),
            Elements::Parked(array) => array.numel(),
            Elements::Host(data) => data.num_elements(),
        }
    }

    /// Copies elements `range` to host memory.
    ///
    /// # Errors
    /// Returns an error if the NVMe file cannot be read.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn data(&self, range: Range<usize>) -> Result<TensorData, ZeroError> {
        Ok(match &self.0 {
            Elements::Float(tensor) => read_float::<B>(narrow::<B>(tensor.clone(), range)),
            Elements::Parked(array) => array.read(range)?,
            Elements::Host(data) => host_range(data, range),
        })
    }
}

/// The properties of an accumulated gradient, without its values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientSum {
    /// The number of micro-batches in the sum.
    pub micro_batches: usize,
    /// The type of the sum.
    pub dtype: DType,
    /// The largest magnitude that this rank's part of the sum had so far, if the overflow check
    /// needs it.
    pub peak: Option<f32>,
}

/// The position of a rank's random streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomState {
    /// The seed that all ranks share.
    pub seed: u64,
    /// The index of the model among the models of a rank, which selects the stream.
    pub model: u32,
    /// The number of 32-bit words that this rank has drawn.
    pub position: u128,
    /// The position of the thread's stream for random ops outside of calls. All models of the
    /// thread share this stream.
    pub between_calls: Option<StreamPosition>,
}

/// The position of one random stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPosition {
    /// The seed that all ranks share.
    pub seed: u64,
    /// The number of 32-bit words that this rank has drawn.
    pub position: u128,
}

impl<B: OptimizerOps> ModelStates<B> {
    /// Returns the additional module paths of the tied parameter at `index`.
    pub fn aliases(&self, index: usize) -> &[String] {
        &self.module.aliases[index]
    }

    /// Returns the arrays of the parameter at `index` and their types. All ranks return the same
    /// list, whatever their pipeline stage holds: a pipeline is saved between steps, when there are
    /// no gradients.
    ///
    /// The list starts with the weights, followed by the moments, the accumulated gradient and the
    /// arrays that differ between ranks. Frozen parameters only have weights.
    pub fn arrays(&self, index: usize) -> Vec<(StateArray, DType)> {
        let parameter = &self.parameters[index];
        // A trained 16-bit parameter has an f32 master on its stage.
        let weights = if parameter.is_trainable() { DType::F32 } else { parameter.dtype() };
        let mut arrays = vec![(StateArray::Weights, weights)];
        if parameter.is_trainable() {
            let moments = self.optimizer.moments(index).iter();
            arrays.extend(moments.map(|name| (StateArray::Moment(name), DType::F32)));
        }
        let gradient = self.gradient_sum(index);
        arrays.extend(gradient.map(|sum| (StateArray::Gradient, sum.dtype)));
        arrays.extend(self.error_arrays(index).map(|array| (array, DType::F32)));
        arrays.extend(self.local_arrays(index).map(|array| (array, DType::F32)));
        arrays
    }

    /// Returns the elements of an array that this rank owns
    /// ([`Partition::owned`](crate::Partition::owned)), flat and without padding.
    ///
    /// Returns `None` if the array does not exist or another pipeline stage owns it, for arrays
    /// that differ between ranks, and for the weights of a quantized parameter. Use
    /// [`owned_errors`](Self::owned_errors) and [`owned_local`](Self::owned_local) for such arrays.
    pub fn owned(&self, index: usize, array: StateArray) -> Option<OwnedArray<B>> {
        let (parameter, share) = (&self.parameters[index], self.settings.share);
        let is_quantized = array == StateArray::Weights && parameter.is_quantized();
        if is_quantized || !parameter.is_owned_here() {
            return None;
        }
        let partition = parameter.partition();
        // Positions are relative to the stored array, which starts at the first owned element if it
        // is a shard.
        let range = share.owned_range(partition);
        // The optimizer stores masters and moments, but no other arrays.
        let kept = match array {
            StateArray::Weights if self.local_rates().is_some() && parameter.is_trainable() => {
                self.optimizer.kept_common(index, range.clone())
            }
            StateArray::Weights => self.optimizer.kept_master(index, range.clone()),
            StateArray::Moment(name) => {
                Some(self.optimizer.kept_moment(index, name, range.clone())?)
            }
            StateArray::Gradient => None,
            StateArray::WorkerError(_) | StateArray::ServerError | StateArray::Local(..) => {
                return None;
            }
        };
        let owned = match (kept, array) {
            (Some(KeptArray::Parked(copy)), _) => return Some(OwnedArray(Elements::Parked(copy))),
            // The result is a view without padding, which shares the memory of the array.
            (Some(KeptArray::Device(state)), _) => narrow::<B>(state, range),
            (None, StateArray::Gradient) => {
                let reducer = self.reducer.borrow();
                match &reducer.accumulated(index)?.elements {
                    SumElements::Device(sum) => share.owned_gradient::<B>(&sum.tensor, partition),
                    SumElements::Parked { array, dtype, .. } => {
                        let copy = array.copy(share.owned_sum(partition), *dtype);
                        return Some(OwnedArray(Elements::Parked(copy)));
                    }
                }
            }
            // Without a master, the parameter itself has the weights: all elements or a shard.
            (None, _) => match parameter.shard() {
                Some(Shard::Device(shard)) => {
                    narrow::<B>(shard.into_inner(), 0..partition.owned(share.rank).len())
                }
                Some(Shard::Parked(array)) => {
                    let owned = 0..partition.owned(share.rank).len();
                    let copy = array.copy(owned, parameter.dtype());
                    return Some(OwnedArray(Elements::Parked(copy)));
                }
                None => flat_range::<B>(&parameter.read(), partition.owned(share.rank)),
            },
        };
        Some(OwnedArray(Elements::Float(owned)))
    }

    /// Returns the properties of an accumulated gradient; `None` if there is none.
    pub fn gradient_sum(&self, index: usize) -> Option<GradientSum> {
        let reducer = self.reducer.borrow();
        let sum = reducer.accumulated(index)?;
        Some(GradientSum {
            micro_batches: sum.count,
            dtype: sum.dtype(),
            peak: sum.peak.as_ref().map(|peak| float_into_host::<B>(peak.clone())[0]),
        })
    }

    /// Returns true if all gradients are reduced and accumulated. Returns false during a backward
    /// pass, and after passes without a reduction (`no_sync`).
    pub fn gradients_are_settled(&self) -> bool {
        self.reducer.borrow().is_settled()
    }

    /// Returns the number of applied optimizer steps, which bias correction depends on.
    pub fn optimizer_steps(&self) -> u64 {
        self.optimizer.time()
    }

    /// Returns the number of optimizer steps that were applied before the first step of the
    /// parameter at `index` with its current states. It is 0 unless the parameter got new states
    /// ([`set_states_start`](Self::set_states_start)).
    pub fn states_start(&self, index: usize) -> u64 {
        self.optimizer.start(index)
    }

    /// Sets [`states_start`](Self::states_start) after [`load_moments`](Self::load_moments). Bias
    /// correction counts the steps after it, as PyTorch counts the steps of each parameter.
    ///
    /// `start` is at most the number of applied steps; a larger one is reduced to it. Has no effect
    /// on a frozen parameter.
    pub fn set_states_start(&mut self, index: usize, start: u64) {
        self.optimizer.set_start(index, start.min(self.optimizer.time()));
    }

    /// Returns the optimizer of the parameter at `index`, with the settings of its group; `None` if
    /// it is frozen.
    pub fn optimizer_of(&self, index: usize) -> Option<&OptimizerPlan> {
        self.optimizer.rule(index)
    }

    /// Returns the names of the optimizer's arrays for the parameter at `index`; empty if it is
    /// frozen.
    pub fn moments(&self, index: usize) -> &'static [&'static str] {
        self.optimizer.moments(index)
    }

    /// Returns the element type in which ops compute.
    pub fn compute_type(&self) -> DType {
        self.settings.compute.into()
    }

    /// Returns the position of this rank's random streams.
    pub fn random_state(&self) -> RandomState {
        let between_calls = self.binding.with_random_between_calls(|random| StreamPosition {
            seed: random.seed(),
            position: random.position(),
        });
        self.binding.with_random(|random| RandomState {
            seed: random.seed(),
            model: random.model(),
            position: random.position(),
            between_calls,
        })
    }

    /// Moves this rank's random streams to the position `state`.
    pub fn set_random_state(&self, state: RandomState) {
        let RandomState { seed, model, position, between_calls } = state;
        self.binding.with_random(|random| {
            *random = RandomStream::new(seed, model, self.groups.data().rank());
            random.seek(position);
        });
        if let Some(StreamPosition { seed, position }) = between_calls {
            self.binding.with_random_between_calls(|random| {
                random.reseed(seed);
                random.seek(position);
            });
        }
    }

    /// Replaces the values of the parameters whose paths `selects` accepts. `read` returns the
    /// values of each segment in f32 or a narrower type. All ranks call this together, between
    /// passes, and select the same parameters. Gathered parameters are released.
    ///
    /// One parameter is read at a time. At stages 1 and 2, each rank reads only its slice, and the
    /// complete parameters are all-gathered. In a pipeline, each rank reads the parameters that its
    /// stage holds.
    ///
    /// # Errors
    /// Returns the errors of `read`, or an error if a selected parameter is quantized, a segment
    /// has the wrong length or a collective fails. The model is then partly loaded.
    pub fn load_weights<E: From<ZeroError>>(
        &mut self,
        selects: impl Fn(&str) -> bool,
        mut read: impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        session::close_recordings(self.binding.ledger()).map_err(ZeroError::from)?;
        // Gathered copies have the old values.
        self.finish_pass()?;
        let stage = self.settings.share.stage;
        let working = self.settings.compute;
        let mut publisher =
            Publisher::new(self.groups.shard(), self.settings.allgather_bucket_size);
        // Quantized parameters are refused before the first one is changed.
        let selected = || self.parameters.iter().filter(|it| selects(it.path()));
        if let Some(quantized) = selected().find(|it| it.is_quantized()) {
            let path = quantized.path().to_owned();
            return Err(ZeroError::QuantizedParameter { path }.into());
        }
        for parameter in selected().filter(|it| it.is_held_here()) {
            // Frozen parameters are not gathered after loading, so every rank reads all elements
            // that it keeps. So do the other pipeline stages of a tied parameter, which have no
            // master.
            let trains = parameter.is_updated_here();
            let cut = if trains { stage.shards_optimizer() } else { stage.shards_parameters() };
            let values = self.read_array(parameter, StateArray::Weights, cut, &mut read)?;
            // The cast rounds in the same way as the optimizer. A backend's cast may round
            // differently.
            let stored = B::cast(values.clone(), working);
            self.optimizer.set_common(parameter.index(), values.clone());
            self.optimizer.set_master(parameter.index(), values).map_err(ZeroError::from)?;
            // A parked shard is overwritten in place, so nothing is published.
            if let Some(shard) = parameter.update_parked() {
                let mut writes = WriteBehind::default();
                let written =
                    shard.write(&float_bytes::<B>(stored), parameter.dtype(), &mut writes);
                written.map_err(ZeroError::from)?;
                continue;
            }
            if stage.shards_parameters() {
                drop(parameter.take());
            }
            // Every rank has read all elements of a frozen parameter that it keeps, so the
            // parameter is stored without an exchange.
            let stage = if trains || stage.shards_parameters() { stage } else { Stage::Disabled };
            publisher.store(stage, parameter, stored).map_err(ZeroError::from)?;
        }
        publisher.flush().map_err(ZeroError::from)?;
        // The momenta of the ranks may still differ.
        let apart = self.local_rates().map(|_| 0.0);
        self.optimizer.set_local_rates(apart);
        self.gatherer.refresh_persistent().map_err(ZeroError::from)?;
        Ok(())
    }

    /// Replaces all moments, and sets the number of applied optimizer steps to `steps`. `read`
    /// returns the values of each segment. Compression errors and states that differ between ranks
    /// are reset.
    ///
    /// # Errors
    /// Returns the errors of `read`, or an error if a segment has the wrong length.
    pub fn load_moments<E: From<ZeroError>>(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        let cut = self.settings.share.stage.shards_optimizer();
        for index in 0..self.parameters.len() {
            let parameter = &self.parameters[index];
            if !parameter.is_updated_here() {
                continue;
            }
            let moments = self.optimizer.moments(index).iter();
            let moments = moments
                .map(|name| self.read_array(parameter, StateArray::Moment(name), cut, &mut read))
                .collect::<Result<Vec<_>, E>>()?;
            self.optimizer.set_moments(index, moments).map_err(ZeroError::from)?;
        }
        self.optimizer.set_time(steps);
        // The loaded moments are equal on all ranks. `load_local` replaces the ones that are not.
        self.optimizer.set_local_rates(None);
        // The number of steps decides whether the next step averages gradients.
        self.reducer.borrow_mut().set_mean(self.optimizer.takes_mean_gradients());
        self.errors.iter_mut().for_each(|errors| *errors = None);
        Ok(())
    }

    /// Replaces all accumulated gradients. `sums` has the properties of each gradient by parameter
    /// index, or `None` for a parameter without a gradient. `read` returns the values of each
    /// segment.
    ///
    /// # Errors
    /// Returns the errors of `read`, or an error if a segment has the wrong length or a gradient
    /// has an unsupported type.
    pub fn load_gradients<E: From<ZeroError>>(
        &mut self,
        sums: &[Option<GradientSum>],
        mut read: impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        self.zero_grad();
        for (parameter, sum) in self.parameters.iter().zip(sums) {
            let sum = sum.filter(|_| parameter.is_updated_here());
            let Some(GradientSum { micro_batches, dtype, peak }) = sum else { continue };
            if !self.reducer.borrow().accumulates_in(dtype, micro_batches) {
                let (path, dtype) = (parameter.path().to_owned(), dtype.name());
                return Err(ZeroError::GradientType { path, dtype }.into());
            }
            let cut = self.settings.share.cuts_gradients;
            let values = self.read_array(parameter, StateArray::Gradient, cut, &mut read)?;
            let values = B::cast(values, FloatDType::from(dtype));
            let peak = peak.map(|peak| {
                float_from_host::<B>(TensorData::new(vec![peak], [1]), parameter.device())
            });
            let index = parameter.index();
            let sum = NewSum::whole(index, values, peak, micro_batches);
            self.reducer.borrow_mut().keep(vec![sum]).map_err(ZeroError::from)?;
        }
        Ok(())
    }

    /// Reads an array in f32: this rank's padded shard if `cut` is true, and otherwise all
    /// elements.
    fn read_array<E: From<ZeroError>>(
        &self,
        parameter: &Parameter<B>,
        array: StateArray,
        cut: bool,
        read: &mut impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
    ) -> Result<B::FloatTensorPrimitive, E> {
        let partition = parameter.partition();
        let (range, len) = match cut {
            true => (partition.owned(self.settings.share.rank), partition.shard_len()),
            false => (0..partition.numel(), partition.numel()),
        };
        let mut values = read_floats(parameter, array, range, read)?;
        // The padding of a shard is zero. Updates do not change it.
        values.resize(len, 0.0);
        let data = TensorData::new(values, Shape::from(vec![len]));
        Ok(float_from_host::<B>(data, parameter.device()))
    }
}

/// Copies elements `range` of the flat data.
pub(super) fn host_range(data: &TensorData, range: Range<usize>) -> TensorData {
    let (size, shape) = (data.dtype.size(), [range.len()]);
    let bytes = &data.as_bytes()[range.start * size..range.end * size];
    TensorData::from_bytes_vec(bytes.to_vec(), shape, data.dtype)
}

/// Reads elements `range` of an array in f32. Does not call `read` for an empty range.
pub(super) fn read_floats<B: SumOps, E: From<ZeroError>>(
    parameter: &Parameter<B>,
    array: StateArray,
    range: Range<usize>,
    read: &mut impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
) -> Result<Vec<f32>, E> {
    let expected = range.len();
    if expected == 0 {
        return Ok(Vec::new());
    }
    let values = into_f32(read(&StateSegment { path: parameter.path(), array, range })?);
    if values.len() != expected {
        let (path, found) = (parameter.path().to_owned(), values.len());
        return Err(ZeroError::SegmentLength { path, array: array.name(), found, expected }.into());
    }
    Ok(values)
}

/// Converts the values to f32, without a copy if they already are.
fn into_f32(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().into_vec().expect("the data was converted to f32 just before")
}
