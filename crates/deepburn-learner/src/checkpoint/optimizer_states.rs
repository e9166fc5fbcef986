//! Where the optimizer states of each parameter come from when a run resumes.
//!
//! Main function: [`check_states`]. A trained parameter has its states in the checkpoint, unless
//! it was frozen when the checkpoint was saved: then its states are new, as for a parameter without
//! state in PyTorch. The moments are zero, and bias correction counts the parameter's own steps;
//! later checkpoints store by path how many steps came before them. The states of a parameter that
//! is frozen now are not used. Both are logged. `finetune` makes the same check before it starts.
//!
//! Optimizers that compress exchanges (1-bit Adam, 1-bit LAMB, 0/1 Adam) have one schedule for all
//! parameters. After their freeze, second moments no longer change, so new ones would stay zero.
//! New states are an error for them.

use deepburn_checkpoint::{Checkpoint, ParamEntry, StateKind};
use deepburn_config::OptimizerPlan;
use deepburn_zero::{StateArray, moments};
use tracing::warn;

use super::{TrainingCheckpointError, entry_of, unfit};

/// The number of parameter paths in a log line.
const MAX_LISTED: usize = 5;

/// Checks before there is an engine whether the optimizer states of a checkpoint can be loaded.
///
/// `parameters` gives the module path of each parameter and its optimizer with the settings of its
/// group; `None` if it is frozen. Paths that the checkpoint does not have are skipped.
///
/// # Errors
/// Returns [`TrainingCheckpointError::Unfit`] with the first parameter whose states cannot be
/// loaded.
pub fn check_optimizer_states<'a>(
    checkpoint: &Checkpoint,
    parameters: impl IntoIterator<Item = (&'a str, Option<&'a OptimizerPlan>)>,
) -> Result<(), TrainingCheckpointError> {
    for (path, optimizer) in parameters {
        if let (Some(optimizer), Some(entry)) = (optimizer, entry_of(checkpoint, path)) {
            check_states(path, entry, optimizer)
                .map_err(|reason| unfit(checkpoint.path(), reason))?;
        }
    }
    Ok(())
}

/// Checks that the states of the trained parameter `path` are in the checkpoint or can be new.
/// `optimizer` updates it, and `entry` is its entry in the checkpoint.
///
/// Arrays that differ between ranks (compression errors, states of local steps) are compared
/// separately, because their number depends on the number of ranks.
///
/// # Errors
/// Returns the first difference between the stored states and the optimizer's, as the reason in an
/// error message.
pub(super) fn check_states(
    path: &str,
    entry: &ParamEntry,
    optimizer: &OptimizerPlan,
) -> Result<(), String> {
    let own = moments(optimizer);
    if !entry.trainable && !own.is_empty() {
        return check_new_states(path, optimizer);
    }
    let stored = entry.states.iter().filter(|stored| matches!(stored.kind, StateKind::Moment(_)));
    let stored = stored.map(|stored| stored.kind.as_str());
    let (of_ranks, stored): (Vec<&str>, Vec<&str>) =
        stored.partition(|name| StateArray::of_ranks(name).is_some());
    let is_kept =
        |name: &&str| StateArray::of_ranks(name).is_some_and(|array| array.is_kept_by(optimizer));
    if !of_ranks.iter().all(is_kept) {
        return Err(format!(
            "it has states of compressed exchanges ({}) of parameter {path}, which this optimizer does not use: \
             {REMEDY}",
            listed(&of_ranks)
        ));
    }
    if stored != own {
        return Err(format!(
            "its optimizer kept {} of parameter {path} and this one keeps {}: {REMEDY}",
            listed(&stored),
            listed(own)
        ));
    }
    Ok(())
}

/// Checks that a parameter that was frozen when the checkpoint was saved can get new states.
///
/// # Errors
/// Returns the reason if the optimizer cannot start with new states.
pub(super) fn check_new_states(path: &str, optimizer: &OptimizerPlan) -> Result<(), String> {
    if optimizer.exchanges_momentum() {
        return Err(format!(
            "parameter {path} was frozen when the checkpoint was saved and is trained now, and an optimizer that \
             compresses its exchanges cannot start with new states for some parameters: freeze it, or start a new \
             run from the weights"
        ));
    }
    Ok(())
}

/// The remedies for states of another optimizer.
const REMEDY: &str = "use the optimizer that saved it, load without optimizer states, or start a new run from the weights";

/// Logs the parameters whose states are new, and those whose stored states are not used. Each is
/// given as its path and its number of elements.
pub(super) fn log_changes(new: &[(&str, usize)], unused: &[(&str, usize)]) {
    if !new.is_empty() {
        warn!(
            "new optimizer states for {}: frozen when the checkpoint was saved and trained now; their moments are zero \
             and their bias correction starts here",
            described(new)
        );
    }
    if !unused.is_empty() {
        warn!(
            "the optimizer states of {} in the checkpoint are not used: frozen now",
            described(unused)
        );
    }
}

/// Describes parameters: their number, their elements and some paths.
fn described(parameters: &[(&str, usize)]) -> String {
    let elements: usize = parameters.iter().map(|(_, numel)| numel).sum();
    let paths: Vec<_> = parameters.iter().take(MAX_LISTED).map(|(path, _)| *path).collect();
    let rest = if parameters.len() > paths.len() { ", ..." } else { "" };
    let plural = if parameters.len() == 1 { "" } else { "s" };
    let (count, paths) = (parameters.len(), paths.join(", "));
    format!("{count} parameter{plural} ({elements} elements: {paths}{rest})")
}

/// Joins names with commas for an error message.
pub(super) fn listed(names: &[&str]) -> String {
    match names {
        [] => "nothing".to_owned(),
        names => names.join(", "),
    }
}
