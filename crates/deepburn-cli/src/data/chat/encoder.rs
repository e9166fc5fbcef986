//! Turns rows of files into samples of tokens.
//!
//! Main type: [`ChatEncoder`], the formats, the template and the tokenizer of a job.

mod nested_objects;
mod prompts;

use std::path::Path;

use deepburn_chat::{
    AssistantOnlyLoss, ChatError, ChatTemplate, ChatTemplates, Day, EncodeOptions,
    EncodedPreference, EncodedRow, Finding, Message, NestedNulls, ReadRow, Row, RowEncoder,
    RowFormat, RowReader, SpecialTokens,
};
use deepburn_config::{ChatPlan, Job};
use deepburn_datasets::{
    DataRow, InvalidRows, NotedSample, RowNote, Sample, SampleSource, SampleSplits, Splits,
    Tokenizer, open_samples, pair_sample,
};
use serde_json::{Map, Value};

use nested_objects::nested_objects;

use crate::data::chat_tokenizer::ChatTokenizer;
use crate::data::corpus::token_cache;
use crate::failure::Failure;

/// Part of the key of cached samples. It changes with the encoding of rows.
const ENCODING: &str = "deepburn chat 3";

/// What a row of a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleForm {
    /// A sample.
    Sample,
    /// A prompt with a better and a worse completion.
    Preference,
}

/// Turns rows of files into samples.
pub(super) struct ChatEncoder<'a> {
    chat: &'a ChatPlan,
    form: SampleForm,
    encoder: RowEncoder<ChatTokenizer<'a>>,
    /// The tokenizer of the encoder.
    tokenizer: &'a Tokenizer,
    /// The columns that are read.
    columns: Vec<String>,
    /// Why there is no template. It is only an error for a row with messages.
    no_template: Option<ChatError>,
    /// What the cached samples depend on, apart from the files.
    key: [String; 4],
    /// How the answers of the assistant are found; `None` if all messages are learned.
    pub(super) answers: Option<&'static str>,
    /// The id of padding.
    pub(super) pad_id: u32,
    /// The texts of the special tokens.
    control_tokens: Vec<String>,
}

impl<'a> ChatEncoder<'a> {
    /// Returns the encoder of a job, with its template or the tokenizer's own.
    ///
    /// # Errors
    /// Returns a user's mistake if the template or a token is invalid.
    pub(super) fn new(
        chat: &'a ChatPlan,
        form: SampleForm,
        tokenizer: &'a Tokenizer,
        template: Option<&str>,
        day: Day,
    ) -> Result<Self, Failure> {
        // A tokenizer.json alone has neither special tokens nor a template beside it.
        let folder = tokenizer.path().filter(|path| path.is_dir());
        let tokens = special_tokens(tokenizer, folder)?;
        let (templates, no_template) = templates(template, folder, day)?;
        // Without a clock, the samples are the same on every day, and so is the key of the cache.
        let day = Some(day).filter(|_| templates.as_ref().is_some_and(ChatTemplates::uses_clock));
        if let Some(day) = day {
            tracing::info!(
                "the chat template prints the current date: all samples have {day}, also when the run resumes"
            );
        }
        let options = EncodeOptions {
            completion_only_loss: chat.completion_only_loss,
            assistant_only_loss: chat.assistant_only_loss,
            // Samples are truncated when they are packed or padded, so the cache does not depend on
            // the length.
            max_length: None,
        };
        let answers = templates.as_ref().and_then(|it| answers(chat.assistant_only_loss, it));
        let sources = templates.as_ref().map(ChatTemplates::sources);
        let fields = (&chat.text_field, &chat.messages_field);
        // Everything that changes the samples of the same files. If something were missing, the
        // cache would return the samples of another job.
        let key = [
            tokenizer.definition().map_err(Failure::mistake)?,
            format!("{sources:?} {:?}", day.map(|it| it.to_string())),
            format!("{tokens:?}"),
            format!("{ENCODING} {form:?} {options:?} {fields:?}"),
        ];
        let pad_id = pad_id(chat, tokenizer, &tokens)?;
        // Tokens such as tool tags are added to the vocabulary without being special.
        let added = tokenizer.extra_tokens().into_iter();
        let control_tokens = added.filter(|it| it.is_special).map(|it| it.text).collect();
        // Other columns of a table are not read.
        let named = chat.messages_field.iter().chain([&chat.text_field]).cloned();
        let columns = RowFormat::COLUMNS.map(str::to_owned).into_iter().chain(named).collect();
        let own = ChatTokenizer::new(tokenizer);
        let encoder = RowEncoder::new(own, templates, tokens, options).map_err(Failure::mistake)?;
        Ok(Self {
            chat,
            form,
            encoder,
            tokenizer,
            columns,
            no_template,
            key,
            answers,
            pad_id,
            control_tokens,
        })
    }

    /// Reads and encodes the rows of all splits.
    ///
    /// # Errors
    /// Returns a user's mistake if a row is invalid, or a split has no rows.
    pub(super) fn samples(
        &self,
        job: &Job,
        splits: &Splits,
        vocab_size: usize,
    ) -> Result<SampleSplits, Failure> {
        let cache = token_cache(&job.data);
        let source = SampleSource {
            splits,
            fields: Some(&self.columns),
            invalid: match self.chat.skip_invalid_rows {
                true => InvalidRows::Skip,
                false => InvalidRows::Fail,
            },
            vocab_size,
            encoder: &self.key.each_ref().map(String::as_str),
            cache: cache.as_ref(),
        };
        let with_remedy = |error: ChatError| match error.remedy() {
            Some(remedy) => format!("{error}; {remedy}"),
            None => error.to_string(),
        };
        let encode = |row| self.encode(row).map_err(with_remedy);
        open_samples(&source, encode).map_err(Failure::mistake)
    }

    /// Encodes a row of a file.
    ///
    /// # Errors
    /// Returns an error if the row has no known format, a field has a wrong value, or the template
    /// refuses it.
    fn encode(&self, row: DataRow) -> Result<NotedSample, ChatError> {
        // The fields still have their names in the file here. Below, some are renamed or removed.
        let other_form = unread_completion(&row.fields, self.chat, self.form);
        // The nulls of a Parquet file are left out.
        let objects = if is_table(&row) { Vec::new() } else { nested_objects(&row.fields) };
        let ReadRow { row, notes } = self.read(row)?;
        let (sample, findings) = self.sample(&row)?;
        let note = |finding: &Finding| RowNote { kind: finding.kind(), text: finding.to_string() };
        let unread = notes.unread_column.map(|name| RowNote {
            kind: "unread column",
            text: format!("`{name}` has no effect on rows of texts, which have no chat template; remove it, or write the rows as messages"),
        });
        let findings = findings.iter().map(note).chain(other_form).chain(unread);
        let notes = findings.chain(notes.parsed_arguments.then(parsed_arguments));
        let mut notes: Vec<_> = notes.chain(self.control_token(&row)).collect();
        // Rows are counted, not the messages of a row.
        notes.sort_by_key(|note| note.kind);
        notes.dedup_by_key(|note| note.kind);
        Ok(NotedSample { sample, notes, objects })
    }

    /// Reads a row of a file.
    ///
    /// # Errors
    /// Returns an error if the row has no known format, a field has a wrong value, or a
    /// conversation has no template.
    fn read(&self, row: DataRow) -> Result<ReadRow, ChatError> {
        let is_table = is_table(&row);
        let fields = Value::Object(match self.form {
            SampleForm::Sample => self.renamed(row.fields)?,
            SampleForm::Preference => row.fields,
        });
        let mut reader = reader_of(&fields, self.form)?;
        if is_table {
            // A column of structs has every field in every row, as null where a row has none. A
            // template would print these.
            reader.nested_nulls = NestedNulls::Remove;
        }
        let read = reader.read(&fields)?;
        self.encoder.check_form(read.notes)?;
        let has_messages =
            !matches!(read.row, Row::Text(_) | Row::Completion { .. } | Row::Preference { .. });
        if let Some(error) = self.no_template.as_ref().filter(|_| has_messages) {
            return Err(ChatError::Template(format!(
                "{error}; or give the job a template as data.chat_template"
            )));
        }
        Ok(read)
    }

    /// Returns the sample of a row, and what may be unintended in it.
    ///
    /// # Errors
    /// Returns an error if the template or the tokenizer fails, or if the tokens of a preference
    /// have no prompt.
    fn sample(&self, row: &Row) -> Result<(Sample, Vec<Finding>), ChatError> {
        match self.form {
            SampleForm::Sample => {
                let EncodedRow { ids, trained, findings } = self.encoder.encode(row)?;
                Ok((Sample { ids, trained }, findings))
            }
            SampleForm::Preference => {
                let EncodedPreference { prompt, chosen, rejected, findings } =
                    self.encoder.encode_preference(row)?;
                let sample = pair_sample(&prompt, &chosen, &rejected);
                Ok((sample.map_err(ChatError::Format)?, findings))
            }
        }
    }

    /// Returns a note if a message contains the text of a special token. The tokenizer makes it the
    /// token itself, so the message may end its turn and begin another.
    fn control_token(&self, row: &Row) -> Option<RowNote> {
        let messages: Vec<&Message> = match row {
            Row::Chat { messages, .. } => messages.iter().collect(),
            Row::ChatCompletion { prompt, completion, .. } => {
                prompt.iter().chain(completion).collect()
            }
            Row::ChatPreference { prompt, chosen, rejected, .. } => {
                prompt.iter().chain(chosen).chain(rejected).collect()
            }
            _ => return None,
        };
        let contents = messages.iter().filter_map(|it| it.fields().get("content")?.as_str());
        let mut found = contents
            .flat_map(|content| self.control_tokens.iter().filter(|it| content.contains(&***it)));
        let token = found.next()?;
        let text = format!(
            "a message contains the special token {token:?}, which the model reads as such; remove it from the message unless it \
             is meant"
        );
        Some(RowNote { kind: "control token", text })
    }

    /// Returns the fields with the names that the formats have, for the columns that the job names.
    ///
    /// # Errors
    /// Returns an error if a column that the job names is missing.
    fn renamed(&self, mut fields: Map<String, Value>) -> Result<Map<String, Value>, ChatError> {
        if let Some(name) = &self.chat.messages_field {
            let Some(messages) = fields.remove(name) else {
                return Err(ChatError::Format(format!(
                    "has no column `{name}`, which data.messages_field names"
                )));
            };
            // ShareGPT has `from` and `value` in place of `role` and `content`.
            let is_sharegpt = messages.get(0).is_some_and(|first| first.get("from").is_some());
            // The column is the one to read, whatever others there are.
            let context = ["tools", "documents", "chat_template_kwargs", "system"];
            fields.retain(|field, _| context.contains(&field.as_str()));
            let name = if is_sharegpt { "conversations" } else { "messages" };
            fields.insert(name.to_owned(), messages);
        } else if self.chat.text_field != "text" {
            let name = &self.chat.text_field;
            let Some(text) = fields.remove(name) else {
                return Err(ChatError::Format(format!(
                    "has no column `{name}`, which data.text_field names"
                )));
            };
            // The named column decides alone, even if others would form a conversation.
            fields.clear();
            fields.insert("text".to_owned(), text);
        }
        Ok(fields)
    }
}

/// Returns whether a row is one of a Parquet file.
fn is_table(row: &DataRow) -> bool {
    row.place.file.extension().is_some_and(|it| it.eq_ignore_ascii_case("parquet"))
}

/// Returns the reader of a row. A row with the columns of several forms has the first of them, in
/// the order of the book.
///
/// # Errors
/// Returns an error if the row has no known form.
fn reader_of(fields: &Value, form: SampleForm) -> Result<RowReader, ChatError> {
    const ORDER: [RowFormat; 5] = [
        RowFormat::Messages,
        RowFormat::Conversations,
        RowFormat::PromptCompletion,
        RowFormat::Alpaca,
        RowFormat::Text,
    ];
    let has = |column: &str| fields.get(column).is_some_and(|value| !value.is_null());
    if form == SampleForm::Preference {
        // The prompt is not required: without it, both completions begin with it.
        let missing = RowFormat::Preference.required_columns().iter().find(|it| !has(it));
        let Some(missing) = missing else { return Ok(RowReader::new(RowFormat::Preference)) };
        let fault = match fields.get(missing) {
            Some(_) => format!("`{missing}` is null"),
            None => format!("has no column `{missing}`"),
        };
        return Err(ChatError::Format(format!(
            "{fault}; a preference has the columns `chosen` and `rejected`, and usually `prompt`"
        )));
    }
    let found = ORDER.into_iter().find(|format| format.required_columns().iter().all(|it| has(it)));
    found.map_or_else(|| RowReader::of_row(fields), |format| Ok(RowReader::new(format)))
}

/// Returns a note about a row of messages with a prompt and a completion, which TRL reads instead.
fn unread_completion(
    fields: &Map<String, Value>,
    chat: &ChatPlan,
    form: SampleForm,
) -> Option<RowNote> {
    let has = |column: &str| fields.get(column).is_some_and(|value| !value.is_null());
    let is_found =
        form == SampleForm::Sample && chat.messages_field.is_none() && chat.text_field == "text";
    let read = ["messages", "conversations"].into_iter().find(|it| is_found && has(it))?;
    let text = format!(
        "`{read}` is read, and `prompt` and `completion` are not, which TRL would read; remove one of them, or name the \
         messages as data.messages_field"
    );
    (has("prompt") && has("completion")).then_some(RowNote { kind: "several forms", text })
}

/// Returns the note about arguments of tool calls that were a text.
fn parsed_arguments() -> RowNote {
    let text = "the arguments of a tool call are JSON in a text and were parsed, because templates would quote the text again; \
                write them as an object, which all programs read alike";
    RowNote { kind: "arguments", text: text.to_owned() }
}

/// Returns the special tokens that the files of a tokenizer name. `data.eos_token` takes
/// precedence, and the model names the end of a text where the tokenizer does not.
///
/// # Errors
/// Returns a user's mistake if a file is invalid.
fn special_tokens(tokenizer: &Tokenizer, folder: Option<&Path>) -> Result<SpecialTokens, Failure> {
    let tokens = match folder {
        Some(folder) => {
            SpecialTokens::of_folder(folder).map_err(Failure::of_key("data.tokenizer"))?
        }
        None => SpecialTokens::default(),
    };
    // `data.eos_token` is a part of the tokenizer by now.
    Ok(match tokenizer.end_of_text_token() {
        Some(end) => tokens.with("eos_token", &end),
        None => tokens,
    })
}

/// Returns the template of the job or the tokenizer's own, or why there is none. Its clock shows
/// `day`.
///
/// # Errors
/// Returns a user's mistake if the template of the job is invalid.
fn templates(
    given: Option<&str>,
    folder: Option<&Path>,
    day: Day,
) -> Result<(Option<ChatTemplates>, Option<ChatError>), Failure> {
    let own = match (given, folder) {
        (Some(text), _) => {
            let compiled = ChatTemplates::single(text, day);
            return Ok((Some(compiled.map_err(Failure::of_key("data.chat_template"))?), None));
        }
        (None, Some(folder)) => ChatTemplates::of_folder(folder, day),
        (None, None) => {
            Err(ChatError::Template("the tokenizer is a file without a template".to_owned()))
        }
    };
    Ok(match own {
        Ok(templates) => (Some(templates), None),
        // Kept for later: texts and plain completions need no template.
        Err(error) => (None, Some(error)),
    })
}

/// Returns how the answers of the assistant are found; `None` if all messages are learned.
fn answers(answers_only: AssistantOnlyLoss, templates: &ChatTemplates) -> Option<&'static str> {
    if answers_only == AssistantOnlyLoss::Off {
        return None;
    }
    Some(match templates.select(false).is_ok_and(ChatTemplate::marks_generation) {
        true => "between {% generation %} and {% endgeneration %} of the chat template",
        false => {
            "found by rendering the conversation up to each turn, as the chat template does not mark them"
        }
    })
}

/// Returns the id of padding: the token that the job names, the tokenizer's, or the end-of-text
/// token.
///
/// # Errors
/// Returns a user's mistake if the token of the job is not one of the tokenizer.
fn pad_id(chat: &ChatPlan, tokenizer: &Tokenizer, tokens: &SpecialTokens) -> Result<u32, Failure> {
    if let Some(token) = &chat.pad_token {
        return tokenizer.token_id(token).ok_or_else(|| {
            Failure::mistake(format!(
                "data.pad_token: {token:?} is not a token of the tokenizer; name one of its special tokens, or remove the key"
            ))
        });
    }
    let mut named = ["pad_token", "eos_token"].into_iter().filter_map(|name| tokens.get(name));
    // The model does not see padding, so any id will do.
    Ok(named.find_map(|token| tokenizer.token_id(token)).unwrap_or(0))
}
