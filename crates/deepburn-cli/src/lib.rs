//! The commands of DeepBurn: `finetune`, the main job, and `deepburn`, the tools beside it.

use std::io::IsTerminal;

use deepburn_monitor::Profiler;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

mod causal;
mod checkpoint_tools;
mod classification;
mod corpus;
mod devices;
mod failure;
mod finetune;
mod job_state;
mod launch;
mod lengths;
mod memory;
mod monitoring;
mod places;
mod preparation;
mod progress;
mod recipe;
mod results;
mod resume;
mod signals;
mod text_source;
mod texts;
mod tools;
mod watch;

pub use checkpoint_tools::{Size, WeightType};
pub use failure::{Failure, exit};
pub use finetune::{Arguments, finetune};
pub use launch::LaunchArguments;
pub use tools::{Command, Tools, run as run_tool};

/// Shows warnings and notes on standard error; `RUST_LOG` chooses which. The profiler hears of every
/// phase and collective once it is told of steps.
pub fn show_notes() -> Profiler {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        tracing_subscriber::EnvFilter::new("warn,deepburn_cli=info,deepburn_launch=info")
    });
    let notes = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // Like `progress::tell`: notes that nobody reads stop nothing.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .with_filter(filter);
    let profiler = Profiler::idle();
    // A second call keeps the first subscriber.
    let _ = tracing_subscriber::registry().with(notes).with(profiler.layer()).try_init();
    profiler
}
