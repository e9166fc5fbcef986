//! Implementation of the model traits for GPT-2, with a language-model head or a classification head.
//!
//! [`Gpt2Config`] and [`ClassifierConfig`] implement these traits. File contents and tensor names match
//! `GPT2LMHeadModel` and `GPT2ForSequenceClassification` of `transformers`, so each library can load folders that the
//! other has saved.
//!
//! ```text
//!                     language model                              classifier
//! config.json         architectures: ["GPT2LMHeadModel"]          ["GPT2ForSequenceClassification"], class names
//! module path         h.0.attn.c_attn.weight                      transformer.h.0.attn.c_attn.weight
//! name in the file    transformer.h.0.attn.c_attn.weight          the module path
//! head                lm_head.weight if it is not tied            score.weight [classes, width]
//! other files         generation_config.json                      none
//! ```
//!
//! Most methods forward to inherent methods of the configurations and checkpoints, which document the errors.

use std::path::Path;

use burn::tensor::backend::Backend;
use deepburn_safetensors::FloatType;
use deepburn_weights::WeightMap;
use serde_json::{Map, Value, json};

use super::classifier::{ClassifierConfig, Gpt2Classifier};
use super::config::Gpt2Config;
use super::model::Gpt2;
use super::parameters::{classifier_map, weight_map};
use super::pretrained::PretrainedGpt2;
use crate::architecture::{
    Architecture, BuildModel, LanguageModelConfig, SavedConfig, TextClassifierConfig, TokenLimits,
};
use crate::batch_shape::BatchShape;
use crate::hf::{
    CONFIG, ClassNames, ClassNamesError, ExtraFields, GENERATION_CONFIG, JsonFiles,
    ModelConfigError, ModelFolderError, ProblemType,
};
use crate::texts::TextLimits;

/// Parameters, names, files and the training pass of the language model.
impl Architecture for Gpt2Config {
    /// Returns the name in logs: `Gpt2`.
    fn name(&self) -> &'static str {
        "Gpt2"
    }

    /// Maps all parameters to the names of `transformers`. Files without the prefix `transformer.` can also be read.
    fn weight_map(&self) -> WeightMap {
        weight_map(self)
    }

    fn width(&self) -> usize {
        self.n_embd
    }

    fn max_len(&self) -> usize {
        self.n_positions
    }

    /// Returns `config.json`, and `generation_config.json` with the special tokens.
    fn documents(&self, float: FloatType) -> JsonFiles {
        vec![
            (CONFIG, document(self, "GPT2LMHeadModel", float)),
            (GENERATION_CONFIG, self.extra.generation_config()),
        ]
    }

    /// Reads every tensor in blocks, using at most 8 MiB of memory.
    fn check_weights(&self, folder: &Path) -> Result<(), ModelFolderError> {
        PretrainedGpt2::open(folder)?.check_values(self)
    }

    /// Returns the size of one chunk of logits. The fused loss computes f32 logits for a chunk of rows and frees them
    /// before it computes the next chunk.
    fn logits_bytes(&self, batch: BatchShape) -> u64 {
        batch.logits_bytes(self.vocab_size)
    }
}

/// Reading a configuration.
impl SavedConfig for Gpt2Config {
    /// `gpt2`.
    const MODEL_TYPE: &'static str = "gpt2";

    fn from_fields(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        Self::try_from(fields)
    }
}

/// Overriding and limits of a configuration.
impl LanguageModelConfig for Gpt2Config {
    /// Returns GPT-2 small, 124 million parameters.
    fn default_size() -> Self {
        Self::small()
    }

    /// Reads `config.json` and the headers of the weight files. Weights are not kept.
    fn open(folder: &Path) -> Result<Self, ModelFolderError> {
        let checkpoint = PretrainedGpt2::open(folder)?;
        checkpoint.weights.log_prefix();
        Ok(checkpoint.config().clone())
    }

    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ModelConfigError> {
        Self::with_overrides(self, overrides)
    }

    fn validate(&self) -> Result<(), ModelConfigError> {
        Self::validate(self)
    }

    /// Returns the limits of the model. Position embeddings are learned, so a sequence can have at most `n_positions`
    /// tokens.
    fn limits(&self) -> TokenLimits {
        TokenLimits {
            vocab_size: self.vocab_size,
            max_len: self.n_positions,
            max_len_field: "n_positions",
        }
    }

    /// Sets the number of rows of the embedding and the head. If stored weights have fewer rows, the new rows are the
    /// mean of the stored ones; weights with more rows can no longer be loaded.
    fn set_vocab_size(&mut self, vocab_size: usize) {
        self.vocab_size = vocab_size;
    }

    fn extra(&self) -> &ExtraFields {
        &self.extra
    }
}

/// Modules with random, zero or stored weights.
impl<B: Backend> BuildModel<B> for Gpt2Config {
    type Model = Gpt2<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Gpt2<B>, ModelConfigError> {
        Gpt2::new(self, seed, device)
    }

    fn zeros(&self, device: &B::Device) -> Result<Gpt2<B>, ModelConfigError> {
        Gpt2::zeros(self, device)
    }

    fn load(&self, folder: &Path, device: &B::Device) -> Result<Gpt2<B>, ModelFolderError> {
        let checkpoint = PretrainedGpt2::open(folder)?;
        checkpoint.weights.log_prefix();
        checkpoint.load(self, device)
    }

    /// Reads each weight when it is first used. A language-model folder contains all weights, so the seed is not used.
    fn load_lazily(
        &self,
        folder: &Path,
        _seed: u64,
        device: &B::Device,
    ) -> Result<Gpt2<B>, ModelFolderError> {
        PretrainedGpt2::open(folder)?.load_lazily(self, device)
    }
}

/// Parameters, names, files and the training pass of the classifier.
impl Architecture for ClassifierConfig {
    /// Returns the name in logs: `Gpt2Classifier`.
    fn name(&self) -> &'static str {
        "Gpt2Classifier"
    }

    /// Maps all parameters. The module has the same structure as in `transformers`, so module paths and tensor names
    /// are equal.
    fn weight_map(&self) -> WeightMap {
        classifier_map(&self.headless(), self.num_classes)
    }

    fn width(&self) -> usize {
        self.body.n_embd
    }

    fn max_len(&self) -> usize {
        self.body.n_positions
    }

    /// Returns `config.json` with the class names. If the config has no padding token, `pad_token_id` is set to the
    /// end-of-sequence token.
    fn documents(&self, float: FloatType) -> JsonFiles {
        let mut fields = document(&self.body, "GPT2ForSequenceClassification", float);
        self.describe_outputs(&mut fields);
        // `transformers` needs the padding token to find the last token of a text.
        if fields.get("pad_token_id").is_none_or(Value::is_null) {
            let end = self.body.eos_token_ids().first().map_or(Value::Null, |id| json!(id));
            fields.insert("pad_token_id".into(), end);
        }
        fields.sort_keys();
        vec![(CONFIG, fields)]
    }

    fn check_weights(&self, folder: &Path) -> Result<(), ModelFolderError> {
        self.check_values(PretrainedGpt2::open(folder)?)
    }
}

/// Reading a configuration.
impl SavedConfig for ClassifierConfig {
    /// `gpt2`, as of the language model. The field `architectures` tells them apart.
    const MODEL_TYPE: &'static str = Gpt2Config::MODEL_TYPE;

    fn from_fields(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        Self::from_saved(fields)
    }
}

/// Limits and class names, forwarded to the inherent methods.
impl TextClassifierConfig for ClassifierConfig {
    fn limits(&self) -> TextLimits {
        Self::limits(self)
    }

    fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        Self::class_names(self)
    }

    fn problem_type(&self) -> ProblemType {
        self.problem_type
    }
}

/// Modules of a classifier. `load` requires a trained classifier. `load_lazily` also accepts a language model and then
/// initialises the classification head randomly from the seed.
impl<B: Backend> BuildModel<B> for ClassifierConfig {
    type Model = Gpt2Classifier<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Gpt2Classifier<B>, ModelConfigError> {
        Gpt2Classifier::new(self, seed, device)
    }

    fn zeros(&self, device: &B::Device) -> Result<Gpt2Classifier<B>, ModelConfigError> {
        Gpt2Classifier::zeros(self, device)
    }

    fn load(
        &self,
        folder: &Path,
        device: &B::Device,
    ) -> Result<Gpt2Classifier<B>, ModelFolderError> {
        let checkpoint = PretrainedGpt2::open(folder)?;
        checkpoint.weights.log_prefix();
        Gpt2Classifier::load_trained(checkpoint, self, device)
    }

    fn load_lazily(
        &self,
        folder: &Path,
        seed: u64,
        device: &B::Device,
    ) -> Result<Gpt2Classifier<B>, ModelFolderError> {
        Gpt2Classifier::load_lazily(PretrainedGpt2::open(folder)?, self, seed, device)
    }
}

/// Returns the `config.json` for weights of type `float`. `class` is the `transformers` class that loads them. Older
/// versions of `transformers` store the type as `torch_dtype`. If a config has that field, it is updated too.
fn document(config: &Gpt2Config, class: &str, float: FloatType) -> Map<String, Value> {
    let mut fields = Map::from(config.clone());
    fields.insert("architectures".into(), json!([class]));
    fields.insert("dtype".into(), json!(float.torch_name()));
    // A stale value would make older readers cast the weights.
    if let Some(older_name) = fields.get_mut("torch_dtype") {
        *older_name = json!(float.torch_name());
    }
    fields.sort_keys();
    fields
}
