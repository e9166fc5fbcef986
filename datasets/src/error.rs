//! What can be wrong with data, said once and in full.
//!
//! Every message names the file or setting, the value found, the rule it breaks and the remedy,
//! so that a program can print it as it is. Settings are named by their place in a job file
//! (`data.sequence_length`).

use std::io;
use std::path::{Path, PathBuf};

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
    /// A token file that was written to while it was in use.
    #[error("token file `{}` was written to while it was in use, so its tokens may be others than those that training began with; restore the file as it was, and resume", path.display())]
    ChangedTokenFile {
        /// The file.
        path: PathBuf,
    },
    /// A token file that became shorter while it was in use.
    #[error("token file `{}` became shorter while it was in use: it has {found} bytes, and {expected} when it was opened; the {length} bytes at offset {offset} cannot be read; restore the file as it was, and resume", path.display())]
    ShortenedTokenFile {
        /// The file.
        path: PathBuf,
        /// Its size now.
        found: u64,
        /// Its size when it was opened.
        expected: u64,
        /// Where in the file was to be read.
        offset: u64,
        /// How many bytes were to be read there.
        length: usize,
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
    #[error("folder `{}` has no .txt, .jsonl, .csv or .parquet file, in any subfolder; data.path must name such a file or a folder of them", path.display())]
    NoTextFiles {
        /// The folder.
        path: PathBuf,
    },
    /// A file whose name ends in none of the formats that are read.
    #[error("`{}` is not a text file this reader knows: data.kind \"text\" reads .txt (one document), .jsonl (one document a line), .csv and .parquet (one document a row); convert or rename it", path.display())]
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
    /// A text that changed between two readings of it.
    #[error("{what} changed while it was read; start the run again when nothing writes to it")]
    ChangedText {
        /// The files.
        what: String,
    },
    /// A line of a `.jsonl` file is not an object with the fields asked for.
    #[error("`{}` line {line}: {reason}; each line must be a JSON object with the fields that data.text_field and data.label_field name", path.display())]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A `.csv` file that breaks the format.
    #[error("`{}` cannot be read as CSV: {reason}; each row needs as many fields as the first line has names, in UTF-8, with quotes around fields that hold commas or line ends", path.display())]
    InvalidCsv {
        /// The file.
        path: PathBuf,
        /// What the reader said, with the place.
        reason: String,
    },
    /// A `.parquet` file that is damaged, or none.
    #[error("`{}` cannot be read as parquet: {reason}; fetch the file again, or write it anew with snappy, zstd or no compression", path.display())]
    InvalidParquet {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        reason: String,
    },
    /// A table without a column that is asked for.
    #[error("`{}` has no column `{column}`, only {columns}; name the right one: data.text_field or data.label_field, in `deepburn predict` --text-field, --label-field or --keep", path.display())]
    NoColumn {
        /// The file.
        path: PathBuf,
        /// The column looked for.
        column: String,
        /// The first columns there are.
        columns: String,
    },
    /// A value that a column must not have.
    #[error("`{}` {place}: {reason}; text must be a string and a label a class number from 0 or a name: mend or leave out the row, or name another column in data.text_field or data.label_field", path.display())]
    Cell {
        /// The file.
        path: PathBuf,
        /// The row or line, from 1.
        place: String,
        /// The column and what is wrong with its value.
        reason: String,
    },
    /// A file without columns where labels are needed.
    #[error("`{}` is plain text and has no labels; classification reads .parquet, .csv and .jsonl with a text and a label column", path.display())]
    NoTable {
        /// The file.
        path: PathBuf,
    },
    /// More than one token file for a split.
    #[error(
        "data.splits: {files} token files for one split; tokens are read from one file a split: concatenate them"
    )]
    ManyTokenFiles {
        /// How many.
        files: usize,
    },
    /// A server that does not answer.
    #[error(
        "cannot fetch `{url}`: {reason}; check the network and HF_ENDPOINT, or give the path of a local copy"
    )]
    Unreachable {
        /// What was asked for.
        url: String,
        /// What went wrong last.
        reason: String,
    },
    /// A server that answers, but not with what was asked for.
    #[error(
        "cannot fetch `{url}`: {reason}; check the id, the revision and HF_ENDPOINT, or give the path of a local copy"
    )]
    Hub {
        /// What was asked for.
        url: String,
        /// What it answered.
        reason: String,
    },
    /// Contents that are not those the Hub announced; nothing of them is kept.
    #[error(
        "`{url}` is damaged: its contents have {found}, announced is {expected}; fetch it again later, from another HF_ENDPOINT, or give the path of a local copy"
    )]
    Corrupted {
        /// The file.
        url: String,
        /// The hash announced.
        expected: String,
        /// The hash found.
        found: String,
    },
    /// Files that are not in the cache while nothing may be fetched.
    #[error("{wanted} of `{id}` is not in the cache and HF_HUB_OFFLINE is set: looked in `{}`, {reason}; unset HF_HUB_OFFLINE to fetch it, set HF_HOME to a cache that has it, or give the path of a local copy", looked.display())]
    Offline {
        /// The repository.
        id: String,
        /// The files, in words.
        wanted: String,
        /// The folder of the cache that would hold them.
        looked: PathBuf,
        /// What is there.
        reason: String,
    },
    /// Files that a repository or a folder does not have.
    #[error(
        "`{place}` does not have {wanted}: {reason}; check data.name and data.splits, or the path"
    )]
    NotFound {
        /// The repository or folder.
        place: String,
        /// The files, in words.
        wanted: String,
        /// What is there.
        reason: String,
    },
    /// A path that is none, and no Hub id either.
    #[error(
        "`{text}` is no existing folder, no existing file and no Hub id of the form `owner/name` or `owner/name@revision`; correct the path, or the id"
    )]
    NoLocation {
        /// What was given.
        text: String,
    },
    /// A single file where splits are asked for by name.
    #[error("`{}` is a single file, which has no split `{split}`; give shares of it in data.splits, or the folder or Hub id of a data set", path.display())]
    SplitOfFile {
        /// The file.
        path: PathBuf,
        /// The split asked for.
        split: String,
    },
    /// No place for the Hub's cache.
    #[error("there is no home folder to keep the Hub's cache in; set HF_HOME to a folder")]
    NoHome,
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
    #[error("{} failed while {doing}: {reason}{}", named_tokenizer(path.as_deref()), if path.is_some() { "; fetch its files again, or set data.tokenizer to another one" } else { "" })]
    Tokenizer {
        /// The file or folder that it was loaded from; `None` for a trained one.
        path: Option<PathBuf>,
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

/// What a message calls a tokenizer.
fn named_tokenizer(path: Option<&Path>) -> String {
    match path {
        Some(path) => format!("tokenizer `{}`", path.display()),
        None => "the trained tokenizer".to_owned(),
    }
}
