//! Pairs of completions for preference optimization, and the log-probabilities of the reference.
//!
//! Main type: [`PreferenceRows`], the pairs of a split. The reference is the model at the start of
//! the run: the pretrained model, also with a new adapter, which changes nothing yet, or the model
//! with the adapter that is trained further. A checkpoint has its hash. Its log-probabilities are
//! measured once, before the first step, with the weights that are sharded for training, so that no
//! second model is ever in memory. A run that resumes measures them again, before the weights of
//! its checkpoint are loaded.

use deepburn::comm::CollectiveTag;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{BoxError, Engine, Interrupt};
use deepburn_config::{ChatPlan, counted};
use deepburn_datasets::{
    Collate, DataError, DataShard, EvaluationBatches, PairBatch, PairRows, Samples,
};
use deepburn_models::causal_lm::LanguageModel;
use deepburn_models::decoder::{AnyDecoder, Decoder};

use crate::data::chat::{
    RowSizes, RowsOfSplit, SampleCorpus, SampleForm, log_truncated, untrained,
};
use crate::data::token_batch::{PreferenceBatch, ReferenceLogProbs, TokenBatch, causal_batch};
use crate::failure::Failure;
use crate::run::progress_hook::with_progress;

/// Pairs of completions.
pub(crate) type PreferenceCorpus = SampleCorpus<PreferenceRows>;

/// The pairs of a split.
#[derive(Debug, Clone)]
pub(crate) struct PreferenceRows {
    /// The pairs.
    pub(crate) pairs: PairRows,
    /// Their log-probabilities under the reference.
    reference: ReferenceLogProbs,
}

impl RowsOfSplit for PreferenceRows {
    const FORM: SampleForm = SampleForm::Preference;

    fn new(samples: Samples, _: &ChatPlan, sizes: RowSizes, what: &str) -> Result<Self, Failure> {
        let pairs = PairRows::new(samples, sizes.limit, sizes.pad_id, what)
            .map_err(|error| untrained(error, sizes))?;
        let statistics = pairs.statistics();
        tracing::info!(
            "{what}: {}, {} tokens in both sequences of them, of which {} are compared; the longest sequence has {} tokens",
            counted(pairs.len(), "pair"),
            statistics.tokens,
            statistics.trained_tokens,
            statistics.sample_lengths.longest()
        );
        log_truncated(&counted(statistics.truncated, "pair"), statistics.truncated, what, sizes);
        if let Some(first) = statistics.dropped.first() {
            tracing::warn!(
                "{what}: {} left out, whose prompt alone has {} tokens or more; the first one is {}",
                counted(statistics.dropped.len(), "pair"),
                sizes.limit,
                pairs.samples().place(*first)
            );
        }
        Ok(Self { pairs, reference: ReferenceLogProbs::default() })
    }
}

impl Collate for PreferenceRows {
    type Batch = TokenBatch;

    fn num_samples(&self) -> usize {
        self.pairs.len()
    }

    fn collate(&self, indices: &[usize], rows: usize) -> Result<TokenBatch, DataError> {
        let batch = self.pairs.collate(indices, rows)?;
        Ok(TokenBatch::Pairs(PreferenceBatch { batch, reference: self.reference.clone() }))
    }
}

impl PreferenceCorpus {
    /// Measures the reference of all splits with the weights of `engine`. Returns false if a rank
    /// was interrupted.
    ///
    /// # Errors
    /// Returns an error if data cannot be read, or if a collective fails.
    pub(crate) fn measure_reference<B: FusedOps + OptimizerOps>(
        &self,
        engine: &Engine<B, Decoder<Training<B>>>,
        (config, device): (&AnyDecoder, &B::Device),
        rows: usize,
        interrupt: &Interrupt,
    ) -> Result<bool, BoxError> {
        for (name, split) in [
            ("train", Some(&self.train)),
            ("eval", self.eval.as_ref()),
            ("test", self.test.as_ref()),
        ] {
            // Evaluations and the test compare with the reference too, so all splits are measured.
            let Some(split) = split else { continue };
            let Some(found) = split.measured(engine, (config, device), rows, (name, interrupt))?
            else {
                return Ok(false);
            };
            split.reference.set(found);
        }
        Ok(true)
    }
}

impl PreferenceRows {
    /// Returns the log-probabilities of the completions of all pairs; `None` if a rank was
    /// interrupted. Each rank measures its share, in batches of `rows` pairs.
    fn measured<B: FusedOps + OptimizerOps>(
        &self,
        engine: &Engine<B, Decoder<Training<B>>>,
        (config, device): (&AnyDecoder, &B::Device),
        rows: usize,
        (split, interrupt): (&str, &Interrupt),
    ) -> Result<Option<Vec<[f32; 2]>>, BoxError> {
        let group = engine.group();
        let shard = DataShard { rank: engine.data_rank(), num_ranks: engine.data_ranks() };
        let what = format!("measuring the reference on the {split} split");
        let batches = EvaluationBatches::new(&self.pairs, shard, rows)?;
        let mut batches: deepburn::EvaluationStream<'_, PairBatch> =
            Box::new(batches.map(|batch| Ok(batch?)));
        if group.rank() == 0 {
            batches = with_progress(&what, batches);
        }
        let mut found = vec![0.0; 2 * self.pairs.len()];
        for batch in batches {
            // Every rank has the same number of batches, some of padding only. So all of them ask
            // in the same rounds and leave in the same one.
            let mine = vec![f64::from(interrupt.is_asked())];
            if group.sum(CollectiveTag::new("reference continues", 0), mine)?[0] > 0.0 {
                return Ok(None);
            }
            let batch = batch?;
            let sequences = causal_batch(&batch.sequences, config, device)?;
            let losses = engine.evaluate(|model| model.sequence_losses(&sequences).into_data())?;
            let losses: Vec<f64> = losses.iter::<f64>().collect();
            for (row, pair) in batch.pairs.iter().enumerate() {
                for (half, loss) in [losses[row], losses[rows + row]].into_iter().enumerate() {
                    // A batch has all better completions first, and the result has both of a pair
                    // side by side.
                    found[2 * pair + half] = -loss;
                }
            }
        }
        // Every pair is measured by one rank of a pipeline stage, and the others add 0.
        let data_group = engine.states().data_group();
        let all = data_group.sum(CollectiveTag::new("reference", 0), found)?;
        if let Some(pair) = all.iter().position(|value| !value.is_finite()) {
            let place = self.pairs.samples().place(self.pairs.sample_of(pair / 2));
            return Err(format!(
                "{place}: the log-probability of a completion under the reference is {}; check the weights of the model",
                all[pair]
            )
            .into());
        }
        Ok(Some(all.chunks_exact(2).map(|pair| [pair[0] as f32, pair[1] as f32]).collect()))
    }
}
