//! Parameter groups: parameters that are updated otherwise than the optimizer says of all.
//!
//! Main type: [`ParamGroups`], which says of each parameter of a model, by its module path and its number of
//! dimensions, how it is updated.

use std::fmt;

use regex::Regex;
use serde::{Serialize, Serializer};

use super::matrices::Matrices;
use super::{MuonPlan, OptimizerPlan};

/// How the parameters of a model are updated where the optimizer's own settings do not apply.
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
    /// Parameters of one dimension: biases and the weights of norms. In the models that `finetune` trains these are
    /// the parameters that transformers' `Trainer` does not decay.
    BiasesAndNorms,
}

/// Parameters with settings of their own.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ParamGroup {
    /// Those with a module path that one of the patterns occurs in; of any path without a pattern.
    pub params: Vec<PathPattern>,
    /// Those with so many dimensions: 1 for a bias, 2 for a matrix; of any number where it is empty.
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
        /// How many matrices side by side Muon finds in each; 0 leaves them to Adam. `None`: what they are is
        /// seen from their layers and names.
        #[serde(skip_serializing_if = "Option::is_none")]
        muon_matrices: Option<usize>,
    },
}

/// The learning rate of a group. The schedule applies to every group alike.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupRate {
    /// That of the schedule, times this.
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

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0.as_str(), f)
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
    /// The optimizer, with the weight decay and betas of the parameter. A parameter that Muon leaves alone has the
    /// Adam beside it.
    pub optimizer: OptimizerPlan,
    /// Factor of the schedule's learning rate, at least 0.
    pub lr_factor: f64,
    /// What Muon orthogonalises; `None` with another optimizer.
    pub matrices: Option<Matrices>,
}

/// A parameter of a model, as far as its update depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelParameter<'a> {
    /// Module path; the first one of a tied parameter.
    pub path: &'a str,
    /// Lengths of its dimensions.
    pub shape: &'a [usize],
    /// Name of the type of the layer that holds it, `Embedding` for example; empty where it is not known.
    pub layer: &'a str,
    /// Whether its value is still to be made, and may have its dimensions in another order.
    pub is_announced: bool,
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
    /// Adam's learning rate is in proportion to that of Muon's matrices, which is 0.
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

impl ParamGroupError {
    /// `group` cannot be had for this reason. A parameter in no group is never a reason.
    fn unfit(group: Option<usize>, reason: String) -> Self {
        Self::Unfit { group: group.unwrap_or_default(), reason }
    }
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
        let orthogonalised = |update: &UpdateSettings| update.matrices.is_some();
        if matches!(optimizer, OptimizerPlan::Muon(_))
            && !updates.iter().flatten().any(orthogonalised)
        {
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
            let has_betas =
                |(parameter, update): (&ModelParameter<'_>, &Option<UpdateSettings>)| {
                    group.selects(parameter.path, parameter.shape.len())
                        && update.as_ref().is_some_and(|update| update.matrices.is_none())
                };
            if !parameters.iter().zip(updates).any(has_betas) {
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

    /// Refuses settings that `optimizer` has not. `cycles_momentum`: whether the schedule sets the betas of every
    /// step.
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
        let reason = |group: &ParamGroup| group.unfit(optimizer, cycles_momentum);
        let mut reasons = self.groups.iter().map(reason).enumerate();
        match reasons.find_map(|(group, reason)| Some((group, reason?))) {
            Some((group, reason)) => Err(ParamGroupError::Unfit { group, reason }),
            None => Ok(()),
        }
    }

    /// The only group that a parameter is in.
    fn group_of(&self, parameter: &ModelParameter<'_>) -> Result<Option<usize>, ParamGroupError> {
        let ModelParameter { path, shape, .. } = *parameter;
        let selects = |(_, group): &(usize, &ParamGroup)| group.selects(path, shape.len());
        let mut found = self.groups.iter().enumerate().filter(selects).map(|(place, _)| place);
        match (found.next(), found.next()) {
            (Some(first), Some(second)) => {
                Err(ParamGroupError::Overlap { path: path.to_owned(), first, second })
            }
            (found, _) => Ok(found),
        }
    }

    fn settings(
        &self,
        group: Option<usize>,
        parameter: &ModelParameter<'_>,
        optimizer: &OptimizerPlan,
    ) -> Result<Option<UpdateSettings>, ParamGroupError> {
        let spared = self.no_decay == NoDecay::BiasesAndNorms && parameter.shape.len() == 1;
        let spared = spared.then_some(0.0);
        let update = group.map(|group| &self.groups[group].update);
        let (factor, own_decay, betas, parts) = match update {
            None => (1.0, None, None, None),
            Some(GroupUpdate::Frozen) => return Ok(None),
            Some(GroupUpdate::Trained { rate, weight_decay, betas, muon_matrices }) => {
                let factor = match rate {
                    GroupRate::Factor(factor) => *factor,
                    GroupRate::Own(lr) => lr / optimizer.lr(),
                };
                (factor, *weight_decay, *betas, *muon_matrices)
            }
        };
        let (chosen, lr_factor, matrices) = match optimizer {
            OptimizerPlan::Muon(muon) => {
                let matrices = Matrices::of(parameter, parts)
                    .map_err(|reason| ParamGroupError::unfit(group, reason))?;
                // A learning rate of the group's own replaces either of Muon's two.
                let has_own =
                    matches!(update, Some(GroupUpdate::Trained { rate: GroupRate::Own(_), .. }));
                match matrices {
                    Some(matrices) => (OptimizerPlan::Muon(*muon), factor, Some(matrices)),
                    None if has_own => (muon.beside(), factor, None),
                    None => (muon.beside(), factor * muon.adam_lr_factor(), None),
                }
            }
            other => (other.clone(), factor, None),
        };
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
    fn selects(&self, path: &str, dims: usize) -> bool {
        let by_path = self.params.is_empty() || self.params.iter().any(|it| it.occurs_in(path));
        by_path && (self.dims.is_empty() || self.dims.contains(&dims))
    }

    /// What it selects, for an error.
    fn selection(&self) -> String {
        let patterns: Vec<_> = self.params.iter().map(PathPattern::to_string).collect();
        match (patterns.is_empty(), self.dims.is_empty()) {
            (_, true) => format!("params {}", patterns.join(", ")),
            (true, false) => format!("dims {:?}", self.dims),
            (false, false) => format!("params {} of dims {:?}", patterns.join(", "), self.dims),
        }
    }

    /// Why it cannot be used with `optimizer`.
    fn unfit(&self, optimizer: &OptimizerPlan, cycles_momentum: bool) -> Option<String> {
        if self.params.is_empty() && self.dims.is_empty() {
            return Some("it selects every parameter; give params or dims".to_owned());
        }
        let GroupUpdate::Trained { rate, weight_decay, betas, muon_matrices } = &self.update else {
            return None;
        };
        let is_amount = |number: f64| number.is_finite() && number >= 0.0;
        let (name, number) = match rate {
            GroupRate::Factor(factor) => ("lr_factor", *factor),
            GroupRate::Own(lr) => ("lr", *lr),
        };
        if !is_amount(number) {
            return Some(format!("{name} is {number}, must be a finite number of at least 0"));
        }
        if let Some(decay) = weight_decay.filter(|decay| !is_amount(*decay)) {
            return Some(format!("weight_decay is {decay}, must be a finite number of at least 0"));
        }
        if matches!(rate, GroupRate::Own(_)) && optimizer.lr() == 0.0 {
            let reason = "lr is in proportion to the optimizer's lr, which is 0; write lr_factor";
            return Some(reason.to_owned());
        }
        if let Some(count) = muon_matrices
            && !matches!(optimizer, OptimizerPlan::Muon(_))
        {
            return Some(format!(
                "muon_matrices is {count}, and the optimizer is not Muon; remove it"
            ));
        }
        let betas = (*betas)?;
        if !betas.iter().all(|beta| (0.0..1.0).contains(beta)) {
            return Some(format!("betas are {betas:?}, each must be from 0 to below 1"));
        }
        if !optimizer.has_betas() {
            return Some(
                "betas are of Adam, LAMB and Lion, and the optimizer is another; remove them"
                    .to_owned(),
            );
        }
        cycles_momentum.then(|| {
            "betas are set by the schedule in every step (cycle_momentum); remove them, or set cycle_momentum to \
             false"
                .to_owned()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{AdamPlan, MatrixLayout, MuonScale, NewtonSchulzPlan, OneBitAdamPlan};

    const ADAM: AdamPlan = AdamPlan {
        lr: 1e-3,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
    };
    const SGD: OptimizerPlan = OptimizerPlan::Sgd {
        lr: 0.0,
        momentum: 0.0,
        dampening: 0.0,
        weight_decay: 0.0,
        nesterov: false,
    };
    const MODEL: [ModelParameter<'_>; 4] = [
        ModelParameter {
            path: "wte.weight",
            shape: &[50, 8],
            layer: "Embedding",
            is_announced: false,
        },
        ModelParameter {
            path: "h.0.ln.gamma",
            shape: &[8],
            layer: "LayerNorm",
            is_announced: false,
        },
        ModelParameter {
            path: "h.0.mlp.weight",
            shape: &[8, 32],
            layer: "Linear",
            is_announced: false,
        },
        ModelParameter { path: "h.0.mlp.bias", shape: &[32], layer: "Linear", is_announced: false },
    ];

    fn group(params: &[&str], dims: &[usize], update: GroupUpdate) -> ParamGroup {
        let params = params.iter().map(|pattern| PathPattern::new(pattern).unwrap()).collect();
        ParamGroup { params, dims: dims.to_vec(), update }
    }

    fn trained(rate: GroupRate, weight_decay: Option<f64>) -> GroupUpdate {
        GroupUpdate::Trained { rate, weight_decay, betas: None, muon_matrices: None }
    }

    fn adam(weight_decay: f64, lr_factor: f64) -> Option<UpdateSettings> {
        let optimizer = OptimizerPlan::AdamW(AdamPlan { weight_decay, ..ADAM });
        Some(UpdateSettings { optimizer, lr_factor, matrices: None })
    }

    #[test]
    fn a_parameter_has_the_settings_of_its_group() {
        let optimizer = OptimizerPlan::AdamW(ADAM);
        let assign = |groups: &ParamGroups| groups.assign(&optimizer, &MODEL).unwrap();
        assert_eq!(assign(&ParamGroups::default()), vec![adam(0.1, 1.0); 4]);

        let mut groups = ParamGroups { groups: Vec::new(), no_decay: NoDecay::BiasesAndNorms };
        let spared = [adam(0.1, 1.0), adam(0.0, 1.0), adam(0.1, 1.0), adam(0.0, 1.0)];
        assert_eq!(assign(&groups), spared);

        groups.groups = vec![
            group(&["^wte"], &[], GroupUpdate::Frozen),
            group(&["mlp"], &[1], trained(GroupRate::Factor(2.0), Some(0.3))),
            group(&["mlp"], &[2, 3], trained(GroupRate::Own(5e-4), None)),
            group(&["gamma$"], &[], trained(GroupRate::Factor(0.0), None)),
        ];
        let expected = [None, adam(0.0, 0.0), adam(0.1, 0.5), adam(0.3, 2.0)];
        assert_eq!(assign(&groups), expected);
    }

    const MUON: MuonPlan = MuonPlan {
        lr: 0.02,
        momentum: 0.95,
        nesterov: true,
        weight_decay: 0.1,
        newton_schulz: NewtonSchulzPlan { steps: 5, coefficients: [3.0, -4.0, 2.0], eps: 1e-7 },
        scale: MuonScale::Original,
        adam: AdamPlan { lr: 2e-3, ..ADAM },
        decouples_decay: true,
    };

    #[test]
    fn muon_updates_matrices_and_adam_the_rest() {
        let optimizer = OptimizerPlan::Muon(MUON);
        let mut groups = ParamGroups { groups: Vec::new(), no_decay: NoDecay::BiasesAndNorms };
        let beside = |weight_decay, lr_factor| {
            let optimizer = OptimizerPlan::AdamW(AdamPlan { weight_decay, ..MUON.adam });
            Some(UpdateSettings { optimizer, lr_factor, matrices: None })
        };
        let matrix = |lr_factor, count| {
            let matrices = Some(Matrices { count, layout: MatrixLayout::InputsFirst });
            Some(UpdateSettings { optimizer: optimizer.clone(), lr_factor, matrices })
        };
        let expected = [beside(0.1, 0.1), beside(0.0, 0.1), matrix(1.0, 1), beside(0.0, 0.1)];
        assert_eq!(groups.assign(&optimizer, &MODEL).unwrap(), expected);

        let with = |params, rate, muon_matrices| {
            let update =
                GroupUpdate::Trained { rate, weight_decay: None, betas: None, muon_matrices };
            group(params, &[], update)
        };
        // `lr` replaces the rate of either half; `lr_factor` multiplies the rate of the parameter's half.
        groups.groups = vec![
            with(&["^wte"], GroupRate::Own(0.01), Some(4)),
            with(&["gamma"], GroupRate::Own(0.01), None),
            with(&["mlp"], GroupRate::Factor(2.0), Some(0)),
        ];
        let expected = [matrix(0.5, 4), beside(0.0, 0.5), beside(0.1, 0.2), beside(0.0, 0.2)];
        assert_eq!(groups.assign(&optimizer, &MODEL).unwrap(), expected);

        for (count, expected) in
            [(3, "and parameter h.0.mlp.weight of shape [8, 32]"), (1, "h.0.mlp.bias")]
        {
            groups.groups = vec![with(&["mlp"], GroupRate::Factor(1.0), Some(count))];
            let error = groups.assign(&optimizer, &MODEL).unwrap_err().to_string();
            assert!(error.starts_with("param_groups[0]") && error.contains(expected), "{error}");
        }
        groups.groups.clear();
        let error = groups.assign(&optimizer, &MODEL[..2]).unwrap_err().to_string();
        assert!(error.contains("and the model has none (wte.weight"), "{error}");
        groups.groups = vec![with(&["mlp"], GroupRate::Factor(1.0), Some(1))];
        let error = groups.assign(&OptimizerPlan::AdamW(ADAM), &MODEL).unwrap_err().to_string();
        assert!(error.contains("muon_matrices is 1, and the optimizer is not Muon"), "{error}");
    }

    #[test]
    fn betas_of_matrices_and_rates_without_a_proportion_are_refused() {
        let update = GroupUpdate::Trained {
            rate: GroupRate::Factor(1.0),
            weight_decay: None,
            betas: Some([0.8, 0.9]),
            muon_matrices: None,
        };
        let groups = |dims: &[usize]| ParamGroups {
            groups: vec![group(&["mlp"], dims, update)],
            no_decay: NoDecay::Nothing,
        };
        let muon = OptimizerPlan::Muon(MUON);
        let error = groups(&[2]).assign(&muon, &MODEL).unwrap_err().to_string();
        assert!(error.contains("Muon updates all parameters of the group"), "{error}");
        assert!(groups(&[1, 2]).assign(&muon, &MODEL).is_ok());
        let still = OptimizerPlan::Muon(MuonPlan { lr: 0.0, ..MUON });
        let error = ParamGroups::default().assign(&still, &MODEL).unwrap_err().to_string();
        assert!(error.contains("is 0 and Adam's 0.002"), "{error}");
    }

    #[test]
    fn groups_of_one_bit_adam_share_its_freeze() {
        let one_bit = |adam| OptimizerPlan::OneBitAdam(OneBitAdamPlan { adam, freeze_step: 7 });
        let update = GroupUpdate::Trained {
            rate: GroupRate::Factor(0.5),
            weight_decay: Some(0.25),
            betas: Some([0.5, 0.75]),
            muon_matrices: None,
        };
        let groups = ParamGroups {
            groups: vec![group(&["^wte"], &[], update), group(&["bias"], &[], GroupUpdate::Frozen)],
            no_decay: NoDecay::Nothing,
        };
        let settings = groups.assign(&one_bit(ADAM), &MODEL).unwrap();
        let own = AdamPlan { betas: [0.5, 0.75], weight_decay: 0.25, ..ADAM };
        for (parameter, settings) in MODEL.iter().zip(settings) {
            let expected = match parameter.path {
                path if path.starts_with("wte") => Some((one_bit(own), 0.5)),
                path if path.contains("bias") => None,
                _ => Some((one_bit(ADAM), 1.0)),
            };
            assert_eq!(settings.map(|it| (it.optimizer, it.lr_factor)), expected);
        }
    }

    #[test]
    fn groups_that_do_not_fit_are_refused() {
        let adam = OptimizerPlan::AdamW(ADAM);
        let factor = |factor| trained(GroupRate::Factor(factor), None);
        let betas = |betas| GroupUpdate::Trained {
            rate: GroupRate::Factor(1.0),
            weight_decay: None,
            betas: Some(betas),
            muon_matrices: None,
        };
        for (optimizer, groups, expected) in [
            (&adam, vec![group(&["^wpe"], &[1], factor(1.0))], "params \"^wpe\" of dims [1]"),
            (
                &adam,
                vec![group(&[], &[4], factor(1.0))],
                "(dims [4]); the model has wte.weight, h.0",
            ),
            (
                &adam,
                vec![group(&["mlp"], &[], factor(1.0)), group(&[], &[1], factor(1.0))],
                "param_groups[0] and param_groups[1]: parameter h.0.mlp.bias is in both",
            ),
            (&adam, vec![group(&[], &[], factor(1.0))], "selects every parameter"),
            (&adam, vec![group(&["w"], &[], factor(-1.0))], "lr_factor is -1"),
            (&adam, vec![group(&["w"], &[], factor(f64::NAN))], "lr_factor is NaN"),
            (
                &adam,
                vec![group(&["w"], &[], trained(GroupRate::Own(1.0), Some(-0.1)))],
                "weight_decay",
            ),
            (&adam, vec![group(&["w"], &[], betas([0.9, 1.0]))], "betas are [0.9, 1.0]"),
            (
                &SGD,
                vec![group(&["w"], &[], betas([0.9, 0.99]))],
                "betas are of Adam, LAMB and Lion",
            ),
            (&SGD, vec![group(&["w"], &[], trained(GroupRate::Own(1.0), None))], "which is 0"),
        ] {
            let groups = ParamGroups { groups, no_decay: NoDecay::Nothing };
            let error = groups.assign(optimizer, &MODEL).unwrap_err().to_string();
            assert!(error.starts_with("param_groups[0]") && error.contains(expected), "{error}");
        }
        let groups = ParamGroups {
            groups: vec![group(&["w"], &[], betas([0.8, 0.9]))],
            ..Default::default()
        };
        assert!(groups.check(&adam, false).is_ok());
        assert!(groups.check(&adam, true).unwrap_err().to_string().contains("cycle_momentum"));
    }

    #[test]
    fn patterns_are_regular_expressions() {
        let pattern = PathPattern::new(r"^h\.[0-5]\.").unwrap();
        assert!(pattern.occurs_in("h.3.mlp.bias") && !pattern.occurs_in("h.6.mlp.bias"));
        assert_eq!(PathPattern::new("h.(").unwrap_err(), "unclosed group");
        assert!(!PathPattern::new(&"(a{999}){999}".repeat(9)).unwrap_err().is_empty());
    }
}
