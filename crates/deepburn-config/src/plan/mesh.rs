//! The device mesh: how the ranks of a run share its work; and the pipeline.

use serde::Serialize;

use super::PathPattern;
use crate::choice::choices;

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

    /// Returns the position of world rank `rank` among the ranks of its stage.
    pub fn data_rank(&self, rank: usize) -> usize {
        rank % self.data_parallel_size()
    }

    /// Returns the number of ranks of a stage, which have samples of their own.
    pub fn data_parallel_size(&self) -> usize {
        self.replicate * self.shard
    }
}

/// Pipeline parallelism, with [`MeshPlan::pipeline_stages`] stages. A step has
/// [`gradient_accumulation_steps`](super::BatchPlan::gradient_accumulation_steps) micro-batches.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PipelinePlan {
    /// The order of the passes of a stage.
    pub schedule: PipelineSchedule,
    /// The blocks of each stage.
    pub partition: StagePartition,
}

/// The order in which a pipeline stage runs the passes of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PipelineSchedule {
    /// A backward pass as soon as a micro-batch returns from the last stage.
    #[default]
    OneForwardOneBackward,
    /// All forward passes, then all backward passes.
    FillDrain,
    /// As [`OneForwardOneBackward`](Self::OneForwardOneBackward), with the gradients of weights
    /// computed when a stage would wait.
    ZeroBubbleH1,
}

choices!(PipelineSchedule {
    "1f1b" => OneForwardOneBackward,
    "gpipe" => FillDrain,
    "zb-h1" => ZeroBubbleH1,
});

/// How the blocks of a model are divided into pipeline stages.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StagePartition {
    /// The fastest pipeline whose stages fit into memory.
    Best,
    /// Similar numbers of parameters, with DeepSpeed's algorithm.
    Parameters,
    /// Equal numbers of blocks.
    Uniform,
    /// Similar numbers of the blocks whose names match, with DeepSpeed's algorithm.
    Type(PathPattern),
}
