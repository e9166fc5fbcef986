//! Raw token files: little-endian u16 (`.bin`) or u32 (`.u32.bin`), nothing else in them.
//!
//! [`TokenFile`] reads what a batch needs when it needs it, so a corpus may be larger than memory.
//! The file is not mapped: a mapped file that somebody shortens ends the process with a signal, a
//! read from it is an error. So is one from a file that somebody has written to since it was opened:
//! its tokens would be others than those that were checked. It refuses a name that does not say the width, an empty file, a size
//! that is no multiple of the width, and ids outside of the vocabulary.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::DataError;
use crate::formats::text::check_regular;

/// Ids travel as `i32`, in which negative numbers mark ignored labels.
pub(crate) const MAX_VOCAB_SIZE: usize = 1 << 31;

/// Tokens that are checked at a time.
const SCANNED: usize = 1 << 18;

/// How wide a token is in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes, file name ending in `.bin`.
    U16,
    /// Four bytes, file name ending in `.u32.bin`.
    U32,
}

impl TokenWidth {
    /// Bytes per token.
    pub fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// The width a file's name announces.
    ///
    /// # Errors
    /// [`DataError::TokenFileName`] for any other name.
    pub fn of(path: &Path) -> Result<Self, DataError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(".u32.bin") {
            Ok(Self::U32)
        } else if name.ends_with(".bin") {
            Ok(Self::U16)
        } else {
            Err(DataError::TokenFileName { path: path.to_owned() })
        }
    }

    /// The token in `bytes`, which are exactly one token.
    fn decode(self, bytes: &[u8]) -> u32 {
        match (self, bytes) {
            (Self::U16, &[a, b]) => u32::from(u16::from_le_bytes([a, b])),
            (Self::U32, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
            _ => unreachable!("chunks are exactly one token wide"),
        }
    }
}

/// A file of tokens, checked when opened.
#[derive(Debug)]
pub struct TokenFile {
    file: File,
    len: usize,
    width: TokenWidth,
    path: PathBuf,
    /// Ids are below it.
    limit: usize,
    /// When the file was last written to, as it was opened; `None` where the file system does not say.
    modified: Option<SystemTime>,
}

impl TokenFile {
    /// Opens `path` and checks it once from end to end: ids must be below `vocab_size`, or below
    /// 2^31 where the vocabulary is not known.
    ///
    /// # Errors
    /// A name, size or id that breaks the rules of this module; a file that cannot be read.
    pub fn open(path: &Path, vocab_size: Option<usize>) -> Result<Self, DataError> {
        let width = TokenWidth::of(path)?;
        check_regular(path)?;
        let file = File::open(path).map_err(DataError::unreadable(path))?;
        let metadata = file.metadata().map_err(DataError::unreadable(path))?;
        let bytes = metadata.len() as usize;
        if bytes == 0 {
            return Err(DataError::Empty { what: format!("token file `{}`", path.display()) });
        }
        if !bytes.is_multiple_of(width.bytes()) {
            let width = width.bytes();
            return Err(DataError::RaggedTokenFile { path: path.to_owned(), bytes, width });
        }
        let limit = vocab_size.unwrap_or(MAX_VOCAB_SIZE).min(MAX_VOCAB_SIZE);
        let len = bytes / width.bytes();
        let modified = metadata.modified().ok();
        let file = Self { file, len, width, path: path.to_owned(), limit, modified };
        // Each two bytes are an id of such a vocabulary.
        if width == TokenWidth::U32 || limit <= usize::from(u16::MAX) {
            file.largest_id()?;
        }
        Ok(file)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty file does not open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file this was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tokens at `range`, in order.
    ///
    /// # Errors
    /// [`DataError::ShortenedTokenFile`] where the file has become shorter,
    /// [`DataError::ChangedTokenFile`] where it was written to, and [`DataError::Unreadable`];
    /// [`DataError::OutOfVocabulary`] while it is opened.
    ///
    /// # Panics
    /// If `range` ends beyond [`TokenFile::len`], as slices do.
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<u32>, DataError> {
        assert!(range.end <= self.len, "tokens {range:?} of {}", self.len);
        let width = self.width.bytes();
        let mut bytes = vec![0; range.len() * width];
        let offset = (range.start * width) as u64;
        read_exact_at(&self.file, &mut bytes, offset)
            .map_err(|cause| self.unreadable(cause, offset, bytes.len()))?;
        self.check_unchanged()?;
        let decode = |token: &[u8]| self.width.decode(token);
        let tokens: Vec<u32> = bytes.chunks_exact(width).map(decode).collect();
        match tokens.iter().position(|id| *id as usize >= self.limit) {
            None => Ok(tokens),
            Some(at) => Err(DataError::OutOfVocabulary {
                path: self.path.clone(),
                position: range.start + at,
                id: tokens[at],
                vocab_size: self.limit,
            }),
        }
    }

    /// The largest id in the file.
    ///
    /// # Errors
    /// Those of [`TokenFile::tokens`].
    pub fn largest_id(&self) -> Result<u32, DataError> {
        let mut largest = 0;
        for start in (0..self.len).step_by(SCANNED) {
            let tokens = self.tokens(start..self.len.min(start + SCANNED))?;
            largest = tokens.into_iter().max().unwrap_or(0).max(largest);
        }
        Ok(largest)
    }

    /// Refuses tokens that were read from a file that was written to since it was opened.
    fn check_unchanged(&self) -> Result<(), DataError> {
        let metadata = self.file.metadata().map_err(DataError::unreadable(&self.path))?;
        match metadata.modified().ok() == self.modified {
            true => Ok(()),
            false => Err(DataError::ChangedTokenFile { path: self.path.clone() }),
        }
    }

    fn unreadable(&self, cause: io::Error, offset: u64, length: usize) -> DataError {
        match (cause.kind(), self.file.metadata()) {
            (io::ErrorKind::UnexpectedEof, Ok(metadata)) => DataError::ShortenedTokenFile {
                path: self.path.clone(),
                found: metadata.len(),
                expected: (self.len * self.width.bytes()) as u64,
                offset,
                length,
            },
            _ => DataError::unreadable(&self.path)(cause),
        }
    }
}

/// Fills `bytes` from `offset` on. Threads may read one file at the same time.
#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

/// Fills `bytes` from `offset` on. Threads may read one file at the same time.
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
        assert_eq!(tokens.path(), path);

        let (_dir, path) = file("a.u32.bin", &[1, 0, 0, 0, 0, 0, 1, 0]);
        let tokens = TokenFile::open(&path, None).unwrap();
        assert_eq!((tokens.len(), tokens.is_empty()), (2, false));
        assert_eq!(tokens.tokens(1..2).unwrap(), [65536]);
    }

    #[test]
    fn the_first_id_outside_of_the_vocabulary_is_named() {
        let (_dir, path) = file("a.bin", &[9, 0, 10, 0, 11, 0]);
        assert!(TokenFile::open(&path, Some(12)).is_ok());
        let error = TokenFile::open(&path, Some(10)).unwrap_err();
        assert!(
            matches!(error, DataError::OutOfVocabulary { position: 1, id: 10, vocab_size: 10, .. }),
            "{error}"
        );
    }

    #[test]
    fn ids_that_no_i32_holds_are_refused_without_a_vocabulary() {
        let (_dir, path) = file("a.u32.bin", &[0, 0, 0, 0, 0, 0, 0, 128]);
        let error = TokenFile::open(&path, None).unwrap_err();
        assert!(matches!(error, DataError::OutOfVocabulary { position: 1, .. }), "{error}");
    }

    #[test]
    fn a_file_that_changes_while_it_is_in_use_is_an_error() {
        let (_dir, path) = file("a.bin", &[1, 0, 2, 0, 3, 0, 4, 0]);
        let tokens = TokenFile::open(&path, Some(5)).unwrap();
        assert_eq!(tokens.tokens(0..2).unwrap(), [1, 2]);
        let write = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            // The clock of a file system may not have moved on since.
            let later = SystemTime::now() + Duration::from_secs(1);
            File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        };
        // Valid ids, and as many.
        write(&[1, 0, 2, 0, 4, 0, 4, 0]);
        let error = tokens.tokens(0..2).unwrap_err();
        assert!(matches!(error, DataError::ChangedTokenFile { .. }), "{error}");
        write(&[1, 0, 2, 0, 9, 0, 4]);
        let message = tokens.tokens(2..4).unwrap_err().to_string();
        for expected in ["a.bin` became shorter", "has 7 bytes, and 8", "4 bytes at offset 4"] {
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
