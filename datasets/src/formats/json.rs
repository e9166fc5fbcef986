//! `.json` files: an array of objects, or objects one after another, on one line each or on
//! several.
//!
//! The objects are read one by one: [`Scanner`] finds the end of an object by its brackets, and
//! only this object is parsed. So memory does not grow with the file.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use crate::formats::compression::{TextReader, read_error};
use crate::formats::folder::not_utf8;
use crate::formats::json_row::cells;
use crate::formats::table::{RowVisitor, TableRow};
use crate::{DataError, Result};

/// The UTF-8 byte-order mark.
const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// How the objects of a file follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonFraming {
    /// Elements of an array, which are numbered.
    Array,
    /// Objects one after another, which are identified by their first line.
    Sequence,
}

/// A callback for the unit and number of a row, and its text.
pub(crate) type ObjectVisitor<'a> = &'a mut dyn FnMut((&'static str, usize), &str) -> Result<()>;

/// Reads rows as [`crate::formats::format::read_rows`] does.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    visit_objects(path, &mut |place, text| {
        let cells = cells(text, columns).map_err(|reason| {
            let (unit, number) = place;
            let rule = "with the fields that data.text_field and data.label_field name";
            invalid(path, &format!("{unit} {number}"), &reason, rule)
        })?;
        visit(TableRow { path, place, columns, cells })
    })
}

/// Calls `visit` for each object of a file.
///
/// # Errors
/// Returns an error if the file cannot be read, or if the end of an object cannot be found. Errors
/// of `visit` are passed on.
pub(crate) fn visit_objects(path: &Path, visit: ObjectVisitor<'_>) -> Result<()> {
    let reader = BufReader::new(TextReader::open(path)?);
    let mut scanner = Scanner { path, reader, line: 1, offset: 0 };
    scanner.skip_byte_order_mark()?;
    let framing = match scanner.next_visible()? {
        None => return Ok(()),
        Some(b'[') => JsonFraming::Array,
        Some(b'{') => JsonFraming::Sequence,
        // Text in another encoding, about which the message below would mislead.
        Some(byte) if !byte.is_ascii() => return Err(not_utf8(path, scanner.offset)),
        Some(_) => {
            let reason = "it must start with `[` or `{`".to_owned();
            return Err(scanner.invalid("line 1", &reason));
        }
    };
    if framing == JsonFraming::Array {
        scanner.skip(1);
    }
    let mut row = Vec::new();
    for number in 1.. {
        if !scanner.has_row(framing, number)? {
            break;
        }
        let (start, line) = (scanner.offset, scanner.line);
        let place = if framing == JsonFraming::Array { ("row", number) } else { ("line", line) };
        scanner.take_value(&mut row, &format!("{} {}", place.0, place.1))?;
        let text = std::str::from_utf8(&row)
            .map_err(|error| not_utf8(path, start + error.valid_up_to()))?;
        visit(place, text)?;
    }
    Ok(())
}

/// Finds the objects of a file.
struct Scanner<'p> {
    /// The file.
    path: &'p Path,
    /// Its bytes that are not yet scanned.
    reader: BufReader<TextReader>,
    /// The line of the next byte, from 1.
    line: usize,
    /// The number of bytes before the next byte.
    offset: usize,
}

impl Scanner<'_> {
    /// Returns the next byte without consuming it; `None` at the end.
    fn peek(&mut self) -> Result<Option<u8>> {
        let bytes = self.reader.fill_buf().map_err(read_error(self.path))?;
        Ok(bytes.first().copied())
    }

    /// Consumes `count` bytes of the buffer.
    fn skip(&mut self, count: usize) {
        self.reader.consume(count);
        self.offset += count;
    }

    /// Consumes a byte-order mark at the start of the file.
    ///
    /// # Errors
    /// Returns the error of invalid UTF-8 for the mark of UTF-16.
    fn skip_byte_order_mark(&mut self) -> Result<()> {
        if self.peek()? != Some(BYTE_ORDER_MARK[0]) {
            return Ok(());
        }
        // A file of one or two bytes leaves zeros in the mark, and is refused like another mark.
        let mut mark = [0; 3];
        match self.reader.read_exact(&mut mark) {
            Err(cause) if cause.kind() != io::ErrorKind::UnexpectedEof => {
                return Err(read_error(self.path)(cause));
            }
            _ if mark != BYTE_ORDER_MARK => return Err(not_utf8(self.path, 0)),
            _ => self.offset = mark.len(),
        }
        Ok(())
    }

    /// Skips whitespace. Returns the byte after it without consuming it.
    fn next_visible(&mut self) -> Result<Option<u8>> {
        while let Some(byte) = self.peek()? {
            self.reader.get_mut().start_row();
            if !matches!(byte, b' ' | b'\t' | b'\r' | b'\n') {
                return Ok(Some(byte));
            }
            self.line += usize::from(byte == b'\n');
            self.skip(1);
        }
        Ok(None)
    }

    /// Moves to the value of row `number`. Returns false at the end of the array or the file.
    fn has_row(&mut self, framing: JsonFraming, number: usize) -> Result<bool> {
        let found = self.next_visible()?;
        if framing == JsonFraming::Sequence {
            return match found {
                None => Ok(false),
                Some(b'{') => Ok(true),
                Some(_) => Err(self.unexpected("another object or the end of the file")),
            };
        }
        match found {
            Some(b']') => {
                self.skip(1);
                return match self.next_visible()? {
                    None => Ok(false),
                    Some(_) => Err(self.unexpected("the end of the file after the array")),
                };
            }
            Some(b',') if number > 1 => self.skip(1),
            // If this is not an object, the parser will name its type.
            Some(_) if number == 1 => return Ok(true),
            _ => return Err(self.unexpected("`,` or `]` after the object")),
        }
        match self.next_visible()? {
            Some(byte) if !matches!(byte, b']' | b',') => Ok(true),
            _ => Err(self.unexpected("an object after `,`")),
        }
    }

    /// Moves the bytes of the next value to `value`. For an array or an object, these are all bytes
    /// up to its closing bracket.
    fn take_value(&mut self, value: &mut Vec<u8>, place: &str) -> Result<()> {
        value.clear();
        // The state outlives a buffer, because a value may span several buffers.
        let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
        loop {
            let bytes = self.reader.fill_buf().map_err(read_error(self.path))?;
            // A number or a word may end with the file. The parser decides whether it is valid.
            if bytes.is_empty() && depth == 0 && !in_string {
                return Ok(());
            } else if bytes.is_empty() {
                return Err(self.invalid(place, "not valid JSON (the file ends within it)"));
            }
            let mut end = None;
            for (at, byte) in bytes.iter().enumerate() {
                self.line += usize::from(*byte == b'\n');
                match byte {
                    _ if is_escaped => is_escaped = false,
                    b'\\' if in_string => is_escaped = true,
                    b'"' => in_string = !in_string,
                    _ if in_string => {}
                    b'{' | b'[' => depth += 1,
                    // The comma or bracket after a number or a word.
                    b',' | b'}' | b']' if depth == 0 => end = Some(at),
                    b'}' | b']' if depth == 1 => end = Some(at + 1),
                    b'}' | b']' => depth -= 1,
                    _ => {}
                }
                if end.is_some() {
                    break;
                }
            }
            let taken = end.unwrap_or(bytes.len());
            value.extend_from_slice(&bytes[..taken]);
            self.skip(taken);
            if end.is_some() {
                return Ok(());
            }
        }
    }

    /// Returns the error of a byte that should not be there.
    fn unexpected(&self, expected: &str) -> DataError {
        let place = format!("line {}", self.line);
        self.invalid(&place, &format!("not valid JSON (expected {expected})"))
    }

    /// Returns the error of invalid contents at `place`.
    fn invalid(&self, place: &str, reason: &str) -> DataError {
        invalid(self.path, place, reason, "each with the fields of its row")
    }
}

/// Returns the error of invalid contents at `place` of a file whose objects must be `rule`.
fn invalid(path: &Path, place: &str, reason: &str, rule: &str) -> DataError {
    DataError::invalid(
        path,
        format!(
            "{place}: {reason}; a .json file must be an array of objects, or objects one after another, {rule}; correct the file"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::table::Cell;

    /// Returns the place and the text of each row.
    fn read(contents: &[u8]) -> Result<Vec<(String, String)>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        std::fs::write(&path, contents).unwrap();
        let mut rows = Vec::new();
        read_rows(&path, &["text"], &mut |mut row| {
            rows.push((row.place(), row.text(0)?));
            Ok(())
        })?;
        Ok(rows)
    }

    fn rows(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(place, text)| ((*place).into(), (*text).into())).collect()
    }

    #[test]
    fn arrays_and_sequences_are_read() {
        let one_and_two = rows(&[("row 1", "a]}"), ("row 2", "b\"")]);
        for contents in [
            r#"[{"text": "a]}"},{"text": "b\""}]"#,
            "\u{feff} [\r\n {\"text\": \"a]}\", \"n\": [{}, NaN]} ,\n{\"text\": \"b\\\"\"}\n]\n",
        ] {
            assert_eq!(read(contents.as_bytes()).unwrap(), one_and_two, "{contents}");
        }
        let lines =
            "{\"text\": \"a\"}\n\n{\n  \"n\": {\"x\": 1},\n  \"text\": \"b\"\n}{\"text\": \"c\"}";
        let expected = rows(&[("line 1", "a"), ("line 3", "b"), ("line 6", "c")]);
        assert_eq!(read(lines.as_bytes()).unwrap(), expected);
        assert_eq!(read(b"[]").unwrap(), []);
        assert_eq!(read(b" \n").unwrap(), []);
    }

    #[test]
    fn rows_between_two_buffers_stay_whole() {
        let text = "x]\\\\\u{e9}".repeat(20_000);
        let contents = format!("[{{\"text\": \"{text}\"}}, {{\"text\": \"y\"}}]");
        let found = read(contents.as_bytes()).unwrap();
        assert_eq!(found[0].1, text.replace("\\\\", "\\"));
        assert_eq!(found[1], ("row 2".to_owned(), "y".to_owned()));
    }

    #[test]
    fn what_is_no_list_of_objects_is_refused_with_its_place() {
        for (contents, expected) in [
            (&br#"{"data": [{"text": "x"}]}"#[..], "line 1: no field `text`, only [`data`]"),
            (b"[\n{\"text\": \"x\"},\n{\"body\": \"y\"}]", "row 2: no field `text`"),
            (br#"[{"text": "x"}, "y"]"#, "row 2: found a string, not an object"),
            (b"[5]", "row 1: found a number, not an object"),
            (b"[{\"text\": \"x\"},\n", "line 2: not valid JSON (expected an object after `,`)"),
            (br#"[{"text": "x"},]"#, "(expected an object after `,`)"),
            (br#"[,{"text": "x"}]"#, "row 1: not valid JSON"),
            (br#"[{"text": "x"} {"text": "x"}]"#, "(expected `,` or `]` after the object)"),
            (br#"[{"text": "x"}"#, "(expected `,` or `]` after the object)"),
            (br#"[{"text": "x"}] x"#, "(expected the end of the file after the array)"),
            (br#"[{"text": "x"}][]"#, "(expected the end of the file after the array)"),
            (b"{\"text\": \"x\"},\n{}", "line 1: not valid JSON (expected another object"),
            (br#"[{"text": "x"#, "row 1: not valid JSON (the file ends within it)"),
            (
                b"{\"text\": \"x\"}\n{\"text\": [",
                "line 2: not valid JSON (the file ends within it)",
            ),
            (br#"[{"text": ]}]"#, "row 1: not valid JSON"),
            (b"\"text\"", "line 1: it must start with `[` or `{`"),
            (b"\xff\xfe[\0", "is not UTF-8: invalid byte at offset 0"),
            (b"\xef\xff[", "is not UTF-8: invalid byte at offset 0"),
            (b"[{\"text\": \"\xff\"}]", "is not UTF-8: invalid byte at offset 11"),
            (b"[{\"text\": 5}]", "row 1: field `text` is a number, not a string"),
            (b"[{\"text\": NaN}]", "row 1: field `text` is NaN, not a string"),
            (&b"[".repeat(100_000), "row 1: not valid JSON (the file ends within it)"),
        ] {
            let message = read(contents).unwrap_err().to_string();
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn cells_keep_their_types() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        std::fs::write(&path, r#"[{"a": 1.0, "b": null}]"#).unwrap();
        read_rows(&path, &["a", "b"], &mut |row| {
            assert_eq!(row.cells, [Cell::Decimal("1.0".into()), Cell::Null]);
            Ok(())
        })
        .unwrap();
    }
}
