//! The device mesh: how the ranks of a run share its work.

use serde::Serialize;

/// The ranks along three axes, from the outermost to the innermost. Ranks are numbered row by row,
/// so the ranks of a pipeline stage are consecutive, and so are the ranks of a shard group.
///
/// ```
/// use deepburn_config::MeshPlan;
///
/// let mesh = MeshPlan { pipeline_stages: 2, replicate: 2, shard: 4 };
/// assert_eq!((mesh.world_size(), mesh.data_parallel_size()), (16, 8));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MeshPlan {
    /// Pipeline stages, each of which has a part of the model.
    pub pipeline_stages: usize,
    /// Shard groups of a stage, each of which has all states of the stage.
    pub replicate: usize,
    /// Ranks of a shard group, over which ZeRO shards the states.
    pub shard: usize,
}

impl MeshPlan {
    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.pipeline_stages * self.data_parallel_size()
    }

    /// Returns the number of ranks of a stage, which have samples of their own.
    pub fn data_parallel_size(&self) -> usize {
        self.replicate * self.shard
    }
}
