//! Buffers: module tensors that the optimizer does not update and that are never sharded.
//!
//! [Note: Buffers] A buffer is a running statistic (Burn's `RunningState`, in batch norm), an
//! integer parameter or a bool parameter. At every ZeRO stage, each rank keeps complete buffers in
//! their original element type and starts with rank 0's values. Integer and bool buffers never
//! change after that.
//!
//! Running statistics change in every training forward pass, and each rank updates them from its
//! own micro-batch. Burn keeps the last update of a thread pending until the next update. At the
//! end of each backward pass the ranks therefore synchronize: one all-reduce averages the pending
//! updates of all ranks, and every rank stores the average as the new value. The same exchange runs
//! before an evaluation and before a save, so saved values are current and equal on all ranks. The
//! sum is computed in f32 in rank order and divided by the number of ranks.
//!
//! ```text
//!  rank 0   value v ──forward──► pending u0 ─┐
//!  rank 1   value v ──forward──► pending u1 ─┼─ all-reduce ─► value (u0 + u1 + u2) / 3
//!  rank 2   value v ──forward──► pending u2 ─┘                on every rank
//! ```
//!
//! - For a running mean, the result is the mean over all samples of the ranks' micro-batches,
//!   provided that these have the same size. For a running variance, it is the mean of the ranks'
//!   variances, without the variance of the ranks' means. This is the expected value of the
//!   variance on a single rank. PyTorch's `DistributedDataParallel` instead broadcasts rank 0's
//!   buffers and ignores the statistics of other ranks.
//! - If an element is infinite or NaN after an update (from an empty micro-batch), its previous
//!   value is averaged instead. A statistic that no rank updated stays bitwise the same.
//!
//! `sharing.rs` distinguishes buffers from frozen parameters.

mod sharing;
mod walk;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn_backend::{Backend, DType, Shape, TensorData, TensorMetadata};
use deepburn_comm::{CollectiveTag, ReduceOp};
use deepburn_ops::{OptimizerOps, float_from_host, float_into_host, read_float};

use crate::decorator::{Training, portable};
use crate::error::ZeroError;
use crate::group::flat::in_type;
use crate::group::{DeviceArray, Group};
use crate::ledger::{Category, Lease, Ledger};
use crate::module::{AutodiffModule, ParamId};
use crate::session::{FullTensor, Leased};

use walk::{FoundBuffers, Install, Live, NewValue};

/// The kind of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BufferKind {
    /// A running statistic, which training forward passes update.
    RunningStatistic,
    /// An integer parameter, which is constant.
    Int,
    /// A bool parameter, which is constant.
    Bool,
}

/// A tensor of the module that is not a float parameter: a running statistic, or an integer or bool
/// parameter. Every rank keeps the complete tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// The module path of the first occurrence.
    path: String,
    /// The paths of further occurrences, in module order.
    aliases: Vec<String>,
    /// The shape, which never changes.
    shape: Shape,
    /// The element type, which never changes.
    dtype: DType,
    kind: BufferKind,
}

impl Buffer {
    /// Returns the module path, such as `norm.running_mean`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the additional module paths of an integer or bool parameter that occurs more than
    /// once.
    pub fn aliases(&self) -> &[String] {
        &self.aliases
    }

    /// Returns the shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the element type, which mixed precision does not change.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the kind.
    pub fn kind(&self) -> BufferKind {
        self.kind
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.num_elements()
    }

    /// Returns the size in bytes on each rank.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// Describes the properties that must be the same on all ranks.
    fn description(&self) -> String {
        let Self { path, shape, dtype, kind, .. } = self;
        format!("{kind:?} {path} {:?} {}", shape.to_vec(), dtype.name())
    }
}

/// The buffers of a module on one rank.
///
/// The tensors stay in the module. The table stores their descriptions and parameter ids, and keeps
/// the last averages to detect updates.
pub(crate) struct BufferTable<B: Backend> {
    group: Group<B>,
    ledger: Ledger,
    /// All buffers in module order.
    buffers: Vec<Buffer>,
    /// The index of each buffer by the id of its parameter.
    ids: HashMap<ParamId, usize>,
    /// The device of the running statistics; `None` if there are none.
    device: Option<B::Device>,
    /// The last average over ranks of each running statistic, by buffer; `None` for constants.
    agreed: RefCell<Vec<Option<FullTensor<B>>>>,
    /// The ledger entries of integers and bools.
    _constants: Vec<Lease>,
}

impl<B: OptimizerOps> BufferTable<B> {
    /// Finds the buffers of `module` and makes its running statistics independent of the module's
    /// clones. Also returns their values, for [`start_from_rank_0`](Self::start_from_rank_0). Runs
    /// no collective.
    ///
    /// # Errors
    /// Returns an error if two layers share a running statistic.
    pub(crate) fn find<M: AutodiffModule<Training<B>>>(
        module: M,
        group: &Group<B>,
        ledger: &Ledger,
    ) -> Result<(M, Self, Vec<TensorData>), ZeroError> {
        let (module, statistics) = sharing::take_apart::<B, M>(module)?;
        let mut found = FoundBuffers::<B>::new(statistics);
        module.visit(&mut found);
        let FoundBuffers { buffers, ids, values, device, .. } = found;
        // The ledger entry of a statistic is stored with its tensor, which updates replace.
        // Constants are counted once, here.
        let is_constant = |buffer: &&Buffer| buffer.kind != BufferKind::RunningStatistic;
        let constants = buffers.iter().filter(is_constant);
        let _constants =
            constants.map(|buffer| ledger.hold(Category::Parameters, buffer.bytes())).collect();
        let table = Self {
            group: group.clone(),
            ledger: ledger.clone(),
            agreed: RefCell::new(vec![None; buffers.len()]),
            buffers,
            ids,
            device,
            _constants,
        };
        Ok((module, table, values))
    }

    /// Sets the buffers on all ranks to rank 0's values. `own` are the values of this rank. Without
    /// buffers, the module is returned unchanged and no collective runs.
    ///
    /// All ranks call this together, after they have compared their modules
    /// ([`check_module`](crate::sharding::check_module)).
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    pub(crate) fn start_from_rank_0<M: AutodiffModule<Training<B>>>(
        &self,
        module: M,
        own: &[TensorData],
    ) -> Result<M, ZeroError> {
        if self.buffers.is_empty() {
            return Ok(module);
        }
        // Before the module is mapped, because a mapper must not run collectives.
        let values = self.values_of_rank_0(own)?;
        // Statistics that were just separated have no pending updates.
        Ok(self.install_data(module, values.into_iter().map(Some).collect()))
    }

    /// Returns one line for each buffer. Ranks compare these lines to verify that they have the
    /// same module.
    pub(crate) fn descriptions(&self) -> Vec<String> {
        self.buffers.iter().map(Buffer::description).collect()
    }

    /// Returns the buffers in module order.
    pub(crate) fn all(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Returns true if the tensor with this id is a buffer.
    pub(crate) fn contains(&self, id: ParamId) -> bool {
        self.ids.contains_key(&id)
    }

    /// Averages running statistics over the ranks if any rank updated them; see the module
    /// documentation. All ranks call this together. Without statistics, no collective runs.
    ///
    /// # Errors
    /// Returns an error if a statistic changed its shape or disappeared from the module, or if the
    /// collective fails.
    pub(crate) fn agree<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
    ) -> Result<(), ZeroError> {
        let Some(statistics) = self.updates(module)? else { return Ok(()) };
        // On one rank, the updates already are the new values.
        let changed = match self.group.world_size() {
            1 => statistics,
            _ => self.average(statistics)?,
        };
        if changed.iter().any(|update| update.changed) {
            let mut values: Vec<_> = self.buffers.iter().map(|_| None).collect();
            for Update { index, tensor, changed } in changed {
                values[index] = changed.then(|| self.entered(index, tensor));
            }
            // Clones share running statistics, so this changes the statistics of `module`.
            drop(self.install_tensors(module.clone(), values, HashMap::new()));
        }
        Ok(())
    }

    /// Returns this rank's contribution to each running statistic; `None` if the module has none.
    fn updates<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
    ) -> Result<Option<Vec<Update<B>>>, ZeroError> {
        if self.agreed.borrow().iter().all(Option::is_none) {
            return Ok(None);
        }
        // Burn keeps the last update of a thread pending, so the module would still have the value
        // before it.
        synchronize::<B, M>(module);
        let mut live = Live::<B>::new(&self.ids, self.buffers.len());
        module.visit(&mut live);
        let agreed = self.agreed.borrow();
        let pairs = agreed.iter().zip(live.found).enumerate();
        let statistics =
            pairs.filter_map(|(index, (previous, live))| Some((index, previous.as_ref()?, live)));
        let updates = statistics.map(|(index, previous, live)| {
            let live = live.ok_or_else(|| self.missing(index))?;
            let Buffer { path, shape, dtype, .. } = &self.buffers[index];
            // A value that this table installed has the stored ledger entry. An update has a
            // different entry or none.
            let changed = !same_lease(previous, &live);
            if !changed {
                return Ok(Update { index, tensor: previous.tensor.clone(), changed });
            }
            if live.tensor.shape() != *shape {
                let (path, found) = (path.clone(), live.tensor.shape().to_vec());
                return Err(ZeroError::BufferShape { path, found, expected: shape.to_vec() });
            }
            let update = in_type::<B>(live.tensor, (*dtype).into());
            let tensor = finite_or::<B>(update, previous.tensor.clone());
            Ok(Update { index, tensor, changed })
        });
        updates.collect::<Result<_, _>>().map(Some)
    }

    /// Averages over the ranks in one all-reduce. A statistic that no rank updated is returned
    /// unchanged, because the mean of equal values may have different bits.
    ///
    /// The same collective averages a flag for each statistic. The mean of the flag is 0 if and
    /// only if no rank updated the statistic.
    fn average(&self, updates: Vec<Update<B>>) -> Result<Vec<Update<B>>, ZeroError> {
        let Some(device) = &self.device else { return Ok(updates) };
        let flags: Vec<f32> =
            updates.iter().map(|update| if update.changed { 1.0 } else { 0.0 }).collect();
        let all_changed = updates.iter().all(|update| update.changed);
        let shape = [flags.len()];
        let flags = float_from_host::<B>(TensorData::new(flags, shape), device);
        let mut arrays: Vec<_> =
            updates.iter().map(|update| DeviceArray::Dense(update.tensor.clone())).collect();
        arrays.push(DeviceArray::Dense(flags));
        let tag = CollectiveTag::new("running statistics", updates.len() as u64);
        let mut means = self.group.arrays().all_reduce(tag, arrays, ReduceOp::Mean)?.wait()?;
        let flags = means.pop().filter(|_| !all_changed);
        let flags = flags.map(|flags| float_into_host::<B>(flags.into_flat()));
        let averaged = updates.into_iter().zip(means).enumerate().map(|(place, (update, mean))| {
            let changed = flags.as_ref().is_none_or(|flags| flags[place] > 0.0);
            let tensor =
                B::float_reshape(mean.into_flat(), self.buffers[update.index].shape.clone());
            Update { tensor, changed, ..update }
        });
        Ok(averaged.collect())
    }

    /// Returns the values of buffer `index`: the last average of a running statistic, or the
    /// constant. Bools have one byte each.
    ///
    /// # Errors
    /// Returns an error if `module` does not contain the buffer.
    pub(crate) fn data<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
        index: usize,
    ) -> Result<TensorData, ZeroError> {
        if let Some(tensor) = self.statistic(index) {
            return Ok(read_float::<B>(tensor));
        }
        let mut live = Live::<B>::new(&self.ids, self.buffers.len()).with_constant(index);
        module.visit(&mut live);
        live.constant.map(portable).ok_or_else(|| self.missing(index))
    }

    /// Returns the error for a module without buffer `index`.
    fn missing(&self, index: usize) -> ZeroError {
        ZeroError::UnknownBuffer { path: self.buffers[index].path.clone() }
    }

    /// Returns the last average of a running statistic.
    pub(crate) fn statistic(&self, index: usize) -> Option<B::FloatTensorPrimitive> {
        Some(self.agreed.borrow()[index].as_ref()?.tensor.clone())
    }

    /// Returns `module` with new values of its buffers, by index; `None` leaves a buffer unchanged.
    /// Running statistics change in all clones of the module.
    pub(crate) fn install<M: AutodiffModule<Training<B>>>(
        &self,
        module: M,
        values: Vec<Option<TensorData>>,
    ) -> M {
        // A pending update would later replace the new value.
        synchronize::<B, M>(&module);
        self.install_data(module, values)
    }

    /// Works like [`install`](Self::install), for a module without pending updates.
    fn install_data<M: AutodiffModule<Training<B>>>(
        &self,
        module: M,
        values: Vec<Option<TensorData>>,
    ) -> M {
        let (mut tensors, mut constants) = (Vec::new(), HashMap::new());
        for (index, value) in values.into_iter().enumerate() {
            let Buffer { dtype, kind, .. } = &self.buffers[index];
            let statistic = *kind == BufferKind::RunningStatistic;
            tensors.push(match (value, &self.device) {
                (Some(data), Some(device)) if statistic => {
                    let tensor = B::float_from_data(data.convert_dtype(*dtype), device);
                    Some(self.entered(index, tensor))
                }
                (Some(data), _) => {
                    constants.insert(index, data);
                    None
                }
                (None, _) => None,
            });
        }
        self.install_tensors(module, tensors, constants)
    }

    /// Works like [`install_data`](Self::install_data), with statistics as tensors.
    fn install_tensors<M: AutodiffModule<Training<B>>>(
        &self,
        module: M,
        statistics: Vec<Option<FullTensor<B>>>,
        mut constants: HashMap<usize, TensorData>,
    ) -> M {
        let mut values = HashMap::new();
        for (id, index) in &self.ids {
            if let Some(full) = &statistics[*index] {
                values.insert(*id, NewValue::Statistic(full.clone()));
            } else if let Some(data) = constants.remove(index) {
                values.insert(*id, NewValue::Constant(data));
            }
        }
        // The table keeps the installed tensors. At the next synchronization, a statistic with the
        // same ledger entry has not been updated.
        for (agreed, new) in self.agreed.borrow_mut().iter_mut().zip(statistics) {
            *agreed = new.or(agreed.take());
        }
        module.map(&mut Install::<B> { values })
    }

    /// Wraps a running statistic with a new ledger entry.
    fn entered(&self, index: usize, tensor: B::FloatTensorPrimitive) -> FullTensor<B> {
        let lease = self.ledger.hold(Category::Parameters, self.buffers[index].bytes());
        Leased { tensor, lease: Some(Arc::new(lease)) }
    }

    /// Broadcasts the values of rank 0 in one message. The layout is the same on all ranks, because
    /// they have compared their buffers before.
    fn values_of_rank_0(&self, own: &[TensorData]) -> Result<Vec<TensorData>, ZeroError> {
        let bytes: Vec<u8> = own.iter().flat_map(|data| data.as_bytes()).copied().collect();
        let bytes = self.group.broadcast_bytes(CollectiveTag::new("buffers", 1), &bytes, 0)?;
        let mut rest = &bytes[..];
        let values = own.iter().map(|data| {
            let (bytes, after) = rest.split_at(data.as_bytes().len());
            rest = after;
            TensorData::from_bytes_vec(bytes.to_vec(), data.shape.clone(), data.dtype)
        });
        Ok(values.collect())
    }
}

/// The contribution of one rank to an average; after the all-reduce, the average.
struct Update<B: Backend> {
    /// The index of the buffer.
    index: usize,
    /// The value, in the buffer's type and shape.
    tensor: B::FloatTensorPrimitive,
    /// Whether this rank updated the statistic; after the all-reduce, whether any rank did.
    changed: bool,
}

/// Applies the pending update of each running statistic. `valid` applies all pending updates as a
/// side effect, also in `module`, because the clone that it makes shares the statistics.
///
/// Burn's `RunningState` has no other method that does this.
fn synchronize<B: OptimizerOps, M: AutodiffModule<Training<B>>>(module: &M) {
    drop(module.valid());
}

/// Returns true if both tensors have the same ledger entry, and therefore the same memory. Returns
/// false if either tensor has no entry.
fn same_lease<T>(left: &Leased<T>, right: &Leased<T>) -> bool {
    match (&left.lease, &right.lease) {
        (Some(left), Some(right)) => Arc::ptr_eq(left, right),
        _ => false,
    }
}

/// Returns `update` with the elements of `previous` where it is infinite or NaN.
fn finite_or<B: Backend>(
    update: B::FloatTensorPrimitive,
    previous: B::FloatTensorPrimitive,
) -> B::FloatTensorPrimitive {
    let bool_dtype = burn_backend::get_device_settings::<B>(&B::float_device(&update)).bool_dtype;
    // `x - x` is zero for finite numbers and NaN for all others.
    let difference = B::float_sub(update.clone(), update.clone());
    let not_finite = B::float_is_nan(difference, bool_dtype);
    B::float_mask_where(update, not_finite, previous)
}
