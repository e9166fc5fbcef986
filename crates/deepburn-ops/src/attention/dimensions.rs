//! The dimensions of an attention, and the keys that each query attends to.

use std::ops::Range;

use super::key_list::KeyList;

/// The number of query rows whose scores exist at the same time.
pub(crate) const QUERY_BLOCK: usize = 128;

/// The keys that a query attends to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionMask {
    /// Keys up to the query's own position.
    Causal,
    /// The query's own position and the positions before it, this many in all. At least 1.
    Window(usize),
    /// Keys from a first position up to the query's own. The list contains the first position of
    /// each query, sequence after sequence. Used for sequences that consist of several documents,
    /// and for padding before a sequence. A query that is before its first position attends to
    /// itself.
    Since(KeyList),
    /// The first keys of the query's sequence; the others are padding. The list contains the length
    /// of each sequence. A length of 0 counts as 1.
    Lengths(KeyList),
}

impl AttentionMask {
    /// Returns the keys, out of `positions`, that query `query` of sequence `sequence` attends to.
    /// There is at least one.
    ///
    /// # Panics
    /// Panics if a list is shorter than the batch.
    pub(crate) fn seen(&self, sequence: usize, query: usize, positions: usize) -> Range<usize> {
        let end = query + 1;
        match self {
            Self::Causal => 0..end,
            // A window of 0 counts as 1: softmax needs a key.
            Self::Window(window) => end.saturating_sub(*window).min(query)..end,
            Self::Since(first) => first[sequence * positions + query].min(query)..end,
            Self::Lengths(lengths) => 0..lengths[sequence].clamp(1, positions.max(1)),
        }
    }

    /// Returns the keys, out of `positions`, that any of the queries `rows` of a sequence attends
    /// to.
    ///
    /// # Panics
    /// Panics if a list is shorter than the batch.
    pub(crate) fn keys(
        &self,
        sequence: usize,
        rows: &Range<usize>,
        positions: usize,
    ) -> Range<usize> {
        match self {
            Self::Causal => 0..rows.end,
            Self::Window(_) => self.seen(sequence, rows.start, positions).start..rows.end,
            Self::Since(_) => {
                // The list may have any order, so every query is asked for its first key.
                let first = rows.clone().map(|row| self.seen(sequence, row, positions).start);
                first.min().unwrap_or(rows.start)..rows.end
            }
            Self::Lengths(_) => 0..positions,
        }
    }
}

/// The dimensions and options of an attention.
#[derive(Debug, Clone, PartialEq)]
pub struct SelfAttention {
    /// The number of sequences.
    pub batch: usize,
    /// The number of heads.
    pub heads: usize,
    /// The number of heads of the keys and values, a divisor of `heads`. Consecutive heads share
    /// the same keys and values (grouped-query attention, Ainslie et al. 2023).
    pub key_value_heads: usize,
    /// The factor by which the scores are multiplied.
    pub scale: f64,
    /// The scores are limited to this value, as `cap * tanh(score / cap)`, before they are masked.
    pub soft_cap: Option<f64>,
    /// Whether 16-bit queries and keys are multiplied in f32 even if this is slower. The flex
    /// kernels always accumulate in f32.
    pub upcast: bool,
    /// The keys that a query attends to.
    pub mask: AttentionMask,
}

impl SelfAttention {
    /// Returns the number of heads in a row of queries, keys and values.
    pub(crate) fn projected_heads(&self) -> usize {
        self.heads + 2 * self.key_value_heads
    }

    /// Returns the width of a row of the result for a row of `columns` queries, keys and values.
    #[must_use]
    pub fn output_width(&self, columns: usize) -> usize {
        columns / self.projected_heads() * self.heads
    }

    /// Returns the first of the key heads, and the first of the value heads, among all heads of a
    /// row.
    pub(crate) fn first_heads(&self) -> [usize; 2] {
        [self.heads, self.heads + self.key_value_heads]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POSITIONS: usize = 10;

    /// Returns masks for two sequences of [`POSITIONS`] positions.
    fn masks() -> [AttentionMask; 6] {
        let first: Vec<usize> = (0..2 * POSITIONS).map(|row| row % POSITIONS / 4 * 4).collect();
        [
            AttentionMask::Causal,
            AttentionMask::Window(0),
            AttentionMask::Window(3),
            AttentionMask::Window(2 * POSITIONS),
            AttentionMask::Since(first.into()),
            AttentionMask::Lengths([0, 7].into()),
        ]
    }

    #[test]
    fn every_query_sees_a_key() {
        for mask in masks() {
            for (sequence, query) in (0..2).flat_map(|it| (0..POSITIONS).map(move |row| (it, row)))
            {
                let seen = mask.seen(sequence, query, POSITIONS);
                assert!(!seen.is_empty() && seen.end <= POSITIONS, "{mask:?} {sequence} {query}");
                let is_causal = !matches!(mask, AttentionMask::Lengths(_));
                assert!(!is_causal || seen.end == query + 1, "{mask:?} {query}");
            }
        }
        // A first position behind the query, as in padding before a sequence.
        let mask = AttentionMask::Since([5; 6].into());
        assert_eq!(mask.seen(0, 2, 6), 2..3);
    }

    #[test]
    fn the_keys_of_a_block_contain_the_keys_of_its_queries() {
        for mask in masks() {
            for (start, end) in
                (0..POSITIONS).flat_map(|a| (a + 1..=POSITIONS).map(move |b| (a, b)))
            {
                for sequence in 0..2 {
                    let keys = mask.keys(sequence, &(start..end), POSITIONS);
                    let seen = (start..end).map(|query| mask.seen(sequence, query, POSITIONS));
                    for seen in seen {
                        assert!(keys.start <= seen.start && seen.end <= keys.end, "{mask:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn heads_of_keys_and_values_follow_the_heads_of_queries() {
        let attention = SelfAttention {
            batch: 1,
            heads: 6,
            key_value_heads: 2,
            scale: 1.0,
            soft_cap: None,
            upcast: false,
            mask: AttentionMask::Causal,
        };
        assert_eq!((attention.projected_heads(), attention.first_heads()), (10, [6, 8]));
        assert_eq!(attention.output_width(10 * 16), 6 * 16);
    }
}
