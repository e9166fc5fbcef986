//! The device mesh: the arrangement of all ranks along the axes of parallel training.
//!
//! A [`Mesh`] has three axes. World ranks are numbered row by row, with [`MeshAxis::Pipeline`]
//! outermost and [`MeshAxis::Shard`] innermost, as in DeepSpeed, torchtitan and Megatron:
//!
//! ```text
//! 8 ranks, pipeline 2 x replicate 2 x shard 2
//!
//!   pipeline 0                 pipeline 1
//!     replicate 0   0  1         replicate 0   4  5
//!     replicate 1   2  3         replicate 1   6  7
//!       shard       0  1           shard       0  1
//!
//!   rank 5: stage        [4, 5, 6, 7]   one pipeline stage: replicate x shard
//!           shard group  [4, 5]         ranks that divide the model states among them
//!           replicas     [5, 7]         ranks with the same shard of the stage
//!           model group  [0, 1, 4, 5]   one complete copy of the model: pipeline x shard
//!           pipeline     [1, 5]         the same position of every stage
//! ```
//!
//! The ranks of a stage are consecutive, so that a stage stays inside a host where possible. A mesh
//! only computes rank numbers.

use std::fmt;

/// An axis of a [`Mesh`]. Axes are ordered from the outermost to the innermost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MeshAxis {
    /// The stages of a pipeline. Each has a part of the layers.
    Pipeline,
    /// Copies of the model states.
    Replicate,
    /// Shards of the model states.
    Shard,
}

impl MeshAxis {
    /// All axes, outermost first.
    pub const ALL: [Self; 3] = [Self::Pipeline, Self::Replicate, Self::Shard];
}

impl fmt::Display for MeshAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pipeline => "pipeline",
            Self::Replicate => "replicate",
            Self::Shard => "shard",
        })
    }
}

/// A mesh that cannot be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis has no ranks.
    #[error(
        "the {axis} axis of the mesh has size 0; every axis has at least one rank: pass 1 for an \
         axis that is not used"
    )]
    EmptyAxis {
        /// The axis.
        axis: MeshAxis,
    },

    /// The axes do not cover all ranks exactly once.
    #[error(
        "a mesh of pipeline {} x replicate {} x shard {} does not fit {world_size} ranks; the product \
         of the sizes must be the number of ranks: change the sizes or start another number of ranks",
        sizes[0], sizes[1], sizes[2]
    )]
    WorldSize {
        /// The number of ranks.
        world_size: usize,
        /// The sizes of the axes, outermost first.
        sizes: [usize; 3],
    },
}

/// The arrangement of all ranks along the [axes](MeshAxis), row by row. Copies are independent
/// values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// The size of each axis, outermost first.
    sizes: [usize; 3],
}

impl Mesh {
    /// Arranges `world_size` ranks. Every axis has a size of at least 1.
    ///
    /// # Errors
    /// Returns an error if a size is 0, or if the product of the sizes is not `world_size`.
    pub fn new(
        world_size: usize,
        pipeline: usize,
        replicate: usize,
        shard: usize,
    ) -> Result<Self, MeshError> {
        let sizes = [pipeline, replicate, shard];
        if let Some(axis) = MeshAxis::ALL.into_iter().find(|axis| sizes[*axis as usize] == 0) {
            return Err(MeshError::EmptyAxis { axis });
        }
        // Sizes come from a job file, so their product may overflow.
        let product = sizes.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
        match product == Some(world_size) {
            true => Ok(Self { sizes }),
            false => Err(MeshError::WorldSize { world_size, sizes }),
        }
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Returns the size of an axis.
    pub fn size(&self, axis: MeshAxis) -> usize {
        self.sizes[axis as usize]
    }

    /// Returns the position of `rank` along an axis, for example its pipeline stage.
    ///
    /// # Panics
    /// Panics if `rank` is not a rank of the mesh.
    pub fn coordinate(&self, rank: usize, axis: MeshAxis) -> usize {
        let world_size = self.world_size();
        assert!(rank < world_size, "rank {rank} is not one of the {world_size} ranks of the mesh");
        // Row by row, like the digits of a number whose last digit is the innermost axis.
        rank / self.stride(axis) % self.size(axis)
    }

    /// Returns the rank at these coordinates, outermost axis first.
    ///
    /// # Panics
    /// Panics if a coordinate is not below the size of its axis.
    pub fn rank_at(&self, coordinates: [usize; 3]) -> usize {
        let offset = |axis: MeshAxis| {
            let (coordinate, size) = (coordinates[axis as usize], self.size(axis));
            assert!(coordinate < size, "{axis} {coordinate} is outside of an axis of size {size}");
            coordinate * self.stride(axis)
        };
        MeshAxis::ALL.into_iter().map(offset).sum()
    }

    /// Returns the ranks that have the same coordinates as `rank` on all axes other than `axes`, in
    /// ascending order. `rank` is one of them.
    ///
    /// # Panics
    /// Panics if `rank` is not a rank of the mesh.
    pub fn ranks(&self, rank: usize, axes: &[MeshAxis]) -> Vec<usize> {
        let fixed = |axis: &MeshAxis| !axes.contains(axis);
        let fixed: Vec<_> = MeshAxis::ALL.into_iter().filter(fixed).collect();
        let same =
            |axis: &MeshAxis, other| self.coordinate(other, *axis) == self.coordinate(rank, *axis);
        // A search of all ranks is simple, and runs once per group.
        let all = 0..self.world_size();
        all.filter(|other| fixed.iter().all(|axis| same(axis, *other))).collect()
    }

    /// Returns the ranks of the pipeline stage of `rank`, which are consecutive.
    ///
    /// # Panics
    /// Panics if `rank` is not a rank of the mesh.
    pub fn stage(&self, rank: usize) -> Vec<usize> {
        self.ranks(rank, &[MeshAxis::Replicate, MeshAxis::Shard])
    }

    /// Returns the ranks that divide the model states of the stage of `rank` among them.
    ///
    /// # Panics
    /// Panics if `rank` is not a rank of the mesh.
    pub fn shard_group(&self, rank: usize) -> Vec<usize> {
        self.ranks(rank, &[MeshAxis::Shard])
    }

    /// Returns the ranks that have the same shard of the same stage as `rank`.
    ///
    /// # Panics
    /// Panics if `rank` is not a rank of the mesh.
    pub fn replicas(&self, rank: usize) -> Vec<usize> {
        self.ranks(rank, &[MeshAxis::Replicate])
    }

    /// Returns one rank per stage, in the order of the stages: those at the position of `rank`.
    ///
    /// # Panics
    /// Panics if `rank` is not a rank of the mesh.
    pub fn pipeline(&self, rank: usize) -> Vec<usize> {
        self.ranks(rank, &[MeshAxis::Pipeline])
    }

    /// Returns the distance between the rank numbers of neighbors along an axis.
    fn stride(&self, axis: MeshAxis) -> usize {
        self.sizes[axis as usize + 1..].iter().product()
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [pipeline, replicate, shard] = self.sizes;
        write!(f, "pipeline {pipeline} x replicate {replicate} x shard {shard}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_groups_of_a_rank_are_as_drawn() {
        let mesh = Mesh::new(8, 2, 2, 2).unwrap();
        assert_eq!(mesh.stage(5), [4, 5, 6, 7]);
        assert_eq!(mesh.shard_group(5), [4, 5]);
        assert_eq!(mesh.replicas(5), [5, 7]);
        assert_eq!(mesh.ranks(5, &[MeshAxis::Pipeline, MeshAxis::Shard]), [0, 1, 4, 5]);
        assert_eq!(mesh.pipeline(5), [1, 5]);
        assert_eq!(mesh.ranks(5, &[]), [5]);
        assert_eq!(mesh.to_string(), "pipeline 2 x replicate 2 x shard 2");
    }

    #[test]
    fn the_stages_are_deepspeeds() {
        // PipeDataParallelTopology(num_pp=2, num_dp=2): stage 0 is ranks 0 and 1.
        let mesh = Mesh::new(4, 2, 2, 1).unwrap();
        assert_eq!(
            [0, 1, 2, 3].map(|rank| mesh.coordinate(rank, MeshAxis::Pipeline)),
            [0, 0, 1, 1]
        );
        assert_eq!(
            [0, 1, 2, 3].map(|rank| mesh.coordinate(rank, MeshAxis::Replicate)),
            [0, 1, 0, 1]
        );
    }

    #[test]
    fn data_parallel_ranks_are_one_shard_group() {
        let mesh = Mesh::new(3, 1, 1, 3).unwrap();
        assert_eq!((mesh.shard_group(1), mesh.stage(2)), (vec![0, 1, 2], vec![0, 1, 2]));
        assert_eq!((mesh.replicas(1), mesh.pipeline(1)), (vec![1], vec![1]));
        assert_eq!(Mesh::new(0, 1, 1, 0), Err(MeshError::EmptyAxis { axis: MeshAxis::Shard }));
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        let error = Mesh::new(8, 3, 1, 2).unwrap_err().to_string();
        let expected = "a mesh of pipeline 3 x replicate 1 x shard 2 does not fit 8 ranks; the \
                        product of the sizes must be the number of ranks: ";
        assert!(error.starts_with(expected), "{error}");
        let error = Mesh::new(8, 2, 0, 4).unwrap_err().to_string();
        assert!(error.starts_with("the replicate axis of the mesh has size 0; "), "{error}");
        assert!(Mesh::new(0, usize::MAX, usize::MAX, 2).is_err());
    }

    proptest! {
        #[test]
        fn groups_along_any_axes_partition_the_world(
            sizes in (1_usize..5, 1_usize..5, 1_usize..5),
            chosen in prop::sample::subsequence(MeshAxis::ALL.to_vec(), 0..=3),
        ) {
            let (pipeline, replicate, shard) = sizes;
            let world_size = pipeline * replicate * shard;
            let mesh = Mesh::new(world_size, pipeline, replicate, shard).unwrap();
            prop_assert_eq!(mesh.world_size(), world_size);
            let expected: usize = chosen.iter().map(|axis| mesh.size(*axis)).product();
            for rank in 0..world_size {
                prop_assert_eq!(mesh.rank_at(MeshAxis::ALL.map(|axis| mesh.coordinate(rank, axis))), rank);
                let group = mesh.ranks(rank, &chosen);
                prop_assert_eq!(group.len(), expected);
                prop_assert!(group.is_sorted() && group.contains(&rank));
                for other in 0..world_size {
                    // Membership is an equivalence: all members see the same group.
                    let theirs = mesh.ranks(other, &chosen);
                    prop_assert_eq!(group.contains(&other), theirs == group);
                }
            }
        }

        #[test]
        fn stages_are_consecutive_ranks(pipeline in 1_usize..6, replicate in 1_usize..4, shard in 1_usize..4) {
            let mesh = Mesh::new(pipeline * replicate * shard, pipeline, replicate, shard).unwrap();
            let len = replicate * shard;
            for stage in 0..pipeline {
                let ranks: Vec<_> = (stage * len..(stage + 1) * len).collect();
                prop_assert_eq!(mesh.stage(ranks[len - 1]), ranks.clone());
                prop_assert_eq!(mesh.coordinate(ranks[0], MeshAxis::Pipeline), stage);
            }
        }
    }
}
