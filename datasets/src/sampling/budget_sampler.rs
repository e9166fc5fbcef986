//! One rank's micro-batches under a token budget, epoch by epoch.
//!
//! [`BudgetSampler`] iterates over the epoch plans of a [`TokenBudget`] without end. For each
//! micro-batch it also reports the number of samples in the whole step, over all ranks, because the
//! learning rate depends on that number. Its position is an [`EpochPosition`]. An invalid rank is
//! an error, in addition to the errors of the budget.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{BatchSampler, DataError, DataShard, EpochPlan, Result, StepShape, TokenBudget};

/// The progress of the ranks in an epoch, which is the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpochPosition {
    /// Completed epochs.
    pub epoch: u64,
    /// Micro-batches of this epoch that each rank has drawn.
    pub batches: u64,
    /// Samples of this epoch that all ranks together have drawn.
    pub samples: u64,
    /// The number of ranks.
    pub num_ranks: u64,
    /// Micro-batches of each rank in a step.
    pub accumulation: u64,
}

/// An endless stream of micro-batches of varying size for one rank.
///
/// ```
/// use deepburn_datasets::*;
///
/// let lengths = [5, 3, 8, 2, 7, 4, 6, 1, 9, 3];
/// let mut ranks = Vec::new();
/// for rank in 0..2 {
///     let shard = DataShard { rank, num_ranks: 2 };
///     ranks.push(BudgetSampler::new(lengths, TokenBudget::new(16), shard, 1)?);
/// }
/// assert_eq!(ranks[0].next_batch(), [0, 1]);
/// assert_eq!(ranks[1].next_batch(), [2, 3]);
/// # Ok::<(), DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct BudgetSampler {
    /// The length of each sample, in tokens.
    lengths: Arc<[usize]>,
    /// The limits of a micro-batch.
    budget: TokenBudget,
    /// This rank.
    rank: usize,
    /// The micro-batches of a step.
    shape: StepShape,
    /// The current epoch, from 0.
    epoch: u64,
    /// Micro-batches of this epoch that this rank has drawn; fewer than the plan has.
    drawn: usize,
    /// The micro-batches of the current epoch.
    plan: Arc<EpochPlan>,
}

impl BudgetSampler {
    /// Creates a sampler at the beginning of the data, for samples of these lengths in tokens and
    /// steps of `accumulation` micro-batches per rank.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if the shard is invalid, and the errors of
    /// [`TokenBudget::plan`].
    pub fn new(
        lengths: impl Into<Arc<[usize]>>,
        budget: TokenBudget,
        shard: DataShard,
        accumulation: usize,
    ) -> Result<Self> {
        let DataShard { rank, num_ranks } = shard.validate()?;
        let lengths = lengths.into();
        let shape = StepShape { num_ranks, accumulation };
        let plan = Arc::new(budget.plan(&lengths, shape, 0)?);
        Ok(Self { lengths, budget, rank, shape, epoch: 0, drawn: 0, plan })
    }

    /// Returns the plan of the epoch of the next micro-batch.
    pub fn plan(&self) -> &EpochPlan {
        &self.plan
    }

    /// Returns the number of samples in the step of the next micro-batch, over all ranks.
    pub fn step_samples(&self) -> usize {
        self.plan.step_samples(self.drawn / self.shape.accumulation)
    }

    /// Moves to the beginning of the next epoch.
    pub fn next_epoch(&mut self) {
        // Wraps only after more epochs than any training has; a damaged position must not panic.
        self.start(self.epoch.wrapping_add(1));
    }

    /// Returns the samples of the next micro-batch. The list is empty for a batch that only
    /// completes a step. The rank then takes part in the collectives, and the batch does not
    /// contribute to the loss.
    pub fn next_batch(&mut self) -> Vec<usize> {
        let samples = self.plan.batch(self.rank, self.drawn).to_vec();
        self.drawn += 1;
        if self.drawn == self.plan.num_batches() {
            self.next_epoch();
        }
        samples
    }

    /// Moves to the beginning of `epoch`.
    fn start(&mut self, epoch: u64) {
        (self.plan, self.epoch, self.drawn) = (self.planned(epoch), epoch, 0);
    }

    /// Returns the plan of `epoch`. The current plan is reused if it is the same.
    fn planned(&self, epoch: u64) -> Arc<EpochPlan> {
        // Only a random order differs between epochs.
        if epoch == self.epoch || !self.budget.order.varies() {
            return self.plan.clone();
        }
        let plan = self.budget.plan(&self.lengths, self.shape, epoch);
        Arc::new(plan.expect("the epoch changes only the order, and the rest was checked in `new`"))
    }
}

impl BatchSampler for BudgetSampler {
    type Position = EpochPosition;

    fn draw(&mut self) -> (Vec<usize>, usize) {
        let samples = self.next_batch();
        // An empty batch becomes a row of padding, because every rank takes part in every
        // collective.
        let rows = samples.len().max(1);
        (samples, rows)
    }

    fn position(&self) -> EpochPosition {
        EpochPosition {
            epoch: self.epoch,
            batches: self.drawn as u64,
            samples: self.plan.samples_before(self.drawn) as u64,
            num_ranks: self.shape.num_ranks as u64,
            accumulation: self.shape.accumulation as u64,
        }
    }

    /// Moves to `position`. If the numbers of ranks and accumulation steps are unchanged, the
    /// following batches are the same as in the run that saved the position. Otherwise, training
    /// continues in the same sample order, at the last step that begins at or before the position.
    /// A few samples may then be repeated, but none is skipped.
    fn seek(&mut self, position: EpochPosition) -> Result<()> {
        let EpochPosition { epoch, batches, samples, num_ranks, accumulation } = position;
        let plan = self.planned(epoch);
        let num_samples = plan.num_samples();
        let error = || DataError::Position {
            position: format!(
                "epoch: {epoch}, batches: {batches}, samples: {samples} of {num_samples}"
            ),
            reason: "it must be between two batches of the epoch",
        };
        let counts = usize::try_from(samples).ok().zip(usize::try_from(batches).ok());
        let counts = counts.filter(|&(samples, _)| samples <= num_samples);
        let (samples, batches) = counts.ok_or_else(error)?;
        let StepShape { num_ranks: ranks, accumulation: micro_batches } = self.shape;
        if (num_ranks, accumulation) == (ranks as u64, micro_batches as u64) {
            // The end of an epoch is never saved: after its last batch, the position is in the next
            // one.
            if batches >= plan.num_batches() || plan.samples_before(batches) != samples {
                return Err(error());
            }
            (self.epoch, self.drawn, self.plan) = (epoch, batches, plan);
        } else if samples == num_samples {
            // All samples of the epoch were drawn, and only empty batches of the last step
            // remained.
            self.start(epoch.wrapping_add(1));
        } else {
            let drawn = plan.step_at(samples) * micro_batches;
            (self.epoch, self.drawn, self.plan) = (epoch, drawn, plan);
        }
        Ok(())
    }

    fn epoch(&self) -> f64 {
        self.epoch as f64 + self.drawn as f64 / self.plan.num_batches() as f64
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
        BudgetSampler::new(lengths, budget, DataShard { rank, num_ranks }, accumulation).unwrap()
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
                    assert_eq!(sampler.step_samples(), step_samples);
                    assert_eq!(sampler.next_batch(), expected);
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
            assert!(matches!(sampler.seek(bad), Err(DataError::Position { .. })), "{bad:?}");
        }
        assert!(sampler.seek(at(0, u64::MAX, u64::MAX, 0)).is_err());
        assert_eq!(sampler.position(), at(0, 0, 0, 2));
        sampler.seek(at(0, 9, 40, 3)).unwrap();
        assert_eq!(sampler.position(), at(1, 0, 0, 2));
        sampler.seek(at(u64::MAX, 0, 0, 2)).unwrap();
        (0..20).for_each(|_| assert!(!sampler.next_batch().is_empty()));
        for bad in ["{}", r#"{"epoch": 0, "batches": -1, "samples": 0}"#] {
            assert!(serde_json::from_str::<EpochPosition>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn unknown_ranks_and_impossible_budgets_are_refused() {
        let budget = TokenBudget::new(4);
        let new = |shard, accumulation| BudgetSampler::new([1, 2], budget, shard, accumulation);
        let message = |outcome: Result<BudgetSampler>| outcome.unwrap_err().to_string();
        assert!(message(new(DataShard { rank: 2, num_ranks: 2 }, 1)).contains("rank = 2"));
        assert!(message(new(DataShard::WHOLE, 0)).contains("accumulation_steps = 0"));
        let long = BudgetSampler::new([1, 5], budget, DataShard::WHOLE, 1);
        assert!(message(long).contains("sample 1 has 5 tokens"));
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
                prop_assert_eq!(resumed.step_samples(), uninterrupted.step_samples());
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
            // The samples that all ranks had drawn in the epoch. The order is the same for any
            // number of ranks.
            let mut one = sampler(&lengths, seed, 0, (1, 1));
            one.seek(EpochPosition { batches: 0, samples: 0, ..position }).unwrap();
            let num_batches = one.plan().num_batches();
            let order = (0..num_batches).flat_map(|_| one.next_batch());
            order.take(position.samples as usize).for_each(|sample| seen[sample] = true);
            for rank in 0..after.0 {
                let mut resumed = sampler(&lengths, seed, rank, after);
                resumed.seek(position).unwrap();
                prop_assert!(resumed.position().samples <= position.samples);
                while resumed.position().epoch == position.epoch {
                    resumed.next_batch().into_iter().for_each(|sample| seen[sample] = true);
                }
            }
            prop_assert!(seen.into_iter().all(|seen| seen));
        }
    }
}
