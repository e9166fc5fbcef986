//! The optimizer files of all ranks, which have to be from the save of the model file next to them.

use std::path::{Path, PathBuf};

use crate::DeepSpeedError;
use crate::model_states_file::ModelStatesFile;
use crate::optim_states_file::OptimStatesFile;

/// Opens the optimizer files of stages 1 and 2; `None` at stage 0, whose optimizer is in the model
/// file.
///
/// # Errors
/// Returns an error if the files are not from one save.
pub(crate) fn partitions(
    folder: &Path,
    model: &ModelStatesFile,
    optim: &[PathBuf],
) -> Result<Option<Vec<OptimStatesFile>>, DeepSpeedError> {
    // Only partitioned optimizers store the order of parameters in flat groups, so its presence
    // distinguishes stages 1 and 2 from stage 0.
    match (model.groups.is_some(), optim.is_empty()) {
        (false, true) => Ok(None),
        (true, _) => open_ranks(folder, model, optim, false).map(Some),
        (false, false) => {
            let reason = "it is a stage 0 checkpoint, but its folder also has files of a partitioned optimizer";
            Err(DeepSpeedError::mixed(model.path(), reason))
        }
    }
}

/// Opens the optimizer files of all ranks and checks that they are from the same save as the model.
/// `sharded` is true at stage 3.
pub(crate) fn open_ranks(
    folder: &Path,
    model: &ModelStatesFile,
    optim: &[PathBuf],
    sharded: bool,
) -> Result<Vec<OptimStatesFile>, DeepSpeedError> {
    let found = optim.len();
    if found != model.summary.world_size || found == 0 {
        return Err(wrong_number(folder, model, found, "optim"));
    }
    let ranks: Vec<_> =
        optim.iter().map(|path| OptimStatesFile::open(path)).collect::<Result<_, _>>()?;
    for rank in &ranks {
        if (rank.stage == Some(3)) != sharded {
            let reason = format!(
                "its zero_stage is {}, which differs from {}",
                rank.stage.map_or("missing".to_owned(), |stage| stage.to_string()),
                model.path().display()
            );
            return Err(DeepSpeedError::mixed(rank.path(), reason));
        }
        let version = rank.contents.root().get("ds_version");
        let version = version.map(|version| version.text()).transpose()?;
        if version.is_some_and(|version| version != model.summary.version) {
            let reason = format!("it is of another version than {}", model.path().display());
            return Err(DeepSpeedError::mixed(rank.path(), reason));
        }
    }
    Ok(ranks)
}

/// Returns the error for a number of files that differs from the number of ranks.
pub(crate) fn wrong_number(
    folder: &Path,
    model: &ModelStatesFile,
    found: usize,
    kind: &str,
) -> DeepSpeedError {
    let reason = format!(
        "the number of files *_{kind}_states.pt is {found}, and the number of ranks in {} is {}; copy the \
         files of all ranks of one save into one folder",
        model.path().display(),
        model.summary.world_size
    );
    DeepSpeedError::missing(folder, reason)
}
