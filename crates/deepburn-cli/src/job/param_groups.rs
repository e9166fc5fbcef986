//! Applies the parameter groups of a job to the parameters of a model.
//!
//! Memory forecasts need the size of each parameter together with its optimizer: a frozen parameter
//! has neither a gradient nor optimizer states, and optimizers differ in the states that they keep.

use deepburn::zero::ParameterSize;
use deepburn::zero::assignment::{Assignment, AssignmentError, ModelParameter, UpdateSettings};
use deepburn_config::{NoDecay, OptimizerPlan, ParamGroupError, ParamGroups, Plan, counted};
use deepburn_models::Architecture;
use deepburn_models::hf::ParameterShape;

use crate::failure::Failure;

/// Returns the size of every parameter, together with the optimizer of its group.
///
/// Frozen parameters have no optimizer, so that no gradient and no optimizer state is counted for
/// them.
///
/// # Errors
/// Returns a user's mistake if a group matches no parameter, or if no parameter of the model
/// supports its settings.
pub(crate) fn grouped_sizes(
    model: &dyn Architecture,
    plan: &Plan,
) -> Result<Vec<ParameterSize>, Failure> {
    let (parameters, updates) = (model.parameters(), parameter_updates(model, plan)?);
    // Saturating, because absurd sizes in a `config.json` must not wrap to small ones.
    let size = |(parameter, update): (&ParameterShape, &Option<UpdateSettings>)| {
        let lens = parameter.shape.iter();
        let numel = lens.fold(1, |numel: u64, len| numel.saturating_mul(*len as u64));
        ParameterSize::new(numel, update.as_ref().map(|update| &update.optimizer))
    };
    let sizes = parameters.iter().zip(&updates).map(size).collect();
    report_groups(plan, &updates);
    Ok(sizes)
}

/// Returns the update settings of every parameter, in the order of `model.parameters()`; `None` for
/// a frozen one.
///
/// # Errors
/// Returns a user's mistake if a group matches no parameter, if no parameter of the model supports
/// its settings, or if all parameters are frozen.
pub(crate) fn parameter_updates(
    model: &dyn Architecture,
    plan: &Plan,
) -> Result<Vec<Option<UpdateSettings>>, Failure> {
    let parameters = model.parameters();
    // Without layer types, embeddings and output layers are recognized by their names.
    let known: Vec<_> = parameters
        .iter()
        .map(|it| ModelParameter {
            path: &it.path,
            shape: &it.shape,
            layer: "",
            is_announced: false,
        })
        .collect();
    let assignment = Assignment { optimizer: &plan.optimizer, groups: &plan.param_groups };
    // Groups are a key of `training`, but errors of Muon are reported for the optimizer in
    // `deepspeed`.
    let updates = assignment.of_model(&known).map_err(|error| match error {
        AssignmentError::NoMatrix { .. }
        | AssignmentError::Group(ParamGroupError::MuonRate { .. }) => {
            Failure::mistake(format!("deepspeed.{error}"))
        }
        _ => Failure::mistake(format!("training.{error}")),
    })?;
    let updates = updates.into_iter().zip(&parameters);
    // Groups do not know which parameters an adapter freezes.
    let updates: Vec<_> = updates.map(|(update, it)| update.filter(|_| !it.is_frozen)).collect();
    match updates.iter().any(Option::is_some) {
        true => Ok(updates),
        false => Err(Failure::mistake(format!(
            "training.param_groups: the frozen groups match all {} of the model, so nothing would train; freeze fewer",
            counted(updates.len(), "parameter")
        ))),
    }
}

/// Logs how many parameters are frozen, updated by Muon, or exempt from weight decay.
///
/// Users can check with these numbers that a group matches the parameters that they expect. Nothing
/// is logged if all parameters have the same settings.
fn report_groups(plan: &Plan, updates: &[Option<UpdateSettings>]) {
    let ParamGroups { groups, no_decay } = &plan.param_groups;
    let frozen = updates.iter().filter(|update| update.is_none()).count();
    if frozen > 0 {
        tracing::info!("{frozen} of {} are frozen", counted(updates.len(), "parameter"));
    }
    if matches!(plan.optimizer, OptimizerPlan::Muon(_)) {
        let orthogonalized = updates.iter().flatten().filter(|update| update.matrices.is_some());
        let (count, all) = (orthogonalized.count(), counted(updates.len(), "parameter"));
        tracing::info!("Muon updates {count} of {all}; Adam updates the others");
    }
    let decay = plan.optimizer.weight_decay();
    let trained = updates.iter().flatten();
    let exempt = trained.filter(|update| update.optimizer.weight_decay() == 0.0).count();
    if decay > 0.0 && exempt > 0 {
        let why = match (groups.is_empty(), no_decay) {
            (true, _) => "training.no_decay",
            (false, NoDecay::Nothing) => "training.param_groups",
            (false, NoDecay::BiasesAndNorms) => "training.no_decay, training.param_groups",
        };
        let all = counted(updates.len(), "parameter");
        tracing::info!("weight decay {decay} does not apply to {exempt} of {all} ({why})");
    }
}
