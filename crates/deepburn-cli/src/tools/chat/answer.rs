//! An answer that is printed while it is generated.

use std::io::{self, ErrorKind, IsTerminal, Write};

use deepburn_datasets::Tokenizer;

use crate::console::printable;
use crate::failure::Failure;

/// Prints the text of new tokens as far as it is complete.
pub(super) struct Answer<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens so far.
    tokens: Vec<u32>,
    /// The number of bytes of their text that were printed.
    printed: usize,
    /// Whether standard output is a terminal.
    is_terminal: bool,
    /// Whether somebody reads the answer: a pipe may have been closed.
    pub(super) is_read: bool,
}

impl<'a> Answer<'a> {
    /// Returns an empty answer.
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        let is_terminal = io::stdout().is_terminal();
        Self { tokenizer, tokens: Vec::new(), printed: 0, is_terminal, is_read: true }
    }

    /// Prints what the tokens `new`, all tokens so far, add to the text. A character whose last
    /// bytes are still to come waits.
    ///
    /// # Errors
    /// Returns a failure while running if the tokens cannot be decoded, or if standard output
    /// cannot be written.
    pub(super) fn print(&mut self, new: &[u32]) -> Result<(), Failure> {
        self.tokens = new.to_vec();
        let text = self.text()?;
        // A decoder writes U+FFFD for the first bytes of a character.
        let complete = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        self.print_up_to(complete, complete.len())
    }

    /// Prints the rest of the text and a newline, and returns the text without end tokens `ends`;
    /// `None` if nobody reads it.
    ///
    /// # Errors
    /// Returns the errors of [`print`](Self::print).
    pub(super) fn finish(mut self, ends: &[u32]) -> Result<Option<String>, Failure> {
        if self.tokens.last().is_some_and(|last| ends.contains(last)) {
            self.tokens.pop();
        }
        let text = self.text()?;
        self.print_up_to(&text, text.len())?;
        self.is_read &= written("\n")?;
        Ok(self.is_read.then_some(text))
    }

    fn text(&self) -> Result<String, Failure> {
        self.tokenizer.decode(&self.tokens, true).map_err(Failure::run)
    }

    fn print_up_to(&mut self, text: &str, end: usize) -> Result<(), Failure> {
        // The end of a text may change with the next token, as when a decoder removes spaces.
        let Some(added) = text.get(self.printed..end) else { return Ok(()) };
        self.printed = end.max(self.printed);
        self.is_read &= match self.is_terminal {
            true => written(&printable(added))?,
            false => written(added)?,
        };
        Ok(())
    }
}

/// Writes to standard output at once. Returns false if it is a closed pipe.
fn written(text: &str) -> Result<bool, Failure> {
    let mut output = io::stdout();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::run(format!("standard output cannot be written: {error}")))
        }
        result => Ok(result.is_ok()),
    }
}
