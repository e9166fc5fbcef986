//! Monitoring: the metrics of a run, its report page, and files for other programs.
//!
//! - [`metrics`]: `metrics.jsonl`, one row per step and per evaluation.
//! - [`GeneratedText`]: `generated.jsonl`, what a model generated after evaluations.
//! - [`Report`]: `report.html`, a self-contained page about a run.
//! - [`Comparison`]: a page that compares the curves of several runs.
//! - [`Monitors`]: TensorBoard event files and DeepSpeed's CSV files, written during a run.
//! - [`WandbRun`]: W&B's offline runs, written during a run.
//! - [`Profiler`]: the spans of some steps as a Chrome trace, and the memory over time.
//! - [`FlopsProfile`]: operations, parameters and time of a model by module.
//!
//! The crate does not depend on tensors or backends: it turns rows and numbers into files.

mod append;
mod chart;
mod csv;
mod error;
mod flops;
mod generated;
mod html;
pub mod metrics;
mod monitors;
mod plot;
mod profiler;
mod report;
mod report_error;
mod rows_file;
mod tensorboard;
mod wandb;

pub use self::csv::CsvFiles;
pub use error::MonitorError;
pub use flops::{FlopsOptions, FlopsProfile, FlopsTotals, ModuleFlops};
pub use generated::{GeneratedText, GeneratedWriter, read_generated};
pub use monitors::{MonitorFolders, Monitors};
pub use plot::{Comparison, MAX_RUNS, PlotError};
pub use profiler::{ProfileError, Profiler};
pub use report::{Environment, Report};
pub use report_error::ReportError;
pub use tensorboard::EventWriter;
pub use wandb::{WandbOptions, WandbRun};
