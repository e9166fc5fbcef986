//! The dimensions of an attention, and the keys that each query attends to.

use std::ops::Range;
use std::sync::Arc;

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
    Since(Arc<[usize]>),
    /// The first keys of the query's sequence; the others are padding. The list contains the length
    /// of each sequence. A length of 0 counts as 1.
    Lengths(Arc<[usize]>),
}

impl AttentionMask {
    /// Returns the keys, out of `positions`, that query `query` of sequence `sequence` attends to.
    /// There is at least one.
    ///
    /// # Panics
    ///
    /// Panics if a list is shorter than the batch.
    pub(crate) fn seen(&self, sequence: usize, query: usize, positions: usize) -> Range<usize> {
        let end = query + 1;
        match self {
            Self::Causal => 0..end,
            Self::Window(window) => end.saturating_sub(*window).min(query)..end,
            Self::Since(first) => first[sequence * positions + query].min(query)..end,
            Self::Lengths(lengths) => 0..lengths[sequence].clamp(1, positions.max(1)),
        }
    }

    /// Returns the keys, out of `positions`, that any of the queries `rows` of a sequence attends
    /// to.
    ///
    /// # Panics
    ///
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
