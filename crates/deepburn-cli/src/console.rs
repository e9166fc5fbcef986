//! Output to the terminal: results on standard output, messages on standard error.
//!
//! Both functions ignore write errors, because a closed pipe (`| head`) must not fail a run.
//!
//! Standard output has only results, so that it can be piped. Progress, messages and logs are on standard error.

use std::io::{self, Write};

/// Prints a result and a newline to standard output.
pub(crate) fn print(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

/// Prints a message and a newline to standard error.
pub(crate) fn eprint(text: &str) {
    // A single write keeps the line whole when several ranks share one terminal.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}
