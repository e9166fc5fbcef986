//! The data of language models: one stream of tokens, samples of their own, or pairs of
//! completions.
//!
//! Main types: [`CausalData`], and [`CausalSource`], the data loader of a rank. Sequences of a
//! stream have one length and no padding. Samples have different lengths, some of their tokens are
//! not trained, and they do not see each other.
//!
//! A stream is endless: a batch may take sequences of two epochs, and all ranks draw the same
//! number of sequences. With samples, an epoch has every sample once and ends with a step, as in
//! the Trainer of `transformers`. Its last step may have fewer samples.

use deepburn::{BatchSource, BoxError, EvaluationStream, NextStep, StepBatches};
use deepburn_config::{BatchPlan, CurriculumPlan, Plan};
use deepburn_datasets::{
    BatchLoader, BatchSampler, Collate, Corpus, DataError, DataShard, DistributedSampler,
    EpochSampler, EvaluationBatches, Order, SampleRows, Samples, Sequences, StepShape, Tokenizer,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::data::chat::{ChatCorpus, SampleCorpus};
use crate::data::lengths::{PREFETCH, longest};
use crate::data::preference::PreferenceCorpus;
use crate::data::recipe::RecipeSettings;
use crate::data::token_batch::TokenBatch;

/// The data of all splits.
pub(crate) enum CausalData {
    /// Text or tokens, cut into sequences.
    Stream(Box<Corpus>),
    /// Conversations and other samples.
    Samples(Box<ChatCorpus>),
    /// Pairs of completions.
    Pairs(Box<PreferenceCorpus>),
}

impl CausalData {
    /// Returns the tokenizer; `None` for token files without one.
    pub(crate) fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Stream(corpus) => corpus.tokenizer.as_ref(),
            Self::Samples(corpus) => Some(&corpus.tokenizer),
            Self::Pairs(corpus) => Some(&corpus.tokenizer),
        }
    }

    /// Returns the samples of the train split; `None` for a stream.
    pub(crate) fn train_samples(&self) -> Option<&Samples> {
        match self {
            Self::Stream(_) => None,
            Self::Samples(corpus) => Some(corpus.train.samples()),
            Self::Pairs(corpus) => Some(corpus.train.pairs.samples()),
        }
    }

    /// Returns the number of tokens of the longest sequence, at most `limit`.
    pub(crate) fn longest(&self, limit: usize) -> usize {
        match self {
            // Sequences are cut to this length.
            Self::Stream(_) => limit,
            // Rows, not samples: packing makes rows longer, and they determine the memory of a
            // step.
            Self::Samples(corpus) => corpus.train.statistics().row_lengths.longest().min(limit),
            Self::Pairs(corpus) => corpus.train.pairs.statistics().row_lengths.longest().min(limit),
        }
    }

    /// Returns the number of sequences of a rank in an epoch, which is the same on all ranks. The
    /// last step of an epoch of samples counts as a full one.
    pub(crate) fn samples_per_epoch(
        &self,
        shard: DataShard,
        order: Order,
        batch: BatchPlan,
    ) -> Result<usize, DataError> {
        match self {
            Self::Stream(corpus) => {
                let sampler = DistributedSampler::new(corpus.train.len(), shard, order)?;
                Ok(sampler.samples_per_epoch())
            }
            Self::Samples(_) | Self::Pairs(_) => {
                let sampler = epoch_sampler(self.num_samples(), shard, order, batch)?;
                // The epoch ends with a step, so its last micro-batches may be partly empty.
                let micro_batches = sampler.steps_per_epoch() * batch.gradient_accumulation_steps;
                Ok(micro_batches * batch.micro_batch_size)
            }
        }
    }

    /// Returns the number of training sequences.
    pub(crate) fn num_samples(&self) -> usize {
        match self {
            Self::Stream(corpus) => corpus.train.len(),
            Self::Samples(corpus) => corpus.train.len(),
            Self::Pairs(corpus) => corpus.train.pairs.len(),
        }
    }

    /// Returns a hash of the training tokens.
    pub(crate) fn fingerprint(&self) -> Result<String, DataError> {
        match self {
            Self::Stream(corpus) => corpus.train.fingerprint(),
            Self::Samples(corpus) => corpus.train.fingerprint(),
            Self::Pairs(corpus) => corpus.train.pairs.fingerprint(),
        }
    }

    /// Returns a hash of the evaluation tokens; `None` without an evaluation split.
    pub(crate) fn evaluation_fingerprint(&self) -> Result<Option<String>, DataError> {
        match self {
            Self::Stream(corpus) => corpus.eval.as_ref().map(Sequences::fingerprint).transpose(),
            Self::Samples(corpus) => corpus.eval.as_ref().map(SampleRows::fingerprint).transpose(),
            Self::Pairs(corpus) => {
                corpus.eval.as_ref().map(|eval| eval.pairs.fingerprint()).transpose()
            }
        }
    }

    /// Starts the data loader of `shard`.
    ///
    /// # Errors
    /// Returns an error if there are more ranks than sequences of a stream, or if the thread cannot
    /// be started.
    pub(crate) fn source(
        &self,
        shard: DataShard,
        plan: &Plan,
        settings: &RecipeSettings,
    ) -> Result<CausalSource, DataError> {
        match self {
            Self::Stream(corpus) => {
                let (train, eval) = (corpus.train.clone(), corpus.eval.clone());
                let sampler = DistributedSampler::new(train.len(), shard, settings.order)?;
                let loader =
                    BatchLoader::start(train, sampler, plan.batch.micro_batch_size, PREFETCH)?;
                Ok(CausalSource::new(loader, eval, shard, plan, settings))
            }
            Self::Samples(corpus) => sample_source(corpus, shard, plan, settings),
            Self::Pairs(corpus) => sample_source(corpus, shard, plan, settings),
        }
    }

    /// Returns the batches of `shard` in the test split, with `rows` sequences each; `None` without
    /// a test split.
    ///
    /// # Errors
    /// Returns an error if the split has no sequences.
    pub(crate) fn test(
        &self,
        shard: DataShard,
        rows: usize,
    ) -> Result<Option<EvaluationStream<'_, TokenBatch>>, DataError> {
        let batches = match self {
            Self::Stream(corpus) => {
                corpus.test.as_ref().map(|it| evaluation(it, shard, rows, None))
            }
            Self::Samples(corpus) => {
                corpus.test.as_ref().map(|it| evaluation(it, shard, rows, None))
            }
            Self::Pairs(corpus) => corpus.test.as_ref().map(|it| evaluation(it, shard, rows, None)),
        };
        batches.transpose()
    }
}

/// Returns the sampler of the samples of `shard`.
///
/// # Errors
/// Returns an error if the batch is too large to count its samples.
fn epoch_sampler(
    num_samples: usize,
    shard: DataShard,
    order: Order,
    batch: BatchPlan,
) -> Result<EpochSampler, DataError> {
    let shape =
        StepShape { num_ranks: shard.num_ranks, accumulation: batch.gradient_accumulation_steps };
    EpochSampler::new(num_samples, shard.rank, shape, batch.micro_batch_size, order)
}

/// Starts the data loader of `shard` for samples or pairs of them.
///
/// # Errors
/// Returns an error if the thread cannot be started.
fn sample_source<D>(
    corpus: &SampleCorpus<D>,
    shard: DataShard,
    plan: &Plan,
    settings: &RecipeSettings,
) -> Result<CausalSource, DataError>
where
    D: Collate<Batch: Into<TokenBatch>> + Clone + 'static,
{
    let (train, eval) = (corpus.train.clone(), corpus.eval.clone());
    // Ranks draw from one order, which depends on the seed and the epoch only.
    let sampler = epoch_sampler(train.num_samples(), shard, settings.order, plan.batch)?;
    let loader = BatchLoader::drawing(train, sampler, PREFETCH)?;
    Ok(CausalSource::new(loader, eval, shard, plan, settings))
}

/// The data loader of one rank, for any kind of data.
pub(crate) struct CausalSource(Box<dyn BatchSource<TokenBatch>>);

impl CausalSource {
    /// Returns a source with the micro-batches of `loader` and the evaluations of `eval`.
    fn new<D, S>(
        loader: BatchLoader<D, S>,
        eval: Option<D>,
        shard: DataShard,
        plan: &Plan,
        settings: &RecipeSettings,
    ) -> Self
    where
        D: Collate<Batch: Into<TokenBatch>> + 'static,
        S: BatchSampler<Position: Serialize + DeserializeOwned> + 'static,
    {
        let rows = settings.eval_batch_size(plan);
        let eval_max_samples = settings.evaluation.eval_max_samples;
        let curriculum = plan.data_efficiency.curriculum.clone();
        Self(Box::new(TokenSource { loader, eval, shard, rows, eval_max_samples, curriculum }))
    }
}

impl BatchSource<TokenBatch> for CausalSource {
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<TokenBatch>, BoxError> {
        self.0.next_step(next)
    }

    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, TokenBatch>>, BoxError> {
        self.0.evaluation()
    }

    fn position(&self) -> Value {
        self.0.position()
    }

    fn seek(&mut self, position: &Value) -> Result<(), BoxError> {
        self.0.seek(position)
    }
}

/// The data loader of one rank, for one kind of data.
///
/// It assembles micro-batches in advance on its own thread. Rank r of W takes the sequences r, r +
/// W, r + 2W and so on, as PyTorch's `DistributedSampler` does.
struct TokenSource<D: Collate, S: BatchSampler> {
    /// Micro-batches for training.
    loader: BatchLoader<D, S>,
    /// The sequences of an evaluation.
    eval: Option<D>,
    /// The rank and the number of ranks.
    shard: DataShard,
    /// Sequences of an evaluation batch.
    rows: usize,
    /// The maximum number of sequences of an evaluation.
    eval_max_samples: Option<usize>,
    /// The maximum length of sequences by step.
    curriculum: Option<CurriculumPlan>,
}

impl<D, S> BatchSource<TokenBatch> for TokenSource<D, S>
where
    D: Collate<Batch: Into<TokenBatch>>,
    S: BatchSampler<Position: Serialize + DeserializeOwned>,
{
    /// Returns the batches of a step. A curriculum truncates sequences after they have been loaded,
    /// so data-loader positions do not depend on it.
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<TokenBatch>, BoxError> {
        let length = longest(self.curriculum.as_ref(), next);
        let batches = (0..next.micro_batches).map(|_| {
            let mut batch: TokenBatch = self.loader.next_batch()?.into();
            batch.truncate(length);
            Ok(batch)
        });
        Ok(batches.collect::<Result<Vec<_>, DataError>>()?.into())
    }

    /// Starts an evaluation. Only one batch of the stream is in memory at a time.
    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, TokenBatch>>, BoxError> {
        let (shard, rows, limit) = (self.shard, self.rows, self.eval_max_samples);
        let eval = self.eval.as_ref();
        Ok(eval.map(|eval| evaluation(eval, shard, rows, limit)).transpose()?)
    }

    /// Returns the data-loader position as JSON, for the checkpoint.
    fn position(&self) -> Value {
        json!(self.loader.position())
    }

    /// Seeks to a position without loading the batches before it.
    fn seek(&mut self, position: &Value) -> Result<(), BoxError> {
        Ok(self.loader.seek(serde_json::from_value(position.clone())?)?)
    }
}

/// Returns the batches of one rank in an evaluation of the first `limit` sequences, with `rows`
/// sequences each.
///
/// # Errors
/// Returns an error if the split has no sequences.
fn evaluation<D: Collate<Batch: Into<TokenBatch>>>(
    data: &D,
    shard: DataShard,
    rows: usize,
    limit: Option<usize>,
) -> Result<EvaluationStream<'_, TokenBatch>, DataError> {
    // Ranks without a sample get batches of padding, because evaluating gathers parameters.
    let batches = EvaluationBatches::new(data, shard, rows)?.take_samples(limit);
    Ok(Box::new(batches.map(|batch| Ok(batch?.into()))))
}
