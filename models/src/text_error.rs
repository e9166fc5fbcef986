//! The reason why a batch of texts is rejected.

use thiserror::Error;

/// The reason why texts are rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TextBatchError {
    /// The numbers of ids, lengths and labels are inconsistent.
    #[error(
        "{ids} token ids, {lengths} lengths and {labels} labels do not make a batch: there must be a \
         length and a label for each row of ids, and at least one id"
    )]
    Counts {
        /// The number of token ids.
        ids: usize,
        /// The number of lengths.
        lengths: usize,
        /// The number of labels.
        labels: usize,
    },
    /// A text is longer than its row.
    #[error("text {text} has {found} tokens, but its row {length}")]
    Length {
        /// The row of the text.
        text: usize,
        /// The number of tokens in the text.
        found: usize,
        /// The length of every row.
        length: usize,
    },
    /// The rows are longer than the model's maximum length.
    #[error("texts of {length} tokens are longer than the {max_len} that the model allows")]
    TooLong {
        /// The length of every row in tokens.
        length: usize,
        /// The longest that the model supports.
        max_len: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token {id} of text {text} is outside of the vocabulary (`vocab_size` = {vocab_size})")]
    Token {
        /// The row of the text.
        text: usize,
        /// The token.
        id: u32,
        /// The vocabulary size of the model.
        vocab_size: usize,
    },
    /// A label is not a class of the model.
    #[error("text {text} is of class {label}, but the model has `num_classes` = {num_classes}")]
    Label {
        /// The row of the text.
        text: usize,
        /// The label.
        label: i64,
        /// The number of classes of the model.
        num_classes: usize,
    },
    /// A text neither has a class nor lacks it.
    #[error(
        "text {text} has the flag {flag} for a class; it must be 0 or 1, and negative for a row without a text"
    )]
    Flag {
        /// The row of the text.
        text: usize,
        /// The flag.
        flag: i64,
    },
    /// A number to predict is NaN or infinite.
    #[error("text {text} has a number to predict that is not finite")]
    NotFinite {
        /// The row of the text.
        text: usize,
    },
}
