//! `.csv` files: the first line has the column names, and quotes follow RFC 4180.

use std::io::{self, Read};
use std::path::Path;

use ::csv::{Error, ErrorKind, Reader, ReaderBuilder, StringRecord};

use crate::formats::compression::{TextReader, read_error};
use crate::formats::table::{Cell, RowVisitor, TableRow, no_column};
use crate::{DataError, Result};

/// Reads rows as [`crate::formats::format::read_rows`] does. Row 1 is the first row below the
/// column names.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    let (mut reader, names) = open(path)?;
    // A file without a line has no rows, like an empty file of another format.
    if names.is_empty() {
        return Ok(());
    }
    let places = columns.iter().map(|column| {
        let mut found = (0..names.len()).filter(|&at| &names[at] == *column);
        match (found.next(), found.next()) {
            (None, _) => match other_separator(&names, column) {
                Some(name) => {
                    let reason = format!(
                        "the names in its first line are separated by {name}, and the separator must be a comma"
                    );
                    Err(invalid(path, &reason))
                }
                None => Err(no_column(path, column, &names)),
            },
            (Some(place), None) => Ok(place),
            // It is unknown which of the two columns is meant.
            (Some(_), Some(_)) => Err(invalid(path, &format!("there are two columns `{column}`"))),
        }
    });
    let places = places.collect::<Result<Vec<_>, _>>()?;
    let mut record = StringRecord::new();
    let mut number = 0;
    loop {
        // As with the names, a quote that is not closed explains the error of a record.
        let outcome = reader.read_record(&mut record);
        reader.get_ref().check(path)?;
        if !outcome.map_err(|error| unreadable(path, error))? {
            return Ok(());
        }
        number += 1;
        reader.get_mut().bytes.start_row();
        // The reader returns an error for a record with more or fewer fields than there are column
        // names.
        let cells = places.iter().map(|&at| Cell::Text(record[at].to_owned())).collect();
        visit(TableRow { path, place: ("row", number), columns, cells })?;
    }
}

/// Returns the names of the columns of a file; none if it has no lines.
///
/// # Errors
/// Returns an error if the first line cannot be read.
pub(crate) fn column_names(path: &Path) -> Result<Vec<String>> {
    let (_, names) = open(path)?;
    Ok(names.iter().map(str::to_owned).collect())
}

/// Opens a file, and returns its reader with the names of its columns.
fn open(path: &Path) -> Result<(Reader<QuoteChecker<TextReader>>, StringRecord)> {
    let quotes = QuoteChecker::new(TextReader::open(path)?);
    let mut reader = ReaderBuilder::new().from_reader(quotes);
    let names = reader.headers().cloned();
    // A quote that is not closed explains the other errors.
    reader.get_ref().check(path)?;
    let names = names.map_err(|error| unreadable(path, error))?;
    Ok((reader, names))
}

/// Returns the error of a file that breaks the rules of CSV.
fn invalid(path: &Path, reason: &str) -> DataError {
    DataError::invalid(
        path,
        format!(
            "cannot be read as CSV: {reason}; each row needs one field per name in the first line, in UTF-8, with quotes around fields that contain commas or line breaks; correct the file"
        ),
    )
}

/// Returns the error of a row that cannot be read.
fn unreadable(path: &Path, error: Error) -> DataError {
    let reason = error.to_string();
    match error.into_kind() {
        ErrorKind::Io(cause) => read_error(path)(cause),
        _ => invalid(path, &reason),
    }
}

/// Returns the name of the separator if the names of the columns are separated by something other
/// than a comma.
fn other_separator(names: &StringRecord, column: &str) -> Option<&'static str> {
    let separators = [(';', "semicolons"), ('\t', "tabs"), ('|', "vertical bars")];
    let has_column = |separator| {
        // A name without the separator may only differ from the column by spaces.
        let split = names.iter().filter(|name| name.contains(separator));
        let mut parts = split.flat_map(|name| name.split(separator));
        parts.any(|part| part.trim().trim_matches('"') == column)
    };
    separators.into_iter().find(|(separator, _)| has_column(*separator)).map(|(_, name)| name)
}

/// The state of a reader of CSV: where the next byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CsvState {
    /// At the beginning of a record.
    Record,
    /// At the beginning of another field.
    Field,
    /// In a field without quotes, or after its quotes.
    Unquoted,
    /// In a field with quotes.
    Quoted,
    /// After a quote in a field with quotes, which ends the field unless another quote follows.
    Quote,
}

/// Reads bytes, and finds quotes that are not closed.
///
/// The `csv` crate takes the rest of a file for a field if its quote is not closed. If another
/// quote follows, the field ends there, although the text continues.
struct QuoteChecker<R> {
    /// The bytes.
    bytes: R,
    /// The state before the next byte.
    state: CsvState,
    /// The number of bytes so far, at most 3.
    start: usize,
    /// The row of the next byte; 0 is the line with the names.
    row: Option<usize>,
    /// Whether the current field with quotes has a line break.
    has_break: bool,
    /// The row in which the first quote opens that is not closed.
    open: Option<usize>,
}

impl<R> QuoteChecker<R> {
    fn new(bytes: R) -> Self {
        let state = CsvState::Record;
        Self { bytes, state, start: 0, row: None, has_break: false, open: None }
    }

    /// Returns an error if a quote in the bytes so far is not closed.
    fn check(&self, path: &Path) -> Result<()> {
        let Some(row) = self.open else { return Ok(()) };
        let place = match row {
            0 => "the first line".to_owned(),
            row => format!("row {row}"),
        };
        Err(DataError::invalid(
            path,
            format!(
                "cannot be read as CSV: {place} opens a quote that is not closed; close it, or write a quote within text as two quotes in a field with quotes"
            ),
        ))
    }

    /// Moves past `byte`, by the rules of the `csv` crate.
    fn pass(&mut self, byte: u8) {
        let start = self.start;
        // Only the first three bytes can be a byte-order mark.
        self.start = (start + 1).min(3);
        let is_break = matches!(byte, b'\r' | b'\n');
        let before = self.state;
        self.state = match (before, byte) {
            // A byte-order mark.
            (CsvState::Record, 0xEF | 0xBB | 0xBF) if b"\xef\xbb\xbf".get(start) == Some(&byte) => {
                return;
            }
            // An empty line is not a record.
            (CsvState::Record, _) if is_break => return,
            (CsvState::Record | CsvState::Field, b'"') => {
                self.has_break = false;
                CsvState::Quoted
            }
            (CsvState::Quoted, b'"') => CsvState::Quote,
            (CsvState::Quote, b'"') => CsvState::Quoted,
            (CsvState::Quoted, _) => {
                self.has_break |= is_break;
                return;
            }
            (_, b',') => CsvState::Field,
            _ if is_break => CsvState::Record,
            (CsvState::Quote, b' ' | b'\t') => CsvState::Unquoted,
            (CsvState::Quote, _) => {
                // Text after a quote is usually harmless. After a line break within the quotes,
                // another quote was probably not closed.
                if self.has_break {
                    self.open = self.open.or(self.row);
                }
                CsvState::Unquoted
            }
            _ => CsvState::Unquoted,
        };
        // A record begins with this byte; the other bytes of the record come in other states.
        if before == CsvState::Record {
            self.row = Some(self.row.map_or(0, |row| row + 1));
        }
    }
}

impl<R: Read> Read for QuoteChecker<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read(buffer)?;
        buffer[..read].iter().for_each(|byte| self.pass(*byte));
        // The file ends within a field with quotes.
        if read == 0 && !buffer.is_empty() && self.state == CsvState::Quoted {
            self.open = self.open.or(self.row);
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(contents: &[u8], columns: &[&str]) -> Result<Vec<Vec<Cell>>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.csv");
        std::fs::write(&path, contents).unwrap();
        let mut rows = Vec::new();
        read_rows(&path, columns, &mut |row| {
            rows.push(row.cells);
            Ok(())
        })?;
        Ok(rows)
    }

    #[test]
    fn quotes_commas_and_line_ends_belong_to_the_text() {
        let contents = b"\xef\xbb\xbflabel,text\r\n0,\"one, \"\"two\"\"\nthree\"\r\n1,\n";
        let rows = read(contents, &["text", "label"]).unwrap();
        let text = |text: &str| Cell::Text(text.into());
        assert_eq!(rows, [[text("one, \"two\"\nthree"), text("0")], [text(""), text("1")]]);
    }

    #[test]
    fn an_empty_file_has_no_rows() {
        for contents in [&b""[..], b"\n\n"] {
            assert_eq!(read(contents, &["text"]).unwrap().len(), 0);
        }
    }

    #[test]
    fn a_quote_that_is_not_closed_is_named_by_its_row() {
        let row = |text: &str| format!("{text},1\n");
        let table = |first: &str, later: &str| {
            let rows: String = (1..=100)
                .map(|number| match number {
                    20 => row(first),
                    50 => row(later),
                    _ => row("\"one, \"\"two\"\"\r\n\r\nthree\""),
                })
                .collect();
            format!("\u{feff}text,label\n\n{rows}")
        };
        for (first, later) in [("\"open", "x"), ("\"open", "y \"quoted\""), ("\"a", "\"b")] {
            for columns in [&["text"][..], &["label", "text"]] {
                let error = read(table(first, later).as_bytes(), columns).unwrap_err().to_string();
                assert!(error.contains("row 20 opens a quote that is not closed"), "{error}");
            }
        }
        let error = read(b"text,\"label\n1,2\n", &["text"]).unwrap_err().to_string();
        assert!(error.contains("the first line opens a quote"), "{error}");
        let error = read(b"text,label\nx,1\n\"y,2\nz,3\n", &["text"]).unwrap_err().to_string();
        assert!(error.contains("row 2 opens a quote"), "{error}");
        // These quotes are closed, or not at the beginning of a field.
        for text in ["\"x\" y", "5\" disk", "\"\"", "\"a\"\"\"", "x\"y\"\"z"] {
            let rows = read(table(text, "z").as_bytes(), &["text"]);
            assert_eq!(rows.unwrap().len(), 100, "{text}");
        }
        assert_eq!(read(b"text\n\"x\"", &["text"]).unwrap().len(), 1);
        assert_eq!(read(b"text\r\n\"x\ny\"\r\n\"z\"", &["text"]).unwrap().len(), 2);
    }

    #[test]
    fn another_separator_is_named() {
        for (contents, expected) in [
            (
                &b"text;label\nx;1\n"[..],
                "separated by semicolons, and the separator must be a comma",
            ),
            (b"\"text\"\t\"label\"\nx\t1\n", "separated by tabs"),
            (b"id|text|label\n1|x|1\n", "separated by vertical bars"),
        ] {
            let message = read(contents, &["text", "label"]).unwrap_err().to_string();
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn what_is_no_table_is_refused_with_its_place() {
        for (contents, expected) in [
            (&b"a,b\n1,2\n"[..], "has no column `text`, only [`a`, `b`]"),
            (b"a, text\n1,2\n", "only [`a`, ` text`]; remove the spaces around ` text`"),
            (b"a,\" text\"\n1,2\n", "remove the spaces around ` text`"),
            (b"text,label,text\nx,1,y\n", "there are two columns `text`"),
            (b"text,label\nx,1\ny\n", "line: 3"),
            (b"text,label\nx,1\n\xff,2\n", "(line 3"),
        ] {
            let message = read(contents, &["text"]).unwrap_err().to_string();
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
        }
    }
}
