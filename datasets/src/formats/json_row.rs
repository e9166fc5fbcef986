//! A row of a JSON file: the requested fields of an object.
//!
//! Main functions: [`cells`] for the columns of a table, and [`object`] for values of any depth.
//! `NaN` and `Infinity`, which Python writes although JSON does not have them, are allowed in
//! fields that are not read.

use std::borrow::Cow;
use std::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};

use crate::formats::table::{Cell, listed, shortened};

/// The numbers that Python writes and JSON does not have. `-Infinity` is before `Infinity`, so that
/// its sign is found.
const NOT_FINITE: [&str; 3] = ["NaN", "-Infinity", "Infinity"];

/// The beginning of the string that replaces such a number.
const MARK: char = '\0';

/// The number of columns that errors name. A table may have thousands.
const MAX_NAMED: usize = 20;

/// Returns the values at `columns` of the object in `text`, or the problem.
pub(crate) fn cells(text: &str, columns: &[&str]) -> Result<Vec<Cell>, String> {
    let (mut object, _) = fields(text, None)?;
    let value = |column: &&str| match object.get_mut(*column) {
        Some(value) => Ok(cell(value.take())),
        None => {
            let names = listed(object.keys().map(String::as_str));
            let is_chat = ["messages", "conversations"].iter().any(|it| object.contains_key(*it));
            let hint = if is_chat { " (conversations need data.kind \"chat\")" } else { "" };
            Err(format!("no field `{column}`, only {names}{hint}"))
        }
    };
    columns.iter().map(value).collect()
}

/// Returns the fields of the object in `text`, or the problem. Fields that are not in `wanted` are
/// null; `None` wants all.
pub(crate) fn object(text: &str, wanted: Wanted<'_>) -> Result<Map<String, Value>, String> {
    let (object, is_marked) = fields(text, wanted)?;
    // Only a text with such numbers has to be searched.
    let not_finite = object.iter().filter(|_| is_marked).find_map(|(name, value)| {
        let number = not_finite(value)?;
        let name = shortened(name);
        Some(format!("field `{name}` has the number {number}, which JSON does not have"))
    });
    not_finite.map_or(Ok(object), Err)
}

/// Adds nulls for the columns among the first of a table that are not read, because an error about
/// the columns that a row has instead needs their names.
pub(crate) fn insert_unread<'a>(
    fields: &mut Map<String, Value>,
    columns: impl Iterator<Item = &'a str>,
) {
    for name in columns.take(MAX_NAMED) {
        if !fields.contains_key(name) {
            fields.insert(name.to_owned(), Value::Null);
        }
    }
}

/// Parses the object in `text`. Also returns whether it has marked numbers.
fn fields(text: &str, wanted: Wanted<'_>) -> Result<(Map<String, Value>, bool), String> {
    match parse(text, wanted) {
        Ok(object) => Ok((object, false)),
        // Nearly all rows are plain JSON, so other numbers are only searched for after an error.
        Err(error) => match with_marks(text) {
            Cow::Borrowed(_) => Err(problem(text, &error)),
            Cow::Owned(marked) => match parse(&marked, wanted) {
                Ok(object) => Ok((object, true)),
                Err(error) => Err(problem(&marked, &error)),
            },
        },
    }
}

/// Parses the object in `text`, which must be all of it.
fn parse(text: &str, wanted: Wanted<'_>) -> serde_json::Result<Map<String, Value>> {
    let mut parser = serde_json::Deserializer::from_str(text);
    let object = FieldsSeed(wanted).deserialize(&mut parser)?;
    parser.end()?;
    Ok(object)
}

/// Returns the first marked number within `value`.
fn not_finite(value: &Value) -> Option<&'static str> {
    match value {
        Value::String(text) => marked_number(text),
        Value::Array(values) => values.iter().find_map(not_finite),
        Value::Object(fields) => fields.values().find_map(not_finite),
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    }
}

/// Returns the number that a marked string stands for; `None` for other strings.
fn marked_number(text: &str) -> Option<&'static str> {
    let name = text.strip_prefix(MARK)?;
    NOT_FINITE.into_iter().find(|number| *number == name)
}

/// Describes why `text` is not an object. For valid JSON that is not an object, the message names
/// its type instead of the parser's error.
fn problem(text: &str, error: &serde_json::Error) -> String {
    match serde_json::from_str(text) {
        // A valid object has a field twice, which only `FieldsSeed` refuses.
        Ok(Value::Object(_)) | Err(_) => {
            // The parser's message about the first half of a pair without the second one.
            let error = error.to_string().replace(
                "unexpected end of hex escape",
                "lone surrogate in a hex escape, which is half of a character",
            );
            format!("not valid JSON ({error})")
        }
        Ok(other) => format!("found {}, not an object", kind(&other)),
    }
}

/// Replaces numbers that are not finite by strings with a mark, outside of strings. Borrowed if
/// there is none.
fn with_marks(text: &str) -> Cow<'_, str> {
    let (mut marked, mut copied) = (String::new(), 0);
    let (mut in_string, mut at) = (false, 0);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            // The escaped character may be a quote, which does not end the string.
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'N' | b'I' | b'-' if !in_string => {
                let found = NOT_FINITE.iter().find(|name| bytes[at..].starts_with(name.as_bytes()));
                if let Some(name) = found {
                    marked += &text[copied..at];
                    marked += &format!("\"\\u0000{name}\"");
                    at += name.len();
                    copied = at;
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
    match copied {
        0 => Cow::Borrowed(text),
        _ => Cow::Owned(marked + &text[copied..]),
    }
}

/// Returns the type of a value, for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Converts a value to a cell. Booleans become 0 and 1.
pub(crate) fn cell(value: Value) -> Cell {
    match value {
        Value::Null => Cell::Null,
        Value::String(text) => marked_number(&text).map_or(Cell::Text(text), Cell::Other),
        Value::Bool(flag) => Cell::Integer(flag.into()),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => Cell::Integer(integer),
            None => Cell::Decimal(number.to_string()),
        },
        Value::Array(values) => Cell::List(values.into_iter().map(cell).collect()),
        other @ Value::Object(_) => Cell::Other(kind(&other)),
    }
}

/// The names of fields to read; `None` for all.
pub(crate) type Wanted<'a> = Option<&'a [String]>;

/// Builds the fields of an object. A duplicate name is an error at any depth; `serde_json` alone
/// would silently keep the last value.
struct FieldsSeed<'a>(Wanted<'a>);

impl<'de> DeserializeSeed<'de> for FieldsSeed<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, object: D) -> Result<Self::Value, D::Error> {
        object.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldsSeed<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            // Skipped without building the value, which may be most of the row. An error about the
            // fields that a row has instead needs the name.
            if self.0.is_some_and(|wanted| !wanted.contains(&name)) {
                fields.next_value::<IgnoredAny>()?;
                object.insert(name, Value::Null);
                continue;
            }
            if object.contains_key(&name) {
                let name = shortened(&name);
                return Err(A::Error::custom(format_args!("there are two fields `{name}`")));
            }
            let value = fields.next_value_seed(ValueSeed);
            let value = value.map_err(|error| {
                A::Error::custom(format_args!("field `{}`: {error}", shortened(&name)))
            })?;
            object.insert(name, value);
        }
        Ok(object)
    }
}

/// Builds a value of any depth, whose objects have no duplicate names either: a message with two
/// contents would be trained on the last one.
struct ValueSeed;

impl<'de> DeserializeSeed<'de> for ValueSeed {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Value, D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(flag.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(ValueSeed)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Value, A::Error> {
        FieldsSeed(None).visit_map(fields).map(Value::Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_taken_in_the_order_asked_for() {
        let line = r#"{"label": 1, "text": "x", "flag": true, "share": 0.5}"#;
        let taken = cells(line, &["text", "label", "flag", "share"]).unwrap();
        let expected = [
            Cell::Text("x".into()),
            Cell::Integer(1),
            Cell::Integer(1),
            Cell::Decimal("0.5".into()),
        ];
        assert_eq!(taken, expected);
    }

    #[test]
    fn lines_that_are_no_row_are_refused() {
        for (line, expected) in [
            (r#"{"label": 1, "body": "x"}"#, "no field `text`, only [`label`, `body`]"),
            (r#"{"text": "x", "label": 0, "text": "y"}"#, "there are two fields `text`"),
            (r#"{"text": "x", "n": 0, "n": 1}"#, "there are two fields `n`"),
            (r#"{"text": "x", "n": {"a": [{"b": 0, "b": 1}]}}"#, "there are two fields `b`"),
            (r#"[1, "x", {"a": [2]}]"#, "found an array, not an object"),
            ("null", "found null"),
            ("true", "found a boolean"),
            ("-1", "found a number"),
            ("1", "found a number"),
            ("0.5", "found a number"),
            (r#""x""#, "found a string"),
            (r#"{"text": "x""#, "not valid JSON"),
            (r#"{"text": "x"} {}"#, "not valid JSON"),
            (r#"{"text": "x", "n": NaN, "n": 1}"#, "there are two fields `n`"),
            (r#"{"text": "x", "n": NaNs}"#, "not valid JSON"),
            (r#"{"text": "x", "n": Inf}"#, "not valid JSON"),
        ] {
            let reason = cells(line, &["text"]).unwrap_err();
            assert!(reason.contains(expected), "{line}: {reason}");
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_allowed_where_they_are_not_read() {
        let line = r#"{"text": "NaN \" -Infinity", "a": NaN, "b": [-Infinity, Infinity], "c": -1}"#;
        let taken = cells(line, &["text", "a", "b", "c"]).unwrap();
        let expected = [
            Cell::Text("NaN \" -Infinity".into()),
            Cell::Other("NaN"),
            Cell::List(vec![Cell::Other("-Infinity"), Cell::Other("Infinity")]),
            Cell::Integer(-1),
        ];
        assert_eq!(taken, expected);
        assert_eq!(cells(r#"{"a": -Infinity}"#, &["a"]).unwrap(), [Cell::Other("-Infinity")]);
    }
}
