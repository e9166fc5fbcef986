//! Opens a described data source as sequences for training ([`open`]).
//!
//! A [`DataSource`] describes the data and how it is cut. A [`Corpus`] contains the splits, the
//! tokenizer and the vocabulary size that an embedding needs. Cheap checks run first, so that a
//! wrong sequence length is reported before a large corpus is read. The tokenizer is trained only
//! on the train split, because the evaluation text must not influence the evaluated model.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::check_positive;
use crate::splits::try_map;
use crate::tokens::documents::{Documents, TextScan};
use crate::tokens::encoder::{collect_tokens, encode_range};
use crate::tokens::packing::check_sequence_length;
use crate::tokens::token_file::MAX_VOCAB_SIZE;
use crate::tokens::tokenizer::TRAINING_BYTES;
use crate::{
    DataError, Fractions, Join, Result, Sequences, Splits, SyntheticCorpus, TokenCache, TokenFile,
    TokenStream, Tokenizer,
};

/// The kind of the data, and its location.
#[derive(Debug, Clone)]
pub enum Content {
    /// Raw token files.
    Tokens {
        /// The files of the splits.
        splits: Splits,
        /// The tokenizer that produced the tokens, if it should be saved with the model.
        tokenizer: Option<Box<Tokenizer>>,
    },
    /// Text files.
    Text {
        /// The files or folders of the splits.
        splits: Splits,
        /// The text column of tables, usually [`crate::TEXT_FIELD`].
        field: String,
        /// The separator between documents.
        join: Join,
        /// The tokenizer.
        tokenizer: TokenizerChoice,
    },
    /// Generated stories.
    Synthetic {
        /// Seed and size.
        corpus: SyntheticCorpus,
        /// The fractions of the splits.
        fractions: Fractions,
        /// The tokenizer.
        tokenizer: TokenizerChoice,
    },
}

/// The source of the tokenizer.
#[derive(Debug, Clone)]
pub enum TokenizerChoice {
    /// A tokenizer that was loaded, see [`Tokenizer::load`].
    Loaded(Box<Tokenizer>),
    /// Trained on the train split, see [`Tokenizer::train`].
    Train {
        /// Maximum number of entries, at least 257.
        vocab_size: usize,
    },
}

/// A description of the data and of how it is cut into sequences.
#[derive(Debug, Clone)]
pub struct DataSource {
    /// The data.
    pub content: Content,
    /// Tokens per sequence, at least 2. Tokens after the last full sequence are dropped.
    pub sequence_length: usize,
    /// The vocabulary size of the model if it is already known. All ids must be below it.
    pub vocab_size: Option<usize>,
    /// The cache for the tokens of text; `None` for no cache.
    pub token_cache: Option<TokenCache>,
}

/// Data that is ready to be sampled.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The train split.
    pub train: Sequences,
    /// The split for evaluation during training.
    pub eval: Option<Sequences>,
    /// The split for a final test.
    pub test: Option<Sequences>,
    /// The tokenizer that produced the tokens, if it is known.
    pub tokenizer: Option<Tokenizer>,
    /// The id of the token between documents, if there are several documents and
    /// [`Join::EndOfText`] joins them.
    pub separator: Option<u32>,
    /// The number of embeddings that a model needs: the vocabulary size of the tokenizer. For
    /// tokens without a tokenizer, it is the `vocab_size` of the source or, if that is unknown, the
    /// largest id of all splits plus one.
    pub vocab_size: usize,
}

/// The text of a split.
struct SplitText<'a> {
    /// The name of the split in messages.
    name: &'static str,
    /// The documents of the whole corpus.
    documents: Documents<'a>,
    /// The scan of all documents, shared by the splits of one corpus.
    scan: Arc<TextScan>,
    /// The characters of the documents that are in the split.
    range: Range<usize>,
}

/// Reads, tokenizes and cuts the data of `source`. The result depends only on the source and its
/// files.
///
/// # Errors
/// Returns an error if a setting or the data is invalid; see [`DataError`].
pub fn open(source: &DataSource) -> Result<Corpus> {
    check_sequence_length(source.sequence_length)?;
    check_positive("model.config.vocab_size", source.vocab_size.unwrap_or(1))?;
    match &source.content {
        Content::Tokens { splits, tokenizer } => open_tokens(splits, tokenizer.as_deref(), source),
        Content::Text { splits, field, join, tokenizer } => {
            let texts = text_of_splits(splits, field, *join, tokenizer)?;
            tokenize(texts, tokenizer, source)
        }
        Content::Synthetic { corpus, fractions, tokenizer } => {
            let documents = corpus.documents()?;
            let documents = Documents::Memory { documents: &documents, join: Join::EndOfText };
            tokenize(divide(documents, *fractions, tokenizer)?, tokenizer, source)
        }
    }
}

/// Scans the text of all splits.
fn text_of_splits<'a>(
    splits: &'a Splits,
    field: &'a str,
    join: Join,
    choice: &TokenizerChoice,
) -> Result<[Option<SplitText<'a>>; 3]> {
    match splits {
        Splits::Shares { files, fractions } => {
            fractions.validate()?;
            divide(Documents::Files { files, field, join }, *fractions, choice)
        }
        Splits::Paths { train, eval, test } => {
            let named = |name, files: &'a Option<Vec<PathBuf>>| Some((name, files.as_ref()?));
            let files = [Some(("train", train)), named("eval", eval), named("test", test)];
            try_map(files, |(name, files)| {
                let documents = Documents::Files { files, field, join };
                // Only the train split trains a tokenizer.
                let sample = if name == "train" { sample_bytes(choice) } else { 0 };
                let scan = Arc::new(documents.scan(sample)?);
                // The whole text, however many characters the scan has found.
                Ok(SplitText { name, documents, scan, range: 0..usize::MAX })
            })
        }
    }
}

/// Opens raw token files.
fn open_tokens(
    splits: &Splits,
    tokenizer: Option<&Tokenizer>,
    source: &DataSource,
) -> Result<Corpus> {
    let entries = tokenizer.map(Tokenizer::vocab_size);
    // A model may have more embeddings than the tokenizer has tokens. Ids must be below both
    // limits.
    let limit = entries.into_iter().chain(source.vocab_size).min();
    let mut largest = 0;
    let mut pack = |files: &Vec<PathBuf>| {
        let [path] = &files[..] else {
            let rule = "tokens are read from one file per split; concatenate the files";
            return Err(DataError::setting(
                "data.splits",
                format!("{} token files", files.len()),
                rule,
            ));
        };
        let file = TokenFile::open(path, limit)?;
        // With a limit, `open` has already checked all ids against it.
        if limit.is_none() {
            largest = largest.max(file.largest_id()?);
        }
        let what = format!("`{}`", path.display());
        Ok((Sequences::pack(TokenStream::File(file), source.sequence_length, &what)?, what))
    };
    let parts = match splits {
        Splits::Shares { files, fractions } => {
            fractions.validate()?;
            let (all, what) = pack(files)?;
            all.split(*fractions, &what)?
        }
        Splits::Paths { train, eval, test } => {
            try_map([Some(train), eval.as_ref(), test.as_ref()], |files| Ok(pack(files)?.0))?
        }
    };
    let vocab_size = entries.or(source.vocab_size).unwrap_or(largest as usize + 1);
    finish(parts, tokenizer.cloned(), vocab_size, source)
}

/// Returns how many bytes of a text are kept to train a tokenizer on.
fn sample_bytes(choice: &TokenizerChoice) -> usize {
    match choice {
        TokenizerChoice::Loaded(_) => 0,
        // Training uses the whole chunk in which it reaches its limit, so it needs slightly more
        // text than the limit.
        TokenizerChoice::Train { .. } => TRAINING_BYTES + (1 << 20),
    }
}

/// Cuts documents by fractions of their characters. A document that straddles a cut is divided.
fn divide<'a>(
    documents: Documents<'a>,
    fractions: Fractions,
    choice: &TokenizerChoice,
) -> Result<[Option<SplitText<'a>>; 3]> {
    let scan = Arc::new(documents.scan(sample_bytes(choice))?);
    let parts = fractions.cut(scan.num_chars)?;
    Ok(parts.map(|part| {
        let (name, range) = part?;
        Some(SplitText { name, documents, scan: scan.clone(), range })
    }))
}

/// Returns the training sample of the tokenizer: the kept documents up to the end of the train
/// split.
fn sample<'t>(train: &'t SplitText<'_>) -> Vec<&'t str> {
    // The train split starts at the beginning of the text, so its length is also its end.
    let mut rest = train.range.len();
    let documents = train.scan.sample.iter().map(|document| {
        let end = document.char_indices().nth(rest).map_or(document.len(), |(at, _)| at);
        rest -= document[..end].chars().count();
        &document[..end]
    });
    documents.take_while(|document| !document.is_empty()).collect()
}

/// Loads or trains the tokenizer, and converts the splits to sequences.
fn tokenize(
    texts: [Option<SplitText<'_>>; 3],
    choice: &TokenizerChoice,
    source: &DataSource,
) -> Result<Corpus> {
    let tokenizer = match choice {
        TokenizerChoice::Loaded(tokenizer) => (**tokenizer).clone(),
        TokenizerChoice::Train { vocab_size } => {
            let sample = texts[0].as_ref().map(sample).unwrap_or_default();
            let tokenizer = Tokenizer::train(&sample, *vocab_size)?;
            tracing::info!(vocab_size = tokenizer.vocab_size(), "trained a tokenizer");
            tokenizer
        }
    };
    let vocab_size = tokenizer.vocab_size();
    // Checked before the text is tokenized, because that may take minutes.
    check_vocabulary(vocab_size, source)?;
    let separator = separator(texts.iter().flatten(), &tokenizer)?;
    let parts = try_map(texts, |SplitText { name, documents, scan, range }| {
        let tokens = match &source.token_cache {
            Some(cache) => cache.stream(&tokenizer, documents, &scan, range)?,
            None => TokenStream::Owned(collect_tokens(|sink| {
                encode_range(&tokenizer, documents, &scan, range, sink)
            })?),
        };
        Sequences::pack(tokens, source.sequence_length, &format!("the {name} split"))
    })?;
    let corpus = finish(parts, Some(tokenizer), vocab_size, source)?;
    Ok(Corpus { separator, ..corpus })
}

/// Checks that the model, if it is known, has an embedding for each id.
fn check_vocabulary(vocab_size: usize, source: &DataSource) -> Result<()> {
    let model = source.vocab_size.unwrap_or(MAX_VOCAB_SIZE);
    if vocab_size <= model {
        return Ok(());
    }
    let rule = format!(
        "the tokenizer has {vocab_size} entries; set it to {vocab_size} or more (a pretrained embedding gets new rows), lower data.vocab_size if the tokenizer is trained, or use the model's own tokenizer"
    );
    Err(DataError::setting("model.config.vocab_size", model, rule))
}

/// Returns the token that [`Join::EndOfText`] puts between documents. A single document needs no
/// separator.
///
/// # Errors
/// Returns [`DataError::Setting`] if the tokenizer does not have the token.
fn separator<'t>(
    mut texts: impl Iterator<Item = &'t SplitText<'t>>,
    tokenizer: &Tokenizer,
) -> Result<Option<u32>> {
    let is_separated = |text: &&SplitText<'_>| {
        text.documents.join() == Join::EndOfText && text.scan.num_documents > 1
    };
    let Some(text) = texts.find(is_separated) else { return Ok(None) };
    if let Some(id) = tokenizer.end_of_text() {
        return Ok(Some(id));
    }
    let place = tokenizer.path().map(|path| format!(" `{}`", path.display())).unwrap_or_default();
    let rule = format!(
        "{} has {} documents, and the tokenizer{place} names no end-of-text token to put between them (as eos_token in tokenizer_config.json or special_tokens_map.json, or as eos_token_id of its model); set data.eos_token to the token that ends a text, \"</s>\" for example, or set data.join to \"blank_line\" or \"nothing\"",
        text.documents.described(),
        text.scan.num_documents
    );
    Err(DataError::setting("data.join", "\"end_of_text\"", rule))
}

/// Checks the finished splits and reports their sizes.
///
/// # Errors
/// Returns [`DataError::Setting`] if the vocabulary is larger than the model's, and
/// [`DataError::Empty`] if there is no train split.
fn finish(
    [train, eval, test]: [Option<Sequences>; 3],
    tokenizer: Option<Tokenizer>,
    vocab_size: usize,
    source: &DataSource,
) -> Result<Corpus> {
    // For token files, which were not checked before. Text was, before it was tokenized.
    check_vocabulary(vocab_size, source)?;
    let train = train.ok_or_else(|| DataError::Empty { what: "the train split".into() })?;
    let sequences = |part: &Option<Sequences>| part.as_ref().map_or(0, Sequences::len);
    tracing::info!(
        train = train.len(),
        eval = sequences(&eval),
        test = sequences(&test),
        sequence_length = train.sequence_length(),
        vocab_size,
        "data is ready"
    );
    Ok(Corpus { train, eval, test, tokenizer, separator: None, vocab_size })
}

#[cfg(test)]
mod tests {
    mod large_text;
    mod malformed;

    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::{BatchLoader, DataShard, DistributedSampler, Order, TEXT_FIELD};

    const SHARES: Fractions = Fractions { train: 0.8, eval: 0.1, test: 0.1 };
    const TRAIN: TokenizerChoice = TokenizerChoice::Train { vocab_size: 300 };

    fn source(content: Content, sequence_length: usize) -> DataSource {
        DataSource { content, sequence_length, vocab_size: None, token_cache: None }
    }

    fn text(splits: Splits) -> Content {
        let (field, join) = (TEXT_FIELD.into(), Join::EndOfText);
        Content::Text { splits, field, join, tokenizer: TRAIN }
    }

    fn all(sequences: &Sequences) -> Vec<i32> {
        (0..sequences.len()).flat_map(|index| sequences.get(index).unwrap()).collect()
    }

    fn token_file(dir: &Path, name: &str, tokens: impl IntoIterator<Item = u16>) -> PathBuf {
        let path = dir.join(name);
        let bytes: Vec<u8> = tokens.into_iter().flat_map(u16::to_le_bytes).collect();
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn the_synthetic_corpus_trains_its_own_tokenizer() {
        let corpus = SyntheticCorpus { seed: 1, bytes: 50_000 };
        let content = Content::Synthetic { corpus, fractions: SHARES, tokenizer: TRAIN };
        let opened = open(&source(content.clone(), 32)).unwrap();
        let again = open(&source(content, 32)).unwrap();
        assert_eq!(all(&opened.train), all(&again.train));
        assert_eq!(opened.vocab_size, 300);
        let (eval, test) = (opened.eval.unwrap(), opened.test.unwrap());
        assert!(opened.train.len() > 7 * eval.len() && eval.len() > 5 && test.len() > 5);
        let tokenizer = opened.tokenizer.unwrap();
        let ids: Vec<u32> = all(&opened.train).into_iter().map(|id| id as u32).collect();
        let text = tokenizer.decode(&ids, false).unwrap();
        let expected = corpus.documents().unwrap().join("<|endoftext|>");
        assert!(expected.starts_with(&text));
    }

    #[test]
    fn cached_tokens_equal_freshly_encoded_ones() {
        let dir = tempfile::tempdir().unwrap();
        let corpus = SyntheticCorpus { seed: 1, bytes: 50_000 };
        let content = Content::Synthetic { corpus, fractions: SHARES, tokenizer: TRAIN };
        let plain = source(content, 32);
        let cached = DataSource { token_cache: Some(TokenCache::new(dir.path())), ..plain.clone() };
        let expected = all(&open(&plain).unwrap().train);
        for _ in 0..2 {
            assert_eq!(all(&open(&cached).unwrap().train), expected);
            // One file for each split.
            assert_eq!(cached.token_cache.as_ref().unwrap().entries().unwrap().len(), 3);
        }
    }

    #[test]
    fn text_by_share_and_text_by_path_agree() {
        let dir = tempfile::tempdir().unwrap();
        let words = SyntheticCorpus { seed: 2, bytes: 10_000 }.documents().unwrap().concat();
        fs::write(dir.path().join("all.txt"), &words).unwrap();
        let parts = [&words[..8000], &words[8000..9000], &words[9000..]];
        let [train, eval, test] = ["train", "eval", "test"].map(|name| dir.path().join(name));
        for (folder, part) in [&train, &eval, &test].into_iter().zip(parts) {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("part.txt"), part).unwrap();
        }
        let path = dir.path().join("all.txt");
        let by_share =
            open(&source(text(Splits::Shares { files: vec![path], fractions: SHARES }), 16))
                .unwrap();
        let paths =
            Splits::Paths { train: vec![train], eval: Some(vec![eval]), test: Some(vec![test]) };
        let by_path = open(&source(text(paths), 16)).unwrap();
        assert_eq!(all(&by_share.train), all(&by_path.train));
        assert_eq!(all(&by_share.eval.unwrap()), all(&by_path.eval.unwrap()));
        assert_eq!(all(&by_share.test.unwrap()), all(&by_path.test.unwrap()));
    }

    #[test]
    fn a_loaded_tokenizer_is_used_and_must_fit_the_model() {
        let dir = tempfile::tempdir().unwrap();
        let documents = SyntheticCorpus { seed: 3, bytes: 9000 }.documents().unwrap();
        let tokenizer = Tokenizer::train(&documents, 280).unwrap();
        tokenizer.save(dir.path()).unwrap();
        fs::write(dir.path().join("t.txt"), &documents[0]).unwrap();
        let content = Content::Text {
            splits: Splits::all(dir.path().join("t.txt")),
            field: TEXT_FIELD.into(),
            join: Join::EndOfText,
            tokenizer: TokenizerChoice::Loaded(Box::new(Tokenizer::load(dir.path()).unwrap())),
        };
        let opened = open(&source(content.clone(), 8)).unwrap();
        assert_eq!(opened.vocab_size, 280);
        let expected = tokenizer.encode(&documents[0]).unwrap();
        assert!(all(&opened.train).iter().zip(expected).all(|(&id, other)| id as u32 == other));

        let fits = DataSource { vocab_size: Some(280), ..source(content, 8) };
        assert_eq!(open(&fits).unwrap().vocab_size, 280);
        let error = open(&DataSource { vocab_size: Some(279), ..fits }).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("vocab_size = 279: the tokenizer has 280 entries"), "{message}");
    }

    /// A tokenizer of words, without any special token.
    fn words(dir: &Path) -> Tokenizer {
        let json = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
            "decoder": null, "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "one": 1, "two": 2, "end": 3}}}"#;
        fs::write(dir.join("words.json"), json).unwrap();
        Tokenizer::load(&dir.join("words.json")).unwrap()
    }

    /// Without an end-of-text token, documents would silently be joined without a separator.
    #[test]
    fn documents_need_the_token_that_separates_them() {
        let dir = tempfile::tempdir().unwrap();
        let rows = "{\"text\": \"one two\"}\n{\"text\": \"two one\"}\n{\"text\": \"one\"}\n";
        fs::write(dir.path().join("rows.jsonl"), rows).unwrap();
        fs::write(dir.path().join("one.txt"), "one two one two").unwrap();
        let opened = |name: &str, join, tokenizer: Tokenizer| {
            let content = Content::Text {
                splits: Splits::all(dir.path().join(name)),
                field: TEXT_FIELD.into(),
                join,
                tokenizer: TokenizerChoice::Loaded(Box::new(tokenizer)),
            };
            open(&source(content, 2)).map(|corpus| (all(&corpus.train), corpus.separator))
        };
        let tokenizer = || words(dir.path());
        let error = opened("rows.jsonl", Join::EndOfText, tokenizer()).unwrap_err().to_string();
        for part in [
            "data.join = \"end_of_text\"",
            "3 documents",
            "words.json",
            "data.eos_token",
            "\"nothing\"",
        ] {
            assert!(error.contains(part), "{error}");
        }
        let named = tokenizer().with_end_of_text("end").unwrap();
        let with_end = (vec![1, 2, 3, 2, 1, 3], Some(3));
        assert_eq!(opened("rows.jsonl", Join::EndOfText, named).unwrap(), with_end);
        for join in [Join::Nothing, Join::BlankLine] {
            let opened = opened("rows.jsonl", join, tokenizer()).unwrap();
            assert_eq!(opened, (vec![1, 2, 2, 1], None));
        }
        // A single document has nothing to be separated from.
        let opened = opened("one.txt", Join::EndOfText, tokenizer()).unwrap();
        assert_eq!(opened, (vec![1, 2, 1, 2], None));
    }

    #[test]
    fn token_files_by_share_and_by_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = token_file(dir.path(), "all.bin", 0..100);
        let eval = token_file(dir.path(), "eval.bin", 200..220);
        let shares = Splits::Shares { files: vec![path.clone()], fractions: SHARES };
        let tokens = |splits| source(Content::Tokens { splits, tokenizer: None }, 10);
        let opened = open(&tokens(shares)).unwrap();
        assert_eq!((opened.vocab_size, opened.train.len()), (100, 8));
        assert_eq!(opened.test.unwrap().get(0).unwrap()[0], 90);

        let paths = Splits::Paths { train: vec![path], eval: Some(vec![eval]), test: None };
        let opened = open(&tokens(paths.clone())).unwrap();
        assert_eq!((opened.vocab_size, opened.train.len()), (220, 10));
        assert_eq!(opened.eval.unwrap().get(1).unwrap()[9], 219);
        let known = DataSource { vocab_size: Some(512), ..tokens(paths) };
        assert_eq!(open(&known).unwrap().vocab_size, 512);
    }

    /// Reading beyond the end of a mapped file would end the process with a signal.
    #[test]
    fn a_token_file_truncated_while_training_is_an_error_of_the_loader() {
        let dir = tempfile::tempdir().unwrap();
        let path = token_file(dir.path(), "t.bin", 0..4000);
        let splits = Splits::all(path.clone());
        let opened = open(&source(Content::Tokens { splits, tokenizer: None }, 1000)).unwrap();
        let sampler = DistributedSampler::new(4, DataShard::WHOLE, Order::Sequential).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
        let mut loader = BatchLoader::start(opened.train, sampler, 1, 1).unwrap();
        let message = loader.next_batch().unwrap_err().to_string();
        assert!(message.contains("t.bin` was modified while it was in use"), "{message}");
    }

    #[test]
    fn token_ids_must_be_in_the_vocabulary() {
        let dir = tempfile::tempdir().unwrap();
        Tokenizer::train(&["x"], 257).unwrap().save(dir.path()).unwrap();
        let open_with = |largest| {
            let splits = Splits::all(token_file(dir.path(), "t.bin", [1, 2, 3, largest]));
            let tokenizer = Some(Box::new(Tokenizer::load(dir.path()).unwrap()));
            open(&DataSource {
                vocab_size: Some(512),
                ..source(Content::Tokens { splits, tokenizer }, 2)
            })
        };
        let opened = open_with(256).unwrap();
        assert_eq!((opened.vocab_size, opened.tokenizer.is_some()), (257, true));
        let error = open_with(300).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("token 3, but the vocabulary has 257"), "{message}");
    }

    /// The 40,000 tokens of a DeepSpeed reference run, in sequences of 32 tokens.
    #[test]
    fn the_tokens_of_the_reference_run() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let path = root.join("crates/deepburn-cli/tests/data/tokens.bin");
        let content = Content::Tokens { splits: Splits::all(path), tokenizer: None };
        let opened = open(&DataSource { vocab_size: Some(512), ..source(content, 32) }).unwrap();
        assert_eq!((opened.train.len(), opened.train.get(0).unwrap()[0]), (1250, 3));
    }
}
