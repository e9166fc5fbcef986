//! Batch sizes that change during training, by changing the number of accumulated micro-batches.
//!
//! The micro-batch size and the number of ranks stay constant, so only multiples of their product
//! are possible. [`with_train_batch_size`] computes one such batch, and [`BatchSchedule`] is a list
//! of changes. For any other size, the error names the nearest possible sizes.

use deepburn_config::BatchPlan;

/// An unsupported batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchSizeError {
    /// The size is not a positive multiple of the micro-batch size times the number of ranks.
    #[error(
        "train_batch_size {size} is not a positive multiple of micro-batch * ranks = {micro_batch_size} * {data_parallel_size}; the nearest are {}",
        nearest(*below, *above)
    )]
    NoMultiple {
        /// The requested size.
        size: usize,
        /// The number of samples of a micro-batch.
        micro_batch_size: usize,
        /// The number of data-parallel ranks.
        data_parallel_size: usize,
        /// The largest possible size below it, if there is one.
        below: Option<usize>,
        /// The smallest possible size above it; `None` if it overflows.
        above: Option<usize>,
    },
    /// The first step of a change is not after the first step of the previous change.
    #[error(
        "train_batch_size {size} from step {from_step}: the change before it is from step {previous}; give the changes in the order of their steps, the first after step 0"
    )]
    OutOfOrder {
        /// The size.
        size: usize,
        /// Its first step.
        from_step: usize,
        /// The first step of the previous change.
        previous: usize,
    },
}

/// Formats the nearest possible sizes for an error message.
fn nearest(below: Option<usize>, above: Option<usize>) -> String {
    let sizes: Vec<String> = [below, above].into_iter().flatten().map(|s| s.to_string()).collect();
    sizes.join(" and ")
}

/// Returns a batch with the same micro-batch size and ranks, and as many accumulation steps as
/// `train_batch_size` samples need.
///
/// Only the accumulation changes, because the micro-batch size determines the memory.
///
/// # Errors
/// Returns [`BatchSizeError::NoMultiple`] with the nearest possible sizes.
pub(crate) fn with_train_batch_size(
    batch: BatchPlan,
    train_batch_size: usize,
) -> Result<BatchPlan, BatchSizeError> {
    let BatchPlan { micro_batch_size, data_parallel_size, .. } = batch;
    let size = train_batch_size;
    let error = |below, above| {
        Err(BatchSizeError::NoMultiple { size, micro_batch_size, data_parallel_size, below, above })
    };
    let pass = micro_batch_size.checked_mul(data_parallel_size).filter(|&pass| pass > 0);
    let Some(pass) = pass else { return error(None, None) };
    let (steps, rest) = (size / pass, size % pass);
    if steps == 0 || rest > 0 {
        // Below one pass, there is no smaller size: a step has at least one micro-batch on each
        // rank.
        let above = (steps + 1).checked_mul(pass);
        return error((steps > 0).then_some(steps * pass), above);
    }
    Ok(BatchPlan { train_batch_size, gradient_accumulation_steps: steps, ..batch })
}

/// A schedule of batch sizes, which change at given optimizer steps.
///
/// The key `training.batch_size_schedule` of a job file creates a schedule. A larger batch late in
/// training reduces the noise of the gradients, at the cost of more samples per step (Smith et al.
/// 2018).
///
/// ```
/// use deepburn_config::BatchPlan;
/// use deepburn_learner::BatchSchedule;
///
/// let initial = BatchPlan {
///     train_batch_size: 8,
///     micro_batch_size: 4,
///     gradient_accumulation_steps: 1,
///     data_parallel_size: 2,
/// };
/// // Three steps of 8 samples, then steps of 16.
/// let schedule = BatchSchedule::new(initial, [(3, 16)])?;
/// assert_eq!(schedule.at(2).train_batch_size, 8);
/// assert_eq!(schedule.at(3).train_batch_size, 16);
/// assert_eq!(schedule.samples_before(5), 3 * 8 + 2 * 16);
/// # Ok::<(), deepburn_learner::BatchSizeError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchSchedule {
    /// The batch until the first change.
    initial: BatchPlan,
    /// The first step and the batch of each change, in order.
    changes: Vec<(usize, BatchPlan)>,
}

impl BatchSchedule {
    /// Creates a schedule that starts with `initial`. Each change is a pair: the first optimizer
    /// step of the change, counted from 0, and the `train_batch_size` from that step on.
    ///
    /// # Errors
    /// Returns [`BatchSizeError`] for the first invalid change.
    pub fn new(
        initial: BatchPlan,
        changes: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<Self, BatchSizeError> {
        let mut schedule = Self { initial, changes: Vec::new() };
        for (from_step, size) in changes {
            let previous = schedule.changes.last().map(|&(previous, _)| previous);
            if let Some(previous) = previous.filter(|&previous| from_step <= previous) {
                return Err(BatchSizeError::OutOfOrder { size, from_step, previous });
            }
            schedule.changes.push((from_step, with_train_batch_size(initial, size)?));
        }
        Ok(schedule)
    }

    /// Returns the batch of optimizer step `step`, counted from 0.
    pub fn at(&self, step: usize) -> BatchPlan {
        let past = self.changes.partition_point(|&(from_step, _)| from_step <= step);
        self.changes[..past].last().map_or(self.initial, |&(_, batch)| batch)
    }

    /// Returns true if the batch never changes.
    pub fn is_constant(&self) -> bool {
        self.changes.is_empty()
    }

    /// Returns the largest batch.
    pub fn largest(&self) -> BatchPlan {
        self.batches().max_by_key(|batch| batch.train_batch_size).unwrap_or(self.initial)
    }

    /// Returns every batch, in order.
    fn batches(&self) -> impl Iterator<Item = BatchPlan> {
        [self.initial].into_iter().chain(self.changes.iter().map(|&(_, batch)| batch))
    }

    /// Returns the largest number of optimizer steps that have at most `samples` samples in total.
    ///
    /// The number of samples before a step increases with the step, so the result is found by
    /// bisection. It is at most `samples`, because each step has at least one sample.
    pub fn steps_within(&self, samples: usize) -> usize {
        let (mut low, mut high) = (0, samples);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.samples_before(middle) <= samples { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Returns the number of samples of all optimizer steps before `step`, over all ranks.
    /// Saturates at `usize::MAX`.
    pub fn samples_before(&self, step: usize) -> usize {
        let starts = self.changes.iter().map(|&(from_step, _)| from_step);
        let ends = starts.clone().chain([step]).map(|end| end.min(step));
        // Each batch is used from its own first step to the next batch's. Batches that begin after
        // `step` have an empty span.
        let spans = [0].into_iter().chain(starts).zip(ends).zip(self.batches());
        spans.fold(0, |samples: usize, ((start, end), batch)| {
            let steps = end.saturating_sub(start);
            samples.saturating_add(steps.saturating_mul(batch.train_batch_size))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch(micro_batch_size: usize, data_parallel_size: usize, steps: usize) -> BatchPlan {
        BatchPlan {
            train_batch_size: micro_batch_size * data_parallel_size * steps,
            micro_batch_size,
            gradient_accumulation_steps: steps,
            data_parallel_size,
        }
    }

    #[test]
    fn accumulation_realises_a_size() {
        assert_eq!(with_train_batch_size(batch(4, 2, 1), 24), Ok(batch(4, 2, 3)));
    }

    #[test]
    fn impossible_sizes_name_the_nearest() {
        let message = |size| with_train_batch_size(batch(4, 2, 1), size).unwrap_err().to_string();
        assert_eq!(
            message(20),
            "train_batch_size 20 is not a positive multiple of micro-batch * ranks = 4 * 2; the \
             nearest are 16 and 24"
        );
        assert!(message(0).ends_with("the nearest are 8"), "{}", message(0));
        assert!(message(7).ends_with("the nearest are 8"), "{}", message(7));
        assert!(!message(usize::MAX).ends_with("and "), "{}", message(usize::MAX));
        assert!(with_train_batch_size(batch(0, 2, 1), 4).is_err());
    }

    #[test]
    fn sizes_change_at_their_steps() {
        let schedule = BatchSchedule::new(batch(4, 2, 2), [(3, 8), (5, 32)]).unwrap();
        let sizes = (0..7).map(|step| schedule.at(step).train_batch_size);
        assert!(sizes.eq([16, 16, 16, 8, 8, 32, 32]));
        assert_eq!(schedule.at(5).gradient_accumulation_steps, 4);
        assert_eq!([0, 2, 3, 4, 6].map(|step| schedule.samples_before(step)), [0, 32, 48, 56, 96]);
        let constant = BatchSchedule::new(batch(4, 2, 2), []).unwrap();
        assert_eq!((constant.at(usize::MAX), constant.samples_before(3)), (batch(4, 2, 2), 48));
    }

    #[test]
    fn changes_come_in_order() {
        let error = BatchSchedule::new(batch(1, 1, 1), [(4, 2), (4, 3)]).unwrap_err();
        assert_eq!(error, BatchSizeError::OutOfOrder { size: 3, from_step: 4, previous: 4 });
        let error = BatchSchedule::new(batch(2, 1, 1), [(4, 3)]).unwrap_err();
        assert!(matches!(error, BatchSizeError::NoMultiple { size: 3, .. }));
    }

    proptest! {
        #[test]
        fn a_size_is_met_or_the_nearest_named(micro in 1usize..100, ranks in 1usize..20, size: u32) {
            let size = size as usize;
            match with_train_batch_size(batch(micro, ranks, 1), size) {
                Ok(plan) => {
                    let product = plan.micro_batch_size * plan.gradient_accumulation_steps * plan.data_parallel_size;
                    prop_assert_eq!((product, plan.train_batch_size), (size, size));
                }
                Err(BatchSizeError::NoMultiple { below, above, .. }) => {
                    let plan = batch(micro, ranks, 1);
                    let above = above.unwrap();
                    prop_assert!(with_train_batch_size(plan, above).is_ok());
                    prop_assert!(size < above && above - size <= micro * ranks);
                    if let Some(below) = below {
                        prop_assert!(with_train_batch_size(plan, below).is_ok());
                        prop_assert_eq!(above - below, micro * ranks);
                    }
                }
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
            }
        }

        #[test]
        fn samples_add_up(
            gaps in proptest::collection::vec((1usize..10, 1usize..10), 0..6),
            steps in 0usize..60,
        ) {
            let mut from_step = 0;
            let changes: Vec<_> = gaps.into_iter().map(|(gap, accumulation)| {
                from_step += gap;
                (from_step, 6 * accumulation)
            }).collect();
            let schedule = BatchSchedule::new(batch(3, 2, 2), changes).unwrap();
            let samples: usize = (0..steps).map(|step| schedule.at(step).train_batch_size).sum();
            prop_assert_eq!(schedule.samples_before(steps), samples);
        }
    }
}
