//! Files with text and labels: plain text, JSON, JSON lines, CSV and parquet.
//!
//! - [`format`](mod@format): the format of a file, and the rows of any table.
//! - [`compression`]: text files that are decompressed while they are read.
//! - [`table`]: cells, rows and labels, independent of the format.
//! - [`text`]: documents for language models.
//! - [`labeled`], [`labels`] and [`classes`]: texts with their labels.
//! - [`folder`]: listings and regular files.
//! - [`role`]: what a file in a folder of data is.
//! - [`rows`]: whole rows as JSON.

pub(crate) mod classes;
pub(crate) mod compression;
mod csv;
pub(crate) mod folder;
pub(crate) mod format;
mod json;
mod json_lines;
mod json_row;
pub(crate) mod labeled;
pub(crate) mod labels;
mod parquet;
pub(crate) mod role;
pub(crate) mod rows;
pub(crate) mod table;
pub(crate) mod text;
