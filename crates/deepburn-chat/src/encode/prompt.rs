//! The part of a row that a model continues.

use serde_json::Value;

use super::RowEncoder;
use crate::{ChatContext, Message, Result, Row, Surrounding, TextTokenizer};

/// A prompt, and what follows it in the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// The token ids of the prompt, up to the beginning of an answer.
    pub ids: Vec<u32>,
    /// The text of the row after the prompt. Of a conversation, it is the content of the next
    /// message.
    pub expected: String,
}

impl<T: TextTokenizer> RowEncoder<T> {
    /// Returns the prompt of a row: everything before the first answer of the assistant, or before
    /// the completion. Returns `None` for a text, and for a conversation that has no answer or
    /// begins with one.
    ///
    /// # Errors
    /// Returns an error if the template or the tokenizer fails.
    pub fn prompt(&self, row: &Row) -> Result<Option<EncodedPrompt>> {
        match row {
            Row::Text(_) => Ok(None),
            Row::Completion { prompt, completion: expected }
            | Row::Preference { prompt, chosen: expected, .. } => {
                let ids = self.tokenizer.ids(prompt, Surrounding::Added)?;
                let expected = expected.clone();
                // A model needs at least one token to continue.
                Ok((!ids.is_empty()).then_some(EncodedPrompt { ids, expected }))
            }
            Row::Chat { messages, context } => self.prompt_before_answer(messages, context),
            Row::ChatCompletion { prompt, completion: expected, context }
            | Row::ChatPreference { prompt, chosen: expected, context, .. } => {
                let ids = self.generation_prompt(prompt, context)?;
                let expected = expected.first().map(content).unwrap_or_default();
                Ok(Some(EncodedPrompt { ids, expected }))
            }
        }
    }

    /// Returns the token ids of a text as a message of the user, up to the beginning of the answer;
    /// without a chat template, of the text alone.
    ///
    /// # Errors
    /// Returns an error if the template or the tokenizer fails.
    pub fn user_prompt(&self, text: &str) -> Result<Vec<u32>> {
        match self.templates {
            Some(_) => {
                self.generation_prompt(&[Message::text("user", text)], &ChatContext::default())
            }
            None => self.tokenizer.ids(text, Surrounding::Added),
        }
    }

    /// Returns the messages before the first answer.
    fn prompt_before_answer(
        &self,
        messages: &[Message],
        context: &ChatContext,
    ) -> Result<Option<EncodedPrompt>> {
        match messages.iter().position(Message::is_assistant) {
            None | Some(0) => Ok(None),
            Some(answer) => Ok(Some(EncodedPrompt {
                ids: self.generation_prompt(&messages[..answer], context)?,
                expected: content(&messages[answer]),
            })),
        }
    }
}

/// Returns the content of a message. Calls of tools have fields of their own, which are shown as
/// JSON.
fn content(message: &Message) -> String {
    match message.fields().get("content") {
        Some(Value::String(text)) => text.clone(),
        _ => Value::Object(message.fields().clone()).to_string(),
    }
}
