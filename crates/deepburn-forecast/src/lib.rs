//! Forecasts of sharded training, for any Burn model.
//!
//! [`forecast()`] runs the real engine on a backend without data ([`Meta`]) and a process group
//! without other ranks. Nothing is computed or moved. The memory ledger counts what a real run
//! would hold, and the group counts the collectives that it would start.

#![forbid(unsafe_code)]

pub mod cost;
mod dry_run;
mod layout;
mod memory;
mod simulated_rank;
mod timeline;

pub use deepburn_meta::{Meta, MetaDevice};
pub use dry_run::{Forecast, forecast, forecast_stages};
pub use layout::pipeline_layout;
pub use memory::{MemoryPeaks, Peaks};
pub use simulated_rank::{ForecastError, on_simulated_rank};
