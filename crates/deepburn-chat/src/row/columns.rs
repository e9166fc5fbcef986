//! Access to the columns of a row, with errors that name them.

use serde_json::{Map, Value};

use crate::{ChatError, Result};

/// Describes a value in an error: short values as JSON, long ones by type.
pub(super) fn found(value: &Value) -> String {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    match value {
        // A long text would hide the rule that follows it.
        Value::String(text) if text.len() <= 40 => format!("`{text}`"),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::Array(items) if items.is_empty() => "empty".to_owned(),
        _ => kind.to_owned(),
    }
}

/// Describes a value that may be missing.
pub(super) fn found_or_missing(value: Option<&Value>) -> String {
    value.map_or("missing".to_owned(), found)
}

/// Returns a column that is not null.
pub(super) fn column<'a>(row: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    row.get(name).filter(|it| !it.is_null())
}

/// Returns a column that must be a text.
pub(super) fn text(row: &Map<String, Value>, name: &str) -> Result<String> {
    match column(row, name) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(value) => Err(ChatError::field(name, found(value), "a text")),
        None => Err(ChatError::field(name, absent(row, name), "a text, as in the other rows")),
    }
}

/// Describes a column that is null or missing.
pub(super) fn absent(row: &Map<String, Value>, name: &str) -> &'static str {
    if row.contains_key(name) { "null" } else { "missing" }
}

/// Returns an optional column that must be a text.
pub(super) fn optional_text(row: &Map<String, Value>, name: &str) -> Result<Option<String>> {
    column(row, name).map(|_| text(row, name)).transpose()
}

/// Returns an optional column with a list of objects, which may be JSON text. An empty list is not
/// missing.
pub(super) fn objects(row: &Map<String, Value>, name: &str) -> Result<Option<Vec<Value>>> {
    const RULE: &str = "a list of objects, or its JSON text";
    let refused = |found: String| ChatError::field(name, found, RULE);
    let items = match column(row, name) {
        None => return Ok(None),
        // Files of plain texts, such as CSV, have an empty one where a list is missing.
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => match parsed(text, name, RULE)? {
            Value::Array(items) => items,
            Value::Null => return Ok(None),
            value => return Err(refused(format!("the JSON text of {}", found(&value)))),
        },
        Some(Value::Array(items)) => items.clone(),
        Some(value) => return Err(refused(found(value))),
    };
    for (index, item) in items.iter().enumerate() {
        if !item.is_object() {
            return Err(ChatError::field(format!("{name}[{index}]"), found(item), "an object"));
        }
    }
    Ok(Some(items))
}

/// Parses JSON text inside a field.
pub(super) fn parsed(text: &str, field: &str, rule: &str) -> Result<Value> {
    serde_json::from_str(text)
        .map_err(|error| ChatError::field(field, format!("not valid JSON ({error})"), rule))
}

/// Removes the null fields of all nested objects.
pub(super) fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(kept.map(|(name, value)| (name, without_nulls(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_nulls).collect()),
        value => value,
    }
}
