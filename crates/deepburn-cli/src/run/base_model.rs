//! The pretrained model of a run whose checkpoints omit its frozen parameters
//! (`training.checkpoint_scope`).
//!
//! A frozen parameter is omitted if the folder of the pretrained model has it. New heads and
//! embeddings with new rows are contained. Whether a parameter still has the values of the folder
//! is decided by the engine, for example after a group was frozen in the middle of a run.

use std::collections::HashSet;
use std::path::Path;

use deepburn::checkpoint::Checkpoint;
use deepburn::weights::{Origin, WeightMap};
use deepburn_config::{CheckpointScope, Job, Plan, counted};
use deepburn_models::Architecture;
use deepburn_models::hf::{BaseModel, ModelFolderError};

use crate::failure::Failure;
use crate::job::model_folder::model_in;
use crate::job::param_groups::parameter_updates;

/// Returns the map of the model in which the parameters that checkpoints omit have the origin
/// `Frozen`; `None` if checkpoints contain all parameters. Logs how many they omit.
///
/// # Errors
/// Returns a user's mistake if the files of the pretrained model cannot be read.
pub(crate) fn omitted_parameters(
    job: &Job,
    plan: &Plan,
    architecture: &dyn Architecture,
    pretrained: Option<&Path>,
) -> Result<Option<WeightMap>, Failure> {
    let (CheckpointScope::Trained, Some(folder)) =
        (job.training.saving.checkpoint_scope, pretrained)
    else {
        return Ok(None);
    };
    let parameters = architecture.parameters().into_iter();
    let updates = parameter_updates(architecture, plan)?;
    // `None` is a frozen parameter, by a group or by an adapter.
    let frozen = parameters.zip(updates).filter(|(_, update)| update.is_none());
    let frozen: HashSet<String> = frozen.map(|(parameter, _)| parameter.path).collect();
    if frozen.is_empty() {
        return Ok(None);
    }
    let base = architecture.base_model(folder).map_err(Failure::of_key("model.pretrained"))?;
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

/// Sets the model from which the parameters that `checkpoint` omits are read.
pub(crate) fn set_base(checkpoint: &mut Checkpoint, mut base: BaseModel) {
    checkpoint.set_base(move |path| Ok(base.read(path)?));
}

/// Sets the base model of a checkpoint that omits parameters. `given` is the option `--base`, and
/// `recorded` the folder that the run read. `open` opens a folder by the names of the parameters in
/// files.
///
/// # Errors
/// Returns a user's mistake if there is no such folder, or if the option has no effect.
pub(crate) fn find_base(
    checkpoint: &mut Checkpoint,
    given: Option<&Path>,
    recorded: Option<&Path>,
    open: impl FnOnce(&Path) -> Result<BaseModel, ModelFolderError>,
) -> Result<(), Failure> {
    let Some((entry, _)) = checkpoint.omitted().next() else {
        return match given {
            Some(_) => Err(Failure::mistake(
                "--base: has no effect: the checkpoint contains all parameters; remove it",
            )),
            None => Ok(()),
        };
    };
    let Some(folder) = given.or(recorded.filter(|folder| folder.is_dir())) else {
        let place = recorded.map(|it| format!(" in {}, which is not there", it.display()));
        return Err(Failure::mistake(format!(
            "--base: the checkpoint omits frozen parameters such as {}, which are in the pretrained model of the run{}; give \
             the folder of this model",
            entry.path,
            place.unwrap_or_default()
        )));
    };
    set_base(checkpoint, open(&model_in(folder)).map_err(Failure::of_key("--base"))?);
    Ok(())
}
