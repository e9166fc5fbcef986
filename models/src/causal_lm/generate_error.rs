//! The reason why no text, or not all of it, is generated.

use thiserror::Error;

use super::batch::InputError;

/// The reason why a prompt cannot be continued, or why generation ended early.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum GenerateError {
    /// The prompt is invalid.
    #[error("the prompt cannot be used: {0}")]
    Prompt(#[from] InputError),
    /// The prompt and the new tokens together exceed the model's maximum length.
    #[error(
        "the prompt's length {prompt} plus {max_new_tokens} new tokens is more than the model's \
         `{field}` = {max_len}; shorten the prompt or ask for fewer"
    )]
    TooLong {
        /// The number of tokens in the prompt.
        prompt: usize,
        /// The number of requested tokens.
        max_new_tokens: usize,
        /// The maximum sequence length of the model.
        max_len: usize,
        /// The field of `config.json` that contains `max_len`.
        field: &'static str,
    },
    /// A sampling option is out of range.
    #[error("`{name}` is {value}, but it must be {rule}")]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The accepted values.
        rule: &'static str,
    },
    /// The logits of a token are not numbers, so that no token is the most likely one.
    #[error(
        "{count} of {total} logits of the token at position {position} are infinite or NaN, so no token can be chosen; \
         the model's weights or activations are not finite: train it again, with a lower learning rate if it diverged"
    )]
    NotFinite {
        /// The position of the token in the sequence, from 0, including the prompt.
        position: usize,
        /// The number of logits that are infinite or NaN.
        count: usize,
        /// The number of logits.
        total: usize,
    },
}
