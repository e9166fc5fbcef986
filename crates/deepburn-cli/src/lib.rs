//! The commands of DeepBurn: `finetune`, the main job, and `deepburn`, the tools beside it.

use std::io::{IsTerminal, Write};

use clap::Parser;
use deepburn::comm::Placement;
use deepburn_monitor::Profiler;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

mod allocator;
mod counted;
mod data;
mod failure;
mod job;
mod run;
mod tools;

pub use allocator::keep_freed_memory;
pub use failure::{Failure, exit};
pub use run::finetune::{Arguments, finetune};
pub use tools::cache_tool::CacheAction;
pub use tools::checkpoint_tools::{Size, WeightType};
pub use tools::launch::LaunchArguments;
pub use tools::predict::PredictArguments;
pub use tools::{Command, Tools, run as run_tool};

/// Whether this process is the one of a job that speaks to the user: the one with rank 0. Of contradictory
/// variables all speak, because which is first is then unknown.
fn speaks() -> bool {
    !matches!(Placement::detect(), Ok(Some(placement)) if placement.rank != 0)
}

/// Reads the command line. What is wrong with it, or the help that it asks for, is shown once a job.
pub fn parse<A: Parser>() -> A {
    A::try_parse().unwrap_or_else(|error| {
        if !speaks() {
            std::process::exit(error.exit_code());
        }
        if std::io::stderr().is_terminal() || !error.use_stderr() {
            error.exit();
        }
        // In one write: between several, a launcher that collects the errors of all ranks puts lines of
        // its own. Where nobody reads it the status still tells.
        let _ = std::io::stderr().write_all(error.render().to_string().as_bytes());
        std::process::exit(error.exit_code())
    })
}

/// Shows warnings and notes on standard error; `RUST_LOG` chooses which, and shows those of all ranks.
/// The profiler records phases and collectives once it knows which steps to profile.
pub fn show_notes() -> Profiler {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        let notes = "warn,deepburn_cli=info,deepburn_launch=info";
        tracing_subscriber::EnvFilter::new(if speaks() { notes } else { "off" })
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
