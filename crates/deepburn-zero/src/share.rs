//! What one rank keeps and updates of each parameter at a stage.

use std::ops::Range;

use burn_backend::Backend;
use deepburn_config::Stage;
use deepburn_ops::OptimizerOps;

use crate::array::{flat_range, narrow};
use crate::parameter::Parameter;
use deepburn_comm::Partition;

/// The share of a rank: everything at stage 0, its chunk of more and more from stage 1 on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    pub(crate) stage: Stage,
    pub(crate) rank: usize,
    /// Whether a rank keeps only its chunk of a reduced gradient.
    pub(crate) cuts_gradients: bool,
}

impl Share {
    /// Elements that this rank updates, padding included.
    pub(crate) fn len(self, partition: Partition) -> usize {
        if self.stage.shards_optimizer() { partition.shard_len() } else { partition.numel() }
    }

    /// Elements that this rank updates, without padding.
    pub(crate) fn updated_range(self, partition: Partition) -> Range<usize> {
        if self.stage.shards_optimizer() {
            partition.owned(self.rank)
        } else {
            0..partition.numel()
        }
    }

    /// What this rank updates out of all elements, flat, in memory of its own where it is a part.
    pub(crate) fn of_whole<B: OptimizerOps>(
        self,
        whole: &B::FloatTensorPrimitive,
        partition: Partition,
    ) -> B::FloatTensorPrimitive {
        if !self.stage.shards_optimizer() {
            return flat_range::<B>(whole, 0..partition.numel());
        }
        chunk::<B>(whole, partition, self.rank)
    }

    /// What this rank updates out of the gradient as it is kept.
    pub(crate) fn of_gradient<B: OptimizerOps>(
        self,
        kept: B::FloatTensorPrimitive,
        partition: Partition,
    ) -> B::FloatTensorPrimitive {
        if self.cuts_gradients { kept } else { self.of_whole::<B>(&kept, partition) }
    }

    /// The elements of the gradient that this rank owns, without padding, as a view.
    pub(crate) fn owned_gradient<B: Backend>(
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

    /// Where the elements that this rank owns, without padding, are in a gradient as it is kept.
    pub(crate) fn owned_sum(self, partition: Partition) -> Range<usize> {
        let owned = partition.owned(self.rank);
        if self.cuts_gradients { 0..owned.len() } else { owned }
    }

    /// Where the elements that this rank owns, without padding, are in an array that the optimizer keeps.
    pub(crate) fn owned_range(self, partition: Partition) -> Range<usize> {
        let owned = partition.owned(self.rank);
        if self.stage.shards_optimizer() { 0..owned.len() } else { owned }
    }

    /// Takes the present values of what this rank updates out of a parameter. Whole parameters of
    /// stages 1 and 2 are let go here, before their successors arrive.
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

/// The flat, zero-padded chunk of `rank`, in memory of its own: a view would keep the whole alive.
pub(crate) fn chunk<B: OptimizerOps>(
    whole: &B::FloatTensorPrimitive,
    partition: Partition,
    rank: usize,
) -> B::FloatTensorPrimitive {
    let owned = flat_range::<B>(whole, partition.owned(rank));
    B::flatten(vec![owned], partition.shard_len())
}
