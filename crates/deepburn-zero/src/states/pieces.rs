//! The model states piece by piece, as checkpoints store them and get them back.
//!
//! What is given out is the same at every stage: the elements that a rank owns of each array, without
//! padding. What is taken back is whatever range this rank keeps at its own stage and number of
//! ranks, so states that were given out at one stage load at any other. Afterwards working copies,
//! whole and resident parameters and masters are what they would be without the interruption.

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_config::Stage;
use deepburn_ops::{OptimizerOps, float_bytes, float_from_host, float_into_host, read_float};

use super::ModelStates;
use crate::array::{flat_range, narrow};
use crate::error::ZeroError;
use crate::optimizer::{COMMON, KeptArray};
use crate::parameter::{Parameter, Shard};
use crate::parked::{ParkedCopy, WriteBehind};
use crate::publish::Publisher;
use crate::random::RandomStream;
use crate::reduce::SumElements;
use crate::session;

/// One of the arrays that belong to a parameter, each as long as the parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateArray {
    /// The values: masters in full precision where there are any. Those that all ranks have in common, between two
    /// exchanges of 0/1 Adam.
    Weights,
    /// What the optimizer keeps, by PyTorch's name for it: `exp_avg`, `exp_avg_sq`,
    /// `momentum_buffer`, `sum`. Between two exchanges of 0/1 Adam, elements of `exp_avg` are those of the rank that
    /// owns them.
    Moment(&'static str),
    /// The gradient accumulated so far, between two micro-batches of a step.
    Gradient,
    /// The compression error of the momentum of this rank.
    WorkerError(usize),
    /// The compression error of the mean momentum, of which each rank serves a part.
    ServerError,
    /// A state of 0/1 Adam on the rank of this number, where ranks differ: `exp_avg`, `momentum_accumulator`.
    Local(&'static str, usize),
}

impl StateArray {
    fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Moment(name) | Self::Local(name, _) => name,
            Self::Gradient => "gradient",
            Self::WorkerError(_) => "worker error",
            Self::ServerError => "server error",
        }
    }
}

/// Elements of an array of a parameter that this rank has to be given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Module path of the parameter.
    pub path: &'a str,
    /// Which array.
    pub array: StateArray,
    /// Elements of the flat parameter; empty for a rank that holds nothing but padding.
    pub range: Range<usize>,
}

/// The elements that a rank owns of an array, as they were when they were asked for: later steps
/// leave them as they are. Costs nothing until then; a step that finds it still there updates a copy
/// instead. May be sent to another thread.
#[derive(Debug, Clone)]
pub struct OwnedArray<B: Backend>(pub(super) Elements<B>);

/// Where the elements of an array are.
#[derive(Debug, Clone)]
pub(super) enum Elements<B: Backend> {
    /// On the device.
    Float(B::FloatTensorPrimitive),
    /// States that are offloaded.
    Parked(Arc<ParkedCopy>),
    /// In host memory: integers, and bools of one byte each.
    Host(TensorData),
}

impl<B: Backend> OwnedArray<B> {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        match &self.0 {
            Elements::Float(tensor) => tensor.shape().num_elements(),
            Elements::Parked(array) => array.numel(),
            Elements::Host(data) => data.num_elements(),
        }
    }

    /// Elements `range` in host memory.
    ///
    /// # Errors
    /// The disk on which they are fails.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn data(&self, range: Range<usize>) -> Result<TensorData, ZeroError> {
        Ok(match &self.0 {
            Elements::Float(tensor) => read_float::<B>(narrow::<B>(tensor.clone(), range)),
            Elements::Parked(array) => array.read(range)?,
            Elements::Host(data) => host_range(data, range),
        })
    }
}

/// What is to be known of an accumulated gradient besides its values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientSum {
    /// Micro-batches in it.
    pub micro_batches: usize,
    /// Type in which it is kept.
    pub dtype: DType,
    /// Largest magnitude that the part of it on this rank had on its way, where a step is skipped
    /// because of that.
    pub peak: Option<f32>,
}

/// Where the random stream of a rank stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomState {
    /// The seed that all ranks share.
    pub seed: u64,
    /// The number of the model among those of a rank, which sets the streams of models apart.
    pub model: u32,
    /// Words drawn so far by this rank.
    pub position: u128,
    /// The stream of the thread for draws outside of calls, which models on it share.
    pub between_calls: Option<StreamPosition>,
}

/// Where a random stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPosition {
    /// The seed that all ranks share.
    pub seed: u64,
    /// Words drawn so far by this rank.
    pub position: u128,
}

impl<B: OptimizerOps> ModelStates<B> {
    /// Further module paths of the parameter at `index`, which are tied to its own.
    pub fn aliases(&self, index: usize) -> &[String] {
        &self.aliases[index]
    }

    /// The arrays that there are of the parameter at `index`, and their types. All ranks have the
    /// same.
    pub fn arrays(&self, index: usize) -> Vec<(StateArray, DType)> {
        let parameter = &self.parameters[index];
        let weights = match self.optimizer.has_master(index) {
            true => DType::F32,
            false => parameter.dtype(),
        };
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

    /// The elements of an array that this rank owns ([`Partition::owned`](crate::Partition::owned)),
    /// flat, without padding. `None` where there is no such array, and for errors and what ranks have of
    /// their own, which [`owned_errors`](Self::owned_errors) and [`owned_local`](Self::owned_local) exchange
    /// first.
    pub fn owned(&self, index: usize, array: StateArray) -> Option<OwnedArray<B>> {
        let (parameter, share) = (&self.parameters[index], self.share);
        let partition = parameter.partition();
        let range = share.owned_range(partition);
        let kept = match array {
            StateArray::Weights if self.local_rates().is_some() && parameter.is_trainable() => {
                self.optimizer.kept_moment(index, COMMON, range.clone())
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

    /// About the accumulated gradient of the parameter at `index`; `None` where there is none.
    pub fn gradient_sum(&self, index: usize) -> Option<GradientSum> {
        let reducer = self.reducer.borrow();
        let sum = reducer.accumulated(index)?;
        Some(GradientSum {
            micro_batches: sum.count,
            dtype: sum.dtype(),
            peak: sum.peak.as_ref().map(|peak| float_into_host::<B>(peak.clone())[0]),
        })
    }

    /// Whether the accumulated gradients are all that there is: not within a backward pass, nor after
    /// passes whose gradients stayed on this rank.
    pub fn gradients_are_settled(&self) -> bool {
        self.reducer.borrow().is_settled()
    }

    /// Optimizer steps taken, by which moments are corrected.
    pub fn optimizer_steps(&self) -> u64 {
        self.optimizer.time()
    }

    /// Names of the arrays that the optimizer keeps of the parameter at `index`; none of a frozen one.
    pub fn moments(&self, index: usize) -> &'static [&'static str] {
        self.optimizer.moments(index)
    }

    /// Type that ops use.
    pub fn compute_type(&self) -> DType {
        self.compute.into()
    }

    /// Where this rank's random stream (dropout) stands.
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

    /// Continues this rank's random stream at `state`.
    pub fn set_random_state(&self, state: RandomState) {
        let RandomState { seed, model, position, between_calls } = state;
        self.binding.with_random(|random| {
            *random = RandomStream::new(seed, model, self.share.rank);
            random.seek(position);
        });
        if let Some(StreamPosition { seed, position }) = between_calls {
            self.binding.with_random_between_calls(|random| {
                random.reseed(seed);
                random.seek(position);
            });
        }
    }

    /// Replaces the values of all parameters by what `read` gives for each piece, as f32 or a type
    /// narrower. All ranks call this together, between passes; what was gathered is let go. After an
    /// error the model is partly the old one and partly the new.
    ///
    /// # Errors
    /// Those of `read`, a piece of another length, or a failed collective.
    pub fn load_weights<E: From<ZeroError>>(
        &mut self,
        mut read: impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        session::close_recordings(&self.ledger).map_err(ZeroError::from)?;
        self.finish_pass()?;
        let stage = self.share.stage;
        let working = self.compute;
        let mut publisher = Publisher::new(&self.group, self.allgather_bucket_size);
        for parameter in self.parameters.iter() {
            // What is not updated is not handed round either: every rank reads what it keeps.
            let trains = parameter.is_trainable();
            let cut = if trains { stage.shards_optimizer() } else { stage.shards_parameters() };
            let values = self.piece(parameter, StateArray::Weights, cut, &mut read)?;
            // Rounded as the optimizer rounds: a backend's own cast may not.
            let stored = B::cast(values.clone(), working);
            self.optimizer.set_common(parameter.index(), values.clone());
            self.optimizer.set_master(parameter.index(), values).map_err(ZeroError::from)?;
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
            let stage = if trains || stage.shards_parameters() { stage } else { Stage::Disabled };
            publisher.store(stage, parameter, stored).map_err(ZeroError::from)?;
        }
        publisher.flush().map_err(ZeroError::from)?;
        // Momenta of ranks may still differ.
        let apart = self.local_rates().map(|_| 0.0);
        self.optimizer.set_local_rates(apart);
        self.gatherer.refresh_resident(&self.resident).map_err(ZeroError::from)?;
        Ok(())
    }

    /// Replaces all moments by what `read` gives for each piece, after `steps` optimizer steps. Resets
    /// compression errors and what ranks had of their own.
    ///
    /// # Errors
    /// Those of `read`, or a piece of another length.
    pub fn load_moments<E: From<ZeroError>>(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        let cut = self.share.stage.shards_optimizer();
        for index in 0..self.parameters.len() {
            let parameter = &self.parameters[index];
            if !parameter.is_trainable() {
                continue;
            }
            let moments = self.optimizer.moments(index).iter();
            let moments = moments
                .map(|name| self.piece(parameter, StateArray::Moment(name), cut, &mut read))
                .collect::<Result<Vec<_>, E>>()?;
            self.optimizer.set_moments(index, moments).map_err(ZeroError::from)?;
        }
        self.optimizer.set_time(steps);
        self.optimizer.set_local_rates(None);
        self.reducer.borrow_mut().set_mean(self.optimizer.takes_mean_gradients());
        self.errors.iter_mut().for_each(|errors| *errors = None);
        Ok(())
    }

    /// Replaces all accumulated gradients: those of which there is a sum by what `read` gives for
    /// each piece, the others by none. `sums` are by parameter index.
    ///
    /// # Errors
    /// Those of `read`, a piece of another length, or a type that gradients are not kept in here.
    pub fn load_gradients<E: From<ZeroError>>(
        &mut self,
        sums: &[Option<GradientSum>],
        mut read: impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        self.zero_grad();
        for (parameter, sum) in self.parameters.iter().zip(sums) {
            let Some(GradientSum { micro_batches, dtype, peak }) = *sum else { continue };
            if !self.reducer.borrow().accumulates_in(dtype, micro_batches) {
                let (path, dtype) = (parameter.path().to_owned(), dtype.name());
                return Err(ZeroError::GradientType { path, dtype }.into());
            }
            let cut = self.share.cuts_gradients;
            let values = self.piece(parameter, StateArray::Gradient, cut, &mut read)?;
            let values = B::cast(values, FloatDType::from(dtype));
            let peak = peak.map(|peak| {
                float_from_host::<B>(TensorData::new(vec![peak], [1]), parameter.device())
            });
            let mut reducer = self.reducer.borrow_mut();
            let kept = reducer.keep(parameter.index(), values, peak, micro_batches);
            kept.map_err(ZeroError::from)?;
        }
        Ok(())
    }

    /// An array as this rank keeps it, in f32: its chunk, padded, or with `cut` off all elements.
    fn piece<E: From<ZeroError>>(
        &self,
        parameter: &Parameter<B>,
        array: StateArray,
        cut: bool,
        read: &mut impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
    ) -> Result<B::FloatTensorPrimitive, E> {
        let partition = parameter.partition();
        let (range, len) = match cut {
            true => (partition.owned(self.share.rank), partition.shard_len()),
            false => (0..partition.numel(), partition.numel()),
        };
        let mut values = read_floats(parameter, array, range, read)?;
        values.resize(len, 0.0);
        let data = TensorData::new(values, Shape::from(vec![len]));
        Ok(float_from_host::<B>(data, parameter.device()))
    }
}

/// Elements `range` of the flat order.
pub(super) fn host_range(data: &TensorData, range: Range<usize>) -> TensorData {
    let (size, shape) = (data.dtype.size(), [range.len()]);
    let bytes = &data.as_bytes()[range.start * size..range.end * size];
    TensorData::from_bytes_vec(bytes.to_vec(), shape, data.dtype)
}

/// Reads elements `range` of an array in f32. Reads nothing for an empty range.
pub(super) fn read_floats<B: Backend, E: From<ZeroError>>(
    parameter: &Parameter<B>,
    array: StateArray,
    range: Range<usize>,
    read: &mut impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
) -> Result<Vec<f32>, E> {
    let expected = range.len();
    if expected == 0 {
        return Ok(Vec::new());
    }
    let values = into_f32(read(&Piece { path: parameter.path(), array, range })?);
    if values.len() != expected {
        let (path, found) = (parameter.path().to_owned(), values.len());
        return Err(ZeroError::PieceLength { path, array: array.name(), found, expected }.into());
    }
    Ok(values)
}

/// The values in f32, without a copy where they are.
fn into_f32(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().into_vec().expect("the data was converted to f32 just before")
}
