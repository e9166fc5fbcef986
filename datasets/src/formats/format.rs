//! The formats that text comes in, told apart by the file's name.

use std::path::Path;

/// How a file holds its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// `.txt`: one document.
    Plain,
    /// `.jsonl`: an object a line.
    JsonLines,
    /// `.csv`: names in the first line, then a row a record.
    Csv,
    /// `.parquet`: what the Hub stores tables as.
    Parquet,
}

impl Format {
    /// The format that `path` names, if it is one of these.
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
