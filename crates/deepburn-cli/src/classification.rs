//! Classification: how an encoder learns the classes of texts.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Training, Zero};
use deepburn::{Batch, BatchSource, Confusion, Evaluation, OutsideError, Task};
use deepburn_config::{BatchPlan, Job};
use deepburn_datasets::{
    BatchLoader, DataError, DistributedSampler, EvaluationBatches, LabelledBatch, LabelledTexts,
    Order, Shard, Tokenizer,
};
use deepburn_models::gpt2::{CheckpointError, CheckpointWriter, SavedPrecision};
use deepburn_models::imdb::{Encoder, EncoderConfig, TextBatch, TextBatchError};

use crate::failure::Failure;
use crate::memory::{check_model, check_step};
use crate::recipe::Recipe;
use crate::texts::{Texts, open_texts};

/// An encoder and the texts it learns to tell apart.
pub(crate) struct Classification {
    pub(crate) config: EncoderConfig,
    texts: Texts,
    order: Order,
    seed: u64,
}

impl Classification {
    /// Reads and checks model and data.
    ///
    /// # Errors
    /// Always a user's mistake.
    pub(crate) fn prepare(job: &Job, batch: BatchPlan, order: Order) -> Result<Self, Failure> {
        let named = |error| Failure::mistake(format!("model.config: {error}"));
        let fields = &job.model.config;
        let config = EncoderConfig::guide().with_overrides(fields).map_err(named)?;
        config.validate().map_err(named)?;
        let length = job.data.sequence_length;
        if length > config.max_len {
            return Err(Failure::mistake(format!(
                "data.sequence_length: {length} is longer than the model allows \
                 (model.config.max_len = {}); use at most that",
                config.max_len
            )));
        }
        check_step(batch, length)?;
        let texts = open_texts(job).map_err(Failure::mistake)?;
        let config = sized_by(&texts, config, job)?;
        check_model(&config.parameters(), "embed_dim, hidden_dim, num_layers or vocab_size")?;
        Ok(Self { config, texts, order, seed: job.training.seed })
    }

    /// Samples that a rank draws in an epoch.
    pub(crate) fn samples_per_epoch(&self, shard: Shard) -> Result<usize, DataError> {
        let sampler = DistributedSampler::new(self.texts.train.len(), shard, self.order)?;
        Ok(sampler.samples_per_epoch())
    }
}

/// The vocabulary and the classes are those of the data unless the job says otherwise, and then
/// there must be enough of them.
fn sized_by(texts: &Texts, config: EncoderConfig, job: &Job) -> Result<EncoderConfig, Failure> {
    let given = |name: &str| job.model.config.contains_key(name);
    let sizes = [
        ("vocab_size", config.vocab_size, texts.tokenizer.vocab_size()),
        ("num_classes", config.num_classes, texts.num_classes()),
    ];
    for (name, size, needed) in sizes {
        if given(name) && size < needed {
            return Err(Failure::mistake(format!(
                "model.config.{name}: {size} is too small for the data, which has {needed}; give at \
                 least that, or leave it out"
            )));
        }
    }
    let [vocab_size, num_classes] =
        sizes.map(|(name, size, needed)| if given(name) { size } else { needed.max(2) });
    Ok(EncoderConfig { vocab_size, num_classes, ..config })
}

impl<B: FusedOps + OptimizerOps> Recipe<B> for Classification {
    type Model = Encoder<Training<B>>;
    type Task = TextClass<B::Device>;
    type Source = TextSource;

    fn model(&self, device: &B::Device) -> Result<Self::Model, Failure> {
        Encoder::new(&self.config, self.seed, device).map_err(Failure::mistake)
    }

    fn task(&self, device: B::Device) -> Self::Task {
        TextClass { config: self.config.clone(), device }
    }

    fn source(&self, shard: Shard, rows: usize) -> Result<TextSource, DataError> {
        let Texts { train, eval, .. } = self.texts.clone();
        TextSource::new(train, eval, shard, self.order, rows)
    }

    fn test(&self, shard: Shard, rows: usize) -> Result<Option<TextSource>, DataError> {
        let Texts { train, test, .. } = self.texts.clone();
        let Some(test) = test else { return Ok(None) };
        TextSource::new(train, Some(test), shard, self.order, rows).map(Some)
    }

    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError> {
        self.config.checkpoint_writer(folder, SavedPrecision::F32)
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        Some(&self.texts.tokenizer)
    }
}

/// A micro-batch of texts.
pub(crate) struct Labelled(LabelledBatch);

impl Batch for Labelled {
    fn num_tokens(&self) -> usize {
        self.0.num_tokens()
    }

    fn num_targets(&self) -> usize {
        self.0.num_texts()
    }
}

impl Labelled {
    /// The batch on a device, checked against the model.
    fn on<B: Backend>(
        &self,
        config: &EncoderConfig,
        device: &B::Device,
    ) -> Result<TextBatch<B>, TextBatchError> {
        let LabelledBatch { input_ids, lengths, labels } = &self.0;
        TextBatch::new(config, input_ids, lengths, labels, device)
    }
}

/// Telling the class of a text.
pub(crate) struct TextClass<D> {
    config: EncoderConfig,
    device: D,
}

impl<B: FusedOps> Task<B, Encoder<Training<B>>> for TextClass<B::Device> {
    type Batch = Labelled;

    fn loss(
        &self,
        model: &Encoder<Training<B>>,
        batch: &Labelled,
    ) -> Result<Tensor<Training<B>, 1>, OutsideError> {
        let texts = batch.num_targets().max(1);
        let (sum, _) = model.loss(&batch.on(&self.config, &self.device)?);
        Ok(sum / texts as f64)
    }

    fn evaluate(
        &self,
        model: &Encoder<Zero<B>>,
        batch: &Labelled,
    ) -> Result<Evaluation, OutsideError> {
        let (sum, logits) = model.loss(&batch.on(&self.config, &self.device)?);
        let answers = logits.argmax(1).into_data().convert::<i64>();
        let mut confusion = Confusion::new(self.config.num_classes);
        let labels = batch.0.labels.iter().zip(answers.iter::<i64>());
        for (label, answer) in labels.filter(|(label, _)| **label >= 0) {
            confusion.count(*label as usize, answer as usize);
        }
        Ok(Evaluation { loss_sum: sum.into_scalar().elem(), answers: Some(confusion) })
    }
}

/// One rank's share of the texts.
pub(crate) struct TextSource {
    loader: BatchLoader<LabelledTexts>,
    eval: Option<Arc<LabelledTexts>>,
    shard: Shard,
    rows: usize,
}

/// Micro-batches assembled ahead of their use.
const PREFETCH: usize = 4;

impl TextSource {
    fn new(
        train: Arc<LabelledTexts>,
        eval: Option<Arc<LabelledTexts>>,
        shard: Shard,
        order: Order,
        rows: usize,
    ) -> Result<Self, DataError> {
        let sampler = DistributedSampler::new(train.len(), shard, order)?;
        let loader = BatchLoader::start(train, sampler, rows, PREFETCH)?;
        Ok(Self { loader, eval, shard, rows })
    }
}

impl BatchSource<Labelled> for TextSource {
    fn next_batch(&mut self) -> Result<Labelled, OutsideError> {
        Ok(Labelled(self.loader.next_batch()?))
    }

    fn evaluation(&mut self) -> Result<Option<Vec<Labelled>>, OutsideError> {
        let Some(eval) = &self.eval else {
            return Ok(None);
        };
        let batches = EvaluationBatches::new(&**eval, self.shard, self.rows)?;
        let batches = batches.map(|batch| batch.map(Labelled)).collect::<Result<_, _>>()?;
        Ok(Some(batches))
    }
}
