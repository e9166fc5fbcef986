//! What was changed while a row was read.

/// Changes that are made while a row is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// Arguments of tool calls were JSON text, as in OpenAI's format, and were parsed. Templates
    /// would quote the text again.
    pub parsed_arguments: bool,
    /// The messages are not in the columns and fields that TRL reads, but in the form of ShareGPT
    /// or Alpaca.
    pub converted_messages: bool,
    /// A column that only chat templates read, in a row of texts, which have no template.
    pub unread_column: Option<&'static str>,
    /// The prompt was taken from the common start of `chosen` and `rejected`.
    pub implicit_prompt: bool,
}
