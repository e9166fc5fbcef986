//! Counts of rows, samples and tokens, for diagnoses.

/// The numbers of tokens of rows, in ranges of powers of two.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LengthHistogram {
    /// The number of rows with 0 tokens, with 1, with 2 to 3, with 4 to 7, and so on.
    counts: Vec<usize>,
    /// The largest number of tokens.
    longest: usize,
    /// The sum of the numbers of tokens.
    tokens: u64,
    /// The number of rows.
    rows: usize,
}

impl LengthHistogram {
    /// Counts a row of `length` tokens.
    pub(crate) fn add(&mut self, length: usize) {
        // The number of binary digits: 0 for 0, 1 for 1, 2 for 2 and 3, and so on.
        let at = (usize::BITS - length.leading_zeros()) as usize;
        self.counts.resize(self.counts.len().max(at + 1), 0);
        self.counts[at] += 1;
        self.longest = self.longest.max(length);
        self.tokens += length as u64;
        self.rows += 1;
    }

    /// Returns the ranges of lengths as their first and last length and the number of rows. The
    /// last range ends with the longest row.
    pub fn ranges(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.counts.iter().enumerate().map(|(at, count)| match at.checked_sub(1) {
            None => (0, 0, *count),
            Some(power) => (1 << power, ((2 << power) - 1).min(self.longest), *count),
        })
    }

    /// Returns the largest number of tokens of a row.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Returns the mean number of tokens of a row; 0 without rows.
    pub fn mean(&self) -> f64 {
        self.tokens as f64 / self.rows.max(1) as f64
    }

    /// Returns the share of tokens in rows that are all padded to `length` tokens: the efficiency
    /// of packing; 0 without rows.
    pub fn efficiency(&self, length: usize) -> f64 {
        self.tokens as f64 / (self.rows * length).max(1) as f64
    }
}

/// What became of the samples of a split.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SampleStatistics {
    /// Samples of the split, before any is dropped.
    pub samples: usize,
    /// Samples that were truncated to the maximum length.
    pub truncated: usize,
    /// The samples that were dropped because no token is trained, after truncation.
    /// [`Samples::place`](crate::Samples::place) returns their rows. Packing drops none.
    pub dropped: Vec<usize>,
    /// Samples that have no trained token, although they are not dropped, because they are packed
    /// with others.
    pub untrained: usize,
    /// Rows of the training data.
    pub rows: usize,
    /// Tokens in all rows.
    pub tokens: u64,
    /// Tokens that the loss includes: trained tokens with a token before them.
    pub trained_tokens: u64,
    /// The lengths of the samples, before truncation.
    pub sample_lengths: LengthHistogram,
    /// The lengths of the rows.
    pub row_lengths: LengthHistogram,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_counted_by_powers_of_two() {
        let mut histogram = LengthHistogram::default();
        [0, 1, 2, 3, 4, 9].into_iter().for_each(|length| histogram.add(length));
        let ranges: Vec<_> = histogram.ranges().collect();
        assert_eq!(ranges, [(0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 1), (8, 9, 1)]);
        assert_eq!((histogram.longest(), histogram.mean()), (9, 19.0 / 6.0));
        assert_eq!(histogram.efficiency(10), 19.0 / 60.0);
        assert_eq!(LengthHistogram::default().efficiency(10), 0.0);
        assert_eq!(LengthHistogram::default().ranges().count(), 0);
    }
}
