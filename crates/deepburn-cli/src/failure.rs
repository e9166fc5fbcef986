//! How a command ends: exit status and the one message on standard error.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use crate::run::progress::tell;

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// Something that the user gave is wrong: status 2. Nothing was written.
    Mistake(Box<dyn Error + Send + Sync>),
    /// Something failed while running: status 1.
    Run(Box<dyn Error + Send + Sync>),
    /// The process of another rank failed, and says so.
    Elsewhere {
        /// Its status, which is that of all.
        status: u8,
    },
    /// A program that was started failed: its own status.
    Program {
        /// Status of the program.
        status: u8,
        /// Which one it was, and how it failed.
        message: String,
    },
    /// A signal ended the run: status 128 and its number, as shells have it.
    Interrupted {
        /// Number of the signal.
        signal: u8,
        /// What was done, and how to go on.
        message: String,
    },
}

impl Failure {
    /// A user's mistake.
    pub fn mistake(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Mistake(error.into())
    }

    /// A failure while running.
    pub fn run(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Run(error.into())
    }

    /// Status of the process.
    pub fn status(&self) -> u8 {
        match self {
            Self::Mistake(_) => 2,
            Self::Run(_) => 1,
            Self::Elsewhere { status } | Self::Program { status, .. } => *status,
            Self::Interrupted { signal, .. } => 128 + signal,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mistake(error) | Self::Run(error) => {
                let message = error.to_string();
                write!(f, "error: {message}{}", exceeded_limit(&message))
            }
            Self::Program { message, .. } => write!(f, "error: {message}"),
            Self::Elsewhere { status } => write!(f, "another rank failed with status {status}"),
            Self::Interrupted { message, .. } => f.write_str(message),
        }
    }
}

/// Names the limit of the process that an error of the system stands for. The text is searched, because a failure
/// of another rank comes as text.
fn exceeded_limit(message: &str) -> &'static str {
    if message.contains("(os error 27)") {
        "; a limit on the size of files is set: raise it with ulimit -f"
    } else if message.contains("(os error 11)") {
        "; no more threads can be started: raise the limits on processes (ulimit -u, pids.max of the control \
         group) or use fewer ranks"
    } else {
        ""
    }
}

/// Prints the failure, if there is one, and gives the exit status.
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !matches!(failure, Failure::Elsewhere { .. }) {
                tell(&failure.to_string());
            }
            ExitCode::from(failure.status())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn limits_of_the_process_are_named() {
        let message = |code| Failure::run(io::Error::from_raw_os_error(code)).to_string();
        if cfg!(target_os = "linux") {
            assert!(message(27).contains("ulimit -f"), "{}", message(27));
            assert!(message(11).contains("ulimit -u"), "{}", message(11));
        }
        assert!(!message(2).contains("ulimit"), "{}", message(2));
    }
}
