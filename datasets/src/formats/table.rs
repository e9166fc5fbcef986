//! Rows of a table, whatever the format of its file.
//!
//! [`read_rows`] hands out the cells of the columns that are asked for, row after row, from
//! `.parquet`, `.csv` and `.jsonl` files alike. What a cell has to be, the caller says, through
//! [`Row::text`] and [`Row::label`]; a cell that is something else is refused by file, place and
//! column.

use std::path::Path;

use crate::DataError;
use crate::formats::format::Format;

/// What is in one place of a table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell {
    /// Text, or anything at all in a `.csv` file.
    Text(String),
    /// An integer or a boolean.
    Integer(i64),
    /// A number that is no integer, in digits.
    Decimal(String),
    /// Nothing.
    Null,
    /// Something that is neither, in words.
    Other(&'static str),
}

impl Cell {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) | Self::Decimal(_) => "a number",
            Self::Null => "null",
            Self::Other(kind) => kind,
        }
    }
}

/// A label as a table has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Label {
    /// A class number.
    Number(u32),
    /// A name, without the spaces around it.
    Name(String),
}

/// The longest name of a class. A column with longer ones probably contains texts, not labels.
const LONGEST_NAME: usize = 200;

/// The beginning of `text`, in quotes and on one line.
pub(crate) fn quoted(text: &str) -> String {
    let mut start: String = text.chars().take(32).collect();
    if start.len() < text.len() {
        start.push_str("...");
    }
    format!("\"{}\"", start.escape_debug())
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

    /// The label in column `at`: a class number from 0, written as a number or as text, or a name.
    pub(crate) fn label(&self, at: usize) -> Result<Label, DataError> {
        match &self.cells[at] {
            Cell::Integer(integer) => self.class_number(at, *integer),
            Cell::Text(text) => self.text_label(at, text.trim()),
            Cell::Decimal(number) => {
                Err(self.unfit(at, format!("{number}, not a class number from 0 or a name")))
            }
            cell @ (Cell::Null | Cell::Other(_)) => {
                Err(self.unfit(at, format!("{}, not a class number or a name", cell.kind())))
            }
        }
    }

    fn text_label(&self, at: usize, text: &str) -> Result<Label, DataError> {
        if let Ok(integer) = text.parse() {
            return self.class_number(at, integer);
        }
        if text.is_empty() {
            return Err(self.unfit(at, "empty; give every row a class number or a name".into()));
        }
        // A column of scores would otherwise make a class of every fraction.
        let numeric = text.starts_with(|it: char| it.is_ascii_digit() || "+-.".contains(it));
        if numeric && text.parse::<f64>().is_ok() {
            return Err(self.unfit(at, format!("{text}, not a class number from 0 or a name")));
        }
        if text.chars().count() > LONGEST_NAME {
            let reason = format!(
                "{}, longer than the {LONGEST_NAME} characters of a class name; choose the column of \
                 the labels",
                quoted(text)
            );
            return Err(self.unfit(at, reason));
        }
        Ok(Label::Name(text.to_owned()))
    }

    fn class_number(&self, at: usize, integer: i64) -> Result<Label, DataError> {
        if integer == -1 {
            return Err(self.unfit(at, "-1, which marks rows without a label".into()));
        }
        let number = u32::try_from(integer)
            .map_err(|_| self.unfit(at, format!("{integer}, not a class from 0 upwards")))?;
        Ok(Label::Number(number))
    }

    /// What is in column `at`, to be written again; `None` for null.
    pub(crate) fn copied(&self, at: usize) -> Result<Option<String>, DataError> {
        match &self.cells[at] {
            Cell::Text(text) | Cell::Decimal(text) => Ok(Some(text.clone())),
            Cell::Integer(integer) => Ok(Some(integer.to_string())),
            Cell::Null => Ok(None),
            Cell::Other(kind) => {
                Err(self.unfit(at, format!("{kind}, which cannot be copied; leave the column out")))
            }
        }
    }

    /// "line 3" or "row 3".
    pub(crate) fn place(&self) -> String {
        let (unit, number) = self.place;
        format!("{unit} {number}")
    }

    /// The error of a cell in column `at` that cannot be used.
    pub(crate) fn unfit(&self, at: usize, reason: String) -> DataError {
        DataError::Cell {
            path: self.path.to_owned(),
            place: self.place(),
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
        Some(Format::JsonLines) => crate::formats::json_lines::read_rows(path, columns, visit),
        Some(Format::Csv) => crate::formats::csv::read_rows(path, columns, visit),
        Some(Format::Parquet) => crate::formats::parquet::read_rows(path, columns, visit),
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
    fn labels_are_class_numbers_or_names() {
        let name = |name: &str| Label::Name(name.to_owned());
        assert_eq!(row(Cell::Integer(1)).label(0).unwrap(), Label::Number(1));
        assert_eq!(row(Cell::Text(" 12 ".into())).label(0).unwrap(), Label::Number(12));
        assert_eq!(row(Cell::Text(" very good\n".into())).label(0).unwrap(), name("very good"));
        assert_eq!(row(Cell::Text("1 star".into())).label(0).unwrap(), name("1 star"));
        for (cell, expected) in [
            (Cell::Integer(-1), "marks rows without a label"),
            (Cell::Text("-1".into()), "marks rows without a label"),
            (Cell::Integer(-2), "field `label` is -2, not a class from 0 upwards"),
            (Cell::Integer(1 << 40), "not a class"),
            (Cell::Text("0.5".into()), "field `label` is 0.5, not a class number from 0 or a name"),
            (Cell::Text(" ".into()), "field `label` is empty"),
            (Cell::Text("a\nb".repeat(100)), "is \"a\\nba\\nb"),
            (Cell::Null, "`t.csv` row 7: field `label` is null, not a class number"),
            (Cell::Other("a list"), "field `label` is a list, not a class number"),
            (Cell::Decimal("0.5".into()), "field `label` is 0.5, not a class number from 0"),
        ] {
            let message = row(cell).label(0).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn what_can_be_written_again_is_copied() {
        let copied = |cell| row(cell).copied(0);
        assert_eq!(copied(Cell::Text("x".into())).unwrap().unwrap(), "x");
        assert_eq!(copied(Cell::Integer(-5)).unwrap().unwrap(), "-5");
        assert_eq!(copied(Cell::Decimal("0.5".into())).unwrap().unwrap(), "0.5");
        assert_eq!(copied(Cell::Null).unwrap(), None);
        let message = copied(Cell::Other("a list")).unwrap_err().to_string();
        assert!(message.contains("`label` is a list, which cannot be copied"), "{message}");
    }

    #[test]
    fn text_is_a_string() {
        assert_eq!(row(Cell::Text("x".into())).text(0).unwrap(), "x");
        let message = row(Cell::Integer(5)).text(0).unwrap_err().to_string();
        assert!(message.contains("field `label` is a number, not a string"), "{message}");
    }
}
