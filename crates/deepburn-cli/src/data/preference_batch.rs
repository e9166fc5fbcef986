//! A batch of pairs of completions, with the log-probabilities of the reference.
//!
//! Main types: [`PreferenceBatch`] and [`ReferenceLogProbs`].

use std::sync::{Arc, OnceLock};

use deepburn::BoxError;
use deepburn_datasets::PairBatch;

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
