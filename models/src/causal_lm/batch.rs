//! Validated batches of token sequences for language models.
//!
//! Main type: [`CausalBatch`]. Reading values back from a device tensor is slow, so lengths, token
//! ids and labels are checked here on the host, before any tensor is created.
//!
//! ```text
//! input ids    t0 t1 t2 t3           one sequence of a batch
//! labels       t0 t1 t2 -100         the token at each position, or ignored
//! positions     0  1                 positions whose next label counts
//! targets      t1 t2                 the tokens that they should predict
//! ```
//!
//! The last position of a sequence has no target, because the next token in the batch belongs to
//! another sequence.

use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use thiserror::Error;

use crate::architecture::{LanguageModelConfig, TokenLimits};

/// The label of a position that the loss ignores, as in `transformers`.
pub const IGNORED_LABEL: i64 = -100;

/// A batch of token sequences of equal length, with the target token of each position.
#[derive(Clone, Debug)]
pub struct CausalBatch<B: Backend> {
    /// `[batch, length]`.
    pub(crate) input_ids: Tensor<B, 2, Int>,
    /// The rows of the flattened `[batch * length]` stream that have a target; never empty.
    pub(crate) positions: Tensor<B, 1, Int>,
    /// `[positions]`: the target token of each entry of `positions`.
    pub(crate) targets: Tensor<B, 1, Int>,
    /// The number of positions with a target in each sequence; at least one place is counted in the
    /// whole batch.
    pub(crate) rows_of_sequences: Arc<[usize]>,
    /// The number of positions with a target. It is 0 if all labels of the batch are ignored,
    /// although `positions` then has one entry.
    tokens: usize,
    /// The first position of the document of each row of `[batch * length]`; `None` if every
    /// sequence is one document.
    pub(crate) document_starts: Option<Arc<[usize]>>,
    /// The weight of the mean over the vocabulary in the loss; 0 without label smoothing.
    pub(crate) label_smoothing: f64,
}

/// The reason why tokens are rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InputError {
    /// No sequences, or sequences of no tokens.
    #[error("a batch of {batch} sequences of {length} tokens is empty; both must be at least 1")]
    Empty {
        /// Number of sequences.
        batch: usize,
        /// Tokens in each.
        length: usize,
    },
    /// The number of values does not match the shape.
    #[error("{found} {what} given for {batch} sequences of {length} tokens, {expected} needed")]
    Count {
        /// "input ids", "labels" or "document starts".
        what: &'static str,
        /// The number of values given.
        found: usize,
        /// The number of values required.
        expected: usize,
        /// Number of sequences.
        batch: usize,
        /// Tokens in each.
        length: usize,
    },
    /// The sequences are longer than the model supports.
    #[error(
        "sequences of {length} tokens are longer than the model allows (`{field}` = {max_len}); \
         shorten them"
    )]
    TooLong {
        /// Tokens in each sequence.
        length: usize,
        /// The longest that the model supports.
        max_len: usize,
        /// The field of `config.json` that contains `max_len`.
        field: &'static str,
    },
    /// The starts of documents contradict each other.
    #[error(
        "document start {start} (sequence {sequence}, position {position}) is neither this position nor the start of the \
         token before it"
    )]
    Document {
        /// The start.
        start: usize,
        /// Its sequence in the batch, from 0.
        sequence: usize,
        /// Its position in the sequence, from 0.
        position: usize,
    },
    /// A token or label is outside the vocabulary.
    #[error(
        "{what} {value} (sequence {sequence}, position {position}) is not in the model's vocabulary \
         (`vocab_size` = {vocab_size}); is the tokenizer the model's own?"
    )]
    Token {
        /// "input id" or "label".
        what: &'static str,
        /// The value.
        value: i64,
        /// Its sequence in the batch, from 0.
        sequence: usize,
        /// Its position in the sequence, from 0.
        position: usize,
        /// The vocabulary size; valid ids are smaller.
        vocab_size: usize,
    },
}

impl<B: Backend> CausalBatch<B> {
    /// Returns a batch of `[batch, length]` tokens for models with this `config`. The ids are given
    /// row by row.
    ///
    /// `labels` contains one token per position and is not shifted, as in `transformers`: position
    /// `p` of a sequence learns to predict label `p + 1` of the same sequence, unless that label is
    /// [`IGNORED_LABEL`]. `None` uses the inputs as labels.
    ///
    /// # Errors
    /// Returns [`InputError`] if the number of ids or labels, the length, or a token is invalid.
    pub fn new(
        config: &impl LanguageModelConfig,
        input_ids: &[u32],
        labels: Option<&[i64]>,
        [batch, length]: [usize; 2],
        device: &B::Device,
    ) -> Result<Self, InputError> {
        let size = BatchLimits { limits: config.limits(), batch, length };
        size.check_tokens(input_ids)?;
        Self::checked(size, input_ids, labels, device)
    }

    /// Returns a batch like [`new`](Self::new) with sequences that consist of several documents,
    /// one after the other.
    ///
    /// A token attends to its own document only, and positions are counted from the start of the
    /// document. `starts` has the position in its sequence of the first token of the document, for
    /// each of `[batch, length]` tokens. Only the documents, and not the sequences, have to be
    /// short enough for the model.
    ///
    /// A document's first token should have the label [`IGNORED_LABEL`], because the token before
    /// it belongs to another document.
    ///
    /// # Errors
    /// Returns [`InputError`] like [`new`](Self::new), and if the starts contradict each other.
    pub fn of_documents(
        config: &impl LanguageModelConfig,
        input_ids: &[u32],
        labels: Option<&[i64]>,
        starts: Arc<[usize]>,
        [batch, length]: [usize; 2],
        device: &B::Device,
    ) -> Result<Self, InputError> {
        let size = BatchLimits { limits: config.limits(), batch, length };
        size.check_count("document starts", starts.len())?;
        // Positions restart with each document, so only the longest one has to fit the model. A
        // batch without tokens has no starts, so nothing is divided by a length of 0 before
        // `check_length` refuses it.
        let longest = longest_document(&starts, length)?;
        BatchLimits { length: longest, ..size }.check_length()?;
        size.check_ids(input_ids)?;
        let batch = Self::checked(size, input_ids, labels, device)?;
        Ok(Self { document_starts: Some(starts), ..batch })
    }

    /// Returns the batch of checked tokens.
    fn checked(
        size: BatchLimits,
        input_ids: &[u32],
        labels: Option<&[i64]>,
        device: &B::Device,
    ) -> Result<Self, InputError> {
        let BatchLimits { batch, length, .. } = size;
        if let Some(labels) = labels {
            size.check_labels(labels)?;
        }
        let label =
            |index: usize| labels.map_or(i64::from(input_ids[index]), |labels| labels[index]);
        //= transformers 5.23.0 loss/loss_utils.py ForCausalLMLoss
        let (mut positions, mut targets): (Vec<i32>, Vec<i32>) = (0..batch * length)
            .filter(|row| (row + 1) % length != 0 && label(row + 1) != IGNORED_LABEL)
            // `check_count` rejects batches of 2^31 or more tokens, and ids are below 2^24, so both
            // casts are exact.
            .map(|row| (row as i32, label(row + 1) as i32))
            .unzip();
        let mut rows_of_sequences = vec![0; batch];
        positions.iter().for_each(|row| rows_of_sequences[*row as usize / length] += 1);
        let tokens = positions.len();
        if tokens == 0 {
            // One row with weight 0 keeps tensors non-empty. The model then runs the same ops, and
            // with sharding the same collectives, as for any other batch; a rank that skipped them
            // would block the others.
            (positions, targets) = (vec![0], vec![0]);
            rows_of_sequences[0] = 1;
        }
        let rows = positions.len();
        Ok(Self {
            input_ids: id_tensor(input_ids, [batch, length], device),
            positions: Tensor::from_data(TensorData::new(positions, [rows]), device),
            targets: Tensor::from_data(TensorData::new(targets, [rows]), device),
            rows_of_sequences: rows_of_sequences.into(),
            tokens,
            document_starts: None,
            label_smoothing: 0.0,
        })
    }

    /// Returns the batch with label smoothing: the loss of a target is `1 - factor` times its
    /// negative log-likelihood, plus `factor` times the mean of `-log(p)` over the vocabulary.
    /// `factor` is from 0 to below 1; 0 changes nothing.
    #[must_use]
    pub fn with_label_smoothing(self, factor: f64) -> Self {
        Self { label_smoothing: factor, ..self }
    }

    /// Returns the token ids, `[batch, length]`.
    #[must_use]
    pub fn input_ids(&self) -> Tensor<B, 2, Int> {
        self.input_ids.clone()
    }

    /// Returns the number of positions with a target in each sequence.
    pub fn tokens_of_sequences(&self) -> impl Iterator<Item = usize> {
        // `rows_of_sequences` also counts the row with weight 0, which has no target.
        let none = self.tokens == 0;
        self.rows_of_sequences.iter().map(move |rows| if none { 0 } else { *rows })
    }

    /// Returns the number of positions with a target, which is the weight of this batch in an
    /// average over batches.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Returns the length of the longest document of sequences of `length` tokens.
///
/// # Errors
/// Returns [`InputError::Document`] unless each token starts a document or continues the document
/// of the token before it.
fn longest_document(starts: &[usize], length: usize) -> Result<usize, InputError> {
    let mut longest = 0;
    for (row, start) in starts.iter().enumerate() {
        let (sequence, position) = (row / length, row % length);
        let continues = position > 0 && starts[row - 1] == *start;
        if !continues && *start != position {
            return Err(InputError::Document { start: *start, sequence, position });
        }
        longest = longest.max(position + 1 - start);
    }
    Ok(longest)
}

/// The size of a batch and the limits of its model, with which token ids and labels are checked.
#[derive(Clone, Copy)]
pub(crate) struct BatchLimits {
    /// The limits of the model.
    pub(crate) limits: TokenLimits,
    /// The number of sequences.
    pub(crate) batch: usize,
    /// The number of tokens of each sequence.
    pub(crate) length: usize,
}

impl BatchLimits {
    /// Checks token ids against the model's vocabulary and length.
    ///
    /// # Errors
    /// Returns [`InputError`] if the batch is empty, a sequence is too long, the number of ids is
    /// wrong, or an id is outside the vocabulary.
    pub(crate) fn check_tokens(self, input_ids: &[u32]) -> Result<(), InputError> {
        self.check_length()?;
        self.check_ids(input_ids)
    }

    /// Checks the length of sequences, or of documents.
    ///
    /// # Errors
    /// Returns [`InputError`] if there is no token, or if a sequence is too long.
    fn check_length(self) -> Result<(), InputError> {
        let Self { limits, batch, length } = self;
        if batch == 0 || length == 0 {
            return Err(InputError::Empty { batch, length });
        }
        let TokenLimits { max_len, max_len_field: field, .. } = limits;
        if length > max_len {
            return Err(InputError::TooLong { length, max_len, field });
        }
        Ok(())
    }

    /// Checks the number of token ids, and the ids against the model's vocabulary.
    ///
    /// # Errors
    /// Returns [`InputError`] if the number of ids is wrong, or an id is outside the vocabulary.
    fn check_ids(self, input_ids: &[u32]) -> Result<(), InputError> {
        self.check_count("input ids", input_ids.len())?;
        self.check_known("input id", input_ids.iter().map(|id| i64::from(*id)))
    }

    /// Checks labels against the model's vocabulary. [`IGNORED_LABEL`] is the only accepted value
    /// outside the vocabulary.
    ///
    /// # Errors
    /// Returns [`InputError`] if the number of labels is wrong, or a label is outside the
    /// vocabulary.
    fn check_labels(self, labels: &[i64]) -> Result<(), InputError> {
        self.check_count("labels", labels.len())?;
        self.check_known("label", labels.iter().copied())
    }

    /// Checks that values are tokens of the model's vocabulary, or [`IGNORED_LABEL`], which no
    /// input id is.
    fn check_known(
        self,
        what: &'static str,
        values: impl Iterator<Item = i64>,
    ) -> Result<(), InputError> {
        let Self { limits: TokenLimits { vocab_size, .. }, length, .. } = self;
        let is_known = |value: i64| {
            value == IGNORED_LABEL || usize::try_from(value).is_ok_and(|id| id < vocab_size)
        };
        match values.enumerate().find(|(_, value)| !is_known(*value)) {
            None => Ok(()),
            Some((index, value)) => {
                let (sequence, position) = (index / length, index % length);
                Err(InputError::Token { what, value, sequence, position, vocab_size })
            }
        }
    }

    /// Checks that there is one value per position, and that position indices fit in 32 bits.
    fn check_count(self, what: &'static str, found: usize) -> Result<(), InputError> {
        let Self { batch, length, .. } = self;
        let expected = batch.saturating_mul(length);
        if found == expected && i32::try_from(expected).is_ok() {
            return Ok(());
        }
        Err(InputError::Count { what, found, expected, batch, length })
    }
}

/// Returns token ids, which are below 2^24, as a tensor.
pub(crate) fn id_tensor<B: Backend>(
    ids: &[u32],
    shape: [usize; 2],
    device: &B::Device,
) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    Tensor::from_data(TensorData::new(ids, shape), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt2::Gpt2Config;
    use burn_flex::Flex;

    fn config() -> Gpt2Config {
        Gpt2Config { vocab_size: 10, n_positions: 4, ..Gpt2Config::small() }
    }

    fn batch(
        ids: &[u32],
        labels: Option<&[i64]>,
        shape: [usize; 2],
    ) -> Result<CausalBatch<Flex>, InputError> {
        CausalBatch::new(&config(), ids, labels, shape, &Default::default())
    }

    fn ints<const D: usize>(tensor: Tensor<Flex, D, Int>) -> Vec<i32> {
        tensor.into_data().to_vec().unwrap()
    }

    //= transformers 5.23.0 loss/loss_utils.py ForCausalLMLoss
    #[test]
    fn labels_are_shifted_inside_each_sequence() {
        let batch = batch(&[1, 2, 3, 4, 5, 6], None, [2, 3]).unwrap();
        assert_eq!(ints(batch.positions.clone()), [0, 1, 3, 4]);
        assert_eq!(ints(batch.targets.clone()), [2, 3, 5, 6]);
        assert_eq!(ints(batch.input_ids.clone()), [1, 2, 3, 4, 5, 6]);
        assert_eq!(batch.tokens(), 4);
    }

    #[test]
    fn ignored_labels_leave_no_position() {
        let labels = [9, -100, 8, -100, 7, -100];
        let batch = batch(&[1, 2, 3, 4, 5, 6], Some(&labels), [2, 3]).unwrap();
        assert_eq!(ints(batch.positions.clone()), [1, 3]);
        assert_eq!(ints(batch.targets.clone()), [8, 7]);
        assert_eq!(batch.tokens(), 2);
    }

    #[test]
    fn documents_are_checked_one_by_one() {
        let documents = |starts: &[usize], length| {
            let ids: Vec<u32> = (1..).take(starts.len()).collect();
            let shape = [starts.len() / length, length];
            CausalBatch::<Flex>::of_documents(
                &config(),
                &ids,
                None,
                starts.into(),
                shape,
                &Default::default(),
            )
        };
        // The sequence is longer than the model allows, but its documents are not.
        assert_eq!(documents(&[0, 0, 0, 0, 4, 4, 6], 7).unwrap().tokens(), 6);
        for (starts, length, part) in [
            (&[0, 0, 0, 0, 0, 5][..], 6, "sequences of 5 tokens are longer than the model allows"),
            (&[0, 0, 1], 3, "document start 1 (sequence 0, position 2)"),
            (&[0, 1, 0], 3, "document start 0 (sequence 0, position 2)"),
            (&[0, 0, 1, 1], 2, "document start 1 (sequence 1, position 0)"),
            (&[0, 3, 0], 3, "document start 3 (sequence 0, position 1)"),
            (&[1, 1], 2, "document start 1 (sequence 0, position 0)"),
        ] {
            let message = documents(starts, length).unwrap_err().to_string();
            assert!(message.contains(part), "{starts:?}: {message}");
        }
    }

    #[test]
    fn a_batch_that_predicts_nothing_counts_nothing() {
        for batch in [
            batch(&[1, 2], Some(&[-100, -100]), [1, 2]).unwrap(),
            batch(&[1, 2], None, [2, 1]).unwrap(),
        ] {
            assert_eq!(batch.tokens(), 0);
            assert_eq!(batch.positions.dims(), [1]);
        }
    }

    #[test]
    fn misfits_are_refused_with_their_place() {
        type Labels<'a> = Option<&'a [i64]>;
        let table: [(&[u32], Labels, [usize; 2], &str); 9] = [
            (&[], None, [0, 3], "a batch of 0 sequences of 3 tokens is empty"),
            (&[], None, [1, 0], "is empty"),
            (&[1; 5], None, [1, 5], "longer than the model allows (`n_positions` = 4)"),
            (&[1, 2], None, [1, 3], "2 input ids given for 1 sequences of 3 tokens, 3 needed"),
            (&[1, 2], None, [usize::MAX, 2], "needed"),
            (&[1, 2, 3, 10], None, [2, 2], "input id 10 (sequence 1, position 1) is not in"),
            (&[u32::MAX, 2], None, [1, 2], "input id 4294967295 (sequence 0, position 0)"),
            (&[1, 2], Some(&[1]), [1, 2], "1 labels given for 1 sequences of 2 tokens, 2 needed"),
            (&[1, 2], Some(&[1, -1]), [1, 2], "label -1 (sequence 0, position 1)"),
        ];
        for (ids, labels, shape, expected) in table {
            let message = batch(ids, labels, shape).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
