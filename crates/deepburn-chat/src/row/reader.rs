//! Reads rows of one format.

use serde_json::{Map, Value};

use super::columns::{absent, column, found, objects, optional_text, text, without_nulls};
use super::messages::messages;
use super::notes::Notes;
use super::preference::{common_messages, common_text};
use super::{Row, RowFormat};
use crate::message::ASSISTANT;
use crate::{ChatContext, ChatError, Message, Result};

/// What null fields of nested objects mean, such as the arguments of a tool call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NestedNulls {
    /// They are values, as in JSON.
    #[default]
    Keep,
    /// They are missing, as in Arrow and Parquet, which add the fields of other rows.
    Remove,
}

/// Reads the rows of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowReader {
    /// The format of all rows.
    pub format: RowFormat,
    /// The meaning of nested null fields.
    pub nested_nulls: NestedNulls,
    /// More fields of messages that the chat template reads.
    pub message_fields: Vec<String>,
}

/// A row, and what was changed while it was read.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadRow {
    /// The row.
    pub row: Row,
    /// Changes of the values.
    pub notes: Notes,
}

impl RowReader {
    /// Returns a reader for a format.
    pub fn new(format: RowFormat) -> Self {
        Self { format, nested_nulls: NestedNulls::default(), message_fields: Vec::new() }
    }

    /// Returns a reader for the format of `row`, which is usually the first one of a file.
    ///
    /// # Errors
    /// Returns [`ChatError::Format`] if no format fits, or more than one.
    pub fn of_row(row: &Value) -> Result<Self> {
        Ok(Self::new(RowFormat::detect(fields(row)?)?))
    }

    /// Reads a line of JSON.
    ///
    /// # Errors
    /// Returns an error if the line is not valid JSON (lone surrogates are not), or as
    /// [`RowReader::read`] does.
    pub fn read_line(&self, line: &str) -> Result<ReadRow> {
        let row = serde_json::from_str(line);
        self.read(
            &row.map_err(|error| ChatError::Format(format!("the row is not valid JSON: {error}")))?,
        )
    }

    /// Reads a row.
    ///
    /// # Errors
    /// Returns an error that names the field if a value is not accepted.
    pub fn read(&self, row: &Value) -> Result<ReadRow> {
        let row = match self.nested_nulls {
            NestedNulls::Keep => row.clone(),
            NestedNulls::Remove => without_nulls(row.clone()),
        };
        let row = fields(&row)?;
        let is_converted = matches!(self.format, RowFormat::Conversations | RowFormat::Alpaca);
        let mut notes = Notes { converted_messages: is_converted, ..Notes::default() };
        let read = match self.format {
            RowFormat::Text => Row::Text(text(row, "text")?),
            RowFormat::Messages => self.chat(row, "messages", &mut notes)?,
            RowFormat::Conversations => self.chat(row, "conversations", &mut notes)?,
            RowFormat::PromptCompletion => self.completion(row, &mut notes)?,
            RowFormat::Alpaca => alpaca(row)?,
            RowFormat::Preference => self.preference(row, &mut notes)?,
        };
        if matches!(read, Row::Text(_) | Row::Completion { .. } | Row::Preference { .. }) {
            notes.unread_column = CONTEXT.into_iter().find(|name| has_context(row, name));
        }
        Ok(ReadRow { row: read, notes })
    }

    fn messages(
        &self,
        row: &Map<String, Value>,
        name: &str,
        notes: &mut Notes,
    ) -> Result<Vec<Message>> {
        match column(row, name) {
            Some(value) => messages(value, name, &self.message_fields, notes),
            None => {
                let rule = "a list of messages, as in the other rows";
                Err(ChatError::field(name, absent(row, name), rule))
            }
        }
    }

    fn chat(&self, row: &Map<String, Value>, name: &str, notes: &mut Notes) -> Result<Row> {
        let mut messages = self.messages(row, name, notes)?;
        let system = optional_text(row, "system")?.filter(|it| !it.is_empty());
        if let Some(system) = system.filter(|_| self.format == RowFormat::Conversations) {
            if messages[0].role() == "system" {
                let rule = format!("empty, because `{name}` already starts with a system message");
                return Err(ChatError::field("system", "a text", rule));
            }
            // Some data sets of ShareGPT's format have the system message in a column of its own.
            messages.insert(0, Message::text("system", &system));
        }
        Ok(Row::Chat { messages, context: context(row)? })
    }

    fn completion(&self, row: &Map<String, Value>, notes: &mut Notes) -> Result<Row> {
        // If one of them is a list, both have to be.
        if ![row.get("prompt"), row.get("completion")].iter().flatten().any(|it| it.is_array()) {
            return Ok(Row::Completion {
                prompt: text(row, "prompt")?,
                completion: text(row, "completion")?,
            });
        }
        Ok(Row::ChatCompletion {
            prompt: self.messages(row, "prompt", notes)?,
            completion: self.messages(row, "completion", notes)?,
            context: context(row)?,
        })
    }

    fn preference(&self, row: &Map<String, Value>, notes: &mut Notes) -> Result<Row> {
        let prompt = column(row, "prompt");
        // If one of them is a text, both have to be.
        if [row.get("chosen"), row.get("rejected")].iter().flatten().any(|it| it.is_string()) {
            let (chosen, rejected) = (text(row, "chosen")?, text(row, "rejected")?);
            let (prompt, chosen, rejected) = match prompt {
                Some(_) => (text(row, "prompt")?, chosen, rejected),
                None => {
                    notes.implicit_prompt = true;
                    common_text(&chosen, &rejected)?
                }
            };
            return Ok(Row::Preference { prompt, chosen, rejected });
        }
        let chosen = self.messages(row, "chosen", notes)?;
        let rejected = self.messages(row, "rejected", notes)?;
        // Data sets such as UltraFeedback repeat the first question as text in `prompt`.
        let (prompt, chosen, rejected) = match prompt {
            Some(Value::Array(_)) => (self.messages(row, "prompt", notes)?, chosen, rejected),
            None | Some(Value::String(_)) => {
                notes.implicit_prompt = true;
                common_messages(&chosen, &rejected)?
            }
            Some(value) => {
                return Err(ChatError::field("prompt", found(value), "a list of messages"));
            }
        };
        Ok(Row::ChatPreference { prompt, chosen, rejected, context: context(row)? })
    }
}

fn fields(row: &Value) -> Result<&Map<String, Value>> {
    row.as_object().ok_or_else(|| {
        ChatError::Format(format!("the row is {}, but it must be an object", found(row)))
    })
}

/// The columns that a template reads besides the messages.
const CONTEXT: [&str; 3] = ["chat_template_kwargs", "tools", "documents"];

/// Returns whether a column has a value that is not empty.
fn has_context(row: &Map<String, Value>, name: &str) -> bool {
    match column(row, name) {
        None => false,
        Some(Value::Object(fields)) => !fields.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(_) => true,
    }
}

/// Reads the columns that a template reads besides the messages.
fn context(row: &Map<String, Value>) -> Result<ChatContext> {
    let variables = match column(row, "chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables.clone(),
        Some(value) => {
            return Err(ChatError::field("chat_template_kwargs", found(value), "an object"));
        }
    };
    Ok(ChatContext {
        // TRL gives an empty list to the template. It knows no documents.
        tools: objects(row, "tools")?,
        documents: objects(row, "documents")?.filter(|it| !it.is_empty()),
        variables,
    })
}

/// Reads an instruction. The user's turn is `instruction + "\n" + input`, as in LLaMA-Factory.
fn alpaca(row: &Map<String, Value>) -> Result<Row> {
    let mut prompt = Vec::new();
    if let Some(system) = optional_text(row, "system")?.filter(|it| !it.is_empty()) {
        prompt.push(Message::text("system", &system));
    }
    let refused = |path: &str, value: &Value| {
        let rule = "a list of pairs of texts: an instruction and its output";
        Err(ChatError::field(path, found(value), rule))
    };
    match column(row, "history") {
        None => {}
        Some(Value::Array(pairs)) => {
            for (index, pair) in pairs.iter().enumerate() {
                let texts =
                    pair.as_array().map(|it| it.iter().map(Value::as_str).collect::<Vec<_>>());
                let Some([Some(question), Some(answer)]) = texts.as_deref() else {
                    return refused(&format!("history[{index}]"), pair);
                };
                prompt.push(Message::text("user", question));
                prompt.push(Message::text(ASSISTANT, answer));
            }
        }
        Some(value) => return refused("history", value),
    }
    let instruction = text(row, "instruction")?;
    let question = match optional_text(row, "input")?.filter(|it| !it.is_empty()) {
        Some(input) => format!("{instruction}\n{input}"),
        None => instruction,
    };
    prompt.push(Message::text("user", &question));
    let completion = vec![Message::text(ASSISTANT, &text(row, "output")?)];
    Ok(Row::ChatCompletion { prompt, completion, context: context(row)? })
}
