//! The supported file formats. The extension of a file selects its format.
//!
//! [`read_rows`] reads the columns of a table from any format that has columns.
//! Plain text and unknown extensions are an error.

use std::path::Path;

use crate::formats::table::RowVisitor;
use crate::formats::{csv, json_lines, parquet};
use crate::{DataError, Result};

/// The format in which a file stores text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// `.txt`: one document.
    Plain,
    /// `.jsonl`: one object per line.
    JsonLines,
    /// `.csv`: column names in the first line, then one record per row.
    Csv,
    /// `.parquet`: the usual format of tables on the Hub.
    Parquet,
}

impl Format {
    /// Returns the format that the extension of `path` names.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "txt" => Some(Self::Plain),
            "jsonl" => Some(Self::JsonLines),
            "csv" => Some(Self::Csv),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// Reads `columns` of the table in `path` and calls `visit` for each row, in
/// order.
///
/// # Errors
/// Returns an error if the file is damaged, is not a table or lacks a column.
/// Errors of `visit` are passed on.
pub(crate) fn read_rows(path: &Path, columns: &[&str], visit: RowVisitor<'_>) -> Result<()> {
    match Format::of(path) {
        Some(Format::JsonLines) => json_lines::read_rows(path, columns, visit),
        Some(Format::Csv) => csv::read_rows(path, columns, visit),
        Some(Format::Parquet) => parquet::read_rows(path, columns, visit),
        Some(Format::Plain) => Err(DataError::invalid(
            path,
            "is plain text and has no labels; classification reads .parquet, .csv and .jsonl with a text and a label column; convert it",
        )),
        None => Err(DataError::invalid(
            path,
            "is not a supported text file; data.kind \"text\" reads .txt (one document), .jsonl (one document per line), .csv and .parquet (one document per row); convert or rename it",
        )),
    }
}
