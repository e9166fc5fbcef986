//! GPT-2 for text classification.
//!
//! Main type: [`Gpt2Classifier`], which corresponds to `GPT2ForSequenceClassification` of
//! `transformers`. Its classification head is a linear layer on the final hidden state of the last
//! token of a text. It is also used to predict numbers or several labels, as
//! [`ClassifierConfig::problem_type`] says.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use deepburn_ops::FusedOps;
use deepburn_weights::Weight;
use serde_json::{Map, Value};

use super::config::Gpt2Config;
use super::model::{Gpt2, PretrainedGpt2};
use crate::architecture::{Architecture, SavedConfig};
use crate::decoder::{DecoderConfig, SCORE};
use crate::hf::{ClassNames, ClassNamesError, ModelConfigError, ModelFolderError, ProblemType};
use crate::texts::{TextBatch, TextClassifier, TextLimits};
use crate::weights::WeightInit;

/// The language-model head in files, which a classifier does not use.
const HEAD: &str = "lm_head.weight";

/// The configuration of a GPT-2 classifier.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassifierConfig {
    /// The configuration of the language model. `tie_word_embeddings` has no effect on a
    /// classifier.
    pub body: Gpt2Config,
    /// Number of classes, or of numbers to predict.
    pub num_classes: usize,
    /// What the model predicts. It replaces `problem_type` in the fields of `body`.
    pub problem_type: ProblemType,
}

/// GPT-2 with a classification head in place of the language-model head.
#[derive(Module, Debug)]
pub struct Gpt2Classifier<B: Backend> {
    /// The language model. Its language-model head is not used.
    transformer: Gpt2<B>,
    /// The classification head: a linear layer without bias from the last token to one logit per
    /// class.
    score: Score<B>,
}

/// The weight of the classification head, `[num_classes, width]` as in PyTorch.
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

    /// Reads and checks all weights that [`Gpt2Classifier::load_lazily`] will use, without keeping
    /// them in memory.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O
    /// error.
    pub fn check_values(&self, mut checkpoint: PretrainedGpt2) -> Result<(), ModelFolderError> {
        // Without both heads, what is left are the weights of a headless language model.
        checkpoint.files.weights.take(&self.score())?;
        checkpoint.files.weights.remove(HEAD);
        checkpoint.check_values(&self.headless())
    }

    /// Replaces the fields of `config.json` that describe the outputs. Single-label classification
    /// is the default and is not written.
    pub(crate) fn describe_outputs(&self, fields: &mut Map<String, Value>) {
        // Invalid names, and names for more classes than `num_classes`, were inherited from the
        // pretrained model and are ignored.
        let names = self.class_names().unwrap_or_default();
        fields.extend(ClassNames::fields(names.as_ref(), self.num_classes));
        // A number that was inherited from the pretrained model would contradict the names.
        if let Some(inherited) = fields.get_mut("num_labels") {
            *inherited = self.num_classes.into();
        }
        let is_given = fields.get(ProblemType::FIELD).is_some_and(|value| !value.is_null());
        if is_given || !self.problem_type.is_single_label() {
            fields.insert(ProblemType::FIELD.into(), self.problem_type.name().into());
        }
    }

    /// Returns the class names; `None` if the classes are only numbered, or if the config has names
    /// for more than `num_classes` classes.
    ///
    /// # Errors
    /// Returns [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
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

    /// Returns the weight of the classification head.
    fn score(&self) -> Weight {
        let map = self.weight_map();
        map.get(SCORE).cloned().expect("the map of a classifier has its head")
    }

    /// Returns the body configuration with a tied head, so that the model has no separate head
    /// parameter.
    pub(super) fn headless(&self) -> Gpt2Config {
        Gpt2Config { tie_word_embeddings: true, ..self.body.clone() }
    }
}

impl SavedConfig for ClassifierConfig {
    /// As of the language model. The field `architectures` tells them apart.
    const MODEL_TYPE: &'static str = <Gpt2Config as DecoderConfig>::MODEL_TYPE;

    /// Reads the fields of a saved `config.json`. As in `transformers`, a classifier has two
    /// classes if the fields do not say how many, and a model with one output predicts a number.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if a field belongs to another model, has the wrong type or is
    /// out of range.
    fn from_fields(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        let body = Gpt2Config::from_fields(fields)?;
        let num_classes = body.extra.num_labels().unwrap_or(2);
        let problem_type = match body.extra.problem_type()? {
            Some(problem_type) => problem_type,
            None if num_classes == 1 => {
                tracing::info!(
                    "config.json has one label and no problem_type: the model predicts a number, as in `transformers`"
                );
                ProblemType::Regression
            }
            None => ProblemType::default(),
        };
        Ok(Self { body, num_classes, problem_type })
    }
}

impl<B: Backend> Gpt2Classifier<B> {
    /// Returns a model with random initial weights. The values of a parameter depend only on `seed`
    /// and its path.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the config is inconsistent.
    pub fn new(
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelConfigError> {
        let transformer = Gpt2::new(&config.headless(), seed, device)?;
        Ok(Self { transformer, score: Score::new(config, seed, device) })
    }

    /// Returns a model with all weights set to 0, for callers that overwrite them.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the config is inconsistent.
    pub fn zeros(config: &ClassifierConfig, device: &B::Device) -> Result<Self, ModelConfigError> {
        let transformer = Gpt2::zeros(&config.headless(), device)?;
        let weight = WeightInit::zeros(config.weight_map(), device).param(SCORE);
        Ok(Self { transformer, score: Score { weight } })
    }

    /// Loads a classifier from a checkpoint.
    ///
    /// From a classifier checkpoint, all weights are loaded. From a language-model checkpoint, the
    /// language-model head is dropped and the classification head is initialized randomly from
    /// `seed`.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O
    /// error.
    pub fn load(
        mut checkpoint: PretrainedGpt2,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelFolderError> {
        let score = Score::taken_from(&mut checkpoint, config, seed, device)?;
        Ok(Self { transformer: checkpoint.load(&config.headless(), device)?, score })
    }

    /// Loads a trained classifier. Unlike [`load`](Self::load), this function never initializes
    /// weights randomly.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load), and [`ModelFolderError::Tensors`] if the
    /// checkpoint has no classification head.
    pub fn load_trained(
        checkpoint: PretrainedGpt2,
        config: &ClassifierConfig,
        device: &B::Device,
    ) -> Result<Self, ModelFolderError> {
        checkpoint.files.weights.require(&config.score())?;
        Self::load(checkpoint, config, 0, device)
    }

    /// Loads the same model as [`load`](Self::load), but reads each weight of the language model
    /// when it is first used, like [`PretrainedGpt2::load_lazily`].
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O
    /// error.
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
    /// Takes the classification head from a classifier checkpoint, or initializes a new one.
    /// Afterwards the checkpoint contains only the weights of the language model's body.
    fn taken_from(
        checkpoint: &mut PretrainedGpt2,
        config: &ClassifierConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelFolderError> {
        let score = config.score();
        let score = match checkpoint.files.weights.take(&score)? {
            Some(values) => {
                let values = TensorData::new(values, score.shape());
                Self { weight: Param::from_tensor(Tensor::from_data(values, device)) }
            }
            None => Self::new(config, seed, device),
        };
        // Otherwise the language-model head would be reported as an unknown tensor.
        checkpoint.files.weights.remove(HEAD);
        Ok(score)
    }

    /// Returns a head that is initialized randomly from `seed` when it is first used.
    fn new(config: &ClassifierConfig, seed: u64, device: &B::Device) -> Self {
        Self { weight: WeightInit::new(config.weight_map(), seed, device).param(SCORE) }
    }
}

impl<B: FusedOps> TextClassifier<B> for Gpt2Classifier<B> {
    fn forward(&self, batch: &TextBatch<B>) -> Tensor<B, 2> {
        let [texts, length] = batch.input_ids.dims();
        let hidden = self.transformer.hidden(batch.input_ids.clone());
        // A token attends only to earlier tokens, so padding after a text does not affect its
        // tokens, and no padding mask is needed. A row of length 0 consists of padding: its first
        // token is used, and its label is ignored.
        let last = batch.lengths.iter().enumerate();
        let last: Vec<i32> =
            last.map(|(text, own)| (text * length + own.max(&1) - 1) as i32).collect();
        let last = Tensor::<B, 1, Int>::from_data(TensorData::new(last, [texts]), &hidden.device());
        let normed = self.transformer.norm(hidden.select(0, last));
        normed.matmul(self.score.weight.val().transpose())
    }
}
