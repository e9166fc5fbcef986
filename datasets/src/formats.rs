//! Files that hold text and labels: plain text, JSON lines, CSV and parquet.

pub(crate) mod classes;
mod csv;
pub(crate) mod folder;
pub(crate) mod format;
mod json_lines;
pub(crate) mod labelled;
mod parquet;
pub(crate) mod table;
pub(crate) mod text;
