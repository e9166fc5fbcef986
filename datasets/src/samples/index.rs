//! The index of many samples: where the tokens of each are, which of them are trained, and the row
//! it comes from.
//!
//! Main type: [`SampleIndex`]. It is in memory; the tokens are not. On disk it follows the tokens:
//!
//! ```text
//! tokens, little-endian u16 or u32
//! index: token ends, row numbers, span ends, spans (all little-endian u64), summary (JSON)
//! lengths of tokens, the four arrays and the summary (u64), magic
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::RowNote;
use crate::samples::sample::Span;

/// The last bytes of a file of samples.
const MAGIC: [u8; 8] = *b"dbsample";

/// Bytes after the index: six lengths and the magic.
pub(crate) const FOOTER_BYTES: usize = 7 * 8;

/// Number of invalid rows whose reasons are kept.
const MAX_REASONS: usize = 20;

/// Lengths, trained spans and rows of samples.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SampleIndex {
    /// The end of each sample in the tokens.
    ends: Vec<u64>,
    /// The number of the line or row of each sample in its file.
    numbers: Vec<u64>,
    /// The end of each sample in `spans`.
    span_ends: Vec<u64>,
    /// The trained spans of all samples, relative to their first token.
    spans: Vec<Span>,
    /// Everything else.
    pub(crate) summary: IndexSummary,
}

/// Where the samples come from.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IndexSummary {
    /// The files, in order.
    pub(crate) files: Vec<FileSummary>,
    /// The number of invalid rows.
    pub(crate) num_invalid: usize,
    /// The first invalid rows.
    pub(crate) invalid: Vec<InvalidRow>,
    /// What the encoder noticed, by kind.
    pub(crate) notes: BTreeMap<String, NotedRows>,
}

/// Rows with notes of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NotedRows {
    /// The number of rows.
    pub(crate) count: usize,
    /// The index of the file of the first row.
    pub(crate) file: usize,
    /// The number of its line or row.
    pub(crate) number: usize,
    /// Its note.
    pub(crate) text: String,
}

/// The samples of a file.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileSummary {
    /// Whether rows are identified by their line.
    pub(crate) has_lines: bool,
    /// The end of the file's samples.
    pub(crate) end: usize,
}

/// A row that is not a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InvalidRow {
    /// The index of its file.
    pub(crate) file: usize,
    /// The number of the line or row.
    pub(crate) number: usize,
    /// Why it is not valid.
    pub(crate) reason: String,
}

impl SampleIndex {
    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the number of tokens.
    pub(crate) fn num_tokens(&self) -> usize {
        self.ends.last().map_or(0, |end| *end as usize)
    }

    /// Returns the tokens of sample `index`.
    pub(crate) fn tokens(&self, index: usize) -> Range<usize> {
        between(&self.ends, index)
    }

    /// Returns the number of tokens of sample `index`.
    pub(crate) fn length(&self, index: usize) -> usize {
        self.tokens(index).len()
    }

    /// Returns the trained spans of sample `index`.
    pub(crate) fn spans(&self, index: usize) -> &[Span] {
        &self.spans[between(&self.span_ends, index)]
    }

    /// Returns the trained spans of sample `index` within `tokens` of it.
    pub(crate) fn spans_within(
        &self,
        index: usize,
        tokens: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> {
        let clipped = self.spans(index).iter().map(move |span| {
            (span.start as usize).max(tokens.start)..(span.end as usize).min(tokens.end)
        });
        clipped.filter(|span| !span.is_empty())
    }

    /// Returns the file and the number of the row of sample `index`.
    pub(crate) fn row(&self, index: usize) -> (usize, usize) {
        let file = self.summary.files.partition_point(|file| file.end <= index);
        (file, self.numbers[index] as usize)
    }

    /// Begins file number `file`, or continues it.
    pub(crate) fn start_file(&mut self, file: usize, has_lines: bool) {
        let end = self.len();
        let files = &mut self.summary.files;
        // Files without rows in between end where they begin.
        files.resize(files.len().max(file + 1), FileSummary { has_lines, end });
        files[file].has_lines = has_lines;
    }

    /// Adds a sample of the current file.
    pub(crate) fn push(&mut self, number: usize, length: usize, spans: Vec<Span>) {
        self.ends.push((self.num_tokens() + length) as u64);
        self.numbers.push(number as u64);
        self.spans.extend(spans);
        self.span_ends.push(self.spans.len() as u64);
        let end = self.len();
        if let Some(file) = self.summary.files.last_mut() {
            file.end = end;
        }
    }

    /// Counts a note about a row of the current file.
    pub(crate) fn note(&mut self, number: usize, note: RowNote) {
        let RowNote { kind, text } = note;
        let file = self.summary.files.len().saturating_sub(1);
        let first = NotedRows { count: 0, file, number, text };
        self.summary.notes.entry(kind.to_owned()).or_insert(first).count += 1;
    }

    /// Counts an invalid row of the current file.
    pub(crate) fn push_invalid(&mut self, number: usize, reason: String) {
        self.summary.num_invalid += 1;
        if self.summary.invalid.len() < MAX_REASONS {
            let file = self.summary.files.len().saturating_sub(1);
            self.summary.invalid.push(InvalidRow { file, number, reason });
        }
    }

    /// Returns the index and the footer as bytes.
    pub(crate) fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let summary = serde_json::to_vec(&self.summary)?;
        let spans = self.spans.iter().flat_map(|span| [span.start.into(), span.end.into()]);
        let arrays = self.ends.iter().chain(&self.numbers).chain(&self.span_ends).copied();
        let mut bytes: Vec<u8> = arrays.chain(spans).flat_map(u64::to_le_bytes).collect();
        bytes.extend_from_slice(&summary);
        let lengths = [
            self.num_tokens(),
            self.ends.len(),
            self.numbers.len(),
            self.span_ends.len(),
            self.spans.len(),
            summary.len(),
        ];
        bytes.extend(lengths.into_iter().flat_map(|length| (length as u64).to_le_bytes()));
        bytes.extend_from_slice(&MAGIC);
        Ok(bytes)
    }

    /// Returns the bytes of the index without its footer; `None` if the footer is not valid.
    pub(crate) fn bytes(footer: &[u8]) -> Option<u64> {
        let [_, arrays @ .., spans, summary] = lengths(footer)?;
        let numbers = arrays.into_iter().try_fold(0, u64::checked_add)?;
        let numbers = numbers.checked_add(spans.checked_mul(2)?)?;
        numbers.checked_mul(8)?.checked_add(summary)
    }

    /// Reads the index from its bytes, followed by the footer; `None` if they contradict each
    /// other.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (index, footer) = bytes.split_at_checked(bytes.len().checked_sub(FOOTER_BYTES)?)?;
        if Self::bytes(footer)? != index.len() as u64 {
            return None;
        }
        let [tokens, ends, numbers, span_ends, spans, summary] = lengths(footer)?;
        // The lengths add up to the bytes of the index, so neither this nor the product below
        // overflows.
        let (numbers_bytes, summary) = index.split_at_checked(index.len() - summary as usize)?;
        let mut all = numbers_bytes.chunks_exact(8).filter_map(u64_of);
        let mut take = |count: u64| -> Vec<u64> { all.by_ref().take(count as usize).collect() };
        let (ends, numbers, span_ends) = (take(ends), take(numbers), take(span_ends));
        let spans = take(spans * 2);
        let span = |pair: &[u64]| Some(u32::try_from(pair[0]).ok()?..u32::try_from(pair[1]).ok()?);
        let spans = spans.chunks_exact(2).map(span).collect::<Option<Vec<_>>>()?;
        let summary = serde_json::from_slice(summary).ok()?;
        let found = Self { ends, numbers, span_ends, spans, summary };
        (found.is_sound() && found.num_tokens() as u64 == tokens).then_some(found)
    }

    /// Returns whether the parts of the index agree.
    fn is_sound(&self) -> bool {
        // Everything that later indexing relies on, because a damaged cache must not cause a panic.
        let count = self.len();
        let files = &self.summary.files;
        self.numbers.len() == count
            && self.span_ends.len() == count
            && self.ends.is_sorted()
            && self.span_ends.is_sorted()
            && self.span_ends.last().map_or(0, |end| *end as usize) == self.spans.len()
            && files.is_sorted_by_key(|file| file.end)
            && files.last().map_or(0, |file| file.end) == count
            && self.summary.invalid.iter().all(|row| row.file < files.len())
            && self.summary.notes.values().all(|rows| rows.file < files.len())
            && (0..count).all(|index| {
                let length = self.length(index) as u64;
                let spans = self.spans(index);
                spans.is_sorted_by(|a, b| a.end <= b.start)
                    && spans.iter().all(|it| it.start < it.end && u64::from(it.end) <= length)
            })
    }
}

/// Returns the range of element `index` in an array with these ends.
fn between(ends: &[u64], index: usize) -> Range<usize> {
    let start = if index == 0 { 0 } else { ends[index - 1] as usize };
    start..ends[index] as usize
}

/// Returns the lengths in a footer.
fn lengths(footer: &[u8]) -> Option<[u64; 6]> {
    let (lengths, magic) = footer.split_at_checked(FOOTER_BYTES - MAGIC.len())?;
    if magic != MAGIC {
        return None;
    }
    lengths.chunks_exact(8).filter_map(u64_of).collect::<Vec<_>>().try_into().ok()
}

/// Decodes the eight bytes of a number.
fn u64_of(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn index() -> SampleIndex {
        let mut index = SampleIndex::default();
        index.start_file(0, true);
        index.push(1, 4, vec![1..2, 3..4]);
        index.push_invalid(2, "a reason".into());
        for number in [1, 3] {
            index.note(number, RowNote { kind: "kind", text: format!("note of {number}") });
        }
        index.push(3, 0, vec![]);
        index.start_file(2, false);
        index.push(7, 3, vec![0..1, 2..3]);
        index
    }

    #[test]
    fn rows_know_their_file() {
        let index = index();
        assert_eq!([0, 1, 2].map(|sample| index.row(sample)), [(0, 1), (0, 3), (2, 7)]);
        assert_eq!((index.length(0), index.tokens(2)), (4, 4..7));
        assert_eq!(index.spans_within(0, 1..4).collect::<Vec<_>>(), [1..2, 3..4]);
        assert_eq!(index.spans_within(2, 0..2).next(), Some(0..1));
        assert_eq!(index.spans_within(0, 2..3).count(), 0);
        assert_eq!(index.summary.invalid[0].reason, "a reason");
        let notes = &index.summary.notes["kind"];
        assert_eq!((notes.count, notes.number, &*notes.text), (2, 1, "note of 1"));
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        for index in [index(), SampleIndex::default()] {
            let bytes = index.encode().unwrap();
            let footer = &bytes[bytes.len() - FOOTER_BYTES..];
            assert_eq!(SampleIndex::bytes(footer), Some((bytes.len() - FOOTER_BYTES) as u64));
            assert_eq!(SampleIndex::decode(&bytes), Some(index));
        }
    }

    proptest! {
        #[test]
        fn damaged_indices_never_panic(at in 0.0f64..1.0, byte: u8, cut in 0.0f64..2.0) {
            let mut bytes = index().encode().unwrap();
            let at = (bytes.len() as f64 * at) as usize;
            bytes[at] = byte;
            bytes.truncate((bytes.len() as f64 * cut) as usize);
            if let Some(found) = SampleIndex::decode(&bytes) {
                (0..found.len()).for_each(|sample| {
                    let _ = (found.spans(sample), found.row(sample));
                });
            }
            let _ = SampleIndex::bytes(&bytes);
        }
    }
}
