//! What can be wrong with data, said once and in full.
//!
//! Every message names the file or setting, the value found, the rule it breaks and the remedy,
//! so that a program can print it as it is. Settings are named by their place in a job file
//! (`data.sequence_length`).

use std::io;
use std::path::PathBuf;

/// An error in the data, in a setting that describes it, or in the thread that reads it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder could not be read.
    #[error("cannot read `{}`: {cause}; check the path and its permissions", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        cause: io::Error,
    },
    /// A file could not be written.
    #[error("cannot write `{}`: {cause}; check that the folder exists, is writable and has space", path.display())]
    Unwritable {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        cause: io::Error,
    },
    /// The name of a token file does not say how wide its tokens are.
    #[error("`{}` is not a token file: the name must end in `.bin` (little-endian u16) or `.u32.bin` (little-endian u32); rename it, or set data.kind to \"text\"", path.display())]
    TokenFileName {
        /// The file.
        path: PathBuf,
    },
    /// The size of a token file is no multiple of the token width.
    #[error("token file `{}` has {bytes} bytes, which is no multiple of the {width} bytes of a token; it is truncated, or its name says the wrong width (`.bin` is u16, `.u32.bin` is u32)", path.display())]
    RaggedTokenFile {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
        /// Bytes per token.
        width: usize,
    },
    /// A token file holds an id that the vocabulary does not have.
    #[error("token file `{}` has id {id} at token {position}, but the vocabulary has {vocab_size} entries (0..={}); tokenize with the model's tokenizer, or raise model.config.vocab_size", path.display(), vocab_size.saturating_sub(1))]
    OutOfVocabulary {
        /// The file.
        path: PathBuf,
        /// Index of the first offending token.
        position: usize,
        /// The id found there.
        id: u32,
        /// Number of ids that are allowed.
        vocab_size: usize,
    },
    /// There is nothing in a file, a folder or a text.
    #[error(
        "{what} is empty; it must hold at least one sequence of tokens: give it more data, or a larger share in data.splits"
    )]
    Empty {
        /// The file, folder or split.
        what: String,
    },
    /// A token stream does not fill a single sequence.
    #[error(
        "{what} has {tokens} tokens, fewer than one sequence of data.sequence_length = {sequence_length}; give it more data or lower data.sequence_length"
    )]
    TooShort {
        /// The file or split.
        what: String,
        /// Its length.
        tokens: usize,
        /// Tokens per sequence.
        sequence_length: usize,
    },
    /// A sequence length with which no next token can be predicted.
    #[error(
        "data.sequence_length = {value}: a language model predicts each token from those before it, so a sequence needs at least 2 tokens; set it to 2 or more"
    )]
    SequenceLength {
        /// The length asked for.
        value: usize,
    },
    /// A folder has no text in it.
    #[error("folder `{}` has no .txt or .jsonl file, in any subfolder; data.path must name such a file or a folder of them", path.display())]
    NoTextFiles {
        /// The folder.
        path: PathBuf,
    },
    /// A file is neither `.txt` nor `.jsonl`.
    #[error("`{}` is not a text file this reader knows: data.kind \"text\" reads .txt (one document) and .jsonl (one document a line); convert or rename it", path.display())]
    UnknownTextFile {
        /// The file.
        path: PathBuf,
    },
    /// A text file is not UTF-8.
    #[error("`{}` is not UTF-8: invalid byte at offset {offset}; convert it, for example with `iconv -t UTF-8`", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first byte that is not part of a valid character.
        offset: usize,
    },
    /// A line of a `.jsonl` file is not an object with the text in it.
    #[error("`{}` line {line}: {reason}; each line must be a JSON object with a string field `{field}`", path.display())]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
        /// The field looked for.
        field: String,
    },
    /// A folder holds no tokenizer.
    #[error("`{}` holds no tokenizer: expected tokenizer.json, or vocab.json together with merges.txt; set data.tokenizer to such a folder, to a tokenizer.json, or to null to train one", path.display())]
    NoTokenizer {
        /// The folder.
        path: PathBuf,
    },
    /// Tokenizer files that cannot be used.
    #[error("tokenizer `{}` cannot be loaded: {reason}; data.tokenizer must be in the format of the `tokenizers` library", path.display())]
    InvalidTokenizer {
        /// The file or folder.
        path: PathBuf,
        /// What the reader said.
        reason: String,
    },
    /// A tokenizer could not be trained, run or rendered.
    #[error("tokenizer failed while {doing}: {reason}")]
    Tokenizer {
        /// The step that failed.
        doing: &'static str,
        /// What the library said.
        reason: String,
    },
    /// A vocabulary too small for a byte-level tokenizer.
    #[error(
        "data.vocab_size = {value}: a byte-level vocabulary holds 256 bytes and the end-of-text token; set it to {minimum} or more"
    )]
    SmallVocabulary {
        /// The size asked for.
        value: usize,
        /// The least possible.
        minimum: usize,
    },
    /// The tokenizer has ids that the model cannot embed.
    #[error(
        "the tokenizer has {tokenizer} entries, the model's vocabulary {model}; set model.config.vocab_size to {tokenizer} or more, or use the model's own tokenizer"
    )]
    LargeTokenizer {
        /// Entries of the tokenizer.
        tokenizer: usize,
        /// Entries of the model's embedding.
        model: usize,
    },
    /// Shares of a corpus that make no sense.
    #[error("data.splits: {name} = {value}: {rule}")]
    Fraction {
        /// `train`, `eval`, `test` or their sum.
        name: &'static str,
        /// The share.
        value: f64,
        /// The rule it breaks.
        rule: &'static str,
    },
    /// More ranks than samples, so that some rank would have nothing to do.
    #[error(
        "{samples} training sequences cannot feed {num_ranks} ranks, each needs at least one; give more data, lower data.sequence_length, or use at most {samples} ranks"
    )]
    FewerSamplesThanRanks {
        /// Samples there are.
        samples: usize,
        /// Ranks to feed.
        num_ranks: usize,
    },
    /// A rank that its group does not have.
    #[error(
        "rank {rank} is not in a group of {num_ranks}; ranks count from 0 and a group has at least one"
    )]
    Rank {
        /// The rank.
        rank: usize,
        /// The size of the group.
        num_ranks: usize,
    },
    /// A position no sampler could have been at.
    #[error(
        "data position {{ drawn: {drawn}, num_ranks: {num_ranks} }} is not one a sampler can have; the checkpoint is damaged"
    )]
    Position {
        /// Samples drawn per rank.
        drawn: u64,
        /// Ranks when it was taken.
        num_ranks: u64,
    },
    /// A position that its epoch does not have.
    #[error(
        "data position: {samples} samples in {batches} batches a rank of epoch {epoch} with {num_samples} samples is not a place between two batches; the checkpoint is damaged, or data, seed or dynamic_batching have changed since"
    )]
    EpochPosition {
        /// The epoch, from 0.
        epoch: u64,
        /// Batches drawn of it by each rank.
        batches: u64,
        /// Samples drawn of it by all ranks.
        samples: u64,
        /// Samples it has.
        num_samples: usize,
    },
    /// A sample that does not fit the token budget of a batch.
    #[error(
        "sample {sample} has {length} tokens, more than a whole batch of dynamic_batching.max_tokens = {max_tokens}; raise max_tokens to {length} or more, or truncate samples where they are read"
    )]
    OverBudget {
        /// Index of the first such sample.
        sample: usize,
        /// Its tokens.
        length: usize,
        /// The budget.
        max_tokens: usize,
    },
    /// A token budget that does not hold the smallest batch.
    #[error(
        "dynamic_batching.max_tokens = {max_tokens} is too small for batches of dynamic_batching.min_batch_size: {min_batch_size} samples of {longest} tokens, the longest there is; raise max_tokens, lower min_batch_size, or truncate samples"
    )]
    SmallBudget {
        /// The budget.
        max_tokens: usize,
        /// Fewest rows of a batch.
        min_batch_size: usize,
        /// Tokens of the longest sample.
        longest: usize,
    },
    /// A count that must not be zero.
    #[error("{name} = 0; set it to at least 1")]
    Zero {
        /// The setting.
        name: &'static str,
    },
    /// A value outside of what a generator can do.
    #[error("{name} = {value}: {rule}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// The rule it breaks and the remedy.
        rule: &'static str,
    },
    /// The loader's thread could not be started.
    #[error("the data loader's thread could not be started: {cause}")]
    LoaderThread {
        /// What the operating system said.
        cause: io::Error,
    },
    /// The loader's thread ended by a panic.
    #[error("the data loader's thread panicked: {message}")]
    LoaderPanicked {
        /// The panic's message.
        message: String,
    },
    /// A batch was asked of a loader that has already failed.
    #[error("the data loader has stopped after an earlier error; start it anew")]
    LoaderStopped,
}

impl DataError {
    /// Names the path that could not be read; for `map_err`.
    pub(crate) fn unreadable(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Unreadable { path, cause }
    }

    /// Names the path that could not be written; for `map_err`.
    pub(crate) fn unwritable(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Unwritable { path, cause }
    }
}
