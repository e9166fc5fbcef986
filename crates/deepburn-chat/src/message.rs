//! Messages of a conversation.

use serde_json::{Map, Value};

/// The role of the messages that a model writes.
pub(crate) const ASSISTANT: &str = "assistant";

/// A message: its role, its content, and more fields that templates read, such as `tool_calls`. No
/// field is null.
#[derive(Clone, Debug, PartialEq)]
pub struct Message(Map<String, Value>);

impl Message {
    /// Returns a message of text.
    pub fn text(role: &str, content: &str) -> Self {
        Self(
            [("role".to_owned(), role.into()), ("content".to_owned(), content.into())]
                .into_iter()
                .collect(),
        )
    }

    /// Returns a message with these fields, as a template reads them. Removes null fields, as
    /// `transformers` does. Other values are not checked: rows are checked by
    /// [`Row::read`](crate::Row::read).
    pub fn from_fields(fields: Map<String, Value>) -> Self {
        Self(fields.into_iter().filter(|(_, value)| !value.is_null()).collect())
    }

    /// Returns the role, such as `user`.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns all fields.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }

    pub(crate) fn fields_mut(&mut self) -> &mut Map<String, Value> {
        &mut self.0
    }

    pub(crate) fn is_assistant(&self) -> bool {
        self.role() == ASSISTANT
    }
}
