//! Converts the label column of rows to labels: a class, a set of classes, or numbers to predict.
//!
//! Main types: [`TextLabel`] and [`LabelKind`]. In `.csv` files, which only have text, a list is
//! JSON text.
//!
//! ```text
//! LabelKind::Class      1, "good"
//! LabelKind::Classes    ["billing", "bug"], [0, 2], []
//! LabelKind::Values     3.5, [0.25, -1]
//! ```

use std::borrow::Cow;
use std::path::Path;

use crate::formats::classes::{ClassReader, Classes, ClassesOrigin};
use crate::formats::json_row;
use crate::formats::table::{Cell, TableRow, quoted};
use crate::{DataError, Result};

/// The kind of all labels of a data set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LabelKind {
    /// One class for each text.
    #[default]
    Class,
    /// A list of classes for each text, which may be empty.
    Classes,
    /// A number to predict for each text, or a list of them.
    Values,
}

/// The label of a text.
#[derive(Debug, Clone, PartialEq)]
pub enum TextLabel {
    /// The class, from 0.
    Class(u32),
    /// All classes of the text, in ascending order.
    Classes(Vec<u32>),
    /// The numbers to predict. All of them are finite.
    Values(Vec<f32>),
}

impl TextLabel {
    /// Returns the class if the label is one class.
    pub fn class(&self) -> Option<u32> {
        match self {
            Self::Class(class) => Some(*class),
            Self::Classes(_) | Self::Values(_) => None,
        }
    }

    /// Returns the classes; empty if the label is numbers.
    pub fn classes(&self) -> &[u32] {
        match self {
            Self::Class(class) => std::slice::from_ref(class),
            Self::Classes(classes) => classes,
            Self::Values(_) => &[],
        }
    }

    /// Returns the number of outputs that a model needs for this label: the highest class plus one,
    /// or the number of values.
    pub fn num_outputs(&self) -> usize {
        match self {
            Self::Class(class) => *class as usize + 1,
            Self::Classes(classes) => classes.last().map_or(0, |class| *class as usize + 1),
            Self::Values(values) => values.len(),
        }
    }
}

/// The rule about a list of classes, for errors.
const CLASSES_RULE: &str = "a list of class names or class numbers, such as [\"billing\", \"bug\"], [0, 2] or [] (JSON text in a .csv file)";

/// The rule about numbers to predict, for errors.
const VALUES_RULE: &str = "a finite number, or a list of as many numbers in each row";

/// Converts the label column of rows.
pub(crate) enum LabelReader<'a> {
    /// One class for each row.
    Class(ClassReader<'a>),
    /// A set of classes for each row.
    Classes {
        /// Converts an element of a list.
        classes: ClassReader<'a>,
        /// Whether each list so far has the class numbers 0 and 1 only, as vectors of flags would.
        only_flags: bool,
        /// The number of rows so far.
        rows: usize,
    },
    /// Numbers for each row.
    Values {
        /// The number of values in each row and where it is from; `None` before the first row.
        count: Option<(usize, String)>,
    },
}

impl<'a> LabelReader<'a> {
    /// Creates a reader for the train split. `names` are the class names, if they are known from
    /// `origin`.
    pub(crate) fn deciding(
        kind: LabelKind,
        names: Option<&[String]>,
        origin: ClassesOrigin<'a>,
    ) -> Self {
        match kind {
            LabelKind::Class => Self::Class(ClassReader::deciding(names, origin)),
            LabelKind::Classes => Self::of_sets(ClassReader::deciding(names, origin)),
            LabelKind::Values => Self::Values { count: None },
        }
    }

    /// Creates a reader for another split, with the classes of the train split, which are from
    /// `origin`.
    pub(crate) fn following(kind: LabelKind, classes: &Classes, origin: ClassesOrigin<'a>) -> Self {
        match (kind, classes) {
            (LabelKind::Class, _) => Self::Class(ClassReader::following(classes, origin)),
            (LabelKind::Classes, _) => Self::of_sets(ClassReader::following(classes, origin)),
            (LabelKind::Values, Classes::Values { count }) => {
                Self::Values { count: Some((*count, "a row of the train split".to_owned())) }
            }
            (LabelKind::Values, _) => Self::Values { count: None },
        }
    }

    /// Returns a reader of lists of classes.
    fn of_sets(classes: ClassReader<'a>) -> Self {
        Self::Classes { classes, only_flags: true, rows: 0 }
    }

    /// Returns the label in column `at`. Classes of names are preliminary until [`Self::finish`].
    pub(crate) fn label(&mut self, row: &TableRow<'_>, at: usize) -> Result<TextLabel> {
        match self {
            Self::Class(classes) => classes.class(row, at).map(TextLabel::Class),
            Self::Classes { classes, only_flags, rows } => {
                let found = class_set(classes, row, at)?;
                // The classes are sorted, so this is [0, 1] or [1, 0] in the file: what flags would
                // be.
                *only_flags &= found == [0, 1] && classes.has_numbers();
                *rows += 1;
                Ok(TextLabel::Classes(found))
            }
            Self::Values { count } => {
                let values = values(row, at)?;
                let (first, place) = count.get_or_insert_with(|| (values.len(), row.place()));
                if *first == values.len() {
                    return Ok(TextLabel::Values(values));
                }
                let reason = format!("a list of {}, and {place} has {first}", values.len());
                Err(row.violates(at, reason, VALUES_RULE))
            }
        }
    }

    /// Returns the classes of the data set, and replaces preliminary classes in `labels`. `path` is
    /// the first file, for errors.
    ///
    /// # Errors
    /// Returns [`DataError::InvalidFile`] if lists of classes look like vectors of flags.
    pub(crate) fn finish<'l>(
        self,
        path: &Path,
        labels: impl Iterator<Item = &'l mut TextLabel>,
    ) -> Result<Classes> {
        match self {
            Self::Class(classes) => Ok(classes.finish(labels.filter_map(|label| match label {
                TextLabel::Class(class) => Some(class),
                TextLabel::Classes(_) | TextLabel::Values(_) => None,
            }))),
            // A single row may really have both classes.
            Self::Classes { only_flags: true, rows, .. } if rows > 1 => Err(DataError::invalid(
                path,
                "every label is [0, 1] or [1, 0], which gives each text both classes; a label lists the classes of its \
                 text and is not a vector of flags: write [1] for [0, 1], and [0] for [1, 0]",
            )),
            Self::Classes { classes, .. } => {
                let mut sets: Vec<&mut Vec<u32>> = labels
                    .filter_map(|label| match label {
                        TextLabel::Classes(classes) => Some(classes),
                        TextLabel::Class(_) | TextLabel::Values(_) => None,
                    })
                    .collect();
                let found = classes.finish(sets.iter_mut().flat_map(|set| set.iter_mut()));
                // The final classes of names may be in another order.
                sets.into_iter().for_each(|set| set.sort_unstable());
                Ok(found)
            }
            Self::Values { count } => {
                Ok(Classes::Values { count: count.map_or(0, |(count, _)| count) })
            }
        }
    }
}

/// Returns the elements of the list in column `at`: a list, or JSON text of one. Returns `None` for
/// other values.
fn elements<'a>(row: &'a TableRow<'_>, at: usize) -> Option<Cow<'a, [Cell]>> {
    match &row.cells[at] {
        Cell::List(cells) => Some(Cow::Borrowed(cells)),
        Cell::Text(text) if text.trim_start().starts_with('[') => {
            let values: Vec<serde_json::Value> = serde_json::from_str(text).ok()?;
            Some(Cow::Owned(values.into_iter().map(json_row::cell).collect()))
        }
        _ => None,
    }
}

/// Returns whether column `at` has a list, or JSON text of one.
pub(crate) fn is_list(row: &TableRow<'_>, at: usize) -> bool {
    elements(row, at).is_some()
}

/// Returns a cell that violates a rule, for errors.
fn shown(cell: &Cell) -> String {
    match cell {
        Cell::Text(text) if text.trim().is_empty() => "empty".to_owned(),
        Cell::Text(text) => quoted(text),
        Cell::Integer(integer) => integer.to_string(),
        Cell::Decimal(number) => number.clone(),
        Cell::Null => "null".to_owned(),
        Cell::List(_) => "a list".to_owned(),
        Cell::Other(kind) => (*kind).to_owned(),
    }
}

/// Returns the classes in the list in column `at`, in ascending order.
fn class_set(classes: &mut ClassReader, row: &TableRow<'_>, at: usize) -> Result<Vec<u32>> {
    let refused = |reason: String| Err(row.violates(at, reason, CLASSES_RULE));
    let Some(cells) = elements(row, at) else {
        return refused(format!("{}, not a list of classes", shown(&row.cells[at])));
    };
    let mut found = Vec::with_capacity(cells.len());
    for cell in cells.iter() {
        // Other libraries use vectors of 0.0 and 1.0 here.
        if let Cell::Decimal(number) = cell {
            return refused(format!(
                "a list with {number}, which is not a class; a list has the classes of the text, not a flag for each \
                 class"
            ));
        }
        let label = row.label_in(at, cell)?;
        let class = classes.class_of(label, row, at)?;
        if found.contains(&class) {
            return refused(format!(
                "a list with {} twice; a list has the classes of the text, each once, not a flag for each class",
                shown(cell)
            ));
        }
        found.push(class);
    }
    found.sort_unstable();
    Ok(found)
}

/// Returns the numbers in column `at`.
fn values(row: &TableRow<'_>, at: usize) -> Result<Vec<f32>> {
    let refused = |reason: String| row.violates(at, reason, VALUES_RULE);
    let Some(cells) = elements(row, at) else {
        let cell = &row.cells[at];
        let value = number(cell).ok_or_else(|| refused(format!("{}, not a number", shown(cell))));
        return Ok(vec![value?]);
    };
    if cells.is_empty() {
        return Err(refused("an empty list".to_owned()));
    }
    let value = |cell: &Cell| {
        number(cell).ok_or_else(|| refused(format!("a list with {}, not a number", shown(cell))))
    };
    cells.iter().map(value).collect()
}

/// Returns the number in a cell; `None` if it is not a number that f32 has.
fn number(cell: &Cell) -> Option<f32> {
    let number = match cell {
        Cell::Integer(integer) => *integer as f32,
        // A number beyond f32 becomes infinite, and is refused below.
        Cell::Decimal(text) | Cell::Text(text) => text.trim().parse::<f64>().ok()? as f32,
        Cell::Null | Cell::List(_) | Cell::Other(_) => return None,
    };
    number.is_finite().then_some(number)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;
    use crate::tests::parquet_table::{Column, write_table};
    use crate::{LabeledColumns, read_labeled, read_labeled_as};

    fn columns(kind: LabelKind) -> LabeledColumns<'static> {
        let origin = ClassesOrigin::TRAIN_SPLIT;
        LabeledColumns { text: "text", label: "label", kind, kind_reason: "", origin }
    }

    /// Writes a table with these labels, which are JSON.
    fn table(name: &str, labels: &[&str]) -> (tempfile::TempDir, [PathBuf; 1]) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        if name.ends_with(".csv") {
            let mut writer = ::csv::Writer::from_path(&path).unwrap();
            writer.write_record(["text", "label"]).unwrap();
            labels.iter().for_each(|label| writer.write_record(["x", label]).unwrap());
            writer.flush().unwrap();
        } else {
            let line = |label: &&str| format!("{{\"text\": \"x\", \"label\": {label}}}\n");
            fs::write(&path, labels.iter().map(line).collect::<String>()).unwrap();
        }
        (dir, [path])
    }

    fn read(kind: LabelKind, name: &str, labels: &[&str]) -> Result<(Vec<TextLabel>, Classes)> {
        let (_dir, files) = table(name, labels);
        let (rows, classes) = read_labeled(&files, columns(kind), None)?;
        Ok((rows.into_iter().map(|row| row.label).collect(), classes))
    }

    fn values(values: &[f32]) -> TextLabel {
        TextLabel::Values(values.to_vec())
    }

    fn sets(sets: &[&[u32]]) -> Vec<TextLabel> {
        sets.iter().map(|set| TextLabel::Classes(set.to_vec())).collect()
    }

    #[test]
    fn numbers_to_predict_are_read_from_every_format() {
        for name in ["t.csv", "t.jsonl"] {
            let (labels, classes) =
                read(LabelKind::Values, name, &["3", "-1", "0.1", "2.5e-1"]).unwrap();
            let expected = [3.0, -1.0, 0.1, 0.25].map(|value| values(&[value]));
            assert_eq!((&labels[..], classes), (&expected[..], Classes::Values { count: 1 }));
            let (labels, classes) = read(LabelKind::Values, name, &["[1, 0.5]", "[2,-3]"]).unwrap();
            assert_eq!(labels, [values(&[1.0, 0.5]), values(&[2.0, -3.0])]);
            assert_eq!(classes, Classes::Values { count: 2 });
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.parquet");
        let texts = Column::Text("text", vec![Some("x"), Some("y")]);
        write_table(&path, &[texts, Column::Label("label", vec![0, -1])]);
        let (rows, _) = read_labeled(&[path], columns(LabelKind::Values), None).unwrap();
        assert_eq!((&rows[0].label, &rows[1].label), (&values(&[0.0]), &values(&[-1.0])));
    }

    #[test]
    fn what_is_no_number_to_predict_is_named() {
        for (name, labels, expected) in [
            ("t.csv", &["1", "good"][..], "row 2: field `label` is \"good\", not a number"),
            ("t.csv", &["nan"], "is \"nan\", not a number"),
            ("t.csv", &["1e39"], "not a number"),
            ("t.csv", &[" "], "is empty, not a number"),
            ("t.csv", &["1,5"], "is \"1,5\", not a number"),
            ("t.jsonl", &["null"], "line 1: field `label` is null, not a number"),
            ("t.jsonl", &["[]"], "is an empty list"),
            ("t.jsonl", &["[1, null]"], "is a list with null, not a number"),
            (
                "t.jsonl",
                &["[1, 2]", "[1]"],
                "line 2: field `label` is a list of 1, and line 1 has 2",
            ),
            ("t.jsonl", &["1e300"], "a label a finite number, or a list of as many numbers"),
        ] {
            let message = read(LabelKind::Values, name, labels).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let (_dir, files) = table("t.jsonl", &["[1, 2]"]);
        let other = Classes::Values { count: 3 };
        let error = read_labeled_as(&files, columns(LabelKind::Values), &other).unwrap_err();
        let expected = "is a list of 2, and a row of the train split has 3";
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn lists_of_classes_are_read_from_every_format() {
        for name in ["t.csv", "t.jsonl"] {
            let labels = [r#"["bug", "Billing"]"#, "[]", r#"["ads"]"#, r#"["ads","bug"]"#];
            let (found, classes) = read(LabelKind::Classes, name, &labels).unwrap();
            assert_eq!(classes.names().unwrap(), ["Billing", "ads", "bug"]);
            assert_eq!(found, sets(&[&[0, 2], &[], &[1], &[1, 2]]));
            let (found, classes) =
                read(LabelKind::Classes, name, &["[2, 0]", "[]", "[1]"]).unwrap();
            assert_eq!(found, sets(&[&[0, 2], &[], &[1]]));
            assert_eq!(classes, Classes::Numbers { count: None });
            assert_eq!(found.iter().map(TextLabel::num_outputs).max(), Some(3));
        }
        let (_dir, files) = table("t.csv", &[r#"["b", "a"]"#]);
        let names = Classes::Names(["b", "a", "c"].map(str::to_owned).to_vec());
        let rows = read_labeled_as(&files, columns(LabelKind::Classes), &names).unwrap();
        assert_eq!(rows[0].label, TextLabel::Classes(vec![0, 1]));
    }

    #[test]
    fn what_is_no_list_of_classes_is_named() {
        for (name, labels, expected) in [
            ("t.csv", &["bug"][..], "row 1: field `label` is \"bug\", not a list of classes"),
            ("t.csv", &["bug|ads"], "such as [\"billing\", \"bug\"], [0, 2] or []"),
            ("t.csv", &["['bug', 'ads']"], "bug\\', \\'ads\\']\", not a list of classes"),
            ("t.csv", &[""], "is empty, not a list of classes"),
            ("t.jsonl", &["1"], "is 1, not a list of classes"),
            ("t.jsonl", &["null"], "is null, not a list"),
            ("t.jsonl", &["[1]", "[\"bug\"]"], "is \"bug\", a name, but the label of line 1 is"),
            ("t.jsonl", &["[0, 1, 0]"], "a list with 0 twice; a list has the classes of the text"),
            ("t.jsonl", &["[1.0, 0.0]"], "a list with 1.0, which is not a class"),
            ("t.jsonl", &["[-1]"], "is -1, which marks rows without a label"),
            ("t.jsonl", &["[[1]]"], "an array, not a class number or a name"),
            ("t.jsonl", &["[0, 1]", "[1, 0]"], "every label is [0, 1] or [1, 0], which gives"),
        ] {
            let message = read(LabelKind::Classes, name, labels).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        // Names are never flags.
        let names = [r#"["a", "b"]"#, r#"["b", "a"]"#];
        assert_eq!(
            read(LabelKind::Classes, "t.jsonl", &names).unwrap().0,
            sets(&[&[0, 1], &[0, 1]])
        );
    }
}
