//! A cache of tokens on disk, so that a text is tokenized only once.
//!
//! A [`TokenCache`] is a folder of token files, which are read as needed. The name of a file
//! contains two hashes: the key, a hash of everything that determines the tokens (text, tokenizer,
//! settings), and the hash of the tokens themselves, which is checked before use. A damaged file is
//! therefore detected and written again. Files are written under a temporary name and renamed, so a
//! file that exists is complete. If the folder is not writable, each run tokenizes the text again.
//! Old entries are removed ([`CacheLimits`]).

use std::fs::{self, File, FileTimes};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::formats::text::DocumentEvent;
use crate::hash::{digest, hexadecimal};
use crate::tokens::cache_entries::{SOURCE, entries, evict, remove};
use crate::tokens::documents::{Documents, DocumentsHasher, TextScan};
use crate::tokens::encoder::{TokenSink, collect_tokens, encode_range};
use crate::tokens::token_file::ByteSink;
use crate::{
    CacheEntry, CacheLimits, DataError, Result, TokenFile, TokenStream, TokenWidth, Tokenizer,
};

/// Part of every key. It changes with the file format and with the conversion of text to tokens.
const FORMAT: &str = "deepburn tokens 2";

/// Digits of a key: 128 bits.
const KEY_DIGITS: usize = 32;

/// A function that passes tokens to a sink, and produces the same tokens on each call.
type Producer<'a> = &'a dyn Fn(TokenSink<'_>) -> Result<()>;

/// Returns the folder of the user's caches: `deepburn` in `XDG_CACHE_HOME`, or else in `.cache` of
/// the home folder. Returns `None` if neither is known.
pub fn user_cache_folder() -> Option<PathBuf> {
    let caches = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    // The XDG specification tells programs to ignore a relative path.
    let caches = caches.filter(|folder| folder.is_absolute());
    let caches = caches.or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
    Some(caches.join("deepburn"))
}

/// A folder of token files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenCache {
    /// The folder of the token files.
    folder: PathBuf,
    /// The limits above which entries are removed.
    limits: CacheLimits,
}

impl TokenCache {
    /// Uses `folder` as a cache. The folder is created with the first entry.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), limits: CacheLimits::default() }
    }

    /// Returns the user's cache: `tokens` in [`user_cache_folder`]. Returns `None` if that is not
    /// known. The limits are read from the environment, see [`CacheLimits::from_variables`].
    pub fn of_user() -> Option<Self> {
        let limits = CacheLimits::from_variables(|name| std::env::var(name).ok());
        Some(Self { limits, ..Self::new(user_cache_folder()?.join("tokens")) })
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the limits above which entries are removed.
    pub fn limits(&self) -> CacheLimits {
        self.limits
    }

    /// Returns the entries of the cache, most recently used first.
    ///
    /// # Errors
    /// Returns [`DataError::Unreadable`] if the folder cannot be read.
    pub fn entries(&self) -> Result<Vec<CacheEntry>> {
        entries(&self.folder).map_err(DataError::unreadable(&self.folder))
    }

    /// Removes all entries of the cache, and returns them.
    ///
    /// # Errors
    /// Returns [`DataError::Unreadable`] if the folder cannot be read, and
    /// [`DataError::Unwritable`] if an entry cannot be removed.
    pub fn clear(&self) -> Result<Vec<CacheEntry>> {
        let entries = self.entries()?;
        for entry in &entries {
            remove(&entry.path).map_err(DataError::unwritable(&entry.path))?;
        }
        Ok(entries)
    }

    /// Returns the tokens of the characters in `range` of `documents` as one stream.
    ///
    /// # Errors
    /// Returns the errors of [`encode_range`].
    pub(crate) fn stream(
        &self,
        tokenizer: &Tokenizer,
        documents: Documents<'_>,
        scan: &TextScan,
        range: Range<usize>,
    ) -> Result<TokenStream> {
        let key = key(tokenizer, &scan.hash, &format!("{:?} {range:?}", documents.join()))?;
        let width = TokenWidth::of_vocabulary(tokenizer.vocab_size());
        self.entry(&key, width, &documents.described(), &|sink| {
            encode_range(tokenizer, documents, scan, range.clone(), sink)
        })
    }

    /// Returns the tokens of each of `documents`, as [`Tokenizer::encode_each`] does.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`] and [`TokenFile::tokens`].
    pub fn documents<D: AsRef<str> + Sync>(
        &self,
        tokenizer: &Tokenizer,
        documents: &[D],
    ) -> Result<Vec<Vec<u32>>> {
        let mut hasher = DocumentsHasher::default();
        for document in documents {
            hasher.add(DocumentEvent::Text(document.as_ref()));
            hasher.add(DocumentEvent::End);
        }
        let (key, count) = (key(tokenizer, &hasher.finish(), "each")?, documents.len());
        // The stream consists of the number of documents, the length of each document, and the
        // tokens of all documents.
        let stream =
            self.entry(&key, TokenWidth::U32, &format!("{count} labeled texts"), &|sink| {
                let encoded = tokenizer.encode_each(documents)?;
                sink(&[count as u32])?;
                // The lengths fit into u32: a text of 2^32 tokens would not have fit into memory.
                sink(&encoded.iter().map(|tokens| tokens.len() as u32).collect::<Vec<_>>())?;
                encoded.iter().try_for_each(|tokens| sink(tokens))
            })?;
        let mut end = 1 + count;
        let lengths = stream.tokens(1..end)?.into_iter();
        let document = lengths.map(|length| {
            let start = end;
            end += length as usize;
            stream.tokens(start..end)
        });
        document.collect()
    }

    /// Returns the tokens of the entry `key`. If it does not exist, the tokens of `produce` are
    /// stored as the entry.
    fn entry(
        &self,
        key: &str,
        width: TokenWidth,
        source: &str,
        produce: Producer<'_>,
    ) -> Result<TokenStream> {
        let extension = extension(width);
        if let Some(path) = self.find(key, extension)
            && let Ok(file) = TokenFile::open_cached(&path)
        {
            return Ok(TokenStream::File(file));
        }
        let stored =
            self.store(key, extension, source, &mut |sink| produce(&mut width.encoder(sink)))?;
        match stored {
            Ok(Some(path)) => {
                // Another process may already have removed the file again.
                if let Ok(file) = TokenFile::open_cached(&path) {
                    return Ok(TokenStream::File(file));
                }
            }
            // There are no tokens, for which no file is written.
            Ok(None) => return Ok(TokenStream::Owned(Vec::new())),
            Err(error) => {
                let folder = self.folder.display();
                tracing::warn!(%folder, %error, "tokens are not cached for the next run");
            }
        }
        Ok(TokenStream::Owned(collect_tokens(produce)?))
    }

    /// Returns the file of `key` whose contents match the hash in its name, and removes damaged
    /// files of the same key.
    pub(crate) fn find(&self, key: &str, extension: &str) -> Option<PathBuf> {
        let prefix = format!("{key}-");
        for entry in fs::read_dir(&self.folder).ok()?.flatten() {
            let name = entry.file_name();
            let rest = name.to_str().and_then(|name| name.strip_prefix(&prefix));
            let Some(expected) = rest.and_then(|rest| rest.strip_suffix(extension)) else {
                continue;
            };
            let path = entry.path();
            let found = File::open(&path).and_then(|file| digest(Sha256::new(), file));
            if found.is_ok_and(|found| found == expected) {
                tracing::debug!(file = %path.display(), "tokens are in the cache");
                // In a read-only cache, the access time is not updated. The modification time must
                // not change, because runs that read this file detect modifications by it.
                let file = File::options().append(true).open(&path);
                let used = FileTimes::new().set_accessed(SystemTime::now());
                let _ = file.and_then(|file| file.set_times(used));
                return Some(path);
            }
            tracing::warn!(file = %path.display(), "cached tokens are damaged; tokenizing again");
            // A file that cannot be removed is skipped again in the next run.
            let _ = remove(&path);
        }
        None
    }

    /// Writes the bytes of `produce` while it runs. Returns the file, `None` if there are no bytes,
    /// or the reason why the file cannot be written.
    ///
    /// # Errors
    /// Returns the errors of `produce`.
    pub(crate) fn store(
        &self,
        key: &str,
        extension: &str,
        source: &str,
        produce: &mut dyn FnMut(ByteSink<'_>) -> Result<()>,
    ) -> Result<io::Result<Option<PathBuf>>> {
        // Removes the files of interrupted runs. If the folder is not usable, the next call fails.
        let _ = evict(&self.folder, self.limits);
        let file =
            fs::create_dir_all(&self.folder).and_then(|()| NamedTempFile::new_in(&self.folder));
        let mut out = match file {
            Ok(file) => BufWriter::new(file),
            Err(error) => return Ok(Err(error)),
        };
        // The lock is held until the file is closed. On a file system without locks, other runs
        // keep the file for a day.
        let _ = out.get_ref().as_file().lock();
        let (mut hasher, mut count, mut failed) = (Sha256::new(), 0, None);
        let produced = produce(&mut |bytes| {
            count += bytes.len();
            hasher.update(bytes);
            out.write_all(bytes).map_err(|error| {
                // Stops the producer; the caller sees `failed` instead.
                failed = Some(error);
                DataError::LoaderStopped
            })
        });
        if let Some(error) = failed {
            return Ok(Err(error));
        }
        produced?;
        if count == 0 {
            return Ok(Ok(None));
        }
        let name = format!("{key}-{}{extension}", hexadecimal(&hasher.finalize()));
        Ok(self.persist(out, self.folder.join(name), source).map(Some))
    }

    /// Renames a complete file to its final name, and removes entries above the limits.
    fn persist(
        &self,
        out: BufWriter<NamedTempFile>,
        path: PathBuf,
        source: &str,
    ) -> io::Result<PathBuf> {
        let out = out.into_inner()?;
        out.as_file().sync_all()?;
        out.persist(&path)?;
        // An error is ignored, because only `deepburn cache` shows the source, and the tokens are
        // valid without it.
        let _ = fs::write(path.with_extension(SOURCE), source);
        if let Err(error) = evict(&self.folder, self.limits) {
            tracing::warn!(folder = %self.folder.display(), %error, "old tokens cannot be removed");
        }
        Ok(path)
    }
}

/// Returns the file name extension of tokens of `width`, see [`TokenWidth::of`].
fn extension(width: TokenWidth) -> &'static str {
    match width {
        TokenWidth::U16 => ".bin",
        TokenWidth::U32 => ".u32.bin",
    }
}

/// Returns a hash of everything that determines the tokens.
fn key(tokenizer: &Tokenizer, text: &str, setting: &str) -> Result<String> {
    let definition = tokenizer.definition()?;
    // It separates documents, and is not a part of the definition.
    let end_of_text = format!("{:?}", tokenizer.end_of_text());
    Ok(key_of([FORMAT, &definition, &end_of_text, setting, text]))
}

/// Returns the key of an entry that `parts` determine. The length of each part precedes it, so that
/// different lists of parts have different keys.
pub(crate) fn key_of<'p>(parts: impl IntoIterator<Item = &'p str>) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let mut digits = hexadecimal(&hasher.finalize());
    digits.truncate(KEY_DIGITS);
    digits
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
        let scan = documents.scan(0).unwrap();
        cache.stream(tokenizer, documents, &scan, 0..usize::MAX).unwrap()
    }

    #[test]
    fn tokens_come_from_the_file_the_second_time() {
        let (_dir, cache) = cache();
        let (documents, tokenizer) = (documents(), Tokenizer::train(&documents(), 300).unwrap());
        let stream = || stream(&cache, &tokenizer, &documents, Join::EndOfText);
        let expected = tokenizer.encode_each(&documents).unwrap().join(&0);
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
        // A run that opened the file earlier can still read it.
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
        assert_eq!(nothing.len(), 0);
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
            assert_eq!((tokens.len(), tokens[1].len()), (documents.len(), 0));
            assert!(tokens == expected);
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
