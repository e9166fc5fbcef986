//! Pairs of samples with the same prompt, for preference optimization.
//!
//! A pair is stored as one sample ([`pair_sample`]), so that splits, the cache and notes treat it
//! like any other. Its two halves begin with the same prompt, and only their completions are
//! trained. [`PairRows`] takes the halves apart and assembles batches.

use std::ops::Range;

use crate::error::check_positive;
use crate::hash::{Fingerprint, evenly_spaced};
use crate::samples::rows::{Samples, TrainingRow};
use crate::samples::statistics::SampleStatistics;
use crate::tokens::packing::check_sequence_length;
use crate::{Collate, DataError, IGNORE_INDEX, MicroBatch, Result, Sample};

/// Maximum number of pairs whose tokens are part of a fingerprint.
const FINGERPRINT_PAIRS: usize = 4096;

/// Returns the sample of a pair: the prompt and the better completion, then the prompt and the
/// worse one.
///
/// # Errors
/// Returns the problem if the prompt or a completion has no token: the halves could not be
/// separated, or would train nothing.
pub fn pair_sample(prompt: &[u32], chosen: &[u32], rejected: &[u32]) -> Result<Sample, String> {
    for (name, tokens) in [("prompt", prompt), ("chosen", chosen), ("rejected", rejected)] {
        if tokens.is_empty() {
            return Err(format!("`{name}` has no token of its own; remove the row"));
        }
    }
    let mut sample = Sample::default();
    for completion in [chosen, rejected] {
        sample.ids.extend(prompt.iter().chain(completion));
        sample.trained.resize(sample.trained.len() + prompt.len(), false);
        sample.trained.resize(sample.ids.len(), true);
    }
    Ok(sample)
}

/// A batch of pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairBatch {
    /// The sequences: one for the better completion of each pair, then one for the worse completion
    /// of each pair, in the same order. Missing pairs are rows of padding.
    pub sequences: MicroBatch,
    /// The pairs.
    pub pairs: Vec<usize>,
}

/// The pairs of a split, ready to be sampled.
///
/// Indices of [`Collate::collate`] are pairs.
#[derive(Debug, Clone)]
pub struct PairRows {
    /// The pairs.
    samples: Samples,
    /// The pairs that fit.
    kept: Vec<usize>,
    /// Maximum tokens of a sequence.
    max_length: usize,
    /// The id of padding.
    pad_id: u32,
    /// Counts of pairs and sequences.
    statistics: SampleStatistics,
}

/// Where the parts of a pair are in its sample.
struct Halves {
    /// The tokens of the prompt.
    prompt: usize,
    /// The two halves.
    halves: [Range<usize>; 2],
}

impl PairRows {
    /// Truncates the sequences of the pairs of [`pair_sample`] in `samples` to `max_length` tokens,
    /// and leaves out pairs whose prompt alone is as long. `what` names them in errors ("the train
    /// split").
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if the length is too small, and [`DataError::Untrained`] if
    /// no pair is left.
    pub fn new(samples: Samples, max_length: usize, pad_id: u32, what: &str) -> Result<Self> {
        check_sequence_length(max_length)?;
        check_positive("number of pairs", samples.len())?;
        let statistics = SampleStatistics { samples: samples.len(), ..Default::default() };
        let mut rows = Self { samples, kept: Vec::new(), max_length, pad_id, statistics };
        for pair in 0..rows.samples.len() {
            let Halves { prompt, halves } = rows.halves(pair);
            let lengths = halves.map(|half| half.len());
            let statistics = &mut rows.statistics;
            lengths.iter().for_each(|length| statistics.sample_lengths.add(*length));
            // No token of a completion would be left. Otherwise, the prompt is not longer than the
            // lengths below.
            if prompt >= max_length {
                statistics.dropped.push(pair);
                continue;
            }
            statistics.truncated += usize::from(lengths.iter().any(|it| *it > max_length));
            for length in lengths.map(|it| it.min(max_length)) {
                statistics.row_lengths.add(length);
                statistics.tokens += length as u64;
                statistics.trained_tokens += (length - prompt) as u64;
            }
            rows.kept.push(pair);
        }
        rows.statistics.rows = rows.kept.len();
        match rows.kept.is_empty() {
            false => Ok(rows),
            true => Err(DataError::Untrained {
                what: what.to_owned(),
                samples: rows.samples.len(),
                truncated: rows.samples.len(),
                length: max_length,
                first: rows.samples.place(0).to_string(),
            }),
        }
    }

    /// Returns the number of pairs, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Returns the samples of the pairs.
    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// Returns the index of a pair among [`samples`](Self::samples).
    ///
    /// # Panics
    /// Panics if `pair` is not below [`PairRows::len`], like a slice.
    pub fn sample_of(&self, pair: usize) -> usize {
        self.kept[pair]
    }

    /// Returns counts of pairs and their sequences. A pair counts as truncated if one of its
    /// sequences is.
    pub fn statistics(&self) -> &SampleStatistics {
        &self.statistics
    }

    /// Returns a hash of the lengths of all pairs, and of the tokens of evenly spaced ones.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`](crate::TokenFile::tokens).
    pub fn fingerprint(&self) -> Result<String> {
        let count = self.len();
        let mut fingerprint = Fingerprint::new(count);
        fingerprint.add(self.max_length.min(u32::MAX as usize) as u32);
        self.kept.iter().for_each(|pair| fingerprint.add(self.samples.length(*pair) as u32));
        for pair in evenly_spaced(count, count.min(FINGERPRINT_PAIRS)) {
            let sample = self.samples.get(self.kept[pair])?;
            sample.ids.iter().for_each(|id| fingerprint.add(*id));
            sample.trained.iter().for_each(|trained| fingerprint.add(u32::from(*trained)));
        }
        Ok(fingerprint.digits())
    }

    /// Returns the parts of a sample. The second half begins behind the first completion, because a
    /// prompt has at least one token.
    fn halves(&self, sample: usize) -> Halves {
        let end = self.samples.length(sample);
        let first = self.samples.spans(sample, 0..end).next().unwrap_or(0..end);
        Halves { prompt: first.start, halves: [0..first.end, first.end..end] }
    }
}

impl Collate for PairRows {
    type Batch = PairBatch;

    fn num_samples(&self) -> usize {
        self.len()
    }

    /// Returns a batch of `rows` pairs, which has twice as many sequences.
    fn collate(&self, indices: &[usize], rows: usize) -> Result<PairBatch> {
        debug_assert!(indices.len() <= rows);
        let mut found: [Vec<TrainingRow>; 2] = Default::default();
        for index in indices {
            let sample = self.kept[*index];
            let (ids, Halves { prompt, halves }) =
                (self.samples.get(sample)?.ids, self.halves(sample));
            for (found, half) in found.iter_mut().zip(halves) {
                let end = half.end.min(half.start + self.max_length);
                // Ids are below 2^31, so the cast keeps them.
                let ids: Vec<i32> = ids[half.start..end].iter().map(|id| *id as i32).collect();
                let mut labels = ids.clone();
                labels[..prompt].fill(IGNORE_INDEX);
                found.push(TrainingRow { documents: vec![ids.len()], ids, labels });
            }
        }
        found.iter_mut().for_each(|half| half.resize(rows, TrainingRow::default()));
        let found: Vec<_> = found.into_iter().flatten().collect();
        // Without pairs, the batch has one column of padding, because a tensor cannot have none.
        let longest = TrainingRow::longest(&found).max(1);
        // A pair counts as one sample.
        let sequences = TrainingRow::batch(found, longest, self.pad_id, indices.len());
        Ok(PairBatch { sequences, pairs: indices.to_vec() })
    }
}
