//! Files with text and labels: plain text, JSON lines, CSV and parquet.
//!
//! - [`format`](mod@format): the format of a file, and the rows of any table.
//! - [`table`]: cells, rows and labels, independent of the format.
//! - [`text`]: documents for language models.
//! - [`labelled`], [`labels`] and [`classes`]: texts with their labels.
//! - [`folder`]: listings and regular files.

pub(crate) mod classes;
mod csv;
pub(crate) mod folder;
pub(crate) mod format;
mod json_lines;
pub(crate) mod labelled;
pub(crate) mod labels;
mod parquet;
pub(crate) mod table;
pub(crate) mod text;
