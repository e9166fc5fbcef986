//! The size of a micro-batch.

use deepburn_ops::logits_chunk_rows;

/// The maximum size of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// The number of sequences.
    pub sequences: u64,
    /// The number of tokens per sequence, including padding.
    pub length: u64,
}

impl BatchShape {
    /// Returns the number of positions that predict a next token, at least 1.
    #[must_use]
    pub fn targets(self) -> u64 {
        // The last position of a sequence predicts nothing. A batch without targets still computes
        // one row, with weight 0. Absurd sizes saturate, because a small wrapped estimate would
        // look feasible.
        self.sequences.saturating_mul(self.length.saturating_sub(1)).max(1)
    }

    /// Returns the size in bytes of one chunk of f32 logits. The language-model loss computes the
    /// logits in such chunks.
    pub(crate) fn logits_bytes(self, vocab_size: usize) -> u64 {
        let rows = logits_chunk_rows(self.targets() as usize, vocab_size) as u64;
        rows.saturating_mul(4 * vocab_size.max(1) as u64)
    }
}
