//! Tokens on disk, so that a text is tokenized once.
//!
//! A [`TokenCache`] is a folder of token files that are read as needed, not into memory. The name of
//! a file is made of two hashes: one of everything that decides about the tokens (texts,
//! tokenizer, settings), by which it is found, and one of the tokens in it, by which it is checked
//! before use. So a file that was damaged is noticed and made anew, and one that is there is
//! complete: files are written under another name and renamed. A folder that cannot be written
//! costs the time of tokenizing, never the run.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::content_hash::{digest, hexadecimal};
use crate::{DataError, Join, TokenFile, TokenStream, TokenWidth, Tokenizer};

/// Part of every key: to be changed with what is written, or with how text becomes tokens.
const FORMAT: &str = "deepburn tokens 1";

/// Digits of a key: 128 bits.
const KEY_DIGITS: usize = 32;

/// A folder of token files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenCache {
    folder: PathBuf,
}

/// The tokens of each of many documents.
#[derive(Debug)]
pub struct DocumentTokens {
    /// Number of documents, length of each, then the tokens of all of them.
    stream: TokenStream,
    /// Where in the stream each document begins, and where the last one ends.
    bounds: Vec<usize>,
}

impl TokenCache {
    /// The cache in `folder`, which is created when something is kept.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The user's: `deepburn/tokens` in `XDG_CACHE_HOME`, else in `.cache` of the home folder;
    /// `None` where there is neither.
    pub fn of_user() -> Option<Self> {
        let absolute = |folder: PathBuf| Some(folder).filter(|folder| folder.is_absolute());
        let caches = std::env::var_os("XDG_CACHE_HOME").and_then(|folder| absolute(folder.into()));
        let caches = caches.or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
        Some(Self::new(caches.join("deepburn/tokens")))
    }

    /// The tokens of `documents` as one stream, joined as `join` says.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn stream<D: AsRef<str> + Sync>(
        &self,
        tokenizer: &Tokenizer,
        documents: &[D],
        join: Join,
    ) -> Result<TokenStream, DataError> {
        let key = key(tokenizer, documents, &format!("{join:?}"))?;
        // Ids of a vocabulary of 65,536 entries still fit two bytes.
        let width = match tokenizer.vocab_size() <= 1 << 16 {
            true => TokenWidth::U16,
            false => TokenWidth::U32,
        };
        self.entry(&key, width, || {
            let documents: Vec<&str> = documents.iter().map(AsRef::as_ref).collect();
            join.encode(tokenizer, &documents)
        })
    }

    /// The tokens of `documents`, each for itself, as [`Tokenizer::encode_each`] gives them.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn documents<D: AsRef<str> + Sync>(
        &self,
        tokenizer: &Tokenizer,
        documents: &[D],
    ) -> Result<DocumentTokens, DataError> {
        let key = key(tokenizer, documents, "each")?;
        let stream = self.entry(&key, TokenWidth::U32, || {
            let encoded = tokenizer.encode_each(documents)?;
            // Far fewer than 2^31 each: they were texts in memory a moment ago.
            let lengths = encoded.iter().map(|tokens| tokens.len() as u32);
            let mut entry = vec![encoded.len() as u32];
            entry.extend(lengths);
            entry.extend(encoded.iter().flatten());
            Ok(entry)
        })?;
        DocumentTokens::new(stream, documents.len())
    }

    /// The tokens kept under `key`, or those that `make` gives, kept for the next time.
    fn entry(
        &self,
        key: &str,
        width: TokenWidth,
        make: impl FnOnce() -> Result<Vec<u32>, DataError>,
    ) -> Result<TokenStream, DataError> {
        if let Some(file) = self.find(key, width) {
            return Ok(TokenStream::File(file));
        }
        let tokens = make()?;
        if tokens.is_empty() {
            return Ok(TokenStream::Owned(tokens));
        }
        match self.keep(key, width, &tokens) {
            Ok(path) => match TokenFile::open(&path, None) {
                Ok(file) => Ok(TokenStream::File(file)),
                Err(_) => Ok(TokenStream::Owned(tokens)),
            },
            Err(error) => {
                let folder = self.folder.display();
                tracing::warn!(%folder, %error, "tokens are not kept for the next run");
                Ok(TokenStream::Owned(tokens))
            }
        }
    }

    /// The file of `key` whose contents are what its name says; others of that key are removed.
    fn find(&self, key: &str, width: TokenWidth) -> Option<TokenFile> {
        let prefix = format!("{key}-");
        for entry in fs::read_dir(&self.folder).ok()?.flatten() {
            let name = entry.file_name();
            let rest = name.to_str().and_then(|name| name.strip_prefix(&prefix));
            let Some(announced) = rest.and_then(|rest| rest.strip_suffix(ending(width))) else {
                continue;
            };
            let path = entry.path();
            let found = File::open(&path).and_then(|file| digest(Sha256::new(), file));
            if found.is_ok_and(|found| found == announced) {
                tracing::debug!(file = %path.display(), "tokens are in the cache");
                return TokenFile::open(&path, None).ok();
            }
            tracing::warn!(file = %path.display(), "cached tokens are damaged; making them anew");
            // What cannot be removed is passed over again the next time.
            let _ = fs::remove_file(&path);
        }
        None
    }

    fn keep(&self, key: &str, width: TokenWidth, tokens: &[u32]) -> io::Result<PathBuf> {
        fs::create_dir_all(&self.folder)?;
        let mut hasher = Sha256::new();
        let mut out = BufWriter::new(NamedTempFile::new_in(&self.folder)?);
        let mut buffer = Vec::with_capacity(1 << 16);
        for chunk in tokens.chunks(1 << 14) {
            buffer.clear();
            for token in chunk {
                // Little-endian, so the low bytes come first.
                buffer.extend_from_slice(&token.to_le_bytes()[..width.bytes()]);
            }
            hasher.update(&buffer);
            out.write_all(&buffer)?;
        }
        let out = out.into_inner()?;
        out.as_file().sync_all()?;
        let name = format!("{key}-{}{}", hexadecimal(&hasher.finalize()), ending(width));
        let path = self.folder.join(name);
        out.persist(&path)?;
        Ok(path)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl DocumentTokens {
    fn new(stream: TokenStream, documents: usize) -> Result<Self, DataError> {
        let mut bounds = vec![1 + documents];
        bounds.extend(stream.tokens(1..1 + documents)?.into_iter().scan(
            1 + documents,
            |end, length| {
                *end += length as usize;
                Some(*end)
            },
        ));
        Ok(Self { stream, bounds })
    }

    /// The tokens of every document.
    ///
    /// # Errors
    /// Those of [`TokenFile::tokens`].
    pub fn into_vecs(self) -> Result<Vec<Vec<u32>>, DataError> {
        (0..self.len()).map(|index| self.get(index)).collect()
    }

    /// Number of documents.
    pub fn len(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Whether there is no document.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of document `index`.
    ///
    /// # Panics
    /// If there are not so many documents, as slices do.
    pub fn length(&self, index: usize) -> usize {
        self.bounds[index + 1] - self.bounds[index]
    }

    /// The tokens of document `index`.
    ///
    /// # Errors
    /// Those of [`TokenFile::tokens`].
    ///
    /// # Panics
    /// If there are not so many documents, as slices do.
    pub fn get(&self, index: usize) -> Result<Vec<u32>, DataError> {
        self.stream.tokens(self.bounds[index]..self.bounds[index + 1])
    }
}

/// What a file of tokens of `width` ends in, see [`TokenWidth::of`].
fn ending(width: TokenWidth) -> &'static str {
    match width {
        TokenWidth::U16 => ".bin",
        TokenWidth::U32 => ".u32.bin",
    }
}

/// A hash of all that decides about tokens. Every part is preceded by its length, so that no two
/// lists of parts look the same.
fn key<D: AsRef<str>>(
    tokenizer: &Tokenizer,
    documents: &[D],
    setting: &str,
) -> Result<String, DataError> {
    let definition = tokenizer.definition()?;
    let end_of_text = format!("{:?}", tokenizer.end_of_text());
    let parts = [FORMAT, &definition, &end_of_text, setting];
    let parts = parts.into_iter().chain(documents.iter().map(AsRef::as_ref));
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let mut digits = hexadecimal(&hasher.finalize());
    digits.truncate(KEY_DIGITS);
    Ok(digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SyntheticCorpus;

    fn cache() -> (tempfile::TempDir, TokenCache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = TokenCache::new(dir.path().join("tokens"));
        (dir, cache)
    }

    fn documents() -> Vec<String> {
        SyntheticCorpus { seed: 9, bytes: 20_000 }.documents().unwrap()
    }

    fn files(cache: &TokenCache) -> Vec<PathBuf> {
        fs::read_dir(cache.folder()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn tokens_come_from_the_file_the_second_time() {
        let (_dir, cache) = cache();
        let (documents, tokenizer) = (documents(), Tokenizer::train(&documents(), 300).unwrap());
        let stream = || cache.stream(&tokenizer, &documents, Join::EndOfText).unwrap();
        let expected = tokenizer.encode_documents(&documents).unwrap();
        let first = stream();
        assert!(matches!(&first, TokenStream::File(_)));
        assert_eq!(first.tokens(0..first.len()).unwrap(), expected);
        let written = fs::metadata(&files(&cache)[0]).unwrap().modified().unwrap();
        let second = stream();
        assert_eq!(second.tokens(0..second.len()).unwrap(), expected);
        assert_eq!(files(&cache).len(), 1);
        assert_eq!(fs::metadata(&files(&cache)[0]).unwrap().modified().unwrap(), written);
    }

    #[test]
    fn whatever_decides_about_tokens_is_part_of_the_key() {
        let (_dir, cache) = cache();
        let documents = documents();
        let tokenizer = |size| Tokenizer::train(&documents, size).unwrap();
        let keep = |size, count: usize, join| {
            cache.stream(&tokenizer(size), &documents[..count], join).unwrap();
            files(&cache).len()
        };
        assert_eq!(keep(300, 2, Join::EndOfText), 1);
        assert_eq!(keep(300, 2, Join::EndOfText), 1);
        assert_eq!(keep(300, 2, Join::Nothing), 2);
        assert_eq!(keep(300, 1, Join::EndOfText), 3);
        assert_eq!(keep(301, 2, Join::EndOfText), 4);
        // The same characters, divided in another way.
        cache.stream(&tokenizer(300), &[documents[..2].concat()], Join::EndOfText).unwrap();
        assert_eq!(files(&cache).len(), 5);
    }

    #[test]
    fn damaged_tokens_are_made_anew() {
        let (_dir, cache) = cache();
        let (documents, tokenizer) = (documents(), Tokenizer::train(&documents(), 300).unwrap());
        let stream = || {
            let stream = cache.stream(&tokenizer, &documents, Join::EndOfText).unwrap();
            stream.tokens(0..stream.len()).unwrap()
        };
        let expected = stream();
        let path = files(&cache).remove(0);
        let intact = fs::read(&path).unwrap();
        let mut flipped = intact.clone();
        flipped[1000] ^= 1;
        for damaged in [flipped, intact[..100].to_vec(), Vec::new()] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(stream(), expected);
            assert_eq!(files(&cache), std::slice::from_ref(&path));
            assert!(fs::read(&path).unwrap() == intact);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_nothing_but_time() {
        let (dir, cache) = cache();
        fs::write(dir.path().join("tokens"), "a file where the folder should be").unwrap();
        let tokenizer = Tokenizer::train(&["x"], 257).unwrap();
        let stream = cache.stream(&tokenizer, &["abc"], Join::EndOfText).unwrap();
        assert_eq!(stream.tokens(0..3).unwrap(), tokenizer.encode("abc").unwrap());
        let nothing = cache.stream::<&str>(&tokenizer, &[], Join::EndOfText).unwrap();
        assert!(nothing.is_empty());
    }

    #[test]
    fn documents_keep_their_bounds() {
        let (_dir, cache) = cache();
        let tokenizer = Tokenizer::train(&documents(), 300).unwrap();
        let mut documents = documents();
        documents.insert(1, String::new());
        let expected = tokenizer.encode_each(&documents).unwrap();
        for _ in 0..2 {
            let tokens = cache.documents(&tokenizer, &documents).unwrap();
            assert_eq!((tokens.len(), tokens.is_empty()), (documents.len(), false));
            assert!(tokens.length(1) == 0);
            assert!((0..tokens.len()).all(|index| tokens.get(index).unwrap() == expected[index]));
        }
        assert!(cache.documents::<&str>(&tokenizer, &[]).unwrap().is_empty());
    }

    #[test]
    fn a_large_vocabulary_takes_four_bytes() {
        let (dir, cache) = cache();
        let json = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel",
            "unk_token": "?", "vocab": {"?": 70000}}}"#;
        let path = dir.path().join("words.json");
        fs::write(&path, json).unwrap();
        let tokenizer = Tokenizer::load(&path).unwrap();
        let stream = cache.stream(&tokenizer, &["x"], Join::EndOfText).unwrap();
        assert_eq!(stream.tokens(0..1).unwrap(), [70_000]);
        assert!(files(&cache)[0].to_str().unwrap().ends_with(".u32.bin"));
    }
}
