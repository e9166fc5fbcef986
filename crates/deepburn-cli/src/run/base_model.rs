//! The pretrained model of a run whose checkpoints omit its frozen parameters (`training.checkpoint_scope`).
//!
//! A frozen parameter is omitted if the folder of the pretrained model has it. New heads and embeddings with new rows
//! are contained. Whether a parameter still has the values of the folder is decided by the engine, for example after a
//! group was frozen in the middle of a run.

use std::collections::HashSet;
use std::path::Path;

use deepburn::checkpoint::{BaseValues, Checkpoint, ElementType};
use deepburn::weights::{Origin, WeightMap};
use deepburn_config::{CheckpointScope, Job, Plan, Precision, counted};
use deepburn_models::Architecture;
use deepburn_models::hf::{BaseModel, ModelFolderError};

use crate::failure::Failure;
use crate::job::param_groups::parameter_updates;
use crate::run::preparation::Preparation;

/// Returns the map of the model in which the parameters that checkpoints omit have the origin `Frozen`; `None` if
/// checkpoints contain all parameters. Logs how many they omit.
///
/// # Errors
/// Returns a user's mistake if the files of the pretrained model cannot be read.
pub(crate) fn omitted_parameters(
    job: &Job,
    plan: &Plan,
    architecture: &dyn Architecture,
    pretrained: Option<&Path>,
) -> Result<Option<WeightMap>, Failure> {
    let (CheckpointScope::Trained, Some(folder)) = (job.training.checkpoint_scope, pretrained)
    else {
        return Ok(None);
    };
    let parameters = architecture.parameters().into_iter();
    let updates = parameter_updates(architecture, plan)?;
    let frozen = parameters.zip(updates).filter(|(_, update)| update.is_none());
    let frozen: HashSet<String> = frozen.map(|(parameter, _)| parameter.path).collect();
    if frozen.is_empty() {
        return Ok(None);
    }
    let base = BaseModel::open(folder, architecture.weight_map());
    let base = base.map_err(|error| Failure::mistake(format!("model.pretrained: {error}")))?;
    let map = base.frozen_map(|path| frozen.contains(path));
    match map.weights().iter().filter(|weight| *weight.origin() == Origin::Frozen).count() {
        0 => tracing::warn!(
            "training.checkpoint_scope has no effect: model.pretrained has no frozen parameter in the shape of this model"
        ),
        count => tracing::info!(
            "checkpoints omit {}, which model.pretrained has",
            counted(count, "frozen parameter")
        ),
    }
    Ok(Some(map))
}

/// Sets the folder from which the parameters that `checkpoint` omits are read.
///
/// # Errors
/// Returns an error if the files in the folder cannot be read.
pub(crate) fn set_base(
    checkpoint: &mut Checkpoint,
    folder: &Path,
    map: WeightMap,
) -> Result<(), ModelFolderError> {
    let mut base = BaseModel::open(folder, map)?;
    checkpoint.set_base(move |path| Ok(base.read(path)?));
    Ok(())
}

/// Checks that the pretrained model of the job has the parameters that `checkpoint` omits, with the same values.
///
/// # Errors
/// Returns the first difference, as the reason in an error message.
pub(crate) fn check_base(
    preparation: &Preparation,
    checkpoint: &mut Checkpoint,
) -> Result<(), String> {
    let Some((entry, base)) = checkpoint.omitted().next() else { return Ok(()) };
    let Some(folder) = &preparation.pretrained else {
        return Err(format!(
            "it omits the frozen parameter {}, which is in the pretrained model of the run; set model.pretrained to this \
             model",
            entry.path
        ));
    };
    let element = match preparation.plan.precision.compute {
        Precision::Fp32 => ElementType::F32,
        Precision::Fp16 => ElementType::F16,
        Precision::Bf16 => ElementType::Bf16,
    };
    let held = BaseValues { element, ..base.clone() };
    base.check(&entry.path, &held).map_err(|error| error.to_string())?;
    let map = preparation.subject.info().architecture().weight_map();
    let of_key = |reason: String| format!("{reason} (model.pretrained is {})", folder.display());
    set_base(checkpoint, folder, map).map_err(|error| of_key(error.to_string()))?;
    checkpoint.verify_base().map_err(|error| of_key(error.to_string()))
}
