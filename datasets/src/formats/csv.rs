//! `.csv` files: the first line names the columns, quotes as RFC 4180 has them.

use std::fs::File;
use std::path::Path;

use ::csv::{ReaderBuilder, StringRecord};

use crate::DataError;
use crate::formats::table::{Cell, Row, Visit, no_column};
use crate::formats::text::check_regular;

/// See [`crate::formats::table::read_rows`]. Places are rows, from 1 below the names.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: Visit<'_>) -> Result<(), DataError> {
    check_regular(path)?;
    let file = File::open(path).map_err(DataError::unreadable(path))?;
    let invalid = |error: ::csv::Error| DataError::InvalidCsv {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let mut reader = ReaderBuilder::new().from_reader(file);
    let names = reader.headers().map_err(invalid)?.clone();
    if names.is_empty() {
        let reason = "the file is empty".to_owned();
        return Err(DataError::InvalidCsv { path: path.to_owned(), reason });
    }
    let places = columns.iter().map(|column| {
        let mut found = names.iter().enumerate().filter(|(_, name)| name == column);
        let (place, _) = found.next().ok_or_else(|| no_column(path, column, &names))?;
        match found.next() {
            None => Ok(place),
            Some(_) => Err(DataError::InvalidCsv {
                path: path.to_owned(),
                reason: format!("there are two columns `{column}`"),
            }),
        }
    });
    let places = places.collect::<Result<Vec<_>, _>>()?;
    let mut record = StringRecord::new();
    let mut number = 0;
    while reader.read_record(&mut record).map_err(invalid)? {
        number += 1;
        // The reader refuses records that have more or fewer fields than there are names.
        let cells = places.iter().map(|&at| Cell::Text(record[at].to_owned())).collect();
        visit(Row { path, place: ("row", number), columns, cells })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(contents: &[u8], columns: &[&str]) -> Result<Vec<Vec<Cell>>, DataError> {
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
    fn what_is_no_table_is_refused_with_its_place() {
        for (contents, expected) in [
            (&b"a,b\n1,2\n"[..], "has no column `text`, only [`a`, `b`]"),
            (b"", "the file is empty"),
            (b"text,label,text\nx,1,y\n", "there are two columns `text`"),
            (b"text,label\nx,1\ny\n", "line: 3"),
            (b"text,label\nx,1\n\xff,2\n", "(line 3"),
        ] {
            let message = read(contents, &["text"]).unwrap_err().to_string();
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
        }
    }
}
