//! Text as a stream of documents, so that a text need not fit into memory.
//!
//! [`Documents`] specifies the source of the text and how documents are joined. It is read several
//! times: once for a [`TextScan`] (length, hash, training sample of the tokenizer), and once for
//! each part that is tokenized. A text that changes in between is an error.

use std::mem::take;
use std::ops::Range;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::formats::folder::described;
use crate::formats::text::{DocumentEvent, EventSink, text_files, visit_documents};
use crate::hash::hexadecimal;
use crate::{DataError, Join, Result};

/// Text that can be read repeatedly.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Documents<'a> {
    /// Files and folders. `field` is the text column of tables.
    Files { files: &'a [PathBuf], field: &'a str, join: Join },
    /// Documents in memory.
    Memory { documents: &'a [String], join: Join },
}

/// The results of the first read of a text.
#[derive(Debug)]
pub(crate) struct TextScan {
    /// Characters in all documents.
    pub(crate) num_chars: usize,
    /// Documents, without empty ones.
    pub(crate) num_documents: usize,
    /// The hash of all documents and their boundaries.
    pub(crate) hash: String,
    /// The first documents, up to a number of bytes.
    pub(crate) sample: Vec<String>,
}

/// A hash of documents. The length of each document follows it, so that different lists have
/// different hashes.
#[derive(Default)]
pub(crate) struct DocumentsHasher {
    /// The hash of everything before the current document.
    hasher: Sha256,
    /// Bytes of the current document so far.
    bytes: u64,
}

impl DocumentsHasher {
    /// Adds an event.
    pub(crate) fn add(&mut self, event: DocumentEvent<'_>) {
        match event {
            DocumentEvent::Text(text) => {
                self.hasher.update(text);
                self.bytes += text.len() as u64;
            }
            DocumentEvent::End => self.hasher.update(take(&mut self.bytes).to_le_bytes()),
        }
    }

    /// Returns the digits of the hash.
    pub(crate) fn finish(self) -> String {
        hexadecimal(&self.hasher.finalize())
    }
}

impl Documents<'_> {
    /// Returns how documents are joined.
    pub(crate) fn join(&self) -> Join {
        let (Self::Files { join, .. } | Self::Memory { join, .. }) = self;
        *join
    }

    /// Returns the name of the text in messages and in the token cache.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::Memory { .. } => "the synthetic corpus".to_owned(),
            Self::Files { files, .. } => described(files),
        }
    }

    /// Streams every event to `sink`, and returns the files that have no text. Empty documents are
    /// left out. With [`Join::BlankLine`] all documents, including empty ones, form one document
    /// with blank lines in between.
    ///
    /// # Errors
    /// Returns an error if the text cannot be read or all files are empty, and the errors of
    /// `sink`.
    pub(crate) fn visit(&self, sink: EventSink<'_>) -> Result<Vec<PathBuf>> {
        let mut empty = Vec::new();
        let is_one = self.join() == Join::BlankLine;
        let (mut begins, mut is_first, mut has_text) = (true, true, false);
        let mut joined = |event: DocumentEvent<'_>| {
            // A blank line before each document except the first.
            if is_one && take(&mut begins) && !take(&mut is_first) {
                sink(DocumentEvent::Text("\n\n"))?;
            }
            match event {
                DocumentEvent::Text("") => Ok(()),
                DocumentEvent::Text(_) => {
                    has_text = true;
                    sink(event)
                }
                DocumentEvent::End => {
                    begins = true;
                    if take(&mut has_text) && !is_one { sink(event) } else { Ok(()) }
                }
            }
        };
        match self {
            Self::Files { files, field, .. } => {
                let paths = files.iter().map(|path| text_files(path));
                let paths = paths.collect::<Result<Vec<_>>>()?.concat();
                for path in &paths {
                    match visit_documents(path, field, &mut joined) {
                        // One file without text does not make a data set empty.
                        Err(DataError::Empty { .. }) => empty.push(path.clone()),
                        other => other?,
                    }
                }
                if empty.len() == paths.len() {
                    let what = format!("the text at `{}`", self.described());
                    return Err(DataError::Empty { what });
                }
            }
            Self::Memory { documents, .. } => {
                for document in *documents {
                    joined(DocumentEvent::Text(document))?;
                    joined(DocumentEvent::End)?;
                }
            }
        }
        if is_one && !is_first {
            sink(DocumentEvent::End)?;
        }
        Ok(empty)
    }

    /// Reads the text once and keeps a sample of `sample_bytes`.
    ///
    /// # Errors
    /// Returns the errors of [`Documents::visit`].
    pub(crate) fn scan(&self, sample_bytes: usize) -> Result<TextScan> {
        let mut hasher = DocumentsHasher::default();
        let (mut num_chars, mut sample, mut kept) = (0, vec![String::new()], 0);
        let mut num_documents = 0;
        let empty = self.visit(&mut |event| {
            hasher.add(event);
            num_documents += usize::from(event == DocumentEvent::End);
            match event {
                DocumentEvent::Text(text) => {
                    num_chars += text.chars().count();
                    let room = text.floor_char_boundary(text.len().min(sample_bytes - kept));
                    // The sample ends with the first text that does not fit, even if a shorter text
                    // after it would fit.
                    kept = if room < text.len() { sample_bytes } else { kept + room };
                    if let Some(last) = sample.last_mut() {
                        last.push_str(&text[..room]);
                    }
                }
                DocumentEvent::End if kept < sample_bytes => sample.push(String::new()),
                DocumentEvent::End => {}
            }
            Ok(())
        })?;
        for file in &empty {
            tracing::warn!("{} has no text; the other files of the data are read", file.display());
        }
        sample.retain(|document| !document.is_empty());
        Ok(TextScan { num_chars, num_documents, hash: hasher.finish(), sample })
    }

    /// Streams the characters in `range` to `sink`. A document that straddles an end of the range
    /// is divided. `scan` is the result of an earlier [`Documents::scan`].
    ///
    /// # Errors
    /// Returns the errors of [`Documents::visit`], and [`DataError::Modified`] if the text differs
    /// from the scanned text.
    pub(crate) fn visit_range(
        &self,
        scan: &TextScan,
        range: Range<usize>,
        sink: EventSink<'_>,
    ) -> Result<()> {
        let mut hasher = DocumentsHasher::default();
        let (mut at, mut has_text) = (0, false);
        self.visit(&mut |event| {
            hasher.add(event);
            let DocumentEvent::Text(text) = event else {
                return if take(&mut has_text) { sink(DocumentEvent::End) } else { Ok(()) };
            };
            let start = at;
            at += text.chars().count();
            let within = chars_within(text, start..at, &range);
            if within.is_empty() {
                return Ok(());
            }
            has_text = true;
            sink(DocumentEvent::Text(within))
        })?;
        let (what, reason) = (self.described(), "changed while it was read".to_owned());
        // All of the text was hashed again, so that a change outside of the range is noticed too.
        match hasher.finish() == scan.hash {
            true => Ok(()),
            false => Err(DataError::Modified { what, reason }),
        }
    }
}

/// Returns the characters of `text` that are in `range`. `place` is the range of `text` in the
/// stream.
fn chars_within<'t>(text: &'t str, place: Range<usize>, range: &Range<usize>) -> &'t str {
    if range.start >= place.end || range.end <= place.start {
        return "";
    }
    let byte = |char: usize| text.char_indices().nth(char).map_or(text.len(), |(at, _)| at);
    // Most texts are completely within the range, so their characters need not be counted again.
    let start = if range.start <= place.start { 0 } else { byte(range.start - place.start) };
    let end = if range.end >= place.end { text.len() } else { byte(range.end - place.start) };
    &text[start..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(documents: &[String], join: Join, range: Range<usize>) -> Vec<String> {
        let source = Documents::Memory { documents, join };
        let scan = source.scan(0).unwrap();
        let mut found = vec![String::new()];
        let mut sink = |event: DocumentEvent<'_>| {
            match event {
                DocumentEvent::Text(text) => found.last_mut().unwrap().push_str(text),
                DocumentEvent::End => found.push(String::new()),
            }
            Ok(())
        };
        source.visit_range(&scan, range, &mut sink).unwrap();
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
        let scan = source(&old).scan(0).unwrap();
        let error = source(&new).visit_range(&scan, 0..9, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, DataError::Modified { .. }), "{error}");
    }

    #[test]
    fn a_sample_is_the_beginning() {
        let documents = ["caf\u{e9}", "two", "three"].map(str::to_owned);
        let source = Documents::Memory { documents: &documents, join: Join::EndOfText };
        let sample = |bytes| source.scan(bytes).unwrap().sample;
        assert_eq!(sample(4), ["caf"]);
        assert_eq!(sample(6), ["caf\u{e9}", "t"]);
        assert_eq!(sample(99), documents);
        let scan = source.scan(0).unwrap();
        assert_eq!((scan.num_chars, scan.num_documents), (12, 3));
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
