//! Errors of chat templates and training rows.

use deepburn_config::shortened;
use thiserror::Error;

/// The number of characters of a name of a row in messages.
pub(crate) const SHOWN_NAME: usize = 100;

/// The number of characters of a template's message.
const SHOWN_MESSAGE: usize = 500;

/// The reason why a template cannot be used, or a row cannot be encoded.
///
/// Callers add the file and the number of the row.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ChatError {
    /// No chat template, or none that can be selected.
    #[error("{0}")]
    Template(String),
    /// The template is not valid Jinja.
    #[error("the chat template is invalid in line {line}: {}", shortened(reason, SHOWN_MESSAGE))]
    Syntax {
        /// The line, from 1.
        line: usize,
        /// The problem.
        reason: String,
    },
    /// The template failed with these messages.
    #[error("the chat template failed in line {line}: {}", shortened(reason, SHOWN_MESSAGE))]
    Render {
        /// The line, from 1; 0 if it is unknown.
        line: usize,
        /// The problem.
        reason: String,
    },
    /// The template called `raise_exception`.
    #[error(
        "the chat template rejects the messages (line {line}): {}",
        shortened(message, SHOWN_MESSAGE)
    )]
    Rejected {
        /// The line, from 1; 0 if it is unknown.
        line: usize,
        /// The template's message.
        message: String,
    },
    /// The template needs more work or memory than a chat does.
    #[error(
        "the chat template does not end or produces too much text{}: the limit is {limit} steps and 64 bytes per step; \
         shorten the messages, or correct the loop or the lists in the template",
        match line { 0 => String::new(), line => format!(" (line {line})") }
    )]
    TooMuchWork {
        /// The line, from 1; 0 if it is unknown.
        line: usize,
        /// The maximum number of steps.
        limit: u64,
    },
    /// A field of a row has a value that is not accepted.
    #[error("`{field}` is {found}, but it must be {rule}")]
    Field {
        /// The path of the field, such as `messages[2].content`.
        field: String,
        /// The value or its type.
        found: String,
        /// The accepted values, and the remedy.
        rule: String,
    },
    /// The format of a row cannot be determined.
    #[error("{0}")]
    Format(String),
    /// The trained tokens of a conversation cannot be determined from its template.
    #[error(
        "the tokens of `messages[{message}]` cannot be determined: {reason}; mark them with {{% generation %}} and \
         {{% endgeneration %}} in the chat template, or train on all tokens"
    )]
    Turn {
        /// The index of the assistant's message.
        message: usize,
        /// The rule that the template violates.
        reason: String,
    },
    /// An option does not fit the row.
    #[error("`{option}` {reason}")]
    Option {
        /// The option.
        option: String,
        /// The problem and the remedy.
        reason: String,
    },
    /// The tokenizer failed.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
}

/// A result of this crate.
pub type Result<T, E = ChatError> = std::result::Result<T, E>;

impl ChatError {
    /// Returns what to do about an error of a row; `None` if the message says it.
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Template(_)
            | Self::TooMuchWork { .. }
            | Self::Turn { .. }
            | Self::Option { .. } => None,
            Self::Syntax { .. } => Some("correct the template"),
            Self::Render { .. } => {
                Some("correct the template, or give the row what the template reads")
            }
            Self::Rejected { .. } => Some("correct or remove the row, or use another template"),
            Self::Tokenizer(_) => Some("use another tokenizer"),
            Self::Field { .. } | Self::Format(_) => Some("correct or remove the row"),
        }
    }

    /// Returns the error for a field whose value is not accepted.
    pub(crate) fn field(
        field: impl Into<String>,
        found: impl Into<String>,
        rule: impl Into<String>,
    ) -> Self {
        let field = shortened(&field.into(), SHOWN_NAME);
        Self::Field { field, found: found.into(), rule: rule.into() }
    }
}
