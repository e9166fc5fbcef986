//! Labeled text: the rows of a classification data set.
//!
//! [`read_labeled`] takes a text and a label column from `.parquet`, `.csv`, `.json` and `.jsonl`
//! files, and [`read_labeled_as`] does the same with the classes of another split. A label is a
//! class, a list of classes or numbers to predict, see [`LabelKind`]. A class is a number or a
//! name, see [`Classes`]. Rows without a label (the Hub marks them with -1) are an error.
//! [`read_texts`] reads texts to classify, which need no label.

use std::path::{Path, PathBuf};

use crate::formats::classes::{Classes, ClassesOrigin};
use crate::formats::format::read_rows;
use crate::formats::labels::{LabelKind, LabelReader, TextLabel, is_list};
use crate::formats::text::text_files;
use crate::{DataError, Result};

/// The default name of the label column.
pub const LABEL_FIELD: &str = "label";

/// A text and its label.
#[derive(Debug, Clone, PartialEq)]
pub struct LabeledText {
    /// The text.
    pub text: String,
    /// Its label.
    pub label: TextLabel,
}

/// The columns of a table of labeled texts.
#[derive(Debug, Clone, Copy)]
pub struct LabeledColumns<'a> {
    /// The texts.
    pub text: &'a str,
    /// The labels.
    pub label: &'a str,
    /// The kind of the labels.
    pub kind: LabelKind,
    /// Why they are of this kind, for errors; may be empty.
    pub kind_reason: &'a str,
    /// Where the classes are from.
    pub origin: ClassesOrigin<'a>,
}

impl LabeledColumns<'_> {
    /// Adds the reason of the kind to the error of a label.
    fn explained(&self, error: DataError) -> DataError {
        match error {
            DataError::InvalidFile { path, reason } if !self.kind_reason.is_empty() => {
                let reason = format!("{reason} ({})", self.kind_reason);
                DataError::InvalidFile { path, reason }
            }
            other => other,
        }
    }
}

/// Reads the rows of `files` in order, and returns them with the classes of the data set. A folder
/// is read as the tables in it, sorted by path. `names` are the class names, if they are known;
/// other names are then an error.
///
/// # Errors
/// Returns [`DataError::InvalidFile`] if a file is plain text or damaged, if a column is missing,
/// if a text is not a string, or if a label is not a class. Returns [`DataError::Empty`] without
/// any rows.
pub fn read_labeled(
    files: &[PathBuf],
    columns: LabeledColumns<'_>,
    names: Option<&[String]>,
) -> Result<(Vec<LabeledText>, Classes)> {
    read(files, columns, LabelReader::deciding(columns.kind, names, columns.origin))
}

/// Reads the rows of `files` with the classes of another split.
///
/// # Errors
/// Returns the errors of [`read_labeled`], and [`DataError::InvalidFile`] if a class is not in
/// `classes`.
pub fn read_labeled_as(
    files: &[PathBuf],
    columns: LabeledColumns<'_>,
    classes: &Classes,
) -> Result<Vec<LabeledText>> {
    let labels = LabelReader::following(columns.kind, classes, columns.origin);
    Ok(read(files, columns, labels)?.0)
}

/// Reads all rows and converts their labels with `labels`.
fn read(
    files: &[PathBuf],
    columns: LabeledColumns<'_>,
    mut labels: LabelReader<'_>,
) -> Result<(Vec<LabeledText>, Classes)> {
    let mut rows = Vec::new();
    for file in files {
        for table in text_files(file)? {
            read_rows(&table, &[columns.text, columns.label], &mut |mut row| {
                let label = labels.label(&row, 1).map_err(|error| columns.explained(error))?;
                rows.push(LabeledText { text: row.text(0)?, label });
                Ok(())
            })?;
        }
    }
    if rows.is_empty() {
        let what = match files {
            [] => "a list of no files".to_owned(),
            [only] => format!("the table at `{}`", only.display()),
            [first, ..] => format!("the list of {} tables from `{}`", files.len(), first.display()),
        };
        return Err(DataError::Empty { what });
    }
    let classes = labels.finish(&files[0], rows.iter_mut().map(|row| &mut row.label))?;
    Ok((rows, classes))
}

/// A text to classify.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableText {
    /// The text.
    pub text: String,
    /// The label as written in the table; `None` if there is no label.
    pub label: Option<String>,
    /// The values of the columns to copy; `None` for null.
    pub copied: Vec<Option<String>>,
}

/// The columns of a table of texts to classify.
#[derive(Debug, Clone, Default)]
pub struct TextColumns {
    /// The texts.
    pub text: String,
    /// The labels, which may be missing.
    pub label: Option<String>,
    /// The kind of the labels. Lists of classes are checked as in training; other labels are not
    /// checked.
    pub kind: LabelKind,
    /// The columns to copy to the output.
    pub copied: Vec<String>,
}

/// Calls `visit` for each row of the table in `path`, in order, until it returns false.
///
/// # Errors
/// Returns [`DataError::InvalidFile`] if the file is plain text or damaged, if a column is missing,
/// if a text is not a string, if a value to copy is neither text nor a number, if a label has a
/// type that no label has, or if a list of classes is not valid in training.
pub fn read_texts(
    path: &Path,
    columns: &TextColumns,
    visit: &mut dyn FnMut(TableText) -> bool,
) -> Result<()> {
    let mut stopped = false;
    let TextColumns { text, label, kind, copied } = columns;
    let names = [text].into_iter().chain(label).chain(copied);
    let names: Vec<&str> = names.map(String::as_str).collect();
    // Column 0 is the text. Column 1 is the label, if one is wanted.
    let first_copied = names.len() - copied.len();
    let origin = ClassesOrigin::TRAIN_SPLIT;
    let mut sets = LabelReader::deciding(LabelKind::Classes, None, origin);
    let outcome = read_rows(path, &names, &mut |mut row| {
        // Labels are optional here, and a label of another kind is only unknown.
        let is_set = label.is_some() && *kind == LabelKind::Classes && is_list(&row, 1);
        if is_set {
            sets.label(&row, 1)?;
        }
        let label = label.as_ref().map(|_| row.copied_label(1)).transpose()?.flatten();
        let copied = (first_copied..row.cells.len()).map(|at| row.copied(at));
        let copied = copied.collect::<Result<_, _>>()?;
        stopped = !visit(TableText { text: row.text(0)?, label, copied });
        if stopped { Err(end_of_reading()) } else { Ok(()) }
    });
    // Then the outcome is `end_of_reading`, which is not an error of the file.
    if stopped {
        return Ok(());
    }
    outcome.and_then(|()| sets.finish(path, std::iter::empty())).map(|_| ())
}

/// Returns whether the table in `path` has a column. For JSON lines, only the first line is
/// checked. Returns false if the table cannot be read.
pub fn has_column(path: &Path, column: &str) -> bool {
    let mut found = false;
    // The error is ignored: it ends the reading, or means that the column was not found.
    let _ = read_rows(path, &[column], &mut |_| {
        found = true;
        Err(end_of_reading())
    });
    found
}

/// Returns an error that only stops a reader, and that is never returned to the caller.
fn end_of_reading() -> DataError {
    DataError::LoaderStopped
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tests::parquet_table::{Column, write_table};
    use crate::tests::test_data;

    const COLUMNS: LabeledColumns<'static> = LabeledColumns {
        text: "text",
        label: LABEL_FIELD,
        kind: LabelKind::Class,
        kind_reason: "",
        origin: ClassesOrigin::TRAIN_SPLIT,
    };

    fn labeled(text: &str, class: u32) -> LabeledText {
        LabeledText { text: text.to_owned(), label: TextLabel::Class(class) }
    }

    /// Returns the class of each row.
    fn classes_of(rows: &[LabeledText]) -> Vec<u32> {
        rows.iter().map(|row| row.label.class().unwrap()).collect()
    }

    fn read_named(path: &Path, names: Option<&[String]>) -> Result<(Vec<LabeledText>, Classes)> {
        read_labeled(&[path.to_owned()], COLUMNS, names)
    }

    fn read(path: &Path) -> Result<Vec<LabeledText>> {
        Ok(read_named(path, None)?.0)
    }

    #[test]
    fn every_format_gives_the_same_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(
            path("a.jsonl"),
            "{\"text\": \"one\", \"label\": 0}\n{\"label\": 1, \"text\": \"two\"}",
        )
        .unwrap();
        fs::write(path("a.csv"), "label,text\n0,one\n1,two\n").unwrap();
        let columns = [
            Column::Text("text", vec![Some("one"), Some("two")]),
            Column::Label("label", vec![0, 1]),
        ];
        write_table(&path("a.parquet"), &columns);
        let expected = [labeled("one", 0), labeled("two", 1)];
        for name in ["a.jsonl", "a.csv", "a.parquet"] {
            assert_eq!(read(&path(name)).unwrap(), expected, "{name}");
        }
        let (all, classes) = read_named(dir.path(), None).unwrap();
        assert_eq!(classes, Classes::Numbers { count: None });
        assert_eq!(all, [&expected[..]; 3].concat());
    }

    #[test]
    fn what_has_no_labels_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a.txt"), "plain").unwrap();
        fs::write(path("unlabeled.csv"), "text,label\nx,-1\n").unwrap();
        fs::write(path("column.csv"), "text,stars\nx,5\n").unwrap();
        fs::write(path("empty.csv"), "text,label\n").unwrap();
        fs::write(path("a.md"), "text").unwrap();
        for (name, expected) in [
            ("a.txt", "is plain text and has no labels"),
            ("unlabeled.csv", "unlabeled.csv` row 1: field `label` is -1, which marks rows"),
            ("column.csv", "has no column `label`, only [`text`, `stars`]"),
            ("empty.csv", "empty.csv` is empty"),
            ("a.md", "not a supported text file"),
            ("missing.csv", "cannot read"),
        ] {
            let message = read(&path(name)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(read_labeled(&[], COLUMNS, None).is_err());
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn names_become_classes_in_sorted_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a.csv"), "text,label\nw,good\nx,Bad\ny, so-so \nz,good\n").unwrap();
        let (rows, classes) = read_named(&path("a.csv"), None).unwrap();
        assert_eq!(classes, Classes::Names(names(&["Bad", "good", "so-so"])));
        assert_eq!(classes_of(&rows), [1, 0, 2, 1]);

        // Another split in another order and format has the same classes.
        fs::write(path("b.jsonl"), "{\"text\": \"v\", \"label\": \"so-so\"}").unwrap();
        let rows = read_labeled_as(&[path("b.jsonl")], COLUMNS, &classes).unwrap();
        assert_eq!(rows, [labeled("v", 2)]);
        let given = names(&["good", "so-so", "Bad"]);
        let (rows, classes) = read_named(&path("a.csv"), Some(&given)).unwrap();
        assert_eq!(classes.names(), Some(&given[..]));
        assert_eq!(classes_of(&rows), [0, 2, 1, 0]);
    }

    #[test]
    fn labels_of_another_kind_and_unknown_ones_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let table = |label: &str| {
            let path = dir.path().join("t.csv");
            fs::write(&path, format!("text,label\nx,good\ny,{label}\n")).unwrap();
            [path]
        };
        let known = Classes::Names(names(&["bad", "good"]));
        let read_as = |classes: &Classes, label: &str| {
            let rows = read_labeled_as(&table(label), COLUMNS, classes);
            rows.unwrap_err().to_string()
        };
        let unknown = read_as(&known, "ugly");
        let expected = "t.csv` row 2: field `label` is \"ugly\", an unknown class; classes of the train split: 2 \
                        [\"bad\", \"good\"]";
        assert!(unknown.contains(expected), "{unknown}");
        let origin = ClassesOrigin { place: "its config.json", remedy: "use another model" };
        let of_file = LabeledColumns { origin, ..COLUMNS };
        let given = names(&["bad", "good"]);
        let unknown = read_labeled(&table("ugly"), of_file, Some(&given)).unwrap_err().to_string();
        let expected = "row 2: field `label` is \"ugly\", an unknown class; classes of its config.json: 2 \
                        [\"bad\", \"good\"]; correct the label, or use another model";
        assert!(unknown.contains(expected), "{unknown}");
        let mixed = read_as(&known, "1");
        assert!(
            mixed.contains("row 2: field `label` is 1, a class number, but a label"),
            "{mixed}"
        );
        let numbers = read_as(&Classes::Numbers { count: None }, "1");
        assert!(numbers.contains("row 1: field `label` is \"good\", a name, but"), "{numbers}");
        let mixed = read_named(&table("1")[0], None).unwrap_err().to_string();
        assert!(mixed.contains("row 2: field `label` is 1") && mixed.contains("row 1"), "{mixed}");
        let path = dir.path().join("n.csv");
        fs::write(&path, "text,label\nx,0\ny,2\n").unwrap();
        let many = read_labeled(&[path], of_file, Some(&given)).unwrap_err().to_string();
        let expected = "row 2: field `label` is 2, an unknown class; the classes of its config.json are below 2; \
                        correct the label, or use another model";
        assert!(many.contains(expected), "{many}");
    }

    #[test]
    fn numbers_that_the_train_split_does_not_have_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.csv");
        fs::write(&path, "text,label\nx,0\ny,7\n").unwrap();
        let below = |count| Classes::NumbersBelow { count };
        let files = [path.clone()];
        let error = read_labeled_as(&files, COLUMNS, &below(2)).unwrap_err().to_string();
        let expected = "row 2: field `label` is 7, an unknown class; the classes of the train split are below 2";
        assert!(error.contains(expected) && error.contains("to 8 or more"), "{error}");
        assert!(read_labeled_as(&files, COLUMNS, &below(8)).is_ok());
        fs::write(&path, "text,label\nx,good\n").unwrap();
        let error = read_labeled_as(&files, COLUMNS, &below(2)).unwrap_err().to_string();
        assert!(error.contains("\"good\", a name, but a label of the train split is"), "{error}");
    }

    #[test]
    fn texts_need_no_label() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        let lines = concat!(
            r#"{"text": "x", "label": 1, "id": 7, "score": 0.25}"#,
            "\n",
            r#"{"text": "y", "label": null, "id": "b", "score": null}"#,
            "\n",
            r#"{"text": "z", "label": [1], "id": [2], "score": 1}"#,
        );
        fs::write(&path, lines).unwrap();
        assert!(has_column(&path, "label") && !has_column(&path, "class"));
        let mut rows = Vec::new();
        let columns = |copied: &[&str]| TextColumns {
            text: "text".to_owned(),
            label: Some("label".to_owned()),
            kind: LabelKind::Class,
            copied: names(copied),
        };
        let error = read_texts(&path, &columns(&["score", "id"]), &mut |row| {
            rows.push(row);
            true
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("line 3: field `id` is an array, which cannot be copied"),
            "{error}"
        );
        let row = |text: &str, label: Option<&str>, copied: [Option<&str>; 2]| TableText {
            text: text.to_owned(),
            label: label.map(str::to_owned),
            copied: copied.map(|it| it.map(str::to_owned)).to_vec(),
        };
        let expected =
            [row("x", Some("1"), [Some("0.25"), Some("7")]), row("y", None, [None, Some("b")])];
        assert_eq!(rows, expected);
        // A class is not checked. A list is copied as JSON.
        rows.clear();
        read_texts(&path, &columns(&["score"]), &mut |row| {
            rows.push(row);
            true
        })
        .unwrap();
        assert_eq!((rows.len(), rows[2].label.as_deref()), (3, Some("[1]")));
        let mut texts = Vec::new();
        read_texts(&path, &columns(&[]), &mut |row| {
            texts.push(row.text);
            false
        })
        .unwrap();
        assert_eq!(texts, ["x"]);
    }

    #[test]
    fn lists_of_classes_are_checked_as_in_training() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        let read = |labels: &[&str]| {
            let line = |label: &&str| format!("{{\"text\": \"x\", \"label\": {label}}}\n");
            fs::write(&path, labels.iter().map(line).collect::<String>()).unwrap();
            let kind = LabelKind::Classes;
            let columns = TextColumns {
                text: "text".to_owned(),
                label: Some("label".to_owned()),
                kind,
                copied: Vec::new(),
            };
            let outcome = read_texts(&path, &columns, &mut |_| true);
            let trained =
                read_labeled(std::slice::from_ref(&path), LabeledColumns { kind, ..COLUMNS }, None);
            let message = |error: DataError| error.to_string();
            (outcome.map_err(message), trained.map(|_| ()).map_err(message))
        };
        for labels in [
            &["[0, 1]", "[1, 0]"][..],
            &["[0, 1, 1]"],
            &["[2, 2]"],
            &["[1.0, 0.0]"],
            &["[\"a\"]", "[1]"],
        ] {
            let (outcome, trained) = read(labels);
            assert!(outcome.is_err(), "{labels:?}");
            assert_eq!(outcome, trained);
        }
        assert_eq!(read(&["[0, 1]", "[]", "[2]"]).0, Ok(()));
        // A missing label is not an error here, and one that is not a list is only unknown.
        assert_eq!(read(&["null", "[1]", "\"good\""]).0, Ok(()));
    }

    /// The Large Movie Review Dataset (Maas et al. 2011).
    #[test]
    fn fifty_thousand_reviews() {
        let folder = "hub/datasets/stanfordnlp/imdb/plain_text";
        for split in ["train", "test"] {
            let file = format!("{folder}/{split}-00000-of-00001.parquet");
            let Some(file) = test_data(&file) else { return };
            let rows = read(&file).unwrap();
            let positive = classes_of(&rows).iter().filter(|class| **class == 1).count();
            assert_eq!((rows.len(), positive), (25_000, 12_500));
            assert!(rows.iter().all(|row| row.label.class() < Some(2) && !row.text.is_empty()));
        }
    }
}
