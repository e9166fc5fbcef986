//! Rows of a table, whatever the format of its file.
//!
//! [`read_rows`] hands out the cells of the columns that are asked for, row after row, from
//! `.parquet`, `.csv` and `.jsonl` files alike. What a cell has to be, the caller says, through
//! [`Row::text`] and [`Row::label`]; a cell that is something else is refused by file, place and
//! column.

use std::path::Path;

use crate::DataError;
use crate::format::Format;

/// What is in one place of a table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell {
    /// Text, or anything at all in a `.csv` file.
    Text(String),
    /// An integer or a boolean.
    Integer(i64),
    /// Something that is neither, in words.
    Other(&'static str),
}

impl Cell {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) => "a number",
            Self::Other(kind) => kind,
        }
    }
}

/// Cells of one row, in the order of the columns that were asked for.
#[derive(Debug)]
pub(crate) struct Row<'a> {
    pub(crate) path: &'a Path,
    /// Where in the file, from 1: "line 3" or "row 3".
    pub(crate) place: (&'static str, usize),
    pub(crate) columns: &'a [&'a str],
    pub(crate) cells: Vec<Cell>,
}

impl Row<'_> {
    /// Takes the text out of column `at`.
    pub(crate) fn text(&mut self, at: usize) -> Result<String, DataError> {
        match std::mem::replace(&mut self.cells[at], Cell::Other("taken")) {
            Cell::Text(text) => Ok(text),
            other => Err(self.unfit(at, format!("{}, not a string", other.kind()))),
        }
    }

    /// The class in column `at`: an integer from 0, written as a number or as text.
    pub(crate) fn label(&self, at: usize) -> Result<u32, DataError> {
        let integer = match &self.cells[at] {
            Cell::Integer(integer) => Some(*integer),
            Cell::Text(text) => text.trim().parse().ok(),
            Cell::Other(_) => None,
        };
        match (integer, &self.cells[at]) {
            (Some(-1), _) => Err(self.unfit(at, "-1, which marks rows without a label".into())),
            (Some(integer), _) => u32::try_from(integer)
                .map_err(|_| self.unfit(at, format!("{integer}, not a class from 0 upwards"))),
            (None, Cell::Text(text)) => {
                // Text of any length may stand where a label should.
                let start: String = text.chars().take(32).collect();
                Err(self.unfit(at, format!("\"{}\", not an integer", start.escape_debug())))
            }
            (None, other) => Err(self.unfit(at, format!("{}, not an integer", other.kind()))),
        }
    }

    fn unfit(&self, at: usize, reason: String) -> DataError {
        let (unit, number) = self.place;
        DataError::Cell {
            path: self.path.to_owned(),
            place: format!("{unit} {number}"),
            reason: format!("field `{}` is {reason}", self.columns[at]),
        }
    }
}

/// What becomes of each row.
pub(crate) type Visit<'a> = &'a mut dyn FnMut(Row<'_>) -> Result<(), DataError>;

/// Reads `columns` of the table in `path`, first row first.
///
/// # Errors
/// A file that is damaged, is no table, or lacks a column; and those of `visit`.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: Visit<'_>) -> Result<(), DataError> {
    match Format::of(path) {
        Some(Format::JsonLines) => crate::json_lines::read_rows(path, columns, visit),
        Some(Format::Csv) => crate::csv::read_rows(path, columns, visit),
        Some(Format::Parquet) => crate::parquet::read_rows(path, columns, visit),
        Some(Format::Plain) => Err(DataError::NoTable { path: path.to_owned() }),
        None => Err(DataError::UnknownTextFile { path: path.to_owned() }),
    }
}

/// Names of columns for an error, the first few of them.
pub(crate) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.into_iter().take(8).map(|name| format!("`{name}`")).collect();
    format!("[{}]", names.join(", "))
}

/// A file without a column that is asked for.
pub(crate) fn no_column<'a>(
    path: &Path,
    column: &str,
    columns: impl IntoIterator<Item = &'a str>,
) -> DataError {
    DataError::NoColumn {
        path: path.to_owned(),
        column: column.to_owned(),
        columns: listed(columns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cell: Cell) -> Row<'static> {
        Row { path: Path::new("t.csv"), place: ("row", 7), columns: &["label"], cells: vec![cell] }
    }

    #[test]
    fn labels_are_integers_however_written() {
        assert_eq!(row(Cell::Integer(1)).label(0).unwrap(), 1);
        assert_eq!(row(Cell::Text(" 12 ".into())).label(0).unwrap(), 12);
        for (cell, expected) in [
            (Cell::Integer(-1), "marks rows without a label"),
            (Cell::Integer(-2), "field `label` is -2, not a class from 0 upwards"),
            (Cell::Integer(1 << 40), "not a class"),
            (Cell::Text("a\nb".into()), "is \"a\\nb\", not an integer"),
            (Cell::Text("0.5".into()), "not an integer"),
            (Cell::Other("null"), "`t.csv` row 7: field `label` is null, not an integer"),
        ] {
            let message = row(cell).label(0).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn text_is_a_string() {
        assert_eq!(row(Cell::Text("x".into())).text(0).unwrap(), "x");
        let message = row(Cell::Integer(5)).text(0).unwrap_err().to_string();
        assert!(message.contains("field `label` is a number, not a string"), "{message}");
    }
}
