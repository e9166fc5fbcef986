//! Parameter groups: parameters whose settings differ from the optimizer's.
//!
//! Main type: [`ParamGroups`], which selects parameters of a model by their module paths and
//! numbers of dimensions. `deepburn_zero::assignment` assigns the updates, because that needs a
//! model's parameters.

use regex::{Regex, RegexBuilder};
use serde::{Serialize, Serializer};

use super::{MuonPlan, OptimizerPlan};
use crate::choice::choices;

/// The settings of parameters for which the optimizer's settings do not apply.
///
/// ```
/// use deepburn_config::{GroupUpdate, NoDecay, ParamGroup, ParamGroups, PathPattern};
///
/// // Embeddings are frozen, and biases and norms do not decay.
/// let embeddings = ParamGroup {
///     params: vec![PathPattern::new(r"^wte\.")?],
///     dims: vec![],
///     update: GroupUpdate::Frozen,
/// };
/// let groups = ParamGroups { groups: vec![embeddings], no_decay: NoDecay::BiasesAndNorms };
/// assert!(groups.groups[0].params[0].occurs_in("wte.weight"));
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ParamGroups {
    /// The groups. A parameter is in at most one group.
    pub groups: Vec<ParamGroup>,
    /// The parameters without weight decay, unless their group sets one.
    pub no_decay: NoDecay,
}

/// The parameters without weight decay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NoDecay {
    /// Every parameter decays, as in DeepSpeed and PyTorch.
    #[default]
    Nothing,
    /// Parameters of one dimension: biases and the weights of norms. In the models that `finetune`
    /// trains these are the parameters that transformers' `Trainer` does not decay.
    BiasesAndNorms,
}

choices!(NoDecay { "biases_and_norms" => BiasesAndNorms, "nothing" => Nothing });

/// A group of parameters with separate settings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ParamGroup {
    /// Patterns that select parameters by their module path; empty for any path.
    pub params: Vec<PathPattern>,
    /// Numbers of dimensions of the selected parameters: 1 for a bias, 2 for a matrix; empty for
    /// any number.
    pub dims: Vec<usize>,
    /// How the parameters are updated.
    pub update: GroupUpdate,
}

/// How the parameters of a group are updated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupUpdate {
    /// The parameters are not updated.
    Frozen,
    /// The parameters are trained.
    Trained {
        /// The learning rate.
        rate: GroupRate,
        /// Weight decay in place of the optimizer's.
        weight_decay: Option<f64>,
        /// Decay of the moments in place of the optimizer's.
        betas: Option<[f64; 2]>,
        /// Number of adjacent matrices in each parameter for Muon; 0 uses Adam instead. `None`
        /// determines it from the layer and the name.
        #[serde(skip_serializing_if = "Option::is_none")]
        muon_matrices: Option<usize>,
    },
}

/// The learning rate of a group. The schedule applies to all groups.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupRate {
    /// The schedule's learning rate times this factor.
    Factor(f64),
    /// This replaces the optimizer's learning rate. The schedule scales both by the same factor.
    Own(f64),
}

/// A regular expression for module paths.
#[derive(Debug, Clone)]
pub struct PathPattern(Regex);

impl PathPattern {
    /// Parses a pattern in the syntax of the `regex` crate, `^wte\.` for example.
    ///
    /// The pattern may match anywhere in a path, so most patterns need `^` or `$`:
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
    /// Returns the problem of the pattern, on one line.
    pub fn new(pattern: &str) -> Result<Self, String> {
        Regex::new(pattern).map(Self).map_err(reason)
    }

    /// Parses a pattern that ignores case.
    ///
    /// # Errors
    /// Returns the problem of the pattern, on one line.
    pub(crate) fn ignoring_case(pattern: &str) -> Result<Self, String> {
        RegexBuilder::new(pattern).case_insensitive(true).build().map(Self).map_err(reason)
    }

    /// Returns the regular expression.
    pub fn regex(&self) -> &Regex {
        &self.0
    }

    /// Returns the regular expression as it was written.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Returns whether the pattern matches in `path`.
    pub fn occurs_in(&self, path: &str) -> bool {
        self.0.is_match(path)
    }
}

/// Returns the problem of a pattern, on one line.
fn reason(error: regex::Error) -> String {
    match error {
        // The last line of the error describes the problem. The lines before it show the position.
        regex::Error::Syntax(text) => {
            text.lines().last().unwrap_or_default().replace("error: ", "")
        }
        other => other.to_string(),
    }
}

impl PartialEq for PathPattern {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Serialize for PathPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Parameter groups that are not valid for the optimizer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ParamGroupError {
    /// Adam's learning rate is set in proportion to the rate of Muon's matrices, which is 0.
    #[error(
        "optimizer.params.muon_lr is 0 and Adam's {adam_lr:?}, in proportion to it; give a muon_lr above 0, or freeze \
         the matrices"
    )]
    MuonRate {
        /// Adam's learning rate.
        adam_lr: f64,
    },
    /// A setting that the optimizer or the group's parameters do not have, or a value out of range.
    #[error("param_groups[{group}]: {reason}")]
    Unfit {
        /// Index of the group in the list.
        group: usize,
        /// The problem and the remedy.
        reason: String,
    },
}

impl ParamGroups {
    /// Checks that `optimizer` has the settings of all groups. `cycles_momentum` is true if the
    /// schedule sets the betas of every step.
    ///
    /// # Errors
    /// Returns [`ParamGroupError::Unfit`] or [`ParamGroupError::MuonRate`].
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
}

impl ParamGroup {
    /// Returns the reason why the group cannot be used with `optimizer`, if there is one.
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
