//! GPT-2 that tells classes of texts apart.
//!
//! Main type: [`Gpt2Classifier`], the `GPT2ForSequenceClassification` of `transformers`: a linear map
//! of what the last token of a text has become.

use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use deepburn_ops::{FusedOps, cross_entropy};
use serde_json::{Map, Value};

use super::attention::Extent;
use super::checkpoint::{CONFIG, Checkpoint, CheckpointError};
use super::checkpoint_writer::{CheckpointWriter, classifier_config};
use super::config::{ConfigError, Gpt2Config};
use super::model::Gpt2;
use super::parameters::{ParameterShape, SCORE, parameter};
use super::precision::SavedPrecision;
use crate::Publication;
use crate::class_names::{ClassNames, ClassNamesError};
use crate::texts::{TextBatch, TextLimits};
use crate::weights::{Values, WeightInit};

/// How large a classifier is.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassifierConfig {
    /// The language model's; whether its head is tied makes no difference.
    pub body: Gpt2Config,
    /// Number of classes, at least 2.
    pub num_classes: usize,
}

/// GPT-2 without its language-model head, and a score for each class.
#[derive(Module, Debug)]
pub struct Gpt2Classifier<B: Backend> {
    transformer: Gpt2<B>,
    score: Score<B>,
}

/// The scores' projection, `[num_classes, width]` as torch has it.
#[derive(Module, Debug)]
struct Score<B: Backend> {
    weight: Param<Tensor<B, 2>>,
}

impl ClassifierConfig {
    /// What texts it takes.
    #[must_use]
    pub fn limits(&self) -> TextLimits {
        TextLimits {
            vocab_size: self.body.vocab_size,
            max_len: self.body.n_positions,
            num_classes: self.num_classes,
        }
    }

    /// All parameters, in the order in which the module holds them. Their paths are their names in
    /// `transformers`.
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterShape> {
        let body = self.headless().parameters();
        let body = body.into_iter().map(|ParameterShape { path, shape }| {
            let path = format!("transformer.{path}");
            ParameterShape { path, shape }
        });
        body.chain([parameter(SCORE, &[self.num_classes, self.body.n_embd])]).collect()
    }

    /// Starts a checkpoint in `folder` that `transformers` loads, which is created if need be.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the folder cannot be written to.
    pub fn checkpoint_writer(
        &self,
        folder: &Path,
        precision: SavedPrecision,
    ) -> Result<CheckpointWriter, CheckpointError> {
        let documents = vec![(CONFIG, classifier_config(self, precision))];
        let name = |path: &str| path.to_owned();
        CheckpointWriter::start(folder, self.parameters(), name, precision, documents)
    }

    /// How a classifier of this config goes by in `transformers`.
    #[must_use]
    pub fn publication(&self) -> Publication {
        let documents = vec![(CONFIG, classifier_config(self, SavedPrecision::F32))];
        Publication::new(&self.parameters(), str::to_owned, documents)
    }

    /// Reads all weights that [`Gpt2Classifier::load_lazily`] will read, and keeps none.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] naming every tensor that does not fit, or an I/O error.
    pub fn check_values(&self, mut checkpoint: Checkpoint) -> Result<(), CheckpointError> {
        checkpoint.take(SCORE, &[self.num_classes, self.body.n_embd])?;
        checkpoint.leave_head();
        checkpoint.check_values(&self.headless())
    }

    /// The fields of `config.json` that the classes add.
    pub(crate) fn labels(&self) -> Map<String, Value> {
        // Names that are not sound, or of another number of classes, are those of another model.
        let names = self.class_names().unwrap_or_default();
        ClassNames::fields(names.as_ref(), self.num_classes)
    }

    /// The names of its classes; `None` where they are numbers, or the names of the config are those of
    /// more classes than there are.
    ///
    /// # Errors
    /// [`ClassNamesError`] for names that do not name each class from 0 once.
    pub fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        let names = self.body.class_names()?;
        Ok(names.filter(|names| names.as_slice().len() <= self.num_classes))
    }

    /// The same with these names of classes.
    #[must_use]
    pub fn with_class_names(mut self, names: Option<&ClassNames>) -> Self {
        self.body.carried.0.extend(ClassNames::fields(names, self.num_classes));
        self
    }

    /// A tied head is the embedding, so the model has none of its own.
    fn headless(&self) -> Gpt2Config {
        Gpt2Config { tie_word_embeddings: true, ..self.body.clone() }
    }
}

impl<B: Backend> Gpt2Classifier<B> {
    /// A model with initial weights that depend on `seed` and each parameter's path alone.
    ///
    /// # Errors
    /// [`ConfigError`] if the config does not hold together.
    pub fn new(
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ConfigError> {
        let transformer = Gpt2::new(&config.headless(), seed, device)?;
        Ok(Self { transformer, score: Score::new(config, seed, device) })
    }

    /// A model whose weights are 0, for a caller who replaces them.
    ///
    /// # Errors
    /// [`ConfigError`] if the config does not hold together.
    pub fn zeros(config: &ClassifierConfig, device: &B::Device) -> Result<Self, ConfigError> {
        let transformer = Gpt2::zeros(&config.headless(), device)?;
        Ok(Self { transformer, score: Score::with(config, &WeightInit::zeros(device)) })
    }

    /// A model with the weights of a checkpoint: of a language model, whose head is left out and
    /// for which scores are drawn from `seed`, or of a classifier.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] naming every tensor that does not fit, or an I/O error.
    pub fn load(
        mut checkpoint: Checkpoint,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, CheckpointError> {
        let score = Score::taken_from(&mut checkpoint, config, seed, device)?;
        Ok(Self { transformer: checkpoint.load(&config.headless(), device)?, score })
    }

    /// A trained classifier; unlike [`load`](Self::load) it draws nothing.
    ///
    /// # Errors
    /// As [`load`](Self::load), and [`CheckpointError::Tensors`] for a checkpoint without scores.
    pub fn load_trained(
        checkpoint: Checkpoint,
        config: &ClassifierConfig,
        device: &B::Device,
    ) -> Result<Self, CheckpointError> {
        checkpoint.require(SCORE, &[config.num_classes, config.body.n_embd])?;
        Self::load(checkpoint, config, 0, device)
    }

    /// The model that [`load`](Self::load) makes, except that weights of the language model are read
    /// when first used, as by [`Checkpoint::load_lazily`].
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] naming every tensor that does not fit, or an I/O error.
    pub fn load_lazily(
        mut checkpoint: Checkpoint,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, CheckpointError> {
        let score = Score::taken_from(&mut checkpoint, config, seed, device)?;
        Ok(Self { transformer: checkpoint.load_lazily(&config.headless(), device)?, score })
    }
}

impl<B: Backend> Score<B> {
    /// The scores of a classifier's checkpoint, or new ones. Leaves what the language model needs.
    fn taken_from(
        checkpoint: &mut Checkpoint,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, CheckpointError> {
        let shape = [config.num_classes, config.body.n_embd];
        let score = match checkpoint.take(SCORE, &shape)? {
            Some(values) => {
                let values = TensorData::new(values, shape);
                Self { weight: Param::from_tensor(Tensor::from_data(values, device)) }
            }
            None => Self::new(config, seed, device),
        };
        checkpoint.leave_head();
        Ok(score)
    }

    fn new(config: &ClassifierConfig, seed: u64, device: &B::Device) -> Self {
        Self::with(config, &WeightInit::new(seed, device))
    }

    fn with(config: &ClassifierConfig, init: &WeightInit<B>) -> Self {
        let values = Values::Normal { std: config.body.initializer_range };
        let shape = [config.num_classes, config.body.n_embd];
        Self { weight: init.param(SCORE, shape, values) }
    }
}

impl<B: FusedOps> Gpt2Classifier<B> {
    /// Logits `[texts, num_classes]`.
    pub fn forward(&self, batch: &TextBatch<B>) -> Tensor<B, 2> {
        let [texts, length] = batch.input_ids.dims();
        let extent = Extent { batch: texts, past: 0, queries: length };
        let hidden = self.transformer.hidden(batch.input_ids.clone(), extent, None);
        // What a token attends to lies before it, so padding behind a text changes nothing in it.
        let last = batch.lengths.iter().enumerate();
        let last: Vec<i32> =
            last.map(|(text, own)| (text * length + own.max(&1) - 1) as i32).collect();
        let last = Tensor::<B, 1, Int>::from_data(TensorData::new(last, [texts]), &hidden.device());
        let normed = self.transformer.norm(hidden.select(0, last));
        normed.matmul(self.score.weight.val().transpose())
    }

    /// Cross-entropy summed over the texts, `[1]`, at least f32, and the logits.
    pub fn loss(&self, batch: &TextBatch<B>) -> (Tensor<B, 1>, Tensor<B, 2>) {
        let logits = self.forward(batch);
        (cross_entropy(logits.clone(), batch.labels.clone()), logits)
    }
}
