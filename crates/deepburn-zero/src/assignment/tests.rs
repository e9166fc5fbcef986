//! Tests of update settings by parameter group, and of groups that do not fit a model.

use deepburn_config::{AdamPlan, MuonScale, NewtonSchulzPlan, OneBitAdamPlan, PathPattern};

use super::*;

const ADAM: AdamPlan =
    AdamPlan { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, bias_correction: true };
const MODEL: [ModelParameter<'_>; 4] = [
    ModelParameter { path: "wte.weight", shape: &[50, 8], layer: "Embedding", is_announced: false },
    ModelParameter { path: "h.0.ln.gamma", shape: &[8], layer: "LayerNorm", is_announced: false },
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

fn of_model(
    groups: &ParamGroups,
    optimizer: &OptimizerPlan,
    parameters: &[ModelParameter<'_>],
) -> Result<Vec<Option<UpdateSettings>>, AssignmentError> {
    Assignment { optimizer, groups }.of_model(parameters)
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
    let assign = |groups: &ParamGroups| of_model(groups, &optimizer, &MODEL).unwrap();
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
    assert_eq!(of_model(&groups, &optimizer, &MODEL).unwrap(), expected);

    let with = |params, rate, muon_matrices| {
        let update = GroupUpdate::Trained { rate, weight_decay: None, betas: None, muon_matrices };
        group(params, &[], update)
    };
    // `lr` replaces the learning rate of both optimizers. `lr_factor` multiplies the rate of the
    // parameter's optimizer.
    groups.groups = vec![
        with(&["^wte"], GroupRate::Own(0.01), Some(4)),
        with(&["gamma"], GroupRate::Own(0.01), None),
        with(&["mlp"], GroupRate::Factor(2.0), Some(0)),
    ];
    let expected = [matrix(0.5, 4), beside(0.0, 0.5), beside(0.1, 0.2), beside(0.0, 0.2)];
    assert_eq!(of_model(&groups, &optimizer, &MODEL).unwrap(), expected);

    for (count, expected) in
        [(3, "and parameter h.0.mlp.weight of shape [8, 32]"), (1, "h.0.mlp.bias")]
    {
        groups.groups = vec![with(&["mlp"], GroupRate::Factor(1.0), Some(count))];
        let error = of_model(&groups, &optimizer, &MODEL).unwrap_err().to_string();
        assert!(error.starts_with("param_groups[0]") && error.contains(expected), "{error}");
    }
    groups.groups.clear();
    let error = of_model(&groups, &optimizer, &MODEL[..2]).unwrap_err().to_string();
    assert!(error.contains("and the model has none (wte.weight"), "{error}");
    groups.groups = vec![with(&["mlp"], GroupRate::Factor(1.0), Some(1))];
    let error = of_model(&groups, &OptimizerPlan::AdamW(ADAM), &MODEL).unwrap_err().to_string();
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
    let error = of_model(&groups(&[2]), &muon, &MODEL).unwrap_err().to_string();
    assert!(error.contains("Muon updates all parameters of the group"), "{error}");
    assert!(of_model(&groups(&[1, 2]), &muon, &MODEL).is_ok());
    let still = OptimizerPlan::Muon(MuonPlan { lr: 0.0, ..MUON });
    let error = of_model(&ParamGroups::default(), &still, &MODEL).unwrap_err().to_string();
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
    let settings = of_model(&groups, &one_bit(ADAM), &MODEL).unwrap();
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
fn groups_that_do_not_fit_a_model_are_errors() {
    let adam = OptimizerPlan::AdamW(ADAM);
    let factor = |factor| trained(GroupRate::Factor(factor), None);
    for (groups, expected) in [
        (vec![group(&["^wpe"], &[1], factor(1.0))], "params \"^wpe\" of dims [1]"),
        (vec![group(&[], &[4], factor(1.0))], "(dims [4]); the model has wte.weight, h.0"),
        (
            vec![group(&["mlp"], &[], factor(1.0)), group(&[], &[1], factor(1.0))],
            "param_groups[0] and param_groups[1]: parameter h.0.mlp.bias is in both",
        ),
        (vec![group(&["w"], &[], factor(-1.0))], "lr_factor is -1"),
    ] {
        let groups = ParamGroups { groups, no_decay: NoDecay::Nothing };
        let error = of_model(&groups, &adam, &MODEL).unwrap_err().to_string();
        assert!(error.starts_with("param_groups[0]") && error.contains(expected), "{error}");
    }
}
