//! Samples on disk or in memory, with their index in memory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::formats::folder::described;
use crate::samples::index::{FOOTER_BYTES, SampleIndex};
use crate::tokens::encoder::TokenSink;
use crate::tokens::token_file::ByteSink;
use crate::{DataError, FileRow, Result, Sample, TokenCache, TokenFile, TokenStream, TokenWidth};

/// A function that passes the tokens of samples to a sink, and returns their index. It produces the
/// same samples on each call.
pub(crate) type SampleProducer<'a> = &'a dyn Fn(TokenSink<'_>) -> Result<SampleIndex>;

/// The samples of a list of files.
#[derive(Debug)]
pub(crate) struct StoredSamples {
    /// The tokens of all samples.
    tokens: TokenStream,
    /// The lengths, trained spans and rows of the samples.
    pub(crate) index: SampleIndex,
    /// The files.
    files: Vec<Arc<Path>>,
}

impl StoredSamples {
    /// Returns the entry `key` of the cache. If it does not exist, the samples of `produce` are
    /// stored as the entry. If they cannot be stored, they are kept in memory.
    ///
    /// # Errors
    /// Returns the errors of `produce`.
    pub(crate) fn cached(
        cache: &TokenCache,
        key: &str,
        width: TokenWidth,
        files: &[PathBuf],
        produce: SampleProducer<'_>,
    ) -> Result<Self> {
        let extension = extension(width);
        if let Some(found) = cache.find(key, extension)
            && let Some(stored) = Self::load(&found, width, files)
        {
            return Ok(stored);
        }
        let source = format!("samples of {}", described(files));
        let mut index = None;
        let stored = cache.store(key, extension, &source, &mut |sink| {
            let produced = produce(&mut width.encoder(sink))?;
            // The index is complete only after the last token, so it follows the tokens.
            index = Some(produced);
            write_index(index.as_ref(), sink)
        })?;
        match (stored, index) {
            (Ok(Some(path)), Some(index)) => {
                // Another process may already have removed the file again.
                if let Ok(file) = TokenFile::open_beginning(&path, width, index.num_tokens()) {
                    return Ok(Self::new(TokenStream::File(file), index, files));
                }
            }
            (Err(error), _) => {
                let folder = cache.folder().display();
                tracing::warn!(%folder, %error, "samples are not cached for the next run");
            }
            (Ok(_), _) => {}
        }
        Self::in_memory(files, produce)
    }

    /// Keeps the samples of `produce` in memory.
    ///
    /// # Errors
    /// Returns the errors of `produce`.
    pub(crate) fn in_memory(files: &[PathBuf], produce: SampleProducer<'_>) -> Result<Self> {
        let mut all = Vec::new();
        let index = produce(&mut |tokens| {
            all.extend_from_slice(tokens);
            Ok(())
        })?;
        Ok(Self::new(TokenStream::Owned(all), index, files))
    }

    /// Opens an entry of the cache, whose hash was checked; `None` if it cannot be read.
    fn load(path: &Path, width: TokenWidth, files: &[PathBuf]) -> Option<Self> {
        let mut file = File::open(path).ok()?;
        let end = file.seek(SeekFrom::End(0)).ok()?;
        let mut footer = [0; FOOTER_BYTES];
        file.seek(SeekFrom::Start(end.checked_sub(FOOTER_BYTES as u64)?)).ok()?;
        file.read_exact(&mut footer).ok()?;
        let bytes = SampleIndex::bytes(&footer)?.checked_add(FOOTER_BYTES as u64)?;
        let start = end.checked_sub(bytes)?;
        file.seek(SeekFrom::Start(start)).ok()?;
        let mut index = Vec::with_capacity(bytes as usize);
        file.read_to_end(&mut index).ok()?;
        let index = SampleIndex::decode(&index)?;
        // Tokens, index and footer have to be the whole file.
        let is_whole = index.num_tokens() as u64 * width.bytes() as u64 == start;
        if !is_whole || index.summary.files.len() != files.len() {
            return None;
        }
        let tokens = TokenFile::open_beginning(path, width, index.num_tokens()).ok()?;
        Some(Self::new(TokenStream::File(tokens), index, files))
    }

    fn new(tokens: TokenStream, index: SampleIndex, files: &[PathBuf]) -> Self {
        Self { tokens, index, files: files.iter().map(|file| Arc::from(file.as_path())).collect() }
    }

    /// Returns the ids in `tokens` of sample `index`.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`].
    pub(crate) fn ids(&self, index: usize, tokens: std::ops::Range<usize>) -> Result<Vec<u32>> {
        let start = self.index.tokens(index).start;
        self.tokens.tokens(start + tokens.start..start + tokens.end)
    }

    /// Returns sample `index`.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`].
    pub(crate) fn sample(&self, index: usize) -> Result<Sample> {
        let length = self.index.length(index);
        let ids = self.ids(index, 0..length)?;
        let mut trained = vec![false; length];
        for span in self.index.spans_within(index, 0..length) {
            trained[span].fill(true);
        }
        Ok(Sample { ids, trained })
    }

    /// Returns the row of sample `index`.
    pub(crate) fn place(&self, index: usize) -> FileRow {
        let (file, number) = self.index.row(index);
        self.place_in(file, number)
    }

    /// Returns the places of the first invalid rows, and why they are invalid.
    pub(crate) fn invalid_rows(&self) -> impl Iterator<Item = (FileRow, &str)> {
        let rows = self.index.summary.invalid.iter();
        rows.map(|row| (self.place_in(row.file, row.number), row.reason.as_str()))
    }

    /// Returns the notes of all files: the kind, the number of rows, the first row, and its note.
    pub(crate) fn notes(&self) -> impl Iterator<Item = (&str, usize, FileRow, &str)> {
        let notes = self.index.summary.notes.iter();
        notes.map(|(kind, rows)| {
            (kind.as_str(), rows.count, self.place_in(rows.file, rows.number), rows.text.as_str())
        })
    }

    fn place_in(&self, file: usize, number: usize) -> FileRow {
        let has_lines = self.index.summary.files[file].has_lines;
        let unit = if has_lines { "line" } else { "row" };
        FileRow { file: self.files[file].clone(), unit, number }
    }
}

/// Writes the index behind the tokens.
fn write_index(index: Option<&SampleIndex>, sink: ByteSink<'_>) -> Result<()> {
    let bytes = index.map(SampleIndex::encode).transpose();
    // The index consists of numbers and strings, which JSON has.
    let bytes = bytes.map_err(|error| DataError::LoaderThread {
        reason: format!("cannot write the index of samples: {error}; this is a bug: report it"),
    })?;
    sink(&bytes.unwrap_or_default())
}

/// Returns the file name extension of samples with tokens of `width`.
fn extension(width: TokenWidth) -> &'static str {
    match width {
        TokenWidth::U16 => ".samples.bin",
        TokenWidth::U32 => ".u32.samples.bin",
    }
}
