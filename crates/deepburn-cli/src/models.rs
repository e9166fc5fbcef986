//! The supported models, one line each.
//!
//! Main table: [`MODELS`]. `finetune` finds the model of a job in it, and the tools find the model of a `config.json`.
//! Messages list the values of `model.architecture` and `model_type` from the table.
//!
//! To add a model, add a folder in `deepburn-models`, a value of `model.architecture` in `deepburn-config`, and a line
//! here.

use burn_flex::Flex;
use deepburn_config::{Architecture, DataKind, Job};
use deepburn_models::causal_lm::LanguageModel;
use deepburn_models::encoder::EncoderConfig;
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Config};
use deepburn_models::hf::{ModelConfigError, is_sequence_classifier};
use deepburn_models::{
    BuildModel, LanguageModelConfig, SavedConfig, TextClassifier, TextClassifierConfig,
};
use serde_json::{Map, Value};

use crate::data::causal::Causal;
use crate::data::classification::{Classification, ClassifierRecipe};
use crate::data::recipe::JobInputs;
use crate::failure::Failure;
use crate::job::known_model::KnownModel;
use crate::run::subject::Subject;

/// The supported models. If several models have the same `model_type`, the first one reads files whose `architectures`
/// do not name a classifier.
static MODELS: [Model; 3] = [
    language_model::<Gpt2Config>(Architecture::Gpt2),
    classifier::<ClassifierConfig>(Architecture::Gpt2),
    classifier::<EncoderConfig>(Architecture::Encoder),
];

/// The `model_type` of files that do not have this field: only versions of `transformers` before 2.3 omitted it, and
/// GPT-2 is the only supported model that they have.
const FIRST_MODEL_TYPE: &str = Gpt2Config::MODEL_TYPE;

/// A supported model.
pub(crate) struct Model {
    /// The value of `model.architecture` in a job.
    architecture: Architecture,
    /// The value of `model_type` in `config.json`.
    model_type: &'static str,
    /// The task of the model's head.
    task: Task,
    /// Reads the fields of a `config.json`.
    read: fn(Map<String, Value>) -> Result<KnownModel, ModelConfigError>,
    /// Reads and checks the model and the data of a job.
    prepare: fn(&JobInputs<'_>) -> Result<Box<dyn Subject>, Failure>,
}

/// The task of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    /// Next-token prediction.
    LanguageModelling,
    /// Classification of texts, and regression.
    Classification,
}

/// Returns the entry of a language model.
const fn language_model<C>(architecture: Architecture) -> Model
where
    C: LanguageModelConfig + BuildModel<Flex, Model: LanguageModel<Flex>> + 'static,
    Causal<C>: Subject,
{
    Model {
        architecture,
        model_type: C::MODEL_TYPE,
        task: Task::LanguageModelling,
        read: |fields| Ok(KnownModel::LanguageModel(Box::new(C::from_fields(fields)?))),
        prepare: |inputs| Ok(Box::new(Causal::<C>::prepare(inputs)?)),
    }
}

/// Returns the entry of a text classifier.
const fn classifier<C>(architecture: Architecture) -> Model
where
    C: SavedConfig
        + TextClassifierConfig
        + BuildModel<Flex, Model: TextClassifier<Flex> + 'static>
        + 'static,
    Classification<C>: ClassifierRecipe + Subject,
{
    Model {
        architecture,
        model_type: C::MODEL_TYPE,
        task: Task::Classification,
        read: |fields| Ok(KnownModel::Classifier(Box::new(C::from_fields(fields)?))),
        prepare: |inputs| Ok(Box::new(Classification::<C>::prepare(inputs)?)),
    }
}

impl Model {
    /// Reads and checks the model and the data of a job.
    ///
    /// # Errors
    /// Returns a user's mistake if the model or the data is invalid, or if they do not match.
    pub(crate) fn prepare(&self, inputs: &JobInputs<'_>) -> Result<Box<dyn Subject>, Failure> {
        (self.prepare)(inputs)
    }
}

/// Returns the model of a job.
///
/// # Errors
/// Returns a user's mistake if the architecture has no model for the data of the job.
pub(crate) fn of_job(job: &Job) -> Result<&'static Model, Failure> {
    let task = match job.data.kind {
        DataKind::Classification { .. } => Task::Classification,
        DataKind::Text { .. } | DataKind::Tokens | DataKind::Synthetic => Task::LanguageModelling,
    };
    let architecture = job.model.architecture;
    let model = MODELS.iter().find(|it| it.architecture == architecture && it.task == task);
    model.ok_or_else(|| {
        Failure::mistake(format!("data.kind: does not fit model.architecture {architecture:?}"))
    })
}

/// Reads the fields of a `config.json`.
///
/// # Errors
/// Returns [`ModelConfigError`] if the model is not supported, or if a field has the wrong type or is out of range.
pub(crate) fn read_saved(fields: Map<String, Value>) -> Result<KnownModel, ModelConfigError> {
    let given = fields.get("model_type");
    let model_type = given.map_or(Some(FIRST_MODEL_TYPE), Value::as_str);
    let of_type = MODELS.iter().filter(|model| Some(model.model_type) == model_type);
    let task = match is_sequence_classifier(&fields) {
        true => Task::Classification,
        false => Task::LanguageModelling,
    };
    let model = of_type.clone().find(|model| model.task == task).or(of_type.clone().next());
    match model {
        Some(model) => (model.read)(fields),
        None => Err(ModelConfigError::Value {
            name: "model_type",
            value: given.unwrap_or(&Value::Null).to_string(),
            rule: format!("one of {}", model_types().join(", ")),
        }),
    }
}

/// Returns the supported values of `model_type`.
fn model_types() -> Vec<&'static str> {
    let mut types: Vec<_> = MODELS.iter().map(|model| model.model_type).collect();
    types.dedup();
    types
}
