//! Token sequences for language models.
//!
//! Text is tokenized, joined and packed into sequences of `data.sequence_length` tokens. Token
//! files are split in the same way. A job without data can train on a synthetic corpus.

use std::collections::BTreeSet;
use std::path::PathBuf;

use deepburn_config::{DataJob, DataKind, Job, SplitPlan, counted};
use deepburn_datasets::{
    Content, Corpus, DataError, DataSource, Fractions, Join, Splits, SyntheticCorpus, TEXT_FIELD,
    TokenCache, Tokenizer, TokenizerChoice, is_plain_text, open, skipped_files, text_files,
};

use crate::data::places::Places;

/// Bytes of the synthetic corpus. They are enough for any run on a few cores and generated in a
/// moment.
const SYNTHETIC_BYTES: usize = 2 << 20;

/// Opens the data of `job` with its `tokenizer`; without one, a tokenizer is trained on text.
/// `vocab_size` is the vocabulary size of the model, if it is known.
///
/// Tokenized text is stored in the token cache of the user, under a hash of the text and the
/// tokenizer. Other processes of the host, and later runs, read it from there instead of tokenizing
/// again.
///
/// # Errors
/// Returns an error if the data is invalid.
pub(crate) fn open_corpus(
    job: &Job,
    places: &Places,
    tokenizer: Option<Tokenizer>,
    vocab_size: Option<usize>,
) -> Result<Corpus, DataError> {
    let data = &job.data;
    let tokenizer = tokenizer.map(Box::new);
    let or_trained = |tokenizer: Option<Box<Tokenizer>>| match tokenizer {
        Some(tokenizer) => TokenizerChoice::Loaded(tokenizer),
        None => TokenizerChoice::Train { vocab_size: data.vocab_size },
    };
    let content = match (&data.kind, &data.splits) {
        (DataKind::Tokens, _) => Content::Tokens { splits: files(data, places)?, tokenizer },
        (DataKind::Text { text_field, join }, _) => Content::Text {
            splits: files(data, places)?,
            field: text_field.clone(),
            join: match join {
                deepburn_config::Join::EndOfText => Join::EndOfText,
                deepburn_config::Join::BlankLine => Join::BlankLine,
                deepburn_config::Join::Nothing => Join::Nothing,
            },
            tokenizer: or_trained(tokenizer),
        },
        (
            DataKind::Synthetic
            | DataKind::Classification { .. }
            | DataKind::Chat(_)
            | DataKind::Preference(_),
            splits,
        ) => Content::Synthetic {
            corpus: SyntheticCorpus { seed: job.training.seed, bytes: SYNTHETIC_BYTES },
            fractions: match splits {
                SplitPlan::Shares { train, eval, test, .. } => {
                    Fractions { train: *train, eval: *eval, test: *test }
                }
                SplitPlan::Named { .. } | SplitPlan::Paths { .. } => Fractions::ALL,
            },
            tokenizer: or_trained(tokenizer),
        },
    };
    open(&DataSource {
        content,
        sequence_length: data.sequence_length,
        vocab_size,
        token_cache: token_cache(data),
    })
}

/// Returns the token cache of this job. Synthetic text is not cached, because reading it would take
/// as long as generating it again.
pub(crate) fn token_cache(data: &DataJob) -> Option<TokenCache> {
    // `None` also if the user has no home folder.
    let kept = data.token_cache && !data.splits.is_embedded();
    kept.then(TokenCache::of_user).flatten()
}

/// Returns the files of each split, or all files with the fractions of the splits.
///
/// A job defines its splits as names of splits in a data set, as files, or as fractions of its
/// data. Language models and classifiers use the same rules.
///
/// # Errors
/// Returns an error if a file cannot be downloaded from the Hub, or if the data set does not have a
/// split.
pub(crate) fn files(data: &DataJob, places: &Places) -> Result<Splits, DataError> {
    let name = data.name.as_deref();
    let splits = match &data.splits {
        SplitPlan::Shares { path, train, eval, test } => Splits::Shares {
            files: match path {
                Some(path) => places.whole(path, name)?,
                None => Vec::new(),
            },
            fractions: Fractions { train: *train, eval: *eval, test: *test },
        },
        SplitPlan::Named { path, train, eval, test, .. } => {
            let split = |split: &String| places.split(path, name, split);
            Splits::Paths {
                train: split(train)?,
                eval: eval.as_ref().map(split).transpose()?,
                test: test.as_ref().map(split).transpose()?,
            }
        }
        SplitPlan::Paths { train, eval, test, .. } => {
            let files = |path: &Option<PathBuf>| path.clone().map(|path| vec![path]);
            Splits::Paths { train: vec![train.clone()], eval: files(eval), test: files(test) }
        }
    };
    // None of the notes apply to token files.
    if !matches!(data.kind, DataKind::Tokens) {
        note_files(&data.kind, &splits)?;
    }
    Ok(splits)
}

/// Warns of files that are not read or are empty, because nothing else shows that they are missing
/// from the data, and of a text field where no file has fields.
///
/// # Errors
/// Returns an error if a folder cannot be read.
fn note_files(kind: &DataKind, splits: &Splits) -> Result<(), DataError> {
    let paths: BTreeSet<&PathBuf> = match splits {
        Splits::Shares { files, .. } => files.iter().collect(),
        Splits::Paths { train, eval, test } => {
            train.iter().chain(eval.iter().flatten()).chain(test.iter().flatten()).collect()
        }
    };
    let mut texts = Vec::new();
    for path in paths {
        texts.extend(text_files(path)?);
        if path.is_dir() {
            let not_read =
                "contain no text in a supported format, are hidden or are links to folders";
            warn_of(&skipped_files(path)?, &format!("not read, because they {not_read}"));
        }
    }
    // Files of texts for a language model are named when they are read, because a compressed file
    // may be empty too.
    let is_empty = |file: &&PathBuf| {
        let bytes = file.metadata().map(|metadata| metadata.len());
        matches!(kind, DataKind::Classification { .. }) && bytes.is_ok_and(|bytes| bytes == 0)
    };
    let empty: Vec<PathBuf> = texts.iter().filter(is_empty).cloned().collect();
    warn_of(&empty, "empty");
    if let (DataKind::Text { text_field, .. }, Some(first)) = (kind, texts.first())
        && text_field != TEXT_FIELD
        && texts.iter().all(|file| is_plain_text(file))
    {
        tracing::warn!(
            "data.text_field: \"{text_field}\" has no effect, because all files are plain text without fields, such as {}; \
             remove it",
            first.display()
        );
    }
    Ok(())
}

/// Warns that data files are `state`, if there are some.
fn warn_of(files: &[PathBuf], state: &str) {
    if let Some(first) = files.first() {
        let count = counted(files.len(), "file");
        tracing::warn!("data files that are {state}: {count}, such as {}", first.display());
    }
}
