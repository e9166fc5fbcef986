//! Token files: little-endian u16 (`.bin`) or u32 (`.u32.bin`) without a header, or with a header
//! of llm.c ([`header_width`]), which determines the width.
//!
//! [`TokenFile`] reads the tokens of a batch when they are needed, so a corpus may be larger than
//! memory. The file is not memory-mapped: if a mapped file is truncated, the process ends with a
//! signal, while a read returns an error. A file that was modified after it was opened is an error
//! too, because its tokens were not checked. Further errors are a name without a token width, an
//! empty file, a size that is not a multiple of the width, and ids outside of the vocabulary.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::formats::folder::open_file;
use crate::tokens::token_header::{HEADER_BYTES, header_width};
use crate::{DataError, Result};

/// Ids are used as `i32`, in which negative numbers mark ignored labels.
pub(crate) const MAX_VOCAB_SIZE: usize = 1 << 31;

/// Number of tokens that are checked at a time.
const SCAN_TOKENS: usize = 1 << 18;

/// A callback for consecutive bytes.
pub(crate) type ByteSink<'a> = &'a mut dyn FnMut(&[u8]) -> Result<()>;

/// The width of a token in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes, in a file with the extension `.bin`.
    U16,
    /// Four bytes, in a file with the extension `.u32.bin`.
    U32,
}

impl TokenWidth {
    /// Returns the bytes of a token.
    pub fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Returns the token width that the name of a file implies.
    ///
    /// For files without a header, only the name determines how to read them:
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// use deepburn_datasets::TokenWidth;
    ///
    /// assert_eq!(TokenWidth::of(Path::new("train.bin"))?, TokenWidth::U16);
    /// assert_eq!(TokenWidth::of(Path::new("train.u32.bin"))?.bytes(), 4);
    /// assert!(TokenWidth::of(Path::new("train.npy")).is_err());
    /// # Ok::<(), deepburn_datasets::DataError>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`DataError::InvalidFile`] for any other name.
    pub fn of(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(".u32.bin") {
            Ok(Self::U32)
        } else if name.ends_with(".bin") {
            Ok(Self::U16)
        } else {
            let reason = "is not a token file; the name must end in `.bin` (little-endian u16) or `.u32.bin` (little-endian u32); rename it, or set data.kind to \"text\"";
            Err(DataError::invalid(path, reason))
        }
    }

    /// Returns the smallest width for ids below `vocab_size`.
    pub(crate) fn of_vocabulary(vocab_size: usize) -> Self {
        // Ids of a vocabulary of 65,536 entries still fit into two bytes.
        if vocab_size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Returns a sink of tokens, whose ids fit into this width. It passes their bytes to `sink`.
    pub(crate) fn encoder(self, sink: ByteSink<'_>) -> impl FnMut(&[u32]) -> Result<()> {
        let mut bytes = Vec::new();
        move |tokens| {
            bytes.clear();
            for token in tokens {
                // Little-endian, so the low bytes come first.
                bytes.extend_from_slice(&token.to_le_bytes()[..self.bytes()]);
            }
            sink(&bytes)
        }
    }

    /// Decodes the bytes of exactly one token.
    fn decode(self, bytes: &[u8]) -> u32 {
        match (self, bytes) {
            (Self::U16, &[a, b]) => u32::from(u16::from_le_bytes([a, b])),
            (Self::U32, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
            _ => unreachable!("chunks are exactly one token wide"),
        }
    }
}

/// A file of tokens, checked when it is opened.
#[derive(Debug)]
pub struct TokenFile {
    /// The open file.
    file: File,
    /// The bytes before the first token.
    start: u64,
    /// The number of tokens.
    len: usize,
    /// The width of a token.
    width: TokenWidth,
    /// The path of the file, for errors.
    path: PathBuf,
    /// The vocabulary size: all ids are below it.
    limit: usize,
    /// The modification time when the file was opened; `None` if the file system has none.
    modified: Option<SystemTime>,
}

impl TokenFile {
    /// Opens `path`, with or without a header, and checks all of it once: ids must be below
    /// `vocab_size`, or below 2^31 if the vocabulary is unknown.
    ///
    /// # Errors
    /// Returns an error if the name, the size, the header or an id breaks the rules of this module,
    /// or if the file cannot be read.
    pub fn open(path: &Path, vocab_size: Option<usize>) -> Result<Self> {
        let named = TokenWidth::of(path)?;
        let file = open_file(path)?;
        let bytes = file.metadata().map_err(DataError::unreadable(path))?.len();
        // A shorter file has no header.
        let mut start = vec![0; HEADER_BYTES.min(bytes as usize)];
        read_exact_at(&file, &mut start, 0).map_err(DataError::unreadable(path))?;
        match header_width(path, &start, bytes)? {
            Some(width) => Self::checked(path, file, width, HEADER_BYTES as u64, vocab_size),
            None => Self::checked(path, file, named, 0, vocab_size),
        }
    }

    /// Opens a file of the token cache, which has no header.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::open`].
    pub(crate) fn open_cached(path: &Path) -> Result<Self> {
        Self::checked(path, open_file(path)?, TokenWidth::of(path)?, 0, None)
    }

    /// Opens the first `len` tokens of a file of the sample cache, whose hash was checked.
    ///
    /// # Errors
    /// Returns [`DataError::Unreadable`] if the file cannot be read.
    pub(crate) fn open_beginning(path: &Path, width: TokenWidth, len: usize) -> Result<Self> {
        let file = open_file(path)?;
        let metadata = file.metadata().map_err(DataError::unreadable(path))?;
        let (path, limit, modified) = (path.to_owned(), MAX_VOCAB_SIZE, metadata.modified().ok());
        Ok(Self { file, start: 0, len, width, path, limit, modified })
    }

    /// Checks the tokens after the first `start` bytes of `file`.
    fn checked(
        path: &Path,
        file: File,
        width: TokenWidth,
        start: u64,
        vocab_size: Option<usize>,
    ) -> Result<Self> {
        let metadata = file.metadata().map_err(DataError::unreadable(path))?;
        let bytes = metadata.len().saturating_sub(start) as usize;
        if bytes == 0 {
            return Err(DataError::Empty { what: format!("token file `{}`", path.display()) });
        }
        if !bytes.is_multiple_of(width.bytes()) {
            let reason = format!(
                "has {bytes} bytes, which is not a multiple of the {} bytes of a token; it is truncated, or its name announces the wrong width (`.bin` is u16, `.u32.bin` is u32); copy or rename it again",
                width.bytes()
            );
            return Err(DataError::invalid(path, reason));
        }
        let limit = vocab_size.unwrap_or(MAX_VOCAB_SIZE).min(MAX_VOCAB_SIZE);
        let len = bytes / width.bytes();
        let modified = metadata.modified().ok();
        let file = Self { file, start, len, width, path: path.to_owned(), limit, modified };
        // Two-byte ids cannot exceed a larger vocabulary, so the file need not be read.
        if width == TokenWidth::U32 || limit <= usize::from(u16::MAX) {
            file.largest_id()?;
        }
        Ok(file)
    }

    /// Returns the number of tokens, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Reads the tokens at `range`.
    ///
    /// # Errors
    /// Returns [`DataError::Modified`] if the file was modified or truncated after it was opened,
    /// [`DataError::Unreadable`] if it cannot be read, and [`DataError::InvalidFile`] if an id is
    /// outside of the vocabulary.
    ///
    /// # Panics
    /// Panics if `range` ends beyond [`TokenFile::len`], like a slice.
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<u32>> {
        assert!(range.end <= self.len, "tokens {range:?} of {}", self.len);
        let width = self.width.bytes();
        let mut bytes = vec![0; range.len() * width];
        let offset = self.start + (range.start * width) as u64;
        read_exact_at(&self.file, &mut bytes, offset)
            .map_err(|cause| self.read_error(cause, offset, bytes.len()))?;
        // The modification time is checked after the read, so that it also reveals a modification
        // shortly before the read.
        let metadata = self.file.metadata().map_err(DataError::unreadable(&self.path))?;
        if metadata.modified().ok() != self.modified {
            return Err(self.modified("was modified while it was in use".to_owned()));
        }
        let decode = |token: &[u8]| self.width.decode(token);
        let tokens: Vec<u32> = bytes.chunks_exact(width).map(decode).collect();
        match tokens.iter().position(|id| *id as usize >= self.limit) {
            None => Ok(tokens),
            Some(at) => Err(DataError::invalid(
                &self.path,
                format!(
                    "has id {} at token {}, but the vocabulary has {} entries, from id 0 (the fewer of tokenizer and model); tokenize with the model's tokenizer, or raise model.config.vocab_size if the model has fewer",
                    tokens[at],
                    range.start + at,
                    self.limit
                ),
            )),
        }
    }

    /// Returns the largest id in the file.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`].
    pub fn largest_id(&self) -> Result<u32> {
        let mut largest = 0;
        for start in (0..self.len).step_by(SCAN_TOKENS) {
            let tokens = self.tokens(start..self.len.min(start + SCAN_TOKENS))?;
            largest = tokens.into_iter().max().unwrap_or(0).max(largest);
        }
        Ok(largest)
    }

    /// Returns the error of a file that changed while it was in use.
    fn modified(&self, reason: String) -> DataError {
        DataError::Modified { what: format!("token file `{}`", self.path.display()), reason }
    }

    /// Returns the error of a failed read; an unexpected end means that the file was truncated.
    fn read_error(&self, cause: io::Error, offset: u64, length: usize) -> DataError {
        match (cause.kind(), self.file.metadata()) {
            (io::ErrorKind::UnexpectedEof, Ok(metadata)) => {
                let expected = self.start + (self.len * self.width.bytes()) as u64;
                let found = metadata.len();
                self.modified(format!(
                    "was truncated while it was in use: it has {found} bytes, and {expected} when it was opened; the {length} bytes at offset {offset} cannot be read"
                ))
            }
            _ => DataError::unreadable(&self.path)(cause),
        }
    }
}

/// Fills `bytes` from `offset` on. Several threads may read one file at the same time.
#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

/// Fills `bytes` from `offset` on. Several threads may read one file at the same time.
#[cfg(windows)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let at = offset + done as u64;
        match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[done..], at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => done += read,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn file(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        (dir, path)
    }

    #[test]
    fn both_widths_are_little_endian() {
        let (_dir, path) = file("a.bin", &[1, 0, 0, 1, 255, 255]);
        let tokens = TokenFile::open(&path, None).unwrap();
        assert_eq!(tokens.tokens(0..3).unwrap(), [1, 256, 65535]);
        assert_eq!(tokens.path, path);

        let (_dir, path) = file("a.u32.bin", &[1, 0, 0, 0, 0, 0, 1, 0]);
        let tokens = TokenFile::open(&path, None).unwrap();
        assert_eq!(tokens.len(), 2);
        assert_eq!(tokens.tokens(1..2).unwrap(), [65536]);
    }

    /// A file of llm.c: the header with `fields`, and the bytes of the tokens.
    fn with_header(fields: [u32; 3], tokens: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = fields.into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.resize(HEADER_BYTES, 0);
        [&bytes, tokens].concat()
    }

    #[test]
    fn headers_are_no_tokens() {
        let open = |contents: &[u8]| {
            let (_dir, path) = file("a.bin", contents);
            TokenFile::open(&path, None)
        };
        let narrow = open(&with_header([20_240_520, 1, 3], &[1, 0, 0, 1, 255, 255])).unwrap();
        assert_eq!((narrow.len(), narrow.largest_id().unwrap()), (3, 65535));
        assert_eq!(narrow.tokens(1..3).unwrap(), [256, 65535]);
        let wide = open(&with_header([20_240_801, 7, 2], &[1, 0, 0, 0, 0, 0, 1, 0])).unwrap();
        assert_eq!(wide.tokens(0..2).unwrap(), [1, 65536]);
        for (fields, tokens, expected) in [
            (
                [20_240_520, 1, 3],
                &[0; 4][..],
                "has 1028 bytes, but its header announces 3 tokens of 2 bytes, which are 1030 bytes",
            ),
            ([20_240_520, 1, 3], &[0; 8], "has 1032 bytes, but its header announces 3"),
            ([20_240_801, 7, 1], &[0; 2], "announces 1 tokens of 4 bytes"),
            ([20_240_520, 2, 3], &[0; 6], "magic number 20240520 and version 2; supported are"),
            ([20_240_801, 1, 3], &[0; 6], "magic number 20240801 and version 1"),
            ([20_240_326, 3, 1024], &[0; 6], "is a checkpoint of a model of llm.c"),
            ([20_240_520, 1, 0], &[], "a.bin` is empty"),
        ] {
            let message = open(&with_header(fields, tokens)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let cut = &with_header([20_240_520, 1, 3], &[])[..200];
        assert!(open(cut).unwrap_err().to_string().contains("has 200 bytes, but its header"));
    }

    #[test]
    fn tokens_that_equal_a_magic_number_are_tokens() {
        // 20240520 as two tokens, then any others.
        let tokens = [55432_u16, 308, 17, 5, 9];
        let bytes: Vec<u8> = tokens.into_iter().flat_map(u16::to_le_bytes).collect();
        let (_dir, path) = file("a.bin", &bytes);
        assert_eq!(TokenFile::open(&path, None).unwrap().tokens(0..3).unwrap(), [55432, 308, 17]);
    }

    #[test]
    fn the_first_id_outside_of_the_vocabulary_is_named() {
        let (_dir, path) = file("a.bin", &[9, 0, 10, 0, 11, 0]);
        assert!(TokenFile::open(&path, Some(12)).is_ok());
        let error = TokenFile::open(&path, Some(10)).unwrap_err();
        let expected = "has id 10 at token 1, but the vocabulary has 10 entries";
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn ids_that_no_i32_holds_are_refused_without_a_vocabulary() {
        let (_dir, path) = file("a.u32.bin", &[0, 0, 0, 0, 0, 0, 0, 128]);
        let error = TokenFile::open(&path, None).unwrap_err();
        assert!(error.to_string().contains("at token 1, but"), "{error}");
    }

    #[test]
    fn a_file_that_changes_while_it_is_in_use_is_an_error() {
        let (_dir, path) = file("a.bin", &[1, 0, 2, 0, 3, 0, 4, 0]);
        let tokens = TokenFile::open(&path, Some(5)).unwrap();
        assert_eq!(tokens.tokens(0..2).unwrap(), [1, 2]);
        let write = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            // The timestamp could otherwise be unchanged, because file systems have a limited time
            // resolution.
            let later = SystemTime::now() + Duration::from_secs(1);
            File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        };
        // The same number of ids, which are valid.
        write(&[1, 0, 2, 0, 4, 0, 4, 0]);
        let error = tokens.tokens(0..2).unwrap_err();
        assert!(matches!(error, DataError::Modified { .. }), "{error}");
        write(&[1, 0, 2, 0, 9, 0, 4]);
        let message = tokens.tokens(2..4).unwrap_err().to_string();
        for expected in ["a.bin` was truncated", "has 7 bytes, and 8", "4 bytes at offset 4"] {
            assert!(message.contains(expected), "{message}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn what_was_written_is_read(tokens in prop::collection::vec(0u32..1 << 31, 1..200)) {
            let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
            let (_dir, path) = file("t.u32.bin", &bytes);
            let opened = TokenFile::open(&path, None).unwrap();
            prop_assert_eq!(opened.tokens(0..tokens.len()).unwrap(), tokens);
        }
    }
}
