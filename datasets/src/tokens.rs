//! Raw token files: little-endian u16 (`.bin`) or u32 (`.u32.bin`), nothing else in them.
//!
//! [`TokenFile`] maps the file instead of reading it, so a corpus may be larger than memory.
//! It refuses a name that does not say the width, an empty file, a size that is no multiple of
//! the width, and ids outside of the vocabulary; after that no read can fail.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::DataError;
use crate::text::check_regular;

/// Ids travel as `i32`, in which negative numbers mark ignored labels.
pub(crate) const MAX_VOCAB_SIZE: usize = 1 << 31;

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

/// A memory-mapped file of tokens, checked when opened.
#[derive(Debug)]
pub struct TokenFile {
    map: Mmap,
    width: TokenWidth,
    path: PathBuf,
}

impl TokenFile {
    /// Maps `path` and checks it once from end to end: ids must be below `vocab_size`, or below
    /// 2^31 where the vocabulary is not known.
    ///
    /// The file must not be shortened while it is in use.
    ///
    /// # Errors
    /// A name, size or id that breaks the rules of this module; a file that cannot be read.
    pub fn open(path: &Path, vocab_size: Option<usize>) -> Result<Self, DataError> {
        let width = TokenWidth::of(path)?;
        check_regular(path)?;
        let file = File::open(path).map_err(DataError::unreadable(path))?;
        let bytes = file.metadata().map_err(DataError::unreadable(path))?.len();
        if bytes == 0 {
            return Err(DataError::Empty { what: format!("token file `{}`", path.display()) });
        }
        // SAFETY: the map is read-only. Another process that shortens the file while it is mapped
        // would end this one with a bus error; the documentation above forbids it, as every
        // reader of mapped files must.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::unreadable(path))?;
        if map.len() % width.bytes() != 0 {
            let (bytes, width) = (map.len(), width.bytes());
            return Err(DataError::RaggedTokenFile { path: path.to_owned(), bytes, width });
        }
        let file = Self { map, width, path: path.to_owned() };
        file.check_ids(vocab_size.unwrap_or(MAX_VOCAB_SIZE).min(MAX_VOCAB_SIZE))?;
        Ok(file)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.map.len() / self.width.bytes()
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
    /// # Panics
    /// If `range` ends beyond [`TokenFile::len`], as slices do.
    pub fn tokens(&self, range: Range<usize>) -> impl Iterator<Item = u32> + '_ {
        let (width, bytes) = (self.width, self.width.bytes());
        self.map[range.start * bytes..range.end * bytes]
            .chunks_exact(bytes)
            .map(move |token| width.decode(token))
    }

    fn check_ids(&self, vocab_size: usize) -> Result<(), DataError> {
        if self.width == TokenWidth::U16 && vocab_size > usize::from(u16::MAX) {
            return Ok(());
        }
        match self.tokens(0..self.len()).enumerate().find(|&(_, id)| id as usize >= vocab_size) {
            None => Ok(()),
            Some((position, id)) => Err(DataError::OutOfVocabulary {
                path: self.path.clone(),
                position,
                id,
                vocab_size,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(tokens.tokens(0..3).collect::<Vec<_>>(), [1, 256, 65535]);
        assert_eq!(tokens.path(), path);

        let (_dir, path) = file("a.u32.bin", &[1, 0, 0, 0, 0, 0, 1, 0]);
        let tokens = TokenFile::open(&path, None).unwrap();
        assert_eq!((tokens.len(), tokens.is_empty()), (2, false));
        assert_eq!(tokens.tokens(1..2).collect::<Vec<_>>(), [65536]);
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn what_was_written_is_read(tokens in prop::collection::vec(0u32..1 << 31, 1..200)) {
            let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
            let (_dir, path) = file("t.u32.bin", &bytes);
            let opened = TokenFile::open(&path, None).unwrap();
            prop_assert_eq!(opened.tokens(0..tokens.len()).collect::<Vec<_>>(), tokens);
        }
    }
}
