//! Predicts the memory of a training pass, op by op.
//!
//! Main type: [`PassPlan`]. It simulates the ops of an [`ActivationGraph`]
//! forwards and backwards and enters every tensor in a [`Ledger`], as a run
//! does: activations, with the effects of activation checkpointing, and
//! gradients from autodiff through buckets to their sum.
//!
//! A closed formula cannot give the peak, because the categories peak at
//! different times: in backward, activations shrink while gradients grow. Only
//! their sum at each op shows which moment needs the most memory.
//!
//! ```text
//!            forward                         backward
//! memory     ▁▂▃▄▅▆▇ activations             ▇▆▅▄▃▂▁ activations
//!                                            ▁▂▃▄▅▆▇ gradient sums   (+ bucket, + gathered)
//! ```
//!
//! The simulation has three parts with a ledger in common: `blocks.rs` holds
//! activations, `gradients.rs` the gradients of parameters, and `SimulatedPass`
//! the gradients of activations and gathered parameters. It also records the
//! events of the pass, which the cost model replays against clocks.

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
use crate::recompute::recomputes;
use crate::reduce::BUCKETS_PER_MODEL;

mod blocks;
mod event;
mod gradients;

use blocks::ActivationMemory;
use gradients::GradientMemory;

pub(crate) use event::{BucketedNumel, PassEvent};

/// A number of bytes that no machine has. A larger pass is not simulated, so
/// that sums in the ledger cannot overflow.
const ABSURD: u64 = 1 << 56;

/// The settings of a training pass.
///
/// The plan does not depend on a model, so one plan serves many graphs.
#[derive(Debug, Clone)]
pub struct PassPlan {
    /// Which blocks are recomputed.
    policy: RecomputePolicy,
    /// Where kept activations of recomputed blocks are stored.
    offload: ActivationOffload,
    /// How gradients are reduced and stored.
    reduction: ReductionMemory,
    /// How parameters are gathered.
    gathering: GatheringMemory,
}

/// The memory of gathered parameters.
#[derive(Debug, Clone, Copy)]
struct GatheringMemory {
    /// The limit for gathered parameters in bytes; 0 if none are gathered.
    limit: u64,
    /// The size of an element in bytes.
    bytes: u64,
    /// Parameters up to this number of elements are persistent and not
    /// gathered.
    persistence_threshold: u64,
    /// Whether gathered parameters share the memory of their shards, as on one
    /// rank.
    is_shared: bool,
}

/// How gradients are reduced and stored.
#[derive(Debug, Clone, Copy)]
struct ReductionMemory {
    /// The number of ranks.
    ranks: u64,
    /// Whether a rank keeps only its shard of a gradient.
    shards: bool,
    /// Whether sums are on the device.
    on_device: bool,
    /// The capacity of a bucket in elements (`reduce_bucket_size`).
    bucket_size: u64,
    /// Whether one bucket may be filled while another is reduced
    /// (`overlap_comm`).
    overlaps: bool,
    /// The size of an element during communication, in bytes.
    travelling: u64,
    /// The size of an element in the sum of one micro-batch and of several, in
    /// bytes.
    summed: [u64; 2],
    /// The number of micro-batches per step.
    micro_batches: usize,
}

/// The memory peaks of a training pass on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassPeak {
    /// The bytes of activations on the device.
    pub activations: u64,
    /// The bytes of offloaded activations.
    pub offloaded: u64,
    /// The bytes on the device besides parameters and optimizer states: the
    /// peak of the sum of activations, gradients, buckets and gathered
    /// parameters.
    pub device: u64,
    /// The same peak as the ledger counts it. On one rank at stage 3 the ledger
    /// includes gathered parameters, although they share the memory of their
    /// shards.
    pub ledger: u64,
}

/// Returns true if a reduced gradient is multiplied after the sum, which
/// converts it to the accumulation type (`reduce/scaling.rs`).
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
    /// Creates the settings. `estimate` says whether parameters are gathered at
    /// all.
    fn new(plan: &Plan, zero: &ZeroPlan, ranks: u64, estimate: &Estimate) -> Self {
        let is_gathered = estimate.buffers.gathered_limit > 0;
        let is_shared = zero.stage.shards_parameters() && ranks == 1 && !is_gathered;
        let bytes = plan.precision.compute.bytes() as u64;
        // A parameter beyond the limit is gathered for a single op, rarely at
        // the moment of the peak.
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
    /// Creates the plan of a pass under `plan`, with `zero` instead of its ZeRO
    /// section, on each of `ranks` ranks. `estimate` must belong to the same
    /// model and plan.
    pub fn new(plan: &Plan, zero: &ZeroPlan, ranks: u64, estimate: &Estimate) -> Self {
        let travelling = plan.precision.communication.bytes() as u64;
        let accumulated = plan.precision.accumulation.bytes() as u64;
        // A sum of a single micro-batch stays in the communication type unless
        // it is multiplied.
        let first = if scales_sums(plan, ranks) { accumulated } else { travelling };
        Self {
            policy: plan.activations.recompute,
            offload: plan.activations.offload.clone(),
            reduction: ReductionMemory {
                ranks,
                shards: zero.shards_gradients(),
                on_device: match zero.optimizer_states {
                    OptimizerOffload::Device => true,
                    // A partial offload is treated like a complete one.
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

    /// Returns the plan with another policy of activation checkpointing.
    pub fn with_policy(&self, policy: RecomputePolicy) -> Self {
        Self { policy, ..self.clone() }
    }

    /// Returns the peaks in the last micro-batch of a step.
    ///
    /// The last micro-batch needs the most, because the sums of earlier ones
    /// exist already. A graph beyond all machines returns a constant instead of
    /// a simulation. On one rank at stage 3 two simulations run: one that
    /// counts gathered parameters for the ledger, and one without them for the
    /// device.
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

    /// Returns the events of the pass in order; `None` for a graph that no
    /// machine can hold.
    pub(crate) fn events(&self, graph: &ActivationGraph) -> Option<Vec<PassEvent>> {
        (graph.upper_bound() <= ABSURD).then(|| self.run(graph, self.gathering.limit).1)
    }

    /// Runs the simulation with a limit for gathered parameters. Returns the
    /// peaks of activations on the device, of offloaded activations, and of
    /// everything on the device, and the events.
    ///
    /// The arrays are created op by op in a ledger of their own, whose peaks
    /// are the result. The elements of the result are `[activations, offloaded
    /// activations, device]`, in bytes.
    fn run(&self, graph: &ActivationGraph, gathered_limit: u64) -> ([u64; 3], Vec<PassEvent>) {
        let ledger = Ledger::new();
        let offload = match self.offload {
            ActivationOffload::Device => None,
            ActivationOffload::Host { threshold } => Some((Tier::Host, threshold)),
            ActivationOffload::Nvme { threshold, .. } => Some((Tier::Disk, threshold)),
        };
        // The batch and the like live from the first op to the last.
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
            // Gradients of this op may have filled a bucket.
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

/// The state of a simulated training pass.
struct SimulatedPass<'a> {
    /// The ops of the pass.
    graph: &'a ActivationGraph,
    /// The settings.
    plan: &'a PassPlan,
    /// The ledger of this simulation.
    ledger: &'a Ledger,
    /// The activations of forward.
    activations: ActivationMemory<'a>,
    /// The gradients of parameters.
    gradients: GradientMemory<'a>,
    /// The parameters that are gathered.
    gathered: Option<Lease>,
    /// The limit of gathered parameters in bytes.
    gathered_limit: u64,
    /// The bytes of parameters that the rest of the pass reads again.
    unread: u64,
    /// The gradient of each activation. Activations that an addition joins
    /// share one lease.
    of_values: Vec<Option<Rc<Lease>>>,
    /// The gradients that loss heads have computed in forward, for the input
    /// and for the parameters.
    of_heads: Vec<(Lease, Vec<Lease>)>,
    /// The events of the pass so far.
    events: Vec<PassEvent>,
}

impl SimulatedPass<'_> {
    /// Simulates an op of forward. A loss head also computes its gradients, in
    /// f32: one for its input and one for each parameter.
    fn forward(&mut self, index: usize, op: &GraphOp) {
        self.unread += self.bytes_read_again(op);
        self.gather();
        self.activations.run(index, op);
        if op.backward == BackwardOp::LossHead {
            // The loss head makes both gradients in f32, whatever the type of
            // its operands.
            let f32s = |bytes: u64, own: u64| self.hold(bytes / own * 4);
            let parameters = op.parameters.iter().map(|it| self.hold(it.numel * 4)).collect();
            let own = op.parameters.first().map_or(4, |it| it.gradient_bytes);
            let hidden = f32s(self.graph.activations[op.inputs[0]].bytes, own);
            self.of_heads.push((hidden, parameters));
        }
    }

    /// Simulates the backward pass of an op: restores its block if that was
    /// freed, creates the gradients of inputs and parameters, and drops the
    /// gradient of the output and what autodiff had saved.
    ///
    /// The order of these steps within an op decides the peak, so it follows
    /// the kernels: a product needs the output's gradient until both gradients
    /// exist, and a unary op can reuse its memory.
    fn backward(&mut self, index: usize, op: &GraphOp) {
        let reads_first = op.backward == BackwardOp::Product;
        // A product gathers its weight before it restores its input, a
        // normalisation after it.
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
                // The f32 gradient is scaled and rounded before the next one.
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
        // Backward has read these parameters for the last time.
        self.unread = self.unread.saturating_sub(self.bytes_read_again(op));
        self.gather();
    }

    /// Passes the gradients of an op's parameters to the reducer.
    fn reduce(&mut self, op: &GraphOp) {
        for parameter in &op.parameters {
            self.gradients.reduce(parameter);
        }
    }

    /// Adds a new gradient to an activation's existing one.
    ///
    /// Activations without a gradient, such as token ids, are skipped.
    fn accumulate(&mut self, activation: Option<usize>) {
        let Some(activation) = activation else { return };
        let tensor = &self.graph.activations[activation];
        if !tensor.has_gradient {
            return;
        }
        let new = self.hold(tensor.bytes);
        self.share(activation, Some(Rc::new(new)));
    }

    /// Registers a gradient that other activations may share.
    ///
    /// An activation that several ops read gets one gradient from each. The
    /// second one is added to the first, and only the sum stays.
    fn share(&mut self, activation: usize, grad: Option<Rc<Lease>>) {
        let tensor = &self.graph.activations[activation];
        if !tensor.has_gradient {
            return;
        }
        let sum = match self.of_values[activation].take() {
            None => grad,
            // The sum may reuse the memory of either operand.
            Some(earlier) => {
                drop((earlier, grad));
                Some(Rc::new(self.hold(tensor.bytes)))
            }
        };
        self.of_values[activation] = sum;
    }

    /// Enters activations of `bytes` bytes.
    fn hold(&self, bytes: u64) -> Lease {
        self.ledger.hold(Category::Activations, bytes as usize)
    }

    /// Returns the bytes of an op's parameters that backward reads too: all of
    /// a recomputed block, otherwise the weight of a product or a
    /// normalisation.
    fn bytes_read_again(&self, op: &GraphOp) -> u64 {
        let GatheringMemory { bytes, persistence_threshold, .. } = self.plan.gathering;
        let count = match op.backward {
            _ if op.block.is_some_and(|block| recomputes(self.plan.policy, block)) => usize::MAX,
            BackwardOp::Product | BackwardOp::Unary if !op.saved.is_empty() => 1,
            _ => 0,
        };
        let numels = op.parameters.iter().take(count).map(|it| it.numel);
        super::sum(numels.filter(|numel| *numel > persistence_threshold)).saturating_mul(bytes)
    }

    /// Keeps parameters that are read again, up to the limit. The old lease is
    /// dropped first, so that the ledger never has both.
    fn gather(&mut self) {
        let bytes = self.unread.min(self.gathered_limit);
        self.gathered = None;
        self.gathered = Some(self.ledger.hold(Category::Gathered, bytes as usize));
    }
}
