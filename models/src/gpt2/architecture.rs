//! Implementation of the model traits for GPT-2 with a classification head.
//!
//! [`ClassifierConfig`] implements these traits, and [`Gpt2Config`](super::Gpt2Config) is a
//! configuration of the [decoder](crate::decoder). File contents and tensor names match
//! `GPT2LMHeadModel` and `GPT2ForSequenceClassification` of `transformers`, so each library can
//! load folders that the other has saved.
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
//! Most methods forward to inherent methods of the configurations and checkpoints, which document
//! the errors.

use std::path::Path;

use burn::tensor::backend::Backend;
use deepburn_files::safetensors::FloatType;
use deepburn_weights::WeightMap;
use serde_json::{Value, json};

use super::classifier::{ClassifierConfig, Gpt2Classifier};
use super::model::PretrainedGpt2;
use super::parameters::classifier_map;
use crate::architecture::{Architecture, BuildModel, MatrixUse, TextClassifierConfig};
use crate::decoder::{DecoderConfig, document};
use crate::hf::{
    CONFIG, ClassNames, ClassNamesError, JsonFiles, ModelConfigError, ModelFolderError, ProblemType,
};
use crate::texts::TextLimits;

/// Parameters, names, files and the training pass of the classifier.
impl Architecture for ClassifierConfig {
    /// Returns the name in logs: `Gpt2Classifier`.
    fn name(&self) -> &'static str {
        "Gpt2Classifier"
    }

    /// Maps all parameters. The module has the same structure as in `transformers`, so module paths
    /// and tensor names are equal.
    fn weight_map(&self) -> WeightMap {
        classifier_map(&self.headless(), self.num_classes)
    }

    fn matrix_use(&self, path: &str) -> MatrixUse {
        match path {
            "score.weight" => MatrixUse::Other,
            _ => self.body.matrix_use(path),
        }
    }

    fn width(&self) -> usize {
        self.body.n_embd
    }

    fn max_len(&self) -> usize {
        self.body.n_positions
    }

    /// Returns `config.json` with the class names. If the config has no padding token,
    /// `pad_token_id` is set to the end-of-sequence token.
    fn documents(&self, float: FloatType) -> JsonFiles {
        let mut fields = document(self.body.to_fields(), "GPT2ForSequenceClassification", float);
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

/// Modules of a classifier. `load` requires a trained classifier. `load_lazily` also accepts a
/// language model and then initializes the classification head randomly from the seed.
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
        checkpoint.files.weights.log_prefix();
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
