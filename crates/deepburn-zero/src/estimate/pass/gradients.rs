//! Gradients of parameters on their way from autodiff to their sums.
//!
//! Main type: [`GradientMemory`]. It follows the rules of `reduce`.

use super::*;
use crate::estimate::activations::{GradientTiming, ReadParameter};

/// The gradients of a pass.
pub(super) struct GradientMemory<'a> {
    plan: ReductionMemory,
    ledger: &'a Ledger,
    /// Elements at which the bucket is reduced.
    capacity: u64,
    bucket: Vec<BucketedGradient>,
    in_flight: VecDeque<Vec<BucketedGradient>>,
    /// Sums of this micro-batch, and sums of earlier ones to which nothing was added yet.
    sums: Vec<Lease>,
    earlier: VecDeque<Lease>,
    /// A gradient that waits for its embedding's gradient.
    tied: Vec<(Lease, u64)>,
    /// Gradients that are cast at the end.
    uncast: Vec<(Lease, ReadParameter)>,
    /// Embeddings whose gradients wait for those: elements of the table and of the rows.
    lookups: Vec<(u64, u64)>,
    /// What happened to buckets since the pass asked.
    pub(super) events: Vec<PassEvent>,
}

/// A gradient in a bucket.
struct BucketedGradient {
    numel: BucketedNumel,
    _lease: Lease,
}

impl<'a> GradientMemory<'a> {
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

    /// Takes the gradient of a parameter.
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

    /// Takes the gradient of an embedding: `rows` elements of rows, and the dense part if it is tied.
    pub(super) fn reduce_rows(&mut self, op: &GraphOp, rows: u64) {
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

    /// Ends the pass.
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

    /// Puts a gradient of a parameter of `numel` elements into the bucket, `held` of which are in memory.
    fn collect(&mut self, numel: u64, held: u64) {
        let _lease = self.hold(Category::Buckets, held, self.plan.travelling);
        let before: u64 = self.bucket.iter().map(|it| it.numel.numel).sum();
        if before > 0 && before + numel > self.capacity {
            self.flush();
        }
        self.bucket.push(BucketedGradient { numel: BucketedNumel { numel, held }, _lease });
        if before + numel >= self.capacity {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.bucket.is_empty() {
            return;
        }
        let bucket = std::mem::take(&mut self.bucket);
        self.events.push(PassEvent::Reduce(bucket.iter().map(|it| it.numel).collect()));
        self.in_flight.push_back(bucket);
        let allowed = usize::from(self.plan.overlaps);
        while self.in_flight.len() > allowed {
            if let Some(flight) = self.in_flight.pop_front() {
                self.land(flight);
            }
        }
    }

    /// Adds reduced gradients to their sums.
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

    /// The sum of a gradient that a rank keeps; beside the device it is only on its way.
    fn sum(&self, numel: u64, bytes: u64) -> Lease {
        let shards = if self.plan.shards { self.plan.ranks } else { 1 };
        let len = Partition::new(numel as usize, shards as usize).shard_len() as u64;
        let category = if self.plan.on_device { Category::Gradients } else { Category::Buckets };
        self.hold(category, len, bytes)
    }

    fn hold(&self, category: Category, numel: u64, bytes: u64) -> Lease {
        self.ledger.hold(category, (numel * bytes) as usize)
    }
}
