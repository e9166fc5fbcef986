//! Models whose parameters and memory follow from their configuration alone.
//!
//! Main type: [`KnownModel`], the model of a job or of a `config.json`.

use std::path::Path;

use deepburn::zero::estimate::ActivationGraph;
use deepburn_config::PrecisionPlan;
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Config, ParameterShape};
use deepburn_models::imdb::EncoderConfig;
use deepburn_models::read_small_file;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::job::activations::{BatchShape, of_encoder, of_gpt2_classifier, of_language_model};
use crate::job::model_folder::model_in;

/// A model that `finetune` trains.
pub(crate) enum KnownModel {
    /// GPT-2 as a language model.
    Gpt2(Gpt2Config),
    /// A GPT-2 text classifier.
    Gpt2Classifier(ClassifierConfig),
    /// An encoder text classifier.
    Encoder(EncoderConfig),
}

impl KnownModel {
    /// Reads the model of a `config.json` or of its folder. Without a path it is GPT-2 small.
    ///
    /// # Errors
    /// A user's mistake: an unreadable file, or an unsupported model.
    pub(crate) fn read(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path else { return Ok(Self::Gpt2(Gpt2Config::small())) };
        let file = if path.is_dir() { model_in(path).join("config.json") } else { path.to_owned() };
        let named = |error: &dyn std::fmt::Display| {
            Failure::mistake(format!("--model: {}: {error}", file.display()))
        };
        let text = read_small_file(&file).map_err(|error| named(&error))?;
        // The parser of GPT-2's configuration refuses invalid JSON below, with its position.
        let fields: Map<String, Value> = serde_json::from_str(&text).unwrap_or_default();
        if fields.get("model_type") == Some(&Value::from("deepburn_encoder")) {
            let config = EncoderConfig::from_saved(fields).map_err(|error| named(&error))?;
            return Ok(Self::Encoder(config));
        }
        let body: Gpt2Config = text.parse().map_err(|error| named(&error))?;
        let architecture = Value::from("GPT2ForSequenceClassification");
        let architectures = fields.get("architectures").and_then(Value::as_array);
        if !architectures.is_some_and(|all| all.contains(&architecture)) {
            return Ok(Self::Gpt2(body));
        }
        let labels = fields.get("id2label").and_then(Value::as_object).map(Map::len);
        Ok(Self::Gpt2Classifier(ClassifierConfig { body, num_classes: labels.unwrap_or(2) }))
    }

    /// Returns all parameters.
    pub(crate) fn parameters(&self) -> Vec<ParameterShape> {
        match self {
            Self::Gpt2(config) => config.parameters(),
            Self::Gpt2Classifier(config) => config.parameters(),
            Self::Encoder(config) => config.parameters(),
        }
    }

    /// Returns the number of elements of all parameters.
    pub(crate) fn num_parameters(&self) -> usize {
        let parameters = self.parameters();
        parameters.iter().map(|parameter| parameter.shape.iter().product::<usize>()).sum()
    }

    /// Returns the width of the residual stream.
    pub(crate) fn width(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_embd,
            Self::Gpt2Classifier(config) => config.body.n_embd,
            Self::Encoder(config) => config.embed_dim,
        }
    }

    /// Returns the most tokens of a sample.
    pub(crate) fn longest(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_positions,
            Self::Gpt2Classifier(config) => config.body.n_positions,
            Self::Encoder(config) => config.max_len,
        }
    }

    /// Returns the activations of a forward pass over `batch`.
    pub(crate) fn activations(
        &self,
        batch: BatchShape,
        precision: &PrecisionPlan,
    ) -> ActivationGraph {
        match self {
            Self::Gpt2(config) => of_language_model(config, batch, precision),
            Self::Gpt2Classifier(config) => of_gpt2_classifier(config, batch, precision),
            Self::Encoder(config) => of_encoder(config, batch, precision),
        }
    }
}
