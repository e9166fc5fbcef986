//! `.jsonl` files: one JSON object a line, blank lines passed over.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::DataError;
use crate::formats::table::{Cell, Row, Visit, listed};
use crate::formats::text::check_regular;

/// See [`crate::formats::table::read_rows`]. Places are lines.
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
        Ok(Line::Object(object)) => object,
        Ok(Line::Other(kind)) => return Err(format!("found {kind}, not an object")),
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
        Value::Null => Cell::Null,
        Value::String(text) => Cell::Text(text),
        Value::Bool(flag) => Cell::Integer(flag.into()),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => Cell::Integer(integer),
            None => Cell::Decimal(number.to_string()),
        },
        Value::Array(_) => Cell::Other("an array"),
        Value::Object(_) => Cell::Other("an object"),
    }
}

/// What a line holds.
enum Line {
    Object(Map<String, Value>),
    /// Anything else, in words.
    Other(&'static str),
}

impl<'de> Deserialize<'de> for Line {
    fn deserialize<D: Deserializer<'de>>(line: D) -> Result<Self, D::Error> {
        line.deserialize_any(LineVisitor)
    }
}

/// Refuses an object with a field twice: `serde_json` alone would take the last one in silence.
struct LineVisitor;

impl<'de> Visitor<'de> for LineVisitor {
    type Value = Line;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Line, A::Error> {
        let mut object = Map::new();
        while let Some((name, value)) = fields.next_entry::<String, Value>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!("there are two fields `{name}`")));
            }
            object.insert(name, value);
        }
        Ok(Line::Object(object))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Line, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Line::Other("an array"))
    }

    fn visit_unit<E>(self) -> Result<Line, E> {
        Ok(Line::Other("null"))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Line, E> {
        Ok(Line::Other("a boolean"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Line, E> {
        Ok(Line::Other("a number"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Line, E> {
        Ok(Line::Other("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Line, E> {
        Ok(Line::Other("a number"))
    }

    fn visit_str<E>(self, _: &str) -> Result<Line, E> {
        Ok(Line::Other("a string"))
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
