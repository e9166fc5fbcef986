//! The memory of a training pass, computed op by op.
//!
//! Main type: [`PassPlan`]. It goes through the ops of an [`ActivationGraph`] forwards and backwards and enters every
//! tensor in a [`Ledger`], as a run does: activations, with what activation checkpointing frees and computes again,
//! and gradients on their way from autodiff over a bucket to their sum.

use std::collections::VecDeque;
use std::rc::Rc;

use deepburn_comm::Partition;
use deepburn_config::{
    ActivationOffload, GradientReduction, OptimizerOffload, Plan, Precision, RecomputePolicy,
    ReductionPlan, ZeroPlan,
};

use super::Estimate;
use super::activations::{ActivationGraph, BackwardOp, GraphOp};
use crate::ledger::{Category, Lease, Ledger, Tier};
use crate::reduce::BUCKETS_PER_MODEL;

mod blocks;
mod event;
mod gradients;

use blocks::ActivationMemory;
use gradients::GradientMemory;

pub(crate) use event::{BucketedNumel, PassEvent};

/// More bytes than any machine has; a pass that may take more is not computed.
const ABSURD: u64 = 1 << 56;

/// How a training pass is run.
#[derive(Debug, Clone)]
pub struct PassPlan {
    policy: RecomputePolicy,
    offload: ActivationOffload,
    reduction: ReductionMemory,
    gathering: GatheringMemory,
}

/// Parameters that are gathered for ops.
#[derive(Debug, Clone, Copy)]
struct GatheringMemory {
    /// Most bytes of them.
    limit: u64,
    /// Bytes of an element.
    bytes: u64,
    /// Parameters of at most so many elements are not gathered.
    persistence_threshold: u64,
    /// Whether they share the memory of their shards, as on one rank.
    is_shared: bool,
}

/// How gradients are reduced and kept.
#[derive(Debug, Clone, Copy)]
struct ReductionMemory {
    ranks: u64,
    /// Whether a rank keeps its part of a gradient alone.
    shards: bool,
    /// Whether sums are kept on the device.
    on_device: bool,
    bucket_size: u64,
    overlaps: bool,
    /// Bytes of an element on its way.
    travelling: u64,
    /// Bytes of an element in the sum of one micro-batch, and of several.
    summed: [u64; 2],
    micro_batches: usize,
}

/// The most that a rank holds in a training pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassPeak {
    /// Bytes of activations on the device.
    pub activations: u64,
    /// Bytes of activations outside of it.
    pub offloaded: u64,
    /// Bytes on the device beside parameters and optimizer states: activations, gradients, buckets and gathered
    /// parameters, when they take the most together.
    pub device: u64,
    /// The same as the ledger counts it: on one rank at stage 3 with gathered parameters, although they share the
    /// memory of their shards.
    pub ledger: u64,
}

/// Whether a reduced gradient is multiplied after its sum, which brings it to the type in which it accumulates
/// (`reduce/scaling.rs`).
fn scales_sums(plan: &Plan, ranks: u64) -> bool {
    let ReductionPlan { op, prescale, predivide_factor } = plan.reduction;
    if op == GradientReduction::Sum || prescale {
        return false;
    }
    if predivide_factor != 1.0 {
        return predivide_factor != ranks as f64;
    }
    let micro_batches = plan.batch.gradient_accumulation_steps as u64;
    plan.precision.communication == Precision::Fp16 && ranks.min(micro_batches) > 1
}

impl GatheringMemory {
    fn new(plan: &Plan, zero: &ZeroPlan, ranks: u64, estimate: &Estimate) -> Self {
        let is_gathered = estimate.buffers.gathered_limit > 0;
        let is_shared = zero.stage.shards_parameters() && ranks == 1 && !is_gathered;
        let bytes = plan.precision.compute.bytes() as u64;
        // A parameter beyond the limit is whole for one op, which is seldom when a pass takes the most.
        let limit = (zero.parameters.max_live_parameters as u64).saturating_mul(bytes);
        Self {
            limit: if is_shared || is_gathered { limit } else { 0 },
            bytes,
            persistence_threshold: match is_shared {
                true => 0,
                false => zero.parameters.persistence_threshold as u64,
            },
            is_shared,
        }
    }
}

impl PassPlan {
    /// A pass under `plan`, with `zero` in place of its ZeRO section, on each of `ranks` ranks. `estimate` belongs to
    /// the model under the same plan.
    pub fn new(plan: &Plan, zero: &ZeroPlan, ranks: u64, estimate: &Estimate) -> Self {
        let travelling = plan.precision.communication.bytes() as u64;
        let accumulated = plan.precision.accumulation.bytes() as u64;
        let first = if scales_sums(plan, ranks) { accumulated } else { travelling };
        Self {
            policy: plan.activations.recompute,
            offload: plan.activations.offload.clone(),
            reduction: ReductionMemory {
                ranks,
                shards: zero.shards_gradients(),
                on_device: match zero.optimizer_states {
                    OptimizerOffload::Device => true,
                    // Some of them: as if all.
                    OptimizerOffload::Host { ratio, .. } => ratio < 1.0,
                    OptimizerOffload::Nvme(_) => false,
                },
                bucket_size: zero.gradients.reduce_bucket_size as u64,
                overlaps: zero.gradients.overlap_comm,
                travelling,
                summed: [first, accumulated],
                micro_batches: plan.batch.gradient_accumulation_steps,
            },
            gathering: GatheringMemory::new(plan, zero, ranks, estimate),
        }
    }

    /// The same pass under another policy of activation checkpointing.
    pub fn with_policy(&self, policy: RecomputePolicy) -> Self {
        Self { policy, ..self.clone() }
    }

    /// The most that a rank holds in the last micro-batch of a step.
    pub fn peak(&self, graph: &ActivationGraph) -> PassPeak {
        if graph.upper_bound() > ABSURD {
            return PassPeak { activations: ABSURD, offloaded: 0, device: ABSURD, ledger: ABSURD };
        }
        let (counted, _) = self.run(graph, self.gathering.limit);
        let [activations, offloaded, ledger] = counted;
        let [_, _, device] = match self.gathering.is_shared {
            true => self.run(graph, 0).0,
            false => counted,
        };
        PassPeak { activations, offloaded, device, ledger }
    }

    /// What the pass does, in order; `None` for a graph that no machine can hold.
    pub(crate) fn events(&self, graph: &ActivationGraph) -> Option<Vec<PassEvent>> {
        (graph.upper_bound() <= ABSURD).then(|| self.run(graph, self.gathering.limit).1)
    }

    /// Peaks of the activations on the device, of those that are offloaded, and of everything on the device,
    /// with so many bytes of gathered parameters. Beside them what the pass does.
    fn run(&self, graph: &ActivationGraph, gathered_limit: u64) -> ([u64; 3], Vec<PassEvent>) {
        let ledger = Ledger::new();
        let offload = match self.offload {
            ActivationOffload::Device => None,
            ActivationOffload::Host { threshold } => Some((Tier::Host, threshold)),
            ActivationOffload::Nvme { threshold, .. } => Some((Tier::Disk, threshold)),
        };
        let _constant = ledger.hold(Category::Activations, graph.constant as usize);
        let mut pass = SimulatedPass {
            activations: ActivationMemory::new(graph, self.policy, offload, &ledger),
            gradients: GradientMemory::new(graph, self.reduction, &ledger),
            graph,
            plan: self,
            ledger: &ledger,
            gathered: None,
            gathered_limit,
            unread: 0,
            of_values: (0..graph.activations.len()).map(|_| None).collect(),
            of_heads: Vec::new(),
            events: Vec::new(),
        };
        for (index, op) in graph.ops.iter().enumerate() {
            pass.events.push(PassEvent::Forward(index));
            pass.forward(index, op);
        }
        pass.activations.end_forward();
        pass.events.push(PassEvent::StartBackward);
        for (index, op) in graph.ops.iter().enumerate().rev() {
            pass.backward(index, op);
            pass.events.append(&mut pass.gradients.events);
        }
        pass.gradients.finish();
        pass.events.append(&mut pass.gradients.events);
        let events = std::mem::take(&mut pass.events);
        let offloaded = offload.map_or(Tier::Disk, |(tier, _)| tier);
        let peaks = [
            ledger.usage(Category::Activations),
            ledger.usage_on(offloaded, Category::Activations),
            ledger.total_on(Tier::Device),
        ];
        (peaks.map(|usage| usage.peak as u64), events)
    }
}

/// A training pass that is being simulated.
struct SimulatedPass<'a> {
    graph: &'a ActivationGraph,
    plan: &'a PassPlan,
    ledger: &'a Ledger,
    activations: ActivationMemory<'a>,
    gradients: GradientMemory<'a>,
    /// Parameters that are whole for ops.
    gathered: Option<Lease>,
    gathered_limit: u64,
    /// Bytes of parameters that the rest of the pass reads again.
    unread: u64,
    /// The gradient of each activation.
    of_values: Vec<Option<Rc<Lease>>>,
    /// Gradients that loss heads have computed in forward: of the input and of the parameters.
    of_heads: Vec<(Lease, Vec<Lease>)>,
    events: Vec<PassEvent>,
}

impl SimulatedPass<'_> {
    fn forward(&mut self, index: usize, op: &GraphOp) {
        self.unread += self.bytes_read_again(op);
        self.gather();
        self.activations.run(index, op);
        if op.backward == BackwardOp::LossHead {
            let f32s = |bytes: u64, own: u64| self.hold(bytes / own * 4);
            let parameters = op.parameters.iter().map(|it| self.hold(it.numel * 4)).collect();
            let own = op.parameters.first().map_or(4, |it| it.gradient_bytes);
            let hidden = f32s(self.graph.activations[op.inputs[0]].bytes, own);
            self.of_heads.push((hidden, parameters));
        }
    }

    fn backward(&mut self, index: usize, op: &GraphOp) {
        let reads_first = op.backward == BackwardOp::Product;
        if reads_first {
            self.events.push(PassEvent::ReadAgain(index));
        }
        let again = self.activations.restore(op);
        self.events.extend(again.into_iter().map(PassEvent::Recompute));
        if !reads_first {
            self.events.push(PassEvent::ReadAgain(index));
        }
        self.events.push(PassEvent::Backward(index));
        let grad = op.outputs.first().and_then(|output| self.of_values[*output].take());
        match op.backward {
            BackwardOp::None => return,
            BackwardOp::Unary => {
                self.activations.release(op);
                drop(grad);
                self.accumulate(op.inputs.first().copied());
                self.reduce(op);
            }
            BackwardOp::Copy => {
                self.accumulate(op.inputs.first().copied());
                self.activations.release(op);
                drop(grad);
            }
            BackwardOp::Add => {
                self.activations.release(op);
                for input in &op.inputs {
                    self.share(*input, grad.clone());
                }
            }
            BackwardOp::Product => {
                self.accumulate(op.inputs.first().copied());
                self.activations.release(op);
                drop(grad);
                self.reduce(op);
            }
            BackwardOp::LossHead => {
                let (hidden, parameters) = self.of_heads.pop().unzip();
                // The gradient in f32 is scaled and rounded before the next one.
                drop(parameters);
                self.reduce(op);
                drop(hidden);
                self.accumulate(op.inputs.first().copied());
            }
            BackwardOp::Lookup { numel } => {
                self.activations.release(op);
                self.gradients.reduce_rows(op, numel);
            }
        }
        self.unread = self.unread.saturating_sub(self.bytes_read_again(op));
        self.gather();
    }

    /// Hands the gradients of an op's parameters to the reducer.
    fn reduce(&mut self, op: &GraphOp) {
        for parameter in &op.parameters {
            self.gradients.reduce(parameter);
        }
    }

    /// A new gradient of an activation, added to the one that it has.
    fn accumulate(&mut self, activation: Option<usize>) {
        let Some(activation) = activation else { return };
        let tensor = &self.graph.activations[activation];
        if !tensor.has_gradient {
            return;
        }
        let new = self.hold(tensor.bytes);
        self.share(activation, Some(Rc::new(new)));
    }

    /// Registers a gradient, which others may hold too.
    fn share(&mut self, activation: usize, grad: Option<Rc<Lease>>) {
        let tensor = &self.graph.activations[activation];
        if !tensor.has_gradient {
            return;
        }
        let sum = match self.of_values[activation].take() {
            None => grad,
            // The sum may reuse the memory of either.
            Some(earlier) => {
                drop((earlier, grad));
                Some(Rc::new(self.hold(tensor.bytes)))
            }
        };
        self.of_values[activation] = sum;
    }

    fn hold(&self, bytes: u64) -> Lease {
        self.ledger.hold(Category::Activations, bytes as usize)
    }

    /// Bytes of an op's parameters that backward reads too: all of a block that is computed again, otherwise the
    /// weight of a product or of a normalisation.
    fn bytes_read_again(&self, op: &GraphOp) -> u64 {
        let GatheringMemory { bytes, persistence_threshold, .. } = self.plan.gathering;
        let count = match op.backward {
            _ if op.block.is_some_and(|block| self.plan.policy.recomputes(block)) => usize::MAX,
            BackwardOp::Product | BackwardOp::Unary if !op.saved.is_empty() => 1,
            _ => 0,
        };
        let numels = op.parameters.iter().take(count).map(|it| it.numel);
        super::sum(numels.filter(|numel| *numel > persistence_threshold)).saturating_mul(bytes)
    }

    /// A parameter that is read again stays whole, as far as the limit allows.
    fn gather(&mut self) {
        let bytes = self.unread.min(self.gathered_limit);
        self.gathered = None;
        self.gathered = Some(self.ledger.hold(Category::Gathered, bytes as usize));
    }
}
