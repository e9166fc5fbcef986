//! Tokenizers: text to ids and back, loaded from a model's files or trained on the corpus.
//!
//! [`Tokenizer`] extends the `tokenizers` library for training. The ids are the same in every run
//! and with any number of threads, the vocabulary size covers all ids, and the end-of-text token
//! separates documents. Truncation and padding of a tokenizer file are disabled, because
//! [`crate::Sequences`] cuts the corpus. The library panics on some damaged files, while it loads
//! them or later, so each call is guarded.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper, PostProcessor, PreTokenizerWrapper};

use crate::guard::{guarded, guarded_call};
use crate::tokens::chunks::{CHUNK_BYTES, cut_at_spaces, cut_long_runs};
use crate::tokens::engine_patterns::ambiguous_pattern;
use crate::tokens::special_tokens::eos_token_ids;
use crate::tokens::tokenizer_files::{TokenizerFiles, byte_level};
use crate::tokens::word_encoder::{EncodedText, WordEncoder};
use crate::{DataError, Result};

pub use crate::tokens::tokenizer_files::END_OF_TEXT;

/// Minimum vocabulary size: 256 bytes and the end-of-text token.
const MIN_VOCAB_SIZE: usize = 257;

/// Maximum bytes of text for training. More text hardly changes the merges, but costs time and
/// memory.
pub(crate) const TRAINING_BYTES: usize = 32 << 20;

/// Longest run without a space in training; longer runs are cut. The trainer scans a word once for
/// each pair that it merges in it, so the time is quadratic in the word length.
const TRAINING_RUN: usize = 256;

/// A token that was added to the vocabulary of a tokenizer's model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// Whether decoding may leave it out, as for the end of a text or turn.
    pub is_special: bool,
}

/// A tokenizer and the files it is saved as.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// The tokenizer of the library.
    inner: tokenizers::Tokenizer,
    /// The path it was loaded from, for errors.
    path: Option<PathBuf>,
    /// The id of the token between documents.
    end_of_text: Option<u32>,
    /// The largest id plus one.
    vocab_size: usize,
    /// Whether a text may be cut at spaces before it is encoded.
    cuts_at_spaces: bool,
    /// Encodes most texts in less time than the library, if it can.
    words: Option<Arc<WordEncoder>>,
    /// The files as they were read.
    files: TokenizerFiles,
}

impl Tokenizer {
    /// Loads `path`: a `tokenizer.json` (with any name), or a folder with `tokenizer.json` or with
    /// `vocab.json` and `merges.txt` (byte-level BPE as in GPT-2).
    ///
    /// The end-of-text token is the `eos_token` of the `tokenizer_config.json` or
    /// `special_tokens_map.json` beside it, else [`END_OF_TEXT`] if the vocabulary has it, else the
    /// `eos_token_id` of a model in the same folder. A file with another name than `tokenizer.json`
    /// stands alone.
    ///
    /// # Errors
    /// Returns [`DataError::Unreadable`], [`DataError::InvalidFile`] or [`DataError::Tokenizer`] if
    /// the files cannot be read, are not valid, or fail to load.
    pub fn load(path: &Path) -> Result<Self> {
        let files = TokenizerFiles::read(path)?;
        let inner = files.build(path)?;
        let invalid = |reason: String| TokenizerFiles::invalid(path, &reason);
        let named = |name| files.special_token(name).map_err(invalid);
        let is_missing = |token: &&str| inner.token_to_id(token).is_none();
        let eos = named("eos_token")?;
        if let Some(token) = eos.as_deref().filter(is_missing) {
            return Err(invalid(format!("its eos_token `{token}` is not in its vocabulary")));
        }
        for name in ["bos_token", "pad_token"] {
            // `transformers` would add it to the vocabulary, for which the model has no embedding.
            if let Some(token) = named(name)?.as_deref().filter(is_missing) {
                tracing::warn!(
                    "the tokenizer's {name} `{token}` is not in its vocabulary and is not used"
                );
            }
        }
        let tokenizer = Self::new(inner, eos.as_deref(), files, Some(path))?;
        // A file with another name need not belong to the model in its folder.
        let is_complete = path.is_dir() || path.file_name() == Some("tokenizer.json".as_ref());
        let folder = if path.is_dir() { Some(path) } else { path.parent() };
        Ok(match folder.filter(|_| is_complete) {
            Some(folder) => tokenizer.or_end_of_text_of(folder),
            None => tokenizer,
        })
    }

    /// Trains a byte-level BPE with at most `vocab_size` entries and [`END_OF_TEXT`] at id 0. The
    /// same documents and size give the same tokenizer, byte for byte. Only the first 32 MiB of
    /// text are used, and a small corpus may give fewer entries. Runs of more than 256 bytes
    /// without a space are cut, which bounds the training time.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if `vocab_size` is below 257.
    pub fn train<D: AsRef<str>>(documents: &[D], vocab_size: usize) -> Result<Self> {
        if vocab_size < MIN_VOCAB_SIZE {
            let rule = "a byte-level vocabulary needs 256 bytes and the end-of-text token; set it to 257 or more";
            return Err(DataError::setting("data.vocab_size", vocab_size, rule));
        }
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            // A pair that occurs once does not help with the next document.
            .min_frequency(2)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .build();
        let mut bytes = 0;
        let chunks: Vec<&str> = documents
            .iter()
            .flat_map(|document| cut_at_spaces(document.as_ref(), CHUNK_BYTES))
            .flat_map(|chunk| cut_long_runs(chunk, TRAINING_RUN))
            .take_while(|chunk| {
                let has_room = bytes < TRAINING_BYTES;
                bytes += chunk.len();
                has_room
            })
            .collect();
        let train = || {
            let mut typed = byte_level(BPE::default())?;
            typed.train(&mut trainer, chunks.into_iter())?;
            // Loaded from its own file, so that a trained tokenizer and its saved copy are
            // identical.
            let json = typed.to_string(true)?;
            Ok((tokenizers::Tokenizer::from_bytes(&json)?, json))
        };
        let (inner, json) = call(None, "training", train)?;
        Self::new(inner, Some(END_OF_TEXT), TokenizerFiles::trained(json), None)
    }

    /// Wraps a tokenizer of the library: disables truncation and padding, and reads the ids that
    /// training needs.
    fn new(
        mut inner: tokenizers::Tokenizer,
        end_of_text: Option<&str>,
        files: TokenizerFiles,
        path: Option<&Path>,
    ) -> Result<Self> {
        if drops_text(&inner) {
            tracing::warn!(
                "the tokenizer has no token for some characters and no unknown token: they are left out of the text"
            );
        }
        if let Some(pattern) = ambiguous_pattern(&inner) {
            tracing::warn!(
                "the tokenizer splits text by the pattern {pattern:?}, which may match other characters than in transformers, such \
                 as ½; compare the tokens of your texts, or write the pattern with categories such as \\p{{L}}"
            );
        }
        let (largest_id, end_of_text) = call(path, "reading its vocabulary", || {
            inner.with_truncation(None)?;
            inner.with_padding(None);
            let largest_id = inner.get_vocab(true).into_values().max();
            Ok((largest_id, inner.token_to_id(end_of_text.unwrap_or(END_OF_TEXT))))
        })?;
        let declared = files.num_added_tokens();
        // The library panics on some damaged definitions, and reports them when a text is encoded.
        let words = guarded(|| WordEncoder::new(&inner, declared)).ok().flatten();
        Ok(Self {
            words: words.map(Arc::new),
            end_of_text,
            // Ids may have gaps, so the number of tokens would be too small.
            vocab_size: largest_id.map_or(0, |id| id as usize + 1),
            cuts_at_spaces: cuts_at_spaces(&inner),
            inner,
            path: path.map(Path::to_owned),
            files,
        })
    }

    /// Returns the tokens that were added to the vocabulary of the model, such as special tokens,
    /// in the order of their ids.
    pub fn extra_tokens(&self) -> Vec<ExtraToken> {
        let tokens = self.inner.get_added_tokens_decoder().into_iter();
        let token = |(id, token): (u32, AddedToken)| ExtraToken {
            id,
            text: token.content,
            is_special: token.special,
        };
        let mut tokens: Vec<_> = tokens.map(token).collect();
        tokens.sort_by_key(|token| token.id);
        tokens
    }

    /// Returns the id of a token.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the path it was loaded from; `None` for a trained one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the tokenizer with `token` as its end-of-text token. Configuration files that name
    /// another one are changed when they are saved.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if `token` is not a token of the vocabulary.
    pub fn with_end_of_text(mut self, token: &str) -> Result<Self> {
        let Some(id) = self.inner.token_to_id(token) else {
            let added = self.inner.get_added_tokens_decoder().into_values();
            let mut special: Vec<_> =
                added.filter(|it| it.special).map(|it| format!("`{}`", it.content)).collect();
            special.sort();
            special.truncate(20);
            let known = match special.is_empty() {
                true => String::new(),
                false => format!(" (its special tokens are {})", special.join(", ")),
            };
            let rule = format!(
                "is not a token of the tokenizer{known}; name one of its tokens, or remove the key"
            );
            return Err(DataError::setting("data.eos_token", format!("{token:?}"), rule));
        };
        let path = self.path.as_deref().unwrap_or(Path::new("the tokenizer"));
        let named = self.files.set_eos_token(token);
        named.map_err(|reason| TokenizerFiles::invalid(path, &reason))?;
        Ok(Self { end_of_text: Some(id), ..self })
    }

    /// Returns the tokenizer with the end-of-text token of the model in `folder`, if the tokenizer
    /// has none and belongs to this model: the first `eos_token_id` of `config.json`, or else of
    /// `generation_config.json`.
    #[must_use]
    pub fn or_end_of_text_of(self, folder: &Path) -> Self {
        let of_model = || {
            let mut ids = eos_token_ids(folder).into_iter();
            ids.find(|id| self.inner.id_to_token(*id).is_some())
        };
        let end_of_text = self.end_of_text.or_else(of_model);
        Self { end_of_text, ..self }
    }

    /// Returns the number of embeddings that a model needs: the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the id of the token between documents, if the tokenizer has one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// Returns the text of the token between documents, if the tokenizer has one.
    pub fn end_of_text_token(&self) -> Option<String> {
        self.token(self.end_of_text?)
    }

    /// Returns whether a text can contain the end-of-text token as an ordinary word: it was not
    /// added to the vocabulary, and its own text is encoded as this token.
    pub fn end_of_text_is_ordinary(&self) -> bool {
        let Some(id) = self.end_of_text else { return false };
        let is_added = self.inner.get_added_tokens_decoder().contains_key(&id);
        let written = || self.decode(&[id], false).and_then(|text| self.encode(&text));
        !is_added && written().is_ok_and(|ids| ids.contains(&id))
    }

    /// Returns the text of the token `id`.
    pub(crate) fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns whether [`cut_at_spaces`] preserves the ids.
    pub(crate) fn cuts_at_spaces(&self) -> bool {
        self.cuts_at_spaces
    }

    /// Returns the id of a special token by its name in the tokenizer's configuration, such as
    /// `pad_token`.
    pub fn special_token(&self, name: &str) -> Option<u32> {
        // Files that are not valid were refused when they were loaded.
        self.inner.token_to_id(&self.files.special_token(name).ok()??)
    }

    /// Returns the number of special tokens that the tokenizer puts around a text, which
    /// [`Tokenizer::encode`] leaves out.
    pub fn num_surrounding_tokens(&self) -> usize {
        self.inner.get_post_processor().map_or(0, |it| it.added_tokens(false))
    }

    /// Returns the ids of `text` without special tokens around it. Special tokens that are spelled
    /// out in the text become their ids.
    ///
    /// # Errors
    /// Returns [`DataError::Tokenizer`] if the model has neither a token nor an unknown token for a
    /// part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    /// Returns the ids of `text` with the special tokens that the tokenizer puts around a text.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`].
    pub fn encode_surrounded(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, true)
    }

    /// Returns the ids of `text`.
    fn ids(&self, text: &str, surrounded: bool) -> Result<Vec<u32>> {
        self.call("encoding", |inner| match self.by_words(text, surrounded, false)? {
            Some(encoded) => Ok(encoded.ids),
            None => Ok(inner.encode_fast(text, surrounded)?.get_ids().to_vec()),
        })
    }

    /// Encodes a text word by word, if it and the tokenizer allow this.
    fn by_words(
        &self,
        text: &str,
        surrounded: bool,
        has_ranges: bool,
    ) -> tokenizers::Result<Option<EncodedText>> {
        let Some(words) = &self.words else { return Ok(None) };
        words.encode(self.inner.get_model(), text, surrounded, has_ranges)
    }

    /// Returns the ids of `text` and, for each id, the bytes of the text that it stands for; empty
    /// for tokens around the text, which are added if `surrounded` is true.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`].
    pub fn encode_with_ranges(
        &self,
        text: &str,
        surrounded: bool,
    ) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        self.call("encoding", |inner| {
            if let Some(EncodedText { ids, ranges }) = self.by_words(text, surrounded, true)? {
                return Ok((ids, ranges.unwrap_or_default()));
            }
            let encoding = inner.encode(text, surrounded)?;
            let ranges = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
            Ok((encoding.get_ids().to_vec(), ranges.collect()))
        })
    }

    /// Encodes documents on all threads. Returns the ids of each document in the order of
    /// `documents`, equal to the result of [`Tokenizer::encode`].
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`].
    pub fn encode_each<D>(&self, documents: &[D]) -> Result<Vec<Vec<u32>>>
    where
        D: AsRef<str> + Sync,
    {
        let encode_document = |document: &D| {
            let chunks = match self.cuts_at_spaces {
                true => cut_at_spaces(document.as_ref(), CHUNK_BYTES),
                false => vec![document.as_ref()],
            };
            let ids = chunks.into_par_iter().map(|chunk| self.encode(chunk));
            Ok(ids.collect::<Result<Vec<_>, _>>()?.concat())
        };
        documents.par_iter().map(encode_document).collect()
    }

    /// Returns the text of `ids`. A byte-level tokenizer returns exactly the encoded text; ids that
    /// cut a character in two give U+FFFD. With `skip_special`, special tokens are left out.
    ///
    /// # Errors
    /// Returns [`DataError::Tokenizer`] if an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.call("decoding", |inner| {
            // The library would silently skip unknown ids.
            match ids.iter().find(|&&id| id as usize >= self.vocab_size) {
                Some(id) => {
                    Err(format!("id {id} is not below the vocabulary size {}", self.vocab_size)
                        .into())
                }
                None => inner.decode(ids, skip_special),
            }
        })
    }

    /// Returns the definition of the tokenizer as JSON: everything that determines ids. Equal
    /// tokenizers from different files have the same definition.
    ///
    /// # Errors
    /// Returns [`DataError::Tokenizer`] if the library cannot serialize it.
    pub fn definition(&self) -> Result<String> {
        self.call("rendering it", |inner| inner.to_string(false))
    }

    /// Calls the library.
    fn call<T>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<T>,
    ) -> Result<T> {
        call(self.path.as_deref(), doing, || work(&self.inner))
    }

    /// Writes the files that `transformers.AutoTokenizer.from_pretrained` reads into `folder`,
    /// which is created if it is missing. Files that were loaded are written unchanged, and missing
    /// ones are generated. Each file is written atomically.
    ///
    /// # Errors
    /// Returns [`DataError::Unwritable`] if a file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let end_of_text = self.end_of_text.and_then(|id| self.inner.id_to_token(id));
        let generated = |inner: &_| self.files.generated(inner, end_of_text.as_deref());
        self.files.write(self.call("rendering its files", generated)?, folder)
    }
}

/// Returns whether [`cut_at_spaces`] preserves the ids: the pre-tokenizer must be GPT-2's, without
/// a normalizer before it, and no added token may contain or absorb a space.
fn cuts_at_spaces(tokenizer: &tokenizers::Tokenizer) -> bool {
    let is_gpt2 = matches!(
        tokenizer.get_pre_tokenizer(),
        Some(PreTokenizerWrapper::ByteLevel(level)) if level.use_regex && !level.add_prefix_space
    );
    let is_one_word = |token: &AddedToken| {
        let plain = !token.lstrip && !token.rstrip && !token.single_word;
        plain && !token.content.contains(char::is_whitespace)
    };
    is_gpt2
        && tokenizer.get_normalizer().is_none()
        && tokenizer.get_added_tokens_decoder().values().all(is_one_word)
}

/// Returns whether characters can get lost: a BPE without an unknown token leaves out what its
/// vocabulary does not cover. A byte-level vocabulary has all bytes.
fn drops_text(tokenizer: &tokenizers::Tokenizer) -> bool {
    let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return false };
    let has_byte = |byte: char| tokenizer.token_to_id(byte.encode_utf8(&mut [0; 4])).is_some();
    bpe.unk_token.is_none()
        && !bpe.byte_fallback
        && !ByteLevel::alphabet().into_iter().all(has_byte)
}

/// Runs `work`, which calls the library. Its errors and panics become errors that name the
/// tokenizer.
fn call<T>(
    path: Option<&Path>,
    doing: &'static str,
    work: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T> {
    let path = path.map(Path::to_owned);
    guarded_call(work).map_err(|reason| DataError::Tokenizer { path, doing, reason })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::SyntheticCorpus;
    use crate::tests::test_data;

    fn corpus() -> Vec<String> {
        SyntheticCorpus { seed: 5, bytes: 60_000 }.documents().unwrap()
    }

    fn trained() -> Tokenizer {
        Tokenizer::train(&corpus(), 400).unwrap()
    }

    /// The ids of all documents, with the end-of-text token in between.
    fn joined<D: AsRef<str> + Sync>(tokenizer: &Tokenizer, documents: &[D]) -> Vec<u32> {
        let separator: Vec<u32> = tokenizer.end_of_text().into_iter().collect();
        tokenizer.encode_each(documents).unwrap().join(&separator[..])
    }

    #[test]
    fn training_gives_the_size_asked_for_and_shortens_text() {
        let tokenizer = trained();
        assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (400, Some(0)));
        let text = &corpus()[0];
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.len() * 2 < text.len(), "{} ids for {} bytes", ids.len(), text.len());
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), *text);
    }

    #[test]
    fn training_is_deterministic_to_the_byte() {
        let saved = || {
            let dir = tempfile::tempdir().unwrap();
            trained().save(dir.path()).unwrap();
            let files = ["tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"];
            files.map(|name| fs::read_to_string(dir.path().join(name)).unwrap())
        };
        let first = saved();
        (0..3).for_each(|_| assert!(saved() == first));
    }

    #[test]
    fn a_corpus_without_merges_has_bytes_only() {
        assert_eq!(Tokenizer::train(&["x"], 1000).unwrap().vocab_size(), MIN_VOCAB_SIZE);
        assert_eq!(Tokenizer::train::<&str>(&[], 1000).unwrap().vocab_size(), MIN_VOCAB_SIZE);
        let error = Tokenizer::train(&["x"], 256).unwrap_err();
        assert!(error.to_string().contains("data.vocab_size = 256"), "{error}");
    }

    #[test]
    fn documents_are_separated_and_special_tokens_are_seen() {
        let tokenizer = trained();
        let ids = joined(&tokenizer, &["a", "b", "c"]);
        let letter = |text| tokenizer.encode(text).unwrap();
        assert_eq!(ids, [letter("a"), vec![0], letter("b"), vec![0], letter("c")].concat());
        assert_eq!(tokenizer.encode(&format!("a{END_OF_TEXT}b")).unwrap(), ids[..3]);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "abc");
        assert_eq!(tokenizer.decode(&ids[..3], false).unwrap(), "a<|endoftext|>b");
        assert!(tokenizer.decode(&[400], false).is_err());
    }

    /// A long run is trained in the same way as its pieces.
    #[test]
    fn long_runs_are_cut_for_training() {
        let digits: String = (0..2000).map(|at| char::from(b'0' + (at * at % 7) as u8)).collect();
        let pieces: Vec<&str> = cut_long_runs(&digits, TRAINING_RUN).collect();
        assert!(pieces.len() > 2 && pieces.iter().all(|piece| piece.len() <= TRAINING_RUN));
        let saved =
            |documents: &[&str]| Tokenizer::train(documents, 300).unwrap().definition().unwrap();
        assert_eq!(saved(&[&digits]), saved(&pieces));
    }

    #[test]
    fn a_saved_tokenizer_loads_from_folder_file_and_vocabulary() {
        let tokenizer = trained();
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("model");
        tokenizer.save(&folder).unwrap();
        let text = &corpus()[1];
        let ids = tokenizer.encode(text).unwrap();
        for path in [folder.clone(), folder.join("tokenizer.json")] {
            let loaded = Tokenizer::load(&path).unwrap();
            assert_eq!((loaded.vocab_size(), loaded.end_of_text()), (400, Some(0)));
            assert_eq!(loaded.encode(text).unwrap(), ids);
        }
        fs::remove_file(folder.join("tokenizer.json")).unwrap();
        let loaded = Tokenizer::load(&folder).unwrap();
        assert_eq!((loaded.vocab_size(), loaded.end_of_text()), (400, Some(0)));
        assert_eq!(loaded.encode(text).unwrap(), ids);
        assert_eq!(loaded.encode(END_OF_TEXT).unwrap(), [0]);
    }

    #[test]
    fn ids_do_not_depend_on_threads_or_chunks() {
        let text = corpus().concat().repeat(4);
        assert!(cut_at_spaces(&text, CHUNK_BYTES).len() > 2);
        let tokenizer = trained();
        let whole = tokenizer.encode(&text).unwrap();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let ids = pool.install(|| joined(&tokenizer, &[&text]));
            assert!(ids == whole);
        }
    }

    #[test]
    fn tokenizers_of_another_kind_are_not_cut_at_spaces() {
        let json = r#"{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2,
            "strategy": "LongestFirst", "stride": 0}, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
            "decoder": null, "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "one": 1, "two": 2, "three": 7}}}"#;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("words.json");
        fs::write(&path, json).unwrap();
        let tokenizer = Tokenizer::load(&path).unwrap();
        assert!(!tokenizer.cuts_at_spaces);
        assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (8, None));
        // Truncation is off, and nothing separates documents.
        let ids = joined(&tokenizer, &["one two three four", "one"]);
        assert_eq!(ids, [1, 2, 7, 0, 1]);
        tokenizer.save(&dir.path().join("out")).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("out/tokenizer.json")).unwrap(), json);
    }

    /// Known token counts of tinyshakespeare, split 90/10 by characters, with GPT-2's tokenizer.
    #[test]
    fn gpt2_counts_of_tinyshakespeare() {
        let text = test_data("tinyshakespeare.txt");
        let folder = test_data("hub/models/openai-community/gpt2");
        let (Some(text), Some(folder)) = (text, folder) else { return };
        let text = fs::read_to_string(text).unwrap();
        let (train, eval) = text.split_at(text.len() / 10 * 9 + text.len() % 10 * 9 / 10);
        let tokenizer = Tokenizer::load(&folder).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (50257, Some(50256)));
        assert_eq!(joined(&tokenizer, &[train]).len(), 301_966);
        assert_eq!(joined(&tokenizer, &[eval]).len(), 36_059);
        assert_eq!(tokenizer.encode("Hello world").unwrap(), [15496, 995]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_text_comes_back(text in any::<String>(), lines in "([ a-z\n\t\r.,]{0,12}){0,8}") {
            static TOKENIZER: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(trained);
            for text in [text, lines] {
                let ids = TOKENIZER.encode(&text).unwrap();
                prop_assert_eq!(TOKENIZER.decode(&ids, false).unwrap(), text);
            }
        }

        #[test]
        fn cutting_at_spaces_keeps_the_ids(text in "([a-z0-9 '.!\u{e9}\u{a0}\t]{0,5}\n{0,2}){0,20}") {
            static TOKENIZER: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(trained);
            let cut: Vec<u32> = cut_at_spaces(&text, 1)
                .into_iter()
                .flat_map(|chunk| TOKENIZER.encode(chunk).unwrap())
                .collect();
            prop_assert_eq!(cut, TOKENIZER.encode(&text).unwrap());
        }
    }
}
