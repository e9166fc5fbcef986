//! Output to the terminal: results on standard output, messages on standard error.
//!
//! Only results are written to standard output, so that it can be piped. Progress, messages and
//! logs are written to standard error.
//!
//! A closed pipe (`| head`) is not an error. Messages that cannot be written to standard error are
//! dropped.

use std::io::{self, ErrorKind, Write};

use crate::failure::Failure;

/// Prints a result and a newline to standard output.
///
/// # Errors
/// Returns a failure while running if standard output cannot be written, for example because it is
/// a file on a full disk.
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
    // A single write, so that lines of several ranks on one terminal are not mixed.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Returns a text without control characters other than line breaks and tabs. Data and models could
/// change the terminal with them.
pub(crate) fn printable(text: &str) -> String {
    let is_control = |it: char| it.is_control() && !matches!(it, '\n' | '\t');
    text.replace(is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        for (text, shown) in [
            ("a\u{1b}[31m\tb\n", "a\u{fffd}[31m\tb\n"),
            ("a\n\tb\u{1b}[2Jc\r", "a\n\tb\u{fffd}[2Jc\u{fffd}"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }
}
