//! The error of a page with charts.

use std::io;
use std::path::PathBuf;

/// The reason why a report cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A curve could not be drawn.
    #[error("cannot draw the curve of {chart}: {reason}")]
    Chart {
        /// The title of the chart.
        chart: String,
        /// The error of the drawing library.
        reason: String,
    },
    /// The operating system returned an error.
    #[error(
        "cannot write report `{}`: {source}; check that the folder exists and is writable",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}
