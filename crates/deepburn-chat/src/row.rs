//! Rows of training data, in the formats of TRL, ShareGPT and Alpaca.
//!
//! | Format | Fields | Row |
//! |---|---|---|
//! | [`Text`](RowFormat::Text) | `text` | [`Row::Text`] |
//! | [`Messages`](RowFormat::Messages) | `messages` | [`Row::Chat`] |
//! | [`Conversations`](RowFormat::Conversations) | `conversations` with `from` and `value`, `system` | [`Row::Chat`] |
//! | [`PromptCompletion`](RowFormat::PromptCompletion) | `prompt`, `completion` | [`Row::Completion`], [`Row::ChatCompletion`] |
//! | [`Alpaca`](RowFormat::Alpaca) | `instruction`, `input`, `output`, `system`, `history` | [`Row::ChatCompletion`] |
//! | [`Preference`](RowFormat::Preference) | `prompt` (optional), `chosen`, `rejected` | [`Row::Preference`], [`Row::ChatPreference`] |
//!
//! Rows of chats may have `tools`, `documents` and `chat_template_kwargs`. Other columns are
//! ignored, as TRL does. Fields of messages are not ignored, because they may change what is
//! trained: unknown ones are errors.

use std::fmt;

use deepburn_config::shortened;
use serde_json::{Map, Value};

use crate::error::SHOWN_NAME;
use crate::{ChatContext, ChatError, Message, Result};

mod columns;
mod messages;
mod notes;
mod preference;
mod reader;
#[cfg(test)]
mod tests;

pub use notes::Notes;
pub use reader::{NestedNulls, ReadRow, RowReader};

/// How the columns of a file are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// Plain text.
    Text,
    /// Messages with `role` and `content`.
    Messages,
    /// Messages with `from` and `value` (ShareGPT).
    Conversations,
    /// A prompt and its completion, as text or messages.
    PromptCompletion,
    /// An instruction and its output.
    Alpaca,
    /// Two completions of a prompt, of which the first is better.
    Preference,
}

impl RowFormat {
    /// All formats.
    pub const ALL: [Self; 6] = [
        Self::Text,
        Self::Messages,
        Self::Conversations,
        Self::PromptCompletion,
        Self::Alpaca,
        Self::Preference,
    ];

    /// The columns that rows of any format may have. Others are not read.
    pub const COLUMNS: [&str; 15] = [
        "text",
        "messages",
        "conversations",
        "prompt",
        "completion",
        "chosen",
        "rejected",
        "instruction",
        "input",
        "output",
        "history",
        "system",
        "tools",
        "documents",
        "chat_template_kwargs",
    ];

    /// Returns the columns that a row must have.
    pub fn required_columns(self) -> &'static [&'static str] {
        match self {
            Self::Text => &["text"],
            Self::Messages => &["messages"],
            Self::Conversations => &["conversations"],
            Self::PromptCompletion => &["prompt", "completion"],
            Self::Alpaca => &["instruction", "output"],
            Self::Preference => &["chosen", "rejected"],
        }
    }

    /// Determines the format from the columns of a row. Null columns count as missing.
    ///
    /// # Errors
    /// Returns [`ChatError::Format`] if no format fits, or more than one.
    pub fn detect(row: &Map<String, Value>) -> Result<Self> {
        // Files with a schema, such as Parquet, have every column in every row.
        let has = |column: &&str| row.get(*column).is_some_and(|it| !it.is_null());
        let fitting: Vec<Self> =
            Self::ALL.into_iter().filter(|it| it.required_columns().iter().all(&has)).collect();
        match fitting[..] {
            [format] => Ok(format),
            [] => {
                // Reading a row of this format names the column that is null.
                let is_named =
                    |it: &Self| it.required_columns().iter().all(|it| row.contains_key(*it));
                if let Some(format) = Self::ALL.into_iter().find(is_named) {
                    return Ok(format);
                }
                let shown = |it: &String| format!("`{}`", shortened(it, SHOWN_NAME));
                let columns: Vec<_> = row.keys().take(20).map(shown).collect();
                let formats: Vec<_> = Self::ALL.iter().map(|it| it.to_string()).collect();
                Err(ChatError::Format(format!(
                    "the columns {}are of no known format; rename them to one of: {}",
                    if columns.is_empty() { String::new() } else { columns.join(", ") + " " },
                    formats.join("; ")
                )))
            }
            _ => {
                let formats: Vec<_> = fitting.iter().map(|it| it.to_string()).collect();
                Err(ChatError::Format(format!(
                    "the columns are of several formats: {}; select one of them",
                    formats.join("; ")
                )))
            }
        }
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns: Vec<_> = self.required_columns().iter().map(|it| format!("`{it}`")).collect();
        f.write_str(&columns.join(" and "))
    }
}

/// A row in the form in which it is encoded.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// Plain text.
    Text(String),
    /// A text that completes another one.
    Completion {
        /// The text before.
        prompt: String,
        /// The trained text.
        completion: String,
    },
    /// A conversation.
    Chat {
        /// The messages; at least one.
        messages: Vec<Message>,
        /// Tools, documents and variables.
        context: ChatContext,
    },
    /// Messages that complete a conversation.
    ChatCompletion {
        /// The messages before; at least one.
        prompt: Vec<Message>,
        /// The trained messages; at least one.
        completion: Vec<Message>,
        /// Tools, documents and variables.
        context: ChatContext,
    },
    /// Two completions of a text.
    Preference {
        /// The text before.
        prompt: String,
        /// The better completion.
        chosen: String,
        /// The worse completion.
        rejected: String,
    },
    /// Two completions of a conversation.
    ChatPreference {
        /// The messages before; at least one.
        prompt: Vec<Message>,
        /// The better completion; at least one message.
        chosen: Vec<Message>,
        /// The worse completion; at least one message.
        rejected: Vec<Message>,
        /// Tools, documents and variables.
        context: ChatContext,
    },
}

impl Row {
    /// Reads a row of JSON lines, in the format of its columns. Use a [`RowReader`] for all rows of
    /// a file.
    ///
    /// # Errors
    /// Returns an error that names the field, if the format is unknown or a value is not accepted.
    pub fn read(row: &Value) -> Result<Self> {
        RowReader::of_row(row)?.read(row).map(|it| it.row)
    }
}
