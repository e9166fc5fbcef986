//! The configuration of a job's model: the pretrained model's or the default one, with the fields
//! of `model.config`.

use std::path::Path;

use deepburn_config::Job;
use deepburn_models::LanguageModelConfig;
use deepburn_models::decoder::{DecoderConfig, PretrainedDecoder};
use deepburn_models::hf::ModelConfigError;
use serde_json::{Map, Value};

use crate::failure::Failure;

/// Returns the configuration of the pretrained model, or the default one, with the overrides of the
/// job. Logs an enlarged vocabulary, because the weights then have new rows.
///
/// # Errors
/// Returns a user's mistake if the folder has no model, or if a field is unknown, out of range, or
/// not read although it may change what the model computes.
pub(crate) fn model_config<C: DecoderConfig>(
    job: &Job,
    pretrained: Option<&Path>,
) -> Result<C, Failure> {
    let base = match pretrained {
        Some(folder) => PretrainedDecoder::read_config(folder).map_err(Failure::mistake)?,
        None => C::default_size(),
    };
    let named = |error| invalid_field(job, pretrained, &error);
    // Overrides first, so that fields are validated together: a width that is valid alone may not
    // be divisible by the number of heads.
    let config = base.with_overrides(&without_dtype(&job.model.config)).map_err(named)?;
    config.validate().map_err(named)?;
    let (old, new) = (base.limits().vocab_size, config.limits().vocab_size);
    if pretrained.is_some() {
        // A model with random weights learns whatever it computes.
        warn_of_other_computation(&base, &config);
    }
    if pretrained.is_some() && new > old {
        tracing::info!(
            "model.config.vocab_size: the pretrained model has {old} tokens and gets {new}: each new row of its embedding \
             and output layer is the mean of the existing rows"
        );
    }
    Ok(config)
}

/// Returns the overrides of a model's configuration without the type of its weights, which has no
/// effect. Logs a warning if it is given.
///
/// Training follows the `deepspeed` section, and the exported weights are in fp32. A type in
/// `config.json` would only contradict them.
pub(crate) fn without_dtype(overrides: &Map<String, Value>) -> Map<String, Value> {
    let mut fields = overrides.clone();
    for name in ["dtype", "torch_dtype"] {
        if let Some(value) = fields.remove(name).filter(|value| !value.is_null()) {
            tracing::warn!(
                "model.config.{name}: {value} has no effect: deepspeed.bf16.enabled and deepspeed.fp16.enabled set the type \
                 of training, and the model is exported in fp32; remove it"
            );
        }
    }
    fields
}

/// Fields that change what pretrained weights compute, but not their shapes.
const COMPUTING: [&str; 6] = [
    "activation_function",
    "layer_norm_epsilon",
    "n_head",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
];

/// Warns of overrides with which pretrained weights compute something else than they were trained
/// for.
fn warn_of_other_computation<C: LanguageModelConfig>(base: &C, config: &C) {
    // The exported fields, in which defaults are filled in: a field that the file leaves out may be
    // given with its default.
    let fields = |config: &C| config.hf_export().documents.remove("config.json");
    let Some((base, config)) = fields(base).zip(fields(config)) else { return };
    for name in COMPUTING {
        if let Some((own, given)) = base.get(name).zip(config.get(name))
            && own != given
        {
            tracing::warn!(
                "model.config.{name}: {given} instead of the pretrained model's {own} changes what its weights compute; \
                 remove it to keep the model's"
            );
        }
    }
}

/// Returns the failure for an invalid field of the model's configuration. It names the file of a
/// field that only the pretrained model has, and the key that can remove the field.
fn invalid_field(job: &Job, pretrained: Option<&Path>, error: &ModelConfigError) -> Failure {
    let of_file = |field: &str| pretrained.filter(|_| !job.model.config.contains_key(field));
    let file = |folder: &Path| folder.join("config.json").display().to_string();
    // The field is probably misspelled in the file, so the message names the file alone.
    if let ModelConfigError::Unknown { name, .. } = error
        && let Some(folder) = of_file(name)
    {
        return Failure::mistake(format!("{}: {error}", file(folder)));
    }
    // A known field with an unsupported value can be overridden in the job.
    if let Some(field) = error.unsupported_field()
        && let Some(folder) = of_file(field)
    {
        let key = format!("model.config.{field}");
        return Failure::mistake(format!("{}: {error} ({key} in the job)", file(folder)));
    }
    Failure::mistake(format!("model.config: {error}"))
}
