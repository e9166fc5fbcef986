//! Micro-batches of language models, and their copies on a device.
//!
//! Main type: [`TokenBatch`]. Pairs of completions have the log-probabilities of the reference
//! beside them ([`ReferenceLogProbs`]).

use std::sync::{Arc, OnceLock};

use burn::tensor::backend::Backend;
use deepburn::{Batch, BoxError};
use deepburn_datasets::{IGNORE_INDEX, MicroBatch, PairBatch, RowDocuments};
use deepburn_models::LanguageModelConfig;
use deepburn_models::causal_lm::{CausalBatch, IGNORED_LABEL, InputError};

/// A micro-batch of token sequences.
#[derive(Debug)]
pub(crate) enum TokenBatch {
    /// Sequences. The labels are the input tokens, or ignored. The loss shifts them by one
    /// position.
    Sequences(MicroBatch),
    /// Pairs of completions.
    Pairs(PreferenceBatch),
}

impl From<MicroBatch> for TokenBatch {
    fn from(batch: MicroBatch) -> Self {
        Self::Sequences(batch)
    }
}

impl TokenBatch {
    /// Returns the sequences.
    fn sequences(&self) -> &MicroBatch {
        match self {
            Self::Sequences(batch) => batch,
            Self::Pairs(pairs) => &pairs.batch.sequences,
        }
    }

    /// Truncates every sequence to its first `length` tokens, at least 1.
    pub(crate) fn truncate(&mut self, length: usize) {
        match self {
            Self::Sequences(batch) => batch.truncate(length),
            Self::Pairs(pairs) => pairs.batch.sequences.truncate(length),
        }
    }
}

impl Batch for TokenBatch {
    /// Returns the tokens of all sequences, without padding.
    fn num_tokens(&self) -> usize {
        self.sequences().num_tokens()
    }

    /// Counts the positions that predict a token, or the pairs. The loss of a batch is weighted by
    /// this number.
    fn num_targets(&self) -> usize {
        match self {
            Self::Sequences(batch) => batch.num_targets(),
            // As in TRL, every pair has the same weight, however many tokens its completions have.
            Self::Pairs(pairs) => pairs.batch.pairs.len(),
        }
    }
}

/// The log-probability of both completions of each pair of a split under the reference, which all
/// ranks of a process share.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReferenceLogProbs(Arc<OnceLock<Vec<[f32; 2]>>>);

/// A batch of pairs, with the reference of their split.
#[derive(Debug)]
pub(crate) struct PreferenceBatch {
    /// The pairs.
    pub(crate) batch: PairBatch,
    /// The reference.
    pub(crate) reference: ReferenceLogProbs,
}

impl ReferenceLogProbs {
    /// Returns the log-probabilities of the sequences of a batch: of the better completions, then
    /// of the worse ones, and 0 for missing pairs.
    ///
    /// # Errors
    /// Returns an error if the reference was not measured.
    pub(crate) fn of(&self, batch: &PairBatch) -> Result<Vec<f32>, BoxError> {
        let all = self.0.get().ok_or("the reference was not measured; this is a bug: report it")?;
        let rows = batch.sequences.shape[0] / 2;
        // The last batch may have fewer pairs than rows. The loss gives its missing rows no weight.
        let mut found = vec![0.0; 2 * rows];
        for (row, pair) in batch.pairs.iter().enumerate() {
            let [chosen, rejected] = all[*pair];
            // In the order of the sequences: all better completions, then all worse ones.
            (found[row], found[rows + row]) = (chosen, rejected);
        }
        Ok(found)
    }

    /// Sets the log-probabilities. All ranks of a process have the same ones, and the first rank
    /// sets them.
    pub(crate) fn set(&self, found: Vec<[f32; 2]>) {
        // Later ranks have summed the same values in the same collective.
        self.0.get_or_init(|| found);
    }

    /// Returns a reference for made-up pairs.
    pub(crate) fn zeros(pairs: usize) -> Self {
        Self(Arc::new(OnceLock::from(vec![[0.0; 2]; pairs])))
    }
}

/// Copies a batch to a device and checks it against the vocabulary size and the maximum length of
/// the model.
///
/// # Errors
/// Returns [`InputError`] for a token outside the vocabulary or a sequence that is too long.
pub(crate) fn causal_batch<B: Backend>(
    batch: &MicroBatch,
    config: &impl LanguageModelConfig,
    device: &B::Device,
) -> Result<CausalBatch<B>, InputError> {
    let MicroBatch { input_ids, labels, shape, .. } = batch;
    // Token ids are never negative. The only negative label is `IGNORE_INDEX`, of padding and of
    // tokens that are not trained.
    let ids: Vec<u32> = input_ids.iter().map(|id| *id as u32).collect();
    let label = |label: &i32| if *label == IGNORE_INDEX { IGNORED_LABEL } else { (*label).into() };
    let labels: Vec<i64> = labels.iter().map(label).collect();
    match document_starts(batch) {
        Some(starts) => {
            CausalBatch::of_documents(config, &ids, Some(&labels), starts, *shape, device)
        }
        None => CausalBatch::new(config, &ids, Some(&labels), *shape, device),
    }
}

/// Returns the position of the first token of the document of each token; `None` if each row is one
/// document. Padding follows a document, so that no token attends to it, and it starts a document
/// where there are several.
fn document_starts(batch: &MicroBatch) -> Option<Arc<[usize]>> {
    // The tokens of a stream see all tokens before them in the row, as is usual in pretraining.
    let RowDocuments::Separate(rows) = &batch.documents else { return None };
    // The causal mask alone keeps the padding after a single document out of sight.
    if rows.iter().all(|documents| documents.len() < 2) {
        return None;
    }
    let length = batch.shape[1];
    let mut starts = Vec::with_capacity(rows.len() * length);
    for documents in rows {
        let mut start = 0;
        for document in documents {
            starts.resize(starts.len() + document, start);
            start += document;
        }
        // What is left of the row is padding, which is like one more document.
        starts.resize(starts.len() + length - start, start);
    }
    Some(starts.into())
}
