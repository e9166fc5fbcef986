//! Output to the terminal: results on standard output, messages on standard error.
//!
//! A closed pipe (`| head`) is no error, and messages that cannot be written are lost.
//!
//! Standard output has only results, so that it can be piped. Progress, messages and logs are on standard error.

use std::io::{self, ErrorKind, Write};

use crate::failure::Failure;

/// Prints a result and a newline to standard output.
///
/// # Errors
/// Standard output cannot be written, for example because it is a file on a full disk.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut output = io::stdout();
    match output.write_all(format!("{text}\n").as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::run(format!(
            "standard output cannot be written: {error}; check the free space where it goes"
        ))),
        _ => Ok(()),
    }
}

/// Prints a message and a newline to standard error.
pub(crate) fn eprint(text: &str) {
    // A single write keeps the line whole when several ranks share one terminal.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}
