//! The results of a language-model head with its loss, and the size of its chunks of logits.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// One value for each input of the head that may need a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadGradients<T> {
    /// For the hidden states, `[tokens, width]`.
    pub hidden: T,
    /// For the weight, `[vocab, width]`.
    pub weight: T,
}

/// The loss of a language-model head.
#[derive(Debug)]
pub struct HeadLoss<B: Backend> {
    /// The sum over the tokens, `[1]`, in at least f32.
    pub loss: FloatTensor<B>,
    /// The gradients of the sum, in at least f32.
    pub gradients: HeadGradients<Option<FloatTensor<B>>>,
}

/// The maximum size of a chunk's f32 logits in bytes. Only a single row may exceed it.
const CHUNK_BYTES: usize = 64 << 20;

/// Returns the number of rows of logits, one per token, that
/// [`linear_cross_entropy`](crate::linear_cross_entropy) computes at a time. If the f32 logits
/// exceed 64 MiB, they are divided into chunks of about equal size. The result depends only on the
/// arguments, so sums are always added in the same order.
pub fn logits_chunk_rows(tokens: usize, vocab: usize) -> usize {
    rows_within(CHUNK_BYTES, tokens, 4 * vocab)
}

/// Divides `tokens` rows of `row_bytes` bytes into chunks of about equal size, each of at most
/// `bytes` bytes or of one row, and returns the number of rows of a chunk.
pub(crate) fn rows_within(bytes: usize, tokens: usize, row_bytes: usize) -> usize {
    let most = (bytes / row_bytes.max(1)).max(1);
    tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fit_into_their_memory_and_have_about_equal_sizes() {
        for tokens in [0, 1, 7, 1000, 4096, 100_000] {
            for vocab in [0, 1, 256, 50_257, 250_000, 20_000_000] {
                let rows = logits_chunk_rows(tokens, vocab);
                assert!(rows >= 1 && rows <= tokens.max(1));
                assert!(rows == 1 || 4 * rows * vocab <= CHUNK_BYTES, "{tokens} {vocab}: {rows}");
                // With the same number of chunks, no smaller size covers all tokens.
                let chunks = tokens.div_ceil(rows);
                assert!(rows == 1 || (rows - 1) * chunks < tokens, "{tokens} {vocab}: {rows}");
            }
        }
    }
}
