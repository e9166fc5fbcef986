//! Every sample once per epoch, in batches of a fixed size.
//!
//! [`EpochSampler`] assigns each step a consecutive part of the epoch's order. Within a
//! micro-batch, rank `r` of `W` takes the positions `r, r + W, ...`, as
//! [`DistributedSampler`](crate::DistributedSampler) does. The order depends only on the seed and
//! the epoch, so a run that resumes on another number of ranks continues with exactly the next
//! samples.
//!
//! An epoch ends with a step, as in Hugging Face's `Trainer`. If the number of samples is not a
//! multiple of the samples of a step, the last step has fewer samples: micro-batches are filled in
//! order, and those without samples are a row of padding, because every rank takes part in every
//! collective.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::check_positive;
use crate::stable_rng::StableRng;
use crate::{BatchSampler, DataError, DataShard, Order, Result, StepShape};

/// The progress of the ranks in an epoch, which is the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepPosition {
    /// Completed epochs.
    pub epoch: u64,
    /// Samples of this epoch that all ranks together have drawn before the current step.
    pub samples: u64,
    /// Micro-batches of the current step that each rank has drawn.
    pub micro_batches: u64,
    /// Samples of a micro-batch on all ranks.
    pub batch_samples: u64,
}

/// An endless stream of micro-batches for one rank, which contains every sample once per epoch.
///
/// ```
/// use deepburn_datasets::*;
///
/// let shape = StepShape { num_ranks: 2, accumulation: 1 };
/// let batches = |rank| -> Result<Vec<Vec<usize>>> {
///     let mut sampler = EpochSampler::new(5, rank, shape, 2, Order::Sequential)?;
///     Ok((0..3).map(|_| sampler.next_batch()).collect())
/// };
/// assert_eq!(batches(0)?, [vec![0, 2], vec![4], vec![0, 2]]);
/// assert_eq!(batches(1)?, [vec![1, 3], vec![], vec![1, 3]]);
/// # Ok::<(), DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct EpochSampler {
    /// The number of samples in the data, at least 1.
    num_samples: usize,
    /// This rank.
    rank: usize,
    /// The micro-batches of a step.
    shape: StepShape,
    /// Samples in a micro-batch of one rank.
    rows: usize,
    /// The order of the samples.
    order: Order,
    /// The current epoch, from 0.
    epoch: u64,
    /// The first position of the current step in the epoch's order, below `num_samples`.
    step_start: usize,
    /// Micro-batches of the current step that each rank has drawn, fewer than a step has.
    drawn: usize,
    /// The order of the current epoch, if it is shuffled.
    shuffled: Option<Arc<[usize]>>,
}

impl EpochSampler {
    /// Creates a sampler at the beginning of the first epoch, for micro-batches of `rows` samples.
    ///
    /// # Errors
    /// Returns [`DataError::Empty`] if there are no samples, and [`DataError::Setting`] if the
    /// rank, the shape or `rows` is invalid.
    pub fn new(
        num_samples: usize,
        rank: usize,
        shape: StepShape,
        rows: usize,
        order: Order,
    ) -> Result<Self> {
        DataShard { rank, num_ranks: shape.num_ranks }.validate()?;
        check_positive("micro-batch size", rows)?;
        if num_samples == 0 {
            return Err(DataError::Empty { what: "the set of samples".into() });
        }
        // The end of a step, `step_start + full_step`, must not overflow.
        let per_step = shape.micro_batches()?.checked_mul(rows);
        per_step.and_then(|step| step.checked_add(num_samples)).ok_or_else(|| {
            let rule = "a step would have too many samples to count; lower it";
            DataError::setting("micro-batch size", rows, rule)
        })?;
        let mut sampler = Self {
            num_samples,
            rank,
            shape,
            rows,
            order,
            epoch: 0,
            step_start: 0,
            drawn: 0,
            shuffled: None,
        };
        sampler.start(0, 0);
        Ok(sampler)
    }

    /// Returns the number of samples of one micro-batch on all ranks.
    fn batch_samples(&self) -> usize {
        self.rows * self.shape.num_ranks
    }

    /// Returns the number of samples of a complete step on all ranks.
    fn full_step(&self) -> usize {
        self.batch_samples() * self.shape.accumulation
    }

    /// Returns the number of steps of a whole epoch.
    pub fn steps_per_epoch(&self) -> usize {
        self.num_samples.div_ceil(self.full_step())
    }

    /// Returns the number of samples in the step of the next micro-batch, over all ranks.
    pub fn step_samples(&self) -> usize {
        self.full_step().min(self.num_samples - self.step_start)
    }

    /// Returns the samples of the next micro-batch of this rank; fewer than `rows`, or none, at the
    /// end of an epoch.
    pub fn next_batch(&mut self) -> Vec<usize> {
        let start = self.step_start + self.drawn * self.batch_samples();
        let positions = (start + self.rank..self.num_samples).step_by(self.shape.num_ranks);
        let order = self.shuffled.as_deref();
        let sample = |position: usize| order.map_or(position, |order| order[position]);
        let samples = positions.take(self.rows).map(sample).collect();
        self.drawn += 1;
        if self.drawn == self.shape.accumulation {
            self.end_step();
        }
        samples
    }

    /// Returns the number of micro-batches in the step of the next micro-batch that have a sample
    /// on some rank. The rest of the step is padding, and can be left out with
    /// [`EpochSampler::end_step`].
    pub fn step_batches(&self) -> usize {
        self.step_samples().div_ceil(self.batch_samples())
    }

    /// Moves to the next step. At the beginning of a step, nothing happens.
    pub fn end_step(&mut self) {
        if self.drawn == 0 {
            return;
        }
        match self.step_start + self.full_step() {
            // Wraps only after more epochs than any training has.
            end if end >= self.num_samples => self.start(self.epoch.wrapping_add(1), 0),
            end => (self.step_start, self.drawn) = (end, 0),
        }
    }

    /// Moves to a step of `epoch` that begins at position `step_start`.
    fn start(&mut self, epoch: u64, step_start: usize) {
        if let Order::Shuffled { seed } = self.order
            && (self.shuffled.is_none() || epoch != self.epoch)
        {
            self.shuffled = Some(StableRng::new(seed, epoch).permutation(self.num_samples).into());
        }
        (self.epoch, self.step_start, self.drawn) = (epoch, step_start, 0);
    }
}

impl BatchSampler for EpochSampler {
    type Position = StepPosition;

    fn draw(&mut self) -> (Vec<usize>, usize) {
        // A batch without samples has all rows too: pairs use the model's head once for each row,
        // and ranks with other numbers of rows would gather it in other orders.
        (self.next_batch(), self.rows)
    }

    fn position(&self) -> StepPosition {
        StepPosition {
            epoch: self.epoch,
            samples: self.step_start as u64,
            micro_batches: self.drawn as u64,
            batch_samples: self.batch_samples() as u64,
        }
    }

    /// Moves to `position`, which may be from a run with another number of ranks, micro-batches or
    /// rows: training continues with the next samples of the epoch, and none is skipped or
    /// repeated.
    fn seek(&mut self, position: StepPosition) -> Result<()> {
        let StepPosition { epoch, samples, micro_batches, batch_samples } = position;
        let (num_samples, accumulation) = (self.num_samples as u64, self.shape.accumulation as u64);
        let drawn = micro_batches.checked_mul(batch_samples);
        let drawn = drawn.and_then(|drawn| drawn.checked_add(samples));
        let drawn = drawn.filter(|_| samples < num_samples).ok_or_else(|| DataError::Position {
            position: format!(
                "epoch: {epoch}, samples: {samples} of {num_samples}, micro_batches: {micro_batches}, batch_samples: {batch_samples}"
            ),
            reason: "samples must be below the number of samples in the data",
        })?;
        if batch_samples == self.batch_samples() as u64 && micro_batches < accumulation {
            self.start(epoch, samples as usize);
            self.drawn = micro_batches as usize;
        } else if drawn < num_samples {
            self.start(epoch, drawn as usize);
        } else {
            self.start(epoch.wrapping_add(1), 0);
        }
        Ok(())
    }

    fn epoch(&self) -> f64 {
        let drawn = (self.step_start + self.drawn * self.batch_samples()).min(self.num_samples);
        self.epoch as f64 + drawn as f64 / self.num_samples as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(
        num_samples: usize,
        rank: usize,
        shape: (usize, usize),
        rows: usize,
    ) -> EpochSampler {
        let shape = StepShape { num_ranks: shape.0, accumulation: shape.1 };
        EpochSampler::new(num_samples, rank, shape, rows, Order::Shuffled { seed: 5 }).unwrap()
    }

    /// The samples of the next step on all ranks, in the order of the epoch.
    fn step(ranks: &mut [EpochSampler]) -> Vec<usize> {
        let (accumulation, num_ranks) = (ranks[0].shape.accumulation, ranks.len());
        let mut samples = Vec::new();
        for _ in 0..accumulation {
            let batches: Vec<Vec<usize>> = ranks.iter_mut().map(EpochSampler::next_batch).collect();
            let longest = batches[0].len();
            assert!(batches.iter().all(|batch| batch.len() + 1 >= longest));
            for at in 0..longest * num_ranks {
                samples.extend(batches[at % num_ranks].get(at / num_ranks));
            }
        }
        samples
    }

    #[test]
    fn an_epoch_ends_with_a_smaller_step() {
        let mut one = sampler(7, 0, (1, 2), 2);
        assert_eq!((one.steps_per_epoch(), one.step_samples()), (2, 4));
        let mut epoch: Vec<usize> = (0..2).flat_map(|_| one.next_batch()).collect();
        assert_eq!(one.step_samples(), 3);
        assert_eq!(one.epoch(), 4.0 / 7.0);
        epoch.extend((0..2).flat_map(|_| one.next_batch()));
        epoch.sort_unstable();
        assert_eq!(epoch, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!((one.epoch(), one.position().samples), (1.0, 0));
        // A step without samples in its second micro-batch can end after the first.
        let mut short = sampler(5, 0, (1, 2), 2);
        (0..2).for_each(|_| drop(short.next_batch()));
        assert_eq!(short.step_samples(), 1);
        assert_eq!(short.next_batch().len(), 1);
        // It has as many rows as the others.
        assert_eq!(short.clone().draw(), (vec![], 2));
        short.end_step();
        short.end_step();
        assert_eq!((short.epoch(), short.position().micro_batches), (1.0, 0));
    }

    #[test]
    fn a_rank_without_data_has_empty_batches() {
        let mut ranks: Vec<_> = (0..3).map(|rank| sampler(2, rank, (3, 1), 1)).collect();
        let mut batches: Vec<_> = ranks.iter_mut().map(EpochSampler::next_batch).collect();
        assert_eq!(batches.pop(), Some(vec![]));
        batches.sort();
        assert_eq!(batches, [[0], [1]]);
        assert_eq!(ranks[2].draw(), (vec![], 1));
    }

    #[test]
    fn invalid_numbers_are_refused() {
        let new = |samples, rank, num_ranks, rows| {
            let shape = StepShape { num_ranks, accumulation: 1 };
            EpochSampler::new(samples, rank, shape, rows, Order::Sequential)
                .unwrap_err()
                .to_string()
        };
        assert!(new(0, 0, 1, 1).contains("is empty"));
        assert!(new(1, 1, 1, 1).contains("rank = 1"));
        assert!(new(1, 0, 1, 0).contains("micro-batch size = 0"));
        assert!(new(1, 0, 2, usize::MAX).contains("too many samples"));
        let mut sampler = sampler(4, 0, (1, 1), 2);
        let at = |samples, micro_batches, batch_samples| StepPosition {
            epoch: u64::MAX,
            samples,
            micro_batches,
            batch_samples,
        };
        for bad in [at(4, 0, 2), at(u64::MAX, 0, 2), at(1, u64::MAX, 2)] {
            assert!(matches!(sampler.seek(bad), Err(DataError::Position { .. })), "{bad:?}");
        }
        sampler.seek(at(3, 1, 9)).unwrap();
        assert_eq!(sampler.position(), StepPosition { epoch: 0, ..at(0, 0, 2) });
    }

    proptest! {
        #[test]
        fn resuming_on_other_ranks_continues_with_the_next_samples(
            num_samples in 1usize..60,
            before in (1usize..4, 1usize..4),
            after in (1usize..4, 1usize..4),
            rows in (1usize..4, 1usize..4),
            steps in 0usize..12,
        ) {
            let ranks = |shape: (usize, usize), rows| -> Vec<EpochSampler> {
                (0..shape.0).map(|rank| sampler(num_samples, rank, shape, rows)).collect()
            };
            let mut one = ranks((1, 1), 1);
            let mut expected = std::iter::repeat_with(move || step(&mut one)).flatten();
            let mut saved = ranks(before, rows.0);
            for _ in 0..steps {
                for sample in step(&mut saved) {
                    prop_assert_eq!(Some(sample), expected.next());
                }
            }
            let position = saved[0].position();
            prop_assert!(saved.iter().all(|rank| rank.position() == position));
            let mut resumed = ranks(after, rows.1);
            resumed.iter_mut().for_each(|rank| rank.seek(position).unwrap());
            for _ in 0..12 {
                for sample in step(&mut resumed) {
                    prop_assert_eq!(Some(sample), expected.next());
                }
            }
        }

        #[test]
        fn positions_within_a_step_are_exact(
            num_samples in 1usize..40,
            shape in (1usize..4, 1usize..5),
            rows in 1usize..4,
            batches in 0usize..40,
        ) {
            let mut straight = sampler(num_samples, shape.0 - 1, shape, rows);
            (0..batches).for_each(|_| drop(straight.next_batch()));
            let mut resumed = sampler(num_samples, shape.0 - 1, shape, rows);
            resumed.seek(straight.position()).unwrap();
            for _ in 0..20 {
                prop_assert_eq!(resumed.position(), straight.position());
                prop_assert_eq!(resumed.next_batch(), straight.next_batch());
            }
        }
    }
}
