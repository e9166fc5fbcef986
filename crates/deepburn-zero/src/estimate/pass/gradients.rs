//! The simulated memory of parameter gradients, from autodiff to the gradient sums.
//!
//! Main type: `GradientMemory`. It follows the rules of the gradient reducer (`reduce.rs`) and
//! counts in the same ledger categories:
//!
//! ```text
//! autodiff (Activations) ─► bucket (Buckets) ─► reduced (Buckets) ─► sum (Gradients)
//! ```
//!
//! Two kinds of gradients are delayed. If a parameter was cast, its gradient is final when autodiff
//! has run the backward of the cast, which it runs last. The gradient of a tied embedding consists
//! of a dense part from the output layer and rows from the lookup, and is reported when both parts
//! exist.

use super::*;
use crate::estimate::activations::{GradientTiming, ReadParameter};

/// The parameter gradients of a pass.
pub(super) struct GradientMemory<'a> {
    /// The settings of the reduction.
    plan: ReductionMemory,
    /// The ledger of the simulation.
    ledger: &'a Ledger,
    /// The number of elements at which a bucket is reduced.
    capacity: u64,
    /// The gradients in the bucket that is being filled.
    bucket: Vec<BucketedGradient>,
    /// The buckets that are being reduced, oldest first.
    in_flight: VecDeque<Vec<BucketedGradient>>,
    /// The gradient sums to which this micro-batch has been added.
    sums: Vec<Lease>,
    /// The gradient sums of earlier micro-batches to which this micro-batch has not been added yet,
    /// in the order of forward. Gradients complete in approximately the reverse order, so during
    /// backward the sizes of the remaining sums are approximate.
    earlier: VecDeque<Lease>,
    /// Dense gradients of tied embeddings that wait for the rows of the lookup, with their number
    /// of elements.
    tied: Vec<(Lease, u64)>,
    /// Gradients that wait for their cast to f32 at the end of the pass.
    uncast: Vec<(Lease, ReadParameter)>,
    /// Embeddings whose rows wait for the dense part: the number of elements of the table and of
    /// the rows.
    lookups: Vec<(u64, u64)>,
    /// The reduction events since the last time the pass took them.
    pub(super) events: Vec<PassEvent>,
}

/// A gradient in a bucket.
struct BucketedGradient {
    /// The number of elements of the parameter, and the number that this rank holds.
    numel: BucketedNumel,
    /// The bytes in the bucket.
    _lease: Lease,
}

impl<'a> GradientMemory<'a> {
    /// Creates the state before the last micro-batch of a step. The gradient sums of earlier
    /// micro-batches already exist, unless they are offloaded.
    pub(super) fn new(graph: &ActivationGraph, plan: ReductionMemory, ledger: &'a Ledger) -> Self {
        let all = graph.ops.iter().flat_map(|op| &op.parameters);
        let trained: Vec<u64> = all
            // A tied parameter is also listed by the embedding.
            .filter(|it| !it.is_tied)
            .map(|it| it.numel)
            .collect();
        let share = super::super::sum(trained.iter().copied()).div_ceil(BUCKETS_PER_MODEL as u64);
        let mut memory = Self {
            capacity: plan.bucket_size.min(share).max(1),
            plan,
            ledger,
            bucket: Vec::new(),
            in_flight: VecDeque::new(),
            sums: Vec::new(),
            earlier: VecDeque::new(),
            tied: Vec::new(),
            uncast: Vec::new(),
            lookups: Vec::new(),
            events: Vec::new(),
        };
        if plan.micro_batches > 1 && plan.on_device {
            // The sum of a single micro-batch may be in the communication type.
            let bytes = plan.summed[usize::from(plan.micro_batches > 2)];
            memory.earlier = trained.iter().map(|numel| memory.sum(*numel, bytes)).collect();
        }
        memory
    }

    /// Receives the gradient of a parameter from autodiff.
    pub(super) fn reduce(&mut self, parameter: &ReadParameter) {
        let ReadParameter { numel, gradient_bytes, timing, is_tied } = *parameter;
        let lease = self.hold(Category::Activations, numel, gradient_bytes);
        match timing {
            GradientTiming::AfterCast => self.uncast.push((lease, *parameter)),
            GradientTiming::Immediate if is_tied => self.tied.push((lease, numel)),
            GradientTiming::Immediate => {
                drop(lease);
                self.collect(numel, numel);
            }
        }
    }

    /// Receives the gradient of an embedding with `rows` elements in its rows. For a tied
    /// embedding, also takes the dense part.
    pub(super) fn reduce_rows(&mut self, op: &GraphOp, rows: u64) {
        // The dense part of a tied table may still wait for its cast.
        let waits = self.uncast.iter().any(|(_, parameter)| parameter.is_tied);
        for table in &op.parameters {
            if waits {
                self.lookups.push((table.numel, rows));
            } else {
                let dense = self.tied.pop().map_or(0, |(_, numel)| numel);
                self.collect(table.numel, rows + dense);
            }
        }
    }

    /// Ends the pass: casts the gradients that wait for a cast, reduces the last bucket and waits
    /// for all reductions.
    pub(super) fn finish(&mut self) {
        for (lease, ReadParameter { numel, is_tied, .. }) in std::mem::take(&mut self.uncast) {
            let cast = self.hold(Category::Activations, numel, size_of::<f32>() as u64);
            drop(lease);
            if is_tied {
                self.tied.push((cast, numel));
            } else {
                drop(cast);
                self.collect(numel, numel);
            }
        }
        for (table, rows) in std::mem::take(&mut self.lookups) {
            let dense = self.tied.pop().map_or(0, |(_, numel)| numel);
            self.collect(table, rows + dense);
        }
        self.flush();
        while let Some(flight) = self.in_flight.pop_front() {
            self.land(flight);
        }
    }

    /// Adds the gradient of a parameter with `numel` elements to the bucket. `held` of its elements
    /// are in memory. If the gradient would exceed the capacity, the bucket is reduced first. If
    /// the bucket then reaches the capacity, it is reduced too.
    fn collect(&mut self, numel: u64, held: u64) {
        let _lease = self.hold(Category::Buckets, held, self.plan.communicated);
        // A gradient is never divided between buckets.
        if !self.bucket.is_empty() && self.bucket_numel() + numel > self.capacity {
            self.flush();
        }
        self.bucket.push(BucketedGradient { numel: BucketedNumel { numel, held }, _lease });
        if self.bucket_numel() >= self.capacity {
            self.flush();
        }
    }

    /// Returns the number of elements of the parameters whose gradients are in the bucket.
    fn bucket_numel(&self) -> u64 {
        self.bucket.iter().map(|it| it.numel.numel).sum()
    }

    /// Starts the reduction of the bucket. With `overlap_comm` one reduction may be pending.
    /// Without it, the rank waits immediately.
    fn flush(&mut self) {
        if self.bucket.is_empty() {
            return;
        }
        let bucket = std::mem::take(&mut self.bucket);
        self.events.push(PassEvent::Reduce(bucket.iter().map(|it| it.numel).collect()));
        self.in_flight.push_back(bucket);
        // With overlap, one bucket may be reduced while the next is filled.
        let allowed = usize::from(self.plan.overlaps);
        while self.in_flight.len() > allowed {
            if let Some(flight) = self.in_flight.pop_front() {
                self.land(flight);
            }
        }
    }

    /// Adds the gradients of a reduced bucket to their sums and frees the bucket.
    fn land(&mut self, flight: Vec<BucketedGradient>) {
        let numels: Vec<u64> = flight.iter().map(|it| it.numel.numel).collect();
        self.events.push(PassEvent::Land);
        drop(flight);
        for numel in numels {
            let sum = self.sum(numel, self.plan.summed[usize::from(self.plan.micro_batches > 1)]);
            if self.plan.on_device {
                drop(self.earlier.pop_front());
                self.sums.push(sum);
            }
        }
    }

    /// Counts the gradient sum that a rank keeps for a parameter with `numel` elements, of `bytes`
    /// bytes each. An offloaded sum is on the device only until it has been written, so it is
    /// counted as bucket memory.
    fn sum(&self, numel: u64, bytes: u64) -> Lease {
        let shards = if self.plan.shards { self.plan.ranks } else { 1 };
        let len = Partition::new(numel as usize, shards as usize).shard_len() as u64;
        let category = if self.plan.on_device { Category::Gradients } else { Category::Buckets };
        self.hold(category, len, bytes)
    }

    /// Counts `numel` elements of `bytes` bytes each in `category`.
    fn hold(&self, category: Category, numel: u64, bytes: u64) -> Lease {
        self.ledger.hold(category, (numel * bytes) as usize)
    }
}
