//! The commands of DeepBurn: `finetune`, which trains models, and `deepburn`, a collection of
//! tools.
//!
//! Modules follow the flow of data. `models` lists the supported models. `job` resolves the model,
//! the devices and the memory before any data is read. `data` turns the data set of a job file into
//! batches, and combines them with a model in a recipe. `run` prepares a run, trains and writes its
//! results. `tools` has the commands for configurations, checkpoints and trained models.
//!
//! # Exit status
//!
//! | Status | Meaning |
//! |---|---|
//! | 0 | success |
//! | 1 | a failure while running, with rank and step |
//! | 2 | a user's mistake, with key, value, rule and remedy; nothing was written |
//! | 128 + n | stopped by signal n |
//! | other | the status of a program that `deepburn launch` started |
//!
//! When a signal stops `finetune` during training, it saves a checkpoint before it exits. There is
//! none to save before the first step, and no new one in the final test, when the model has already
//! been saved. A second SIGTERM or SIGINT ends the process immediately.
//!
//! Every failure is one message on standard error ([`Failure`]). If ranks are processes, the
//! process of the rank that failed prints it, and all processes exit with the same status.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use deepburn::comm::Placement;
use deepburn_monitor::Profiler;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

mod allocator;
mod console;
mod data;
mod failure;
mod job;
mod models;
mod named_values;
mod run;
mod tools;
mod whole_file;

pub use allocator::{HugePageAllocator, set_block_thresholds};
pub use failure::Failure;
pub use run::finetune::{Arguments, finetune};
pub use tools::{Tools, run as run_tool};

/// Returns whether this process prints messages, which only rank 0 does. If the environment
/// variables of launchers contradict each other, the rank is unknown, and all processes print.
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
        // A single write, because a launcher that collects the output of all ranks would insert its
        // own lines in between. If the pipe is closed, the exit status still reports the error.
        let _ = std::io::stderr().write_all(error.render().to_string().as_bytes());
        std::process::exit(error.exit_code())
    })
}

/// Starts logging to standard error and returns the profiler.
///
/// Without `RUST_LOG`, rank 0 logs warnings and notes. With it, all ranks log. The profiler
/// receives the same events. It records phases and collectives once it is configured with the steps
/// to profile.
pub fn start_logging() -> Profiler {
    // Other crates log too much below warnings. CubeCL also warns of each panic in the thread of a
    // device, without its text; `job::device_panics` reports it.
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        let notes =
            "warn,cubecl_common=error,deepburn_cli=info,deepburn_models=info,deepburn_launch=info";
        tracing_subscriber::EnvFilter::new(if prints_messages() { notes } else { "off" })
    });
    let notes = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // As in `console::eprint`, a closed pipe is not an error.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .with_filter(filter);
    let profiler = Profiler::idle();
    // A second call keeps the first subscriber.
    let _ = tracing_subscriber::registry().with(notes).with(profiler.layer()).try_init();
    // The profiler reads spans of every level. Without a limit, it would also get each record of
    // the `log` crate, of which the tokenizer writes several for each word.
    if std::env::var_os("RUST_LOG").is_none() {
        log::set_max_level(log::LevelFilter::Warn);
    }
    profiler
}

/// Prints the failure, if there is one, and returns the exit status.
///
/// A failure of another process is not printed, because that process prints it.
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !matches!(failure, Failure::Elsewhere { .. }) {
                console::eprint(&failure.to_string());
            }
            ExitCode::from(failure.status())
        }
    }
}
