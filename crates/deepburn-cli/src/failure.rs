//! Failures of a command: the exit status and one message on standard error.
//!
//! A message has the form `what is wrong: value; what is allowed; what to do`, so that users can
//! fix a job with it:
//!
//! ```text
//! error: training.devices: 4 is not visible: "cuda" sees 2 on this host; use indices from 0 to 1, or "auto"
//! ```
//!
//! [`Failure::mistake`] is for errors that depend on the input alone. [`Failure::run`] is for
//! errors that can also happen to a correct job.

use std::fmt;

use deepburn::BoxError;

/// Why a command failed.
///
/// The variants differ in their exit status and in the process that prints the message.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The input is wrong: status 2. Nothing was written.
    #[error("error: {0}{hint}", hint = exceeded_limit(.0))]
    Mistake(BoxError),
    /// Something failed while running: status 1.
    #[error("error: {0}{hint}", hint = exceeded_limit(.0))]
    Run(BoxError),
    /// The process of another rank failed and prints the message.
    #[error("another rank failed with status {status}")]
    Elsewhere {
        /// Exit status of that process, which all processes return.
        status: u8,
    },
    /// A program that this command started failed.
    #[error("error: {message}")]
    Program {
        /// Status of the program.
        status: u8,
        /// Name of the program, and how it failed.
        message: String,
    },
    /// A signal ended the run: status 128 plus its number, as in shells.
    #[error("{message}")]
    Interrupted {
        /// Number of the signal.
        signal: u8,
        /// What was saved, and how to resume.
        message: String,
    },
}

impl Failure {
    /// Returns a user's mistake.
    pub fn mistake(error: impl Into<BoxError>) -> Self {
        Self::Mistake(error.into())
    }

    /// Returns the conversion of an error to a user's mistake that begins with the key or option
    /// that is wrong.
    pub(crate) fn of_key<E: fmt::Display>(key: impl fmt::Display) -> impl Fn(E) -> Self {
        move |error| Self::mistake(format!("{key}: {error}"))
    }

    /// Returns a failure while running.
    pub fn run(error: impl Into<BoxError>) -> Self {
        Self::Run(error.into())
    }

    /// Returns the exit status of the process.
    pub fn status(&self) -> u8 {
        match self {
            Self::Mistake(_) => 2,
            Self::Run(_) => 1,
            Self::Elsewhere { status } | Self::Program { status, .. } => *status,
            Self::Interrupted { signal, .. } => 128 + signal,
        }
    }
}

/// Returns a hint for errors of the operating system that are caused by a process limit, or an
/// empty text. The error code is searched in the message, because failures of other ranks are
/// received as text.
fn exceeded_limit(error: &BoxError) -> &'static str {
    let message = error.to_string();
    if message.contains("(os error 27)") {
        "; a limit on the size of files is set: raise it with ulimit -f"
    } else if message.contains("(os error 11)") {
        "; no more threads can be started: raise the limits on processes (ulimit -u, pids.max of the control \
         group) or use fewer ranks"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn names_the_exceeded_process_limit() {
        let message = |code| Failure::run(io::Error::from_raw_os_error(code)).to_string();
        if cfg!(target_os = "linux") {
            assert!(message(27).contains("ulimit -f"), "{}", message(27));
            assert!(message(11).contains("ulimit -u"), "{}", message(11));
        }
        assert!(!message(2).contains("ulimit"), "{}", message(2));
    }
}
