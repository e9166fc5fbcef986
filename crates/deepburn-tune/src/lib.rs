//! The search for the fastest configuration of a model that fits.
//!
//! ```text
//! SearchSpace ─► candidates ─► forecast of each ─► Search ─► measure the most promising one ─┐
//!                              (memory, seconds)     ▲                                        │
//!                                                    └──── calibrate, rank the others again ◄─┘
//! ```
//!
//! - [`SearchSpace`]: the values of each setting that is tuned, and the [`CandidateConfig`]s that
//!   they form. A candidate is a DeepSpeed configuration: [`CandidateConfig::apply`] writes it into
//!   the user's.
//! - [`Search`]: what is known of each candidate, and which one to measure next. A [`Calibration`]
//!   corrects the predicted times by what was measured.
//! - [`TuningFiles`]: the files that DeepSpeed's tuner writes, and a page with a picture. [`table`]
//!   is for the terminal.
//!
//! The crate knows neither models nor devices. Its user forecasts and measures the candidates.

#![forbid(unsafe_code)]

mod calibration;
mod candidate;
mod files;
mod page;
mod search;
mod space;
mod table;

pub use calibration::{Calibration, PredictedStep};
pub use candidate::{Buffers, CandidateConfig, StatePlacement, policy_name};
pub use files::{TuningFiles, TuningFilesError};
pub use page::page;
pub use search::{Assessment, Measurement, Search, SearchLimits, StepMemory, Trial, spearman};
pub use space::SearchSpace;
pub use table::table;
