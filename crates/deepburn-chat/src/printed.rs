//! Finds parts of a conversation that do not become text: what its template does not print or read,
//! and empty answers.

use std::cell::OnceCell;

use serde_json::Value;

use crate::template::REASONING;
use crate::{ChatContext, ChatTemplate, Finding, Message};

/// The bytes between two texts in which the second one is looked for first.
const MAX_HEADER: usize = 128;

/// Returns the fields of `messages` and `context` whose text is not part of `text`, which
/// `template` printed, the variables that it does not read, and empty answers. Only the messages
/// from number `answers` on are learned.
///
/// White space around a text does not count, and a text may be printed as JSON, or in other case
/// and with other punctuation.
pub(crate) fn without_effect(
    template: &ChatTemplate,
    text: &str,
    messages: &[Message],
    context: &ChatContext,
    field: &str,
    answers: usize,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut printed = PrintedText { text, rest: text, folded: OnceCell::new() };
    let mut check = |field: String, value: Option<&Value>| {
        let string = value.and_then(Value::as_str).map(str::trim);
        if string.is_some_and(|string| !printed.has(string)) {
            findings.push(Finding::NotPrinted { field });
        }
    };
    for (index, message) in messages.iter().enumerate() {
        let fields = message.fields();
        let path = format!("{field}[{index}]");
        match fields.get("content") {
            Some(Value::Array(parts)) => {
                for (part, value) in parts.iter().enumerate() {
                    check(format!("{path}.content[{part}].text"), value.get("text"));
                }
            }
            content => check(format!("{path}.content"), content),
        }
        for name in REASONING.into_iter().chain(["name"]) {
            check(format!("{path}.{name}"), fields.get(name));
        }
        for (call, value) in
            fields.get("tool_calls").and_then(Value::as_array).into_iter().flatten().enumerate()
        {
            check(format!("{path}.tool_calls[{call}]"), function(value).get("name"));
        }
    }
    for (index, tool) in context.tools.iter().flatten().enumerate() {
        check(format!("tools[{index}]"), function(tool).get("name"));
    }
    for (index, document) in context.documents.iter().flatten().enumerate() {
        check(format!("documents[{index}].text"), document.get("text"));
    }
    findings.extend(unprinted_arguments(text, messages, field));
    findings.extend(unprinted_documents(text, context));
    let empty = messages.iter().enumerate().skip(answers).filter(|(_, it)| is_empty_answer(it));
    findings.extend(empty.map(|(at, _)| Finding::EmptyAnswer { field: format!("{field}[{at}]") }));
    // A misspelled name would have no effect, and no error.
    let unread = context.variables.keys().filter(|name| !template.mentions(name)).cloned();
    findings.extend(unread.map(|name| Finding::VariableUnread { name }));
    findings
}

/// Returns the function of a tool, or of a call.
fn function(value: &Value) -> &Value {
    // Both may be wrapped in an object with a type, as in OpenAI's format.
    value.get("function").unwrap_or(value)
}

/// The text of a conversation.
struct PrintedText<'t> {
    text: &'t str,
    /// What follows the text that was found last.
    rest: &'t str,
    /// The text without case and punctuation.
    folded: OnceCell<String>,
}

impl PrintedText<'_> {
    /// Returns whether `string` was printed.
    fn has(&mut self, string: &str) -> bool {
        if let Some(after) = printed_next(self.rest, string) {
            // The next text is looked for behind this one.
            self.rest = after;
            return true;
        }
        // Templates print nested values with `tojson`, which escapes quotes and line ends.
        let as_json = || {
            let json = Value::from(string).to_string();
            json.len() > 2 && self.text.contains(&json[1..json.len() - 1])
        };
        // Filters change texts, such as `upper` and `replace`.
        let changed = || {
            let string = folded(string);
            !string.is_empty() && self.folded.get_or_init(|| folded(self.text)).contains(&string)
        };
        self.text.contains(string) || as_json() || changed()
    }
}

/// Returns the letters and digits of a text in upper case.
fn folded(text: &str) -> String {
    text.chars().filter(|it| it.is_alphanumeric()).flat_map(char::to_uppercase).collect()
}

/// Returns the arguments of calls of which no name and no value is printed.
fn unprinted_arguments(text: &str, messages: &[Message], field: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let calls = message.fields().get("tool_calls").and_then(Value::as_array);
        for (call, value) in calls.into_iter().flatten().enumerate() {
            let arguments = function(value).get("arguments");
            if arguments.is_some_and(|it| !is_partly_printed(text, it)) {
                let function = if value.get("function").is_some() { ".function" } else { "" };
                let field = format!("{field}[{index}].tool_calls[{call}]{function}.arguments");
                findings.push(Finding::NotPrinted { field });
            }
        }
    }
    findings
}

/// Returns whether `text` has a name or a value within `value`, or whether there is none.
fn is_partly_printed(text: &str, value: &Value) -> bool {
    match value {
        Value::Object(fields) => {
            let mut fields = fields.iter();
            fields.len() == 0
                || fields.any(|(name, it)| text.contains(name) || is_partly_printed(text, it))
        }
        Value::Array(items) => items.iter().any(|it| is_partly_printed(text, it)),
        Value::String(string) => !string.trim().is_empty() && text.contains(string.trim()),
        Value::Number(number) => text.contains(&number.to_string()),
        Value::Null | Value::Bool(_) => false,
    }
}

/// Returns the documents without a text of which no field is printed. Only some templates print
/// documents, each with the fields that it knows.
fn unprinted_documents(text: &str, context: &ChatContext) -> Vec<Finding> {
    let prints = |value: &Value| {
        let string = value.as_str().map(str::trim);
        string.is_some_and(|string| !string.is_empty() && text.contains(string))
    };
    let documents = context.documents.iter().flatten().enumerate();
    let unprinted = documents.filter(|(_, document)| {
        let fields = document.as_object().into_iter().flat_map(|it| it.values());
        document.get("text").is_none_or(|it| !it.is_string()) && !fields.into_iter().any(prints)
    });
    let finding = |(index, _)| Finding::NotPrinted { field: format!("documents[{index}]") };
    unprinted.map(finding).collect()
}

/// Returns whether a message of the assistant has neither text nor reasoning nor a call of a tool.
fn is_empty_answer(message: &Message) -> bool {
    let has_text = |value: &Value| match value {
        Value::String(text) => !text.trim().is_empty(),
        // The other parts and elements are calls of tools.
        Value::Array(parts) => parts.iter().any(|part| {
            part.get("text").and_then(Value::as_str).is_none_or(|text| !text.trim().is_empty())
        }),
        _ => false,
    };
    let mut fields = REASONING.into_iter().chain(["content", "tool_calls"]);
    message.is_assistant() && !fields.any(|name| message.fields().get(name).is_some_and(has_text))
}

/// Returns the text after `string`, if it starts within a few bytes. Templates print most texts in
/// their order, shortly after each other, and searching a whole conversation for each of its texts
/// takes longer than rendering it.
fn printed_next<'t>(text: &'t str, string: &str) -> Option<&'t str> {
    let mut starts = text.char_indices().map(|(at, _)| at).take_while(|at| *at < MAX_HEADER);
    starts.find_map(|at| text[at..].strip_prefix(string))
}
