//! The supported models, one line each.
//!
//! Main table: [`MODELS`]. `finetune` finds the model of a job in it, and the tools find the model
//! of a `config.json`. Messages list the values of `model.architecture` and `model_type` from the
//! table.
//!
//! `ARCHITECTURE.md` describes how to add a model.

use std::path::{Path, PathBuf};

use deepburn_config::{Architecture, DataKind, Job};
use deepburn_models::SavedConfig;
use deepburn_models::decoder::{AnyDecoder, DecoderConfig};
use deepburn_models::encoder::EncoderConfig;
use deepburn_models::families::{
    Gemma2Config, Gemma3Config, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config,
};
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Config};
use deepburn_models::hf::{ModelConfigError, is_sequence_classifier, read_fields, read_small_file};
use serde_json::{Map, Value};

use crate::data::causal::Causal;
use crate::data::classification::Classification;
use crate::data::model_config::model_config;
use crate::data::recipe::JobInputs;
use crate::data::subject::Subject;
use crate::failure::Failure;
use crate::job::known_model::{KnownClassifier, KnownModel};

/// The supported models. If several models have the same `model_type`, the first one reads files
/// whose `architectures` do not name a classifier.
static MODELS: [ModelEntry; 10] = [
    language_model::<Gpt2Config>(Architecture::Gpt2),
    classifier::<ClassifierConfig>(Architecture::Gpt2, |inputs| {
        Ok(Subject::Gpt2Classifier(Box::new(Classification::of_gpt2(inputs)?)))
    }),
    language_model::<LlamaConfig>(Architecture::Llama),
    language_model::<Qwen2Config>(Architecture::Qwen2),
    language_model::<Qwen3Config>(Architecture::Qwen3),
    language_model::<MistralConfig>(Architecture::Mistral),
    language_model::<Phi3Config>(Architecture::Phi3),
    language_model::<Gemma2Config>(Architecture::Gemma2),
    language_model::<Gemma3Config>(Architecture::Gemma3),
    classifier::<EncoderConfig>(Architecture::Encoder, |inputs| {
        Ok(Subject::Encoder(Box::new(Classification::of_encoder(inputs)?)))
    }),
];

/// The `model_type` of files of the first versions of `transformers`, which do not have this field.
/// GPT-2 is the only supported model that they have.
const FIRST_MODEL_TYPE: &str = <Gpt2Config as SavedConfig>::MODEL_TYPE;

/// The architecture of these files, and of a job that names none.
const FIRST_ARCHITECTURE: Architecture = Architecture::Gpt2;

/// Fields by which these files are recognized.
const FIRST_FIELDS: [&str; 5] = ["n_ctx", "n_embd", "n_head", "n_layer", "n_positions"];

/// A supported model.
pub(crate) struct ModelEntry {
    /// The value of `model.architecture` in a job, which a job may leave open.
    pub(crate) architecture: Architecture,
    /// The value of `model_type` in `config.json`.
    model_type: &'static str,
    /// The task of the model's head.
    task: ModelTask,
    /// Reads the fields of a `config.json`.
    read: fn(Map<String, Value>) -> Result<KnownModel, ModelConfigError>,
    /// Reads and checks the model and the data of a job. Its errors are a user's mistakes.
    pub(crate) prepare: PrepareSubject,
}

/// Prepares the model and the data of a job.
type PrepareSubject = fn(&JobInputs<'_>) -> Result<Subject, Failure>;

/// The task of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelTask {
    /// Next-token prediction.
    LanguageModeling,
    /// Classification of texts, and regression.
    Classification,
}

/// Returns the entry of a language model.
const fn language_model<C: DecoderConfig>(architecture: Architecture) -> ModelEntry {
    ModelEntry {
        architecture,
        model_type: <C as DecoderConfig>::MODEL_TYPE,
        task: ModelTask::LanguageModeling,
        read: |fields| Ok(KnownModel::LanguageModel(AnyDecoder::new(C::from_fields(fields)?))),
        prepare: |inputs| {
            let config: C = model_config(inputs.job, inputs.pretrained)?;
            Ok(Subject::Causal(Box::new(Causal::prepare(AnyDecoder::new(config), inputs)?)))
        },
    }
}

/// Returns the entry of a text classifier.
const fn classifier<C: SavedConfig + KnownClassifier + 'static>(
    architecture: Architecture,
    prepare: PrepareSubject,
) -> ModelEntry {
    ModelEntry {
        architecture,
        model_type: C::MODEL_TYPE,
        task: ModelTask::Classification,
        read: |fields| Ok(KnownModel::Classifier(Box::new(C::from_fields(fields)?))),
        prepare,
    }
}

/// Returns the model of a job. `pretrained` is the folder of its pretrained model.
///
/// # Errors
/// Returns a user's mistake if the pretrained model is not supported, or contradicts the job.
pub(crate) fn of_job(job: &Job, pretrained: Option<&Path>) -> Result<&'static ModelEntry, Failure> {
    let task = match job.data.kind {
        DataKind::Classification { .. } => ModelTask::Classification,
        _ => ModelTask::LanguageModeling,
    };
    let architecture = architecture_of(job, pretrained)?;
    let model = MODELS.iter().find(|it| it.architecture == architecture && it.task == task);
    model.ok_or_else(|| {
        let name = architecture.name();
        Failure::mistake(format!("data.kind: model.architecture \"{name}\" does not support it"))
    })
}

/// Returns the architecture of a job. It is the pretrained model's, which the job may also name.
///
/// # Errors
/// Returns a user's mistake if the pretrained model has another architecture than the job names, or
/// one whose weights are not supported.
fn architecture_of(job: &Job, pretrained: Option<&Path>) -> Result<Architecture, Failure> {
    let given = job.model.architecture;
    // A folder whose `config.json` is missing or damaged is reported when the model is opened.
    let Some((file, fields)) = pretrained.and_then(saved_fields) else {
        return Ok(given.unwrap_or(FIRST_ARCHITECTURE));
    };
    if let (Some(given), None) = (given, fields.get("model_type")) {
        return Ok(given);
    }
    let with_weights =
        || model_types(MODELS.iter().filter(|model| model.architecture.takes_pretrained()));
    let Some(model_type) = model_type_of(&fields) else {
        let problem = unknown_type(&fields, &with_weights());
        return Err(Failure::mistake(format!("model.pretrained: {}: {problem}", file.display())));
    };
    // Any entry of the type will do, because all of them have the same architecture.
    let found = MODELS.iter().find(|model| model.model_type == model_type);
    let found = found.map(|model| model.architecture);
    let file = file.display();
    match (given, found) {
        (Some(given), found) if found != Some(given) => {
            let change = match found {
                Some(found) if found.takes_pretrained() => {
                    format!(
                        "write \"{}\" or remove it, or give another model.pretrained",
                        found.name()
                    )
                }
                _ => format!("give a {} model as model.pretrained", given.name()),
            };
            Err(Failure::mistake(format!(
                "model.architecture: is \"{}\", but {file} has model_type \"{model_type}\"; {change}",
                given.name()
            )))
        }
        (_, Some(found)) if found.takes_pretrained() => Ok(found),
        _ => Err(Failure::mistake(format!(
            "model.pretrained: {file} has model_type \"{model_type}\", whose weights are not supported; \
             supported: {}",
            with_weights()
        ))),
    }
}

/// Returns the path of the `config.json` in a folder, and its fields; `None` if the file cannot be
/// read.
fn saved_fields(folder: &Path) -> Option<(PathBuf, Map<String, Value>)> {
    let file = folder.join("config.json");
    let fields = read_fields(&read_small_file(&file).ok()?).ok()?;
    Some((file, fields))
}

/// Returns the `model_type` of a `config.json`; `None` if it is unknown or not a text.
fn model_type_of(fields: &Map<String, Value>) -> Option<&str> {
    match fields.get("model_type") {
        Some(given) => given.as_str(),
        None => {
            let is_first = FIRST_FIELDS.iter().any(|name| fields.contains_key(*name));
            is_first.then_some(FIRST_MODEL_TYPE)
        }
    }
}

/// Returns the problem of a `config.json` without a valid `model_type`.
fn unknown_type(fields: &Map<String, Value>, supported: &str) -> ModelConfigError {
    match fields.get("model_type") {
        Some(other) => ModelConfigError::Value {
            name: "model_type",
            value: other.to_string(),
            rule: format!("one of {supported}"),
        },
        None => ModelConfigError::Field(format!(
            "`model_type` is missing, so the model is unknown; add it, as one of {supported}"
        )),
    }
}

/// Reads the fields of a `config.json`.
///
/// # Errors
/// Returns [`ModelConfigError`] if the model is not supported, or if a field has the wrong type or
/// is out of range.
pub(crate) fn read_saved(fields: Map<String, Value>) -> Result<KnownModel, ModelConfigError> {
    let model_type = model_type_of(&fields);
    let of_type = MODELS.iter().filter(|model| Some(model.model_type) == model_type);
    let task = match is_sequence_classifier(&fields) {
        true => ModelTask::Classification,
        false => ModelTask::LanguageModeling,
    };
    // A model with a single head does not need `architectures` to select it.
    let model = of_type.clone().find(|model| model.task == task).or(of_type.clone().next());
    match model {
        Some(model) => (model.read)(fields),
        None => Err(unknown_type(&fields, &model_types(MODELS.iter()))),
    }
}

/// Returns a list of the `model_type` of these models.
fn model_types<'a>(models: impl Iterator<Item = &'a ModelEntry>) -> String {
    let mut types: Vec<_> = models.map(|model| model.model_type).collect();
    // Entries of one type are neighbors in the table.
    types.dedup();
    types.join(", ")
}

#[cfg(test)]
mod tests {
    mod toy;

    use super::*;
    use deepburn_config::JobRequest;
    use serde_json::json;
    use std::fs;

    /// Returns the model of a job with a pretrained model whose `config.json` has these fields.
    fn of_folder(given: Option<&str>, config: &Value) -> Result<&'static ModelEntry, String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let job = json!({ "model": { "architecture": given, "pretrained": folder.path() } });
        let request = JobRequest::default();
        let (job, _) = Job::parse(&job.to_string(), "job.json", folder.path(), &request)
            .map_err(|error| error.to_string())?;
        of_job(&job, Some(folder.path())).map_err(|error| error.to_string())
    }

    #[test]
    fn models_are_found_without_ambiguity() {
        for (index, model) in MODELS.iter().enumerate() {
            for other in &MODELS[index + 1..] {
                let is_same = model.architecture == other.architecture;
                assert!(!is_same || model.task != other.task, "{}", other.model_type);
                assert_eq!(is_same, model.model_type == other.model_type, "{}", other.model_type);
            }
        }
        let first = MODELS.iter().find(|model| model.model_type == FIRST_MODEL_TYPE);
        assert_eq!(first.unwrap().architecture, FIRST_ARCHITECTURE);
    }

    #[test]
    fn the_model_type_selects_the_architecture() {
        // Files of the first versions have no `model_type`. A file that cannot be read is reported
        // when the model is opened.
        for config in [json!({"model_type": "gpt2"}), json!({"n_embd": 8}), json!(7)] {
            for given in [None, Some("gpt2")] {
                let model = of_folder(given, &config).unwrap();
                assert_eq!(model.architecture, Architecture::Gpt2);
                assert_eq!(model.task, ModelTask::LanguageModeling);
            }
        }
        for (given, model_type, expected) in [
            (
                None,
                "mamba",
                "has model_type \"mamba\", whose weights are not supported; supported: gpt2",
            ),
            (None, "deepburn_encoder", "whose weights are not supported; supported: gpt2"),
            (Some("gpt2"), "mamba", "is \"gpt2\", but "),
            (Some("gpt2"), "deepburn_encoder", "give a gpt2 model as model.pretrained"),
            (Some("encoder"), "gpt2", "encoder does not support pretrained weights"),
        ] {
            let error = of_folder(given, &json!({ "model_type": model_type })).err().unwrap();
            assert!(error.contains(expected), "{error}");
        }
        for (config, problem) in [
            (json!({}), "`model_type` is missing, so the model is unknown; add it, as one of"),
            (json!({"hidden_size": 8}), "`model_type` is missing"),
            (json!({"model_type": 3}), "`model_type` is 3, but it must be one of"),
            (json!({"model_type": null, "n_embd": 8}), "`model_type` is null"),
        ] {
            let error = of_folder(None, &config).err().unwrap();
            assert!(error.contains(problem), "{error}");
            assert!(
                error.ends_with("gpt2, llama, qwen2, qwen3, mistral, phi3, gemma2, gemma3_text")
            );
        }
        // The job may name what the file does not.
        let model = of_folder(Some("llama"), &json!({"hidden_size": 8})).unwrap();
        assert_eq!(model.architecture, Architecture::Llama);
        let error = of_folder(Some("llama"), &json!({"model_type": 3})).err().unwrap();
        assert!(error.contains("`model_type` is 3"), "{error}");
    }

    #[test]
    fn files_select_the_head_by_their_architectures() {
        let read = |fields: Value| read_saved(fields.as_object().unwrap().clone());
        let classifies = |fields: Value| match read(fields.clone()) {
            Ok(model) => matches!(model, KnownModel::Classifier(_)),
            Err(error) => panic!("{fields}: {error}"),
        };
        let first = json!({"architectures": ["GPT2ForSequenceClassification"], "n_ctx": 8});
        assert!(classifies(first));
        let error = read(json!({"hidden_size": 8})).err().unwrap().to_string();
        assert!(error.starts_with("`model_type` is missing, so the model is unknown"), "{error}");
        assert!(error.ends_with("gemma3_text, deepburn_encoder"), "{error}");
        assert!(classifies(json!({"model_type": "deepburn_encoder"})));
        for architectures in [json!(["GPT2LMHeadModel"]), json!([]), json!(null), json!("x")] {
            assert!(!classifies(json!({"model_type": "gpt2", "architectures": architectures})));
        }
        for model_type in [json!("mamba"), json!(null), json!(3)] {
            let error = read(json!({ "model_type": model_type })).err().unwrap().to_string();
            let expected = format!(
                "`model_type` is {model_type}, but it must be one of gpt2, llama, qwen2, qwen3, mistral, phi3, \
                 gemma2, gemma3_text, deepburn_encoder"
            );
            assert_eq!(error, expected);
        }
    }
}
