//! GPT-2 that classifies texts.
//!
//! Main type: [`Gpt2Classifier`], the `GPT2ForSequenceClassification` of `transformers`: a linear map
//! of what the last token of a text has become.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use deepburn_ops::FusedOps;
use serde_json::{Map, Value};

use super::attention::SeqDims;
use super::config::Gpt2Config;
use super::model::Gpt2;
use super::parameters::{HEAD, SCORE};
use super::pretrained::PretrainedGpt2;
use crate::hf::{ClassNames, ClassNamesError, ModelConfigError, ModelFolderError};
use crate::texts::{TextBatch, TextClassifier, TextLimits};
use crate::weights::{InitialValues, WeightInit};

/// The size of a GPT-2 classifier.
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
    /// The language model, whose own head is not used.
    transformer: Gpt2<B>,
    /// A linear map without bias from the last token to scores.
    score: Score<B>,
}

/// The scores' projection, `[num_classes, width]` as torch has it.
#[derive(Module, Debug)]
struct Score<B: Backend> {
    weight: Param<Tensor<B, 2>>,
}

impl ClassifierConfig {
    /// Returns the limits on texts and labels.
    #[must_use]
    pub fn limits(&self) -> TextLimits {
        TextLimits {
            vocab_size: self.body.vocab_size,
            max_len: self.body.n_positions,
            num_classes: self.num_classes,
        }
    }

    /// Reads all weights that [`Gpt2Classifier::load_lazily`] will read, and keeps none.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O error.
    pub fn check_values(&self, mut checkpoint: PretrainedGpt2) -> Result<(), ModelFolderError> {
        checkpoint.weights.take(SCORE, &self.score_shape())?;
        checkpoint.weights.remove(HEAD);
        checkpoint.check_values(&self.headless())
    }

    /// Returns the fields of `config.json` that the classes add.
    pub(crate) fn labels(&self) -> Map<String, Value> {
        // Invalid names, or names of more classes than there are, belong to the model that this one started from.
        let names = self.class_names().unwrap_or_default();
        ClassNames::fields(names.as_ref(), self.num_classes)
    }

    /// Returns the names of its classes; `None` if the classes are numbers, or if the config names more classes
    /// than there are.
    ///
    /// # Errors
    /// [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
    pub fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        let names = self.body.class_names()?;
        Ok(names.filter(|names| names.as_slice().len() <= self.num_classes))
    }

    /// Returns the configuration with these class names.
    #[must_use]
    pub fn with_class_names(mut self, names: Option<&ClassNames>) -> Self {
        self.body.extra.0.extend(ClassNames::fields(names, self.num_classes));
        self
    }

    /// Returns the shape of the scores' projection.
    pub(super) fn score_shape(&self) -> [usize; 2] {
        [self.num_classes, self.body.n_embd]
    }

    /// Returns the body as a model with a tied head, which needs no head of its own.
    pub(super) fn headless(&self) -> Gpt2Config {
        Gpt2Config { tie_word_embeddings: true, ..self.body.clone() }
    }
}

impl<B: Backend> Gpt2Classifier<B> {
    /// Returns a model with initial weights that depend on `seed` and each parameter's path alone.
    ///
    /// # Errors
    /// [`ModelConfigError`] if the config is inconsistent.
    pub fn new(
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelConfigError> {
        let transformer = Gpt2::new(&config.headless(), seed, device)?;
        Ok(Self { transformer, score: Score::new(config, seed, device) })
    }

    /// Returns a model with all weights 0, for callers that replace them.
    ///
    /// # Errors
    /// [`ModelConfigError`] if the config is inconsistent.
    pub fn zeros(config: &ClassifierConfig, device: &B::Device) -> Result<Self, ModelConfigError> {
        let transformer = Gpt2::zeros(&config.headless(), device)?;
        Ok(Self { transformer, score: Score::with(config, &WeightInit::zeros(device)) })
    }

    /// Returns a model with the weights of a checkpoint: of a language model, whose head is omitted and for which
    /// scores are drawn from `seed`, or of a classifier.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O error.
    pub fn load(
        mut checkpoint: PretrainedGpt2,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelFolderError> {
        let score = Score::taken_from(&mut checkpoint, config, seed, device)?;
        Ok(Self { transformer: checkpoint.load(&config.headless(), device)?, score })
    }

    /// Returns a trained classifier; unlike [`load`](Self::load) it draws nothing.
    ///
    /// # Errors
    /// As [`load`](Self::load), and [`ModelFolderError::Tensors`] for a checkpoint without scores.
    pub fn load_trained(
        checkpoint: PretrainedGpt2,
        config: &ClassifierConfig,
        device: &B::Device,
    ) -> Result<Self, ModelFolderError> {
        checkpoint.weights.require(SCORE, &config.score_shape())?;
        Self::load(checkpoint, config, 0, device)
    }

    /// Returns the model that [`load`](Self::load) makes, except that weights of the language model are read when
    /// first used, as by [`PretrainedGpt2::load_lazily`].
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O error.
    pub fn load_lazily(
        mut checkpoint: PretrainedGpt2,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelFolderError> {
        let score = Score::taken_from(&mut checkpoint, config, seed, device)?;
        Ok(Self { transformer: checkpoint.load_lazily(&config.headless(), device)?, score })
    }
}

impl<B: Backend> Score<B> {
    /// Returns the scores of a classifier's checkpoint, or new ones. Leaves what the language model needs.
    fn taken_from(
        checkpoint: &mut PretrainedGpt2,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelFolderError> {
        let shape = config.score_shape();
        let score = match checkpoint.weights.take(SCORE, &shape)? {
            Some(values) => {
                let values = TensorData::new(values, shape);
                Self { weight: Param::from_tensor(Tensor::from_data(values, device)) }
            }
            None => Self::new(config, seed, device),
        };
        // A language model's own head would otherwise be reported as a tensor that the classifier does not
        // have.
        checkpoint.weights.remove(HEAD);
        Ok(score)
    }

    /// Scores that are drawn from `seed` when first used.
    fn new(config: &ClassifierConfig, seed: u64, device: &B::Device) -> Self {
        Self::with(config, &WeightInit::new(seed, device))
    }

    /// Scores that `init` makes.
    fn with(config: &ClassifierConfig, init: &WeightInit<B>) -> Self {
        let values = InitialValues::Normal { std: config.body.initializer_range };
        Self { weight: init.param(SCORE, config.score_shape(), values) }
    }
}

impl<B: FusedOps> TextClassifier<B> for Gpt2Classifier<B> {
    fn forward(&self, batch: &TextBatch<B>) -> Tensor<B, 2> {
        let [texts, length] = batch.input_ids.dims();
        let dims = SeqDims { batch: texts, past: 0, queries: length };
        let hidden = self.transformer.hidden(batch.input_ids.clone(), dims, None);
        // A token attends only to those before it, so padding behind a text changes nothing in it, and no padding mask
        // is needed. A row of length 0 is padding alone; its first token stands in, and its label is ignored.
        let last = batch.lengths.iter().enumerate();
        let last: Vec<i32> =
            last.map(|(text, own)| (text * length + own.max(&1) - 1) as i32).collect();
        let last = Tensor::<B, 1, Int>::from_data(TensorData::new(last, [texts]), &hidden.device());
        let normed = self.transformer.norm(hidden.select(0, last));
        normed.matmul(self.score.weight.val().transpose())
    }
}
