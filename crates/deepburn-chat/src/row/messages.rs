//! Messages of rows: roles, contents, tool calls.

use serde_json::{Map, Value, json};

use super::columns::{found, found_or_missing, parsed};
use super::notes::Notes;
use crate::message::ASSISTANT;
use crate::{ChatError, Message, Result};

/// The roles that chat templates know.
const ROLES: [&str; 7] = ["system", "developer", "user", ASSISTANT, "tool", "function", "ipython"];

/// Names of `from` in data sets of ShareGPT's format, with their roles.
const SENDERS: [(&str, &str); 12] = [
    ("human", "user"),
    ("gpt", ASSISTANT),
    ("chatgpt", ASSISTANT),
    ("bing", ASSISTANT),
    ("bard", ASSISTANT),
    ("model", ASSISTANT),
    ("bot", ASSISTANT),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function_call", ASSISTANT),
    ("tool_call", ASSISTANT),
    ("tool_response", "tool"),
];

/// Fields of messages that templates read.
const FIELDS: [&str; 8] = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "thinking",
    "reasoning",
];

/// Fields of other programs that select which messages are trained.
const SELECTORS: [&str; 6] = ["weight", "train", "trainable", "mask", "masked", "loss"];

/// Reads a list of messages, with either `role` and `content` or `from` and `value`.
pub(super) fn messages(
    value: &Value,
    field: &str,
    extra: &[String],
    notes: &mut Notes,
) -> Result<Vec<Message>> {
    let Value::Array(items) = value else {
        return Err(ChatError::field(field, found(value), "a list of messages"));
    };
    if items.is_empty() {
        return Err(ChatError::field(field, "empty", "a list with at least one message"));
    }
    let read = |(index, item)| message(item, &format!("{field}[{index}]"), extra, notes);
    items.iter().enumerate().map(read).collect()
}

fn message(value: &Value, field: &str, extra: &[String], notes: &mut Notes) -> Result<Message> {
    let Value::Object(fields) = value else {
        return Err(ChatError::field(field, found(value), "an object with `role` and `content`"));
    };
    let mut fields: Map<String, Value> = fields.clone();
    // As `transformers` does. Files with a schema have a null for each field that only other
    // messages have.
    fields.retain(|_, value| !value.is_null());
    let is_sharegpt = fields.contains_key("from") && !fields.contains_key("role");
    if is_sharegpt {
        rename(&mut fields, field)?;
        notes.converted_messages = true;
    }
    // Errors have the names of the file.
    let content = if is_sharegpt { "value" } else { "content" };
    check_names(&fields, field, extra, is_sharegpt)?;
    let role = match fields.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role.clone(),
        role => {
            let found = found_or_missing(role);
            let roles = format!("one of {}", ROLES.map(|it| format!("`{it}`")).join(", "));
            return Err(ChatError::field(format!("{field}.role"), found, roles));
        }
    };
    check_content(&fields, &role, format!("{field}.{content}"))?;
    for name in ["name", "tool_call_id", "reasoning_content", "thinking", "reasoning"] {
        if let Some(value) = fields.get(name).filter(|it| !it.is_string()) {
            return Err(ChatError::field(format!("{field}.{name}"), found(value), "a text"));
        }
    }
    if let Some(calls) = fields.get_mut("tool_calls") {
        if role != ASSISTANT {
            let rule =
                format!("absent, because only messages of the role `{ASSISTANT}` call tools");
            return Err(ChatError::field(format!("{field}.tool_calls"), found(calls), rule));
        }
        check_calls(calls, &format!("{field}.tool_calls"), notes)?;
    }
    Ok(Message::from_fields(fields))
}

/// Renames `from` and `value` to `role` and `content`, and parses calls of functions.
fn rename(fields: &mut Map<String, Value>, field: &str) -> Result<()> {
    let Some(Value::String(sender)) = fields.shift_remove("from") else {
        return Err(ChatError::field(
            format!("{field}.from"),
            "not a text",
            "a text, such as `human`",
        ));
    };
    // Roles are allowed as names of senders, too.
    let role =
        SENDERS.iter().find(|(name, _)| *name == sender).map_or(sender.as_str(), |(_, role)| role);
    if !ROLES.contains(&role) {
        let known =
            ROLES.into_iter().chain(SENDERS.map(|(name, _)| name)).map(|it| format!("`{it}`"));
        let rule = format!("one of {}", known.collect::<Vec<_>>().join(", "));
        return Err(ChatError::field(format!("{field}.from"), found(&sender.into()), rule));
    }
    let mut renamed: Map<String, Value> = [("role".to_owned(), role.into())].into_iter().collect();
    let value = fields.shift_remove("value");
    if matches!(sender.as_str(), "function_call" | "tool_call") {
        let rule = "the JSON text of a call with `name` and `arguments`, or of a list of calls";
        let path = format!("{field}.value");
        let call = match value {
            Some(Value::String(text)) => parsed(&text, &path, rule)?,
            value => return Err(ChatError::field(path, found_or_missing(value.as_ref()), rule)),
        };
        // A model may call several tools at once.
        let calls = match call {
            Value::Array(calls) => calls,
            call => vec![call],
        };
        let calls =
            calls.into_iter().map(|it| json!({"type": "function", "function": it})).collect();
        renamed.insert("content".to_owned(), "".into());
        renamed.insert("tool_calls".to_owned(), Value::Array(calls));
    } else if let Some(value) = value {
        renamed.insert("content".to_owned(), value);
    }
    // In this order, because a template may print a message with all of its fields.
    renamed.extend(std::mem::take(fields));
    *fields = renamed;
    Ok(())
}

fn check_names(
    fields: &Map<String, Value>,
    field: &str,
    extra: &[String],
    is_sharegpt: bool,
) -> Result<()> {
    let in_file = |name: &'static str| match name {
        "role" if is_sharegpt => "from",
        "content" if is_sharegpt => "value",
        name => name,
    };
    for (name, value) in fields {
        if FIELDS.contains(&name.as_str()) || extra.iter().any(|it| it == name) {
            continue;
        }
        // Ignoring such a field would train messages that the user excluded.
        let rule = match SELECTORS.contains(&name.as_str()) {
            true => "absent: the trained messages are selected by role, not one by one; split the conversation into \
                     `prompt` and `completion`"
                .to_owned(),
            false => format!(
                "absent: the fields of messages are {}; remove it, or name it as a field that the template reads",
                FIELDS.map(|it| format!("`{}`", in_file(it))).join(", ")
            ),
        };
        return Err(ChatError::field(format!("{field}.{name}"), found(value), rule));
    }
    Ok(())
}

/// Checks that a content is a text or a list of texts, which only messages that call tools or
/// reason can omit.
fn check_content(fields: &Map<String, Value>, role: &str, field: String) -> Result<()> {
    match fields.get("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) if !parts.is_empty() => {
            for (index, part) in parts.iter().enumerate() {
                let kind = part.get("type").and_then(Value::as_str);
                let is_text =
                    kind == Some("text") && part.get("text").is_some_and(Value::is_string);
                if !is_text {
                    let part = kind.map_or("not a part of text".to_owned(), |it| {
                        format!("a part of the type {}", found(&it.into()))
                    });
                    let rule = "an object with the type `text` and a `text`; images, audio and videos are not supported";
                    return Err(ChatError::field(format!("{field}[{index}]"), part, rule));
                }
            }
            Ok(())
        }
        Some(value) => Err(ChatError::field(field, found(value), "a text, or a list of texts")),
        None if role == ASSISTANT && fields.contains_key("tool_calls") => Ok(()),
        None => Err(ChatError::field(
            field,
            "missing",
            "a text; only messages with `tool_calls` can omit it",
        )),
    }
}

/// Checks calls of tools, and parses arguments that are JSON text.
fn check_calls(calls: &mut Value, field: &str, notes: &mut Notes) -> Result<()> {
    let Value::Array(calls) = calls else {
        return Err(ChatError::field(field, found(calls), "a list of calls"));
    };
    for (index, call) in calls.iter_mut().enumerate() {
        let mut field = format!("{field}[{index}]");
        let mut function = call;
        if function.get("function").is_some_and(|it| !it.is_null()) {
            function = &mut function["function"];
            field += ".function";
        }
        let Value::Object(function) = function else {
            return Err(ChatError::field(
                field,
                found(function),
                "an object with `name` and `arguments`",
            ));
        };
        if !function.get("name").is_some_and(Value::is_string) {
            let found = found_or_missing(function.get("name"));
            return Err(ChatError::field(format!("{field}.name"), found, "a text"));
        }
        let path = format!("{field}.arguments");
        let rule = "an object, or its JSON text";
        let refused = |found: String| ChatError::field(&*path, found, rule);
        match function.get_mut("arguments") {
            // Most templates read the arguments of every call.
            None | Some(Value::Null) => _ = function.insert("arguments".to_owned(), json!({})),
            Some(Value::Object(_)) => {}
            Some(arguments) => {
                let Value::String(text) = &*arguments else {
                    return Err(refused(found(arguments)));
                };
                let value = match text.trim().is_empty() {
                    true => json!({}),
                    false => parsed(text, &path, rule)?,
                };
                if !value.is_object() {
                    return Err(refused(format!("the JSON text of {}", found(&value))));
                }
                *arguments = value;
                notes.parsed_arguments = true;
            }
        }
    }
    Ok(())
}
