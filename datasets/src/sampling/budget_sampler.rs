//! One rank's micro-batches under a token budget, epoch after epoch.
//!
//! [`BudgetSampler`] walks the plans of a [`TokenBudget`] without end. It says with each
//! micro-batch how many samples its whole step has, over all ranks, since the learning rate follows
//! that number. Where it stands is an [`EpochPosition`], which it can be set to at once.
//!
//! Refused: what the budget refuses, and a rank that there is not.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{DataError, EpochPlan, Shard, StepShape, TokenBudget};

/// How far the ranks have come in an epoch. The same on all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpochPosition {
    /// Whole epochs gone by.
    pub epoch: u64,
    /// Micro-batches of this epoch that each rank has drawn.
    pub batches: u64,
    /// Samples of this epoch that all ranks together have drawn.
    pub samples: u64,
    /// Ranks that drew.
    pub num_ranks: u64,
    /// Micro-batches of a step of each.
    pub accumulation: u64,
}

/// A micro-batch of one rank, as a list of samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaggedBatch {
    /// Indices of the samples. None in a batch that only fills up a step: it takes part in
    /// collectives and weighs nothing.
    pub samples: Vec<usize>,
    /// Samples of the step that this micro-batch belongs to, over all ranks and micro-batches; the
    /// same for each of them, never 0.
    pub step_samples: usize,
}

/// An endless stream of ragged micro-batches for one rank.
///
/// ```
/// use deepburn_datasets::*;
///
/// let lengths = [5, 3, 8, 2, 7, 4, 6, 1, 9, 3];
/// let mut ranks = Vec::new();
/// for rank in 0..2 {
///     let shard = Shard { rank, num_ranks: 2 };
///     ranks.push(BudgetSampler::new(lengths, TokenBudget::new(16), shard, 1)?);
/// }
/// assert_eq!(ranks[0].next_batch().samples, [0, 1]);
/// assert_eq!(ranks[1].next_batch().samples, [2, 3]);
/// # Ok::<(), DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct BudgetSampler {
    lengths: Arc<[usize]>,
    budget: TokenBudget,
    rank: usize,
    shape: StepShape,
    epoch: u64,
    /// Micro-batches of this epoch that this rank has drawn; fewer than the plan has.
    drawn: usize,
    plan: Arc<EpochPlan>,
}

impl BudgetSampler {
    /// A sampler at the beginning, for samples of these lengths in tokens and steps of
    /// `accumulation` micro-batches a rank.
    ///
    /// # Errors
    /// [`DataError::Rank`], and those of [`TokenBudget::plan`].
    pub fn new(
        lengths: impl Into<Arc<[usize]>>,
        budget: TokenBudget,
        shard: Shard,
        accumulation: usize,
    ) -> Result<Self, DataError> {
        let Shard { rank, num_ranks } = shard.validate()?;
        let lengths = lengths.into();
        let shape = StepShape { num_ranks, accumulation };
        let plan = Arc::new(budget.plan(&lengths, shape, 0)?);
        Ok(Self { lengths, budget, rank, shape, epoch: 0, drawn: 0, plan })
    }

    /// The plan of the epoch that the next micro-batch belongs to.
    pub fn plan(&self) -> &EpochPlan {
        &self.plan
    }

    /// Epochs gone by, with the fraction of the current one's micro-batches.
    pub fn epoch(&self) -> f64 {
        self.epoch as f64 + self.drawn as f64 / self.plan.num_batches() as f64
    }

    /// Samples of the step that the next micro-batch belongs to, over all ranks.
    pub fn step_samples(&self) -> usize {
        self.plan.step_samples(self.drawn / self.shape.accumulation)
    }

    /// Goes to the beginning of the next epoch.
    pub fn next_epoch(&mut self) {
        self.start(self.epoch.wrapping_add(1));
    }

    /// The next micro-batch.
    pub fn next_batch(&mut self) -> RaggedBatch {
        let step_samples = self.step_samples();
        let samples = self.plan.batch(self.rank, self.drawn).to_vec();
        let batch = RaggedBatch { samples, step_samples };
        self.drawn += 1;
        if self.drawn == self.plan.num_batches() {
            // Wraps after more epochs than any training sees; a damaged position must not panic.
            self.start(self.epoch.wrapping_add(1));
        }
        batch
    }

    /// Where this sampler stands.
    pub fn position(&self) -> EpochPosition {
        EpochPosition {
            epoch: self.epoch,
            batches: self.drawn as u64,
            samples: self.plan.samples_before(self.drawn) as u64,
            num_ranks: self.shape.num_ranks as u64,
            accumulation: self.shape.accumulation as u64,
        }
    }

    /// Goes to `position` at once. Taken with steps of the same shape, the batches that follow are
    /// those that would have followed there. Taken with another number of ranks or accumulation
    /// steps, training goes on in the same order of samples at the last step that begins at or
    /// before the position, so that a few samples may come again and none is left out.
    ///
    /// # Errors
    /// [`DataError::EpochPosition`] for one that its epoch does not have.
    pub fn seek(&mut self, position: EpochPosition) -> Result<(), DataError> {
        let EpochPosition { epoch, batches, samples, num_ranks, accumulation } = position;
        let plan = self.planned(epoch);
        let num_samples = plan.num_samples();
        let error = DataError::EpochPosition { epoch, batches, samples, num_samples };
        let counts = usize::try_from(samples).ok().zip(usize::try_from(batches).ok());
        let Some((samples, batches)) = counts.filter(|&(samples, _)| samples <= num_samples) else {
            return Err(error);
        };
        let StepShape { num_ranks: ranks, accumulation: micro_batches } = self.shape;
        if (num_ranks, accumulation) == (ranks as u64, micro_batches as u64) {
            if batches >= plan.num_batches() || plan.samples_before(batches) != samples {
                return Err(error);
            }
            (self.epoch, self.drawn, self.plan) = (epoch, batches, plan);
        } else if samples == num_samples {
            // Only the empty batches of a last step of the other shape were left.
            self.start(epoch.wrapping_add(1));
        } else {
            let drawn = plan.step_at(samples) * micro_batches;
            (self.epoch, self.drawn, self.plan) = (epoch, drawn, plan);
        }
        Ok(())
    }

    fn start(&mut self, epoch: u64) {
        (self.plan, self.epoch, self.drawn) = (self.planned(epoch), epoch, 0);
    }

    fn planned(&self, epoch: u64) -> Arc<EpochPlan> {
        // Only a random order differs from epoch to epoch.
        if epoch == self.epoch || !self.budget.order.varies() {
            return self.plan.clone();
        }
        let plan = self.budget.plan(&self.lengths, self.shape, epoch);
        Arc::new(plan.expect("the epoch changes the order only, and the rest was checked in `new`"))
    }
}

impl Iterator for BudgetSampler {
    type Item = RaggedBatch;

    /// Never `None`.
    fn next(&mut self) -> Option<RaggedBatch> {
        Some(self.next_batch())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::PickingOrder;

    fn sampler(lengths: &[usize], seed: u64, rank: usize, shape: (usize, usize)) -> BudgetSampler {
        let order = PickingOrder::Random { seed };
        let budget = TokenBudget { order, ..TokenBudget::new(64) };
        let (num_ranks, accumulation) = shape;
        BudgetSampler::new(lengths, budget, Shard { rank, num_ranks }, accumulation).unwrap()
    }

    #[test]
    fn ranks_walk_their_plan() {
        let lengths: Vec<usize> = (0..50).map(|i| 1 + i * 7 % 30).collect();
        for rank in 0..3 {
            let mut sampler = sampler(&lengths, 4, rank, (3, 2));
            for epoch in 0..3 {
                let num_batches = sampler.plan().num_batches();
                for index in 0..num_batches {
                    assert_eq!(sampler.epoch(), epoch as f64 + index as f64 / num_batches as f64);
                    let expected = sampler.plan().batch(rank, index).to_vec();
                    let step_samples = sampler.plan().step_samples(index / 2);
                    assert_eq!(
                        sampler.next(),
                        Some(RaggedBatch { samples: expected, step_samples })
                    );
                }
            }
            let EpochPosition { epoch, batches, samples, .. } = sampler.position();
            assert_eq!((epoch, batches, samples), (3, 0, 0));
        }
    }

    #[test]
    fn positions_beyond_an_epoch_are_refused_or_harmless() {
        let mut sampler = sampler(&[3; 40], 0, 1, (2, 1));
        let at = |epoch, batches, samples, num_ranks| EpochPosition {
            epoch,
            batches,
            samples,
            num_ranks,
            accumulation: 1,
        };
        for bad in [at(0, 1, 41, 2), at(0, 1, 1, 2), at(0, 1, 41, 3), at(0, 99, 40, 2)] {
            assert!(matches!(sampler.seek(bad), Err(DataError::EpochPosition { .. })), "{bad:?}");
        }
        assert!(sampler.seek(at(0, u64::MAX, u64::MAX, 0)).is_err());
        assert_eq!(sampler.position(), at(0, 0, 0, 2));
        sampler.seek(at(0, 9, 40, 3)).unwrap();
        assert_eq!(sampler.position(), at(1, 0, 0, 2));
        sampler.seek(at(u64::MAX, 0, 0, 2)).unwrap();
        (0..20).for_each(|_| assert!(!sampler.next_batch().samples.is_empty()));
        for bad in ["{}", r#"{"epoch": 0, "batches": -1, "samples": 0}"#] {
            assert!(serde_json::from_str::<EpochPosition>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn unknown_ranks_and_impossible_budgets_are_refused() {
        let budget = TokenBudget::new(4);
        let new = |shard, accumulation| BudgetSampler::new([1, 2], budget, shard, accumulation);
        assert!(matches!(new(Shard { rank: 2, num_ranks: 2 }, 1), Err(DataError::Rank { .. })));
        assert!(matches!(new(Shard::WHOLE, 0), Err(DataError::Zero { .. })));
        let long = BudgetSampler::new([1, 5], budget, Shard::WHOLE, 1);
        assert!(matches!(long, Err(DataError::OverBudget { sample: 1, length: 5, .. })));
    }

    proptest! {
        #[test]
        fn resuming_continues(
            lengths in proptest::collection::vec(1usize..40, 1..80),
            seed: u64,
            at in 0usize..60,
            ranks in 1usize..5,
            accumulation in 1usize..4,
        ) {
            let mut uninterrupted = sampler(&lengths, seed, ranks - 1, (ranks, accumulation));
            (0..at).for_each(|_| drop(uninterrupted.next_batch()));
            let mut resumed = sampler(&lengths, seed, ranks - 1, (ranks, accumulation));
            resumed.seek(uninterrupted.position()).unwrap();
            for _ in 0..60 {
                prop_assert_eq!(resumed.position(), uninterrupted.position());
                prop_assert_eq!(resumed.next_batch(), uninterrupted.next_batch());
            }
        }

        #[test]
        fn a_change_of_ranks_leaves_nothing_out(
            lengths in proptest::collection::vec(1usize..40, 1..80),
            seed: u64,
            at in 0usize..60,
            before in (1usize..5, 1usize..4),
            after in (1usize..5, 1usize..4),
        ) {
            let mut first = sampler(&lengths, seed, 0, before);
            (0..at).for_each(|_| drop(first.next_batch()));
            let position = first.position();
            let mut seen = vec![false; lengths.len()];
            // What all ranks had drawn of the epoch: the order is the same for any number of them.
            let mut one = sampler(&lengths, seed, 0, (1, 1));
            one.seek(EpochPosition { batches: 0, samples: 0, ..position }).unwrap();
            let num_batches = one.plan().num_batches();
            let order = one.by_ref().take(num_batches).flat_map(|batch| batch.samples);
            order.take(position.samples as usize).for_each(|sample| seen[sample] = true);
            for rank in 0..after.0 {
                let mut resumed = sampler(&lengths, seed, rank, after);
                resumed.seek(position).unwrap();
                prop_assert!(resumed.position().samples <= position.samples);
                while resumed.position().epoch == position.epoch {
                    resumed.next_batch().samples.into_iter().for_each(|sample| seen[sample] = true);
                }
            }
            prop_assert!(seen.into_iter().all(|seen| seen));
        }
    }
}
