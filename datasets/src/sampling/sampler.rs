//! The assignment of samples to ranks.
//!
//! [`DistributedSampler`] gives rank `r` of `W` the samples at positions `r, r + W, r + 2W, ...` of
//! an ordering, in each epoch. [`Order`] determines the ordering and the length of an epoch:
//!
//! - **Sequential**: samples in the order of the data. Each rank cycles through its own list. If
//!   `W` does not divide the number of samples, the lists differ by one in length, and the shorter
//!   ones repeat sooner. Every sample is in exactly one list.
//! - **Shuffled**: a new permutation in each epoch, the same on all ranks: Fisher-Yates over
//!   ChaCha8 with the key `(seed, epoch)`. All ranks draw `floor(n / W)` samples per epoch, and the
//!   last `n mod W` samples of the permutation are skipped; these differ between epochs. No sample
//!   occurs twice in an epoch.
//!
//! [`BatchSampler`] is the interface between samplers and a loader. Fewer samples than ranks are an
//! error.

use serde::{Deserialize, Serialize};

use crate::stable_rng::StableRng;
use crate::{DataError, Result};

/// An endless stream of micro-batches as lists of samples, with a position that can be saved.
pub trait BatchSampler: Clone + Send + 'static {
    /// A position in the stream.
    type Position: Copy + Send + 'static;

    /// Returns the samples of the next micro-batch and its number of rows, which is at least 1 and
    /// at least the number of samples.
    fn draw(&mut self) -> (Vec<usize>, usize);

    /// Returns the position of the next micro-batch.
    fn position(&self) -> Self::Position;

    /// Moves to `position`, without replaying the batches before it.
    ///
    /// # Errors
    /// Returns an error if the stream does not have this position.
    fn seek(&mut self, position: Self::Position) -> Result<()>;

    /// Returns the number of completed epochs, plus the completed fraction of the current one.
    fn epoch(&self) -> f64;
}

/// A rank, and the number of ranks that share the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataShard {
    /// This rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub num_ranks: usize,
}

impl DataShard {
    /// The shard of a single rank: all samples.
    pub const WHOLE: Self = Self { rank: 0, num_ranks: 1 };

    /// Checks that the rank is below the number of ranks.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if it is not.
    pub fn validate(self) -> Result<Self> {
        let Self { rank, num_ranks } = self;
        let rule = || {
            format!(
                "it must be below the number of ranks, {num_ranks}; lower the rank, or raise the number of ranks"
            )
        };
        if rank < num_ranks { Ok(self) } else { Err(DataError::setting("rank", rank, rule())) }
    }
}

/// The order in which samples are distributed to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The order of the data, repeated.
    Sequential,
    /// A permutation per epoch.
    Shuffled {
        /// Determines all permutations. Must be the same on all ranks.
        seed: u64,
    },
}

/// The progress of the ranks. It is the same on all ranks, so a checkpoint stores it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Samples that each rank has drawn since training began.
    pub drawn: u64,
    /// The number of ranks.
    pub num_ranks: u64,
}

/// An endless stream of sample indices for one rank.
///
/// Sharing an epoch needs no communication, because all ranks compute the same permutation from the
/// seed:
///
/// ```
/// use deepburn_datasets::{DataShard, DistributedSampler, Order};
///
/// let order = Order::Shuffled { seed: 7 };
/// let mut drawn = Vec::new();
/// for rank in 0..2 {
///     let shard = DataShard { rank, num_ranks: 2 };
///     let mut sampler = DistributedSampler::new(6, shard, order)?;
///     drawn.extend(sampler.take_samples(3));
/// }
/// drawn.sort_unstable();
/// assert_eq!(drawn, [0, 1, 2, 3, 4, 5]);
/// # Ok::<(), deepburn_datasets::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    /// The number of samples in the data.
    num_samples: usize,
    /// This rank and the number of ranks.
    shard: DataShard,
    /// The order of the samples.
    order: Order,
    /// Samples in a micro-batch.
    rows: usize,
    /// Samples that this rank has drawn since the beginning.
    drawn: u64,
    /// The most recent epoch, and this rank's samples in it.
    shuffled: Option<(u64, Vec<usize>)>,
}

impl DistributedSampler {
    /// Creates a sampler at the beginning of the first epoch.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if the shard is invalid or there are more ranks than samples.
    pub fn new(num_samples: usize, shard: DataShard, order: Order) -> Result<Self> {
        let num_ranks = shard.validate()?.num_ranks;
        if num_samples < num_ranks {
            let found = match num_samples {
                0 => "there are none".to_owned(),
                1 => "there is only 1".to_owned(),
                _ => format!("there are only {num_samples}"),
            };
            let rule = format!(
                "each rank needs a training sequence or text, and {found}; use fewer ranks, more data, or shorter \
                 sequences of tokens (data.sequence_length)"
            );
            return Err(DataError::setting("number of ranks", num_ranks, rule));
        }
        Ok(Self { num_samples, shard, order, rows: 1, drawn: 0, shuffled: None })
    }

    /// Sets the number of samples in a micro-batch, which is 1 at first.
    pub(crate) fn with_rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    /// Returns the number of samples that each rank draws in an epoch: `floor(n / W)` in shuffled
    /// order, and `ceil(n / W)` in sequential order, which covers the longest list.
    pub fn samples_per_epoch(&self) -> usize {
        match self.order {
            Order::Sequential => self.num_samples.div_ceil(self.shard.num_ranks),
            Order::Shuffled { .. } => self.num_samples / self.shard.num_ranks,
        }
    }

    /// Draws the next `count` samples of this rank.
    pub fn take_samples(&mut self, count: usize) -> Vec<usize> {
        (0..count).map(|_| self.next_sample()).collect()
    }

    /// Draws the next sample of this rank.
    fn next_sample(&mut self) -> usize {
        let drawn = self.drawn;
        // Wraps only after more samples than any training draws; a damaged position must not panic.
        self.drawn = drawn.wrapping_add(1);
        let DataShard { rank, num_ranks } = self.shard;
        match self.order {
            Order::Sequential => {
                // The number of positions rank, rank + W, ... below n.
                let own = (self.num_samples - rank).div_ceil(num_ranks);
                rank + (drawn % own as u64) as usize * num_ranks
            }
            Order::Shuffled { seed } => {
                let per_epoch = self.samples_per_epoch() as u64;
                self.permuted(seed, drawn / per_epoch)[(drawn % per_epoch) as usize]
            }
        }
    }

    /// Returns this rank's samples of `epoch`, which are computed when the epoch changes.
    fn permuted(&mut self, seed: u64, epoch: u64) -> &[usize] {
        if self.shuffled.as_ref().is_none_or(|&(cached, _)| cached != epoch) {
            let order = StableRng::new(seed, epoch).permutation(self.num_samples);
            let DataShard { rank, num_ranks } = self.shard;
            let own = order.into_iter().skip(rank).step_by(num_ranks);
            self.shuffled = Some((epoch, own.take(self.samples_per_epoch()).collect()));
        }
        self.shuffled.as_ref().map_or(&[], |(_, own)| own)
    }
}

impl BatchSampler for DistributedSampler {
    type Position = Position;

    fn draw(&mut self) -> (Vec<usize>, usize) {
        (self.take_samples(self.rows), self.rows)
    }

    fn position(&self) -> Position {
        Position { drawn: self.drawn, num_ranks: self.shard.num_ranks as u64 }
    }

    /// Moves to `position`. If the number of ranks is unchanged, the following samples are the same
    /// as in the run that saved the position. Otherwise, training continues after the same total
    /// number of samples, rounded down. The order of samples is then different, because it depends
    /// on the number of ranks.
    fn seek(&mut self, position: Position) -> Result<()> {
        let Position { drawn, num_ranks } = position;
        let now = self.shard.num_ranks as u64;
        // Positions count the samples of one rank, so another number of ranks scales them.
        let moved = match num_ranks {
            0 => None,
            then if then == now => Some(drawn),
            then => drawn.checked_mul(then).map(|total| total / now),
        };
        self.drawn = moved.ok_or_else(|| DataError::Position {
            position: format!("drawn: {drawn}, num_ranks: {num_ranks}"),
            reason: "num_ranks must be at least 1, and all drawn samples together below 2^64",
        })?;
        Ok(())
    }

    fn epoch(&self) -> f64 {
        self.drawn as f64 / self.samples_per_epoch() as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(n: usize, rank: usize, num_ranks: usize, order: Order) -> DistributedSampler {
        DistributedSampler::new(n, DataShard { rank, num_ranks }, order).unwrap()
    }

    /// The order of the reference runs, written by:
    /// ```python
    /// mine = list(range(rank, n, world))
    /// idx = [mine[(pos + i) % len(mine)] for i in range(mb)]; pos += mb
    /// ```
    fn reference(n: usize, rank: usize, world: usize, mb: usize, steps: usize) -> Vec<Vec<usize>> {
        let mine: Vec<usize> = (rank..n).step_by(world).collect();
        let mut batches = Vec::new();
        let mut pos = 0;
        for _ in 0..steps {
            batches.push((0..mb).map(|i| mine[(pos + i) % mine.len()]).collect());
            pos += mb;
        }
        batches
    }

    /// The output of the Python code for n = 11, world = 3, mb = 4.
    #[test]
    fn sequential_order_of_the_python_reference() {
        let expected = [
            [[0, 3, 6, 9], [0, 3, 6, 9], [0, 3, 6, 9]],
            [[1, 4, 7, 10], [1, 4, 7, 10], [1, 4, 7, 10]],
            [[2, 5, 8, 2], [5, 8, 2, 5], [8, 2, 5, 8]],
        ];
        for (rank, batches) in expected.iter().enumerate() {
            let mut sampler = sampler(11, rank, 3, Order::Sequential);
            for batch in batches {
                assert_eq!(sampler.take_samples(4), batch);
            }
        }
    }

    #[test]
    fn epochs_are_counted_alike_on_all_ranks() {
        for (order, per_epoch) in [(Order::Sequential, 4), (Order::Shuffled { seed: 1 }, 3)] {
            for rank in 0..3 {
                let mut sampler = sampler(11, rank, 3, order);
                assert_eq!((sampler.samples_per_epoch(), sampler.epoch()), (per_epoch, 0.0));
                sampler.take_samples(per_epoch + per_epoch);
                assert_eq!(sampler.epoch(), 2.0);
            }
        }
    }

    #[test]
    fn epochs_and_seeds_shuffle_differently() {
        let draw = |seed| sampler(100, 0, 1, Order::Shuffled { seed }).take_samples(200);
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_ne!(draw(1)[..100], draw(1)[100..]);
    }

    #[test]
    fn those_who_sit_out_change() {
        let mut seen = [false; 11];
        for rank in 0..3 {
            let drawn = sampler(11, rank, 3, Order::Shuffled { seed: 3 }).take_samples(30);
            drawn.into_iter().for_each(|sample| seen[sample] = true);
        }
        assert!(seen.iter().all(|&seen| seen), "{seen:?}");
    }

    #[test]
    fn a_position_survives_a_change_of_ranks() {
        let mut four = sampler(100, 0, 4, Order::Sequential);
        four.take_samples(9);
        let mut eight = sampler(100, 3, 8, Order::Sequential);
        eight.seek(four.position()).unwrap();
        assert_eq!(eight.position(), Position { drawn: 4, num_ranks: 8 });
        assert_eq!(eight.take_samples(1), [3 + 4 * 8]);
    }

    #[test]
    fn damaged_positions_are_refused_or_harmless() {
        let mut sampler = sampler(10, 1, 2, Order::Shuffled { seed: 0 });
        assert!(sampler.seek(Position { drawn: 1, num_ranks: 0 }).is_err());
        assert!(sampler.seek(Position { drawn: u64::MAX, num_ranks: 3 }).is_err());
        sampler.seek(Position { drawn: u64::MAX, num_ranks: 2 }).unwrap();
        assert_eq!(sampler.take_samples(3).len(), 3);
        let json = r#"{"drawn": 5, "num_ranks": 2}"#;
        let position: Position = serde_json::from_str(json).unwrap();
        assert_eq!(position, Position { drawn: 5, num_ranks: 2 });
        for bad in
            ["{}", r#"{"drawn": -1, "num_ranks": 2}"#, r#"{"drawn": 1, "num_ranks": 1, "x": 0}"#]
        {
            assert!(serde_json::from_str::<Position>(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn sequential_is_the_reference(n in 1usize..60, world in 1usize..7, mb in 1usize..9) {
            prop_assume!(n >= world);
            for rank in 0..world {
                let mut sampler = sampler(n, rank, world, Order::Sequential);
                for batch in reference(n, rank, world, mb, 12) {
                    prop_assert_eq!(sampler.take_samples(mb), batch);
                }
            }
        }

        #[test]
        fn an_epoch_shows_every_sample_once(n in 1usize..80, world in 1usize..7, seed: u64, epoch in 0u64..4) {
            prop_assume!(n >= world);
            let mut sequential = Vec::new();
            let mut shuffled = Vec::new();
            for rank in 0..world {
                let mine = (n - rank).div_ceil(world);
                sequential.extend(sampler(n, rank, world, Order::Sequential).take_samples(mine));
                let mut sampler = sampler(n, rank, world, Order::Shuffled { seed });
                let drawn = epoch * sampler.samples_per_epoch() as u64;
                sampler.seek(Position { drawn, num_ranks: world as u64 }).unwrap();
                shuffled.extend(sampler.take_samples(sampler.samples_per_epoch()));
            }
            sequential.sort_unstable();
            prop_assert!(sequential.into_iter().eq(0..n));
            shuffled.sort_unstable();
            shuffled.dedup();
            prop_assert_eq!(shuffled.len(), n - n % world);
        }

        #[test]
        fn resuming_continues(n in 4usize..50, at in 0usize..200, seed: u64, shuffle: bool) {
            let order = if shuffle { Order::Shuffled { seed } } else { Order::Sequential };
            let mut uninterrupted = sampler(n, 1, 4, order);
            uninterrupted.take_samples(at);
            let mut resumed = sampler(n, 1, 4, order);
            resumed.seek(uninterrupted.position()).unwrap();
            prop_assert_eq!(resumed.take_samples(100), uninterrupted.take_samples(100));
        }
    }
}
