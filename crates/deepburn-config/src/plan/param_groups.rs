//! Parameter groups: parameters that are updated otherwise than the optimizer says of all.
//!
//! Main type: [`ParamGroups`], which says of each parameter of a model, by its module path and its
//! number of dimensions, how it is updated.

use regex::Regex;
use serde::{Serialize, Serializer};

use super::matrices::{Matrices, ModelParameter};
use super::{MuonPlan, OptimizerPlan};
use crate::choice::choices;

/// How the parameters of a model are updated where the optimizer's own settings do not apply.
///
/// ```
/// use deepburn_config::{
///     AdamPlan, GroupUpdate, ModelParameter, NoDecay, OptimizerPlan, ParamGroup, ParamGroups,
///     PathPattern,
/// };
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
/// let updates = groups.assign(&optimizer, &parameters).map_err(|error| error.to_string())?;
/// assert_eq!(updates[0], None);
/// assert_eq!(updates[1].as_ref().unwrap().optimizer.weight_decay(), 0.0);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ParamGroups {
    /// Each parameter is in one of them at most.
    pub groups: Vec<ParamGroup>,
    /// What weight decay leaves alone, unless its group has a weight decay of its own.
    pub no_decay: NoDecay,
}

/// What weight decay leaves alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoDecay {
    /// Every parameter decays, as in DeepSpeed and PyTorch.
    #[default]
    Nothing,
    /// Parameters of one dimension: biases and the weights of norms. In the models that `finetune`
    /// trains these are the parameters that transformers' `Trainer` does not decay.
    BiasesAndNorms,
}

choices!(NoDecay { "biases_and_norms" => BiasesAndNorms, "nothing" => Nothing });

/// Parameters with settings of their own.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ParamGroup {
    /// Those with a module path that one of the patterns occurs in; of any path without a pattern.
    pub params: Vec<PathPattern>,
    /// Those with so many dimensions: 1 for a bias, 2 for a matrix; of any number where it is
    /// empty.
    pub dims: Vec<usize>,
    /// What becomes of them.
    pub update: GroupUpdate,
}

/// What becomes of the parameters of a group.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupUpdate {
    /// They stay as they are.
    Frozen,
    /// They are trained.
    Trained {
        /// How fast they learn.
        rate: GroupRate,
        /// Weight decay in place of the optimizer's.
        weight_decay: Option<f64>,
        /// Decay of the moments in place of the optimizer's.
        betas: Option<[f64; 2]>,
        /// How many matrices side by side Muon finds in each; 0 leaves them to Adam. `None`: what
        /// they are is seen from their layers and names.
        #[serde(skip_serializing_if = "Option::is_none")]
        muon_matrices: Option<usize>,
    },
}

/// The learning rate of a group. The schedule applies to every group alike.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupRate {
    /// The schedule's learning rate times this factor.
    Factor(f64),
    /// This replaces the optimizer's learning rate; the schedule scales both alike.
    Own(f64),
}

/// A regular expression that is looked for in module paths.
#[derive(Debug, Clone)]
pub struct PathPattern(Regex);

impl PathPattern {
    /// Reads a pattern, in the syntax of the `regex` crate: `^wte\.` for example.
    ///
    /// It is looked for anywhere in a path, so `^` and `$` are part of most patterns:
    ///
    /// ```
    /// use deepburn_config::PathPattern;
    ///
    /// let blocks = PathPattern::new(r"^h\.[0-3]\.")?;
    /// assert!(blocks.occurs_in("h.2.attn.c_attn.weight"));
    /// assert!(!blocks.occurs_in("h.11.attn.c_attn.weight"));
    /// assert_eq!(PathPattern::new("h.(").unwrap_err(), "unclosed group");
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    /// What is wrong with it, on one line.
    pub fn new(pattern: &str) -> Result<Self, String> {
        let reason = |error: regex::Error| match error {
            // The last line of the error says what is wrong; those before show where.
            regex::Error::Syntax(text) => {
                text.lines().last().unwrap_or_default().replace("error: ", "")
            }
            other => other.to_string(),
        };
        Regex::new(pattern).map(Self).map_err(reason)
    }

    /// Whether it occurs in `path`.
    pub fn occurs_in(&self, path: &str) -> bool {
        self.0.is_match(path)
    }
}

impl PartialEq for PathPattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Serialize for PathPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_str())
    }
}

/// With what a parameter is updated.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateSettings {
    /// The optimizer, with the weight decay and betas of the parameter. A parameter that Muon
    /// leaves alone has the Adam beside it.
    pub optimizer: OptimizerPlan,
    /// Factor of the schedule's learning rate, at least 0.
    pub lr_factor: f64,
    /// What Muon orthogonalises; `None` with another optimizer.
    pub matrices: Option<Matrices>,
}

/// Groups that do not fit the model or the optimizer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ParamGroupError {
    /// No parameter is in a group.
    #[error(
        "param_groups[{group}]: no parameter of the model is in it ({selection}); the model has {known}; correct it \
         or remove the group"
    )]
    Empty {
        /// Its place in the list.
        group: usize,
        /// What it selects.
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
        /// The place of a group in the list.
        first: usize,
        /// The place of another.
        second: usize,
    },
    /// Muon has nothing to orthogonalise.
    #[error(
        "optimizer.type: Muon updates matrices of hidden layers and the model has none ({known}); use AdamW, or set \
         muon_matrices in a parameter group"
    )]
    NoMatrix {
        /// Some of the model's parameters.
        known: String,
    },
    /// Adam's learning rate is in proportion to the rate of Muon's matrices, which is 0.
    #[error(
        "optimizer.params.muon_lr is 0 and Adam's {adam_lr:?}, in proportion to it; give a muon_lr above 0, or freeze \
         the matrices"
    )]
    MuonRate {
        /// Adam's.
        adam_lr: f64,
    },
    /// A setting that the optimizer lacks, or a value out of range.
    #[error("param_groups[{group}]: {reason}")]
    Unfit {
        /// Its place in the list.
        group: usize,
        /// What is wrong, and the remedy.
        reason: String,
    },
}

impl ParamGroups {
    /// The settings of each of a model's parameters, `None` for a frozen one.
    ///
    /// # Errors
    /// A group without a parameter, a parameter in two groups, Muon without a matrix, and what
    /// [`ParamGroups::check`] refuses.
    pub fn assign(
        &self,
        optimizer: &OptimizerPlan,
        parameters: &[ModelParameter<'_>],
    ) -> Result<Vec<Option<UpdateSettings>>, ParamGroupError> {
        self.check(optimizer, false)?;
        let mut sizes = vec![0; self.groups.len()];
        let mut updates = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let group = self.group_of(parameter)?;
            group.into_iter().for_each(|group| sizes[group] += 1);
            updates.push(self.settings(group, parameter, optimizer)?);
        }
        if let Some(group) = sizes.iter().position(|size| *size == 0) {
            let selection = self.groups[group].selection();
            return Err(ParamGroupError::Empty { group, selection, known: some_of(parameters) });
        }
        let has_matrix = updates.iter().flatten().any(|update| update.matrices.is_some());
        if matches!(optimizer, OptimizerPlan::Muon(_)) && !has_matrix {
            return Err(Self::no_matrix(parameters));
        }
        self.check_betas(parameters, &updates)?;
        Ok(updates)
    }

    /// The error for a model whose parameters are none that Muon can orthogonalise.
    pub fn no_matrix(parameters: &[ModelParameter<'_>]) -> ParamGroupError {
        ParamGroupError::NoMatrix { known: some_of(parameters) }
    }

    /// Refuses betas of a group whose parameters all are Muon's: those have none.
    fn check_betas(
        &self,
        parameters: &[ModelParameter<'_>],
        updates: &[Option<UpdateSettings>],
    ) -> Result<(), ParamGroupError> {
        for (place, group) in self.groups.iter().enumerate() {
            let GroupUpdate::Trained { betas: Some(betas), .. } = group.update else { continue };
            let has_betas = parameters.iter().zip(updates).any(|(parameter, update)| {
                let is_adams = update.as_ref().is_some_and(|update| update.matrices.is_none());
                is_adams && group.selects(parameter)
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

    /// The settings of one parameter, `None` if it is frozen.
    ///
    /// # Errors
    /// A parameter in two groups, or one that is not as many matrices as its group says.
    pub fn settings_of(
        &self,
        optimizer: &OptimizerPlan,
        parameter: &ModelParameter<'_>,
    ) -> Result<Option<UpdateSettings>, ParamGroupError> {
        self.settings(self.group_of(parameter)?, parameter, optimizer)
    }

    /// Refuses settings that `optimizer` has not. `cycles_momentum`: whether the schedule sets the
    /// betas of every step.
    ///
    /// # Errors
    /// [`ParamGroupError::Unfit`] and [`ParamGroupError::MuonRate`].
    pub fn check(
        &self,
        optimizer: &OptimizerPlan,
        cycles_momentum: bool,
    ) -> Result<(), ParamGroupError> {
        if let OptimizerPlan::Muon(MuonPlan { lr: 0.0, adam, .. }) = optimizer
            && adam.lr != 0.0
        {
            return Err(ParamGroupError::MuonRate { adam_lr: adam.lr });
        }
        for (group, settings) in self.groups.iter().enumerate() {
            if let Some(reason) = settings.unfit(optimizer, cycles_momentum) {
                return Err(ParamGroupError::Unfit { group, reason });
            }
        }
        Ok(())
    }

    /// The only group that a parameter is in.
    fn group_of(&self, parameter: &ModelParameter<'_>) -> Result<Option<usize>, ParamGroupError> {
        let mut found = (0..self.groups.len()).filter(|&at| self.groups[at].selects(parameter));
        match (found.next(), found.next()) {
            (Some(first), Some(second)) => {
                Err(ParamGroupError::Overlap { path: parameter.path.to_owned(), first, second })
            }
            (found, _) => Ok(found),
        }
    }

    /// Returns the settings of a parameter of `group`. The group's own settings replace the
    /// optimizer's.
    fn settings(
        &self,
        group: Option<usize>,
        parameter: &ModelParameter<'_>,
        optimizer: &OptimizerPlan,
    ) -> Result<Option<UpdateSettings>, ParamGroupError> {
        let (rate, own_decay, betas, parts) = match group.map(|group| self.groups[group].update) {
            None => (GroupRate::Factor(1.0), None, None, None),
            Some(GroupUpdate::Frozen) => return Ok(None),
            Some(GroupUpdate::Trained { rate, weight_decay, betas, muon_matrices }) => {
                (rate, weight_decay, betas, muon_matrices)
            }
        };
        let factor = match rate {
            GroupRate::Factor(factor) => factor,
            GroupRate::Own(lr) => lr / optimizer.lr(),
        };
        // A parameter in no group is never a reason.
        let unfit = |reason| ParamGroupError::Unfit { group: group.unwrap_or_default(), reason };
        let (chosen, lr_factor, matrices) = match optimizer {
            OptimizerPlan::Muon(muon) => match Matrices::of(parameter, parts).map_err(unfit)? {
                // A learning rate of the group's own replaces either of Muon's two.
                None if matches!(rate, GroupRate::Own(_)) => (muon.beside(), factor, None),
                None => (muon.beside(), factor * muon.adam_lr_factor(), None),
                matrices => (optimizer.clone(), factor, matrices),
            },
            other => (other.clone(), factor, None),
        };
        let spared = self.no_decay == NoDecay::BiasesAndNorms && parameter.shape.len() == 1;
        let spared = spared.then_some(0.0);
        let optimizer = chosen.with(own_decay.or(spared), betas);
        Ok(Some(UpdateSettings { optimizer, lr_factor, matrices }))
    }
}

/// The first paths of a model, for an error.
fn some_of(parameters: &[ModelParameter<'_>]) -> String {
    let known: Vec<_> = parameters.iter().take(6).map(|parameter| parameter.path).collect();
    let rest = if parameters.len() > known.len() { ", ..." } else { "" };
    format!("{}{rest}", known.join(", "))
}

impl ParamGroup {
    /// Whether a parameter is in the group.
    fn selects(&self, parameter: &ModelParameter<'_>) -> bool {
        let ModelParameter { path, shape, .. } = parameter;
        let by_path = self.params.is_empty() || self.params.iter().any(|it| it.occurs_in(path));
        by_path && (self.dims.is_empty() || self.dims.contains(&shape.len()))
    }

    /// What it selects, for an error.
    fn selection(&self) -> String {
        let patterns: Vec<_> =
            self.params.iter().map(|it| format!("{:?}", it.0.as_str())).collect();
        let patterns = patterns.join(", ");
        match (self.params.is_empty(), self.dims.is_empty()) {
            (_, true) => format!("params {patterns}"),
            (true, false) => format!("dims {:?}", self.dims),
            (false, false) => format!("params {patterns} of dims {:?}", self.dims),
        }
    }

    /// Why it cannot be used with `optimizer`.
    fn unfit(&self, optimizer: &OptimizerPlan, cycles_momentum: bool) -> Option<String> {
        if self.params.is_empty() && self.dims.is_empty() {
            return Some("it selects every parameter; give params or dims".to_owned());
        }
        let GroupUpdate::Trained { rate, weight_decay, betas, muon_matrices } = self.update else {
            return None;
        };
        let (name, number) = match rate {
            GroupRate::Factor(factor) => ("lr_factor", factor),
            GroupRate::Own(lr) => ("lr", lr),
        };
        for (name, number) in [(name, Some(number)), ("weight_decay", weight_decay)] {
            if let Some(number) = number.filter(|number| !number.is_finite() || *number < 0.0) {
                return Some(format!("{name} is {number}; must be a finite number of at least 0"));
            }
        }
        if matches!(rate, GroupRate::Own(_)) && optimizer.lr() == 0.0 {
            let reason = "lr is in proportion to the optimizer's lr, which is 0; write lr_factor";
            return Some(reason.to_owned());
        }
        if let Some(count) = muon_matrices
            && !matches!(optimizer, OptimizerPlan::Muon(_))
        {
            let reason = "and the optimizer is not Muon; remove it";
            return Some(format!("muon_matrices is {count}, {reason}"));
        }
        let betas = betas?;
        let reason = match betas.iter().all(|beta| (0.0..1.0).contains(beta)) {
            false => return Some(format!("betas are {betas:?}, each must be from 0 to below 1")),
            true if !optimizer.has_betas() => {
                "betas are of Adam, LAMB and Lion, and the optimizer is another; remove them"
            }
            true if cycles_momentum => {
                "betas are set by the schedule in every step (cycle_momentum); remove them, or set cycle_momentum to \
                 false"
            }
            true => return None,
        };
        Some(reason.to_owned())
    }
}

#[cfg(test)]
mod tests;
