//! The slice of each parameter that a rank keeps and updates at a stage.
//!
//! With three ranks and a parameter of 7 elements (shards of 3), rank 2 owns element 6 and two
//! padding zeros:
//!
//! ```text
//! flat parameter   0 1 2 | 3 4 5 | 6 . .
//! updated, len     stage 0: 0..7, 7        stages 1 to 3: 6..7, 3
//! stored gradient  whole: 0..7             sharded: [6 . .]
//! ```
//!
//! `updated_range` returns positions in the whole parameter. `owned_sum` and `owned_range` return
//! positions in an array as this rank stores it. They cover only the owned elements even at stage
//! 0, where a rank has all elements, because norms and checkpoints divide the work in the same way
//! at every stage.

use std::ops::Range;

use deepburn_config::Stage;
use deepburn_ops::{OptimizerOps, SumOps};

use crate::group::flat::{flat_range, narrow};
use crate::parameter::Parameter;
use deepburn_comm::Partition;

/// The slices that a rank keeps: whole states at stage 0, and at stages 1 to 3 its shard of the
/// states that the stage shards.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShardSpec {
    /// The ZeRO stage.
    pub(crate) stage: Stage,
    /// The rank in the shard group.
    pub(crate) rank: usize,
    /// Whether a rank keeps only its shard of a reduced gradient: at stages 2 and 3, and at stage 1
    /// if optimizer states are offloaded.
    pub(crate) cuts_gradients: bool,
}

impl ShardSpec {
    /// Returns the number of elements that this rank updates, including padding.
    pub(crate) fn len(self, partition: Partition) -> usize {
        if self.stage.shards_optimizer() { partition.shard_len() } else { partition.numel() }
    }

    /// Returns the range of elements that this rank updates, without padding.
    pub(crate) fn updated_range(self, partition: Partition) -> Range<usize> {
        if self.stage.shards_optimizer() {
            partition.owned(self.rank)
        } else {
            0..partition.numel()
        }
    }

    /// Extracts the elements that this rank updates from a complete array. A shard is copied, so
    /// that it does not keep the complete array alive.
    pub(crate) fn of_whole<B: OptimizerOps>(
        self,
        whole: &B::FloatTensorPrimitive,
        partition: Partition,
    ) -> B::FloatTensorPrimitive {
        if !self.stage.shards_optimizer() {
            return flat_range::<B>(whole, 0..partition.numel());
        }
        cut_shard::<B>(whole, partition, self.rank)
    }

    /// Extracts the elements that this rank updates from a gradient in its stored form.
    pub(crate) fn of_gradient<B: OptimizerOps>(
        self,
        kept: B::FloatTensorPrimitive,
        partition: Partition,
    ) -> B::FloatTensorPrimitive {
        if self.cuts_gradients { kept } else { self.of_whole::<B>(&kept, partition) }
    }

    /// Returns a view of the gradient elements that this rank owns, without padding.
    pub(crate) fn owned_gradient<B: SumOps>(
        self,
        kept: &B::FloatTensorPrimitive,
        partition: Partition,
    ) -> B::FloatTensorPrimitive {
        let owned = self.owned_sum(partition);
        if self.cuts_gradients {
            narrow::<B>(kept.clone(), owned)
        } else {
            flat_range::<B>(kept, owned)
        }
    }

    /// Returns the range of the owned elements, without padding, within a gradient in its stored
    /// form.
    pub(crate) fn owned_sum(self, partition: Partition) -> Range<usize> {
        let owned = partition.owned(self.rank);
        if self.cuts_gradients { 0..owned.len() } else { owned }
    }

    /// Returns the range of the owned elements, without padding, within an optimizer array.
    pub(crate) fn owned_range(self, partition: Partition) -> Range<usize> {
        let owned = partition.owned(self.rank);
        if self.stage.shards_optimizer() { 0..owned.len() } else { owned }
    }

    /// Takes the current values of this rank's slice out of a parameter. At stages 1 and 2, this
    /// releases the complete parameter before the updated parameter is gathered.
    pub(crate) fn take_values<B: OptimizerOps>(
        self,
        parameter: &Parameter<B>,
    ) -> B::FloatTensorPrimitive {
        let stored = parameter.take();
        match self.stage {
            Stage::Disabled => flat_range::<B>(&stored, 0..parameter.numel()),
            Stage::Parameters => stored,
            Stage::OptimizerStates | Stage::Gradients => {
                self.of_whole::<B>(&stored, parameter.partition())
            }
        }
    }
}

/// Copies the flat, zero-padded shard of `rank` out of a complete array. A view would keep the
/// complete array alive.
pub(crate) fn cut_shard<B: OptimizerOps>(
    whole: &B::FloatTensorPrimitive,
    partition: Partition,
    rank: usize,
) -> B::FloatTensorPrimitive {
    // `flatten` allocates the shard with its padding and copies the view into it.
    let owned = flat_range::<B>(whole, partition.owned(rank));
    B::flatten(vec![owned], partition.shard_len())
}
