//! What a run leaves to look at: its record, its page, and what other programs read of it.
//!
//! - [`metrics`]: the record `metrics.jsonl`, a row for each step and each evaluation.
//! - [`Report`]: `report.html`, one self-contained page about a run.
//! - [`Comparison`]: one such page that lays the curves of several runs over each other.
//! - [`Monitors`]: TensorBoard's event files and DeepSpeed's CSV files, while a run goes on.
//! - [`Profiler`]: the spans of some steps as a Chrome trace, and the memory over time.
//! - [`FlopsProfile`]: operations, parameters and time of a model by module.
//!
//! Nothing here knows a tensor or a backend: rows and numbers come in, files go out.

mod append;
mod chart;
mod csv;
mod flops;
mod html;
pub mod metrics;
mod monitors;
mod plot;
mod profiler;
mod report;
mod tensorboard;

pub use self::csv::CsvFiles;
pub use flops::{FlopsOptions, FlopsProfile, FlopsTotals, ModuleFlops};
pub use monitors::{MonitorError, MonitorFolders, Monitors};
pub use plot::{Comparison, MAX_RUNS, PlotError};
pub use profiler::{ProfileError, Profiler};
pub use report::{Environment, Report, ReportError};
pub use tensorboard::EventWriter;
