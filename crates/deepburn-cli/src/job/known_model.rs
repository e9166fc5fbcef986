//! The supported models. Their parameters and memory can be computed from the configuration alone.
//!
//! Main type: [`KnownModel`], the model of a `config.json`. [`with_language_models`] lists the language models.

use std::path::Path;

use burn::tensor::Tensor;
use burn_flex::{Flex, FlexDevice};
use deepburn_models::causal_lm::{GenerateOptions, LanguageModel};
use deepburn_models::encoder::EncoderConfig;
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Config};
use deepburn_models::hf::{
    ExtraFields, ModelConfigError, ProblemType, read_fields, read_small_file,
};
use deepburn_models::{
    Architecture, BuildModel, LanguageModelConfig, TextBatch, TextClassifier, TextClassifierConfig,
};
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::job::model_folder::model_in;

/// Calls the macro `$define` with all language models: the name of each in `model.architecture`, and the type of its
/// configuration.
///
/// To add a language model, add a folder in `deepburn-models`, a value of `model.architecture` in `deepburn-config`,
/// and a line here.
macro_rules! with_language_models {
    ($define:ident) => {
        $define! {
            /// GPT-2 as a language model.
            Gpt2: Gpt2Config,
        }
    };
}
pub(crate) use with_language_models;

/// A trained classifier, which maps a batch to logits.
pub(crate) type Classify = Box<dyn Fn(&TextBatch<Flex>) -> Tensor<Flex, 2>>;

/// A model that `finetune` trains.
///
/// Its configuration is complete: fields that are missing in the file have their defaults.
pub(crate) enum KnownModel {
    /// A language model.
    LanguageModel(Box<dyn KnownLanguageModel>),
    /// A model that classifies texts.
    Classifier(Box<dyn KnownClassifier>),
}

/// The configuration of a language model of any architecture.
pub(crate) trait KnownLanguageModel: Architecture {
    /// Returns the fields of its `config.json` that it does not read.
    fn extra_fields(&self) -> &ExtraFields;

    /// Continues `prompt` with the weights in `folder`. Returns the new tokens.
    ///
    /// # Errors
    /// Returns a user's mistake if the weights do not fit, or if the prompt cannot be continued, and a failure while
    /// running if the model computes NaN.
    fn continue_prompt(
        &self,
        folder: &Path,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Vec<u32>, Failure>;
}

/// The configuration of a classifier of any architecture.
pub(crate) trait KnownClassifier: TextClassifierConfig {
    /// Reads the weights in `folder`.
    ///
    /// # Errors
    /// Returns a user's mistake if the weights do not fit.
    fn open(&self, folder: &Path) -> Result<Classify, Failure>;
}

impl<C: LanguageModelConfig + BuildModel<Flex, Model: LanguageModel<Flex>>> KnownLanguageModel
    for C
{
    /// Returns the extra fields of the configuration.
    fn extra_fields(&self) -> &ExtraFields {
        self.extra()
    }

    /// Loads the model on the plain CPU backend, because generation is not sharded.
    fn continue_prompt(
        &self,
        folder: &Path,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Vec<u32>, Failure> {
        let model = self.load(folder, &FlexDevice).map_err(Failure::mistake)?;
        let generation = model.generate(prompt, options).map_err(Failure::mistake)?;
        generation.collect::<Result<_, _>>().map_err(Failure::run)
    }
}

impl<C: TextClassifierConfig + BuildModel<Flex, Model: TextClassifier<Flex> + 'static>>
    KnownClassifier for C
{
    /// Loads the model on the plain CPU backend. The returned closure owns the model.
    fn open(&self, folder: &Path) -> Result<Classify, Failure> {
        let model = self.load(folder, &FlexDevice).map_err(Failure::mistake)?;
        Ok(Box::new(move |batch| model.forward(batch)))
    }
}

impl KnownModel {
    /// Reads the model in `path`, which is a `config.json` or its folder. Without a path, returns GPT-2 small.
    ///
    /// # Errors
    /// Returns a user's mistake if the file cannot be read, or if the model is not supported.
    pub(crate) fn read(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path else {
            return Ok(Self::LanguageModel(Box::new(Gpt2Config::small())));
        };
        let file = if path.is_dir() { model_in(path).join("config.json") } else { path.to_owned() };
        let named = |error: &dyn std::fmt::Display| {
            Failure::mistake(format!("--model: {}: {error}", file.display()))
        };
        if !file.exists() {
            return Err(named(
                &"no such file; give a config.json, or the folder of a model or of a completed run",
            ));
        }
        let text = read_small_file(&file).map_err(|error| named(&error))?;
        let fields = read_fields(&text).map_err(|error| named(&error))?;
        if fields.get("model_type") == Some(&Value::from("deepburn_encoder")) {
            let config = EncoderConfig::from_saved(fields).map_err(|error| named(&error))?;
            return Ok(Self::Classifier(Box::new(config)));
        }
        let architecture = Value::from("GPT2ForSequenceClassification");
        let architectures = fields.get("architectures").and_then(Value::as_array);
        if !architectures.is_some_and(|all| all.contains(&architecture)) {
            let config = read_language_model(fields).map_err(|error| named(&error))?;
            warn_of_unknown(config.extra_fields());
            return Ok(Self::LanguageModel(config));
        }
        let body = Gpt2Config::try_from(fields).map_err(|error| named(&error))?;
        warn_of_unknown(&body.extra);
        let num_classes = body.extra.num_labels().unwrap_or(2);
        let problem_type = match body.extra.problem_type().map_err(|error| named(&error))? {
            Some(problem_type) => problem_type,
            None if num_classes == 1 => {
                tracing::info!(
                    "config.json has one label and no problem_type: the model predicts a number, as in `transformers`"
                );
                ProblemType::Regression
            }
            None => ProblemType::default(),
        };
        let config = ClassifierConfig { body, num_classes, problem_type };
        Ok(Self::Classifier(Box::new(config)))
    }

    /// Returns the configuration.
    pub(crate) fn architecture(&self) -> &dyn Architecture {
        match self {
            Self::LanguageModel(config) => &**config,
            Self::Classifier(config) => &**config,
        }
    }
}

/// Defines the function that reads these language models.
macro_rules! define_reader {
    ($($(#[$doc:meta])* $name:ident: $config:ty,)+) => {
        /// Reads the fields of a language model's `config.json`. If the model is not listed, the reader of the first
        /// model is used, which returns the error.
        ///
        /// # Errors
        /// Returns [`ModelConfigError`] for a field that is unknown, of another type or out of range.
        fn read_language_model(
            fields: Map<String, Value>,
        ) -> Result<Box<dyn KnownLanguageModel>, ModelConfigError> {
            let model_type = fields.get("model_type").and_then(Value::as_str);
            let readers = [$((<$config>::MODEL_TYPE, read::<$config> as ReadConfig),)+];
            let own = readers.iter().find(|(name, _)| Some(*name) == model_type);
            let (_, read) = own.unwrap_or(&readers[0]);
            read(fields)
        }
    };
}

with_language_models!(define_reader);

/// The reader of one language model's configuration.
type ReadConfig = fn(Map<String, Value>) -> Result<Box<dyn KnownLanguageModel>, ModelConfigError>;

/// Reads a configuration of type `C`.
///
/// # Errors
/// Returns [`ModelConfigError`] for a field that is unknown, of another type or out of range.
fn read<C: LanguageModelConfig + KnownLanguageModel + 'static>(
    fields: Map<String, Value>,
) -> Result<Box<dyn KnownLanguageModel>, ModelConfigError> {
    Ok(Box::new(C::from_fields(fields)?))
}

/// Logs a warning for unknown fields of a `config.json`. These fields are kept and exported with the model.
pub(crate) fn warn_of_unknown(extra: &ExtraFields) {
    let names: Vec<_> = extra.unknown().map(|name| format!("`{name}`")).collect();
    if !names.is_empty() {
        tracing::warn!(
            "config.json: unknown fields {}; they change nothing here and are exported as they are; if the model \
             was trained with one of them, its outputs differ",
            names.join(", ")
        );
    }
}
