//! The partition of one array into shards.
//!
//! Every array is flattened and divided into `world_size` shards of `ceil(numel / world_size)`
//! elements. The last shards are padded with zeros, so all shards have the same length. A rank may
//! own only padding.
//!
//! This module is the only definition of the partition. Collectives, ZeRO stages, memory estimates
//! and checkpoint files all use it. ZeRO stages differ in which model states are sharded, but not
//! in the boundaries of the shards.

use std::ops::Range;

/// The partition of an array of `numel` elements over `world_size` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    numel: usize,
    world_size: usize,
}

impl Partition {
    /// Divides `numel` elements into `world_size` shards.
    ///
    /// # Panics
    /// Panics if `world_size` is 0.
    pub fn new(numel: usize, world_size: usize) -> Self {
        assert!(world_size > 0, "a group has at least one rank");
        Self { numel, world_size }
    }

    /// Returns the number of elements of the array, without padding.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    //= deepspeed 0.19.8 runtime/zero/partition_parameters.py _partition_param
    /// Returns the number of elements of every shard, including padding.
    pub fn shard_len(&self) -> usize {
        self.numel.div_ceil(self.world_size)
    }

    /// Returns the flat range of elements that `rank` owns; empty for a rank that holds only
    /// padding.
    pub fn owned(&self, rank: usize) -> Range<usize> {
        // Sizes may come from a file, so the arithmetic saturates.
        let start = rank.saturating_mul(self.shard_len()).min(self.numel);
        start..start.saturating_add(self.shard_len()).min(self.numel)
    }

    /// Returns the number of padding zeros at the end of the shard of `rank`.
    pub fn padding(&self, rank: usize) -> usize {
        self.shard_len() - self.owned(rank).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `[numel, world size, shard length, owned elements by rank]`, from running DeepSpeed's
    /// stage-3 partitioning of single parameters.
    const LAYOUTS: &[(usize, usize, usize, &[usize])] = &[
        (15, 2, 8, &[8, 7]),
        (8100, 2, 4050, &[4050, 4050]),
        (3, 4, 1, &[1, 1, 1, 0]),
        (1, 8, 1, &[1, 0, 0, 0, 0, 0, 0, 0]),
        (0, 3, 0, &[0, 0, 0]),
    ];

    //= deepspeed 0.19.8 runtime/zero/partition_parameters.py _partition_param
    #[test]
    fn layouts_equal_deepspeeds() {
        for &(numel, world_size, shard_len, owned) in LAYOUTS {
            let partition = Partition::new(numel, world_size);
            assert_eq!(partition.shard_len(), shard_len);
            let lengths: Vec<_> = (0..world_size).map(|r| partition.owned(r).len()).collect();
            assert_eq!(lengths, owned);
        }
    }

    proptest! {
        #[test]
        fn shards_tile_the_parameter(numel in 0usize..10_000, world_size in 1usize..70) {
            let partition = Partition::new(numel, world_size);
            let mut next = 0;
            for rank in 0..world_size {
                let owned = partition.owned(rank);
                prop_assert_eq!(owned.start, next);
                prop_assert_eq!(owned.len() + partition.padding(rank), partition.shard_len());
                next = owned.end;
            }
            prop_assert_eq!(next, numel);
            prop_assert!(partition.shard_len() * world_size < numel + world_size);
        }
    }
}
