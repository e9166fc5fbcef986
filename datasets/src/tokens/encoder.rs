//! Tokenizes a text without loading all of it into memory.
//!
//! Documents are cut into chunks at positions where the tokenizer splits them as well
//! ([`super::chunks`]). A few megabytes of chunks are tokenized at a time, on all threads, and
//! passed on in order.

use std::mem::take;
use std::ops::Range;

use rayon::prelude::*;

use crate::formats::text::DocumentEvent;
use crate::tokens::chunks::{CHUNK_BYTES, safe_cut};
use crate::tokens::documents::{Documents, TextScan};
use crate::{Result, Tokenizer};

/// Bytes of text that are tokenized at a time. Tokenization needs many times the memory of the
/// text.
const BATCH_BYTES: usize = 2 << 20;

/// A callback for consecutive tokens.
pub(crate) type TokenSink<'a> = &'a mut dyn FnMut(&[u32]) -> Result<()>;

/// Collects all tokens that `produce` passes to its sink.
///
/// # Errors
/// Returns the errors of `produce`.
pub(crate) fn collect_tokens(
    produce: impl FnOnce(TokenSink<'_>) -> Result<()>,
) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    produce(&mut |more| {
        tokens.extend_from_slice(more);
        Ok(())
    })?;
    Ok(tokens)
}

/// Streams the tokens of the characters in `range` of `documents` to `sink`.
///
/// # Errors
/// Returns the errors of [`Documents::visit_range`], [`Tokenizer::encode`] and `sink`.
pub(crate) fn encode_range(
    tokenizer: &Tokenizer,
    documents: Documents<'_>,
    scan: &TextScan,
    range: Range<usize>,
    sink: TokenSink<'_>,
) -> Result<()> {
    let mut encoder = StreamingEncoder {
        tokenizer,
        sink,
        pending: String::new(),
        scanned: 0,
        batch: Vec::new(),
        bytes: 0,
        separator: None,
    };
    let separator = documents.join().separator(tokenizer);
    documents.visit_range(scan, range, &mut |event| match event {
        DocumentEvent::Text(text) => encoder.push(text),
        DocumentEvent::End => encoder.end(separator),
    })?;
    encoder.flush()
}

/// A chunk of text, or the token between two documents.
enum Chunk {
    Text(String),
    Separator(u32),
}

/// Collects text into chunks, and tokenizes a few megabytes of them at a time.
struct StreamingEncoder<'a> {
    /// The tokenizer.
    tokenizer: &'a Tokenizer,
    /// Receives the tokens.
    sink: TokenSink<'a>,
    /// Text of the document that is not in a chunk yet.
    pending: String,
    /// Length of the prefix of `pending` that was searched and contains no safe cut.
    scanned: usize,
    /// Chunks to tokenize.
    batch: Vec<Chunk>,
    /// Bytes of text in `batch`.
    bytes: usize,
    /// The token that precedes the next text, after the end of a document.
    separator: Option<u32>,
}

impl StreamingEncoder<'_> {
    /// Adds text of the current document.
    fn push(&mut self, text: &str) -> Result<()> {
        // The separator is added with the next document, so that no separator follows the last
        // document.
        self.batch.extend(self.separator.take().map(Chunk::Separator));
        self.pending.push_str(text);
        // The document is encoded as a whole when it ends.
        if !self.tokenizer.cuts_at_spaces() {
            return Ok(());
        }
        let mut start = 0;
        while let Some(at) = safe_cut(&self.pending[start..], self.scanned.max(CHUNK_BYTES)) {
            let chunk = self.pending[start..start + at].to_owned();
            (start, self.scanned) = (start + at, 0);
            self.add(chunk)?;
        }
        self.pending.drain(..start);
        // The next search looks at the character before this place, so it misses no cut.
        self.scanned = self.pending.len();
        Ok(())
    }

    /// Ends the current document, whose last chunk may be short.
    fn end(&mut self, separator: Option<u32>) -> Result<()> {
        (self.separator, self.scanned) = (separator, 0);
        match take(&mut self.pending) {
            rest if rest.is_empty() => Ok(()),
            rest => self.add(rest),
        }
    }

    /// Adds a chunk, and tokenizes the batch when it is full.
    fn add(&mut self, chunk: String) -> Result<()> {
        self.bytes += chunk.len();
        self.batch.push(Chunk::Text(chunk));
        if self.bytes < BATCH_BYTES { Ok(()) } else { self.flush() }
    }

    /// Tokenizes the batch and passes its tokens on in order.
    fn flush(&mut self) -> Result<()> {
        self.bytes = 0;
        let encode = |chunk: &Chunk| match chunk {
            Chunk::Text(text) => self.tokenizer.encode(text),
            Chunk::Separator(id) => Ok(vec![*id]),
        };
        let encoded: Vec<_> =
            take(&mut self.batch).par_iter().map(encode).collect::<Result<_, _>>()?;
        encoded.iter().try_for_each(|tokens| (self.sink)(tokens))
    }
}
