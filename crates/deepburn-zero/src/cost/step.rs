//! A training step on one of many equal ranks.
//!
//! Main types: [`StepModel`], what a step does, and [`StepCost`], how long that takes.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use deepburn_comm::{Count, Operation, Partition, ReduceOp};
use deepburn_config::{
    ActivationOffload, OptimizerOffload, ParameterOffload, Plan, Stage, ZeroPlan,
};

use super::clock::Started;
use super::gathering::SimulatedGatherer;
use super::group::{Collective, SimulatedGroup};
use super::{Machine, Network};
use crate::estimate::{
    ActivationGraph, BackwardOp, BucketedNumel, DirectionMemory, ElementBytes, Estimate, GraphOp,
    ParameterSize, PassEvent, PassPlan,
};
use crate::persistence::persistent_parameters;

/// Bytes of a number that ranks exchange for a norm or a loss.
const NUMBER: u64 = 8;

/// Bytes of an fp32 element.
const FP32: u64 = 4;

/// Why the time of a step cannot be predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnsupportedPlan {
    /// Ranks exchange momenta, norms or matrices while they update.
    Optimizer,
    /// Model states or activations are offloaded.
    Offload,
    /// A parameter has no gradient.
    Frozen,
    /// The activation graph is of another model, or too large to simulate.
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

/// What a training step does on each rank: ops, reads of parameters and buckets of gradients. It is the same for any
/// number of ranks; every rank has micro-batches of the same size.
#[derive(Debug)]
pub struct StepModel<'a> {
    graph: &'a ActivationGraph,
    parameters: &'a [ParameterSize],
    zero: &'a ZeroPlan,
    events: Vec<PassEvent>,
    /// The parameters that each op reads, by place in `parameters`.
    reads: Vec<Vec<usize>>,
    numels: Vec<u64>,
    bytes: ElementBytes,
    /// Bytes of a gradient element on its way.
    travelling: u64,
    micro_batches: u64,
}

/// How long a step takes on each rank, and what the rank sends.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    /// Ranks.
    pub ranks: u64,
    /// Seconds of computation: passes, sums of gradients and the optimizer.
    pub compute: f64,
    /// Seconds of collectives, hidden ones included.
    pub communication: f64,
    /// Seconds of collectives while the rank computes.
    pub hidden: f64,
    /// Seconds of the step.
    pub seconds: f64,
    /// Bytes that a rank sends to others, without headers.
    pub bytes_sent: u64,
    /// Collectives by purpose.
    pub collectives: BTreeMap<&'static str, Count>,
}

impl<'a> StepModel<'a> {
    /// The step of a model with `parameters` and the pass of `graph`, under `plan` with `zero` in place of its ZeRO
    /// section. `estimate` is the memory estimate for the same.
    ///
    /// # Errors
    /// When the plan or the model has parts whose time is not predicted.
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
            travelling: plan.precision.communication.bytes() as u64,
            micro_batches: micro_batches as u64,
            graph,
            parameters,
            zero,
        })
    }

    /// The cost of a step on `ranks` ranks, each as fast as `machine`.
    ///
    /// # Panics
    /// When `ranks` is 0.
    pub fn cost(&self, ranks: u64, machine: Machine, network: &Network) -> StepCost {
        assert!(ranks > 0, "0 ranks cannot run anything");
        let persistent = self.persistent(ranks);
        let mut gatherer = SimulatedGatherer::new(
            self.zero.parameters,
            &self.numels,
            self.bytes.parameter,
            &persistent,
        );
        // The first pass records the order of reads; the second follows it, as all later ones do.
        let mut recording = SimulatedGroup::new(ranks, machine, network);
        self.micro_batch(&mut recording, &mut gatherer);
        let mut pass = SimulatedGroup::new(ranks, machine, network);
        self.micro_batch(&mut pass, &mut gatherer);
        let mut step = SimulatedGroup::new(ranks, machine, network);
        self.update(&mut step, &persistent);
        self.sum_up(&pass, &step)
    }

    /// All micro-batches of a step, which begin and end with an idle link, and the update.
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

    /// Forward and backward of a micro-batch.
    fn micro_batch(&self, group: &mut SimulatedGroup<'_>, gatherer: &mut SimulatedGatherer<'_>) {
        let mut flights = VecDeque::new();
        gatherer.start_pass();
        for event in &self.events {
            match event {
                PassEvent::Forward(op) | PassEvent::Recompute(op) => {
                    self.read(*op, usize::MAX, group, gatherer);
                    let op = &self.graph.ops[*op];
                    // The loss head makes its gradients in forward.
                    let factor = if op.backward == BackwardOp::LossHead { 3 } else { 1 };
                    group.compute(factor * op.flops, factor * self.bytes_of(op));
                }
                PassEvent::StartBackward => gatherer.start_backward(),
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
                    if let Some((started, bucket)) = flights.pop_front() {
                        group.clock.wait(started);
                        group.compute(0, self.bytes_of_sums(bucket, group.ranks));
                    }
                }
            }
        }
        let barrier = Collective::dense("end of backward", Operation::Barrier, [0, 0], 0);
        group.run(&barrier);
        gatherer.finish_pass(group);
    }

    /// Reads the first `count` parameters of an op.
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
            sent: sum(bucket.iter().map(|it| it.held)).saturating_mul(self.travelling),
            result: elements.saturating_mul(self.travelling),
        })
    }

    /// The step after the last micro-batch, with what the training loop exchanges.
    fn update(&self, group: &mut SimulatedGroup<'_>, persistent: &[usize]) {
        let numbers = |purpose, count| {
            let operation = Operation::AllReduce(ReduceOp::Sum);
            Collective::dense(purpose, operation, [1, count], NUMBER)
        };
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

    /// Arrays and elements of each all-gather of updated parameters.
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

    /// Parameters that stay whole.
    fn persistent(&self, ranks: u64) -> Vec<usize> {
        match self.zero.stage {
            Stage::Parameters if ranks > 1 => {
                persistent_parameters(self.numels.iter().copied(), &self.zero.parameters)
            }
            _ => Vec::new(),
        }
    }

    /// Bytes that an op reads and writes in forward. Backward moves twice as many: it reads the gradient of each
    /// output, and makes one of each input.
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

    /// Bytes that are moved to add a reduced bucket to the sums of earlier micro-batches.
    fn bytes_of_sums(&self, bucket: &[BucketedNumel], ranks: u64) -> u64 {
        if self.micro_batches == 1 {
            return 0;
        }
        let shards = if self.zero.shards_gradients() { ranks } else { 1 };
        let kept = sum(bucket.iter().map(|it| shard(it.numel, shards)));
        kept.saturating_mul(self.travelling + 2 * self.bytes.gradient)
    }

    /// Bytes that an optimizer step reads and writes: gradients for the norm and for the update, and parameters,
    /// masters and moments, which it reads and writes.
    fn bytes_of_update(&self, ranks: u64) -> u64 {
        let shards = if self.zero.stage.shards_optimizer() { ranks } else { 1 };
        let ElementBytes { parameter, gradient, master, .. } = self.bytes;
        let values = if master > 0 { parameter + 2 * master } else { 2 * parameter };
        sum(self.parameters.iter().map(|it| {
            let moments = it.moments.unwrap_or(0) as u64 * 2 * FP32;
            let updated = shard(it.numel, shards).saturating_mul(values + moments + gradient);
            updated.saturating_add(shard(it.numel, ranks).saturating_mul(gradient))
        }))
    }
}

/// Refuses what the model of a step does not have.
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

/// The parameters that each op of `graph` reads, by place in `parameters`. A parameter that is read for the first time
/// is the first one of its size that is left; collectives of one size cost the same. `None` where the sizes differ.
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

/// How many of an op's parameters its backward pass reads: the weight of a product or of a normalisation.
fn reads_in_backward(op: &GraphOp) -> usize {
    match op.backward {
        BackwardOp::Product | BackwardOp::Unary if !op.saved.is_empty() => 1,
        _ => 0,
    }
}

/// Elements of the shard of a parameter.
fn shard(numel: u64, shards: u64) -> u64 {
    Partition::new(numel as usize, shards as usize).shard_len() as u64
}

fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}
