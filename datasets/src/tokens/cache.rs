//! Tokens on disk, so that a text is tokenized once.
//!
//! A [`TokenCache`] is a folder of token files that are read as needed, not into memory. The name of
//! a file is made of two hashes: one of everything that decides about the tokens (texts,
//! tokenizer, settings), by which it is found, and one of the tokens in it, by which it is checked
//! before use. So a file that was damaged is noticed and made anew, and one that is there is
//! complete: files are written under another name and renamed. A folder that cannot be written
//! costs the time of tokenizing, never the run. What was not used for long goes ([`CacheLimits`]).

use std::fs::{self, File, FileTimes};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::hub::content_hash::{digest, hexadecimal};
use crate::tokens::cache_entries::{SOURCE, entries, evict, remove};
use crate::tokens::documents::{Documents, DocumentsHasher, Piece, Survey};
use crate::tokens::encoder::{TakeTokens, encode_range};
use crate::{CacheEntry, CacheLimits, DataError, TokenFile, TokenStream, TokenWidth, Tokenizer};

/// Part of every key: to be changed with what is written, or with how text becomes tokens.
const FORMAT: &str = "deepburn tokens 2";

/// Digits of a key: 128 bits.
const KEY_DIGITS: usize = 32;

/// A folder of token files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenCache {
    folder: PathBuf,
    limits: CacheLimits,
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
        Self { folder: folder.into(), limits: CacheLimits::default() }
    }

    /// The user's: `deepburn/tokens` in `XDG_CACHE_HOME`, else in `.cache` of the home folder;
    /// `None` where there is neither. Its limits are those of the environment, see
    /// [`CacheLimits::from_variables`].
    pub fn of_user() -> Option<Self> {
        let absolute = |folder: PathBuf| Some(folder).filter(|folder| folder.is_absolute());
        let caches = std::env::var_os("XDG_CACHE_HOME").and_then(|folder| absolute(folder.into()));
        let caches = caches.or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
        let limits = CacheLimits::from_variables(|name| std::env::var(name).ok());
        Some(Self { limits, ..Self::new(caches.join("deepburn/tokens")) })
    }

    /// What lies in the cache, most recently used first.
    ///
    /// # Errors
    /// [`DataError::Unreadable`].
    pub fn entries(&self) -> Result<Vec<CacheEntry>, DataError> {
        entries(&self.folder).map_err(DataError::unreadable(&self.folder))
    }

    /// Removes everything that lies in the cache, and returns it.
    ///
    /// # Errors
    /// [`DataError::Unreadable`], [`DataError::Unwritable`].
    pub fn clear(&self) -> Result<Vec<CacheEntry>, DataError> {
        let entries = self.entries()?;
        for entry in &entries {
            remove(&entry.path).map_err(DataError::unwritable(&entry.path))?;
        }
        Ok(entries)
    }

    /// The tokens of the characters in `range` of `documents` as one stream.
    ///
    /// # Errors
    /// Those of [`encode_range`].
    pub(crate) fn stream(
        &self,
        tokenizer: &Tokenizer,
        documents: Documents<'_>,
        survey: &Survey,
        range: Range<usize>,
    ) -> Result<TokenStream, DataError> {
        let key = key(tokenizer, &survey.hash, &format!("{:?} {range:?}", documents.join()))?;
        // Ids of a vocabulary of 65,536 entries still fit two bytes.
        let width = match tokenizer.vocab_size() <= 1 << 16 {
            true => TokenWidth::U16,
            false => TokenWidth::U32,
        };
        self.entry(&key, width, &documents.described(), &|take| {
            encode_range(tokenizer, documents, survey, range.clone(), take)
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
        let mut hasher = DocumentsHasher::default();
        for document in documents {
            hasher.take(Piece::Text(document.as_ref()));
            hasher.take(Piece::End);
        }
        let key = key(tokenizer, &hasher.finish(), "each")?;
        let source = format!("{} labelled texts", documents.len());
        let stream = self.entry(&key, TokenWidth::U32, &source, &|take| {
            let encoded = tokenizer.encode_each(documents)?;
            take(&[encoded.len() as u32])?;
            // Far fewer than 2^31 each: they were texts in memory a moment ago.
            let lengths: Vec<u32> = encoded.iter().map(|tokens| tokens.len() as u32).collect();
            take(&lengths)?;
            encoded.iter().try_for_each(|tokens| take(tokens))
        })?;
        DocumentTokens::new(stream, documents.len())
    }

    /// The tokens kept under `key`, or those that `make` gives, kept for the next time.
    fn entry(
        &self,
        key: &str,
        width: TokenWidth,
        source: &str,
        make: &dyn Fn(TakeTokens<'_>) -> Result<(), DataError>,
    ) -> Result<TokenStream, DataError> {
        if let Some(file) = self.find(key, width) {
            return Ok(TokenStream::File(file));
        }
        let kept = self.keep(key, width, source, make)?.map(|kept| match kept {
            Some(path) => TokenFile::open(&path, None).ok().map(TokenStream::File),
            None => Some(TokenStream::Owned(Vec::new())),
        });
        match kept {
            Ok(Some(stream)) => return Ok(stream),
            Ok(None) => {}
            Err(error) => {
                let folder = self.folder.display();
                tracing::warn!(%folder, %error, "tokens are not kept for the next run");
            }
        }
        let mut tokens = Vec::new();
        make(&mut |more| {
            tokens.extend_from_slice(more);
            Ok(())
        })?;
        Ok(TokenStream::Owned(tokens))
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
                // A cache that cannot be written forgets when it was used. The time of the last change stays:
                // by it, a run that reads this file would take it for another.
                let file = File::options().append(true).open(&path);
                let used = FileTimes::new().set_accessed(SystemTime::now());
                let _ = file.and_then(|file| file.set_times(used));
                return TokenFile::open(&path, None).ok();
            }
            tracing::warn!(file = %path.display(), "cached tokens are damaged; making them anew");
            // What cannot be removed is passed over again the next time.
            let _ = remove(&path);
        }
        None
    }

    /// Writes the tokens that `make` gives while it makes them. Returns the file, `None` for no
    /// token at all, or why it cannot be written.
    ///
    /// # Errors
    /// Those of `make`.
    fn keep(
        &self,
        key: &str,
        width: TokenWidth,
        source: &str,
        make: &dyn Fn(TakeTokens<'_>) -> Result<(), DataError>,
    ) -> Result<io::Result<Option<PathBuf>>, DataError> {
        // What an interrupted run has left makes room.
        if let Err(error) = evict(&self.folder, self.limits) {
            tracing::debug!(folder = %self.folder.display(), %error, "the token cache is not bounded");
        }
        let file =
            fs::create_dir_all(&self.folder).and_then(|()| NamedTempFile::new_in(&self.folder));
        let mut out = match file {
            Ok(file) => {
                // Held until the file is closed. Without locks, another run waits a day before it removes the file.
                let _ = file.as_file().lock();
                BufWriter::new(file)
            }
            Err(error) => return Ok(Err(error)),
        };
        let (mut hasher, mut count, mut failed) = (Sha256::new(), 0, None);
        let mut buffer = Vec::with_capacity(1 << 16);
        let made = make(&mut |tokens| {
            buffer.clear();
            for token in tokens {
                // Little-endian, so the low bytes come first.
                buffer.extend_from_slice(&token.to_le_bytes()[..width.bytes()]);
            }
            count += tokens.len();
            hasher.update(&buffer);
            out.write_all(&buffer).map_err(|error| {
                let cause = io::Error::new(error.kind(), error.to_string());
                failed = Some(error);
                DataError::unwritable(&self.folder)(cause)
            })
        });
        match (made, failed) {
            (_, Some(error)) => return Ok(Err(error)),
            (made, None) => made?,
        }
        if count == 0 {
            return Ok(Ok(None));
        }
        let name = format!("{key}-{}{}", hexadecimal(&hasher.finalize()), ending(width));
        Ok(self.place(out, self.folder.join(name), source).map(Some))
    }

    /// Gives what was written its name, and makes room for it.
    fn place(
        &self,
        out: BufWriter<NamedTempFile>,
        path: PathBuf,
        source: &str,
    ) -> io::Result<PathBuf> {
        let out = out.into_inner()?;
        out.as_file().sync_all()?;
        out.persist(&path)?;
        // For `deepburn cache`; the tokens are of use without it.
        let _ = fs::write(path.with_extension(SOURCE), source);
        if let Err(error) = evict(&self.folder, self.limits) {
            tracing::warn!(folder = %self.folder.display(), %error, "the token cache is not bounded");
        }
        Ok(path)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// When entries are removed.
    pub fn limits(&self) -> CacheLimits {
        self.limits
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
fn key(tokenizer: &Tokenizer, text: &str, setting: &str) -> Result<String, DataError> {
    let definition = tokenizer.definition()?;
    let end_of_text = format!("{:?}", tokenizer.end_of_text());
    let mut hasher = Sha256::new();
    for part in [FORMAT, &definition, &end_of_text, setting, text] {
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
    use crate::{Join, SyntheticCorpus};

    fn cache() -> (tempfile::TempDir, TokenCache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = TokenCache::new(dir.path().join("tokens"));
        (dir, cache)
    }

    fn documents() -> Vec<String> {
        SyntheticCorpus { seed: 9, bytes: 20_000 }.documents().unwrap()
    }

    fn files(cache: &TokenCache) -> Vec<PathBuf> {
        cache.entries().unwrap().into_iter().map(|entry| entry.path).collect()
    }

    fn stream(
        cache: &TokenCache,
        tokenizer: &Tokenizer,
        documents: &[String],
        join: Join,
    ) -> TokenStream {
        let documents = Documents::Memory { documents, join };
        let survey = documents.survey(0).unwrap();
        cache.stream(tokenizer, documents, &survey, 0..usize::MAX).unwrap()
    }

    #[test]
    fn tokens_come_from_the_file_the_second_time() {
        let (_dir, cache) = cache();
        let (documents, tokenizer) = (documents(), Tokenizer::train(&documents(), 300).unwrap());
        let stream = || stream(&cache, &tokenizer, &documents, Join::EndOfText);
        let expected = tokenizer.encode_documents(&documents).unwrap();
        let first = stream();
        assert!(matches!(&first, TokenStream::File(_)));
        assert_eq!(first.tokens(0..first.len()).unwrap(), expected);
        let written = files(&cache);
        let used = || fs::metadata(&written[0]).unwrap().accessed().unwrap();
        let long_ago = SystemTime::UNIX_EPOCH;
        let unused = FileTimes::new().set_accessed(long_ago);
        File::options().write(true).open(&written[0]).unwrap().set_times(unused).unwrap();
        let second = stream();
        assert_eq!(second.tokens(0..second.len()).unwrap(), expected);
        assert_eq!(files(&cache), written);
        assert!(used() > long_ago);
        // A run that has had the file open since before is not disturbed.
        assert_eq!(first.tokens(0..first.len()).unwrap(), expected);
        assert_eq!(cache.entries().unwrap()[0].source.as_deref(), Some("the synthetic corpus"));
        assert_eq!(cache.clear().unwrap().len(), 1);
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 0);
    }

    #[test]
    fn whatever_decides_about_tokens_is_part_of_the_key() {
        let (_dir, cache) = cache();
        let documents = documents();
        let tokenizer = |size| Tokenizer::train(&documents, size).unwrap();
        let keep = |size, count: usize, join| {
            stream(&cache, &tokenizer(size), &documents[..count], join);
            files(&cache).len()
        };
        assert_eq!(keep(300, 2, Join::EndOfText), 1);
        assert_eq!(keep(300, 2, Join::EndOfText), 1);
        assert_eq!(keep(300, 2, Join::Nothing), 2);
        assert_eq!(keep(300, 1, Join::EndOfText), 3);
        assert_eq!(keep(301, 2, Join::EndOfText), 4);
        // The same characters, divided in another way.
        stream(&cache, &tokenizer(300), &[documents[..2].concat()], Join::EndOfText);
        assert_eq!(files(&cache).len(), 5);
    }

    #[test]
    fn damaged_tokens_are_made_anew() {
        let (_dir, cache) = cache();
        let (documents, tokenizer) = (documents(), Tokenizer::train(&documents(), 300).unwrap());
        let stream = || {
            let stream = stream(&cache, &tokenizer, &documents, Join::EndOfText);
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
        let found = stream(&cache, &tokenizer, &["abc".into()], Join::EndOfText);
        assert_eq!(found.tokens(0..3).unwrap(), tokenizer.encode("abc").unwrap());
        let nothing = super::tests::stream(&cache, &tokenizer, &[], Join::EndOfText);
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
        let stream = stream(&cache, &tokenizer, &["x".into()], Join::EndOfText);
        assert_eq!(stream.tokens(0..1).unwrap(), [70_000]);
        assert!(files(&cache)[0].to_str().unwrap().ends_with(".u32.bin"));
    }
}
