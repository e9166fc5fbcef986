//! Classification: how a model learns the classes of texts.
//!
//! Main type: [`Classification`], of an [`Encoder`] or of a [`Gpt2Classifier`].

use std::path::{Path, PathBuf};

use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Training, Zero};
use deepburn::{Batch, Confusion, Evaluation, EvaluationStream, OutsideError, Task};
use deepburn_config::{BatchPlan, DynamicBatchingPlan, Job, Plan};
use deepburn_datasets::{
    BudgetSampler, DataError, DistributedSampler, LabelledBatch, Order, Shard, StepShape, Tokenizer,
};
use deepburn_models::gpt2::{
    Checkpoint, CheckpointError, CheckpointWriter, ClassifierConfig, Gpt2Classifier, SavedPrecision,
};
use deepburn_models::imdb::{Encoder, EncoderConfig};
use deepburn_models::{ClassNames, TextBatch, TextBatchError, TextLimits};

use crate::data::causal::model_config;
use crate::data::lengths::check_length;
use crate::data::places::Places;
use crate::data::recipe::{InitialWeights, Recipe};
use crate::data::text_source::{Labelled, TextSource, budget, evaluation, evaluation_budget};
use crate::data::texts::{Texts, open_texts};
use crate::data::vocabulary::{with_special_tokens, with_vocabulary};
use crate::failure::Failure;
use crate::job::memory::check_step;

/// A classifier and the texts that it learns to tell apart.
pub(crate) struct Classification<K> {
    pub(crate) kind: K,
    texts: Texts,
    order: Order,
    seed: u64,
    eval_max_samples: Option<usize>,
}

/// Which model tells the texts apart.
pub(crate) trait Kind: Sync {
    /// What texts the model takes.
    fn limits(&self) -> TextLimits;

    /// Starts writing it.
    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError>;

    /// Reads the weights that it starts from once, if there are some.
    fn check_weights(&self) -> Result<(), Failure>;
}

/// A kind's model on a backend.
pub(crate) trait KindOn<B: FusedOps + OptimizerOps>: Kind {
    /// The model.
    type Model: Classifier<Training<B>>
        + AutodiffModule<Training<B>, InnerModule: Classifier<Zero<B>>>;

    /// The model. Weights are drawn from `seed`, or read, when they are first used.
    fn model(
        &self,
        weights: InitialWeights,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self::Model, Failure>;
}

/// A model that gives logits and their loss.
pub(crate) trait Classifier<B: Backend> {
    /// Cross-entropy summed over the texts, and the logits.
    fn loss(&self, batch: &TextBatch<B>) -> (Tensor<B, 1>, Tensor<B, 2>);
}

impl<B: FusedOps> Classifier<B> for Encoder<B> {
    fn loss(&self, batch: &TextBatch<B>) -> (Tensor<B, 1>, Tensor<B, 2>) {
        Encoder::loss(self, batch)
    }
}

impl<B: FusedOps> Classifier<B> for Gpt2Classifier<B> {
    fn loss(&self, batch: &TextBatch<B>) -> (Tensor<B, 1>, Tensor<B, 2>) {
        Gpt2Classifier::loss(self, batch)
    }
}

impl Kind for EncoderConfig {
    fn limits(&self) -> TextLimits {
        EncoderConfig::limits(self)
    }

    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError> {
        self.checkpoint_writer(folder, SavedPrecision::F32)
    }

    fn check_weights(&self) -> Result<(), Failure> {
        Ok(())
    }
}

impl<B: FusedOps + OptimizerOps> KindOn<B> for EncoderConfig {
    type Model = Encoder<Training<B>>;

    fn model(
        &self,
        weights: InitialWeights,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self::Model, Failure> {
        let model = match weights {
            InitialWeights::Zeros => Encoder::zeros(self, device),
            InitialWeights::OfJob => Encoder::new(self, seed, device),
        };
        model.map_err(Failure::mistake)
    }
}

/// GPT-2, and where its weights come from.
pub(crate) struct OnGpt2 {
    pub(crate) config: ClassifierConfig,
    pretrained: Option<PathBuf>,
}

impl Kind for OnGpt2 {
    fn limits(&self) -> TextLimits {
        self.config.limits()
    }

    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError> {
        self.config.checkpoint_writer(folder, SavedPrecision::F32)
    }

    fn check_weights(&self) -> Result<(), Failure> {
        let Some(folder) = &self.pretrained else { return Ok(()) };
        let checkpoint = Checkpoint::open(folder).map_err(Failure::mistake)?;
        self.config.check_values(checkpoint).map_err(Failure::mistake)
    }
}

impl<B: FusedOps + OptimizerOps> KindOn<B> for OnGpt2 {
    type Model = Gpt2Classifier<Training<B>>;

    fn model(
        &self,
        weights: InitialWeights,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self::Model, Failure> {
        match (weights, &self.pretrained) {
            (InitialWeights::Zeros, _) => {
                Gpt2Classifier::zeros(&self.config, device).map_err(Failure::mistake)
            }
            (InitialWeights::OfJob, Some(folder)) => {
                let checkpoint = Checkpoint::open(folder).map_err(Failure::mistake)?;
                Gpt2Classifier::load_lazily(checkpoint, &self.config, seed, device)
                    .map_err(Failure::mistake)
            }
            (InitialWeights::OfJob, None) => {
                Gpt2Classifier::new(&self.config, seed, device).map_err(Failure::mistake)
            }
        }
    }
}

impl Classification<EncoderConfig> {
    /// Reads and checks model and data of an encoder.
    ///
    /// # Errors
    /// Always a user's mistake.
    pub(crate) fn of_encoder(
        job: &Job,
        places: &Places,
        batch: BatchPlan,
        order: Order,
    ) -> Result<Self, Failure> {
        let named = |error| Failure::mistake(format!("model.config: {error}"));
        let config = EncoderConfig::guide().with_overrides(&job.model.config).map_err(named)?;
        config.validate().map_err(named)?;
        check_length(job, config.max_len, "max_len")?;
        check_step(batch, job.data.sequence_length)?;
        let names = config.class_names().map_err(|error| named_config(&error))?;
        let texts = open_named_texts(job, places, None, names.as_ref())?;
        let vocabulary = ("vocab_size", config.vocab_size, texts.tokenizer.vocab_size());
        let names = all_names(names, &texts)?;
        let classes = ("num_classes", config.num_classes, num_classes(names.as_ref(), &texts));
        let config = EncoderConfig {
            vocab_size: sized_by_data(job, vocabulary)?,
            num_classes: sized_by_data(job, classes)?,
            ..config
        };
        let config = config.with_class_names(names.as_ref());
        let (seed, eval_max_samples) = (job.training.seed, job.training.eval_max_samples);
        Ok(Self { kind: config, texts, order, seed, eval_max_samples })
    }
}

impl Classification<OnGpt2> {
    /// Reads and checks model and data of a classifier on GPT-2.
    ///
    /// # Errors
    /// Always a user's mistake.
    pub(crate) fn of_gpt2(
        job: &Job,
        places: &Places,
        batch: BatchPlan,
        order: Order,
    ) -> Result<Self, Failure> {
        let pretrained = job.model.pretrained.as_ref().map(|place| places.model(place));
        let pretrained = pretrained.transpose().map_err(Failure::mistake)?;
        let body = model_config(job, pretrained.as_deref())?;
        check_length(job, body.n_positions, "n_positions")?;
        check_step(batch, job.data.sequence_length)?;
        // Names of the job take the place of both fields of the checkpoint.
        let given = ["id2label", "label2id"].iter().any(|it| job.model.config.contains_key(*it));
        let names = if given { ClassNames::read(&job.model.config) } else { body.class_names() };
        let names = names.map_err(|error| named_config(&error))?;
        let texts = open_named_texts(job, places, pretrained.as_deref(), names.as_ref())?;
        let body = with_vocabulary(body, job, Some(&texts.tokenizer))?;
        if texts.tokenizer.vocab_size() > body.vocab_size {
            return Err(Failure::mistake(format!(
                "data.tokenizer: it has {} tokens, the model {} (model.config.vocab_size); use the \
                 model's own tokenizer",
                texts.tokenizer.vocab_size(),
                body.vocab_size
            )));
        }
        let given = job.model.config.get("num_labels").and_then(serde_json::Value::as_u64);
        let special = ["bos_token_id", "eos_token_id", "pad_token_id"];
        let body =
            with_special_tokens(body, job, pretrained.as_deref(), &texts.tokenizer, &special)?;
        let names = all_names(names, &texts)?;
        let needed = num_classes(names.as_ref(), &texts);
        let classes = ("num_labels", given.unwrap_or(0) as usize, needed);
        let config = ClassifierConfig { body, num_classes: sized_by_data(job, classes)? };
        let config = config.with_class_names(names.as_ref());
        let kind = OnGpt2 { config, pretrained };
        let (seed, eval_max_samples) = (job.training.seed, job.training.eval_max_samples);
        Ok(Self { kind, texts, order, seed, eval_max_samples })
    }
}

/// Reads the texts of a job whose model may have names of classes.
fn open_named_texts(
    job: &Job,
    places: &Places,
    pretrained: Option<&Path>,
    names: Option<&ClassNames>,
) -> Result<Texts, Failure> {
    let names = names.map(ClassNames::as_slice);
    // Beside such a name nobody can tell whether a label is a name or a class number.
    let number = names.into_iter().flatten().find(|name| name.trim().parse::<i64>().is_ok());
    if let Some(name) = number {
        return Err(Failure::mistake(format!(
            "model.config.id2label: the name \"{name}\" is a number, and labels that are numbers are \
             classes from 0; give another name in model.config.id2label"
        )));
    }
    open_texts(job, places, pretrained, names).map_err(Failure::mistake)
}

/// The names that the model has, or those of the labels.
fn all_names(given: Option<ClassNames>, texts: &Texts) -> Result<Option<ClassNames>, Failure> {
    let found = || texts.classes.names().map(|names| ClassNames::new(names.to_vec())).transpose();
    match given {
        Some(names) => Ok(Some(names)),
        None => found().map_err(Failure::mistake),
    }
}

/// Classes that the model must have.
fn num_classes(names: Option<&ClassNames>, texts: &Texts) -> usize {
    names.map_or(0, |names| names.as_slice().len()).max(texts.num_classes())
}

/// What is wrong with a field of the model's configuration.
fn named_config(error: &impl std::fmt::Display) -> Failure {
    Failure::mistake(format!("model.config: {error}"))
}

impl<K: Kind> Classification<K> {
    /// A hash of the training data.
    pub(crate) fn data_fingerprint(&self) -> String {
        self.texts.train.fingerprint()
    }

    /// A hash of the evaluation data, if there is some.
    pub(crate) fn evaluation_fingerprint(&self) -> Option<String> {
        self.texts.eval.as_ref().map(|texts| texts.fingerprint())
    }

    /// Samples that a rank draws in an epoch.
    pub(crate) fn samples_per_epoch(&self, shard: Shard) -> Result<usize, DataError> {
        let sampler = DistributedSampler::new(self.texts.train.len(), shard, self.order)?;
        Ok(sampler.samples_per_epoch())
    }

    /// Tokens of the longest text to learn from.
    pub(crate) fn longest(&self) -> usize {
        self.texts.train.lengths().into_iter().max().unwrap_or(0)
    }

    /// The batches of a rank under a budget of tokens.
    ///
    /// # Errors
    /// A budget that the texts do not fit.
    pub(crate) fn budget_sampler(
        &self,
        shape: StepShape,
        dynamic: &DynamicBatchingPlan,
    ) -> Result<BudgetSampler, DataError> {
        let shard = Shard { rank: 0, num_ranks: shape.num_ranks };
        let lengths = self.texts.train.lengths();
        BudgetSampler::new(lengths, budget(dynamic), shard, shape.accumulation)
    }
}

/// Beyond this a label is no class: a column of ids was taken for one.
const MOST_CLASSES: usize = 1 << 16;

/// A size of the model is that of the data unless the job says otherwise, and then it must be
/// enough: `(name, the job's or the default, the data's)`.
fn sized_by_data(job: &Job, (name, size, needed): (&str, usize, usize)) -> Result<usize, Failure> {
    let given = job.model.config.contains_key(name);
    if name != "vocab_size" && needed > MOST_CLASSES {
        return Err(Failure::mistake(format!(
            "data.label_field: the highest class is {}, more than the {MOST_CLASSES} classes that a \
             model can have; number the classes from 0",
            needed - 1
        )));
    }
    if given && size < needed.max(2) {
        return Err(Failure::mistake(format!(
            "model.config.{name}: {size} is too small for the data, which has {needed}; give at \
             least that, or leave it out"
        )));
    }
    Ok(if given { size } else { needed.max(2) })
}

impl<B: FusedOps + OptimizerOps, K: KindOn<B>> Recipe<B> for Classification<K> {
    type Model = K::Model;
    type Task = TextClass<B::Device>;
    type Source = TextSource;

    fn model(&self, weights: InitialWeights, device: &B::Device) -> Result<Self::Model, Failure> {
        self.kind.model(weights, self.seed, device)
    }

    fn check_weights(&self) -> Result<(), Failure> {
        self.kind.check_weights()
    }

    fn task(&self, device: B::Device) -> Self::Task {
        TextClass { limits: self.kind.limits(), device }
    }

    fn source(&self, shard: Shard, plan: &Plan) -> Result<TextSource, DataError> {
        let Texts { train, eval, .. } = self.texts.clone();
        let mut source = TextSource::new(train, eval, shard, self.order, plan)?;
        source.eval_max_samples = self.eval_max_samples;
        Ok(source)
    }

    fn test(
        &self,
        shard: Shard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, Labelled>>, DataError> {
        let test = self.texts.test.as_ref();
        test.map(|test| evaluation(test, shard, evaluation_budget(plan), None)).transpose()
    }

    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError> {
        self.kind.writer(folder)
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        Some(&self.texts.tokenizer)
    }
}

/// Telling the class of a text.
pub(crate) struct TextClass<D> {
    limits: TextLimits,
    device: D,
}

impl<D> TextClass<D> {
    /// The batch on the device, checked against the model.
    fn batch<B: Backend<Device = D>>(
        &self,
        batch: &Labelled,
    ) -> Result<TextBatch<B>, TextBatchError> {
        let LabelledBatch { input_ids, lengths, labels } = &batch.0;
        TextBatch::new(self.limits, input_ids, lengths, labels, &self.device)
    }
}

impl<B, M> Task<B, M> for TextClass<B::Device>
where
    B: FusedOps + OptimizerOps,
    M: Classifier<Training<B>> + AutodiffModule<Training<B>, InnerModule: Classifier<Zero<B>>>,
{
    type Batch = Labelled;

    fn loss(&self, model: &M, batch: &Labelled) -> Result<Tensor<Training<B>, 1>, OutsideError> {
        let texts = batch.num_targets().max(1);
        let (sum, _) = model.loss(&self.batch(batch)?);
        Ok(sum / texts as f64)
    }

    fn evaluate(
        &self,
        model: &M::InnerModule,
        batch: &Labelled,
    ) -> Result<Evaluation, OutsideError> {
        let (sum, logits) = model.loss(&self.batch(batch)?);
        let answers = logits.argmax(1).into_data().convert::<i64>();
        let mut confusion = Confusion::new(self.limits.num_classes);
        let labels = batch.0.labels.iter().zip(answers.iter::<i64>());
        for (label, answer) in labels.filter(|(label, _)| **label >= 0) {
            confusion.count(*label as usize, answer as usize);
        }
        Ok(Evaluation { loss_sum: sum.into_scalar().elem(), answers: Some(confusion) })
    }
}
