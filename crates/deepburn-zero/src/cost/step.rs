//! The time of a training step on one of several identical ranks.
//!
//! Main types: [`StepModel`], the work of a step, and [`StepCost`], its time.
//!
//! One micro-batch and one optimizer update are simulated. The time of the micro-batch is
//! multiplied by the gradient accumulation steps:
//!
//! ```text
//! seconds = micro_batches * (forward, backward, barrier) + (batch totals, norm, optimizer, all-gathers, loss)
//! ```
//!
//! The times of micro-batches can be added, because the link is idle at the beginning and end of
//! each. The model ignores that the first micro-batch has no earlier gradient sums to add to. The
//! events of a micro-batch do not depend on the number of ranks, so one `StepModel` predicts the
//! cost for any number of ranks. Three things depend on the number of ranks: the times and sizes of
//! collectives, the size of the shards that the optimizer updates, and the set of persistent
//! parameters.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use deepburn_comm::{Count, Operation, Partition, ReduceOp};
use deepburn_config::{
    ActivationOffload, OptimizerOffload, ParameterOffload, Plan, Stage, ZeroPlan,
};

use super::clock::Started;
use super::collective::Collective;
use super::gathering::SimulatedGatherer;
use super::group::SimulatedGroup;
use super::{Network, RankSpeed};
use crate::estimate::{
    ActivationGraph, BackwardOp, BucketedNumel, DirectionMemory, ElementBytes, Estimate, GraphOp,
    ParameterSize, PassEvent, PassPlan,
};
use crate::persistence::persistent_parameters;

/// The size of a host number (f64) in bytes. Ranks exchange such numbers for norms and losses.
const NUMBER: u64 = 8;

/// The size of an fp32 element in bytes.
const FP32: u64 = 4;

/// The reason why the time of a step cannot be predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnsupportedPlan {
    /// The optimizer exchanges momenta, norms or matrices during the update.
    Optimizer,
    /// Model states or activations are offloaded.
    Offload,
    /// A parameter is frozen.
    Frozen,
    /// The activation graph does not match the parameters, or is too large to simulate.
    Model,
}

impl fmt::Display for UnsupportedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimizer => {
                "step times are not predicted for optimizers that exchange directions (LAMB, Muon, 1-bit Adam and \
                 their kin); use Adam, AdamW, SGD, Lion or Adagrad"
            }
            Self::Offload => "step times are not predicted with offload; keep all states on the device",
            Self::Frozen => "step times are not predicted with frozen parameters; train all of them",
            Self::Model => "the model is too large to simulate; use a smaller one",
        })
    }
}

impl std::error::Error for UnsupportedPlan {}

/// The work of a training step on each rank: ops, parameter reads and gradient buckets. It does not
/// depend on the number of ranks, because every rank processes micro-batches of the same size.
#[derive(Debug)]
pub struct StepModel<'a> {
    /// The ops of a micro-batch.
    graph: &'a ActivationGraph,
    /// The parameters in module order.
    parameters: &'a [ParameterSize],
    /// The ZeRO section of the plan.
    zero: &'a ZeroPlan,
    /// The events of a micro-batch in order.
    events: Vec<PassEvent>,
    /// The parameters that each op reads, as indices of `parameters`.
    reads: Vec<Vec<usize>>,
    /// The number of elements of each parameter.
    numels: Vec<u64>,
    /// The bytes of model states per element.
    bytes: ElementBytes,
    /// The size of a gradient element during communication, in bytes.
    communicated: u64,
    /// The number of micro-batches per optimizer step (`gradient_accumulation_steps`).
    micro_batches: u64,
}

/// The time of a training step on each rank, and the bytes that the rank sends. All numbers cover
/// the complete step with all its micro-batches. `seconds` is `compute + communication - hidden`.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    /// The number of ranks.
    pub ranks: u64,
    /// The seconds of computation: training passes, gradient accumulation and the optimizer.
    pub compute: f64,
    /// The seconds of all collectives, including hidden ones.
    pub communication: f64,
    /// The seconds of collectives that run while the rank computes.
    pub hidden: f64,
    /// The seconds of the step.
    pub seconds: f64,
    /// The bytes that a rank sends to other ranks, without headers.
    pub bytes_sent: u64,
    /// The collectives by purpose, counted like the statistics of a process group.
    pub collectives: BTreeMap<&'static str, Count>,
}

impl<'a> StepModel<'a> {
    /// Creates the model of a training step from the parameters and the activation graph of a
    /// model. `zero` replaces the ZeRO section of `plan`. `estimate` must be the memory estimate
    /// for the same arguments.
    ///
    /// # Errors
    ///
    /// Returns an error if step times are not predicted for the plan or the model.
    pub fn new(
        plan: &Plan,
        zero: &'a ZeroPlan,
        parameters: &'a [ParameterSize],
        graph: &'a ActivationGraph,
        estimate: &Estimate,
    ) -> Result<Self, UnsupportedPlan> {
        check(plan, zero, parameters)?;
        let pass = PassPlan::new(plan, zero, estimate.ranks, estimate);
        let micro_batches = plan.batch.gradient_accumulation_steps;
        Ok(Self {
            events: pass.events(graph).ok_or(UnsupportedPlan::Model)?,
            reads: reads(graph, parameters).ok_or(UnsupportedPlan::Model)?,
            numels: parameters.iter().map(|parameter| parameter.numel).collect(),
            bytes: ElementBytes::new(&plan.optimizer, &plan.precision, micro_batches),
            communicated: plan.precision.communication.bytes() as u64,
            micro_batches: micro_batches as u64,
            graph,
            parameters,
            zero,
        })
    }

    /// Returns the cost of a step on `ranks` ranks with this `speed` each.
    ///
    /// # Panics
    ///
    /// Panics if `ranks` is 0.
    pub fn cost(&self, ranks: u64, speed: RankSpeed, network: &Network) -> StepCost {
        assert!(ranks > 0, "0 ranks cannot run anything");
        let persistent = self.persistent(ranks);
        let mut gatherer = SimulatedGatherer::new(
            self.zero.parameters,
            &self.numels,
            self.bytes.parameter,
            &persistent,
        );
        // The first pass records the order of parameter reads. The second pass prefetches in this
        // order, like all later passes, and is measured.
        let mut recording = SimulatedGroup::new(ranks, speed, network);
        self.micro_batch(&mut recording, &mut gatherer);
        let mut pass = SimulatedGroup::new(ranks, speed, network);
        self.micro_batch(&mut pass, &mut gatherer);
        let mut step = SimulatedGroup::new(ranks, speed, network);
        self.update(&mut step, &persistent);
        self.sum_up(&pass, &step)
    }

    /// Adds the times of all micro-batches and of the update. `pass` is the simulation of one
    /// micro-batch, `step` the simulation of the update.
    fn sum_up(&self, pass: &SimulatedGroup<'_>, step: &SimulatedGroup<'_>) -> StepCost {
        let passes = self.micro_batches;
        let total = |of: fn(&SimulatedGroup<'_>) -> f64| passes as f64 * of(pass) + of(step);
        let communication = total(|group| group.clock.communication);
        let mut collectives = step.counts.clone();
        for (purpose, count) in &pass.counts {
            let sum = collectives.entry(purpose).or_default();
            sum.calls += passes * count.calls;
            sum.elements += passes * count.elements;
        }
        StepCost {
            ranks: pass.ranks,
            compute: total(|group| group.clock.compute),
            communication,
            hidden: (communication - total(|group| group.clock.exposed)).max(0.0),
            seconds: total(|group| group.clock.now),
            bytes_sent: passes.saturating_mul(pass.bytes_sent).saturating_add(step.bytes_sent),
            collectives,
        }
    }

    /// Simulates the forward and backward pass of a micro-batch. Reductions complete in the order
    /// in which they were started, so pending buckets are kept in a queue.
    fn micro_batch(&self, group: &mut SimulatedGroup<'_>, gatherer: &mut SimulatedGatherer<'_>) {
        let mut flights = VecDeque::new();
        gatherer.start_pass();
        for event in &self.events {
            match event {
                PassEvent::Forward(op) | PassEvent::Recompute(op) => {
                    self.read(*op, usize::MAX, group, gatherer);
                    let op = &self.graph.ops[*op];
                    // The loss head also computes its gradients in forward, which together is three
                    // times the work of a forward pass.
                    let factor = if op.backward == BackwardOp::LossHead { 3 } else { 1 };
                    group.compute(factor * op.flops, factor * self.bytes_of(op));
                }
                PassEvent::StartBackward => gatherer.start_backward(),
                // Backward reads only weights. It needs no biases and no embedding tables.
                PassEvent::ReadAgain(index) => {
                    let count = reads_in_backward(&self.graph.ops[*index]);
                    self.read(*index, count, group, gatherer);
                }
                PassEvent::Backward(index) => {
                    let op = &self.graph.ops[*index];
                    let factor = match op.backward {
                        BackwardOp::LossHead | BackwardOp::None => 0,
                        _ => 2,
                    };
                    group.compute(factor * op.flops, factor * self.bytes_of(op));
                }
                PassEvent::Reduce(bucket) => {
                    flights.push_back((self.reduce(bucket, group), bucket));
                }
                PassEvent::Land => {
                    // The oldest pending bucket completes first.
                    if let Some((started, bucket)) = flights.pop_front() {
                        group.clock.wait(started);
                        group.compute(0, self.bytes_of_sums(bucket, group.ranks));
                    }
                }
            }
        }
        // All ranks wait for the end of backward before they release pending fetches.
        let barrier = Collective::dense("end of backward", Operation::Barrier, [0, 0], 0);
        group.run(&barrier);
        gatherer.finish_pass(group);
    }

    /// Reads the first `count` parameters of an op. They are gathered at stage 3. At other stages
    /// parameters are not sharded, and a read takes no time.
    fn read(
        &self,
        op: usize,
        count: usize,
        group: &mut SimulatedGroup<'_>,
        gatherer: &mut SimulatedGatherer<'_>,
    ) {
        if self.zero.stage.shards_parameters() {
            self.reads[op].iter().take(count).for_each(|index| gatherer.read(*index, group));
        }
    }

    /// Starts the reduction of a bucket: a reduce-scatter if gradients are sharded and
    /// `reduce_scatter` is enabled, otherwise an all-reduce.
    fn reduce(&self, bucket: &[BucketedNumel], group: &mut SimulatedGroup<'_>) -> Started {
        let scatters = self.zero.shards_gradients() && self.zero.gradients.reduce_scatter;
        let elements = sum(bucket.iter().map(|it| it.numel));
        group.start(&Collective {
            purpose: "gradients",
            operation: match scatters {
                true => Operation::ReduceScatter(ReduceOp::Mean),
                false => Operation::AllReduce(ReduceOp::Mean),
            },
            arrays: bucket.len() as u64,
            elements,
            sent: sum(bucket.iter().map(|it| it.held)).saturating_mul(self.communicated),
            result: elements.saturating_mul(self.communicated),
        })
    }

    /// Simulates the optimizer step after the last micro-batch. This includes three small
    /// all-reduces of f64 numbers by the training loop: the batch totals, the gradient norm and the
    /// loss.
    fn update(&self, group: &mut SimulatedGroup<'_>, persistent: &[usize]) {
        let numbers = |purpose, count| {
            // A rank sends its numbers in one f64 array.
            let operation = Operation::AllReduce(ReduceOp::Sum);
            Collective::dense(purpose, operation, [1, count], NUMBER)
        };
        // The training loop reduces the batch totals before the first micro-batch. The position
        // does not change the total time.
        group.run(&numbers("batch totals", 3));
        group.run(&numbers("gradient norm", 2));
        group.compute(0, self.bytes_of_update(group.ranks));
        let gather = |purpose, size| {
            Collective::dense(purpose, Operation::AllGather, size, self.bytes.parameter)
        };
        for bucket in self.published() {
            group.run(&gather("updated parameters", bucket));
        }
        if !persistent.is_empty() {
            let elements = sum(persistent.iter().map(|index| self.numels[*index]));
            group.run(&gather("persistent", [persistent.len() as u64, elements]));
        }
        group.run(&numbers("loss", 3));
    }

    /// Returns the number of arrays and the number of elements of each all-gather of updated
    /// parameters. The buckets are the same as in `publish.rs`. At stages 0 and 3 no parameters are
    /// gathered after the update.
    fn published(&self) -> Vec<[u64; 2]> {
        if !matches!(self.zero.stage, Stage::OptimizerStates | Stage::Gradients) {
            return Vec::new();
        }
        let mut buckets: Vec<[u64; 2]> = Vec::new();
        for numel in &self.numels {
            match buckets.last_mut() {
                Some([arrays, elements])
                    if *elements + numel <= self.zero.allgather_bucket_size as u64 =>
                {
                    *arrays += 1;
                    *elements += numel;
                }
                _ => buckets.push([1, *numel]),
            }
        }
        buckets
    }

    /// Returns the indices of the persistent parameters. There are none on a single rank, whose
    /// shards are complete parameters.
    fn persistent(&self, ranks: u64) -> Vec<usize> {
        match self.zero.stage {
            Stage::Parameters if ranks > 1 => {
                persistent_parameters(self.numels.iter().copied(), &self.zero.parameters)
            }
            _ => Vec::new(),
        }
    }

    /// Returns the bytes that an op reads and writes in forward. The backward pass reads and writes
    /// twice as many bytes, because it additionally reads the gradient of each output and writes
    /// the gradient of each input.
    fn bytes_of(&self, op: &GraphOp) -> u64 {
        let activations = op.inputs.iter().chain(&op.outputs);
        let activations = sum(activations.map(|index| self.graph.activations[*index].bytes));
        // A lookup reads the rows that it returns.
        let parameters = match op.backward {
            BackwardOp::Lookup { .. } => 0,
            _ => sum(op.parameters.iter().map(|it| it.numel)).saturating_mul(self.bytes.parameter),
        };
        activations.saturating_add(parameters)
    }

    /// Returns the bytes that are read and written to add a reduced bucket to the gradient sums of
    /// earlier micro-batches. The new gradient is read, and the sum is read and written.
    fn bytes_of_sums(&self, bucket: &[BucketedNumel], ranks: u64) -> u64 {
        if self.micro_batches == 1 {
            return 0;
        }
        // If gradients are not sharded, every rank adds the complete bucket.
        let shards = if self.zero.shards_gradients() { ranks } else { 1 };
        let kept = sum(bucket.iter().map(|it| shard(it.numel, shards)));
        kept.saturating_mul(self.communicated + 2 * self.bytes.gradient)
    }

    /// Returns the bytes that an optimizer step reads and writes. The gradient norm reads the owned
    /// gradients. The update reads the gradients, and reads and writes parameters, master weights
    /// and moments. 16-bit parameters with master weights are only written.
    fn bytes_of_update(&self, ranks: u64) -> u64 {
        let shards = if self.zero.stage.shards_optimizer() { ranks } else { 1 };
        let ElementBytes { parameter, gradient, master, .. } = self.bytes;
        let values = if master > 0 { parameter + 2 * master } else { 2 * parameter };
        sum(self.parameters.iter().map(|it| {
            // Each moment is read and written.
            let moments = it.moments.unwrap_or(0) as u64 * 2 * FP32;
            let updated = shard(it.numel, shards).saturating_mul(values + moments + gradient);
            updated.saturating_add(shard(it.numel, ranks).saturating_mul(gradient))
        }))
    }
}

/// Returns an error if the step of this plan or model has parts that are not simulated.
fn check(
    plan: &Plan,
    zero: &ZeroPlan,
    parameters: &[ParameterSize],
) -> Result<(), UnsupportedPlan> {
    if parameters.iter().any(|it| it.direction != DirectionMemory::None) {
        return Err(UnsupportedPlan::Optimizer);
    }
    let states_stay = zero.optimizer_states == OptimizerOffload::Device
        && zero.parameter_shards == ParameterOffload::Device;
    if !states_stay || plan.activations.offload != ActivationOffload::Device {
        return Err(UnsupportedPlan::Offload);
    }
    match parameters.iter().all(ParameterSize::is_trainable) {
        true => Ok(()),
        false => Err(UnsupportedPlan::Frozen),
    }
}

/// Returns the parameters that each op of `graph` reads, as indices of `parameters`. Returns `None`
/// if the sizes do not match.
///
/// The graph contains the sizes of parameters but not their names. Each read of a new parameter is
/// therefore matched with the first unread parameter of the same size. A wrong match does not
/// change the result, because collectives of the same size take the same time. A tied parameter is
/// matched with the table of the last embedding.
fn reads(graph: &ActivationGraph, parameters: &[ParameterSize]) -> Option<Vec<Vec<usize>>> {
    let mut places: BTreeMap<u64, VecDeque<usize>> = BTreeMap::new();
    for (index, parameter) in parameters.iter().enumerate() {
        places.entry(parameter.numel).or_default().push_back(index);
    }
    let mut table = None;
    let mut reads = Vec::with_capacity(graph.ops.len());
    for op in &graph.ops {
        let mut of_op = Vec::with_capacity(op.parameters.len());
        for parameter in &op.parameters {
            let place = match parameter.is_tied {
                true => table?,
                false => places.get_mut(&parameter.numel)?.pop_front()?,
            };
            if matches!(op.backward, BackwardOp::Lookup { .. }) {
                table = Some(place);
            }
            of_op.push(place);
        }
        reads.push(of_op);
    }
    Some(reads)
}

/// Returns the number of parameters that the backward pass of an op reads: 1, the weight, for a
/// product or a normalisation, otherwise 0.
fn reads_in_backward(op: &GraphOp) -> usize {
    match op.backward {
        BackwardOp::Product | BackwardOp::Unary if !op.saved.is_empty() => 1,
        _ => 0,
    }
}

/// Returns the number of elements in each of `shards` shards of a parameter, including padding.
fn shard(numel: u64, shards: u64) -> u64 {
    Partition::new(numel as usize, shards as usize).shard_len() as u64
}

/// Returns the saturating sum. Sizes may come from a configuration file, so the sum may exceed
/// `u64`.
fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}
