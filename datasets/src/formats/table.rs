//! Rows of a table, independent of the format of its file.
//!
//! Main type: [`TableRow`]. [`TableRow::text`] and [`TableRow::label`] check the type of a cell;
//! the error names the file, the row and the column.

use std::borrow::Cow;
use std::path::Path;

use serde_json::Value;

use crate::{DataError, Result};

/// A cell of a table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell {
    /// Text. Every cell of a `.csv` file is text.
    Text(String),
    /// An integer or a boolean.
    Integer(i64),
    /// A number that is not a 64-bit integer, in decimal notation.
    Decimal(String),
    /// A missing value.
    Null,
    /// A list of values.
    List(Vec<Cell>),
    /// A value of another type, described in words.
    Other(&'static str),
}

impl Cell {
    /// Returns the type of the cell, for messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) | Self::Decimal(_) => "a number",
            Self::Null => "null",
            Self::List(_) => "an array",
            Self::Other(kind) => kind,
        }
    }

    /// Returns the cell as JSON; `None` for a value that JSON does not have.
    fn to_json(&self) -> Option<Value> {
        Some(match self {
            Self::Text(text) => text.as_str().into(),
            Self::Integer(integer) => (*integer).into(),
            Self::Decimal(number) => serde_json::from_str(number).ok()?,
            Self::Null => Value::Null,
            Self::List(cells) => {
                cells.iter().map(Self::to_json).collect::<Option<Vec<_>>>()?.into()
            }
            Self::Other(_) => return None,
        })
    }
}

/// The label of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Label {
    /// A class number.
    Number(u32),
    /// A class name, without surrounding whitespace.
    Name(String),
}

/// The longest name of a class in characters. A column with longer values probably contains texts.
const MAX_NAME_CHARS: usize = 200;

/// The number of characters of a name in messages.
const MAX_SHOWN_CHARS: usize = 100;

/// Returns the beginning of a name of a file for a message, because a name may have megabytes.
pub(crate) fn shortened(name: &str) -> Cow<'_, str> {
    match name.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &name[..end]).into(),
        None => name.into(),
    }
}

/// Returns the beginning of `text`, quoted and escaped to one line.
pub(crate) fn quoted(text: &str) -> String {
    let start: String = text.chars().take(32).collect();
    let rest = if start.len() < text.len() { "..." } else { "" };
    format!("\"{}{rest}\"", start.escape_debug())
}

/// The cells of one row, in the order of the requested columns.
#[derive(Debug)]
pub(crate) struct TableRow<'a> {
    /// The file of the table.
    pub(crate) path: &'a Path,
    /// Unit and number of the row in the file, from 1: "line 3" or "row 3".
    pub(crate) place: (&'static str, usize),
    /// The names of the requested columns.
    pub(crate) columns: &'a [&'a str],
    /// The cells of these columns.
    pub(crate) cells: Vec<Cell>,
}

impl TableRow<'_> {
    /// Moves the text out of column `at`.
    pub(crate) fn text(&mut self, at: usize) -> Result<String> {
        // Texts may be long, so they are moved and not copied.
        match std::mem::replace(&mut self.cells[at], Cell::Other("taken")) {
            Cell::Text(text) => Ok(text),
            other => Err(self.invalid(at, format!("{}, not a string", other.kind()))),
        }
    }

    /// Returns the label in column `at`: a class number from 0, as a number or as text, or a name.
    pub(crate) fn label(&self, at: usize) -> Result<Label> {
        self.label_in(at, &self.cells[at])
    }

    /// Returns the label in `cell`, which is the cell of column `at` or an element of its list.
    pub(crate) fn label_in(&self, at: usize, cell: &Cell) -> Result<Label> {
        match cell {
            Cell::Integer(integer) => self.class_number(at, *integer),
            Cell::Text(text) => self.text_label(at, text.trim()),
            Cell::Decimal(number) => match whole_number(number) {
                Some(integer) => self.class_number(at, integer),
                None => Err(self.no_class_number(at, number)),
            },
            cell @ (Cell::Null | Cell::List(_) | Cell::Other(_)) => {
                Err(self.invalid(at, format!("{}, not a class number or a name", cell.kind())))
            }
        }
    }

    /// Returns the label in `text`, which is trimmed.
    fn text_label(&self, at: usize, text: &str) -> Result<Label> {
        // A column of scores would otherwise turn every fraction into a class.
        if is_number_label(text) {
            // `parse` does not take 1.0 or 1e0 for an integer.
            return match text.parse().ok().or_else(|| whole_number(text)) {
                Some(integer) => self.class_number(at, integer),
                None => Err(self.no_class_number(at, text)),
            };
        }
        let reason = if text.is_empty() {
            "empty; give every row a class number or a name".to_owned()
        } else if text.chars().count() > MAX_NAME_CHARS {
            let start = quoted(text);
            format!(
                "{start}, longer than the {MAX_NAME_CHARS} characters of a class name; choose the label column"
            )
        } else {
            return Ok(Label::Name(text.to_owned()));
        };
        Err(self.invalid(at, reason))
    }

    /// Returns the error of a number with a fraction, or one that is too large.
    fn no_class_number(&self, at: usize, number: &str) -> DataError {
        let rule = "not a class number from 0 or a name (a class number has no fraction)";
        let remedy = "to predict numbers, set model.config.problem_type to \"regression\"";
        self.invalid(at, format!("{number}, {rule}; {remedy}"))
    }

    /// Checks that `integer` is a class number.
    fn class_number(&self, at: usize, integer: i64) -> Result<Label> {
        // The Hub's data sets mark the rows of a hidden test split with -1.
        if integer == -1 {
            return Err(self.invalid(at, "-1, which marks rows without a label".into()));
        }
        u32::try_from(integer)
            .map(Label::Number)
            .map_err(|_| self.invalid(at, format!("{integer}, not a class from 0 upwards")))
    }

    /// Returns column `at` as text for the output; `None` for null.
    pub(crate) fn copied(&self, at: usize) -> Result<Option<String>> {
        match &self.cells[at] {
            Cell::Text(text) | Cell::Decimal(text) => Ok(Some(text.clone())),
            Cell::Integer(integer) => Ok(Some(integer.to_string())),
            Cell::Null => Ok(None),
            cell @ (Cell::List(_) | Cell::Other(_)) => {
                let column = self.columns[at];
                Err(self.not_copied(at, cell.kind(), &format!("leave out `--keep {column}`")))
            }
        }
    }

    /// Returns the label in column `at` as text for the output. A list is JSON text.
    pub(crate) fn copied_label(&self, at: usize) -> Result<Option<String>> {
        let refused = |kind| {
            Err(self.not_copied(
                at,
                kind,
                "write the labels as text or numbers, or name another column with --label-field",
            ))
        };
        match &self.cells[at] {
            list @ Cell::List(_) => match list.to_json() {
                Some(json) => Ok(Some(json.to_string())),
                None => refused("an array with values that JSON does not have"),
            },
            Cell::Other(kind) => refused(*kind),
            _ => self.copied(at),
        }
    }

    /// Returns the error of a cell of column `at` that the output cannot have.
    fn not_copied(&self, at: usize, kind: &str, remedy: &str) -> DataError {
        let (place, column) = (self.place(), self.columns[at]);
        DataError::invalid(
            self.path,
            format!(
                "{place}: field `{column}` is {kind}, which cannot be copied to the output; {remedy}"
            ),
        )
    }

    /// Returns the location of the row, such as "line 3" or "row 3".
    pub(crate) fn place(&self) -> String {
        let (unit, number) = self.place;
        format!("{unit} {number}")
    }

    /// Returns the error of an invalid cell in column `at`.
    pub(crate) fn invalid(&self, at: usize, reason: String) -> DataError {
        self.violates(at, reason, "a class number from 0 or a name")
    }

    /// Returns the error of an invalid cell in column `at` of a table whose labels must be `rule`.
    pub(crate) fn violates(&self, at: usize, reason: String, rule: &str) -> DataError {
        let (place, column) = (self.place(), self.columns[at]);
        DataError::invalid(
            self.path,
            format!(
                "{place}: field `{column}` is {reason}; text must be a string and a label {rule}; correct or remove the row, or name another column in data.text_field or data.label_field"
            ),
        )
    }
}

/// Returns whether the text of a label is a number, which is then never a class name: a class
/// number such as `1`, `1.0` or `1e0`, or an invalid one such as `0.5`.
pub fn is_number_label(text: &str) -> bool {
    let text = text.trim();
    let is_start = |it: char| it.is_ascii_digit() || "+-.".contains(it);
    text.starts_with(is_start) && text.parse::<f64>().is_ok()
}

/// Returns the integer that a number such as `1.0` stands for; `None` if it has a fraction or is
/// too large for a class number.
///
/// Tables with missing values have such labels, because their writers convert the whole column to
/// floats.
pub fn whole_number(text: &str) -> Option<i64> {
    let value: f64 = text.parse().ok()?;
    // Labels are at most 32 bits wide, so the conversion is exact.
    (value.fract() == 0.0 && value.abs() <= f64::from(u32::MAX)).then_some(value as i64)
}

/// A callback for each row.
pub(crate) type RowVisitor<'a> = &'a mut dyn FnMut(TableRow<'_>) -> Result<()>;

/// Formats the first few of `names` for an error.
pub(crate) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<_> =
        names.into_iter().take(8).map(|name| format!("`{}`", shortened(name))).collect();
    format!("[{}]", names.join(", "))
}

/// Returns the error of a file without `column`.
pub(crate) fn no_column<'a>(
    path: &Path,
    column: &str,
    columns: impl IntoIterator<Item = &'a str>,
) -> DataError {
    let columns: Vec<&str> = columns.into_iter().collect();
    let spaced = columns.iter().find(|name| name.trim() == column);
    let remedy = spaced
        .map(|name| format!("remove the spaces around `{}` in the file, or ", shortened(name)));
    let (columns, remedy) = (listed(columns), remedy.unwrap_or_default());
    DataError::invalid(
        path,
        format!(
            "has no column `{column}`, only {columns}; {remedy}choose one of them in data.text_field or data.label_field, or with --text-field, --label-field or --keep of `deepburn predict`"
        ),
    )
}

/// Returns the error of a file that has none of the fields `wanted`.
pub(crate) fn no_field<'a>(
    path: &Path,
    wanted: &[String],
    columns: impl IntoIterator<Item = &'a str>,
) -> DataError {
    let (wanted, columns) = (listed(wanted.iter().map(String::as_str)), listed(columns));
    DataError::invalid(
        path,
        format!("has none of the columns {wanted}, only {columns}; rename the columns of the file"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cell: Cell) -> TableRow<'static> {
        TableRow {
            path: Path::new("t.csv"),
            place: ("row", 7),
            columns: &["label"],
            cells: vec![cell],
        }
    }

    #[test]
    fn labels_are_class_numbers_or_names() {
        let name = |name: &str| Label::Name(name.to_owned());
        assert_eq!(row(Cell::Integer(1)).label(0).unwrap(), Label::Number(1));
        assert_eq!(row(Cell::Text(" 12 ".into())).label(0).unwrap(), Label::Number(12));
        assert_eq!(row(Cell::Text("1.0".into())).label(0).unwrap(), Label::Number(1));
        assert_eq!(row(Cell::Text("0.00".into())).label(0).unwrap(), Label::Number(0));
        assert_eq!(row(Cell::Decimal("3.0".into())).label(0).unwrap(), Label::Number(3));
        assert_eq!(row(Cell::Decimal("2".into())).label(0).unwrap(), Label::Number(2));
        assert_eq!(row(Cell::Text(" very good\n".into())).label(0).unwrap(), name("very good"));
        assert_eq!(row(Cell::Text("1 star".into())).label(0).unwrap(), name("1 star"));
        for (cell, expected) in [
            (Cell::Integer(-1), "marks rows without a label"),
            (Cell::Text("-1".into()), "marks rows without a label"),
            (Cell::Integer(-2), "field `label` is -2, not a class from 0 upwards"),
            (Cell::Integer(1 << 40), "not a class"),
            (Cell::Text("0.5".into()), "field `label` is 0.5, not a class number from 0 or a name"),
            (Cell::Text("1.5".into()), "`t.csv` row 7: field `label` is 1.5, not a class number"),
            (
                Cell::Decimal("1.5".into()),
                "(a class number has no fraction); to predict numbers, set model.config.problem_type to \"regression\"",
            ),
            (Cell::Decimal("-1.0".into()), "marks rows without a label"),
            (Cell::Decimal("4294967296".into()), "is 4294967296, not a class number"),
            (Cell::Text("1e99".into()), "is 1e99, not a class number"),
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
    fn numbers_are_never_class_names() {
        for text in ["1", " 1.0", "1e0", "+1", "-1", ".5", "1e99", "007"] {
            assert!(is_number_label(text), "{text}");
            let label = row(Cell::Text(text.into())).label(0);
            assert!(!matches!(label, Ok(Label::Name(_))), "{text}");
        }
        for text in ["1 star", "inf", "nan", "-", "", "one"] {
            assert!(!is_number_label(text), "{text}");
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
        assert!(message.ends_with("leave out `--keep label`"), "{message}");
        let copied = |cell| row(cell).copied_label(0);
        let list = Cell::List(vec![Cell::Integer(1), Cell::Text("x".into())]);
        assert_eq!(copied(list).unwrap().unwrap(), "[1,\"x\"]");
        assert_eq!(copied(Cell::Null).unwrap(), None);
        for cell in [Cell::Other("NaN"), Cell::List(vec![Cell::Other("a date")])] {
            let message = copied(cell).unwrap_err().to_string();
            assert!(message.ends_with("name another column with --label-field"), "{message}");
        }
    }

    #[test]
    fn text_is_a_string() {
        assert_eq!(row(Cell::Text("x".into())).text(0).unwrap(), "x");
        let message = row(Cell::Integer(5)).text(0).unwrap_err().to_string();
        assert!(message.contains("field `label` is a number, not a string"), "{message}");
    }
}
