//! `.jsonl` files: one JSON object a line, blank lines passed over.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::Value;

use crate::DataError;
use crate::records::{Cell, Row, Visit, listed};
use crate::text::check_regular;

/// See [`crate::records::read_rows`]. Places are lines.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: Visit<'_>) -> Result<(), DataError> {
    check_regular(path)?;
    let file = File::open(path).map_err(DataError::unreadable(path))?;
    let (mut file, mut bytes, mut offset) = (BufReader::new(file), Vec::new(), 0);
    for number in 1.. {
        bytes.clear();
        let read = file.read_until(b'\n', &mut bytes).map_err(DataError::unreadable(path))?;
        if read == 0 {
            break;
        }
        let line = std::str::from_utf8(&bytes).map_err(|error| DataError::NotUtf8 {
            path: path.to_owned(),
            offset: offset + error.valid_up_to(),
        })?;
        let line = if offset == 0 { line.strip_prefix('\u{feff}').unwrap_or(line) } else { line };
        offset += read;
        if line.trim().is_empty() {
            continue;
        }
        let cells = cells(line.trim_end_matches(['\n', '\r']), columns).map_err(|reason| {
            DataError::JsonLine { path: path.to_owned(), line: number, reason }
        })?;
        visit(Row { path, place: ("line", number), columns, cells })?;
    }
    Ok(())
}

/// The values at `columns` of the object in `line`, or what is wrong with it.
fn cells(line: &str, columns: &[&str]) -> Result<Vec<Cell>, String> {
    let mut object = match serde_json::from_str(line) {
        Ok(Value::Object(object)) => object,
        Ok(other) => return Err(format!("found {}, not an object", kind(&other))),
        Err(error) => return Err(format!("not valid JSON ({error})")),
    };
    let value = |column: &&str| match object.get_mut(*column) {
        Some(value) => Ok(cell(value.take())),
        None => {
            let names = listed(object.keys().map(String::as_str));
            Err(format!("no field `{column}`, only {names}"))
        }
    };
    columns.iter().map(value).collect()
}

fn cell(value: Value) -> Cell {
    match value {
        Value::String(text) => Cell::Text(text),
        Value::Bool(flag) => Cell::Integer(flag.into()),
        Value::Number(ref number) => match number.as_i64() {
            Some(integer) => Cell::Integer(integer),
            None => Cell::Other(kind(&value)),
        },
        other => Cell::Other(kind(&other)),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_taken_in_the_order_asked_for() {
        let line = r#"{"label": 1, "text": "x", "flag": true, "share": 0.5}"#;
        let taken = cells(line, &["text", "label", "flag", "share"]).unwrap();
        let expected =
            [Cell::Text("x".into()), Cell::Integer(1), Cell::Integer(1), Cell::Other("a number")];
        assert_eq!(taken, expected);
        let reason = cells(line, &["body"]).unwrap_err();
        assert!(reason.starts_with("no field `body`, only [`label`, `text`"), "{reason}");
    }
}
