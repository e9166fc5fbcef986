//! Batches of samples of different length under a token budget (dynamic batching).
//!
//! With a fixed number of rows, one long sample fills its whole batch with padding. A
//! [`TokenBudget`] limits the cost of a batch instead, `rows * longest <= max_tokens`, and the
//! number of rows follows. [`TokenBudget::plan`] turns an epoch into an [`EpochPlan`]:
//!
//! ```text
//! order      the samples, by seed and epoch
//! pack       neighbors into a batch until one more row, or a longer one, would exceed the budget
//! shuffle    the batches (random order only)
//! equalize   until every step has its micro-batch for every rank
//! ```
//!
//! Every sample is in exactly one batch of an epoch, and none is dropped. If the batches do not
//! fill the last step, those with the most rows are halved: this distributes real samples, and can
//! only reduce the padding. If none can be halved, empty batches, which do not contribute to the
//! loss, complete the step. The samples have the same order for any number of ranks; only the cuts
//! between batches differ.
//!
//! A sample longer than the budget is an error, because truncation is left to the source of the
//! samples. A budget that is too small for `min_batch_size` samples of the longest length is also
//! an error.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::error::check_positive;
use crate::stable_rng::StableRng;
use crate::{DataError, Result};

/// Number of batches in a window, whose samples are sorted by length together in
/// [`PickingOrder::Random`]. A larger window reduces padding, but a batch then contains only
/// samples of nearly equal length.
const BATCHES_PER_WINDOW: usize = 64;

/// Minimum number of windows in an epoch. With a single window, the lengths alone would determine
/// the batches, and all epochs would have nearly the same batches.
const MIN_WINDOWS: usize = 4;

/// The limits of a micro-batch. They are the same on all ranks.
///
/// A batch costs as much as its longest row times its number of rows, because shorter rows are
/// padded. With a budget, batches of long texts have few rows and batches of short texts many:
///
/// ```
/// use deepburn_datasets::{StepShape, TokenBudget};
///
/// let plan = TokenBudget::new(12).plan(&[6, 5, 2, 2, 2, 2], StepShape::SINGLE, 0)?;
/// assert_eq!(plan.batch(0, 0), [0, 1]);
/// assert_eq!(plan.batch(0, 1), [2, 3, 4, 5]);
/// assert_eq!(plan.num_steps(), 2);
/// # Ok::<(), deepburn_datasets::DataError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBudget {
    /// Maximum tokens of a micro-batch including padding: rows times the longest row. A sample
    /// without tokens counts as one token.
    pub max_tokens: usize,
    /// Minimum rows of a micro-batch; `max_tokens` must be large enough for this number of rows of
    /// the longest sample. The last batches of an epoch may have fewer.
    pub min_batch_size: usize,
    /// Maximum rows of a micro-batch; `None` for no limit.
    pub max_batch_size: Option<usize>,
    /// The order of the samples.
    pub order: PickingOrder,
}

/// The order in which samples are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PickingOrder {
    /// The order of the data, the same in every epoch.
    Sequential,
    /// A permutation per epoch. Windows of it are sorted by length before they are packed, so that
    /// the rows of a batch have about the same length, and the batches are shuffled again.
    Random {
        /// Determines all epochs. Must be the same on all ranks.
        seed: u64,
    },
    /// Shortest first, the same in every epoch. Samples of equal length keep the order of the data.
    ByLength,
}

impl PickingOrder {
    /// Returns whether epochs differ.
    pub(crate) fn varies(self) -> bool {
        matches!(self, Self::Random { .. })
    }
}

/// The micro-batches of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepShape {
    /// The number of ranks.
    pub num_ranks: usize,
    /// Micro-batches of each rank in a step.
    pub accumulation: usize,
}

impl StepShape {
    /// A step of one micro-batch on one rank.
    pub const SINGLE: Self = Self { num_ranks: 1, accumulation: 1 };

    /// Returns the number of micro-batches of a step over all ranks.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if the number is 0 or overflows.
    pub(crate) fn micro_batches(self) -> Result<usize> {
        let Self { num_ranks, accumulation } = self;
        check_positive("number of ranks", num_ranks)?;
        check_positive("gradient_accumulation_steps", accumulation)?;
        let rule = "a step would have too many micro-batches to count; lower it";
        num_ranks
            .checked_mul(accumulation)
            .ok_or_else(|| DataError::setting("gradient_accumulation_steps", accumulation, rule))
    }
}

impl TokenBudget {
    /// Creates a budget without limits on rows, for samples in the order of the data.
    pub fn new(max_tokens: usize) -> Self {
        let order = PickingOrder::Sequential;
        Self { max_tokens, min_batch_size: 1, max_batch_size: None, order }
    }

    /// Checks the budget against the lengths of all samples, in tokens.
    ///
    /// # Errors
    /// Returns [`DataError::Empty`] if there are no samples. Returns [`DataError::Setting`] if no
    /// batch can meet the limits, if a sample is longer than the budget, or if the budget is too
    /// small for the smallest batch.
    pub fn validate(&self, lengths: &[usize]) -> Result<()> {
        let &Self { max_tokens, min_batch_size, max_batch_size, .. } = self;
        check_positive("dynamic_batching.max_tokens", max_tokens)?;
        check_positive("dynamic_batching.min_batch_size", min_batch_size)?;
        if let Some(max) = max_batch_size.filter(|&max| max < min_batch_size) {
            let rule =
                "it is below dynamic_batching.min_batch_size; raise it, or lower the minimum";
            return Err(DataError::setting("dynamic_batching.max_batch_size", max, rule));
        }
        let small = |rule| Err(DataError::setting("dynamic_batching.max_tokens", max_tokens, rule));
        let over = lengths.iter().enumerate().find(|&(_, &length)| length > max_tokens);
        if let Some((sample, length)) = over {
            return small(format!(
                "sample {sample} has {length} tokens, more than a whole batch; raise max_tokens to {length} or more, or truncate samples"
            ));
        }
        let longest = lengths.iter().copied().max();
        let longest =
            longest.ok_or_else(|| DataError::Empty { what: "the set of samples".into() })?;
        let smallest = min_batch_size.checked_mul(width(longest));
        if smallest.is_none_or(|smallest| smallest > max_tokens) {
            return small(format!(
                "too small for dynamic_batching.min_batch_size: {min_batch_size} samples of {longest} tokens, the longest sample; raise max_tokens, lower min_batch_size, or truncate samples"
            ));
        }
        Ok(())
    }

    /// Plans the micro-batches of `epoch` (from 0) for samples of these lengths, in tokens.
    ///
    /// # Errors
    /// Returns the errors of [`TokenBudget::validate`], and [`DataError::Setting`] for a step
    /// without micro-batches.
    pub fn plan(&self, lengths: &[usize], shape: StepShape, epoch: u64) -> Result<EpochPlan> {
        let per_step = shape.micro_batches()?;
        self.validate(lengths)?;
        let batches = self.equalize(self.pack(lengths, epoch), per_step);
        let padded = |batch: &[usize]| {
            let longest = batch.iter().map(|&sample| width(lengths[sample])).max().unwrap_or(0);
            batch.len() as u64 * longest as u64
        };
        Ok(EpochPlan {
            num_tokens: lengths.iter().map(|&length| length as u64).sum(),
            num_padded: (0..batches.len()).map(|index| padded(batches.batch(index))).sum(),
            batches,
            shape,
        })
    }

    /// Orders the samples, and cuts the sequence into batches.
    fn pack(&self, lengths: &[usize], epoch: u64) -> Batches {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        match self.order {
            PickingOrder::Sequential => self.cut(order, lengths),
            PickingOrder::ByLength => {
                order.sort_by_key(|&sample| lengths[sample]);
                self.cut(order, lengths)
            }
            PickingOrder::Random { seed } => {
                let mut rng = StableRng::new(seed, epoch);
                order = rng.permutation(lengths.len());
                for (index, window) in order.chunks_mut(self.window(lengths)).enumerate() {
                    window.sort_by_key(|&sample| lengths[sample]);
                    // Windows are sorted in ascending and descending order in turn, so that a batch
                    // that spans two windows also has samples of about the same length.
                    if index % 2 == 1 {
                        window.reverse();
                    }
                }
                let batches = self.cut(order, lengths);
                // From the same stream, which the permutation of the samples has advanced.
                let order = rng.permutation(batches.len());
                batches.reordered(&order)
            }
        }
    }

    /// Returns the number of samples in a window: about [`BATCHES_PER_WINDOW`] batches, in at least
    /// [`MIN_WINDOWS`] windows.
    fn window(&self, lengths: &[usize]) -> usize {
        // Sums and products of user settings may exceed 64 bits.
        let tokens: u128 = lengths.iter().map(|&length| width(length) as u128).sum();
        let mean = (tokens / lengths.len() as u128).max(1);
        let rows = (self.max_tokens as u128 / mean).min(lengths.len() as u128) as usize;
        let rows = self.max_batch_size.map_or(rows, |max| rows.min(max)).max(1);
        rows.saturating_mul(BATCHES_PER_WINDOW).min(lengths.len().div_ceil(MIN_WINDOWS))
    }

    /// Cuts samples into batches: a batch ends if the next sample would not fit.
    fn cut(&self, samples: Vec<usize>, lengths: &[usize]) -> Batches {
        let max_rows = self.max_batch_size.unwrap_or(usize::MAX);
        let mut bounds = vec![0];
        let (mut start, mut longest) = (0, 0);
        for (place, &sample) in samples.iter().enumerate() {
            let (rows, with) = (place - start + 1, longest.max(width(lengths[sample])));
            if rows > max_rows || rows.saturating_mul(with) > self.max_tokens {
                bounds.push(place);
                (start, longest) = (place, width(lengths[sample]));
            } else {
                longest = with;
            }
        }
        bounds.push(samples.len());
        Batches { samples, bounds }
    }

    /// Makes the number of batches a multiple of `per_step`. It first halves the batches with the
    /// most rows (the first one among equals), and then adds empty batches. It adds fewer empty
    /// batches than a step has, so that no step is empty.
    fn equalize(&self, mut batches: Batches, per_step: usize) -> Batches {
        let mut missing = batches.len().next_multiple_of(per_step) - batches.len();
        // The batch with the most rows comes first, and the first one among equals.
        let mut by_rows: BinaryHeap<(usize, Reverse<usize>)> =
            batches.bounds.windows(2).map(|at| (at[1] - at[0], Reverse(at[0]))).collect();
        while let Some((rows, Reverse(start))) = by_rows.pop().filter(|_| missing > 0) {
            // Both halves need the minimum number of rows. No other batch has more rows, so no
            // other batch can be halved.
            if rows < 2 * self.min_batch_size {
                break;
            }
            let half = rows / 2;
            batches.bounds.push(start + half);
            by_rows.push((half, Reverse(start)));
            by_rows.push((rows - half, Reverse(start + half)));
            missing -= 1;
        }
        // Halving has appended its bounds at the end.
        batches.bounds.sort_unstable();
        let end = batches.samples.len();
        batches.bounds.extend(std::iter::repeat_n(end, missing));
        batches
    }
}

/// Returns the tokens of the budget that a sample uses if it is alone in a batch.
fn width(length: usize) -> usize {
    length.max(1)
}

/// Samples in order, cut into batches: batch `b` is `samples[bounds[b]..bounds[b + 1]]`.
#[derive(Debug)]
struct Batches {
    /// The samples of all batches.
    samples: Vec<usize>,
    /// The beginning of each batch in `samples`, and the end of the last one.
    bounds: Vec<usize>,
}

impl Batches {
    /// Returns the number of batches.
    fn len(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Returns the samples of a batch.
    fn batch(&self, index: usize) -> &[usize] {
        &self.samples[self.bounds[index]..self.bounds[index + 1]]
    }

    /// Returns the same batches in another order.
    fn reordered(&self, order: &[usize]) -> Self {
        let mut reordered =
            Self { samples: Vec::with_capacity(self.samples.len()), bounds: vec![0] };
        for &index in order {
            reordered.samples.extend_from_slice(self.batch(index));
            reordered.bounds.push(reordered.samples.len());
        }
        reordered
    }
}

/// The micro-batches of one epoch, for all ranks.
///
/// Micro-batch `i` of rank `r` of `W` is batch `i * W + r` of the plan, so that ranks process
/// adjacent batches at the same time. All ranks have the same number of micro-batches, in whole
/// steps.
#[derive(Debug)]
pub struct EpochPlan {
    /// The batches of all ranks, in the order in which ranks take them.
    batches: Batches,
    /// The micro-batches of a step.
    shape: StepShape,
    /// Tokens of all samples.
    num_tokens: u64,
    /// Token positions of all batches, including padding.
    num_padded: u64,
}

impl EpochPlan {
    /// Returns the number of samples in the epoch, which is the size of the data set.
    pub fn num_samples(&self) -> usize {
        self.batches.samples.len()
    }

    /// Returns the number of micro-batches per rank, which is the same on all ranks and makes whole
    /// steps.
    pub fn num_batches(&self) -> usize {
        self.batches.len() / self.shape.num_ranks
    }

    /// Returns the number of optimizer steps.
    pub fn num_steps(&self) -> usize {
        self.num_batches() / self.shape.accumulation
    }

    /// Returns the samples of a rank's micro-batch. A micro-batch that only completes the last step
    /// has none.
    ///
    /// # Panics
    /// Panics if there is no such rank or micro-batch.
    pub fn batch(&self, rank: usize, index: usize) -> &[usize] {
        assert!(rank < self.shape.num_ranks, "rank {rank} of {}", self.shape.num_ranks);
        self.batches.batch(index * self.shape.num_ranks + rank)
    }

    /// Returns the number of samples in an optimizer step, over all ranks and
    /// micro-batches; never 0. The learning rate is scaled by it.
    ///
    /// # Panics
    /// Panics if there is no such step.
    pub fn step_samples(&self, step: usize) -> usize {
        self.samples_before((step + 1) * self.shape.accumulation)
            - self.samples_before(step * self.shape.accumulation)
    }

    /// Returns the samples that all ranks have drawn after `batches` micro-batches of each.
    pub(crate) fn samples_before(&self, batches: usize) -> usize {
        self.batches.bounds[batches * self.shape.num_ranks]
    }

    /// Returns the last step that begins after at most `samples` samples.
    pub fn step_at(&self, samples: usize) -> usize {
        let begins = |step: usize| self.samples_before(step * self.shape.accumulation);
        // Binary search: step `low` always begins after at most `samples` samples, and every step
        // above `high` begins later.
        let (mut low, mut high) = (0, self.num_steps());
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if begins(middle) <= samples { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Returns the number of tokens in all samples.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Returns the fraction of token positions that is padding, from 0 to below 1 (1 if no sample
    /// has a token).
    pub fn padding(&self) -> f64 {
        1.0 - self.num_tokens as f64 / self.num_padded as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LENGTHS: [usize; 10] = [5, 3, 8, 2, 7, 4, 6, 1, 9, 3];

    fn shape(num_ranks: usize, accumulation: usize) -> StepShape {
        StepShape { num_ranks, accumulation }
    }

    fn all(plan: &EpochPlan) -> Vec<Vec<usize>> {
        let dealt = (0..plan.num_batches())
            .flat_map(|index| (0..plan.shape.num_ranks).map(move |rank| (rank, index)));
        dealt.map(|(rank, index)| plan.batch(rank, index).to_vec()).collect()
    }

    fn plan(budget: TokenBudget, shape: StepShape) -> Vec<Vec<usize>> {
        all(&budget.plan(&LENGTHS, shape, 0).unwrap())
    }

    /// A multiple of 2^-53 in `[0, 1)`.
    fn unit(rng: &mut StableRng) -> f64 {
        rng.below(1 << 53) as f64 / (1_u64 << 53) as f64
    }

    fn lengths_like_reviews(count: usize) -> Vec<usize> {
        // A long tail: most near 150, few up to the cut at 1024.
        let mut rng = StableRng::new(5, 0);
        (0..count).map(|_| (60.0 / (unit(&mut rng) + 0.05)).min(1024.0) as usize + 20).collect()
    }

    /// DeepSpeed sums the lengths of samples without padding, and never takes the last sample: with
    /// a budget of 12 tokens it makes [0,1][2,3][4,5][6,7][8] of these ten samples.
    #[test]
    fn padding_counts_and_the_last_sample_is_taken() {
        let expected: [&[usize]; 8] = [&[0, 1], &[2], &[3], &[4], &[5, 6], &[7], &[8], &[9]];
        assert_eq!(plan(TokenBudget::new(12), StepShape::SINGLE), expected);
        // With a large budget, the two rules agree except for the last sample.
        let expected: [&[usize]; 1] = [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]];
        assert_eq!(plan(TokenBudget::new(90), StepShape::SINGLE), expected);
    }

    #[test]
    fn shortest_first() {
        let budget = TokenBudget { order: PickingOrder::ByLength, ..TokenBudget::new(12) };
        let expected: [&[usize]; 6] = [&[7, 3, 1, 9], &[5, 0], &[6], &[4], &[2], &[8]];
        assert_eq!(plan(budget, StepShape::SINGLE), expected);
    }

    #[test]
    fn rows_are_bounded() {
        let budget = TokenBudget { max_batch_size: Some(3), ..TokenBudget::new(90) };
        let expected: [&[usize]; 4] = [&[0, 1, 2], &[3, 4, 5], &[6, 7, 8], &[9]];
        assert_eq!(plan(budget, StepShape::SINGLE), expected);
    }

    #[test]
    fn large_batches_are_halved_before_empty_ones_are_added() {
        let expected: [&[usize]; 4] = [&[0, 1], &[2, 3, 4], &[5, 6], &[7, 8, 9]];
        assert_eq!(plan(TokenBudget::new(90), shape(2, 2)), expected);
        // No half may have fewer than four rows.
        let budget = TokenBudget { min_batch_size: 4, ..TokenBudget::new(90) };
        let expected: [&[usize]; 4] = [&[0, 1, 2, 3, 4], &[5, 6, 7, 8, 9], &[], &[]];
        assert_eq!(plan(budget, shape(4, 1)), expected);
    }

    #[test]
    fn a_step_of_more_ranks_than_samples_is_filled_up() {
        let plan = TokenBudget::new(8).plan(&[3, 4], shape(3, 1), 0).unwrap();
        assert_eq!((plan.num_steps(), plan.num_batches(), plan.step_samples(0)), (1, 1, 2));
        assert_eq!(all(&plan), [vec![0], vec![1], vec![]]);
    }

    #[test]
    fn samples_without_tokens_take_a_row() {
        let plan = TokenBudget::new(2).plan(&[0, 0, 0, 2], StepShape::SINGLE, 0).unwrap();
        assert_eq!(all(&plan), [vec![0, 1], vec![2], vec![3]]);
        assert_eq!((plan.num_tokens(), plan.num_padded, plan.padding()), (2, 5, 0.6));
    }

    #[test]
    fn what_no_batch_can_meet_is_refused() {
        let budget = TokenBudget::new(8);
        let message = |budget: TokenBudget, lengths: &[usize]| {
            budget.plan(lengths, StepShape::SINGLE, 0).unwrap_err().to_string()
        };
        let over = message(budget, &[3, 9, 10]);
        assert!(
            over.contains("sample 1 has 9 tokens") && over.contains("max_tokens = 8"),
            "{over}"
        );
        let small = message(TokenBudget { min_batch_size: 3, ..budget }, &[3, 1]);
        assert!(small.contains("3 samples of 3 tokens"), "{small}");
        let rows = TokenBudget { min_batch_size: 3, max_batch_size: Some(2), ..budget };
        assert!(message(rows, &[1]).contains("max_batch_size = 2"));
        assert!(message(budget, &[]).contains("empty"));
        assert!(message(TokenBudget::new(0), &[1]).contains("max_tokens = 0"));
        assert!(
            message(TokenBudget { min_batch_size: 0, ..budget }, &[1]).contains("min_batch_size")
        );
        for bad in [shape(0, 1), shape(1, 0), shape(usize::MAX, 2)] {
            assert!(budget.plan(&[1], bad, 0).is_err(), "{bad:?}");
        }
        let huge = TokenBudget { min_batch_size: usize::MAX, ..TokenBudget::new(usize::MAX) };
        assert!(huge.plan(&[2], StepShape::SINGLE, 0).is_err());
    }

    #[test]
    fn random_batches_pad_little_and_mix() {
        let lengths = lengths_like_reviews(5000);
        let budget =
            TokenBudget { order: PickingOrder::Random { seed: 1 }, ..TokenBudget::new(8192) };
        let first = budget.plan(&lengths, shape(2, 2), 0).unwrap();
        assert!(first.padding() < 0.06, "{}", first.padding());
        let as_they_lie = TokenBudget::new(8192).plan(&lengths, shape(2, 2), 0).unwrap();
        assert!(as_they_lie.padding() > 0.5, "{}", as_they_lie.padding());
        // Short and long batches alternate: the mean lengths do not rise throughout.
        let means: Vec<usize> = all(&first)
            .iter()
            .map(|batch| batch.iter().map(|&s| lengths[s]).sum::<usize>() / batch.len())
            .collect();
        let rises = means.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!(
            (means.len() / 3..2 * means.len() / 3).contains(&rises),
            "{rises} of {}",
            means.len()
        );
        // Another epoch has other batches.
        let second = budget.plan(&lengths, shape(2, 2), 1).unwrap();
        assert_ne!(all(&first), all(&second));
        assert_eq!(all(&first), all(&budget.plan(&lengths, shape(2, 2), 0).unwrap()));
    }

    fn order() -> impl Strategy<Value = PickingOrder> {
        prop_oneof![
            Just(PickingOrder::Sequential),
            Just(PickingOrder::ByLength),
            any::<u64>().prop_map(|seed| PickingOrder::Random { seed }),
        ]
    }

    prop_compose! {
        fn budget_and_lengths()(
            lengths in proptest::collection::vec(0usize..50, 1..200),
            min in 1usize..5,
            room in 0usize..100,
            more_rows in proptest::option::of(0usize..20),
            order in order(),
        ) -> (TokenBudget, Vec<usize>) {
            let longest = width(lengths.iter().copied().max().unwrap());
            let max_tokens = min * longest + room;
            let max_batch_size = more_rows.map(|more| min + more);
            (TokenBudget { max_tokens, min_batch_size: min, max_batch_size, order }, lengths)
        }
    }

    proptest! {
        #[test]
        fn every_sample_once_within_the_budget(
            (budget, lengths) in budget_and_lengths(),
            num_ranks in 1usize..=4,
            accumulation in 1usize..4,
            epoch in 0u64..3,
        ) {
            let plan = budget.plan(&lengths, shape(num_ranks, accumulation), epoch).unwrap();
            prop_assert_eq!(plan.num_batches(), plan.num_steps() * accumulation);
            let batches = all(&plan);
            prop_assert_eq!(batches.len(), plan.num_batches() * num_ranks);

            let mut padded = 0;
            let mut small = 0;
            for batch in &batches {
                let longest = batch.iter().map(|&sample| width(lengths[sample])).max().unwrap_or(0);
                prop_assert!(batch.len() * longest <= budget.max_tokens);
                prop_assert!(budget.max_batch_size.is_none_or(|max| batch.len() <= max));
                small += usize::from(!batch.is_empty() && batch.len() < budget.min_batch_size);
                padded += (batch.len() * longest) as u64;
            }
            prop_assert!(small <= 1, "more than the rest is below the smallest batch");
            prop_assert_eq!(plan.num_padded, padded);
            prop_assert!((0.0..=1.0).contains(&plan.padding()));

            let empty = batches.iter().rev().take_while(|batch| batch.is_empty()).count();
            prop_assert!(empty < num_ranks * accumulation);
            prop_assert!(batches[..batches.len() - empty].iter().all(|batch| !batch.is_empty()));

            let mut seen: Vec<usize> = batches.into_iter().flatten().collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..lengths.len()));
            let steps: Vec<usize> = (0..plan.num_steps()).map(|step| plan.step_samples(step)).collect();
            prop_assert!(steps.iter().all(|&samples| samples > 0));
            prop_assert_eq!(steps.iter().sum::<usize>(), lengths.len());
        }

        #[test]
        fn the_sample_order_does_not_depend_on_the_number_of_ranks(
            (budget, lengths) in budget_and_lengths(),
            num_ranks in 1usize..=4,
            accumulation in 1usize..4,
        ) {
            let one = budget.plan(&lengths, StepShape::SINGLE, 7).unwrap();
            let many = budget.plan(&lengths, shape(num_ranks, accumulation), 7).unwrap();
            prop_assert_eq!(&one.batches.samples, &many.batches.samples);
            prop_assert!(many.num_padded <= one.num_padded);
            for samples in 0..=lengths.len() {
                let step = many.step_at(samples);
                let before = |step: usize| many.samples_before(step * accumulation);
                prop_assert!(before(step) <= samples);
                prop_assert!(step == many.num_steps() || before(step + 1) > samples);
            }
        }
    }
}
