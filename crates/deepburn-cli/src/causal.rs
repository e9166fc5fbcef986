//! Language modelling: how GPT-2 learns from token sequences.

use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use deepburn::ops::FusedOps;
use deepburn::zero::{Training, Zero};
use deepburn::{Batch, BatchSource, Evaluation, OutsideError, Task};
use deepburn_datasets::{
    BatchLoader, DataError, DistributedSampler, EvaluationBatches, IGNORE_INDEX, MicroBatch, Order,
    Sequences, Shard,
};
use deepburn_models::gpt2::{CausalBatch, Gpt2, Gpt2Config, IGNORED_LABEL, InputError};

/// A micro-batch of token sequences.
pub(crate) struct TokenBatch(MicroBatch);

impl Batch for TokenBatch {
    fn num_tokens(&self) -> usize {
        self.0.samples * self.0.shape[1]
    }

    fn num_targets(&self) -> usize {
        self.0.num_targets()
    }
}

impl TokenBatch {
    /// The batch on a device, checked against the model's vocabulary and length.
    fn on<B: Backend>(
        &self,
        config: &Gpt2Config,
        device: &B::Device,
    ) -> Result<CausalBatch<B>, InputError> {
        let MicroBatch { input_ids, labels, shape, .. } = &self.0;
        // Neither is negative but for the mark of padding: they were read as unsigned numbers.
        let ids: Vec<u32> = input_ids.iter().map(|id| *id as u32).collect();
        let label =
            |label: &i32| if *label == IGNORE_INDEX { IGNORED_LABEL } else { (*label).into() };
        let labels: Vec<i64> = labels.iter().map(label).collect();
        CausalBatch::new(config, &ids, Some(&labels), *shape, device)
    }
}

/// Predicting the next token.
pub(crate) struct NextToken<D> {
    pub(crate) config: Gpt2Config,
    pub(crate) device: D,
}

impl<B: FusedOps> Task<B, Gpt2<Training<B>>> for NextToken<B::Device> {
    type Batch = TokenBatch;

    fn loss(
        &self,
        model: &Gpt2<Training<B>>,
        batch: &TokenBatch,
    ) -> Result<Tensor<Training<B>, 1>, OutsideError> {
        let batch = batch.on(&self.config, &self.device)?;
        Ok(model.loss(&batch).mean())
    }

    fn evaluate(
        &self,
        model: &Gpt2<Zero<B>>,
        batch: &TokenBatch,
    ) -> Result<Evaluation, OutsideError> {
        let batch = batch.on(&self.config, &self.device)?;
        let loss_sum = model.loss(&batch).sum.into_scalar().elem::<f64>();
        Ok(Evaluation { loss_sum, num_correct: None })
    }
}

/// One rank's share of the data.
pub(crate) struct TokenSource {
    loader: BatchLoader<Sequences>,
    eval: Option<Sequences>,
    shard: Shard,
    rows: usize,
}

/// Micro-batches assembled ahead of their use.
const PREFETCH: usize = 4;

impl TokenSource {
    /// The share of `shard` in micro-batches of `rows` sequences.
    pub(crate) fn new(
        train: Sequences,
        eval: Option<Sequences>,
        shard: Shard,
        order: Order,
        rows: usize,
    ) -> Result<Self, DataError> {
        let sampler = DistributedSampler::new(train.len(), shard, order)?;
        let loader = BatchLoader::start(train, sampler, rows, PREFETCH)?;
        Ok(Self { loader, eval, shard, rows })
    }
}

impl BatchSource<TokenBatch> for TokenSource {
    fn next_batch(&mut self) -> Result<TokenBatch, OutsideError> {
        Ok(TokenBatch(self.loader.next_batch()?))
    }

    fn evaluation(&mut self) -> Result<Option<Vec<TokenBatch>>, OutsideError> {
        let Some(eval) = &self.eval else {
            return Ok(None);
        };
        let batches = EvaluationBatches::new(eval, self.shard, self.rows)?;
        let batches = batches.map(|batch| batch.map(TokenBatch)).collect::<Result<_, _>>()?;
        Ok(Some(batches))
    }
}
