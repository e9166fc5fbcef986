//! Gradients on their way from autodiff to the optimizer.
//!
//! Autodiff reports each parameter's gradient the moment it is final. It goes into a bucket; a
//! full bucket is reduced over all ranks while backward goes on; what comes back is added to the
//! accumulated gradient, and the full gradient is gone. From stage 2 on a rank keeps its shard of
//! the sum only.
//!
//! [Note: Order of additions] Every stage reduces every micro-batch over the ranks, in rank order,
//! and then adds it to what earlier micro-batches gave. Summing micro-batches first would save
//! messages at stages 0 and 1, but it adds in another order, and the same job would end in other
//! bits at another stage.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata};
use deepburn_comm::{CommError, Payload, Pending, ReduceOp, Tag};
use deepburn_config::{GradientPlan, GradientReduction, ReductionPlan};

use crate::array::{DeviceArray, in_type, maximum, own};
use crate::backward_watch::BackwardWatch;
use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger};
use crate::parameter::Parameter;
use crate::tensor::{ReducedGradient, ZeroTensor};

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
    bucket: Vec<Collected<B>>,
    in_flight: VecDeque<Flight<B>>,
    accumulated: Vec<Option<Accumulated<B>>>,
    /// Sums of this rank alone, while synchronisation is off.
    unreduced: Vec<Option<Collected<B>>>,
    synchronise: bool,
    watch: BackwardWatch,
}

/// A full gradient of this rank.
#[derive(Debug)]
struct Collected<B: Backend> {
    index: usize,
    array: DeviceArray<B>,
    _lease: Lease,
}

/// A bucket being reduced.
#[derive(Debug)]
struct Flight<B: Backend> {
    gradients: Vec<Collected<B>>,
    pending: Pending<DeviceArray<B>>,
}

/// A flat reduced gradient: this rank's shard of it, or all of it. That of a single micro-batch is
/// in the type in which it travelled, if the type of sums holds the same values: widening it would
/// cost memory and a pass, and the optimizer reads either.
#[derive(Debug)]
pub(crate) struct Accumulated<B: Backend> {
    pub(crate) tensor: B::FloatTensorPrimitive,
    /// Largest magnitude, `[1]`, that the sum had on its way; only where that decides something.
    pub(crate) peak: Option<B::FloatTensorPrimitive>,
    /// Micro-batches in it.
    pub(crate) count: usize,
    _lease: Lease,
}

/// Element types of gradients after autodiff made them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Types {
    /// Between ranks.
    pub(crate) communication: FloatDType,
    /// In the sum over micro-batches.
    pub(crate) accumulation: FloatDType,
}

impl Types {
    /// Whether sums are in a type that holds every value that travels.
    fn widens(self) -> bool {
        self.communication == self.accumulation || self.accumulation == FloatDType::F32
    }
}

/// Multiplications around the sum over the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Scaling {
    before: f64,
    op: ReduceOp,
    after: f64,
}

impl Scaling {
    /// DeepSpeed's three ways to average: divide after the sum, before it, or partly before it.
    ///
    /// [Note: Overflow in fp16] By default fp16 gradients are divided before their sum, which then
    /// overflows only where one of them does. DeepSpeed's stages 0 and 1, though, add up the
    /// micro-batches of a step in fp16 and skip a step in which that overflows. To skip such steps
    /// too, at every stage, a part of the division waits until after the sum: as much as there
    /// are micro-batches, if there are so many ranks.
    fn new(
        plan: &ReductionPlan,
        world_size: usize,
        micro_batches: usize,
        communication: FloatDType,
    ) -> Self {
        let later = world_size.min(micro_batches) as f64;
        let world_size = world_size as f64;
        let factor = plan.predivide_factor;
        let sum = Self { before: 1.0, op: ReduceOp::Sum, after: 1.0 };
        match plan.op {
            GradientReduction::Sum => sum,
            GradientReduction::Mean if plan.prescale => Self { before: 1.0 / world_size, ..sum },
            GradientReduction::Mean if factor != 1.0 => {
                Self { before: 1.0 / factor, after: factor / world_size, ..sum }
            }
            GradientReduction::Mean if communication == FloatDType::F16 => {
                Self { before: later / world_size, after: 1.0 / later, ..sum }
            }
            GradientReduction::Mean => Self { op: ReduceOp::Mean, ..sum },
        }
    }
}

/// A bucket never holds more than this fraction of the model. A bucket sized for a large model
/// would keep every gradient of a small one until the end of backward, which is what reducing
/// early is there to avoid; between ranks of one process small messages cost nothing.
pub(crate) const BUCKETS_PER_MODEL: usize = 16;

impl<B: Backend> GradientReducer<B> {
    pub(crate) fn new(
        group: Group<B>,
        parameters: Arc<[Arc<Parameter<B>>]>,
        plan: GradientPlan,
        reduction: ReductionPlan,
        types: Types,
        shards: bool,
        ledger: Ledger,
    ) -> Self {
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
            accumulated: parameters.iter().map(|_| None).collect(),
            unreduced: parameters.iter().map(|_| None).collect(),
            synchronise: true,
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
            ZeroTensor::Rows(rows) => DeviceArray::Rows(rows),
            other => DeviceArray::Dense(other.into_full()),
        };
        let array = match self.unreduced[index].take() {
            Some(earlier) => add(earlier.array, array.in_type(self.types.accumulation)),
            None => array,
        };
        if self.synchronise {
            let array = array.in_type(self.types.communication);
            self.enter(self.collected(index, array))
        } else {
            let array = array.in_type(self.types.accumulation);
            self.unreduced[index] = Some(self.collected(index, array));
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
        for index in 0..self.unreduced.len() {
            if let Some(Collected { array, .. }) = self.unreduced[index].take() {
                let array = array.in_type(self.types.communication);
                self.enter(self.collected(index, array))?;
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

    /// The accumulated gradients by parameter index, flat: this rank's shard, or all elements at
    /// stages 0 and 1. `None` for a parameter that got no gradient. Clears the accumulation.
    pub(crate) fn take(&mut self) -> Vec<Option<Accumulated<B>>> {
        self.accumulated.iter_mut().map(Option::take).collect()
    }

    /// The accumulated gradient of one parameter, flat, as in [`take`](Self::take).
    pub(crate) fn accumulated(&self, index: usize) -> Option<&Accumulated<B>> {
        self.accumulated[index].as_ref()
    }

    /// Whether all gradients of the passes so far are in the accumulated ones.
    pub(crate) fn is_settled(&self) -> bool {
        let all_reduced = self.unreduced.iter().all(Option::is_none);
        all_reduced && self.bucket.is_empty() && self.in_flight.is_empty()
    }

    /// Whether an accumulated gradient of `count` micro-batches is in `dtype`.
    pub(crate) fn accumulates_in(&self, dtype: DType, count: usize) -> bool {
        let Types { communication, accumulation } = self.types;
        let scaled = self.scaling.after != 1.0 || !self.types.widens();
        let kept = if count > 1 || scaled { accumulation } else { communication };
        DType::from(kept) == dtype
    }

    /// Goes on from a sum over `count` micro-batches.
    pub(crate) fn restore(
        &mut self,
        index: usize,
        tensor: B::FloatTensorPrimitive,
        peak: Option<B::FloatTensorPrimitive>,
        count: usize,
    ) {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        let _lease = self.ledger.hold(Category::Gradients, bytes);
        self.accumulated[index] = Some(Accumulated { tensor, peak, count, _lease });
    }

    /// Forgets all gradients, also those that were never reduced.
    pub(crate) fn clear(&mut self) {
        self.accumulated.iter_mut().for_each(|slot| *slot = None);
        self.unreduced.iter_mut().for_each(|slot| *slot = None);
    }

    fn collected(&self, index: usize, array: DeviceArray<B>) -> Collected<B> {
        let bytes = match &array {
            DeviceArray::Rows(rows) => rows.bytes(),
            DeviceArray::Dense(tensor) => tensor.shape().num_elements() * tensor.dtype().size(),
        };
        Collected { index, array, _lease: self.ledger.hold(Category::Buckets, bytes) }
    }

    /// Puts a gradient into the bucket; one that fills a bucket by itself travels alone.
    fn enter(&mut self, mut gradient: Collected<B>) -> Result<(), CommError> {
        let numel = gradient.array.numel();
        let held: usize = self.bucket.iter().map(|held| held.array.numel()).sum();
        if held > 0 && held + numel > self.capacity {
            self.flush()?;
        }
        let joins = self.plan.contiguous_gradients && numel < self.capacity;
        if joins && let DeviceArray::Dense(tensor) = gradient.array {
            let flat = B::float_reshape(tensor, Shape::from(vec![numel]));
            gradient.array = DeviceArray::Dense(flat);
        }
        self.bucket.push(gradient);
        if held + numel >= self.capacity {
            self.flush()?;
        }
        Ok(())
    }

    /// Starts the reduction of the bucket. At most one other bucket is in flight meanwhile.
    fn flush(&mut self) -> Result<(), CommError> {
        if self.bucket.is_empty() {
            return Ok(());
        }
        let mut gradients = std::mem::take(&mut self.bucket);
        if self.scaling.before != 1.0 {
            for gradient in &mut gradients {
                gradient.array = scale(gradient.array.clone(), self.scaling.before);
            }
        }
        let tag = Tag::new("gradients", fingerprint(gradients.iter().map(|g| g.index)))
            .naming(gradients.iter().map(|g| self.parameters[g.index].shared_path()));
        let arrays = gradients.iter().map(|gradient| gradient.array.clone()).collect();
        let group = self.group.arrays();
        let pending = if self.shards && self.plan.reduce_scatter {
            group.reduce_scatter(tag, arrays, self.scaling.op)?
        } else {
            group.all_reduce(tag, arrays, self.scaling.op)?
        };
        self.in_flight.push_back(Flight { gradients, pending });
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
        let Flight { gradients, pending } = flight;
        let indices: Vec<usize> = gradients.iter().map(|gradient| gradient.index).collect();
        let results = pending.wait()?;
        drop(gradients);
        for (index, mut result) in indices.into_iter().zip(results) {
            if self.shards && !self.plan.reduce_scatter {
                result = self.owned(index, result);
            }
            if self.scaling.after != 1.0 || !self.types.widens() {
                result = scale(result.in_type(self.types.accumulation), self.scaling.after);
            }
            self.accumulate(index, result.into_flat());
        }
        Ok(())
    }

    /// This rank's shard of a whole gradient, in memory of its own.
    fn owned(&self, index: usize, whole: DeviceArray<B>) -> DeviceArray<B> {
        let partition = self.parameters[index].partition();
        let shard = vec![whole.part(partition.owned(self.group.rank()))];
        own(DeviceArray::reduce(shard, partition.shard_len(), ReduceOp::Sum, 0))
    }

    fn accumulate(&mut self, index: usize, gradient: B::FloatTensorPrimitive) {
        let (tensor, peak, count) = match self.accumulated[index].take() {
            Some(Accumulated { tensor: sum, peak, count, _lease }) => {
                let peak = self.watches_peaks(count).then(|| {
                    let magnitude = B::float_max_abs(sum.clone());
                    match peak {
                        Some(peak) => maximum::<B>(peak, magnitude),
                        None => magnitude,
                    }
                });
                let [sum, gradient] =
                    [sum, gradient].map(|part| in_type::<B>(part, self.types.accumulation));
                (B::float_add(sum, gradient), peak, count + 1)
            }
            None => (gradient, None, 1),
        };
        self.restore(index, tensor, peak, count);
    }

    /// Whether a sum over `count` micro-batches may have left fp16 although what travelled did not.
    fn watches_peaks(&self, count: usize) -> bool {
        let Types { communication, accumulation } = self.types;
        count > 1 && communication == FloatDType::F16 && accumulation == FloatDType::F32
    }
}

/// Adds two gradients of one parameter.
fn add<B: Backend>(left: DeviceArray<B>, right: DeviceArray<B>) -> DeviceArray<B> {
    match (left, right) {
        (DeviceArray::Dense(a), DeviceArray::Dense(b)) => {
            DeviceArray::Dense(B::float_add(B::float_reshape(a, b.shape()), b))
        }
        (DeviceArray::Rows(a), DeviceArray::Rows(b)) => DeviceArray::Rows(a.add_rows(b)),
        (DeviceArray::Rows(rows), DeviceArray::Dense(tensor))
        | (DeviceArray::Dense(tensor), DeviceArray::Rows(rows)) => {
            DeviceArray::Rows(rows.add_dense(tensor))
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
        DeviceArray::Rows(rows) => DeviceArray::Rows(rows.scale(factor)),
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

    fn plan(prescale: bool, predivide_factor: f64, op: GradientReduction) -> ReductionPlan {
        ReductionPlan { op, prescale, predivide_factor }
    }

    #[test]
    fn all_ways_to_average_divide_by_the_world_size() {
        for communication in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            for (prescale, factor) in [(false, 1.0), (true, 1.0), (false, 2.0), (false, 4.0)] {
                let plan = plan(prescale, factor, GradientReduction::Mean);
                for micro_batches in [1, 2, 4, 16] {
                    let scaling = Scaling::new(&plan, 4, micro_batches, communication);
                    let mean = if scaling.op == ReduceOp::Mean { 0.25 } else { 1.0 };
                    assert_eq!(scaling.before * mean * scaling.after, 0.25);
                    assert!(scaling.before <= 1.0, "no gradient may grow before the sum");
                }
            }
            let sum = Scaling::new(&plan(true, 2.0, GradientReduction::Sum), 4, 2, communication);
            assert_eq!(sum, Scaling { before: 1.0, op: ReduceOp::Sum, after: 1.0 });
        }
    }

    #[test]
    fn fingerprints_tell_orders_apart() {
        assert_ne!(fingerprint([1, 2].into_iter()), fingerprint([2, 1].into_iter()));
    }
}
