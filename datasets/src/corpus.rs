//! From a description of the data to sequences ready for training: [`open`].
//!
//! A [`DataSource`] says what there is and how it is cut; a [`Corpus`] has the splits, the
//! tokenizer they were made with and the vocabulary an embedding needs. Cheap checks come first,
//! so that a wrong sequence length is reported before a large corpus is read. The tokenizer is
//! trained on the train split alone: evaluation text must not shape what is evaluated.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::tokens::documents::{Documents, Survey};
use crate::tokens::encoder::encode_range;
use crate::tokens::token_file::MAX_VOCAB_SIZE;
use crate::tokens::tokenizer::TRAINING_BYTES;
use crate::{
    DataError, Fractions, Join, MarkovCorpus, Packing, Sequences, Splits, SyntheticCorpus,
    TokenCache, TokenFile, TokenStream, Tokenizer,
};

/// What the data is and where it lies.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Raw token files.
    Tokens {
        /// The files of the splits.
        splits: Splits,
        /// The tokenizer the tokens were made with, if it is to travel with the model.
        tokenizer: Option<PathBuf>,
    },
    /// Text files.
    Text {
        /// The files or folders of the splits.
        splits: Splits,
        /// Field of a row that holds its text, usually [`crate::TEXT_FIELD`].
        field: String,
        /// What stands between documents.
        join: Join,
        /// What turns it into tokens.
        tokenizer: TokenizerChoice,
    },
    /// Stories written on the spot.
    Synthetic {
        /// Seed and size.
        corpus: SyntheticCorpus,
        /// Shares of the splits.
        fractions: Fractions,
        /// What turns it into tokens.
        tokenizer: TokenizerChoice,
    },
    /// A Markov chain's tokens.
    Markov {
        /// The chain.
        corpus: MarkovCorpus,
        /// Shares of the splits.
        fractions: Fractions,
    },
}

/// Where the tokenizer comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// A folder or a `tokenizer.json`, see [`Tokenizer::load`].
    Load(PathBuf),
    /// Trained on the train split, see [`Tokenizer::train`].
    Train {
        /// Entries at most, at least 257.
        vocab_size: usize,
    },
}

/// Data and how it is cut.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSource {
    /// What the data is.
    pub content: Content,
    /// How tokens become sequences.
    pub packing: Packing,
    /// Entries of the model's vocabulary, where they are already known. No id may reach it.
    pub vocab_size: Option<usize>,
    /// Where the tokens of text are kept for the next run.
    pub token_cache: Option<TokenCache>,
}

/// Data that is ready to be sampled.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// What trains.
    pub train: Sequences,
    /// What evaluates during training.
    pub eval: Option<Sequences>,
    /// What is kept for a final test.
    pub test: Option<Sequences>,
    /// What the tokens were made with, where it is known.
    pub tokenizer: Option<Tokenizer>,
    /// Entries a model must embed: those of the tokenizer; for bare tokens the source's
    /// `vocab_size`, or the largest id plus one over all splits.
    pub vocab_size: usize,
}

/// The text of a split.
struct Text<'a> {
    name: &'static str,
    documents: Documents<'a>,
    survey: Arc<Survey>,
    /// The characters of the documents that are in the split.
    range: Range<usize>,
}

/// Reads, tokenizes and cuts what `source` describes. The result depends on the source and its
/// files alone.
///
/// # Errors
/// What is wrong with a setting or with the data, see [`DataError`].
pub fn open(source: &DataSource) -> Result<Corpus, DataError> {
    let packing = source.packing.validate()?;
    if source.vocab_size == Some(0) {
        return Err(DataError::Zero { name: "model.config.vocab_size" });
    }
    match &source.content {
        Content::Tokens { splits, tokenizer } => open_tokens(splits, tokenizer.as_deref(), source),
        Content::Text { splits, field, join, tokenizer } => {
            open_text(splits, (field, *join), tokenizer, source)
        }
        Content::Synthetic { corpus, fractions, tokenizer } => {
            let documents = corpus.documents()?;
            let documents = Documents::Memory { documents: &documents, join: Join::EndOfText };
            tokenize(divide(documents, *fractions, tokenizer)?, tokenizer, source)
        }
        Content::Markov { corpus, fractions } => {
            let tokens = TokenStream::Owned(corpus.generate()?);
            let what = "the synthetic corpus";
            let all = Sequences::pack(tokens, packing, what)?;
            finish(all.split(*fractions, what)?, None, corpus.vocab_size, source)
        }
    }
}

fn open_text(
    splits: &Splits,
    (field, join): (&str, Join),
    choice: &TokenizerChoice,
    source: &DataSource,
) -> Result<Corpus, DataError> {
    match splits {
        Splits::Shares { files, fractions } => {
            fractions.validate()?;
            let documents = Documents::Files { files, field, join };
            tokenize(divide(documents, *fractions, choice)?, choice, source)
        }
        Splits::Paths { train, eval, test } => {
            let part = |name, files: &Vec<PathBuf>, choice: Option<&TokenizerChoice>| {
                let documents = Documents::Files { files, field, join };
                let survey = documents.survey(choice.map_or(0, sample_bytes))?;
                Ok::<_, DataError>((name, Arc::new(survey)))
            };
            let surveys = [
                Some(part("train", train, Some(choice))?),
                eval.as_ref().map(|files| part("eval", files, None)).transpose()?,
                test.as_ref().map(|files| part("test", files, None)).transpose()?,
            ];
            let files = [Some(train), eval.as_ref(), test.as_ref()];
            let parts = std::array::from_fn(|at| {
                let (files, (name, survey)) = (files[at]?, surveys[at].as_ref()?);
                let documents = Documents::Files { files, field, join };
                Some(Text { name, documents, survey: survey.clone(), range: 0..usize::MAX })
            });
            tokenize(parts, choice, source)
        }
    }
}

/// The one file of a split of tokens.
fn single(files: &[PathBuf]) -> Result<&Path, DataError> {
    match files {
        [file] => Ok(file),
        _ => Err(DataError::ManyTokenFiles { files: files.len() }),
    }
}

fn open_tokens(
    splits: &Splits,
    tokenizer: Option<&Path>,
    source: &DataSource,
) -> Result<Corpus, DataError> {
    let tokenizer = tokenizer.map(Tokenizer::load).transpose()?;
    let entries = tokenizer.as_ref().map(Tokenizer::vocab_size);
    // Ids that the model can embed may still be more than the tokenizer can spell.
    let limit = entries.into_iter().chain(source.vocab_size).min();
    let mut largest = 0;
    let mut pack = |path: &Path| {
        let file = TokenFile::open(path, limit)?;
        if limit.is_none() {
            largest = largest.max(file.largest_id()?);
        }
        let what = format!("`{}`", path.display());
        Ok((Sequences::pack(TokenStream::File(file), source.packing, &what)?, what))
    };
    let parts = match splits {
        Splits::Shares { files, fractions } => {
            fractions.validate()?;
            let (all, what) = pack(single(files)?)?;
            all.split(*fractions, &what)?
        }
        Splits::Paths { train, eval, test } => {
            let mut part = |files: Option<&Vec<PathBuf>>| {
                files.map(|files| Ok::<_, DataError>(pack(single(files)?)?.0)).transpose()
            };
            [part(Some(train))?, part(eval.as_ref())?, part(test.as_ref())?]
        }
    };
    let vocab_size = entries.or(source.vocab_size).unwrap_or(largest as usize + 1);
    finish(parts, tokenizer, vocab_size, source)
}

/// Bytes of a text that are kept to train a tokenizer on.
fn sample_bytes(choice: &TokenizerChoice) -> usize {
    match choice {
        TokenizerChoice::Load(_) => 0,
        // The trainer finishes the chunk in which it has enough.
        TokenizerChoice::Train { .. } => TRAINING_BYTES + (1 << 20),
    }
}

/// Cuts documents by share of their characters. A document that straddles a cut is divided.
fn divide<'a>(
    documents: Documents<'a>,
    fractions: Fractions,
    choice: &TokenizerChoice,
) -> Result<[Option<Text<'a>>; 3], DataError> {
    let survey = Arc::new(documents.survey(sample_bytes(choice))?);
    let parts = fractions.cut(survey.num_chars)?;
    Ok(parts.map(|part| {
        let (name, range) = part?;
        Some(Text { name, documents, survey: survey.clone(), range })
    }))
}

/// The sample of the train split: what was kept of it, up to its last character.
fn sample<'t>(train: &'t Text<'_>) -> Vec<&'t str> {
    let mut rest = train.range.len();
    let documents = train.survey.sample.iter().map(|document| {
        let end = document.char_indices().nth(rest).map_or(document.len(), |(at, _)| at);
        rest -= document[..end].chars().count();
        &document[..end]
    });
    documents.take_while(|document| !document.is_empty()).collect()
}

fn tokenize(
    texts: [Option<Text<'_>>; 3],
    choice: &TokenizerChoice,
    source: &DataSource,
) -> Result<Corpus, DataError> {
    let tokenizer = match (choice, &texts[0]) {
        (TokenizerChoice::Load(path), _) => Tokenizer::load(path)?,
        (TokenizerChoice::Train { vocab_size }, Some(train)) => {
            let tokenizer = Tokenizer::train(&sample(train), *vocab_size)?;
            tracing::info!(vocab_size = tokenizer.vocab_size(), "trained a tokenizer");
            tokenizer
        }
        (TokenizerChoice::Train { vocab_size }, None) => {
            Tokenizer::train::<&str>(&[], *vocab_size)?
        }
    };
    let vocab_size = tokenizer.vocab_size();
    check_vocabulary(vocab_size, source)?;
    let mut parts = [None, None, None];
    for (part, text) in parts.iter_mut().zip(texts) {
        let Some(Text { name, documents, survey, range }) = text else { continue };
        let tokens = match &source.token_cache {
            Some(cache) => cache.stream(&tokenizer, documents, &survey, range)?,
            None => {
                let mut tokens = Vec::new();
                encode_range(&tokenizer, documents, &survey, range, &mut |more| {
                    tokens.extend_from_slice(more);
                    Ok(())
                })?;
                TokenStream::Owned(tokens)
            }
        };
        let what = format!("the {name} split");
        *part = Some(Sequences::pack(tokens, source.packing, &what)?);
    }
    finish(parts, Some(tokenizer), vocab_size, source)
}

/// The model, where it is known, must have a row for each id.
fn check_vocabulary(vocab_size: usize, source: &DataSource) -> Result<(), DataError> {
    let model = source.vocab_size.unwrap_or(MAX_VOCAB_SIZE);
    match vocab_size > model {
        true => Err(DataError::LargeTokenizer { tokenizer: vocab_size, model }),
        false => Ok(()),
    }
}

fn finish(
    [train, eval, test]: [Option<Sequences>; 3],
    tokenizer: Option<Tokenizer>,
    vocab_size: usize,
    source: &DataSource,
) -> Result<Corpus, DataError> {
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
    Ok(Corpus { train, eval, test, tokenizer, vocab_size })
}

#[cfg(test)]
mod large_text;
#[cfg(test)]
mod malformed;
#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{BatchLoader, DistributedSampler, Order, Shard, TEXT_FIELD};

    const SHARES: Fractions = Fractions { train: 0.8, eval: 0.1, test: 0.1 };
    const TRAIN: TokenizerChoice = TokenizerChoice::Train { vocab_size: 300 };

    fn source(content: Content, sequence_length: usize) -> DataSource {
        let packing = Packing::drop_rest(sequence_length);
        DataSource { content, packing, vocab_size: None, token_cache: None }
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
    fn cached_tokens_are_those_of_the_text() {
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
            tokenizer: TokenizerChoice::Load(dir.path().into()),
        };
        let opened = open(&source(content.clone(), 8)).unwrap();
        assert_eq!(opened.vocab_size, 280);
        let expected = tokenizer.encode(&documents[0]).unwrap();
        assert!(all(&opened.train).iter().zip(expected).all(|(&id, other)| id as u32 == other));

        let fits = DataSource { vocab_size: Some(280), ..source(content, 8) };
        assert_eq!(open(&fits).unwrap().vocab_size, 280);
        let error = open(&DataSource { vocab_size: Some(279), ..fits }).unwrap_err();
        assert!(matches!(error, DataError::LargeTokenizer { tokenizer: 280, model: 279 }));
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
        let sampler = DistributedSampler::new(4, Shard::WHOLE, Order::Sequential).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
        let mut loader = BatchLoader::start(opened.train, sampler, 1, 1).unwrap();
        let message = loader.next_batch().unwrap_err().to_string();
        assert!(message.contains("t.bin` was written to while it was in use"), "{message}");
    }

    #[test]
    fn tokens_must_be_those_of_their_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        Tokenizer::train(&["x"], 257).unwrap().save(dir.path()).unwrap();
        let open_with = |largest| {
            let splits = Splits::all(token_file(dir.path(), "t.bin", [1, 2, 3, largest]));
            let tokenizer = Some(dir.path().to_owned());
            open(&DataSource {
                vocab_size: Some(512),
                ..source(Content::Tokens { splits, tokenizer }, 2)
            })
        };
        let opened = open_with(256).unwrap();
        assert_eq!((opened.vocab_size, opened.tokenizer.is_some()), (257, true));
        let error = open_with(300).unwrap_err();
        assert!(matches!(error, DataError::OutOfVocabulary { position: 3, vocab_size: 257, .. }));
    }

    #[test]
    fn the_markov_corpus_needs_no_files() {
        let corpus = MarkovCorpus::new(1000, 4);
        let opened = open(&source(Content::Markov { corpus, fractions: SHARES }, 10)).unwrap();
        assert_eq!((opened.train.len(), opened.vocab_size), (80, 512));
        assert!(opened.tokenizer.is_none());
        let [train, rest] = [opened.train, opened.eval.unwrap()].map(|part| all(&part));
        assert!(
            corpus
                .generate()
                .unwrap()
                .iter()
                .map(|&id| id as i32)
                .eq(train.into_iter().chain(rest).chain(all(&opened.test.unwrap())))
        );
    }

    /// Where a reference run's data is beside the checkout: 40,000 tokens cut by 32.
    #[test]
    fn the_tokens_of_the_reference_run() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/tokens.bin");
        if !path.exists() {
            return;
        }
        let content = Content::Tokens { splits: Splits::all(path), tokenizer: None };
        let opened = open(&DataSource { vocab_size: Some(512), ..source(content, 32) }).unwrap();
        assert_eq!((opened.train.len(), opened.train.get(0).unwrap()[0]), (1250, 3));
    }
}
