//! Tokens of a text that is never in memory as a whole.
//!
//! Documents are cut into chunks where a tokenizer would cut them anyway ([`crate::chunks`]). Some
//! megabytes of chunks are tokenized at a time, on all threads, and handed on in order.

use std::ops::Range;

use rayon::prelude::*;

use crate::tokens::chunks::{CHUNK_BYTES, safe_cut};
use crate::tokens::documents::{Documents, Piece, Survey};
use crate::{DataError, Tokenizer};

/// Bytes of text that are tokenized at a time. Tokens take many times the memory of their text
/// while they are made.
const BATCH_BYTES: usize = 2 << 20;

/// What becomes of tokens, in order.
pub(crate) type TakeTokens<'a> = &'a mut dyn FnMut(&[u32]) -> Result<(), DataError>;

/// Gives the tokens of the characters in `range` of `documents` to `take`.
///
/// # Errors
/// Those of [`Documents::visit_range`], [`Tokenizer::encode`] and `take`.
pub(crate) fn encode_range(
    tokenizer: &Tokenizer,
    documents: Documents<'_>,
    survey: &Survey,
    range: Range<usize>,
    take: TakeTokens<'_>,
) -> Result<(), DataError> {
    let separator = documents.join().separator(tokenizer);
    let mut encoder = StreamingEncoder {
        tokenizer,
        separator,
        take,
        pending: String::new(),
        scanned: 0,
        batch: Vec::new(),
        bytes: 0,
        documents: 0,
        begins: true,
    };
    documents.visit_range(survey, range, &mut |piece| match piece {
        Piece::Text(text) => encoder.push(text),
        Piece::End => encoder.end(),
    })?;
    encoder.flush()
}

/// A chunk of text, or the token between two documents.
enum Chunk {
    Text(String),
    Separator(u32),
}

/// Collects text into chunks, and tokenizes them some megabytes at a time.
struct StreamingEncoder<'a> {
    tokenizer: &'a Tokenizer,
    separator: Option<u32>,
    take: TakeTokens<'a>,
    /// Text of the document that is in no chunk yet.
    pending: String,
    /// Length of the prefix of `pending` that was searched and contains no safe cut.
    scanned: usize,
    batch: Vec<Chunk>,
    bytes: usize,
    documents: usize,
    begins: bool,
}

impl StreamingEncoder<'_> {
    fn push(&mut self, text: &str) -> Result<(), DataError> {
        if std::mem::take(&mut self.begins) {
            self.documents += 1;
            if let (Some(id), 2..) = (self.separator, self.documents) {
                self.batch.push(Chunk::Separator(id));
            }
        }
        self.pending.push_str(text);
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
        self.scanned = self.pending.len();
        Ok(())
    }

    fn end(&mut self) -> Result<(), DataError> {
        self.begins = true;
        self.scanned = 0;
        match std::mem::take(&mut self.pending) {
            rest if rest.is_empty() => Ok(()),
            rest => self.add(rest),
        }
    }

    fn add(&mut self, chunk: String) -> Result<(), DataError> {
        self.bytes += chunk.len();
        self.batch.push(Chunk::Text(chunk));
        if self.bytes < BATCH_BYTES { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> Result<(), DataError> {
        let batch = std::mem::take(&mut self.batch);
        self.bytes = 0;
        let encode = |chunk: &Chunk| match chunk {
            Chunk::Text(text) => self.tokenizer.encode(text),
            Chunk::Separator(id) => Ok(vec![*id]),
        };
        let encoded: Vec<_> = batch.par_iter().map(encode).collect::<Result<_, _>>()?;
        encoded.iter().try_for_each(|tokens| (self.take)(tokens))
    }
}
