//! The process groups along the axes of the device mesh.
//!
//! Main type: [`MeshGroups`]. Every collective of sharded training runs in one of these groups, so
//! each use says which ranks it means:
//!
//! ```text
//! world     all ranks                                    norm, flags, initial values, checkpoints
//! data      ranks of a stage, which have different data  mean of gradients, random streams
//! shard     ranks that divide the model states           partition, gathers, reductions
//! replicas  ranks with the same shard                    sums of gradients at the end of a step
//! secondary consecutive ranks of the shard group (hpZ)   gathers while parameters do not change
//! ```

use deepburn_comm::{CommError, Mesh, MeshAxis};
use deepburn_ops::SumOps;

use crate::group::Group;

/// The groups of one rank. Clones refer to the same members.
#[derive(Debug, Clone)]
pub(crate) struct MeshGroups<B: SumOps> {
    mesh: Mesh,
    world: Group<B>,
    data: Group<B>,
    shard: Group<B>,
    replicas: Option<Group<B>>,
}

impl<B: SumOps> MeshGroups<B> {
    /// Creates the groups of a rank of `mesh`. Axes of size 1 create no subgroup. All ranks call
    /// this together.
    ///
    /// # Errors
    /// Returns an error if the group has ended.
    ///
    /// # Panics
    /// Panics if the mesh does not have the ranks of `world`.
    pub(crate) fn new(world: Group<B>, mesh: Mesh) -> Result<Self, CommError> {
        assert_eq!(mesh.world_size(), world.world_size(), "the mesh arranges all ranks");
        let rank = world.rank();
        let data = match mesh.size(MeshAxis::Pipeline) {
            1 => world.clone(),
            _ => world.subgroup("pipeline stage", &mesh.stage(rank))?,
        };
        // All ranks create their groups in this order, because creating a group is an operation of
        // all its members.
        let (shard, replicas) = match mesh.size(MeshAxis::Replicate) {
            1 => (data.clone(), None),
            _ => (
                world.subgroup("shard group", &mesh.shard_group(rank))?,
                Some(world.subgroup("replicas", &mesh.replicas(rank))?),
            ),
        };
        Ok(Self { mesh, world, data, shard, replicas })
    }

    /// Returns the arrangement of all ranks.
    pub(crate) fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Returns the group of all ranks.
    pub(crate) fn world(&self) -> &Group<B> {
        &self.world
    }

    /// Returns the group of the data-parallel ranks, which have different data: the ranks of this
    /// rank's pipeline stage.
    pub(crate) fn data(&self) -> &Group<B> {
        &self.data
    }

    /// Returns the group of the ranks that divide the model states of the stage among them.
    pub(crate) fn shard(&self) -> &Group<B> {
        &self.shard
    }

    /// Returns the group of the ranks that have the same shard of the stage; `None` if this rank is
    /// the only one.
    pub(crate) fn replicas(&self) -> Option<&Group<B>> {
        self.replicas.as_ref()
    }

    /// Creates the group of `size` consecutive ranks of the shard group, one of which is this rank.
    /// All ranks call this together.
    ///
    /// # Errors
    /// Returns an error if the group has ended.
    ///
    /// # Panics
    /// Panics if `size` is 0 or does not divide the shard group.
    pub(crate) fn secondary(&self, size: usize) -> Result<Group<B>, CommError> {
        assert!(self.shard.world_size().is_multiple_of(size), "the sizes were compared");
        let first = self.shard.rank() / size * size;
        let shard_group = self.mesh.shard_group(self.world.rank());
        self.world.subgroup("secondary shard group", &shard_group[first..first + size])
    }

    /// Returns true if this rank is of the first replica, which counts and saves what all replicas
    /// have.
    pub(crate) fn is_first_replica(&self) -> bool {
        self.mesh.coordinate(self.world.rank(), MeshAxis::Replicate) == 0
    }
}
