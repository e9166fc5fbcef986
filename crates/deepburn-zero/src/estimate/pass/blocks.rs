//! The activations that a pass holds under a policy of activation checkpointing.
//!
//! Main type: `ActivationMemory`. It follows the rules of `recompute`: the data of a block is freed
//! when the next block has begun, except for what that one reads, and is computed again when
//! backward reads the block.
//!
//! ```text
//!              block 0 runs   block 1 runs   block 2 runs   backward of 1
//! block 0      all            inputs of 1    inputs of 1    inputs of 1
//! block 1                     all            inputs of 2    all, computed again
//! ```
//!
//! With activation offload, what is kept of a block leaves the device when the block after it is
//! freed, because that one may still read it. It returns one block ahead of backward: the first
//! activation of a group that is fetched starts the fetch of the group before.
//!
//! An activation stays while an op of forward has yet to read it (`reads`), while a backward pass
//! that saved it is still to come (`saves`), or while its `Keep` says so.

use deepburn_config::RecomputePolicy;
use deepburn_nvme::SwapFile;

use crate::estimate::activations::{ActivationGraph, GraphOp};
use crate::ledger::{Category, Lease, Ledger, Tier};
use crate::recompute::recomputes;
use crate::recompute::tape::Keep;

/// The activations of a pass. All lists are by index of the activation unless they say otherwise.
pub(super) struct ActivationMemory<'a> {
    /// The ops and their tensors.
    graph: &'a ActivationGraph,
    /// Which blocks are freed, and what is kept of them.
    policy: RecomputePolicy,
    /// The ledger of the simulation.
    ledger: &'a Ledger,
    /// The data of each activation on the device; `None` if it is freed or parked.
    data: Vec<Option<Lease>>,
    /// The outstanding uses of each activation.
    tensors: Vec<TensorUse>,
    /// The block that forward is in.
    block: Option<usize>,
    /// The number of costly ops in this block so far. `selective` keeps every second one.
    costly: usize,
    /// The ops of each block in order.
    ops: Vec<Vec<usize>>,
    /// Whether backward has restored the block, by block.
    is_restored: Vec<bool>,
    /// The activations outside of the device.
    offload: OffloadMemory,
    /// The block that was freed last, which is not parked yet.
    freed: Option<usize>,
}

/// The activations outside of the device.
struct OffloadMemory {
    /// Their tier, and the size in bytes from which on they are parked; `None` without offload.
    target: Option<(Tier, usize)>,
    /// The bytes of each parked activation on its tier.
    parked: Vec<Option<Lease>>,
    /// The activations that were parked together, in the order of forward. There is one group per
    /// block.
    groups: Vec<Vec<usize>>,
    /// Whether backward has begun, so that fetches look one group ahead.
    is_backward: bool,
}

/// The outstanding uses of a tensor.
#[derive(Clone, Copy)]
struct TensorUse {
    /// The number of ops of forward that have not read it yet.
    reads: usize,
    /// The number of ops that have saved it and whose backward pass has not run yet.
    saves: usize,
    /// Whether it outlives its block.
    keep: Keep,
}

impl<'a> ActivationMemory<'a> {
    /// Creates the memory before the pass. `offload` is the tier of parked activations and their
    /// smallest size in bytes.
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

    /// Returns true if the tensors of a block are freed and computed again.
    fn recomputes(&self, block: Option<usize>) -> bool {
        block.is_some_and(|block| recomputes(self.policy, block))
    }

    /// Runs an op of forward: brings its inputs back, frees the block before if the op begins
    /// another one, and creates its outputs.
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
            // A recorded op holds what it reads of other blocks until its block is restored.
            if other != op.block && self.recomputes(op.block) {
                self.tensors[*input].saves += 1;
            }
        }
        // The block before is freed only now, because its outputs were still read by this op.
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
        // A value stays for its block unless the policy keeps it.
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

    /// Ends forward. The last block is still open and is not freed, because backward starts with
    /// it.
    pub(super) fn end_forward(&mut self) {
        if let Some(block) = self.block.take() {
            self.forget(block);
        }
        self.offload.is_backward = true;
        self.fetch_group(self.offload.groups.len().checked_sub(1));
    }

    /// Frees the data of the block that has ended, except for values with another `Keep`, and parks
    /// what is left of the block before it.
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

    /// Parks what is kept of a freed block, if it is large enough. On NVMe, sizes are padded to
    /// what direct I/O needs.
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

    /// Brings back an activation that an op reads. In backward, also fetches the group before.
    fn fetch(&mut self, index: usize) {
        if self.offload.parked[index].take().is_some() {
            self.data[index] = Some(self.hold(index));
        }
        let group = self.offload.groups.iter().position(|group| group.contains(&index));
        if let Some(group) = group.filter(|_| self.offload.is_backward) {
            self.fetch_group(group.checked_sub(1));
        }
    }

    /// Brings back all activations of a group that are still parked.
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

    /// Drops what the backward pass of an op has used and no other op needs.
    pub(super) fn release(&mut self, op: &GraphOp) {
        for saved in &op.saved {
            self.tensors[*saved].saves -= 1;
            self.drop_unused(*saved);
        }
    }

    /// Restores the block of an op whose backward pass is about to read what was freed. Returns the
    /// ops that ran again in order; none if nothing was missing.
    pub(super) fn restore(&mut self, op: &GraphOp) -> Vec<usize> {
        let again = self.compute(op);
        op.saved.iter().for_each(|saved| self.fetch(*saved));
        again
    }

    /// Runs the ops that lead to missing tensors of the block again. A tensor that only these ops
    /// read is dropped after its last use, as in the engine, so the peak can be lower than the
    /// whole block.
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
                // An output that was kept is not made twice.
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

    /// Plans the restoration of a freed block. Returns the ops that lead to what backward reads of
    /// it in order, the number of times that they read each tensor, and whether each tensor stays
    /// afterwards.
    ///
    /// It goes through the ops backwards: an op is needed if one of its outputs is missing, and its
    /// own inputs are then needed too.
    fn replay(&self, block: usize) -> (Vec<usize>, Vec<usize>, Vec<bool>) {
        let count = self.data.len();
        let is_wanted = |index: usize| self.is_of(index, block) && self.tensors[index].saves > 0;
        let stays: Vec<bool> = (0..count).map(|it| self.has(it) || is_wanted(it)).collect();
        // Missing and wanted: what has to be computed at least.
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

    /// Ends the recording of a block. From now on a tensor of it stays only as long as backward
    /// needs it, and the inputs that its ops held for recomputation are released.
    fn forget(&mut self, block: usize) {
        // A block is restored once. Later ops of it find their data.
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

    /// Returns true if a tensor was made in this block.
    fn is_of(&self, index: usize, block: usize) -> bool {
        self.graph.activations[index].block == Some(block)
    }

    /// Drops a tensor without outstanding uses. `Keep::Tape` outlives its uses, because a later
    /// recomputation starts from it.
    fn drop_unused(&mut self, index: usize) {
        let TensorUse { reads, saves, keep } = self.tensors[index];
        if reads == 0 && saves == 0 && keep != Keep::Tape {
            self.offload.parked[index] = None;
            self.data[index] = None;
        }
    }

    /// Enters the data of an activation on the device.
    fn hold(&self, index: usize) -> Lease {
        self.ledger.hold(Category::Activations, self.graph.activations[index].bytes as usize)
    }
}
