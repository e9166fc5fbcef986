//! The commands of DeepBurn: `finetune`, the main job, and `deepburn`, the tools beside it.

use std::io::IsTerminal;

mod causal;
mod classification;
mod corpus;
mod failure;
mod finetune;
mod memory;
mod preparation;
mod progress;
mod recipe;
mod texts;
mod tools;

pub use failure::{Failure, exit};
pub use finetune::{Arguments, finetune};
pub use tools::{Command, Tools, run as run_tool};

/// Shows warnings and notes on standard error; `RUST_LOG` chooses which.
pub fn show_notes() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,deepburn_cli=info"));
    // A second call keeps the first subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // Like `progress::tell`: notes that nobody reads stop nothing.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .try_init();
}
