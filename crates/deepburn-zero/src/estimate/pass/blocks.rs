//! The simulated memory of activations under an activation checkpointing policy.
//!
//! Main type: `ActivationMemory`. It follows the rules of `recompute.rs`: the activations of a
//! block are freed when the next block has begun, except for the activations that the next block
//! reads. They are recomputed when backward reads the block.
//!
//! ```text
//!              block 0 runs   block 1 runs   block 2 runs   backward of 1
//! block 0      all            inputs of 1    inputs of 1    inputs of 1
//! block 1                     all            inputs of 2    all, recomputed
//! ```
//!
//! With activation offload, the kept activations of a block are parked (moved to host memory or
//! NVMe) when the next block is freed, because until then the next block may read them. Backward
//! prefetches parked activations one block ahead: fetching the first activation of a group starts
//! the fetch of the preceding group.
//!
//! An activation is held while an op of forward has not read it yet (`reads`), while an op has
//! saved it and the op's backward pass has not run yet (`saves`), or for as long as its `Keep`
//! requires.

use deepburn_config::RecomputePolicy;
use deepburn_nvme::SwapFile;

use crate::estimate::activations::{ActivationGraph, GraphOp};
use crate::ledger::{Category, Lease, Ledger, Tier};
use crate::recompute::recomputes;
use crate::recompute::tape::Keep;

/// The activations of a pass. All lists are indexed by activation unless stated otherwise.
pub(super) struct ActivationMemory<'a> {
    /// The ops and their tensors.
    graph: &'a ActivationGraph,
    /// Determines which blocks are freed and which of their activations are kept.
    policy: RecomputePolicy,
    /// The ledger of the simulation.
    ledger: &'a Ledger,
    /// The lease of each activation on the device; `None` if the activation is freed or parked.
    data: Vec<Option<Lease>>,
    /// The outstanding uses of each activation.
    tensors: Vec<TensorUse>,
    /// The current block of forward.
    block: Option<usize>,
    /// The number of costly ops in this block so far. `selective` keeps the outputs of every second
    /// costly op.
    costly: usize,
    /// The ops of each block in order.
    ops: Vec<Vec<usize>>,
    /// Whether backward has restored each block, by block.
    is_restored: Vec<bool>,
    /// The activations outside of the device.
    offload: OffloadMemory,
    /// The block that was freed last. Its kept activations are not parked yet.
    freed: Option<usize>,
}

/// The activations outside of the device.
struct OffloadMemory {
    /// The tier of parked activations, and the smallest size in bytes that is parked; `None`
    /// without offload.
    target: Option<(Tier, usize)>,
    /// The bytes of each parked activation on its tier.
    parked: Vec<Option<Lease>>,
    /// The groups of activations that were parked together, in the order of forward. Each block has
    /// one group.
    groups: Vec<Vec<usize>>,
    /// Whether backward has begun. If so, a fetch prefetches the preceding group.
    is_backward: bool,
}

/// The outstanding uses of a tensor.
#[derive(Clone, Copy)]
struct TensorUse {
    /// The number of ops of forward that have not read it yet.
    reads: usize,
    /// The number of ops that have saved it and whose backward pass has not run yet.
    saves: usize,
    /// How long the tensor is kept.
    keep: Keep,
}

impl<'a> ActivationMemory<'a> {
    /// Creates the state before the pass. `offload` is the tier of parked activations and the
    /// smallest size in bytes that is parked.
    pub(super) fn new(
        graph: &'a ActivationGraph,
        policy: RecomputePolicy,
        offload: Option<(Tier, usize)>,
        ledger: &'a Ledger,
    ) -> Self {
        // Blocks are numbered from 0, so the count is the largest number plus one.
        let blocks = graph.ops.iter().filter_map(|op| op.block).max().map_or(0, |last| last + 1);
        let unused = |reads| TensorUse { reads, saves: 0, keep: Keep::Block };
        Self {
            policy,
            ledger,
            data: graph.activations.iter().map(|_| None).collect(),
            tensors: graph.activations.iter().map(|it| unused(it.reads)).collect(),
            block: None,
            costly: 0,
            ops: vec![Vec::new(); blocks],
            is_restored: vec![false; blocks],
            offload: OffloadMemory {
                target: offload,
                parked: graph.activations.iter().map(|_| None).collect(),
                groups: Vec::new(),
                is_backward: false,
            },
            freed: None,
            graph,
        }
    }

    /// Returns true if the activations of a block are freed and recomputed.
    fn recomputes(&self, block: Option<usize>) -> bool {
        block.is_some_and(|block| recomputes(self.policy, block))
    }

    /// Simulates an op of forward: fetches parked inputs, frees the preceding block if the op
    /// begins another block, and creates the outputs.
    pub(super) fn run(&mut self, index: usize, op: &GraphOp) {
        if let Some(block) = op.block {
            self.ops[block].push(index);
        }
        for input in &op.inputs {
            self.fetch(*input);
            let other = self.graph.activations[*input].block;
            if other != op.block && self.recomputes(other) {
                self.tensors[*input].keep = Keep::WhileHeld;
            }
            // A recorded op holds its inputs from other blocks until its block is restored.
            if other != op.block && self.recomputes(op.block) {
                self.tensors[*input].saves += 1;
            }
        }
        // The preceding block is freed after the inputs were marked above, because this op may read
        // its outputs.
        if self.block != op.block {
            self.end_block();
            (self.block, self.costly) = (op.block, 0);
        }
        for saved in &op.saved {
            self.tensors[*saved].saves += 1;
        }
        for input in &op.inputs {
            self.tensors[*input].reads -= 1;
            self.drop_unused(*input);
        }
        // An activation is kept until the end of its block unless the policy keeps it longer.
        let mut keep = Keep::Block;
        if op.is_costly && self.recomputes(op.block) {
            self.costly += 1;
            if self.policy == RecomputePolicy::Selective && self.costly.is_multiple_of(2) {
                keep = Keep::Tape;
            }
        }
        for output in &op.outputs {
            self.tensors[*output].keep = keep;
            self.data[*output] = Some(self.hold(*output));
        }
        op.outputs.iter().for_each(|output| self.drop_unused(*output));
    }

    /// Ends forward. The last block is not freed, because backward starts with it.
    pub(super) fn end_forward(&mut self) {
        if let Some(block) = self.block.take() {
            self.forget(block);
        }
        self.offload.is_backward = true;
        self.fetch_group(self.offload.groups.len().checked_sub(1));
    }

    /// Frees the activations of the block that has ended, except those with another `Keep`. Then
    /// parks the kept activations of the block before it.
    fn end_block(&mut self) {
        let Some(block) = self.block.take() else { return };
        if !self.recomputes(Some(block)) {
            return;
        }
        for index in 0..self.data.len() {
            let is_of_block = self.graph.activations[index].block == Some(block);
            if is_of_block && self.tensors[index].keep == Keep::Block {
                self.data[index] = None;
            }
        }
        if let Some(before) = self.freed.replace(block) {
            self.park(before);
        }
    }

    /// Parks the kept activations of a freed block that reach the threshold. On NVMe, sizes are
    /// padded to the alignment of direct I/O.
    fn park(&mut self, block: usize) {
        let Some((tier, threshold)) = self.offload.target else { return };
        let mut group = Vec::new();
        for index in 0..self.data.len() {
            let bytes = self.graph.activations[index].bytes as usize;
            if self.is_of(index, block) && self.data[index].is_some() && bytes >= threshold {
                self.data[index] = None;
                let bytes =
                    if tier == Tier::Disk { SwapFile::padded(bytes) as usize } else { bytes };
                let lease = self.ledger.hold_on(tier, Category::Activations, bytes);
                self.offload.parked[index] = Some(lease);
                group.push(index);
            }
        }
        self.offload.groups.push(group);
    }

    /// Fetches an activation that an op reads, if it is parked. In backward, also prefetches the
    /// preceding group.
    fn fetch(&mut self, index: usize) {
        if self.offload.parked[index].take().is_some() {
            self.data[index] = Some(self.hold(index));
        }
        let group = self.offload.groups.iter().position(|group| group.contains(&index));
        if let Some(group) = group.filter(|_| self.offload.is_backward) {
            self.fetch_group(group.checked_sub(1));
        }
    }

    /// Fetches all activations of a group that are still parked.
    fn fetch_group(&mut self, group: Option<usize>) {
        let Some(group) = group else { return };
        for index in self.offload.groups[group].clone() {
            if self.offload.parked[index].take().is_some() {
                self.data[index] = Some(self.hold(index));
            }
        }
    }

    /// Returns true if the data of a tensor exists on some tier, so that it need not be computed.
    fn has(&self, index: usize) -> bool {
        self.data[index].is_some() || self.offload.parked[index].is_some()
    }

    /// Releases the tensors that an op has saved after its backward pass. A tensor that no other op
    /// needs is dropped.
    pub(super) fn release(&mut self, op: &GraphOp) {
        for saved in &op.saved {
            self.tensors[*saved].saves -= 1;
            self.drop_unused(*saved);
        }
    }

    /// Restores the saved tensors of an op before its backward pass. Returns the recomputed ops in
    /// order, which are none if no tensor was missing.
    pub(super) fn restore(&mut self, op: &GraphOp) -> Vec<usize> {
        let again = self.compute(op);
        op.saved.iter().for_each(|saved| self.fetch(*saved));
        again
    }

    /// Recomputes the missing activations of the op's block. As in the engine, an activation that
    /// only the recomputed ops read is dropped after its last use, so the peak can be lower than
    /// the size of the block.
    fn compute(&mut self, op: &GraphOp) -> Vec<usize> {
        let Some(block) = op.block.filter(|block| self.recomputes(Some(*block))) else {
            return Vec::new();
        };
        if self.is_restored[block] || op.saved.iter().all(|saved| self.has(*saved)) {
            return Vec::new();
        }
        // `uses` counts down as ops run, so each tensor is dropped after its last reader.
        let (ops, mut uses, stays) = self.replay(block);
        for index in &ops {
            let graph = self.graph;
            let op = &graph.ops[*index];
            op.inputs.iter().for_each(|input| self.fetch(*input));
            let is_of_block = |it: &&usize| graph.activations[**it].block == Some(block);
            for input in op.inputs.iter().filter(is_of_block) {
                uses[*input] -= 1;
                if uses[*input] == 0 && !stays[*input] {
                    self.data[*input] = None;
                }
            }
            for output in &op.outputs {
                // An output that was kept is not created again.
                if self.data[*output].is_none() {
                    self.data[*output] = Some(self.hold(*output));
                }
            }
            for output in &op.outputs {
                if !stays[*output] && uses[*output] == 0 {
                    self.data[*output] = None;
                }
            }
        }
        self.forget(block);
        ops
    }

    /// Plans the recomputation of a freed block. Returns the ops to run in order, the number of
    /// times that these ops read each tensor, and whether each tensor is kept afterwards.
    ///
    /// The ops are visited in reverse order: an op is needed if one of its outputs is missing, and
    /// then its inputs are needed too.
    fn replay(&self, block: usize) -> (Vec<usize>, Vec<usize>, Vec<bool>) {
        let count = self.data.len();
        let is_wanted = |index: usize| self.is_of(index, block) && self.tensors[index].saves > 0;
        let stays: Vec<bool> = (0..count).map(|it| self.has(it) || is_wanted(it)).collect();
        // The tensors that backward needs and that are missing.
        let mut missing: Vec<bool> = (0..count).map(|it| !self.has(it) && stays[it]).collect();
        let mut uses = vec![0; count];
        let mut ops = Vec::new();
        for index in self.ops[block].iter().rev() {
            let op = &self.graph.ops[*index];
            if !op.outputs.iter().any(|output| missing[*output]) {
                continue;
            }
            ops.push(*index);
            for input in op.inputs.iter().filter(|it| self.is_of(**it, block)) {
                uses[*input] += 1;
                missing[*input] |= !self.has(*input);
            }
        }
        ops.reverse();
        (ops, uses, stays)
    }

    /// Ends the recording of a block. From now on its activations are kept only as long as backward
    /// needs them. The inputs from other blocks that its ops held for recomputation are released.
    fn forget(&mut self, block: usize) {
        // A block is restored once. The backward passes of its other ops find their activations
        // restored.
        if !self.recomputes(Some(block)) || std::mem::replace(&mut self.is_restored[block], true) {
            return;
        }
        for op in self.ops[block].clone() {
            for input in &self.graph.ops[op].inputs {
                if !self.is_of(*input, block) {
                    self.tensors[*input].saves -= 1;
                    self.drop_unused(*input);
                }
            }
        }
        for index in 0..self.data.len() {
            if self.is_of(index, block) {
                self.tensors[index].keep = Keep::Block;
                self.drop_unused(index);
            }
        }
    }

    /// Returns true if a tensor was created in this block.
    fn is_of(&self, index: usize, block: usize) -> bool {
        self.graph.activations[index].block == Some(block)
    }

    /// Drops a tensor without outstanding uses. A tensor with `Keep::Tape` is not dropped, because
    /// a later recomputation starts from it.
    fn drop_unused(&mut self, index: usize) {
        let TensorUse { reads, saves, keep } = self.tensors[index];
        if reads == 0 && saves == 0 && keep != Keep::Tape {
            self.offload.parked[index] = None;
            self.data[index] = None;
        }
    }

    /// Counts an activation on the device.
    fn hold(&self, index: usize) -> Lease {
        self.ledger.hold(Category::Activations, self.graph.activations[index].bytes as usize)
    }
}
