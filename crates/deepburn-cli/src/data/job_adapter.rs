//! The adapter of a job: `model.lora`, a new one, or `model.adapter`, which is trained further.

use std::path::Path;

use deepburn_config::{Job, counted};
use deepburn_models::Architecture;
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{ADAPTER_CONFIG, AdapterFolder};
use deepburn_models::lora::{InitialFactors, LoraConfig};
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::job::adapter_base::{base_name, check_base, warn_of_unused};
use crate::job::model_folder::{ADAPTER, remedy_without_adapter, trained_adapter_in};

/// Returns the model with the adapter of the job, if it has one.
///
/// # Errors
/// Returns a user's mistake if the adapter does not fit the model, or if the vocabulary is larger
/// than the pretrained model's.
pub(crate) fn with_adapter(
    config: AnyDecoder,
    job: &Job,
    pretrained: Option<&Path>,
) -> Result<AnyDecoder, Failure> {
    // The parser of the job refuses an adapter without a pretrained model.
    let Some(folder) = pretrained.filter(|_| job.model.has_adapter()) else { return Ok(config) };
    refuse_changes(&job.model.config)?;
    refuse_new_rows(&config, folder)?;
    let place = job.model.pretrained.as_ref();
    let base = base_name(place, folder);
    let (key, config) = match (&job.model.lora, &job.model.adapter) {
        (Some(fields), _) => {
            let of_key = Failure::of_key("model.lora");
            let lora = LoraConfig::of_job(fields).map_err(&of_key)?.with_base_model(&base);
            let config = config.with_adapter(lora).map_err(&of_key)?;
            for (name, reason) in LoraConfig::unread_in_job(fields) {
                tracing::info!("model.lora.{name} has no effect: {reason}");
            }
            for setting in config.unused_settings().map_err(&of_key)? {
                tracing::warn!("model.lora.{setting} has no effect: it selects nothing; remove it");
            }
            ("model.lora", config)
        }
        (None, Some(given)) => {
            let of_key = Failure::of_key("model.adapter");
            // Also of a run that saved its merged model too: this key can only mean the adapter.
            let adapter = trained_adapter_in(given).ok_or_else(|| {
                let remedy = remedy_without_adapter(given);
                Failure::mistake(format!(
                    "model.adapter: {} has neither {ADAPTER_CONFIG} nor {ADAPTER}/{ADAPTER_CONFIG}; {remedy}",
                    given.display()
                ))
            })?;
            let adapter = AdapterFolder::open(&adapter).map_err(&of_key)?;
            check_base("model.pretrained", &adapter, &config, (place, folder))?;
            let adapter = adapter.with_base_model(&base);
            let config = config.with_trained_adapter(adapter).map_err(&of_key)?;
            warn_of_unused("model.adapter", &config)?;
            ("model.adapter", config)
        }
        (None, None) => return Ok(config),
    };
    if job.training.saving.save_merged {
        // Checked before training: the merge comes after its last step, and would fail there.
        let of_key = Failure::of_key(format!("training.save_merged: {key}"));
        config.check_mergeable().map_err(of_key)?;
    }
    if let Some(adapter) = config.adapter() {
        // The base model is frozen, apart from what `modules_to_save` and `bias` select.
        let trained = config.parameters().into_iter().filter(|it| !it.is_frozen);
        let trained: usize = trained.map(|it| it.num_elements()).sum();
        let (modules, all) = (counted(adapter.num_modules(), "module"), config.num_parameters());
        tracing::info!("{key}: adapters in {modules}; {trained} of {all} parameters are trained");
    }
    Ok(config)
}

/// Refuses a vocabulary that is larger than the pretrained model's. PEFT's files name the base
/// model, whose embeddings lack the new rows.
///
/// # Errors
/// Returns a user's mistake with the remedy.
fn refuse_new_rows(config: &AnyDecoder, folder: &Path) -> Result<(), Failure> {
    // Rows that the file lacks would be the mean of the others here, and missing in PEFT.
    match config.new_rows(folder).map_err(Failure::mistake)? {
        0 => Ok(()),
        new_rows => Err(Failure::mistake(format!(
            "model.config.vocab_size: adds {new_rows} rows to the embeddings of {}, which is not supported with an adapter: \
             its files would belong to a base model without these rows; {LARGER_BASE}",
            folder.display()
        ))),
    }
}

/// The remedy if a job with an adapter needs a larger vocabulary.
pub(crate) const LARGER_BASE: &str = "resize the base model first (transformers: resize_token_embeddings, save_pretrained), give the \
     result as model.pretrained, and train its new rows with trainable_token_indices or modules_to_save; or train the whole \
     model";

/// Refuses overrides of the model's configuration that change what it computes. An adapter names
/// its base model and has no place for them, so programs that read it would compute something else.
///
/// # Errors
/// Returns a user's mistake that names the field.
fn refuse_changes(overrides: &Map<String, Value>) -> Result<(), Failure> {
    // Dropout is only used in training, the vocabulary is checked with the files, and token ids do
    // not belong to the model.
    let is_harmless = |name: &str| {
        ["dropout", "pdrop", "_token_id", "dtype"].iter().any(|part| name.contains(part))
            || name == "vocab_size"
    };
    match overrides.iter().find(|(name, value)| !is_harmless(name) && !value.is_null()) {
        None => Ok(()),
        Some((name, _)) => Err(Failure::mistake(format!(
            "model.config.{name}: cannot be changed with an adapter, whose files name the base model but not this change; \
             change the config.json of the base model, or remove it"
        ))),
    }
}

/// Refuses an adapter with random factors for preference optimization: the reference is the model
/// at the start of the run, and has to be the base model.
///
/// # Errors
/// Returns a user's mistake.
pub(crate) fn refuse_random_adapter(config: &AnyDecoder) -> Result<(), Failure> {
    let is_new = config.trained_adapter().is_none();
    match config.adapter().filter(|_| is_new).map(|adapter| adapter.config().initial) {
        // PEFT then draws both factors, so their product is not 0.
        Some(InitialFactors::Nonzero) => Err(Failure::mistake(
            "model.lora.init_lora_weights: false starts with another model than the base model, which preference \
             optimization compares with; write true or \"gaussian\"",
        )),
        _ => Ok(()),
    }
}
