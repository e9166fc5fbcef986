//! Labelled text: the rows of a classification data set.
//!
//! [`read_labelled`] takes a text and a label column from `.parquet`, `.csv` and `.jsonl` files.
//! It refuses rows without a label (the Hub marks them with -1) instead of inventing one.

use std::path::{Path, PathBuf};

use crate::DataError;
use crate::records::read_rows;
use crate::text::text_files;

/// The field of a row that holds the class, unless another is named.
pub const LABEL_FIELD: &str = "label";

/// A text and its class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelledText {
    /// The text.
    pub text: String,
    /// Its class, from 0.
    pub label: u32,
}

/// The rows of `files`, in order; a folder stands for the tables in it, sorted by path.
///
/// # Errors
/// [`DataError::NoTable`] for plain text, [`DataError::NoColumn`], [`DataError::Cell`] for a row
/// whose text is no string or whose label is no integer from 0, [`DataError::Empty`] where there
/// is no row at all; and files that are missing or damaged.
pub fn read_labelled(
    files: &[PathBuf],
    text_field: &str,
    label_field: &str,
) -> Result<Vec<LabelledText>, DataError> {
    let mut rows = Vec::new();
    for file in files {
        for table in text_files(file)? {
            read_table(&table, [text_field, label_field], &mut rows)?;
        }
    }
    match rows.is_empty() {
        true => Err(DataError::Empty { what: described(files) }),
        false => Ok(rows),
    }
}

fn read_table(
    path: &Path,
    columns: [&str; 2],
    rows: &mut Vec<LabelledText>,
) -> Result<(), DataError> {
    read_rows(path, &columns, &mut |mut row| {
        let label = row.label(1)?;
        rows.push(LabelledText { text: row.text(0)?, label });
        Ok(())
    })
}

fn described(files: &[PathBuf]) -> String {
    match files {
        [] => "a list of no files".to_owned(),
        [only] => format!("the table at `{}`", only.display()),
        [first, ..] => format!("the {} tables from `{}` on", files.len(), first.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::parquet::fixture::{Column, write_table};

    fn read(path: &Path) -> Result<Vec<LabelledText>, DataError> {
        read_labelled(&[path.to_owned()], "text", LABEL_FIELD)
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
        let expected =
            [("one", 0), ("two", 1)].map(|(text, label)| LabelledText { text: text.into(), label });
        for name in ["a.jsonl", "a.csv", "a.parquet"] {
            assert_eq!(read(&path(name)).unwrap(), expected, "{name}");
        }
        let all = read_labelled(&[dir.path().to_owned()], "text", "label").unwrap();
        assert_eq!(all, [&expected[..]; 3].concat());
    }

    #[test]
    fn what_has_no_labels_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a.txt"), "plain").unwrap();
        fs::write(path("unlabelled.csv"), "text,label\nx,-1\n").unwrap();
        fs::write(path("column.csv"), "text,stars\nx,5\n").unwrap();
        fs::write(path("empty.csv"), "text,label\n").unwrap();
        fs::write(path("a.md"), "text").unwrap();
        for (name, expected) in [
            ("a.txt", "is plain text and has no labels"),
            ("unlabelled.csv", "unlabelled.csv` row 1: field `label` is -1, which marks rows"),
            ("column.csv", "has no column `label`, only [`text`, `stars`]"),
            ("empty.csv", "empty.csv` is empty"),
            ("a.md", "not a text file this reader knows"),
            ("missing.csv", "cannot read"),
        ] {
            let message = read(&path(name)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(read_labelled(&[], "text", "label").is_err());
    }

    /// The Large Movie Review Dataset (Maas et al. 2011), where it is beside the checkout.
    #[test]
    fn fifty_thousand_reviews() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../shared/data/hub/datasets/stanfordnlp/imdb/plain_text");
        for split in ["train", "test"] {
            let file = folder.join(format!("{split}-00000-of-00001.parquet"));
            if !file.exists() {
                return;
            }
            let rows = read(&file).unwrap();
            let positive = rows.iter().filter(|row| row.label == 1).count();
            assert_eq!((rows.len(), positive), (25_000, 12_500));
            assert!(rows.iter().all(|row| row.label < 2 && !row.text.is_empty()));
        }
    }
}
