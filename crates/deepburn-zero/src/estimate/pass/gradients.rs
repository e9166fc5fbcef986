//! The gradients of parameters on their way from autodiff to their sums.
//!
//! Main type: `GradientMemory`. It follows the rules of `reduce`, and counts the same ledger
//! categories:
//!
//! ```text
//! autodiff (Activations) ─► bucket (Buckets) ─► reduced (Buckets) ─► sum (Gradients)
//! ```
//!
//! Two cases wait at the end of the pass. A gradient behind a cast of the parameter is final only
//! when autodiff reaches the cast, which it does last. The gradient of a tied embedding has a dense
//! part, from the output layer, and rows from the lookup, and is reported when both exist.

use super::*;
use crate::estimate::activations::{GradientTiming, ReadParameter};

/// The gradients of a pass.
pub(super) struct GradientMemory<'a> {
    /// The settings of reduction.
    plan: ReductionMemory,
    /// The ledger of the simulation.
    ledger: &'a Ledger,
    /// The number of elements at which a bucket is reduced.
    capacity: u64,
    /// The gradients in the bucket that is being filled.
    bucket: Vec<BucketedGradient>,
    /// The buckets that are being reduced, oldest first.
    in_flight: VecDeque<Vec<BucketedGradient>>,
    /// The sums to which this micro-batch has been added.
    sums: Vec<Lease>,
    /// The sums of earlier micro-batches to which this one has not been added yet. They are in the
    /// order of forward. Gradients land in about the reverse order, so in the middle of backward
    /// the sizes of the sums that are left are approximate.
    earlier: VecDeque<Lease>,
    /// Dense gradients that wait for the rows of their embedding, with their elements.
    tied: Vec<(Lease, u64)>,
    /// Gradients that are cast to f32 at the end of the pass.
    uncast: Vec<(Lease, ReadParameter)>,
    /// Embeddings whose rows wait for the dense part: elements of the table and of the rows.
    lookups: Vec<(u64, u64)>,
    /// The events of buckets since the pass has last taken them.
    pub(super) events: Vec<PassEvent>,
}

/// A gradient in a bucket.
struct BucketedGradient {
    /// The elements of the parameter and of what this rank holds.
    numel: BucketedNumel,
    /// The bytes in the bucket.
    _lease: Lease,
}

impl<'a> GradientMemory<'a> {
    /// Creates the memory before the last micro-batch of a step: the sums of earlier micro-batches
    /// exist already, unless they are offloaded.
    pub(super) fn new(graph: &ActivationGraph, plan: ReductionMemory, ledger: &'a Ledger) -> Self {
        let all = graph.ops.iter().flat_map(|op| &op.parameters);
        let trained: Vec<u64> = all
            // A tied parameter is listed by the embedding too.
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
            // The sum of one micro-batch is in the type in which it travelled.
            let bytes = plan.summed[usize::from(plan.micro_batches > 2)];
            memory.earlier = trained.iter().map(|numel| memory.sum(*numel, bytes)).collect();
        }
        memory
    }

    /// Takes the gradient of a parameter from autodiff.
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

    /// Takes the gradient of an embedding, which has `rows` elements in its rows, and the dense
    /// part too if it is tied.
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

    /// Ends the pass: casts what waited for it, reduces the last bucket and waits for all buckets.
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

    /// Puts the gradient of a parameter of `numel` elements into the bucket, `held` of which are in
    /// memory. The bucket is reduced before a gradient that would exceed the capacity, and after
    /// one that reaches it.
    fn collect(&mut self, numel: u64, held: u64) {
        let _lease = self.hold(Category::Buckets, held, self.plan.travelling);
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

    /// Starts to reduce the bucket. With overlap one bucket may be on its way; without it, the rank
    /// waits at once.
    fn flush(&mut self) {
        if self.bucket.is_empty() {
            return;
        }
        let bucket = std::mem::take(&mut self.bucket);
        self.events.push(PassEvent::Reduce(bucket.iter().map(|it| it.numel).collect()));
        self.in_flight.push_back(bucket);
        // With overlap one bucket may be on its way while the next is filled.
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

    /// Enters the sum that a rank keeps of a gradient of `numel` elements, `bytes` bytes each. An
    /// offloaded sum is on the device only until it has been written, so it counts as bucket
    /// memory.
    fn sum(&self, numel: u64, bytes: u64) -> Lease {
        let shards = if self.plan.shards { self.plan.ranks } else { 1 };
        let len = Partition::new(numel as usize, shards as usize).shard_len() as u64;
        let category = if self.plan.on_device { Category::Gradients } else { Category::Buckets };
        self.hold(category, len, bytes)
    }

    /// Enters `numel` elements of `bytes` bytes.
    fn hold(&self, category: Category, numel: u64, bytes: u64) -> Lease {
        self.ledger.hold(category, (numel * bytes) as usize)
    }
}
