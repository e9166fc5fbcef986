//! Whole rows of a table, with values of any depth, as JSON.
//!
//! [`visit_rows`] reads rows as text or values, and [`RawRow::parse`] parses them. The two are
//! separate, so that several threads can parse the rows that one thread reads.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::formats::format::Format;
use crate::formats::json_row::{Wanted, insert_unread, object};
use crate::formats::table::{Cell, no_field};
use crate::formats::{csv, json, json_lines, parquet};
use crate::{DataError, Result};

/// A row of a file, with values of any depth.
#[derive(Debug, Clone, PartialEq)]
pub struct DataRow {
    /// The fields of the row. Those that are not read are null.
    pub fields: Map<String, Value>,
    /// Where the row is.
    pub place: FileRow,
}

/// The place of a row, for messages: "`train.jsonl` line 3".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRow {
    /// The file.
    pub file: Arc<Path>,
    /// What is counted: "line" or "row".
    pub unit: &'static str,
    /// The number of the line or row, from 1.
    pub number: usize,
}

impl fmt::Display for FileRow {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "`{}` {} {}", self.file.display(), self.unit, self.number)
    }
}

impl FileRow {
    /// Returns the error of a row. `reason` has the remedy.
    pub(crate) fn invalid(&self, reason: &str) -> DataError {
        let reason = format!("{} {}: {reason}", self.unit, self.number);
        DataError::invalid(&self.file, reason)
    }
}

/// A row that is not parsed yet.
#[derive(Debug)]
pub(crate) struct RawRow {
    /// Unit and number of the row in the file, from 1: "line 3" or "row 3".
    pub(crate) place: (&'static str, usize),
    /// The contents.
    pub(crate) contents: RawContents,
}

/// The contents of a row.
#[derive(Debug)]
pub(crate) enum RawContents {
    /// The text of a JSON object.
    Json(String),
    /// The fields of a row of a parquet or CSV file.
    Fields(Map<String, Value>),
    /// The problem of a row that cannot be read, although the next one can.
    Invalid(String),
}

impl RawRow {
    /// Returns about the bytes of the row in memory.
    pub(crate) fn bytes(&self) -> usize {
        match &self.contents {
            RawContents::Json(text) => text.len(),
            RawContents::Fields(fields) => fields.values().map(bytes).sum(),
            RawContents::Invalid(reason) => reason.len(),
        }
    }

    /// Returns the fields, of which those that are not in `wanted` are null, or the problem and its
    /// remedy; `None` wants all fields.
    pub(crate) fn parse(self, wanted: Wanted<'_>) -> Result<Map<String, Value>, String> {
        match self.contents {
            RawContents::Json(text) => object(&text, wanted).map_err(|reason| in_row(&reason)),
            RawContents::Fields(fields) => Ok(fields),
            RawContents::Invalid(reason) => Err(in_row(&reason)),
        }
    }
}

/// Returns a problem of a row with its remedy.
pub(crate) fn in_row(reason: &str) -> String {
    format!("{reason}; correct or remove the row")
}

/// Returns about the bytes of a value in memory.
fn bytes(value: &Value) -> usize {
    let own = size_of::<Value>();
    match value {
        Value::String(text) => own + text.len(),
        Value::Array(values) => own + values.iter().map(bytes).sum::<usize>(),
        Value::Object(fields) => {
            own + fields.iter().map(|(name, value)| name.len() + bytes(value)).sum::<usize>()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => own,
    }
}

/// A callback for each row.
pub(crate) type RawVisitor<'a> = &'a mut dyn FnMut(RawRow) -> Result<()>;

/// Reads the rows of the table in `path` and calls `visit` for each row, in order. `wanted` are the
/// fields that will be used, so that no other column of a parquet or CSV file is decoded; `None`
/// for all.
///
/// # Errors
/// Returns an error if the file is damaged, is not a table, or has columns but none of those
/// wanted. Errors of `visit` are passed on.
pub(crate) fn visit_rows(path: &Path, wanted: Wanted<'_>, visit: RawVisitor<'_>) -> Result<()> {
    match Format::of(path) {
        Some(Format::JsonLines) => json_lines::visit_lines(path, &mut |number, line| {
            let contents = match line {
                Ok(line) => RawContents::Json(line.to_owned()),
                // The error names the file, which the place of the row names too.
                Err(DataError::InvalidFile { reason, .. }) => RawContents::Invalid(reason),
                Err(error) => return Err(error),
            };
            visit(RawRow { place: ("line", number), contents })
        }),
        Some(Format::Json) => json::visit_objects(path, &mut |place, text| {
            visit(RawRow { place, contents: RawContents::Json(text.to_owned()) })
        }),
        Some(Format::Parquet) => parquet::visit_objects(path, wanted, &mut |number, fields| {
            let contents = fields.map_or_else(RawContents::Invalid, RawContents::Fields);
            visit(RawRow { place: ("row", number), contents })
        }),
        Some(Format::Csv) => visit_csv(path, wanted, visit),
        Some(Format::Plain) | None => Err(DataError::invalid(
            path,
            "is not a table; samples are read from .jsonl, .ndjson, .json and .csv (also with .gz or .zst after them) and .parquet; convert or rename it",
        )),
    }
}

/// Reads the rows of a CSV file, whose values are all strings.
fn visit_csv(path: &Path, wanted: Wanted<'_>, visit: RawVisitor<'_>) -> Result<()> {
    let names = csv::column_names(path)?;
    let is_wanted = |name: &&String| wanted.is_none_or(|wanted| wanted.contains(name));
    let columns: Vec<&str> = names.iter().filter(is_wanted).map(String::as_str).collect();
    if columns.is_empty() && !names.is_empty() {
        let names = names.iter().map(String::as_str);
        return Err(no_field(path, wanted.unwrap_or_default(), names));
    }
    csv::read_rows(path, &columns, &mut |row| {
        let value = |(name, cell): (&&str, Cell)| match cell {
            Cell::Text(text) => Some(((*name).to_owned(), text.into())),
            // Cells of CSV are always text.
            _ => None,
        };
        let mut fields: Map<_, _> = row.columns.iter().zip(row.cells).filter_map(value).collect();
        insert_unread(&mut fields, names.iter().map(String::as_str));
        visit(RawRow { place: row.place, contents: RawContents::Fields(fields) })
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::formats::compression::fixture::{gzip, zstandard};

    /// Reads the rows of a file named `name`, with the places of invalid ones.
    fn read(name: &str, contents: &[u8], wanted: &[&str]) -> Result<Vec<Result<Value, String>>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, contents).unwrap();
        let wanted: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
        let wanted = (!wanted.is_empty()).then_some(&wanted[..]);
        let mut rows = Vec::new();
        visit_rows(&path, wanted, &mut |row| {
            let (unit, number) = row.place;
            let parsed = row.parse(wanted).map(Value::Object);
            rows.push(parsed.map_err(|reason| format!("{unit} {number}: {reason}")));
            Ok(())
        })?;
        Ok(rows)
    }

    #[test]
    fn nested_rows_keep_their_values() {
        let rows = [
            json!({"messages": [{"role": "user", "content": "a"}], "n": 1.5, "m": null}),
            json!({"messages": [], "tools": {"a": [true, [18446744073709551615_u64]]}}),
        ];
        let lines = format!("{}\n\n{}\n", rows[0], rows[1]);
        let array = format!("[{}, {}]", rows[0], rows[1]);
        for (name, contents) in [
            ("t.jsonl", lines.clone().into_bytes()),
            ("t.ndjson.gz", gzip(lines.as_bytes())),
            ("t.json", array.clone().into_bytes()),
            ("t.json.zst", zstandard(lines.as_bytes())),
        ] {
            let found = read(name, &contents, &[]).unwrap();
            assert_eq!(found, rows.clone().map(Ok), "{name}");
        }
        let found = read("t.jsonl", lines.as_bytes(), &["tools", "n"]).unwrap();
        let expected = [
            Ok(json!({"messages": null, "n": 1.5, "m": null})),
            Ok(json!({"messages": null, "tools": rows[1]["tools"]})),
        ];
        assert_eq!(found, expected);
        let found =
            read("t.csv", b"prompt,completion,x\na,\"b, c\",1\n", &["completion", "prompt"]);
        assert_eq!(found.unwrap(), [Ok(json!({"prompt": "a", "completion": "b, c", "x": null}))]);
    }

    #[test]
    fn invalid_rows_are_named_and_the_next_one_is_read() {
        let deep = format!("{{\"messages\": {}{}}}", "[".repeat(500), "]".repeat(500));
        let deep_array = deep.replace(['{', '}'], "");
        let long = "k".repeat(10_000);
        let twice = format!(r#"{{"messages": {{"{long}": 1, "{long}": 2}}}}"#);
        let inside = format!(r#"{{"messages": {{"{long}": {{"a": 1, "a": 2}}}}}}"#);
        let infinite = format!(r#"{{"messages": {{"{long}": [1e999]}}}}"#);
        for (row, expected) in [
            (r#"{"messages": "\udc00 lone"}"#, "field `messages`: lone leading surrogate"),
            (r#"{"messages": "\ud800\u0041"}"#, "field `messages`: lone leading surrogate"),
            (r#"{"messages": "\ud800"}"#, "field `messages`: lone surrogate"),
            (twice.as_str(), "there are two fields `kkk"),
            (inside.as_str(), "kkk...`: there are two fields `a`"),
            (infinite.as_str(), "kkk...`: number out of range"),
            (deep.as_str(), "field `messages`: recursion limit exceeded"),
            (r#"{"messages": [1e999]}"#, "field `messages`: number out of range"),
            (r#"{"messages": [{"a": -Infinity}]}"#, "field `messages` has the number -Infinity"),
            (r#"{"messages": 1, "messages": 2}"#, "there are two fields `messages`"),
            (
                r#"{"messages": [{"content": 1, "content": 2}]}"#,
                "field `messages`: there are two fields `content`",
            ),
            (r#"{"messages": "cut"#, "not valid JSON"),
            (r#"{"messages": 1} {}"#, "not valid JSON (trailing characters"),
            ("[1]", "found an array, not an object"),
            ("\"text\"", "found a string, not an object"),
            (deep_array.as_str(), "not valid JSON"),
        ] {
            let contents = format!("{{}}\n{row}\n{{\"x\": NaN, \"messages\": 1}}\n");
            let found = read("t.jsonl", contents.as_bytes(), &["messages"]).unwrap();
            let error = found[1].as_ref().unwrap_err();
            assert!(error.starts_with("line 2: ") && error.contains(expected), "{error}");
            assert!(!error.contains('\n') && error.len() < 300);
            assert_eq!(found[2], Ok(json!({"x": null, "messages": 1})));
        }
        let found = read("t.jsonl", b"{}\n{\"a\": \"\xff\"}\n{}\n", &[]).unwrap();
        assert!(found[1].as_ref().unwrap_err().contains("is not UTF-8"));
        assert_eq!((found.len(), found[2].is_ok()), (3, true));
        // The mark of a lone surrogate within a field that is not read is harmless.
        assert!(read("t.jsonl", br#"{"x": "\ud800", "y": 1}"#, &["y"]).unwrap()[0].is_ok());
    }

    #[test]
    fn a_row_of_ten_megabytes_is_read() {
        let text = "x".repeat(10 << 20);
        let rows = read("t.jsonl", json!({"text": text}).to_string().as_bytes(), &["text"]);
        assert_eq!(rows.unwrap()[0].as_ref().unwrap()["text"], text);
    }

    #[test]
    fn files_without_fields_are_refused() {
        for (name, contents, expected) in [
            ("t.txt", &b"x"[..], "is not a table"),
            ("t.bin", b"x", "is not a table"),
            ("t.csv", b"a,b\n1,2\n", "has none of the columns [`text`], only [`a`, `b`]"),
            ("t.jsonl", b"[{}]", "it is a JSON array"),
            ("t.json", b"[{}", "not valid JSON"),
        ] {
            let message = read(name, contents, &["text"]).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
