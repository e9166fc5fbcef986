//! The secondary shards of hpZ (ZeRO++): gathers inside a small group of ranks.
//!
//! Main type: [`Secondary`]. At stage 3 all ranks of the shard group hold a parameter together, so
//! each gather uses the links between hosts. With hpZ, the first gather of a training pass cuts a
//! second shard from the whole parameter: the slice of a rank among `h` consecutive ranks, such as
//! the ranks of one host. Until the values change, parameters are gathered inside this group.
//!
//! ```text
//!            4 ranks, h = 2     primary shards        secondary shards
//!  forward   gather over 0..4   p0 | p1 | p2 | p3 ──► s0 | s1   s0 | s1
//!  backward  gather inside                            0  , 1    2  , 3
//!  step      the secondary shards are dropped, the primary ones are updated
//! ```
//!
//! For M parameters, the slow links carry M elements in forward and M in the reduction of
//! gradients. Without hpZ, backward adds another M. Later micro-batches of a step do not gather
//! over these links at all. The values are the same, so the bits of a run do not change.
//!
//! Every change of the primary shard drops the secondary one (`Parameter::put` and
//! `Parameter::update_parked`), so no pass can read outdated values. A prefetch has parameters of
//! one kind: all with secondary shards, or all without. All ranks of the shard group run the same
//! passes, and therefore have secondary shards of the same parameters.

use burn_backend::Backend;
use deepburn_comm::Partition;
use deepburn_ops::{OptimizerOps, SumOps};

use crate::group::Group;
use crate::parameter::{Parameter, cut_shard};

/// Cuts and keeps the secondary shards of one rank.
#[derive(Debug)]
pub(crate) struct Secondary<B: Backend> {
    /// The consecutive ranks that together have all parameters.
    group: Group<B>,
    /// Cuts the shard of a rank out of a whole array. A function pointer, because the gatherer's
    /// backend is not required to have the op.
    cut: fn(&B::FloatTensorPrimitive, Partition, usize) -> B::FloatTensorPrimitive,
}

impl<B: OptimizerOps> Secondary<B> {
    /// Returns the secondary shards of a rank of `group`.
    pub(crate) fn new(group: Group<B>) -> Self {
        Self { group, cut: cut_shard::<B> }
    }
}

impl<B: SumOps> Secondary<B> {
    /// Returns the ranks that gather secondary shards.
    pub(super) fn group(&self) -> &Group<B> {
        &self.group
    }

    //= deepspeed 0.19.8 runtime/zero/partition_parameters.py _partition_param_sec
    /// Keeps the secondary shard of a parameter that was just gathered.
    pub(super) fn keep(&self, parameter: &Parameter<B>, whole: &B::FloatTensorPrimitive) {
        let partition = Partition::new(parameter.partition().numel(), self.group.world_size());
        parameter.keep_secondary((self.cut)(whole, partition, self.group.rank()));
    }
}

/// Which shards of its parameters a fetch gathers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FetchSource {
    /// The shards of all ranks of the shard group.
    Primary,
    /// The secondary shards of a smaller group.
    Secondary,
}
