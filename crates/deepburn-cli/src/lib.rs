//! The commands of DeepBurn: `finetune`, the main job, and `deepburn`, the tools beside it.
//!
//! Modules follow the flow of data. `job` knows models, devices and memory before any data is read. `data` turns the
//! names in a job file into batches, and combines them with a model in a recipe. `run` prepares a run, trains and
//! writes its results. `tools` are the commands that work on configurations, checkpoints and trained models.
//!
//! # Exit status
//!
//! | Status | Meaning |
//! |---|---|
//! | 0 | success |
//! | 1 | a failure while running, with rank and step |
//! | 2 | a user's mistake, with key, value, rule and remedy; nothing was written |
//! | 128 + n | stopped by signal n, after a checkpoint |
//! | other | the status of a program that `deepburn launch` started |
//!
//! Every failure is one message on standard error ([`Failure`]). Where ranks are processes, the process of the rank
//! that failed prints it, and all processes end with the same status.

use std::io::{IsTerminal, Write};

use clap::Parser;
use deepburn::comm::Placement;
use deepburn_monitor::Profiler;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

mod allocator;
mod console;
mod counted;
mod data;
mod failure;
mod job;
mod run;
mod tools;

pub use allocator::{HugePageAllocator, set_block_thresholds};
pub use failure::{Failure, exit};
pub use run::finetune::{Arguments, finetune};
pub use tools::{Tools, run as run_tool};

/// Returns whether this process prints messages: the one with rank 0. If the variables of launchers contradict each
/// other, all processes print, because the rank is unknown.
fn prints_messages() -> bool {
    !matches!(Placement::detect(), Ok(Some(placement)) if placement.rank != 0)
}

/// Parses the command line. Errors and help are printed once per job.
pub fn parse<A: Parser>() -> A {
    A::try_parse().unwrap_or_else(|error| {
        if !prints_messages() {
            std::process::exit(error.exit_code());
        }
        if std::io::stderr().is_terminal() || !error.use_stderr() {
            error.exit();
        }
        // A single write, because a launcher that collects messages of all ranks would put its own lines in between. If
        // the pipe is closed, the exit status remains.
        let _ = std::io::stderr().write_all(error.render().to_string().as_bytes());
        std::process::exit(error.exit_code())
    })
}

/// Starts logging to standard error and returns the profiler.
///
/// Without `RUST_LOG`, rank 0 logs warnings and notes. With it, all ranks log. The profiler listens to the same events,
/// and records phases and collectives once it knows which steps to profile.
pub fn start_logging() -> Profiler {
    // Other crates log too much below warnings.
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        let notes = "warn,deepburn_cli=info,deepburn_launch=info";
        tracing_subscriber::EnvFilter::new(if prints_messages() { notes } else { "off" })
    });
    let notes = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // As in `console::eprint`, a closed pipe is no error.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .with_filter(filter);
    let profiler = Profiler::idle();
    // A second call keeps the first subscriber.
    let _ = tracing_subscriber::registry().with(notes).with(profiler.layer()).try_init();
    profiler
}
