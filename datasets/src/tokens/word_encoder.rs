//! Encodes text word by word, with the results of the library.
//!
//! The library spends most of its time on copies of the text with the origin of each byte, and on
//! words that it encoded before. [`WordEncoder`] splits the text without copies, and calls the
//! library only for words that are not in its cache. It has the tokenizers whose definition
//! [`WordPipeline`] recognizes. A text for which a word may depend on its surroundings is not
//! encoded here.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;

use regex_automata::meta::Cache;
use serde_json::Value;
use tokenizers::{Encoding, Model, ModelWrapper, Token};
use unicode_normalization::is_nfc;

use crate::tokens::added_tokens::{AddedTokens, TextSection};
use crate::tokens::alphabet::ModelWord;
use crate::tokens::splitter::{Splitter, Stop, WordSink};
use crate::tokens::word_cache::WordCache;
use crate::tokens::word_pipeline::WordPipeline;

/// Bytes of the word caches of all threads.
const CACHE_BYTES: usize = 64 << 20;
/// Minimum and maximum bytes of the word cache of a thread.
const THREAD_CACHE_BYTES: [usize; 2] = [1 << 20, 8 << 20];

/// Token ids and, if asked for, the bytes of the text that they stand for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct EncodedText {
    /// The ids.
    pub(crate) ids: Vec<u32>,
    /// The range of each id.
    pub(crate) ranges: Option<Vec<Range<usize>>>,
}

/// An encoder with a cache of words. It can be shared by threads.
pub(crate) struct WordEncoder {
    /// The tokens that the text may spell out.
    added: AddedTokens,
    /// The steps from the text between them to tokens.
    pipeline: WordPipeline,
    /// The ids before and after a text, without and with surrounding tokens.
    surroundings: [[Vec<u32>; 2]; 2],
    /// The memory of calls that ended. A call takes one of them, or creates another, so there are
    /// as many as concurrent calls.
    idle: Mutex<Vec<EncoderMemory>>,
}

/// What a call remembers for the next one.
struct EncoderMemory {
    /// The tokens of words.
    words: WordCache,
    /// The memory of each splitter.
    searches: Vec<Option<Cache>>,
}

/// Where a section is in the text.
struct SectionOffset {
    /// Its first byte.
    start: usize,
    /// Bytes of its first character, if a space was put before it.
    prefixed: Option<usize>,
}

impl WordEncoder {
    /// Returns the encoder of a tokenizer without truncation and padding, for which `declared`
    /// added tokens were declared. `None` if its text cannot be encoded word by word.
    pub(crate) fn new(library: &tokenizers::Tokenizer, declared: Option<usize>) -> Option<Self> {
        let pipeline = WordPipeline::new(library)?;
        let added = AddedTokens::new(library, declared)?;
        // These tokens are searched in the normalized text.
        let is_unchanged = |it: &str| {
            pipeline.alphabet.replacement().is_none() && (!pipeline.is_nfc || is_nfc(it))
        };
        if !added.normalized().all(is_unchanged) {
            return None;
        }
        let surroundings = [surroundings(library, false)?, surroundings(library, true)?];
        Some(Self { added, pipeline, surroundings, idle: Mutex::default() })
    }

    /// Encodes a text. Returns `None` if the library has to encode it.
    ///
    /// # Errors
    /// Returns the library's error for a word.
    pub(crate) fn encode(
        &self,
        model: &ModelWrapper,
        text: &str,
        is_surrounded: bool,
        has_ranges: bool,
    ) -> tokenizers::Result<Option<EncodedText>> {
        let is_changed = self.pipeline.alphabet.replacement().is_some_and(|it| text.contains(it))
            || (self.pipeline.is_nfc && !is_nfc(text));
        if is_changed {
            return Ok(None);
        }
        let mut encoded = EncodedText { ids: Vec::new(), ranges: has_ranges.then(Vec::new) };
        let [before, after] = &self.surroundings[usize::from(is_surrounded)];
        encoded.push(before, before.iter().map(|_| 0..0));
        // The lock is released at the end of this statement, not after the text was encoded.
        let idle = self.idle().pop();
        let mut memory = idle.unwrap_or_else(|| EncoderMemory::new(&self.pipeline.splitters));
        let outcome = self.add_text(model, text, &mut memory, &mut encoded);
        // Also after an error, which leaves the memory valid.
        self.idle().push(memory);
        match outcome {
            Ok(()) => {
                encoded.push(after, after.iter().map(|_| 0..0));
                Ok(Some(encoded))
            }
            Err(Stop::Unsupported) => Ok(None),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    /// Returns the idle memory. No call panics while it is locked.
    fn idle(&self) -> MutexGuard<'_, Vec<EncoderMemory>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the tokens of a text.
    fn add_text(
        &self,
        model: &ModelWrapper,
        text: &str,
        memory: &mut EncoderMemory,
        encoded: &mut EncodedText,
    ) -> Result<(), Stop> {
        let EncoderMemory { words, searches } = memory;
        let (mut prefixed, mut mapped) = (String::new(), ModelWord::default());
        for TextSection { range, token } in self.added.sections(text) {
            if let Some(token) = token {
                encoded.push(&[token], [range].into_iter());
                continue;
            }
            let mut offset = SectionOffset { start: range.start, prefixed: None };
            let mut content = &text[range];
            if self.pipeline.prefix.applies(content, offset.start) {
                offset.prefixed = content.chars().next().map(char::len_utf8);
                prefixed.clear();
                prefixed.extend([" ", content]);
                content = &prefixed;
            }
            let mut add_word = |word: Range<usize>| {
                let (at, word) = (word.start, &content[word]);
                let range = |start, end| offset.range(at + start..at + end);
                if let Some((ids, ranges)) = words.get(word) {
                    let ranges = ranges.iter().map(|it| it.map(usize::from));
                    encoded.push(ids, ranges.map(|[start, end]| range(start, end)));
                    return Ok(());
                }
                self.pipeline.alphabet.map(word, &mut mapped);
                let tokens = model.tokenize(&mapped.text).map_err(Stop::Failed)?;
                let ids: Vec<u32> = tokens.iter().map(|it| it.id).collect();
                let ranges = tokens.iter().map(|it| mapped.range(it.offsets));
                words.insert(word, &ids, ranges.clone());
                encoded.push(&ids, ranges.map(|(start, end)| range(start, end)));
                Ok(())
            };
            split(&self.pipeline.splitters, searches, content, 0, &mut add_word)?;
        }
        Ok(())
    }
}

impl fmt::Debug for WordEncoder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("WordEncoder").finish_non_exhaustive()
    }
}

impl EncodedText {
    /// Adds tokens.
    fn push(&mut self, ids: &[u32], ranges: impl Iterator<Item = Range<usize>>) {
        self.ids.extend_from_slice(ids);
        if let Some(all) = &mut self.ranges {
            all.extend(ranges);
        }
    }
}

impl EncoderMemory {
    /// Creates the memory of a call.
    fn new(splitters: &[Splitter]) -> Self {
        let [min, max] = THREAD_CACHE_BYTES;
        let threads = available_parallelism().map_or(1, usize::from);
        let bytes = (CACHE_BYTES / threads).clamp(min, max);
        let searches = splitters.iter().map(Splitter::cache).collect();
        Self { words: WordCache::new(bytes), searches }
    }
}

impl SectionOffset {
    /// Returns the bytes of the text for bytes of the section. The library gives a space that it
    /// put before the section the range of the first character.
    fn range(&self, range: Range<usize>) -> Range<usize> {
        let Range { mut start, mut end } = range;
        if let Some(first) = self.prefixed {
            start = start.saturating_sub(1);
            end = if end <= 1 { first } else { end - 1 };
        }
        self.start + start..self.start + end
    }
}

/// Splits `text`, which starts at byte `offset` of its section, with one splitter after another,
/// and calls `sink` with the words.
fn split(
    splitters: &[Splitter],
    searches: &mut [Option<Cache>],
    text: &str,
    offset: usize,
    sink: WordSink<'_>,
) -> Result<(), Stop> {
    match (splitters, searches) {
        ([splitter, rest @ ..], [search, others @ ..]) => {
            splitter.split(text, search, &mut |word| {
                let start = offset + word.start;
                split(rest, others, &text[word], start, sink)
            })
        }
        _ => sink(offset..offset + text.len()),
    }
}

/// Returns the ids before and after a text. `None` if the post-processor may do more than add
/// these.
fn surroundings(library: &tokenizers::Tokenizer, is_surrounded: bool) -> Option<[Vec<u32>; 2]> {
    // An id of a post-processor that equals it gives more than two parts.
    const MARK: u32 = u32::MAX;
    let processor = serde_json::to_value(library.get_post_processor()).ok()?;
    if !only_adds(&processor) {
        return None;
    }
    let marked = Encoding::from_tokens(vec![Token::new(MARK, String::new(), (0, 1))], 0);
    let processed = library.post_process(marked, None, is_surrounded).ok()?;
    let mut parts = processed.get_ids().split(|id| *id == MARK).map(<[u32]>::to_vec);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(before), Some(after), None) => Some([before, after]),
        _ => None,
    }
}

/// Returns whether a post-processor does not change tokens and ranges.
fn only_adds(processor: &Value) -> bool {
    match processor["type"].as_str() {
        None => processor.is_null(),
        Some("ByteLevel") => processor["trim_offsets"] == false,
        Some("Sequence") => {
            processor["processors"].as_array().is_some_and(|steps| steps.iter().all(only_adds))
        }
        Some(name) => name == "TemplateProcessing",
    }
}

#[cfg(test)]
mod tests;
