//! Text as a stream of documents, so that no text has to fit into memory.
//!
//! [`Documents`] says where text lies and how documents are joined. It is read several times: once
//! for a [`Survey`] (its length, its hash, what a tokenizer is trained on), and once for each part
//! that is tokenized. A text that changes in between is refused.

use std::ops::Range;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::formats::text::visit_documents;
use crate::hub::content_hash::hexadecimal;
use crate::{DataError, Join};

/// A piece of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// Text of the document, which may go on.
    Text(&'a str),
    /// The document ends.
    End,
}

/// What becomes of each piece.
pub(crate) type Take<'a> = &'a mut dyn FnMut(Piece<'_>) -> Result<(), DataError>;

/// Text that can be read again and again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Documents<'a> {
    /// Files and folders, rows of which have their text in a field.
    Files { files: &'a [PathBuf], field: &'a str, join: Join },
    /// Documents in memory.
    Memory { documents: &'a [String], join: Join },
}

/// What is known of a text after it was read once.
#[derive(Debug)]
pub(crate) struct Survey {
    /// Characters in all documents.
    pub(crate) num_chars: usize,
    /// Hash of all documents and their ends.
    pub(crate) hash: String,
    /// The first documents, up to a number of bytes.
    pub(crate) sample: Vec<String>,
}

/// A hash of documents. The length of each follows it, so that no two lists look the same.
#[derive(Default)]
pub(crate) struct DocumentsHasher {
    hasher: Sha256,
    bytes: u64,
}

impl DocumentsHasher {
    pub(crate) fn take(&mut self, piece: Piece<'_>) {
        match piece {
            Piece::Text(text) => {
                self.hasher.update(text);
                self.bytes += text.len() as u64;
            }
            Piece::End => {
                self.hasher.update(self.bytes.to_le_bytes());
                self.bytes = 0;
            }
        }
    }

    pub(crate) fn finish(self) -> String {
        hexadecimal(&self.hasher.finalize())
    }
}

impl Documents<'_> {
    /// How documents are joined.
    pub(crate) fn join(&self) -> Join {
        let (Self::Files { join, .. } | Self::Memory { join, .. }) = self;
        *join
    }

    /// What messages and the token cache call the text.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::Memory { .. } => "the synthetic corpus".to_owned(),
            Self::Files { files: [], .. } => "no files".to_owned(),
            Self::Files { files: [only], .. } => only.display().to_string(),
            Self::Files { files: [first, rest @ ..], .. } => {
                format!("{} and {} more", first.display(), rest.len())
            }
        }
    }

    /// Gives every piece to `take`. Empty documents are left out; joined by blank lines, all are
    /// one document.
    ///
    /// # Errors
    /// Text that cannot be read, and those of `take`.
    pub(crate) fn visit(&self, take: Take<'_>) -> Result<(), DataError> {
        let join = self.join();
        let mut joiner = Joiner { join, begins: true, documents: 0, has_text: false };
        let mut joined = |piece: Piece<'_>| joiner.take(piece, take);
        match self {
            Self::Files { files, field, .. } => {
                for path in *files {
                    visit_documents(path, field, &mut joined)?;
                }
            }
            Self::Memory { documents, .. } => {
                for document in *documents {
                    joined(Piece::Text(document))?;
                    joined(Piece::End)?;
                }
            }
        }
        match join == Join::BlankLine && joiner.documents > 0 {
            true => take(Piece::End),
            false => Ok(()),
        }
    }

    /// Reads the text once; `sample_bytes` of it are kept.
    ///
    /// # Errors
    /// Those of [`Documents::visit`].
    pub(crate) fn survey(&self, sample_bytes: usize) -> Result<Survey, DataError> {
        let mut hasher = DocumentsHasher::default();
        let (mut num_chars, mut sample, mut kept) = (0, vec![String::new()], 0);
        self.visit(&mut |piece| {
            hasher.take(piece);
            match piece {
                Piece::Text(text) => {
                    num_chars += text.chars().count();
                    let room = text.floor_char_boundary(text.len().min(sample_bytes - kept));
                    // A sample ends where it was cut.
                    kept = if room < text.len() { sample_bytes } else { kept + room };
                    if let Some(last) = sample.last_mut() {
                        last.push_str(&text[..room]);
                    }
                }
                Piece::End if kept < sample_bytes => sample.push(String::new()),
                Piece::End => {}
            }
            Ok(())
        })?;
        sample.retain(|document| !document.is_empty());
        Ok(Survey { num_chars, hash: hasher.finish(), sample })
    }

    /// Gives the characters in `range` to `take`, after `survey` has read all of them. A document
    /// that straddles an end of the range is divided.
    ///
    /// # Errors
    /// Those of [`Documents::visit`]; [`DataError::ChangedText`] where the text is not the one that
    /// was surveyed.
    pub(crate) fn visit_range(
        &self,
        survey: &Survey,
        range: Range<usize>,
        take: Take<'_>,
    ) -> Result<(), DataError> {
        let mut hasher = DocumentsHasher::default();
        let (mut at, mut has_text) = (0, false);
        self.visit(&mut |piece| {
            hasher.take(piece);
            let Piece::Text(text) = piece else {
                return match std::mem::take(&mut has_text) {
                    true => take(Piece::End),
                    false => Ok(()),
                };
            };
            let start = at;
            at += text.chars().count();
            let within = chars_within(text, start..at, &range);
            if within.is_empty() {
                return Ok(());
            }
            has_text = true;
            take(Piece::Text(within))
        })?;
        match hasher.finish() == survey.hash {
            true => Ok(()),
            false => Err(DataError::ChangedText { what: self.described() }),
        }
    }
}

/// The characters of `text`, which are those at `place`, that are in `range`.
fn chars_within<'t>(text: &'t str, place: Range<usize>, range: &Range<usize>) -> &'t str {
    if range.start >= place.end || range.end <= place.start {
        return "";
    }
    let byte = |char: usize| match char {
        0 => 0,
        char => text.char_indices().nth(char).map_or(text.len(), |(at, _)| at),
    };
    let start = byte(range.start.saturating_sub(place.start));
    match range.end >= place.end {
        true => &text[start..],
        false => &text[start..byte(range.end - place.start)],
    }
}

/// Joins documents.
struct Joiner {
    join: Join,
    /// Whether the next piece begins a document.
    begins: bool,
    /// Documents so far.
    documents: usize,
    has_text: bool,
}

impl Joiner {
    fn take(&mut self, piece: Piece<'_>, take: Take<'_>) -> Result<(), DataError> {
        if self.join == Join::BlankLine {
            return self.take_joined(piece, take);
        }
        match piece {
            Piece::Text("") => Ok(()),
            Piece::Text(_) => {
                self.has_text = true;
                take(piece)
            }
            Piece::End => match std::mem::take(&mut self.has_text) {
                true => take(piece),
                false => Ok(()),
            },
        }
    }

    /// Of all documents one, with blank lines in between.
    fn take_joined(&mut self, piece: Piece<'_>, take: Take<'_>) -> Result<(), DataError> {
        if std::mem::take(&mut self.begins) {
            self.documents += 1;
            if self.documents > 1 {
                take(Piece::Text("\n\n"))?;
            }
        }
        match piece {
            Piece::Text("") => Ok(()),
            Piece::Text(_) => take(piece),
            Piece::End => {
                self.begins = true;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(documents: &[String], join: Join, range: Range<usize>) -> Vec<String> {
        let source = Documents::Memory { documents, join };
        let survey = source.survey(0).unwrap();
        let mut found = vec![String::new()];
        let mut take = |piece: Piece<'_>| {
            match piece {
                Piece::Text(text) => found.last_mut().unwrap().push_str(text),
                Piece::End => found.push(String::new()),
            }
            Ok(())
        };
        source.visit_range(&survey, range, &mut take).unwrap();
        assert_eq!(found.pop().unwrap(), "");
        found
    }

    #[test]
    fn each_join_keeps_its_documents() {
        let documents = ["a", "", "b"].map(str::to_owned);
        let joined = |join| all(&documents, join, 0..usize::MAX);
        assert_eq!(joined(Join::EndOfText), ["a", "b"]);
        assert_eq!(joined(Join::Nothing), ["a", "b"]);
        assert_eq!(joined(Join::BlankLine), ["a\n\n\n\nb"]);
    }

    #[test]
    fn text_that_changed_is_refused() {
        let (old, new) = ([String::from("one")], [String::from("two")]);
        let source = |documents| Documents::Memory { documents, join: Join::Nothing };
        let survey = source(&old).survey(0).unwrap();
        let error = source(&new).visit_range(&survey, 0..9, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, DataError::ChangedText { .. }), "{error}");
    }

    #[test]
    fn a_sample_is_the_beginning() {
        let documents = ["caf\u{e9}", "two", "three"].map(str::to_owned);
        let source = Documents::Memory { documents: &documents, join: Join::EndOfText };
        let sample = |bytes| source.survey(bytes).unwrap().sample;
        assert_eq!(sample(4), ["caf"]);
        assert_eq!(sample(6), ["caf\u{e9}", "t"]);
        assert_eq!(sample(99), documents);
        assert_eq!(source.survey(0).unwrap().num_chars, 12);
    }

    proptest! {
        #[test]
        fn ranges_lose_no_character(
            documents in prop::collection::vec("[a\u{e9}\u{4e2d}\u{1f600}]{1,9}", 1..8),
            share in 0.0f64..1.0,
        ) {
            let text = documents.concat();
            let cut = (text.chars().count() as f64 * share) as usize;
            let [head, tail] = [0..cut, cut..usize::MAX].map(|range| all(&documents, Join::Nothing, range));
            prop_assert_eq!(head.concat().chars().count(), cut);
            prop_assert_eq!(head.concat() + &tail.concat(), text);
        }
    }
}
