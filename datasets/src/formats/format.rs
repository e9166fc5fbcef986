//! The supported file formats. The end of the name of a file selects its format, in any case:
//! `.jsonl`, `.JSONL`, `.jsonl.gz`.
//!
//! [`read_rows`] reads the columns of a table from any format that has columns. Plain text and
//! unknown formats are an error.

use std::ffi::OsStr;
use std::path::Path;

use crate::formats::compression::Compression;
use crate::formats::table::RowVisitor;
use crate::formats::{csv, json, json_lines, parquet};
use crate::{DataError, Result};

/// The supported endings, for messages.
pub(crate) const ENDINGS: &str =
    ".txt, .json, .jsonl, .csv (also with .gz or .zst after them) or .parquet";

/// The format in which a file stores text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// `.txt`: one document.
    Plain,
    /// `.json`: an array of objects, or one object after another.
    Json,
    /// `.jsonl`, `.ndjson`: one object per line.
    JsonLines,
    /// `.csv`: column names in the first line, then one record per row.
    Csv,
    /// `.parquet`: the usual format of tables on the Hub.
    Parquet,
}

impl Format {
    /// Returns the format that the name of `path` ends with.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let compression = Compression::of(path);
        let name = if compression.is_some() { path.file_stem() } else { path.file_name() };
        let ending = Path::new(name?).extension().and_then(OsStr::to_str)?;
        match ending.to_ascii_lowercase().as_str() {
            "txt" => Some(Self::Plain),
            "json" => Some(Self::Json),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "csv" => Some(Self::Csv),
            // Pages are compressed within the file, because its footer is read first.
            "parquet" if compression.is_none() => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// Returns the name of a text file without the endings of its format and its compression.
pub(crate) fn base_name(file: &str) -> &str {
    let file = uncompressed_name(file);
    file.rsplit_once('.').map_or(file, |(base, _)| base)
}

/// Returns the name of a file without the ending of its compression.
pub(crate) fn uncompressed_name(file: &str) -> &str {
    match (Compression::of(Path::new(file)), file.rsplit_once('.')) {
        (Some(_), Some((base, _))) => base,
        _ => file,
    }
}

/// Reads `columns` of the table in `path` and calls `visit` for each row, in order.
///
/// # Errors
/// Returns an error if the file is damaged, is not a table or lacks a column. Errors of `visit` are
/// passed on.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    match Format::of(path) {
        Some(Format::Json) => json::read_rows(path, columns, visit),
        Some(Format::JsonLines) => json_lines::read_rows(path, columns, visit),
        Some(Format::Csv) => csv::read_rows(path, columns, visit),
        Some(Format::Parquet) => parquet::read_rows(path, columns, visit),
        Some(Format::Plain) => Err(DataError::invalid(
            path,
            "is plain text and has no labels; classification reads .parquet, .csv, .json and .jsonl with a text and a label column; convert it",
        )),
        None => Err(DataError::invalid(
            path,
            "is not a supported text file; data.kind \"text\" reads .txt (one document), .json and .jsonl (one document per object), .csv and .parquet (one document per row), all except .parquet also with .gz or .zst after the ending; convert or rename it",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_select_the_format_in_any_case() {
        for (name, expected) in [
            ("a.txt", Some(Format::Plain)),
            ("a.TXT.GZ", Some(Format::Plain)),
            ("a.Json.zst", Some(Format::Json)),
            ("a.b.JSONL", Some(Format::JsonLines)),
            ("a.ndjson.gz", Some(Format::JsonLines)),
            ("a.csv.Zst", Some(Format::Csv)),
            ("a.PARQUET", Some(Format::Parquet)),
            ("a.parquet.gz", None),
            ("a.gz", None),
            ("a.tar.gz", None),
            ("txt", None),
            (".txt", None),
        ] {
            assert_eq!(Format::of(Path::new(name)), expected, "{name}");
        }
        assert_eq!(base_name("b/a-1.JSONL.gz"), "b/a-1");
        assert_eq!(uncompressed_name("b/a-1.JSONL.gz"), "b/a-1.JSONL");
        assert_eq!(base_name("a-1.csv"), "a-1");
    }
}
