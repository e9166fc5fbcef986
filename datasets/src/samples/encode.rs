//! Rows of files to samples, on all threads, with a cache.
//!
//! [`open_samples`] reads the files of a [`SampleSource`]. One thread reads rows in batches of
//! about a megabyte. All threads parse and encode a batch, while the next one is read. The samples
//! are stored in the order of the rows, so they do not depend on the number of threads.
//!
//! The key of the cache is a hash of the contents of the files and of everything that determines
//! the samples. Files that change while they are read are an error.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::SystemTime;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use sha2::{Digest, Sha256};

use crate::formats::folder::{described, open_file};
use crate::formats::format::Format;
use crate::formats::rows::{RawRow, in_row, visit_rows};
use crate::formats::text::text_files;
use crate::guard::panic_message;
use crate::hash::digest;
use crate::samples::index::{IndexSummary, InvalidRow, SampleIndex};
use crate::samples::rows::Samples;
use crate::samples::sample::{Span, spans};
use crate::samples::schema_nulls::SchemaNulls;
use crate::samples::stored::StoredSamples;
use crate::splits::try_map;
use crate::tokens::cache::key_of;
use crate::tokens::encoder::TokenSink;
use crate::{
    DataError, DataRow, FileRow, InvalidRows, NotedSample, Result, RowNote, RowObject, Splits,
    TokenCache, TokenWidth,
};

/// Part of every key. It changes with the file format and with the reading of rows.
const FORMAT: &str = "deepburn samples 2";

/// Bytes of rows that are encoded at a time. Encoding needs many times the memory of a row.
const BATCH_BYTES: usize = 1 << 20;

/// The kind of a note about nulls that stand for missing fields.
const SCHEMA_NULLS: &str = "schema nulls";

/// The stack of a thread that encodes. Chat templates can nest values so deeply that they are
/// rendered on a stack of this size. If the thread has it, none has to be allocated for each row,
/// which stops the other threads: the system removes its pages from the address translation of all
/// cores.
const STACK_BYTES: usize = 256 << 20;

/// Where samples come from.
#[derive(Debug, Clone, Copy)]
pub struct SampleSource<'a> {
    /// The files or folders of the splits. By fraction, they are cut between samples.
    pub splits: &'a Splits,
    /// The fields that the encoder reads. Others are ignored, and not decoded where the format
    /// allows it. `None` for all.
    pub fields: Option<&'a [String]>,
    /// What happens to rows that are not valid, or that the encoder refuses.
    pub invalid: InvalidRows,
    /// The number of entries of the vocabulary. All ids must be below it.
    pub vocab_size: usize,
    /// Everything that determines the samples of a row: the definition of the tokenizer, the text
    /// of the chat template and all options.
    pub encoder: &'a [&'a str],
    /// The cache of the samples; `None` for no cache.
    pub cache: Option<&'a TokenCache>,
}

/// The samples of the splits.
#[derive(Debug, Clone)]
pub struct SampleSplits {
    /// The train split.
    pub train: Samples,
    /// The split for evaluation during training.
    pub eval: Option<Samples>,
    /// The split for a final test.
    pub test: Option<Samples>,
}

/// Reads the files of `source` and encodes each row. The result depends only on the source, its
/// files and `encode`, which is called on all threads.
///
/// ```
/// use deepburn_datasets::*;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("train.jsonl");
/// std::fs::write(&path, "{\"prompt\": \"ab\", \"completion\": \"c\"}\n").unwrap();
/// let source = SampleSource {
///     splits: &Splits::all(path),
///     fields: None,
///     invalid: InvalidRows::Fail,
///     vocab_size: 256,
///     encoder: &["bytes", "prompt and completion"],
///     cache: None,
/// };
/// let samples = open_samples(&source, |row| {
///     let text = |name| row.fields[name].as_str().ok_or(format!("`{name}` is not a string"));
///     let (prompt, completion) = (text("prompt")?, text("completion")?);
///     let ids = prompt.bytes().chain(completion.bytes()).map(u32::from).collect();
///     let trained = [vec![false; prompt.len()], vec![true; completion.len()]].concat();
///     Ok::<_, String>(Sample { ids, trained })
/// })?;
/// assert_eq!(samples.train.get(0)?.labels(), [IGNORE_INDEX, IGNORE_INDEX, 99]);
/// # Ok::<(), DataError>(())
/// ```
///
/// # Errors
/// Returns an error if a file cannot be read, has changed meanwhile, or has no samples, and the
/// first error of a row unless invalid rows are skipped. An error of `encode` names its own remedy,
/// because the row may not be at fault.
pub fn open_samples<S: Into<NotedSample>, E: Display>(
    source: &SampleSource<'_>,
    encode: impl Fn(DataRow) -> Result<S, E> + Sync,
) -> Result<SampleSplits> {
    let encode = |row: DataRow| encode(row).map(Into::into).map_err(|error| error.to_string());
    let read = |paths: &Vec<PathBuf>| {
        let files = paths.iter().map(|path| text_files(path)).collect::<Result<Vec<_>>>()?;
        let samples = Samples::new(Arc::new(stored(source, &files.concat(), &encode)?));
        samples.log_invalid();
        Ok(samples)
    };
    let [train, eval, test] = match source.splits {
        Splits::Shares { files, fractions } => {
            fractions.validate()?;
            read(files)?.split(*fractions)?
        }
        Splits::Paths { train, eval, test } => {
            try_map([Some(train), eval.as_ref(), test.as_ref()], read)?
        }
    };
    let train = train.ok_or_else(|| DataError::Empty { what: "the train split".into() })?;
    Ok(SampleSplits { train, eval, test })
}

/// Turns a row into a sample, or returns the problem.
type Encode<'a> = &'a (dyn Fn(DataRow) -> Result<NotedSample, String> + Sync);

/// Returns the samples of `files`.
fn stored(
    source: &SampleSource<'_>,
    files: &[PathBuf],
    encode: Encode<'_>,
) -> Result<StoredSamples> {
    let produce = |sink: TokenSink<'_>| encode_files(source, files, encode, sink);
    let Some(cache) = source.cache else { return StoredSamples::in_memory(files, &produce) };
    let identities = files.iter().map(|file| identity(file)).collect::<Result<Vec<_>>>()?;
    // Part of the key, because fields that are not read cannot make a row invalid.
    let fields = format!("{:?}", source.fields);
    let settings = [FORMAT, &fields, &format!("{:?} {}", source.invalid, source.vocab_size)];
    let encoder = source.encoder.iter().copied();
    let hashes = identities.iter().map(|(hash, _)| hash.as_str());
    // The number of parts separates the encoder from the files.
    let parts = [source.encoder.len().to_string()];
    let parts = parts.iter().map(String::as_str).chain(settings).chain(encoder).chain(hashes);
    let key = key_of(parts);
    let width = TokenWidth::of_vocabulary(source.vocab_size);
    let produce = |sink: TokenSink<'_>| {
        let index = produce(sink)?;
        // Otherwise, the samples of changed files would be stored under the key of the old ones.
        for (file, (_, before)) in files.iter().zip(&identities) {
            if *before != stamp(file)? {
                let what = format!("`{}`", file.display());
                let reason = "changed while it was read".to_owned();
                return Err(DataError::Modified { what, reason });
            }
        }
        Ok(index)
    };
    StoredSamples::cached(cache, &key, width, files, &produce)
}

/// The size and the modification time of a file.
type Stamp = (u64, Option<SystemTime>);

/// Returns the hash of the format and the contents of a file, and the stamp that it had before.
fn identity(path: &Path) -> Result<(String, Stamp)> {
    // Before the contents are hashed, so that a change during the hash is noticed later.
    let stamp = stamp(path)?;
    let format = format!("{:?}", Format::of(path));
    let hasher = Sha256::new_with_prefix(format);
    let hash = digest(hasher, open_file(path)?).map_err(DataError::unreadable(path))?;
    Ok((hash, stamp))
}

/// Returns the stamp of a file.
fn stamp(path: &Path) -> Result<Stamp> {
    let metadata = std::fs::metadata(path).map_err(DataError::unreadable(path))?;
    Ok((metadata.len(), metadata.modified().ok()))
}

/// Rows of one file.
struct RowChunk {
    /// The index of the file.
    file: usize,
    /// The rows.
    rows: Vec<RawRow>,
}

/// The tokens, the trained spans, the notes and the objects of a row, or why it is invalid.
type Encoded = Result<(Vec<u32>, Vec<Span>, Vec<RowNote>, Vec<RowObject>), String>;

/// Streams the tokens of all samples to `sink`, and returns their index.
fn encode_files(
    source: &SampleSource<'_>,
    files: &[PathBuf],
    encode: Encode<'_>,
    sink: TokenSink<'_>,
) -> Result<SampleIndex> {
    let paths: Vec<Arc<Path>> = files.iter().map(|file| Arc::from(file.as_path())).collect();
    // One batch waits while another one is encoded.
    let (sender, receiver) = sync_channel::<RowChunk>(1);
    let threads = ThreadPoolBuilder::new().num_threads(rayon::current_num_threads());
    // Without these threads, the ones of the caller encode.
    let threads = threads.stack_size(STACK_BYTES).build().ok();
    let (mut index, mut nulls) = (SampleIndex::default(), SchemaNulls::default());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_batches(files, source.fields, sender));
        for batch in receiver {
            let path = &paths[batch.file];
            // An error drops the receiver, which ends the reader at its next batch.
            let found = (&mut index, &mut nulls);
            add_batch(source, path, batch, encode, threads.as_ref(), found, sink)?;
        }
        reader.join().unwrap_or_else(|panic| {
            let reason = format!("panicked: {}; this is a bug: report it", panic_message(&*panic));
            Err(DataError::LoaderThread { reason })
        })
    })?;
    if index.len() == 0 {
        return Err(without_samples(files, index));
    }
    if let Some(rows) = nulls.noted_rows() {
        index.summary.notes.insert(SCHEMA_NULLS.to_owned(), rows);
    }
    // Files at the end may have no rows.
    index.start_file(files.len() - 1, index.summary.files.last().is_some_and(|it| it.has_lines));
    Ok(index)
}

/// Returns the error of files without a valid row.
fn without_samples(files: &[PathBuf], index: SampleIndex) -> DataError {
    let what = described(files);
    let IndexSummary { files: read, num_invalid: rows, invalid, .. } = index.summary;
    let Some(InvalidRow { file, number, reason }) = invalid.into_iter().next() else {
        return DataError::Empty { what };
    };
    let unit = if read[file].has_lines { "line" } else { "row" };
    let place = FileRow { file: Arc::from(files[file].as_path()), unit, number };
    DataError::AllInvalid { what, rows, first: place.to_string(), reason }
}

/// Sends the rows of all files in order, until the receiver is gone.
fn read_batches(
    files: &[PathBuf],
    fields: Option<&[String]>,
    sender: SyncSender<RowChunk>,
) -> Result<()> {
    // The receiver is gone after an error, which it returns.
    let send =
        |file, rows| sender.send(RowChunk { file, rows }).map_err(|_| DataError::LoaderStopped);
    for (file, path) in files.iter().enumerate() {
        let (mut rows, mut bytes) = (Vec::new(), 0);
        visit_rows(path, fields, &mut |row| {
            bytes += row.bytes() + size_of::<RawRow>();
            rows.push(row);
            if bytes < BATCH_BYTES {
                return Ok(());
            }
            bytes = 0;
            send(file, std::mem::take(&mut rows))
        })?;
        if !rows.is_empty() {
            send(file, rows)?;
        }
    }
    Ok(())
}

/// Encodes a batch, and adds its samples in order.
fn add_batch(
    source: &SampleSource<'_>,
    path: &Arc<Path>,
    batch: RowChunk,
    encode: Encode<'_>,
    threads: Option<&ThreadPool>,
    (index, nulls): (&mut SampleIndex, &mut SchemaNulls),
    sink: TokenSink<'_>,
) -> Result<()> {
    let encode_row = |row: RawRow| -> (FileRow, Encoded) {
        let (unit, number) = row.place;
        let place = FileRow { file: path.clone(), unit, number };
        let sample = row.parse(source.fields).and_then(|fields| {
            let noted = encode(DataRow { fields, place: place.clone() })?;
            let NotedSample { sample, notes, objects } = noted;
            sample.check(source.vocab_size).map_err(|reason| in_row(&reason))?;
            let spans = spans(&sample.trained);
            Ok((sample.ids, spans, notes, objects))
        });
        (place, sample)
    };
    let encode_all = || batch.rows.into_par_iter().map(encode_row).collect::<Vec<_>>();
    let encoded = match threads {
        Some(threads) => threads.install(encode_all),
        None => encode_all(),
    };
    for (place, sample) in encoded {
        index.start_file(batch.file, place.unit == "line");
        match sample {
            Ok((ids, spans, notes, objects)) => {
                sink(&ids)?;
                nulls.add((batch.file, place.number), objects);
                notes.into_iter().for_each(|note| index.note(place.number, note));
                index.push(place.number, ids.len(), spans);
            }
            Err(reason) if source.invalid == InvalidRows::Fail => {
                return Err(place.invalid(&reason));
            }
            Err(reason) => index.push_invalid(place.number, reason),
        }
    }
    Ok(())
}
