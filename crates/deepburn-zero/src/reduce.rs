//! Gradients on their way from autodiff to the optimizer.
//!
//! Autodiff reports each parameter's gradient the moment it is final. It goes into a bucket; a
//! full bucket is reduced over all ranks while backward continues; what comes back is added to the
//! accumulated gradient, and the full gradient is gone. From stage 2 on a rank keeps its shard of
//! the sum only.
//!
//! What there is of a parameter's gradient is in its [`GradientState`]; the bucket and what is in flight are
//! lists of parameters, in the order in which all ranks send them.
//!
//! [Note: Order of additions] Every stage reduces every micro-batch over the ranks, in rank order,
//! and then adds it to what earlier micro-batches gave. Summing micro-batches first would save
//! messages at stages 0 and 1, but it adds in another order, and the same job would end in other
//! bits at another stage.

mod accumulation;
mod gradient;
mod scaling;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use burn_backend::{Backend, TensorMetadata};
use deepburn_comm::{CommError, Payload, Pending, ReduceOp, Tag};
use deepburn_config::{GradientPlan, ReductionPlan};

use crate::array::{DeviceArray, own};
use crate::backward_watch::BackwardWatch;
use crate::group::Group;
use crate::ledger::{Category, Ledger};
use crate::parameter::Parameter;
use crate::parked::WriteBehind;
use crate::tensor::{ReducedGradient, ZeroTensor};

use gradient::{Collected, GradientState};
use scaling::Scaling;

pub(crate) use gradient::{Accumulated, GradientChecker, SumElements, SumHome};
pub(crate) use scaling::Types;

/// Collects, reduces and accumulates the gradients of one rank.
#[derive(Debug)]
pub(crate) struct GradientReducer<B: Backend> {
    group: Group<B>,
    parameters: Arc<[Arc<Parameter<B>>]>,
    ledger: Ledger,
    plan: GradientPlan,
    reduction: ReductionPlan,
    scaling: Scaling,
    types: Types,
    /// Whether only the owned shard of a reduced gradient is kept.
    shards: bool,
    /// Elements at which the bucket is reduced.
    capacity: usize,
    /// Parameters whose gradients are reduced next, together.
    bucket: Vec<usize>,
    in_flight: VecDeque<Flight<B>>,
    /// By parameter index.
    gradients: Vec<GradientState<B>>,
    /// Where the sums of gradients are kept, by parameter index.
    homes: Vec<SumHome>,
    /// Of sums that are parked.
    writes: WriteBehind,
    checker: GradientChecker<B>,
    synchronise: bool,
    /// Whether gradients are averaged over ranks. Otherwise each rank accumulates its own.
    mean: bool,
    watch: BackwardWatch,
}

/// A bucket being reduced.
#[derive(Debug)]
struct Flight<B: Backend> {
    indices: Vec<usize>,
    pending: Pending<DeviceArray<B>>,
}

/// A bucket never holds more than this fraction of the model. A bucket sized for a large model
/// would keep every gradient of a small one until the end of backward, which is what reducing
/// early is there to avoid; between ranks of one process small messages cost nothing.
pub(crate) const BUCKETS_PER_MODEL: usize = 16;

/// The bytes of gradients that may be waiting to be written to a file during backward.
const WRITES_BEHIND: usize = 32 << 20;

/// How gradients are reduced and kept.
pub(crate) struct ReducerPolicy<B: Backend> {
    pub(crate) plan: GradientPlan,
    pub(crate) reduction: ReductionPlan,
    pub(crate) types: Types,
    /// Whether only the owned shard of a reduced gradient is kept.
    pub(crate) shards: bool,
    pub(crate) checker: GradientChecker<B>,
}

impl<B: Backend> GradientReducer<B> {
    /// Reduces the gradients of `parameters`, whose sums are kept in `homes`.
    pub(crate) fn new(
        group: Group<B>,
        parameters: Arc<[Arc<Parameter<B>>]>,
        policy: ReducerPolicy<B>,
        homes: Vec<SumHome>,
        ledger: Ledger,
    ) -> Self {
        let ReducerPolicy { plan, reduction, types, shards, checker } = policy;
        let trainable = parameters.iter().filter(|parameter| parameter.is_trainable());
        let share = trainable.map(|p| p.numel()).sum::<usize>().div_ceil(BUCKETS_PER_MODEL);
        let scaling = Scaling::new(&reduction, group.world_size(), 1, types.communication);
        Self {
            reduction,
            scaling,
            types,
            shards,
            capacity: plan.reduce_bucket_size.min(share).max(1),
            bucket: Vec::new(),
            in_flight: VecDeque::new(),
            gradients: homes.iter().map(|_| GradientState::Awaited).collect(),
            homes,
            writes: WriteBehind::new(WRITES_BEHIND),
            checker,
            synchronise: true,
            mean: true,
            watch: BackwardWatch::default(),
            group,
            parameters,
            ledger,
            plan,
        }
    }

    /// Whether gradients are reduced as they come. While off, they add up on this rank alone and
    /// join the next reduction.
    pub(crate) fn set_synchronise(&mut self, on: bool) {
        self.synchronise = on;
    }

    /// Sets whether gradients are averaged over ranks, from the next step on.
    pub(crate) fn set_mean(&mut self, on: bool) {
        self.mean = on;
    }

    /// Returns whether gradients are averaged over ranks.
    pub(crate) fn takes_mean(&self) -> bool {
        self.mean
    }

    /// How many micro-batches make a step, from the next one on.
    pub(crate) fn set_micro_batches(&mut self, count: usize) {
        let (ranks, communication) = (self.group.world_size(), self.types.communication);
        self.scaling = Scaling::new(&self.reduction, ranks, count, communication);
    }

    /// Takes the final gradient of parameter `index` out of autodiff's container and leaves a
    /// marker that holds no memory.
    pub(crate) fn collect(
        &mut self,
        index: usize,
        slot: &mut ZeroTensor<B>,
    ) -> Result<(), CommError> {
        self.watch.report();
        let marker = ZeroTensor::Reduced(ReducedGradient {
            shape: slot.shape(),
            dtype: slot.dtype(),
            device: slot.device(),
            path: self.parameters[index].shared_path(),
        });
        let array = match std::mem::replace(slot, marker) {
            ZeroTensor::SparseRows(rows) => DeviceArray::SparseRows(rows),
            other => DeviceArray::Dense(other.into_full()),
        };
        let array = match self.gradients[index].take_local() {
            Some(earlier) => add(earlier.array, array.in_type(self.types.accumulation)),
            None => array,
        };
        if self.synchronise {
            self.enter(index, array)
        } else {
            let array = array.in_type(self.types.accumulation);
            let local = self.collected(array);
            self.gradients[index].keep_local(local);
            Ok(())
        }
    }

    /// Ends a backward pass: reduces what is left in the bucket and adds up all results. Returns
    /// once every rank has come here, because autodiff's clean-up after a backward pass waits for
    /// passes of other ranks that would wait for this one.
    pub(crate) fn finish_backward(&mut self) -> Result<(), CommError> {
        self.drain()?;
        self.watch.end();
        self.group.barrier(Tag::new("end of backward", 0))
    }

    /// Calls `announce` when the next backward pass begins.
    pub(crate) fn watch_for_backward(&mut self, announce: Box<dyn FnOnce()>) {
        self.watch.arm(announce);
    }

    /// Completed backward passes that reported gradients of this model.
    pub(crate) fn backward_passes(&self) -> u64 {
        self.watch.completed()
    }

    /// Gradients of this model that were reported since the watch began.
    pub(crate) fn gradients_reported(&self) -> usize {
        self.watch.reported()
    }

    /// When the last watched backward pass began.
    pub(crate) fn backward_began(&self) -> Option<Instant> {
        self.watch.began()
    }

    /// Reduces what synchronisation left behind when it was switched off and no later pass took
    /// along, so that a step never acts on a part of the gradient.
    pub(crate) fn reduce_rest(&mut self) -> Result<(), CommError> {
        for index in 0..self.gradients.len() {
            if let Some(Collected { array, .. }) = self.gradients[index].take_local() {
                self.enter(index, array)?;
            }
        }
        self.drain()
    }

    fn drain(&mut self) -> Result<(), CommError> {
        self.flush()?;
        while let Some(flight) = self.in_flight.pop_front() {
            self.land(flight)?;
        }
        Ok(())
    }

    /// Whether all gradients of the passes so far are in the accumulated ones.
    pub(crate) fn is_settled(&self) -> bool {
        self.gradients.iter().all(GradientState::is_settled)
    }

    /// Forgets all gradients, also those that were never reduced.
    pub(crate) fn clear(&mut self) {
        self.gradients.iter_mut().for_each(GradientState::clear);
    }

    fn collected(&self, array: DeviceArray<B>) -> Collected<B> {
        let bytes = match &array {
            DeviceArray::SparseRows(rows) => rows.bytes(),
            DeviceArray::Dense(tensor) => tensor.shape().num_elements() * tensor.dtype().size(),
        };
        Collected { array, _lease: self.ledger.hold(Category::Buckets, bytes) }
    }

    /// Puts a gradient into the bucket. A gradient as large as a bucket is reduced alone. A gradient that is
    /// not averaged joins the sum at once.
    fn enter(&mut self, index: usize, array: DeviceArray<B>) -> Result<(), CommError> {
        if !self.mean {
            let array = array.in_type(self.types.accumulation);
            let array =
                scale(array, Scaling::of_one_rank(&self.reduction, self.group.world_size()));
            return self.accumulate(index, array.into_flat());
        }
        let mut gradient = self.collected(array.in_type(self.types.communication));
        let numel = gradient.array.numel();
        let held = self.bucket_numel();
        if held > 0 && held + numel > self.capacity {
            self.flush()?;
        }
        // One that is reduced alone is flattened in any case, because ranks would copy their parts of a matrix.
        if self.plan.contiguous_gradients || numel >= self.capacity {
            gradient.array = gradient.array.flattened();
        }
        self.gradients[index].enter_bucket(gradient);
        self.bucket.push(index);
        // Counted again, because the bucket may have been emptied above.
        if self.bucket_numel() >= self.capacity {
            self.flush()?;
        }
        Ok(())
    }

    /// Elements of the parameters whose gradients are in the bucket.
    fn bucket_numel(&self) -> usize {
        self.bucket.iter().map(|index| self.parameters[*index].numel()).sum()
    }

    /// Starts the reduction of the bucket. At most one other bucket is in flight meanwhile.
    fn flush(&mut self) -> Result<(), CommError> {
        if self.bucket.is_empty() {
            return Ok(());
        }
        let indices = std::mem::take(&mut self.bucket);
        let tag = Tag::new("gradients", fingerprint(indices.iter().copied()))
            .naming(indices.iter().map(|index| self.parameters[*index].shared_path()));
        let before = self.scaling.before;
        let leave =
            |index: &usize| self.gradients[*index].leave_bucket(|array| scale(array, before));
        let arrays = indices.iter().map(leave).collect();
        let group = self.group.arrays();
        let pending = if self.shards && self.plan.reduce_scatter {
            group.reduce_scatter(tag, arrays, self.scaling.op)?
        } else {
            group.all_reduce(tag, arrays, self.scaling.op)?
        };
        self.in_flight.push_back(Flight { indices, pending });
        let allowed = if self.plan.overlap_comm { 1 } else { 0 };
        while self.in_flight.len() > allowed {
            if let Some(flight) = self.in_flight.pop_front() {
                self.land(flight)?;
            }
        }
        Ok(())
    }

    /// Waits for a bucket and adds its results to the accumulated gradients.
    fn land(&mut self, flight: Flight<B>) -> Result<(), CommError> {
        let Flight { indices, pending } = flight;
        let results = pending.wait()?;
        // All that was sent is let go before the first result is added up.
        indices.iter().for_each(|index| self.gradients[*index].finish_reduction());
        for (index, mut result) in indices.into_iter().zip(results) {
            if self.shards && !self.plan.reduce_scatter {
                result = self.owned(index, result);
            }
            if self.scaling.after != 1.0 || !self.types.widens() {
                result = scale(result.in_type(self.types.accumulation), self.scaling.after);
            }
            self.accumulate(index, result.into_flat())?;
        }
        Ok(())
    }

    /// This rank's shard of a whole gradient, in memory of its own.
    fn owned(&self, index: usize, whole: DeviceArray<B>) -> DeviceArray<B> {
        let partition = self.parameters[index].partition();
        let shard = vec![whole.part(partition.owned(self.group.rank()))];
        own(DeviceArray::reduce(shard, partition.shard_len(), ReduceOp::Sum, 0))
    }
}

/// Adds two gradients of one parameter.
fn add<B: Backend>(left: DeviceArray<B>, right: DeviceArray<B>) -> DeviceArray<B> {
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

/// Multiplies a gradient by `factor`, which is mostly 1.
fn scale<B: Backend>(array: DeviceArray<B>, factor: f64) -> DeviceArray<B> {
    match array {
        array if factor == 1.0 => array,
        DeviceArray::Dense(tensor) => {
            DeviceArray::Dense(B::float_mul_scalar(tensor, factor.into()))
        }
        DeviceArray::SparseRows(rows) => DeviceArray::SparseRows(rows.scale(factor)),
    }
}

/// A number that differs for different lists of parameters (FNV-1a), so that ranks whose
/// gradients come in different orders notice.
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
