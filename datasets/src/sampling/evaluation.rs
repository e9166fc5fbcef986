//! Evaluation: every sample once, and the same number of batches on every rank.
//!
//! Ranks take part in collectives while they evaluate, so the other ranks would wait forever for a
//! rank with fewer batches. [`EvaluationBatches`] therefore pads missing rows and missing batches,
//! which do not contribute to the loss ([`crate::IGNORE_INDEX`] labels). A batch stores how many of
//! its rows are samples.

use crate::error::check_positive;
use crate::{Collate, DataShard, Result};

/// The evaluation batches of rank `r` of `W`: samples `r, r + W, ...`, in order.
#[derive(Debug)]
pub struct EvaluationBatches<'a, D> {
    /// The data set.
    data: &'a D,
    /// This rank and the number of ranks.
    shard: DataShard,
    /// Rows of a batch.
    rows: usize,
    /// The number of samples to evaluate, from the first sample on.
    samples: usize,
    /// The index of the next batch.
    next: usize,
}

impl<'a, D: Collate> EvaluationBatches<'a, D> {
    /// Creates batches of `rows` rows. With fewer samples than ranks, some ranks have only padding.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`](crate::DataError::Setting) if the shard is invalid or `rows`
    /// is 0.
    pub fn new(data: &'a D, shard: DataShard, rows: usize) -> Result<Self> {
        check_positive("evaluation batch size", rows)?;
        Ok(Self { data, shard: shard.validate()?, rows, samples: data.num_samples(), next: 0 })
    }

    /// Limits the evaluation to the first `limit` samples, counted over all ranks; `None` for no
    /// limit.
    pub fn take_samples(self, limit: Option<usize>) -> Self {
        // Without a sample, an evaluation would have no result.
        let samples = limit.map_or(self.samples, |limit| self.samples.min(limit.max(1)));
        Self { samples, ..self }
    }

    /// Returns the number of batches, which is the same on every rank: `ceil(ceil(n / W) / rows)`.
    pub fn num_batches(&self) -> usize {
        self.samples.div_ceil(self.shard.num_ranks).div_ceil(self.rows)
    }
}

impl<D: Collate> Iterator for EvaluationBatches<'_, D> {
    type Item = Result<D::Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.num_batches() {
            return None;
        }
        let own = (self.shard.rank..self.samples).step_by(self.shard.num_ranks);
        let samples: Vec<usize> = own.skip(self.next * self.rows).take(self.rows).collect();
        self.next += 1;
        Some(self.data.collate(&samples, self.rows))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.num_batches() - self.next;
        (left, Some(left))
    }
}

impl<D: Collate> ExactSizeIterator for EvaluationBatches<'_, D> {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{MicroBatch, Sequences, TokenStream};

    fn evaluate(num_samples: usize, shard: DataShard, rows: usize) -> Vec<MicroBatch> {
        let stream = TokenStream::Owned((0..2 * num_samples as u32).collect());
        let data = Sequences::pack(stream, 2, "stream").unwrap();
        let batches = EvaluationBatches::new(&data, shard, rows).unwrap();
        let announced = batches.num_batches();
        let batches: Vec<_> = batches.map(Result::unwrap).collect();
        assert_eq!(batches.len(), announced);
        batches
    }

    #[test]
    fn ranks_without_samples_take_part_with_padding() {
        let batches = evaluate(1, DataShard { rank: 2, num_ranks: 3 }, 4);
        assert_eq!(batches.len(), 1);
        assert_eq!((batches[0].samples, batches[0].num_targets()), (0, 0));
        assert_eq!(batches[0].shape, [4, 2]);
    }

    #[test]
    fn a_limit_takes_the_first_samples_of_all_ranks() {
        let stream = TokenStream::Owned((0..20).collect());
        let data = Sequences::pack(stream, 2, "stream").unwrap();
        for (limit, expected) in [(Some(5), 5), (Some(50), 10), (None, 10), (Some(1), 1)] {
            let mut seen = Vec::new();
            let mut lengths = Vec::new();
            for rank in 0..3 {
                let shard = DataShard { rank, num_ranks: 3 };
                let batches = EvaluationBatches::new(&data, shard, 2).unwrap().take_samples(limit);
                lengths.push(batches.len());
                for batch in batches.map(Result::unwrap) {
                    let real = batch.input_ids.chunks(2).take(batch.samples);
                    seen.extend(real.map(|row| row[0] as usize / 2));
                }
            }
            assert!(lengths.iter().all(|length| *length == lengths[0]));
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..expected), "{limit:?}");
        }
    }

    #[test]
    fn no_rows_and_no_such_rank_are_refused() {
        let stream = TokenStream::Owned(vec![1, 2]);
        let data = Sequences::pack(stream, 2, "stream").unwrap();
        assert!(EvaluationBatches::new(&data, DataShard::WHOLE, 0).is_err());
        assert!(EvaluationBatches::new(&data, DataShard { rank: 1, num_ranks: 1 }, 1).is_err());
    }

    proptest! {
        #[test]
        fn every_sample_counts_once(n in 1usize..50, world in 1usize..6, rows in 1usize..6) {
            let mut seen = Vec::new();
            let mut lengths = Vec::new();
            for rank in 0..world {
                let batches = evaluate(n, DataShard { rank, num_ranks: world }, rows);
                lengths.push(batches.len());
                for batch in batches {
                    prop_assert_eq!(batch.shape, [rows, 2]);
                    prop_assert_eq!(batch.num_targets(), batch.samples);
                    let real = batch.input_ids.chunks(2).take(batch.samples);
                    seen.extend(real.map(|row| row[0] as usize / 2));
                }
            }
            prop_assert!(lengths.iter().all(|&length| length == lengths[0]));
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..n));
        }
    }
}
