//! `.csv` files: the first line has the column names, and quotes follow RFC
//! 4180.

use std::path::Path;

use ::csv::{Error, ErrorKind, ReaderBuilder, StringRecord};

use crate::formats::compression::{TextReader, read_error};
use crate::formats::table::{Cell, RowVisitor, TableRow, no_column};
use crate::{DataError, Result};

/// Reads rows as [`crate::formats::format::read_rows`] does. Row 1 is the first
/// row below the column names.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    let invalid = |reason: String| {
        DataError::invalid(
            path,
            format!(
                "cannot be read as CSV: {reason}; each row needs one field per name in the first line, in UTF-8, with quotes around fields that contain commas or line breaks; correct the file"
            ),
        )
    };
    let unreadable = |error: Error| {
        let reason = error.to_string();
        match error.into_kind() {
            ErrorKind::Io(cause) => read_error(path)(cause),
            _ => invalid(reason),
        }
    };
    let mut reader = ReaderBuilder::new().from_reader(TextReader::open(path)?);
    let names = reader.headers().map_err(unreadable)?.clone();
    // A file without a line has no rows, like an empty file of another format.
    if names.is_empty() {
        return Ok(());
    }
    let places = columns.iter().map(|column| {
        let mut found = (0..names.len()).filter(|&at| &names[at] == *column);
        match (found.next(), found.next()) {
            (None, _) => Err(no_column(path, column, &names)),
            (Some(place), None) => Ok(place),
            // It is unknown which of the two columns is meant.
            (Some(_), Some(_)) => Err(invalid(format!("there are two columns `{column}`"))),
        }
    });
    let places = places.collect::<Result<Vec<_>, _>>()?;
    let mut record = StringRecord::new();
    let mut number = 0;
    while reader.read_record(&mut record).map_err(unreadable)? {
        number += 1;
        reader.get_mut().start_row();
        // The reader returns an error for a record with more or fewer fields
        // than there are column names.
        let cells = places.iter().map(|&at| Cell::Text(record[at].to_owned())).collect();
        visit(TableRow { path, place: ("row", number), columns, cells })?;
    }
    Ok(())
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
    fn what_is_no_table_is_refused_with_its_place() {
        for (contents, expected) in [
            (&b"a,b\n1,2\n"[..], "has no column `text`, only [`a`, `b`]"),
            (b"text,label,text\nx,1,y\n", "there are two columns `text`"),
            (b"text,label\nx,1\ny\n", "line: 3"),
            (b"text,label\nx,1\n\xff,2\n", "(line 3"),
        ] {
            let message = read(contents, &["text"]).unwrap_err().to_string();
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
        }
    }
}
