//! Rows of samples for training.
//!
//! [`Samples`] are the encoded samples of a split. [`SampleRows`] truncates, drops and packs them
//! by a [`SampleLayout`], and assembles batches. Both hold lengths and spans in memory, and read
//! tokens when they are needed.

use std::ops::Range;
use std::sync::Arc;

use crate::error::check_positive;
use crate::formats::rows::visit_rows;
use crate::hash::{Fingerprint, evenly_spaced};
use crate::samples::packing::{Packing, RowPlan, SamplePart};
use crate::samples::statistics::SampleStatistics;
use crate::samples::stored::StoredSamples;
use crate::splits::{Fractions, try_map};
use crate::tokens::packing::check_sequence_length;
use crate::{
    Collate, DataError, DataRow, FileRow, IGNORE_INDEX, MicroBatch, Result, RowDocuments, Sample,
};

/// Maximum number of tokens for which a fingerprint covers all tokens.
const FINGERPRINT_TOKENS: u64 = 1 << 24;
/// Number of evenly spaced rows in the fingerprint of more tokens.
const FINGERPRINT_ROWS: usize = 4096;

/// The samples of a split, in the order of the rows of its files.
#[derive(Debug, Clone)]
pub struct Samples {
    /// The samples, shared by all views.
    stored: Arc<StoredSamples>,
    /// The samples of this view.
    range: Range<usize>,
}

impl Samples {
    /// Returns a view of all samples.
    pub(crate) fn new(stored: Arc<StoredSamples>) -> Self {
        Self { range: 0..stored.index.len(), stored }
    }

    /// Returns parts of this view by fraction: train, eval, test. A fraction of zero gives `None`.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] for invalid fractions, and [`DataError::Empty`] for an empty
    /// part.
    pub(crate) fn split(&self, fractions: Fractions) -> Result<[Option<Self>; 3]> {
        try_map(fractions.cut(self.len())?, |(name, part)| {
            let range = self.range.start + part.start..self.range.start + part.end;
            match range.is_empty() {
                true => Err(DataError::Empty { what: format!("the {name} split") }),
                false => Ok(Self { stored: self.stored.clone(), range }),
            }
        })
    }

    /// Returns the number of samples, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns sample `index`.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`](crate::TokenFile::tokens).
    ///
    /// # Panics
    /// Panics if `index` is not below [`Samples::len`], like a slice.
    pub fn get(&self, index: usize) -> Result<Sample> {
        self.stored.sample(self.stored_index(index))
    }

    /// Returns the number of tokens of sample `index`.
    ///
    /// # Panics
    /// Panics if `index` is not below [`Samples::len`], like a slice.
    pub fn length(&self, index: usize) -> usize {
        self.stored.index.length(self.stored_index(index))
    }

    /// Returns the row from which sample `index` comes.
    ///
    /// # Panics
    /// Panics if `index` is not below [`Samples::len`], like a slice.
    pub fn place(&self, index: usize) -> FileRow {
        self.stored.place(self.stored_index(index))
    }

    /// Reads the rows of the samples from their files again, in order, until `visit` returns false.
    /// `wanted` are the fields that are read, as in [`SampleSource`](crate::SampleSource).
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if a row is not there any more.
    pub fn visit_rows(
        &self,
        wanted: Option<&[String]>,
        visit: &mut dyn FnMut(DataRow) -> bool,
    ) -> Result<()> {
        let mut next = 0;
        let mut continues = true;
        while continues && next < self.len() {
            let file = self.place(next).file;
            let read = visit_rows(&file, wanted, &mut |raw| {
                let place = self.place(next);
                // An invalid row, or one of another split.
                if raw.place.1 != place.number {
                    return Ok(());
                }
                let fields = raw.parse(wanted).map_err(|reason| place.invalid(&reason))?;
                next += 1;
                continues = visit(DataRow { fields, place });
                match continues && next < self.len() && self.place(next).file == file {
                    true => Ok(()),
                    // The rest of the file is not read.
                    false => Err(DataError::LoaderStopped),
                }
            });
            match read {
                Err(DataError::LoaderStopped) => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    let what = self.place(next).to_string();
                    let reason = "is not there any more".to_owned();
                    return Err(DataError::Modified { what, reason });
                }
            }
        }
        Ok(())
    }

    /// Returns the number of invalid rows that were skipped in the files of these samples. If one
    /// corpus was cut by fractions, the number is the same for all splits.
    pub fn num_invalid(&self) -> usize {
        self.stored.index.summary.num_invalid
    }

    /// Returns the first invalid rows that were skipped, and why.
    pub fn invalid_rows(&self) -> impl Iterator<Item = (FileRow, &str)> {
        self.stored.invalid_rows()
    }

    /// Returns what the encoder noticed in the rows of all files, whichever split they are in: the
    /// kind, the number of rows, the first row, and its note.
    pub fn notes(&self) -> impl Iterator<Item = (&str, usize, FileRow, &str)> {
        self.stored.notes()
    }

    /// Logs invalid rows that were skipped.
    pub(crate) fn log_invalid(&self) {
        if let Some((place, reason)) = self.invalid_rows().next() {
            let count = self.num_invalid();
            tracing::warn!(count, "skipped invalid rows; the first one is {place}: {reason}");
        }
    }

    /// Returns the trained spans of sample `index` within `tokens`.
    pub(crate) fn spans(
        &self,
        index: usize,
        tokens: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> {
        self.stored.index.spans_within(self.stored_index(index), tokens)
    }

    /// Returns the index of a sample of this view among all samples.
    fn stored_index(&self, index: usize) -> usize {
        assert!(index < self.len(), "sample {index} of {}", self.len());
        self.range.start + index
    }
}

/// How rows of a batch get the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// On the right, to the longest row, rounded up to a multiple of this number, at least 1. The
    /// multiple `max_length` gives all batches the same shape.
    Right {
        /// The multiple.
        multiple_of: usize,
    },
    /// None: the rows of a batch are one row, whose documents do not attend to each other
    /// (`padding_free` in TRL). The row is padded to a multiple of this number, at least 1.
    Free {
        /// The multiple.
        multiple_of: usize,
    },
}

impl Padding {
    /// Returns `length` rounded up to the multiple, at least 1.
    fn rounded(self, length: usize) -> usize {
        let (Self::Right { multiple_of } | Self::Free { multiple_of }) = self;
        length.max(1).next_multiple_of(multiple_of)
    }
}

/// How samples become rows, and rows a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleLayout {
    /// Maximum tokens of a row, at least 2; `None` for no limit, only without packing.
    pub max_length: Option<usize>,
    /// How samples become rows.
    pub packing: Packing,
    /// How the rows of a batch get the same length.
    pub padding: Padding,
    /// The id of padding, below the vocabulary size. Padding is recognized by its place, so the id
    /// may also occur in samples.
    pub pad_id: u32,
}

impl SampleLayout {
    /// Returns the maximum length.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if it is below 2 or packing needs one,
    /// and for a multiple of 0.
    fn checked_length(&self) -> Result<usize> {
        let (Padding::Right { multiple_of } | Padding::Free { multiple_of }) = self.padding;
        check_positive("multiple of the padded length", multiple_of)?;
        if let Some(length) = self.max_length {
            check_sequence_length(length)?;
        }
        match (self.max_length, self.packing) {
            (Some(length), _) => Ok(length),
            (None, Packing::None) => Ok(usize::MAX),
            (None, packing) => Err(DataError::setting(
                "data.sequence_length",
                "null",
                format!("packing ({packing:?}) fills rows up to a maximum length; set it"),
            )),
        }
    }
}

/// The rows of a split, ready to be sampled.
///
/// Indices of [`Collate::collate`] are rows. Each label is the id of a trained token or
/// [`IGNORE_INDEX`]. The first label of each document is always ignored, because no token of the
/// document precedes it.
#[derive(Debug, Clone)]
pub struct SampleRows {
    /// The samples.
    samples: Samples,
    /// The settings.
    layout: SampleLayout,
    /// The samples of each row.
    plan: RowPlan,
    /// Counts of samples and rows.
    statistics: SampleStatistics,
}

impl SampleRows {
    /// Truncates, drops and packs `samples`. `what` names them in errors ("the train split").
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if the layout is not valid, and [`DataError::Untrained`] if
    /// no row has a token that the loss includes.
    pub fn new(samples: Samples, layout: SampleLayout, what: &str) -> Result<Self> {
        let max_length = layout.checked_length()?;
        let lengths: Vec<usize> = (0..samples.len()).map(|index| samples.length(index)).collect();
        let mut statistics = SampleStatistics { samples: samples.len(), ..Default::default() };
        lengths.iter().for_each(|length| statistics.sample_lengths.add(*length));
        let is_split = matches!(layout.packing, Packing::BestFitSplit | Packing::Wrapped);
        if !is_split {
            statistics.truncated = lengths.iter().filter(|length| **length > max_length).count();
        }
        let mut plan = RowPlan::pack(&lengths, max_length, layout.packing);
        let limit = if is_split { usize::MAX } else { max_length };
        // From token 1: nothing precedes the first token that could predict it.
        let is_trained = |sample: usize| samples.spans(sample, 1..limit).next().is_some();
        let untrained = (0..samples.len()).filter(|sample| !is_trained(*sample));
        match layout.packing {
            Packing::None => {
                statistics.dropped = untrained.collect();
                plan = plan.filtered(|row| row.iter().all(|segment| is_trained(segment.sample)));
            }
            _ => statistics.untrained = untrained.count(),
        }
        let mut rows = Self { samples, layout, plan, statistics };
        rows.count_rows();
        match rows.statistics.trained_tokens {
            0 => Err(rows.nothing_trained(what)),
            _ => Ok(rows),
        }
    }

    /// Counts the rows and their tokens.
    fn count_rows(&mut self) {
        let mut statistics = std::mem::take(&mut self.statistics);
        statistics.rows = self.plan.len();
        for index in 0..self.plan.len() {
            let length = self.plan.length(index);
            statistics.tokens += length as u64;
            statistics.row_lengths.add(length);
            for (at, segment) in self.plan.row(index).iter().enumerate() {
                let mut targets = segment.tokens.clone();
                targets.start += usize::from(self.begins_document(at));
                let spans = self.samples.spans(segment.sample, targets);
                statistics.trained_tokens += spans.map(|span| span.len() as u64).sum::<u64>();
            }
        }
        self.statistics = statistics;
    }

    /// Returns the error of samples without a trained token.
    fn nothing_trained(&self, what: &str) -> DataError {
        let SampleStatistics { samples, truncated, .. } = self.statistics;
        DataError::Untrained {
            what: what.to_owned(),
            samples,
            truncated,
            length: self.layout.max_length.unwrap_or(usize::MAX),
            first: self.samples.place(0).to_string(),
        }
    }

    /// Returns whether segment number `at` of a row begins a document.
    fn begins_document(&self, at: usize) -> bool {
        at == 0 || self.layout.packing != Packing::Wrapped
    }

    /// Returns the number of rows, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.plan.len()
    }

    /// Returns the samples.
    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// Returns counts of samples and rows.
    pub fn statistics(&self) -> &SampleStatistics {
        &self.statistics
    }

    /// Returns the number of tokens of each row, for batches of about equal cost
    /// ([`TokenBudget`](crate::TokenBudget)).
    pub fn lengths(&self) -> Vec<usize> {
        (0..self.len()).map(|index| self.plan.length(index)).collect()
    }

    /// Returns the indices of the samples in row `index`, in order.
    ///
    /// # Panics
    /// Panics if `index` is not below [`SampleRows::len`], like a slice.
    pub fn samples_of(&self, index: usize) -> Vec<usize> {
        self.plan.row(index).iter().map(|segment| segment.sample).collect()
    }

    /// Returns a hash of the rows. For more than 16 million tokens, only the tokens of evenly
    /// spaced rows are hashed, and the lengths of all rows.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`](crate::TokenFile::tokens).
    pub fn fingerprint(&self) -> Result<String> {
        let count = self.len();
        let mut fingerprint = Fingerprint::new(count);
        for segment in self.plan.rows().flatten() {
            let SamplePart { sample, tokens } = segment;
            [*sample, tokens.start, tokens.end].iter().for_each(|it| fingerprint.add(*it as u32));
        }
        let is_small = self.statistics.tokens <= FINGERPRINT_TOKENS;
        let chosen = if is_small { count } else { count.min(FINGERPRINT_ROWS) };
        for index in evenly_spaced(count, chosen) {
            let row = self.row(index)?;
            row.ids.iter().for_each(|id| fingerprint.add(*id as u32));
            row.labels.iter().for_each(|label| fingerprint.add(*label as u32));
        }
        Ok(fingerprint.digits())
    }

    /// Reads row `index`.
    fn row(&self, index: usize) -> Result<TrainingRow> {
        let mut row = TrainingRow::default();
        for (at, segment) in self.plan.row(index).iter().enumerate() {
            let SamplePart { sample, tokens } = segment;
            let ids =
                self.samples.stored.ids(self.samples.stored_index(*sample), tokens.clone())?;
            let start = row.ids.len();
            // Ids are below 2^31, so the cast keeps them.
            row.ids.extend(ids.iter().map(|id| *id as i32));
            row.labels.resize(row.ids.len(), IGNORE_INDEX);
            for span in self.samples.spans(*sample, tokens.clone()) {
                let span = start + span.start - tokens.start..start + span.end - tokens.start;
                row.labels[span.clone()].copy_from_slice(&row.ids[span]);
            }
            match row.documents.last_mut() {
                Some(length) if !self.begins_document(at) => *length += tokens.len(),
                _ => {
                    row.labels[start] = IGNORE_INDEX;
                    row.documents.push(tokens.len());
                }
            }
        }
        Ok(row)
    }
}

/// The tokens of a row.
#[derive(Debug, Clone, Default)]
pub(super) struct TrainingRow {
    /// The ids.
    pub(super) ids: Vec<i32>,
    /// The labels, as long as the ids.
    pub(super) labels: Vec<i32>,
    /// The lengths of the documents.
    pub(super) documents: Vec<usize>,
}

impl TrainingRow {
    /// Appends another row.
    fn append(&mut self, other: Self) {
        self.ids.extend(other.ids);
        self.labels.extend(other.labels);
        self.documents.extend(other.documents);
    }

    /// Returns the longest number of tokens.
    pub(super) fn longest(rows: &[Self]) -> usize {
        rows.iter().map(|row| row.ids.len()).max().unwrap_or(0)
    }

    /// Returns a batch of `rows`, padded to `length` tokens each. Empty rows stand for missing
    /// samples.
    pub(super) fn batch(rows: Vec<Self>, length: usize, pad_id: u32, samples: usize) -> MicroBatch {
        let shape = [rows.len(), length];
        let mut input_ids = Vec::with_capacity(rows.len() * length);
        let mut labels = Vec::with_capacity(rows.len() * length);
        let mut documents = Vec::with_capacity(rows.len());
        for row in rows {
            documents.push(row.documents);
            input_ids.extend(row.ids);
            labels.extend(row.labels);
            input_ids.resize(documents.len() * length, pad_id as i32);
            labels.resize(documents.len() * length, IGNORE_INDEX);
        }
        let documents = RowDocuments::Separate(documents);
        MicroBatch { input_ids, labels, shape, samples, documents }
    }
}

impl Collate for SampleRows {
    type Batch = MicroBatch;

    fn num_samples(&self) -> usize {
        self.len()
    }

    /// Returns a batch of `rows` rows, or of a single row with [`Padding::Free`].
    fn collate(&self, indices: &[usize], rows: usize) -> Result<MicroBatch> {
        debug_assert!(indices.len() <= rows);
        let mut found = indices.iter().map(|index| self.row(*index)).collect::<Result<Vec<_>>>()?;
        let mut rows = rows;
        if let Padding::Free { .. } = self.layout.padding {
            // All rows become documents of a single row.
            rows = 1;
            found = found
                .into_iter()
                .reduce(|mut row, next| {
                    row.append(next);
                    row
                })
                .into_iter()
                .collect();
        }
        let samples = found.len();
        // Missing samples become rows of padding, so that all ranks have batches of the same form.
        found.resize(rows, TrainingRow::default());
        let length = self.layout.padding.rounded(TrainingRow::longest(&found));
        Ok(TrainingRow::batch(found, length, self.layout.pad_id, samples))
    }
}
