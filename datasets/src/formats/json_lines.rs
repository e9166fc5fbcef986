//! `.jsonl` files: one JSON object per line. Blank lines are skipped.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::formats::folder::{not_utf8, open_file, strip_byte_order_mark};
use crate::formats::table::{Cell, RowVisitor, TableRow, listed};
use crate::{DataError, Result};

/// Reads rows as [`crate::formats::format::read_rows`] does. Rows are
/// identified by their line numbers.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    let (mut file, mut bytes, mut offset) = (BufReader::new(open_file(path)?), Vec::new(), 0);
    for number in 1.. {
        bytes.clear();
        let read = file.read_until(b'\n', &mut bytes).map_err(DataError::unreadable(path))?;
        if read == 0 {
            break;
        }
        let line = std::str::from_utf8(&bytes)
            .map_err(|error| not_utf8(path, offset + error.valid_up_to()))?;
        let line = if offset == 0 { strip_byte_order_mark(line) } else { line };
        offset += read;
        if line.trim().is_empty() {
            continue;
        }
        let cells = cells(line.trim_end_matches(['\n', '\r']), columns).map_err(|reason| {
            DataError::invalid(
                path,
                format!(
                    "line {number}: {reason}; each line must be a JSON object with the fields that data.text_field and data.label_field name; correct or remove the line"
                ),
            )
        })?;
        visit(TableRow { path, place: ("line", number), columns, cells })?;
    }
    Ok(())
}

/// Returns the values at `columns` of the object in `line`, or the problem.
fn cells(line: &str, columns: &[&str]) -> Result<Vec<Cell>, String> {
    let Fields(mut object) =
        serde_json::from_str(line).map_err(|error| match serde_json::from_str(line) {
            // For valid JSON that is not an object, the message names its type
            // instead of the parser's error.
            Ok(Value::Object(_)) | Err(_) => format!("not valid JSON ({error})"),
            Ok(other) => format!("found {}, not an object", kind(&other)),
        })?;
    let value = |column: &&str| match object.get_mut(*column) {
        Some(value) => Ok(cell(value.take())),
        None => {
            let names = listed(object.keys().map(String::as_str));
            Err(format!("no field `{column}`, only {names}"))
        }
    };
    columns.iter().map(value).collect()
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
        Value::String(text) => Cell::Text(text),
        Value::Bool(flag) => Cell::Integer(flag.into()),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => Cell::Integer(integer),
            None => Cell::Decimal(number.to_string()),
        },
        Value::Array(values) => Cell::List(values.into_iter().map(cell).collect()),
        other @ Value::Object(_) => Cell::Other(kind(&other)),
    }
}

/// The fields of an object. A duplicate name is an error; `serde_json` alone
/// would silently keep the last value.
struct Fields(Map<String, Value>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(line: D) -> Result<Self, D::Error> {
        line.deserialize_map(FieldsVisitor)
    }
}

/// Builds [`Fields`] from the fields of an object.
struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Fields, A::Error> {
        let mut object = Map::new();
        while let Some((name, value)) = fields.next_entry::<String, Value>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!("there are two fields `{name}`")));
            }
            object.insert(name, value);
        }
        Ok(Fields(object))
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
            (r#"[1, "x", {"a": [2]}]"#, "found an array, not an object"),
            ("null", "found null"),
            ("true", "found a boolean"),
            ("-1", "found a number"),
            ("1", "found a number"),
            ("0.5", "found a number"),
            (r#""x""#, "found a string"),
            (r#"{"text": "x""#, "not valid JSON"),
            (r#"{"text": "x"} {}"#, "not valid JSON"),
        ] {
            let reason = cells(line, &["text"]).unwrap_err();
            assert!(reason.contains(expected), "{line}: {reason}");
        }
    }
}
