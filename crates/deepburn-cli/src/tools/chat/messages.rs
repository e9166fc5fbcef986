//! Messages that a user types, or that a file has.
//!
//! Main type: [`Messages`]. A thread reads the input, so that Ctrl-C is noticed while nothing is
//! typed.

use std::io::{self, BufRead, ErrorKind, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::console;
use crate::failure::Failure;

/// The time after which Ctrl-C is noticed.
const PATIENCE: Duration = Duration::from_millis(50);

/// The longest line that Linux passes from a terminal, in bytes, without its end. It drops the
/// rest.
const LONGEST_LINE: usize = 4095;

/// What a user wants next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// An answer to this message.
    Message(String),
    /// To begin again.
    Clear,
    /// To leave.
    End,
    /// A command that does not exist.
    Unknown(String),
}

/// The messages on standard input.
pub(super) struct Messages {
    lines: Receiver<io::Result<String>>,
    /// Whether somebody types them.
    pub(super) is_terminal: bool,
    /// Whether Ctrl-C was pressed.
    interrupted: Arc<AtomicBool>,
}

impl Messages {
    /// Starts to read standard input.
    ///
    /// # Errors
    /// Returns a failure while running if the handler of Ctrl-C cannot be registered.
    pub(super) fn start(is_terminal: bool) -> Result<Self, Failure> {
        let interrupted = Arc::new(AtomicBool::new(false));
        // In a pipe, Ctrl-C ends the program as usual.
        if is_terminal {
            flag::register(SIGINT, interrupted.clone()).map_err(Failure::run)?;
        }
        // The thread blocks in `read`, so it is never joined and ends with the program.
        let (sender, lines) = sync_channel(1);
        thread::spawn(move || {
            for line in io::stdin().lock().lines() {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { lines, is_terminal, interrupted })
    }

    /// Waits for the next message or command. Empty lines are skipped.
    ///
    /// # Errors
    /// Returns a user's mistake if the input is not UTF-8 or cannot be read.
    pub(super) fn next(&mut self) -> Result<Input, Failure> {
        let mut message = String::new();
        loop {
            self.prompt(if message.is_empty() { "> " } else { "… " });
            let Some(line) = self.line()? else {
                if self.is_terminal {
                    console::eprint("");
                }
                return Ok(end_of(message));
            };
            if self.is_terminal && line.len() >= LONGEST_LINE {
                console::eprint(&format!(
                    "a terminal passes at most {LONGEST_LINE} bytes of a line; use a pipe, or end lines with \\"
                ));
            }
            match line.strip_suffix('\\') {
                Some(line) => {
                    message.push_str(line);
                    message.push('\n');
                }
                None if message.is_empty() && line.trim().is_empty() => {}
                None => return Ok(parse(&(message + &line))),
            }
        }
    }

    /// Prints a prompt, if somebody types.
    fn prompt(&self, text: &str) {
        if self.is_terminal {
            let mut output = io::stderr();
            let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
        }
    }

    /// Waits for a line; `None` at the end of the input.
    fn line(&self) -> Result<Option<String>, Failure> {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(Err(error)) if self.is_terminal && error.kind() == ErrorKind::InvalidData => {
                    console::eprint("messages are UTF-8 text; write another one");
                    self.prompt("> ");
                }
                Ok(line) => {
                    return line.map(Some).map_err(|error| {
                        Failure::mistake(format!(
                            "standard input: {error}; messages are UTF-8 text"
                        ))
                    });
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if self.interrupted.swap(false, Relaxed) => {
                    console::eprint("\n/exit or Ctrl-D ends the conversation");
                    self.prompt("> ");
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Returns whether Ctrl-C was pressed. Earlier ones are forgotten.
    pub(super) fn start_answer(&self) -> Arc<AtomicBool> {
        self.interrupted.store(false, Relaxed);
        self.interrupted.clone()
    }
}

/// Returns what the end of the input means after the first lines of a message.
fn end_of(message: String) -> Input {
    if message.trim().is_empty() { Input::End } else { parse(message.trim_end()) }
}

/// Returns what a line means.
fn parse(text: &str) -> Input {
    match text.trim() {
        "/exit" | "/quit" | "/bye" => Input::End,
        "/clear" => Input::Clear,
        // A second slash makes a message of what would be a command.
        message if message.strip_prefix("//").is_some_and(is_word) => {
            Input::Message(message[1..].to_owned())
        }
        // A path is a message.
        command if command.starts_with('/') && is_word(&command[1..]) => {
            Input::Unknown(command.to_owned())
        }
        _ => Input::Message(text.to_owned()),
    }
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|it| it.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        for (line, expected) in [
            ("/exit", Input::End),
            (" /clear ", Input::Clear),
            ("/halt", Input::Unknown("/halt".to_owned())),
            ("//halt", Input::Message("/halt".to_owned())),
            ("//exit ", Input::Message("/exit".to_owned())),
            ("//usr/bin", Input::Message("//usr/bin".to_owned())),
            ("/usr/bin is a folder", Input::Message("/usr/bin is a folder".to_owned())),
            ("  two  words ", Input::Message("  two  words ".to_owned())),
        ] {
            assert_eq!(parse(line), expected, "{line}");
        }
        assert_eq!(end_of("a\n".to_owned()), Input::Message("a".to_owned()));
        assert_eq!(end_of(String::new()), Input::End);
    }
}
