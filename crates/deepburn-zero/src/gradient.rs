//! Reduces gradients over the ranks in buckets and accumulates them for the optimizer.
//!
//! Autodiff reports the gradient of a parameter as soon as it is final, and the gradient is added
//! to a bucket. A full bucket is reduced over all ranks while backward continues. The result is
//! added to the accumulated gradient, and the full gradient is freed. Stages 0 and 1 all-reduce a
//! bucket. Stages 2 and 3 reduce-scatter it, and a rank keeps only its shard of the accumulated
//! gradient; so does stage 1 with offloaded states or hybrid sharding, whose replicas then exchange
//! shards only.
//!
//! ```text
//!  autodiff ──collect──► bucket ──flush──► in flight ──land──► sum of micro-batches ──take──► step
//!             whole      whole             whole                shard, or whole at
//!             gradient   gradients         gradients            stages 0 and 1
//!  no_sync: ──collect──► local sum of this rank, included in the next reduction
//! ```
//!
//! In a pipeline, gradients may reach the bucket after their backward pass: parts of them come from
//! another stage (`late.rs`), or the schedule defers their computation (`deferred.rs`).
//!
//! [`GradientState`] describes everything that a rank holds for the gradient of one parameter. The
//! bucket and the reductions in flight are lists of parameter indices, in the order in which all
//! ranks send them. If ranks use different orders, the collective fails before data is sent,
//! because its tag has a fingerprint of the list.
//!
//! A bucket has at most `reduce_bucket_size` elements, or 1/16 of the model (`BUCKETS_PER_MODEL`).
//! At most two buckets of gradients exist at a time: one that is being filled and, with
//! `overlap_comm`, one that is being reduced. Buckets are counted as [`Category::Buckets`] and
//! accumulated gradients as [`Category::Gradients`].
//!
//! All functions run on the thread of the rank. A reduction makes progress on other ranks' threads
//! or on the communication thread, and `land` waits for it.
//!
//! [Note: Order of additions] Every stage reduces each micro-batch over the ranks, in rank order,
//! and then adds the result to the sum of earlier micro-batches. Summing micro-batches first would
//! save messages at stages 0 and 1. However, the additions would have another order, and results
//! would no longer be bitwise identical at all stages.
//!
//! [Note: Replicas] With hybrid sharding, gradients are reduced in the shard group only. The sums
//! of the replicas are added up once per step (`replicas.rs`), in the order of the replicas. Sums
//! therefore nest, and their last bits depend on the mesh, at every stage in the same way.
//!
//! Main type: [`GradientReducer`]. The decorator passes gradients to it, which it finds through the
//! model's context (`session`). Its sums are on the device or offloaded (`offload`), and a step
//! (`states`) takes them. It knows parameters by their partition, and neither tensors of autodiff
//! nor optimizers.

mod accumulation;
mod backward_watch;
mod deferred;
mod late;
mod replicas;
mod scaling;
mod state;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use burn_backend::TensorMetadata;
use burn_backend::distributed::DistributedParamId;
use deepburn_comm::{CollectiveTag, CommError, Payload, Pending, ReduceOp};
use deepburn_config::{GradientPlan, ReductionPlan};
use deepburn_ops::SumOps;

use crate::group::{DeviceArray, MeshGroups, own};
use crate::ledger::{Category, Ledger};
use crate::offload::WriteBehind;
use crate::parameter::Parameter;
use crate::session;

use accumulation::WaitingSums;
use backward_watch::BackwardWatch;
use deferred::DeferredGradients;
use late::{LateGradients, LatePart};
use scaling::Scaling;
use state::{Collected, GradientState};

pub(crate) use accumulation::NewSum;
pub(crate) use deferred::ReportedGradient;
pub(crate) use scaling::Types;
pub(crate) use state::{Accumulated, GradientChecker, SumElements, SumHome};

/// Collects, reduces and accumulates the gradients of one rank.
///
/// Between backward passes, the bucket is empty and nothing is in flight. Every gradient is then in
/// its sum, or local if synchronization is off.
#[derive(Debug)]
pub(crate) struct GradientReducer<B: SumOps> {
    /// Gradients are reduced in the shard group. Their mean is over the data-parallel ranks.
    groups: MeshGroups<B>,
    /// All parameters of the model, by index.
    parameters: Arc<[Arc<Parameter<B>>]>,
    ledger: Ledger,
    policy: ReducerPolicy<B>,
    /// The factors before and after the sum over ranks, for the current number of micro-batches.
    scaling: Scaling,
    buckets: Buckets<B>,
    postponed: Postponed<B>,
    /// The gradient of each parameter, by index.
    gradients: Vec<GradientState<B>>,
    sums: SumStore<B>,
    /// Whether gradients are reduced during backward; false inside the engine's `no_sync`.
    synchronize: bool,
    /// Whether gradients are averaged over ranks. Otherwise each rank accumulates its own
    /// gradients.
    mean: bool,
    /// Detects the start of backward passes.
    pub(crate) watch: BackwardWatch,
}

/// The gradients on their way to their sums.
#[derive(Debug)]
struct Buckets<B: SumOps> {
    /// The number of elements at which the bucket is reduced, at least 1.
    capacity: usize,
    /// The parameters whose gradients are in the bucket. A parameter may occur more than once.
    filling: Vec<usize>,
    /// The buckets that are being reduced, oldest first. There is at most one with `overlap_comm`,
    /// and none without it.
    in_flight: VecDeque<Flight<B>>,
}

/// The gradients that enter the bucket after their backward pass. A parameter is only in one of the
/// lists.
#[derive(Debug, Default)]
struct Postponed<B: SumOps> {
    /// The gradients of which another pipeline stage sends a part.
    late: LateGradients<B>,
    /// The gradients that are computed later.
    deferred: DeferredGradients<B>,
}

/// Where accumulated gradients are kept.
#[derive(Debug)]
struct SumStore<B: SumOps> {
    /// The location of each accumulated gradient, by parameter index.
    homes: Vec<SumHome>,
    /// The sums that are kept together.
    waiting: WaitingSums<B>,
    /// The pending writes of parked sums.
    writes: WriteBehind,
}

/// A bucket that is being reduced.
#[derive(Debug)]
struct Flight<B: SumOps> {
    /// Parameters in the order of the exchanged arrays.
    indices: Vec<usize>,
    /// The collective. Its results are in the order of `indices`.
    pending: Pending<DeviceArray<B>>,
}

/// Returns the reducer of the current model if the model is on backend `B`.
pub(crate) fn reducer<B: SumOps>() -> Option<Rc<RefCell<GradientReducer<B>>>> {
    session::reducer()?.downcast().ok()
}

/// Returns the reducer and the parameter index of a mark of the current model, if the model is on
/// backend `B`; `None` for a mark of another model.
pub(crate) fn reducer_of<B: SumOps>(
    mark: DistributedParamId,
) -> Option<(Rc<RefCell<GradientReducer<B>>>, usize)> {
    let (reducer, index) = session::reducer_of(mark)?;
    Some((reducer.downcast().ok()?, index))
}

/// Returns the reducer of the current model and the index of a trainable parameter; `None` for a
/// parameter of another model.
pub(crate) fn reducer_with<B: SumOps>(
    parameter: &Arc<Parameter<B>>,
) -> Option<(Rc<RefCell<GradientReducer<B>>>, usize)> {
    let (reducer, index) = (reducer::<B>()?, parameter.index());
    // Indices are only unique within a model, so the parameter itself is compared.
    let is_own =
        reducer.borrow().parameters.get(index).is_some_and(|own| Arc::ptr_eq(own, parameter));
    (is_own && parameter.is_trainable()).then_some((reducer, index))
}

/// The capacity of a bucket is at most the number of trainable elements divided by this number. A
/// gradient that is larger than the capacity is reduced alone, so a model may have fewer buckets.
///
/// With a bucket size for large models, all gradients of a small model would fit in one bucket, and
/// no reduction would overlap with backward. Small messages between ranks of one process are cheap.
pub(crate) const BUCKETS_PER_MODEL: usize = 16;

/// The number of bytes of gradients that may wait to be written to a file during backward.
const WRITES_BEHIND: usize = 32 << 20;

/// The settings of a [`GradientReducer`].
#[derive(Debug)]
pub(crate) struct ReducerPolicy<B: SumOps> {
    /// The sizes of buckets, and when they are reduced.
    pub(crate) plan: GradientPlan,
    /// How the gradients of the ranks are combined.
    pub(crate) reduction: ReductionPlan,
    /// The element types of communication and accumulation.
    pub(crate) types: Types,
    /// Whether only the owned shard of a reduced gradient is kept (stages 2 and 3).
    pub(crate) shards: bool,
    /// Computes squares and finiteness of sums for the step.
    pub(crate) checker: GradientChecker<B>,
}

impl<B: SumOps> GradientReducer<B> {
    /// Creates a reducer for the gradients of `parameters`. The sums are kept in `homes`. Both
    /// lists are indexed by parameter.
    pub(crate) fn new(
        groups: MeshGroups<B>,
        parameters: Arc<[Arc<Parameter<B>>]>,
        policy: ReducerPolicy<B>,
        homes: Vec<SumHome>,
        ledger: Ledger,
    ) -> Self {
        let ReducerPolicy { plan, reduction, types, .. } = &policy;
        // Frozen parameters and those that another stage updates have no gradient here, so they do
        // not fill buckets.
        let trainable = parameters.iter().filter(|parameter| parameter.is_updated_here());
        let share = trainable.map(|p| p.numel()).sum::<usize>().div_ceil(BUCKETS_PER_MODEL);
        let scaling = Scaling::new(reduction, groups.data().world_size(), 1, types.communication);
        let capacity = plan.reduce_bucket_size.min(share).max(1);
        Self {
            scaling,
            policy,
            buckets: Buckets { capacity, filling: Vec::new(), in_flight: VecDeque::new() },
            postponed: Postponed::default(),
            gradients: homes.iter().map(|_| GradientState::Awaited).collect(),
            sums: SumStore {
                homes,
                waiting: WaitingSums::default(),
                writes: WriteBehind::new(WRITES_BEHIND),
            },
            synchronize: true,
            mean: true,
            watch: BackwardWatch::default(),
            groups,
            parameters,
            ledger,
        }
    }

    /// Returns the parameter at `index`.
    pub(crate) fn parameter(&self, index: usize) -> &Arc<Parameter<B>> {
        &self.parameters[index]
    }

    /// Sets whether gradients are reduced during backward. Otherwise they are accumulated on this
    /// rank and included in the next reduction.
    pub(crate) fn set_synchronize(&mut self, on: bool) {
        self.synchronize = on;
    }

    /// Sets whether gradients are averaged over ranks, starting with the next step. 1-bit
    /// optimizers switch this off while they exchange compressed arrays in the step.
    pub(crate) fn set_mean(&mut self, on: bool) {
        self.mean = on;
    }

    /// Returns whether gradients are averaged over ranks.
    pub(crate) fn takes_mean(&self) -> bool {
        self.mean
    }

    /// Sets the number of micro-batches per step, starting with the next step.
    pub(crate) fn set_micro_batches(&mut self, count: usize) {
        let (ranks, communication) =
            (self.groups.data().world_size(), self.policy.types.communication);
        self.scaling = Scaling::new(&self.policy.reduction, ranks, count, communication);
    }

    /// Collects the final gradient of parameter `index`. `take` is called with the path of the
    /// parameter and takes the gradient out of autodiff's container.
    ///
    /// A gradient that is not computed yet is kept for [`reduce_deferred`](Self::reduce_deferred).
    ///
    /// # Errors
    /// Returns an error if a full bucket cannot be reduced or a parked sum cannot be read or
    /// written.
    pub(crate) fn collect(
        &mut self,
        index: usize,
        take: impl FnOnce(Arc<str>) -> ReportedGradient<B>,
    ) -> Result<(), CommError> {
        self.watch.report();
        let gradient = take(self.parameters[index].shared_path());
        // Rows may come from other stages or on other ranks only. All ranks add them at the same
        // point.
        if self.parameters[index].is_shared() {
            let part = LatePart::Here(self.collected(gradient.into_array()));
            self.postponed.late.add(index, part);
            return Ok(());
        }
        self.defer(index, gradient).map_or(Ok(()), |array| self.add_own(index, array))
    }

    /// Adds a gradient of this rank to the local sum if there is one. The result is added to the
    /// bucket, or stays local while synchronization is off.
    fn add_own(&mut self, index: usize, array: DeviceArray<B>) -> Result<(), CommError> {
        // The local gradient of earlier `no_sync` passes is reduced together with this gradient, as
        // if both were one micro-batch.
        let array = match self.gradients[index].take_local() {
            Some(earlier) => add(earlier.array, array.in_type(self.policy.types.accumulation)),
            None => array,
        };
        if self.synchronize {
            self.enter(index, array)
        } else {
            let array = array.in_type(self.policy.types.accumulation);
            let local = self.collected(array);
            self.gradients[index].keep_local(local);
            Ok(())
        }
    }

    /// Collects the gradient of parameter `index`, which an earlier pipeline stage computes and
    /// sends.
    pub(crate) fn collect_later(&mut self, index: usize, message: Pending<DeviceArray<B>>) {
        self.watch.report();
        // The message is not awaited here, because the stage that sends it may be some passes
        // behind.
        self.postponed.late.add(index, LatePart::Coming(message));
    }

    /// Collects the rows of a lookup in table `index`, which are added to the gradient that is
    /// reported for it later in the backward pass.
    pub(crate) fn collect_rows(&mut self, index: usize, rows: DeviceArray<B>) {
        let rows = self.collected(rows);
        self.postponed.late.add_rows(index, LatePart::Here(rows));
    }

    /// Collects rows as [`collect_rows`](Self::collect_rows) does, which an earlier pipeline stage
    /// computes and sends.
    pub(crate) fn collect_rows_later(&mut self, index: usize, message: Pending<DeviceArray<B>>) {
        self.postponed.late.add_rows(index, LatePart::Coming(message));
    }

    /// Waits for the late parts of the gradients of all but the last `open` backward passes, and
    /// reduces these gradients.
    ///
    /// # Errors
    /// Returns an error if a stage does not send its part, a collective fails, or a parked sum
    /// cannot be read or written.
    pub(crate) fn reduce_late(&mut self, open: usize) -> Result<(), CommError> {
        // Oldest first, so that micro-batches are added in the same order as without a pipeline.
        for gradient in self.postponed.late.take_due(open) {
            let index = gradient.index;
            self.enter(index, gradient.wait(self.parameters[index].shape())?)?;
        }
        self.drain()
    }

    /// Ends a backward pass: reduces the remaining gradients in the bucket and accumulates all
    /// results.
    ///
    /// The call returns when every rank has called it. The barrier prevents a deadlock: after a
    /// backward pass, autodiff's clean-up takes the locks of all graphs of the process. A rank that
    /// is still in backward could hold such a lock while it waits in a collective for a rank that
    /// waits for the lock.
    ///
    /// # Errors
    /// Returns an error if a collective fails or a parked sum cannot be read or written.
    pub(crate) fn finish_backward(&mut self) -> Result<(), CommError> {
        self.drain()?;
        // Rows are added to a gradient of the same pass. Without this check, they would be added to
        // one of a later pass.
        if let Some(index) = self.postponed.late.end_pass() {
            let path = self.parameters[index].path();
            let error = format!("rows of the gradient of parameter {path} belong to no gradient");
            return Err(self.groups.world().failed(error));
        }
        self.postponed.deferred.end_pass();
        self.watch.end();
        self.groups.data().barrier(CollectiveTag::new("end of backward", 0))
    }

    /// Reduces the postponed gradients and the remaining local ones, so that a step never uses an
    /// incomplete gradient. They are reduced in the order of parameters, which is the same on all
    /// ranks.
    ///
    /// # Errors
    /// Returns an error if a collective fails or a parked sum cannot be read or written.
    pub(crate) fn reduce_rest(&mut self) -> Result<(), CommError> {
        self.reduce_all_deferred()?;
        // No pass stays open, because the step needs the gradients of all micro-batches.
        self.reduce_late(0)?;
        for index in 0..self.gradients.len() {
            if let Some(Collected { array, .. }) = self.gradients[index].take_local() {
                self.enter(index, array)?;
            }
        }
        self.drain()
    }

    /// Reduces the bucket, waits for everything in flight and keeps all sums.
    fn drain(&mut self) -> Result<(), CommError> {
        self.flush()?;
        while let Some(flight) = self.buckets.in_flight.pop_front() {
            self.land(flight)?;
        }
        self.keep_waiting()
    }

    /// Returns true if all gradients so far are in the accumulated sums, so that a checkpoint can
    /// store them.
    pub(crate) fn is_settled(&self) -> bool {
        let Postponed { late, deferred } = &self.postponed;
        let is_postponed = !late.is_empty() || !deferred.is_empty();
        let is_pending = is_postponed || !self.sums.waiting.is_empty();
        !is_pending && self.gradients.iter().all(GradientState::is_settled)
    }

    /// Drops all gradients: sums, local gradients, and what a failed backward pass left in the
    /// bucket or in flight. All ranks must call this at the same point.
    ///
    /// The results of reductions in flight are dropped without waiting for them. Other ranks do not
    /// need this rank to receive its result, and the collective keeps the sent arrays.
    pub(crate) fn clear(&mut self) {
        self.buckets.filling.clear();
        self.buckets.in_flight.clear();
        self.sums.waiting = WaitingSums::default();
        self.postponed.late.clear();
        self.postponed.deferred.clear();
        self.gradients.iter_mut().for_each(|gradient| *gradient = GradientState::Awaited);
        self.watch.abandon();
    }

    /// Counts a gradient in the ledger. For sparse rows, only the values are counted.
    fn collected(&self, array: DeviceArray<B>) -> Collected<B> {
        let bytes = match &array {
            DeviceArray::SparseRows(rows) => rows.bytes(),
            DeviceArray::Dense(tensor) => tensor.shape().num_elements() * tensor.dtype().size(),
        };
        Collected { array, _lease: self.ledger.hold(Category::Buckets, bytes) }
    }

    /// Adds a gradient to the bucket in the communication type, and reduces the bucket when it is
    /// full.
    ///
    /// A gradient that does not fit starts a new bucket. A gradient that is as large as a bucket is
    /// reduced alone. Sparse rows count with the size of the whole table, so that all ranks form
    /// the same buckets even if they have looked up different rows. A gradient that is not averaged
    /// is accumulated immediately.
    fn enter(&mut self, index: usize, array: DeviceArray<B>) -> Result<(), CommError> {
        if !self.mean {
            let array = array.in_type(self.policy.types.accumulation);
            let ranks = self.groups.data().world_size();
            // The step averages over the ranks later. If the plan asks for a sum, the factor
            // compensates the division.
            let array = scale(array, Scaling::of_one_rank(&self.policy.reduction, ranks));
            return self.accumulate(index, array.into_flat());
        }
        let mut gradient = self.collected(array.in_type(self.policy.types.communication));
        let numel = gradient.array.numel();
        if !self.buckets.filling.is_empty() && self.bucket_numel() + numel > self.buckets.capacity {
            self.flush()?;
        }
        // A gradient that is reduced alone is always flattened. Otherwise each rank would copy the
        // rows of its shard.
        if self.policy.plan.contiguous_gradients || numel >= self.buckets.capacity {
            gradient.array = gradient.array.flattened();
        }
        self.gradients[index].enter_bucket(gradient);
        self.buckets.filling.push(index);
        // The elements are counted again, because the bucket may have been flushed above.
        if self.bucket_numel() >= self.buckets.capacity {
            self.flush()?;
        }
        Ok(())
    }

    /// Returns the number of elements of the parameters whose gradients are in the bucket.
    fn bucket_numel(&self) -> usize {
        self.buckets.filling.iter().map(|index| self.parameters[*index].numel()).sum()
    }

    /// Starts the reduction of the bucket: a reduce-scatter at stages 2 and 3, otherwise an
    /// all-reduce.
    ///
    /// With `overlap_comm`, the call waits for the previous bucket and returns while this bucket is
    /// in flight. Without it, the call waits for this bucket.
    fn flush(&mut self) -> Result<(), CommError> {
        if self.buckets.filling.is_empty() {
            return Ok(());
        }
        let indices = std::mem::take(&mut self.buckets.filling);
        let tag = CollectiveTag::new("gradients", fingerprint(indices.iter().copied()))
            .naming(indices.iter().map(|index| self.parameters[*index].shared_path()));
        let before = self.scaling.before;
        let leave =
            |index: &usize| self.gradients[*index].leave_bucket(|array| scale(array, before));
        let arrays = indices.iter().map(leave).collect();
        let group = self.groups.shard().arrays();
        // Both collectives add parts in rank order, so an owned element has the same bits with
        // either of them.
        let pending = if self.policy.shards && self.policy.plan.reduce_scatter {
            group.reduce_scatter(tag, arrays, self.scaling.op)?
        } else {
            group.all_reduce(tag, arrays, self.scaling.op)?
        };
        self.buckets.in_flight.push_back(Flight { indices, pending });
        // One bucket in flight hides most of the communication, and limits memory to two buckets.
        let allowed = if self.policy.plan.overlap_comm { 1 } else { 0 };
        while self.buckets.in_flight.len() > allowed {
            if let Some(flight) = self.buckets.in_flight.pop_front() {
                self.land(flight)?;
            }
        }
        Ok(())
    }

    /// Waits for a bucket and adds its results to the sums.
    fn land(&mut self, flight: Flight<B>) -> Result<(), CommError> {
        let Flight { indices, pending } = flight;
        // Other ranks may read the sent gradients until the wait returns.
        let results = pending.wait()?;
        // The sent gradients are freed before the results are accumulated, which reduces peak
        // memory.
        indices.iter().for_each(|index| self.gradients[*index].finish_reduction());
        for (index, mut result) in indices.into_iter().zip(results) {
            // The all-reduce returns whole gradients, of which only the shard is kept.
            if self.policy.shards && !self.policy.plan.reduce_scatter {
                result = self.owned(index, result);
            }
            // A result that needs no factor stays in the communication type until a second
            // micro-batch is added, if the accumulation type represents the same values.
            if self.scaling.after != 1.0 || !self.policy.types.widens() {
                result = scale(result.in_type(self.policy.types.accumulation), self.scaling.after);
            }
            self.accumulate(index, result.into_flat())?;
        }
        Ok(())
    }

    /// Copies this rank's shard out of a whole gradient. It is used with `reduce_scatter: false`,
    /// where gradients are all-reduced before they are sharded.
    fn owned(&self, index: usize, whole: DeviceArray<B>) -> DeviceArray<B> {
        let partition = self.parameters[index].partition();
        let shard = vec![whole.part(partition.owned(self.groups.shard().rank()))];
        // A reduction of a single part pads it to the shard length. It may return a view, which
        // would keep the whole gradient alive.
        own(DeviceArray::reduce(shard, partition.shard_len(), ReduceOp::Sum, 0))
    }
}

/// Adds two gradients of one parameter. A sum with sparse rows stays sparse. A dense operand may be
/// flat, so the left operand is reshaped to the shape of the right operand.
fn add<B: SumOps>(left: DeviceArray<B>, right: DeviceArray<B>) -> DeviceArray<B> {
    match (left, right) {
        (DeviceArray::Dense(a), DeviceArray::Dense(b)) => {
            DeviceArray::Dense(B::float_add(B::float_reshape(a, b.shape()), b))
        }
        (DeviceArray::SparseRows(a), DeviceArray::SparseRows(b)) => {
            DeviceArray::SparseRows(a.add_rows(b))
        }
        (DeviceArray::SparseRows(rows), DeviceArray::Dense(tensor))
        | (DeviceArray::Dense(tensor), DeviceArray::SparseRows(rows)) => {
            DeviceArray::SparseRows(rows.add_dense(tensor))
        }
    }
}

/// Multiplies a gradient by `factor`. A factor of 1 (the usual case) does nothing.
fn scale<B: SumOps>(array: DeviceArray<B>, factor: f64) -> DeviceArray<B> {
    match array {
        array if factor == 1.0 => array,
        DeviceArray::Dense(tensor) => {
            DeviceArray::Dense(B::float_mul_scalar(tensor, factor.into()))
        }
        DeviceArray::SparseRows(rows) => DeviceArray::SparseRows(rows.scale(factor)),
    }
}

/// Returns an order-dependent hash (FNV-1a) of a list of parameters. Ranks compare it before they
/// exchange a bucket.
fn fingerprint(indices: impl Iterator<Item = usize>) -> u64 {
    indices.fold(0xcbf2_9ce4_8422_2325, |hash, index| {
        (hash ^ index as u64).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_tell_orders_apart() {
        assert_ne!(fingerprint([1, 2].into_iter()), fingerprint([2, 1].into_iter()));
    }
}
