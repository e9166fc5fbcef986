//! Simulates the memory of a training pass, op by op.
//!
//! Main type: [`PassPlan`]. It simulates the forward and backward pass of an
//! [`ActivationGraph`] and counts every tensor in a [`Ledger`], like a real
//! run. This includes activations under activation checkpointing, gradients in
//! autodiff and in buckets, and gradient sums.
//!
//! The peak has no closed formula, because the categories peak at different
//! times: during backward, activations shrink while gradients grow. The
//! simulation adds the categories at each op and takes the maximum.
//!
//! ```text
//!            forward                         backward
//! memory     ▁▂▃▄▅▆▇ activations             ▇▆▅▄▃▂▁ activations
//!                                            ▁▂▃▄▅▆▇ gradient sums   (+ bucket, + gathered)
//! ```
//!
//! The simulation has three parts that share a ledger: `blocks.rs` holds the
//! activations, `gradients.rs` holds the gradients of parameters, and
//! `SimulatedPass` holds the gradients of activations and the gathered
//! parameters. `SimulatedPass` also records the events of the pass, from which
//! the cost model computes the time of a step.

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

/// The largest pass that is simulated: 64 PiB, more memory than any machine
/// has. The limit ensures that sums in the ledger cannot overflow.
const ABSURD: u64 = 1 << 56;

/// The settings that determine the memory of a training pass.
///
/// One plan can be used for several activation graphs of a model.
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
    /// Parameters with at most this number of elements are persistent and not
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
    /// Whether one bucket is filled while another is being reduced
    /// (`overlap_comm`).
    overlaps: bool,
    /// The size of an element during communication, in bytes.
    communicated: u64,
    /// The sizes of an element in the gradient sum of one micro-batch, and in
    /// the sum of several micro-batches, in bytes.
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
    /// The bytes on the device in addition to parameters and optimizer states:
    /// the peak of the sum of activations, gradients, buckets and gathered
    /// parameters.
    pub device: u64,
    /// The value of `device` as the ledger reports it. On one rank at stage 3
    /// the ledger counts gathered parameters, although they share the memory of
    /// their shards.
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
    /// Creates the settings. Parameters are gathered if the gathered limit of
    /// `estimate` is not 0.
    fn new(plan: &Plan, zero: &ZeroPlan, ranks: u64, estimate: &Estimate) -> Self {
        let is_gathered = estimate.buffers.gathered_limit > 0;
        let is_shared = zero.stage.shards_parameters() && ranks == 1 && !is_gathered;
        let bytes = plan.precision.compute.bytes() as u64;
        // A parameter that exceeds the limit is gathered for a single op only,
        // which is rarely at the memory peak. It is therefore not counted.
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
    /// Creates the plan of a pass on each of `ranks` ranks. `zero` replaces the
    /// ZeRO section of `plan`. `estimate` must be the estimate for the same
    /// model and plan.
    pub fn new(plan: &Plan, zero: &ZeroPlan, ranks: u64, estimate: &Estimate) -> Self {
        let communicated = plan.precision.communication.bytes() as u64;
        let accumulated = plan.precision.accumulation.bytes() as u64;
        // The gradient sum of a single micro-batch stays in the communication
        // type, unless it is multiplied after the reduction.
        let first = if scales_sums(plan, ranks) { accumulated } else { communicated };
        Self {
            policy: plan.activations.recompute,
            offload: plan.activations.offload.clone(),
            reduction: ReductionMemory {
                ranks,
                shards: zero.shards_gradients(),
                on_device: match zero.optimizer_states {
                    OptimizerOffload::Device => true,
                    // With a partial offload, all sums are counted on the
                    // device, which is an upper limit.
                    OptimizerOffload::Host { ratio, .. } => ratio < 1.0,
                    OptimizerOffload::Nvme(_) => false,
                },
                bucket_size: zero.gradients.reduce_bucket_size as u64,
                overlaps: zero.gradients.overlap_comm,
                communicated,
                summed: [first, accumulated],
                micro_batches: plan.batch.gradient_accumulation_steps,
            },
            gathering: GatheringMemory::new(plan, zero, ranks, estimate),
        }
    }

    /// Returns the plan with another activation checkpointing policy.
    pub fn with_policy(&self, policy: RecomputePolicy) -> Self {
        Self { policy, ..self.clone() }
    }

    /// Returns the peaks in the last micro-batch of a step.
    ///
    /// The last micro-batch has the highest peak, because the gradient sums of
    /// earlier micro-batches already exist. A graph of more than 64 PiB is not
    /// simulated, and its peaks on the device are reported as 64 PiB. On one
    /// rank at stage 3 two simulations run: the ledger's peak includes gathered
    /// parameters, and the device's peak does not.
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

    /// Returns the events of the pass in order, or `None` for a graph of more
    /// than 64 PiB.
    pub(crate) fn events(&self, graph: &ActivationGraph) -> Option<Vec<PassEvent>> {
        (graph.upper_bound() <= ABSURD).then(|| self.run(graph, self.gathering.limit).1)
    }

    /// Runs the simulation with a limit for gathered parameters. Returns the
    /// peaks of activations on the device, of offloaded activations, and of
    /// everything on the device, and the events.
    ///
    /// Tensors are counted op by op in a new ledger, whose peaks are returned.
    /// The peaks are `[activations, offloaded activations, device]`, in bytes.
    fn run(&self, graph: &ActivationGraph, gathered_limit: u64) -> ([u64; 3], Vec<PassEvent>) {
        let ledger = Ledger::new();
        let offload = match self.offload {
            ActivationOffload::Device => None,
            ActivationOffload::Host { threshold } => Some((Tier::Host, threshold)),
            ActivationOffload::Nvme { threshold, .. } => Some((Tier::Disk, threshold)),
        };
        // The batch and other constant memory is held from the first op to the
        // last.
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
            // The gradients of this op may have filled a bucket.
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
    /// The bytes of gathered parameters.
    gathered: Option<Lease>,
    /// The limit of gathered parameters in bytes.
    gathered_limit: u64,
    /// The bytes of parameters that the pass will read again.
    unread: u64,
    /// The gradient of each activation. The inputs of an addition share one
    /// lease.
    of_values: Vec<Option<Rc<Lease>>>,
    /// The gradients that loss heads have computed in forward: the gradient of
    /// the input, and the gradients of the parameters.
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
            // The loss head computes its gradients in f32, regardless of the
            // type of its operands.
            let f32s = |bytes: u64, own: u64| self.hold(bytes / own * 4);
            let parameters = op.parameters.iter().map(|it| self.hold(it.numel * 4)).collect();
            let own = op.parameters.first().map_or(4, |it| it.gradient_bytes);
            let hidden = f32s(self.graph.activations[op.inputs[0]].bytes, own);
            self.of_heads.push((hidden, parameters));
        }
    }

    /// Simulates the backward pass of an op: restores its block if the block
    /// was freed, creates the gradients of inputs and parameters, and drops the
    /// gradient of the output and the saved tensors.
    ///
    /// The order of these steps determines the peak, so it follows the kernels.
    /// A product needs the output's gradient until both new gradients exist. A
    /// unary op can reuse the memory of the output's gradient.
    fn backward(&mut self, index: usize, op: &GraphOp) {
        let reads_first = op.backward == BackwardOp::Product;
        // A product gathers its weight before its input is recomputed, a
        // normalisation afterwards.
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

    /// Creates a gradient of an activation and adds it to the existing
    /// gradient, if there is one.
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
    /// An activation gets one gradient from each op that reads it. A further
    /// gradient is added to the existing gradient, and only the sum is kept.
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

    /// Counts `bytes` bytes as activations.
    fn hold(&self, bytes: u64) -> Lease {
        self.ledger.hold(Category::Activations, bytes as usize)
    }

    /// Returns the bytes of an op's parameters that backward reads again: all
    /// parameters if the op is recomputed, otherwise the weight of a product or
    /// a normalisation.
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

    /// Counts the parameters that will be read again as gathered, up to the
    /// limit. The old lease is dropped first, so that parameters are never
    /// counted twice.
    fn gather(&mut self) {
        let bytes = self.unread.min(self.gathered_limit);
        self.gathered = None;
        self.gathered = Some(self.ledger.hold(Category::Gathered, bytes as usize));
    }
}
