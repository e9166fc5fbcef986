//! The dimensions of an attention, and the keys that each query attends to.

use std::sync::Arc;

/// The number of query rows whose scores exist at the same time.
pub(crate) const QUERY_BLOCK: usize = 128;

/// The keys that a query attends to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionMask {
    /// Keys up to the query's own position.
    Causal,
    /// The first keys of the query's sequence; the others are padding. The list contains the length
    /// of each sequence. A length of 0 counts as 1.
    Lengths(Arc<[usize]>),
}

impl AttentionMask {
    /// Returns the number of keys, out of `positions`, that query `query` of sequence `sequence`
    /// attends to.
    ///
    /// # Panics
    ///
    /// Panics if the list of lengths is shorter than the batch.
    pub(crate) fn seen(&self, sequence: usize, query: usize, positions: usize) -> usize {
        match self {
            Self::Causal => query + 1,
            Self::Lengths(lengths) => lengths[sequence].clamp(1, positions.max(1)),
        }
    }

    /// Returns the number of keys, out of `positions`, that a block of queries up to `end` has to be
    /// multiplied with.
    pub(crate) fn keys(&self, end: usize, positions: usize) -> usize {
        match self {
            Self::Causal => end,
            Self::Lengths(_) => positions,
        }
    }
}

/// The dimensions and options of an attention.
#[derive(Debug, Clone, PartialEq)]
pub struct SelfAttention {
    /// The number of sequences.
    pub batch: usize,
    /// The number of heads. The width of a head is the model's width divided by this number.
    pub heads: usize,
    /// The factor by which the scores are multiplied.
    pub scale: f64,
    /// Whether 16-bit queries and keys are multiplied in f32 even if this is slower. The flex
    /// kernels always accumulate in f32.
    pub upcast: bool,
    /// The keys that a query attends to.
    pub mask: AttentionMask,
}
