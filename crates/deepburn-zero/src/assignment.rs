//! Selects the update rule and settings of each parameter of a model.
//!
//! Main type: [`Assignment`], which combines the optimizer of a plan with its parameter groups. A
//! parameter is updated with the optimizer's settings, except for the settings that its group
//! replaces. Muon updates only matrices of hidden layers. A second optimizer, Adam, updates all
//! other parameters.
//!
//! A parameter is found by its module path and its number of dimensions. The optimizer stores each
//! distinct setting once and computes the scalars of a step for each. Checkpoints store states by
//! parameter, so they do not depend on groups.
//!
//! Whether groups fit a model can only be checked with the model's parameters.
//! [`ParamGroups::check`] checks groups against the optimizer alone, when a configuration is
//! resolved. It is called again for a model, because a program can also build a plan without a
//! configuration.
//!
//! `sharding` passes the settings of each parameter to `optimizer`. `finetune` makes the same
//! assignment before a run, so this module is public and uses no other.

mod matrices;
mod model_parameter;

use deepburn_config::{
    GroupRate, GroupUpdate, MuonPlan, NoDecay, OptimizerPlan, ParamGroup, ParamGroupError,
    ParamGroups,
};

pub use matrices::{Matrices, MatrixLayout};
pub use model_parameter::ModelParameter;

/// The optimizer and the parameter groups, which together determine the update of each parameter.
///
/// ```
/// use deepburn_config::{
///     AdamPlan, GroupUpdate, NoDecay, OptimizerPlan, ParamGroup, ParamGroups, PathPattern,
/// };
/// use deepburn_zero::assignment::{Assignment, ModelParameter};
///
/// let optimizer = OptimizerPlan::AdamW(AdamPlan {
///     lr: 1e-3,
///     betas: [0.9, 0.999],
///     eps: 1e-8,
///     weight_decay: 0.1,
///     bias_correction: true,
/// });
/// // Embeddings are frozen, and biases and norms do not decay.
/// let embeddings = ParamGroup {
///     params: vec![PathPattern::new(r"^wte\.")?],
///     dims: vec![],
///     update: GroupUpdate::Frozen,
/// };
/// let groups = ParamGroups { groups: vec![embeddings], no_decay: NoDecay::BiasesAndNorms };
/// let parameter = |path, shape| ModelParameter { path, shape, layer: "", is_announced: false };
/// let parameters =
///     [parameter("wte.weight", &[50257, 768]), parameter("ln_f.bias", &[768])];
/// let assignment = Assignment { optimizer: &optimizer, groups: &groups };
/// let updates = assignment.of_model(&parameters).map_err(|error| error.to_string())?;
/// assert_eq!(updates[0], None);
/// assert_eq!(updates[1].as_ref().unwrap().optimizer.weight_decay(), 0.0);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Assignment<'a> {
    /// The optimizer. Its settings apply wherever a group does not replace them.
    pub optimizer: &'a OptimizerPlan,
    /// The parameter groups, which replace settings of the optimizer.
    pub groups: &'a ParamGroups,
}

/// The update settings of one parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateSettings {
    /// The optimizer, with the weight decay and betas of the parameter. With Muon, this is Adam for
    /// a parameter that Muon does not update.
    pub optimizer: OptimizerPlan,
    /// The factor by which the schedule's learning rate is multiplied, at least 0.
    pub lr_factor: f64,
    /// The matrices that Muon orthogonalizes. `None` for Adam and all other optimizers.
    pub matrices: Option<Matrices>,
}

/// An error in the parameter groups or the optimizer of a model.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AssignmentError {
    /// A group or a learning rate does not fit the optimizer, or a group does not fit one of its
    /// parameters.
    #[error(transparent)]
    Group(#[from] ParamGroupError),
    /// A group selects no parameter of the model.
    #[error(
        "param_groups[{group}]: no parameter of the model is in it ({selection}); the model has {known}; correct it \
         or remove the group"
    )]
    Empty {
        /// The position of the group in `param_groups`.
        group: usize,
        /// The patterns and dimensions that the group selects.
        selection: String,
        /// Some of the model's parameters.
        known: String,
    },
    /// A parameter is in two groups.
    #[error(
        "param_groups[{first}] and param_groups[{second}]: parameter {path} is in both; make one of them narrower"
    )]
    Overlap {
        /// Module path of the parameter.
        path: String,
        /// The position of the first group in `param_groups`.
        first: usize,
        /// The position of the second group.
        second: usize,
    },
    /// The model has no matrix that Muon can orthogonalize.
    #[error(
        "optimizer.type: Muon updates matrices of hidden layers and the model has none ({known}); use AdamW, or set \
         muon_matrices in a parameter group"
    )]
    NoMatrix {
        /// Some of the model's parameters.
        known: String,
    },
}

impl AssignmentError {
    /// Returns the error for a model without a matrix that Muon can orthogonalize.
    pub(crate) fn no_matrix(parameters: &[ModelParameter<'_>]) -> Self {
        Self::NoMatrix { known: some_of(parameters) }
    }
}

impl Assignment<'_> {
    /// Returns the update settings of each parameter of a model, or `None` for a frozen parameter.
    ///
    /// # Errors
    /// Returns an error if [`ParamGroups::check`] fails, or in these cases:
    ///
    /// - A group selects no parameter, or a parameter is in two groups.
    /// - The optimizer is Muon, and the model has no matrix that it can orthogonalize.
    /// - A parameter cannot be divided into the number of matrices that its group sets
    ///   (`muon_matrices`).
    /// - A group sets `betas`, but Muon, which has no betas, updates all of its parameters.
    pub fn of_model(
        self,
        parameters: &[ModelParameter<'_>],
    ) -> Result<Vec<Option<UpdateSettings>>, AssignmentError> {
        self.groups.check(self.optimizer, false)?;
        let groups = &self.groups.groups;
        let mut sizes = vec![0; groups.len()];
        let mut updates = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let group = self.group_of(parameter)?;
            group.into_iter().for_each(|group| sizes[group] += 1);
            updates.push(self.settings(group, parameter)?);
        }
        if let Some(group) = sizes.iter().position(|size| *size == 0) {
            let selection = selection(&groups[group]);
            return Err(AssignmentError::Empty { group, selection, known: some_of(parameters) });
        }
        let has_matrix = updates.iter().flatten().any(|update| update.matrices.is_some());
        if matches!(self.optimizer, OptimizerPlan::Muon(_)) && !has_matrix {
            return Err(AssignmentError::no_matrix(parameters));
        }
        self.check_betas(parameters, &updates)?;
        Ok(updates)
    }

    /// Returns the update settings of one parameter, or `None` if it is frozen.
    ///
    /// # Errors
    /// Returns an error if the parameter is in two groups, or if it cannot be divided into the
    /// number of matrices that its group sets.
    pub(crate) fn of_parameter(
        self,
        parameter: &ModelParameter<'_>,
    ) -> Result<Option<UpdateSettings>, AssignmentError> {
        Ok(self.settings(self.group_of(parameter)?, parameter)?)
    }

    /// Checks that a group with `betas` has a trained parameter that Muon does not update, because
    /// Muon has no betas.
    fn check_betas(
        self,
        parameters: &[ModelParameter<'_>],
        updates: &[Option<UpdateSettings>],
    ) -> Result<(), ParamGroupError> {
        for (place, group) in self.groups.groups.iter().enumerate() {
            let GroupUpdate::Trained { betas: Some(betas), .. } = group.update else { continue };
            let has_betas = parameters.iter().zip(updates).any(|(parameter, update)| {
                let is_adams = update.as_ref().is_some_and(|update| update.matrices.is_none());
                is_adams && selects(group, parameter)
            });
            if !has_betas {
                let reason = format!(
                    "betas are {betas:?}, and Muon updates all parameters of the group, which has none; remove them"
                );
                return Err(ParamGroupError::Unfit { group: place, reason });
            }
        }
        Ok(())
    }

    /// Returns the group of a parameter; `None` if it is in no group.
    fn group_of(self, parameter: &ModelParameter<'_>) -> Result<Option<usize>, AssignmentError> {
        let groups = self.groups.groups.iter().enumerate();
        let mut found = groups.filter(|(_, group)| selects(group, parameter)).map(|(at, _)| at);
        match (found.next(), found.next()) {
            (Some(first), Some(second)) => {
                Err(AssignmentError::Overlap { path: parameter.path.to_owned(), first, second })
            }
            (found, _) => Ok(found),
        }
    }

    /// Returns the update settings of a parameter. The settings of `group` replace the optimizer's.
    fn settings(
        self,
        group: Option<usize>,
        parameter: &ModelParameter<'_>,
    ) -> Result<Option<UpdateSettings>, ParamGroupError> {
        let update = group.map(|group| self.groups.groups[group].update);
        let (rate, own_decay, betas, parts) = match update {
            None => (GroupRate::Factor(1.0), None, None, None),
            Some(GroupUpdate::Frozen) => return Ok(None),
            Some(GroupUpdate::Trained { rate, weight_decay, betas, muon_matrices }) => {
                (rate, weight_decay, betas, muon_matrices)
            }
        };
        let factor = match rate {
            GroupRate::Factor(factor) => factor,
            GroupRate::Own(lr) => lr / self.optimizer.lr(),
        };
        // `Matrices::of` fails only if a group sets the number of matrices, so `group` is not
        // `None`.
        let unfit = |reason| ParamGroupError::Unfit { group: group.unwrap_or_default(), reason };
        let (chosen, lr_factor, matrices) = match self.optimizer {
            OptimizerPlan::Muon(muon) => match Matrices::of(parameter, parts).map_err(unfit)? {
                // An absolute learning rate (`lr`) of the group replaces both Muon's and Adam's
                // rate.
                None if matches!(rate, GroupRate::Own(_)) => (adam_beside(muon), factor, None),
                None => (adam_beside(muon), factor * adam_lr_factor(muon), None),
                matrices => (self.optimizer.clone(), factor, matrices),
            },
            other => (other.clone(), factor, None),
        };
        // Biases and the weights of norms have one dimension. A weight decay that the group sets
        // overrides `no_decay`.
        let spared = self.groups.no_decay == NoDecay::BiasesAndNorms && parameter.shape.len() == 1;
        let spared = spared.then_some(0.0);
        let optimizer = chosen.with(own_decay.or(spared), betas);
        Ok(Some(UpdateSettings { optimizer, lr_factor, matrices }))
    }
}

/// Returns the optimizer for parameters that Muon does not update.
fn adam_beside(muon: &MuonPlan) -> OptimizerPlan {
    let variant = if muon.decouples_decay { OptimizerPlan::AdamW } else { OptimizerPlan::Adam };
    variant(muon.adam)
}

/// Returns Adam's learning rate as a factor of the schedule's rate, which applies to matrices.
fn adam_lr_factor(muon: &MuonPlan) -> f64 {
    // Equal rates are a separate case, because both may be 0, and 0 / 0 is NaN.
    if muon.adam.lr == muon.lr { 1.0 } else { muon.adam.lr / muon.lr }
}

/// Returns true if `group` selects the parameter.
fn selects(group: &ParamGroup, parameter: &ModelParameter<'_>) -> bool {
    let ModelParameter { path, shape, .. } = parameter;
    let by_path = group.params.is_empty() || group.params.iter().any(|it| it.occurs_in(path));
    by_path && (group.dims.is_empty() || group.dims.contains(&shape.len()))
}

/// Describes the parameters that a group selects, for an error message.
fn selection(group: &ParamGroup) -> String {
    let patterns: Vec<_> = group.params.iter().map(|it| format!("{:?}", it.as_str())).collect();
    let patterns = patterns.join(", ");
    match (group.params.is_empty(), group.dims.is_empty()) {
        (_, true) => format!("params {patterns}"),
        (true, false) => format!("dims {:?}", group.dims),
        (false, false) => format!("params {patterns} of dims {:?}", group.dims),
    }
}

/// Returns the first parameter paths of a model, for an error message.
fn some_of(parameters: &[ModelParameter<'_>]) -> String {
    let known: Vec<_> = parameters.iter().take(6).map(|parameter| parameter.path).collect();
    let rest = if parameters.len() > known.len() { ", ..." } else { "" };
    format!("{}{rest}", known.join(", "))
}

#[cfg(test)]
mod tests;
