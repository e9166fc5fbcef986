//! `.jsonl` files: one JSON object per line. Blank lines are skipped.

use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::formats::compression::{TextReader, read_error};
use crate::formats::folder::{not_utf8, strip_byte_order_mark};
use crate::formats::json_row::cells;
use crate::formats::table::{RowVisitor, TableRow};
use crate::{DataError, Result};

/// Bytes that are read from a file at a time.
const READ_BYTES: usize = 1 << 16;

/// A callback for the number and the text of each line.
pub(crate) type LineVisitor<'a> = &'a mut dyn FnMut(usize, Result<&str>) -> Result<()>;

/// Reads rows as [`crate::formats::format::read_rows`] does. Rows are identified by their line
/// numbers.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    visit_lines(path, &mut |number, line| {
        let cells = cells(line?, columns).map_err(|reason| {
            DataError::invalid(
                path,
                format!(
                    "line {number}: {reason}; each line must be a JSON object with the fields that data.text_field and data.label_field name; correct or remove the line"
                ),
            )
        })?;
        visit(TableRow { path, place: ("line", number), columns, cells })
    })
}

/// Calls `visit` with the number and the text of each line that is not blank. A line that is not
/// UTF-8 is passed on as an error, after which the next line can be read.
///
/// # Errors
/// Returns an error if the file cannot be read or is a JSON array. Errors of `visit` are passed on.
pub(crate) fn visit_lines(path: &Path, visit: LineVisitor<'_>) -> Result<()> {
    let mut file = BufReader::with_capacity(READ_BYTES, TextReader::open(path)?);
    let (mut bytes, mut offset, mut is_first) = (Vec::new(), 0, true);
    for number in 1.. {
        bytes.clear();
        file.get_mut().start_row();
        let read = file.read_until(b'\n', &mut bytes).map_err(read_error(path))?;
        if read == 0 {
            break;
        }
        let start = offset;
        offset += read;
        let line = match std::str::from_utf8(&bytes) {
            Ok(line) => line,
            Err(error) => {
                visit(number, Err(not_utf8(path, start + error.valid_up_to())))?;
                continue;
            }
        };
        let line = if start == 0 { strip_byte_order_mark(line) } else { line };
        if line.trim().is_empty() {
            continue;
        }
        if std::mem::take(&mut is_first) && line.trim_start().starts_with('[') {
            return Err(is_array(path, number));
        }
        visit(number, Ok(line.trim_end_matches(['\n', '\r'])))?;
    }
    Ok(())
}

/// Returns the error of a file whose first row, in line `number`, begins a JSON array.
fn is_array(path: &Path, number: usize) -> DataError {
    let reason = format!(
        "line {number}: starts with `[`: it is a JSON array; give the file a name that ends in .json, or write one JSON object per line"
    );
    DataError::invalid(path, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        let read = |contents: &str| {
            std::fs::write(&path, contents).unwrap();
            read_rows(&path, &["text"], &mut |_| Ok(())).unwrap_err().to_string()
        };
        for (contents, line) in
            [("[{\"text\": \"x\"}]", 1), ("\n [\n{\"text\": \"x\"}\n]\n", 2), ("[]", 1)]
        {
            let expected = format!(
                "t.jsonl` line {line}: starts with `[`: it is a JSON array; give the file a name that ends in .json"
            );
            let message = read(contents);
            assert!(message.contains(&expected), "{message}");
        }
        // Only the beginning of the file decides.
        let message = read("{\"text\": \"x\"}\n[1]\n");
        assert!(message.contains("line 2") && message.contains("remove the line"), "{message}");
    }
}
