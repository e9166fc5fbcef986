//! The traits of the programs for GPT-2, with a language-model head or a classifier.
//!
//! [`Gpt2Config`] and [`ClassifierConfig`] implement them. What they say of files and names is what `transformers`
//! writes for `GPT2LMHeadModel` and `GPT2ForSequenceClassification`, so that both sides load each other's folders.

use std::path::Path;

use burn::tensor::backend::Backend;
use deepburn_safetensors::FloatType;
use serde_json::{Map, Value, json};

use super::checkpoint::Checkpoint;
use super::classifier::{ClassifierConfig, Gpt2Classifier};
use super::config::Gpt2Config;
use super::model::Gpt2;
use super::parameters::{NAMES, SCORE, parameters};
use super::pass::{describe_body, describe_head};
use crate::architecture::{
    Architecture, BuildModel, LanguageModelConfig, TextClassifierConfig, TokenLimits,
};
use crate::forward_pass::{BatchShape, ForwardPass};
use crate::hf::{
    CONFIG, CheckpointError, ClassNames, ClassNamesError, ConfigError, Documents, ExtraFields,
    Names, ParameterShape,
};
use crate::texts::TextLimits;

impl Architecture for Gpt2Config {
    fn name(&self) -> &'static str {
        "Gpt2"
    }

    fn parameters(&self) -> Vec<ParameterShape> {
        parameters(self)
    }

    fn width(&self) -> usize {
        self.n_embd
    }

    fn max_len(&self) -> usize {
        self.n_positions
    }

    fn names(&self) -> Names {
        NAMES
    }

    fn documents(&self, float: FloatType) -> Documents {
        vec![
            (CONFIG, document(self, "GPT2LMHeadModel", float)),
            ("generation_config.json", self.extra.generation_config()),
        ]
    }

    fn check_weights(&self, folder: &Path) -> Result<(), CheckpointError> {
        Checkpoint::open(folder)?.check_values(self)
    }

    fn describe(&self, pass: &mut dyn ForwardPass, batch: BatchShape) {
        describe_head(self, pass, batch);
    }

    fn logits_bytes(&self, batch: BatchShape) -> u64 {
        batch.logits_bytes(self.vocab_size)
    }
}

impl LanguageModelConfig for Gpt2Config {
    const MODEL_TYPE: &'static str = "gpt2";

    fn default_size() -> Self {
        Self::small()
    }

    fn from_fields(fields: Map<String, Value>) -> Result<Self, ConfigError> {
        Self::try_from(fields)
    }

    fn open(folder: &Path) -> Result<Self, CheckpointError> {
        Ok(Checkpoint::open(folder)?.config().clone())
    }

    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ConfigError> {
        Self::with_overrides(self, overrides)
    }

    fn validate(&self) -> Result<(), ConfigError> {
        Self::validate(self)
    }

    fn limits(&self) -> TokenLimits {
        TokenLimits {
            vocab_size: self.vocab_size,
            max_len: self.n_positions,
            max_len_field: "n_positions",
        }
    }

    fn set_vocab_size(&mut self, vocab_size: usize) {
        self.vocab_size = vocab_size;
    }

    fn extra(&self) -> &ExtraFields {
        &self.extra
    }
}

impl<B: Backend> BuildModel<B> for Gpt2Config {
    type Model = Gpt2<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Gpt2<B>, ConfigError> {
        Gpt2::new(self, seed, device)
    }

    fn zeros(&self, device: &B::Device) -> Result<Gpt2<B>, ConfigError> {
        Gpt2::zeros(self, device)
    }

    fn load(&self, folder: &Path, device: &B::Device) -> Result<Gpt2<B>, CheckpointError> {
        Checkpoint::open(folder)?.load(self, device)
    }

    fn load_lazily(
        &self,
        folder: &Path,
        _seed: u64,
        device: &B::Device,
    ) -> Result<Gpt2<B>, CheckpointError> {
        Checkpoint::open(folder)?.load_lazily(self, device)
    }
}

impl Architecture for ClassifierConfig {
    fn name(&self) -> &'static str {
        "Gpt2Classifier"
    }

    /// Their paths are their names in `transformers`.
    fn parameters(&self) -> Vec<ParameterShape> {
        let body =
            parameters(&self.headless()).into_iter().map(|ParameterShape { path, shape }| {
                ParameterShape { path: format!("transformer.{path}"), shape }
            });
        body.chain([ParameterShape::new(SCORE, &self.score_shape())]).collect()
    }

    fn width(&self) -> usize {
        self.body.n_embd
    }

    fn max_len(&self) -> usize {
        self.body.n_positions
    }

    fn names(&self) -> Names {
        Names::SAME
    }

    fn documents(&self, float: FloatType) -> Documents {
        let mut fields = document(&self.body, "GPT2ForSequenceClassification", float);
        fields.extend(self.labels());
        // `transformers` finds the end of a text by its padding.
        if fields.get("pad_token_id").is_none_or(Value::is_null) {
            let end = self.body.eos_token_ids().first().map_or(Value::Null, |id| json!(id));
            fields.insert("pad_token_id".into(), end);
        }
        fields.sort_keys();
        vec![(CONFIG, fields)]
    }

    fn check_weights(&self, folder: &Path) -> Result<(), CheckpointError> {
        self.check_values(Checkpoint::open(folder)?)
    }

    fn describe(&self, pass: &mut dyn ForwardPass, batch: BatchShape) {
        let width = self.body.n_embd as u64;
        pass.hold(batch.text_bytes());
        let hidden = describe_body(&self.body, pass, batch);
        let last = pass.select(hidden, batch.sequences * width);
        pass.end_blocks();
        let normed = pass.layer_norm(last, width);
        let logits = pass.linear(normed, [width, self.num_classes as u64], false);
        pass.logits_loss(logits);
    }
}

impl TextClassifierConfig for ClassifierConfig {
    fn limits(&self) -> TextLimits {
        Self::limits(self)
    }

    fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        Self::class_names(self)
    }
}

impl<B: Backend> BuildModel<B> for ClassifierConfig {
    type Model = Gpt2Classifier<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Gpt2Classifier<B>, ConfigError> {
        Gpt2Classifier::new(self, seed, device)
    }

    fn zeros(&self, device: &B::Device) -> Result<Gpt2Classifier<B>, ConfigError> {
        Gpt2Classifier::zeros(self, device)
    }

    fn load(
        &self,
        folder: &Path,
        device: &B::Device,
    ) -> Result<Gpt2Classifier<B>, CheckpointError> {
        Gpt2Classifier::load_trained(Checkpoint::open(folder)?, self, device)
    }

    fn load_lazily(
        &self,
        folder: &Path,
        seed: u64,
        device: &B::Device,
    ) -> Result<Gpt2Classifier<B>, CheckpointError> {
        Gpt2Classifier::load_lazily(Checkpoint::open(folder)?, self, seed, device)
    }
}

/// Returns the `config.json` of weights of type `float`, for the class of `transformers` that loads them. Older versions
/// call the type `torch_dtype`; where a checkpoint has that field, it is kept up to date.
fn document(config: &Gpt2Config, class: &str, float: FloatType) -> Map<String, Value> {
    let mut fields = Map::from(config.clone());
    fields.insert("architectures".into(), json!([class]));
    fields.insert("dtype".into(), json!(float.torch_name()));
    if let Some(older_name) = fields.get_mut("torch_dtype") {
        *older_name = json!(float.torch_name());
    }
    fields.sort_keys();
    fields
}
