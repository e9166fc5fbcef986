//! Parameter groups that are not valid for an optimizer.

use super::*;
use crate::plan::AdamPlan;

const ADAM: AdamPlan =
    AdamPlan { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, bias_correction: true };
const SGD: OptimizerPlan = OptimizerPlan::Sgd {
    lr: 0.0,
    momentum: 0.0,
    dampening: 0.0,
    weight_decay: 0.0,
    nesterov: false,
};

fn group(params: &[&str], dims: &[usize], update: GroupUpdate) -> ParamGroup {
    let params = params.iter().map(|pattern| PathPattern::new(pattern).unwrap()).collect();
    ParamGroup { params, dims: dims.to_vec(), update }
}

fn trained(rate: GroupRate, weight_decay: Option<f64>) -> GroupUpdate {
    GroupUpdate::Trained { rate, weight_decay, betas: None, muon_matrices: None }
}

#[test]
fn groups_that_do_not_fit_the_optimizer_are_errors() {
    let adam = OptimizerPlan::AdamW(ADAM);
    let factor = |factor| trained(GroupRate::Factor(factor), None);
    let betas = |betas| GroupUpdate::Trained {
        rate: GroupRate::Factor(1.0),
        weight_decay: None,
        betas: Some(betas),
        muon_matrices: None,
    };
    for (optimizer, group, expected) in [
        (&adam, group(&[], &[], factor(1.0)), "selects every parameter"),
        (&adam, group(&["w"], &[], factor(-1.0)), "lr_factor is -1"),
        (&adam, group(&["w"], &[], factor(f64::NAN)), "lr_factor is NaN"),
        (&adam, group(&["w"], &[], trained(GroupRate::Own(1.0), Some(-0.1))), "weight_decay"),
        (&adam, group(&["w"], &[], betas([0.9, 1.0])), "betas are [0.9, 1.0]"),
        (&SGD, group(&["w"], &[], betas([0.9, 0.99])), "betas are of Adam, LAMB and Lion"),
        (&SGD, group(&["w"], &[], trained(GroupRate::Own(1.0), None)), "which is 0"),
    ] {
        let groups = ParamGroups { groups: vec![group], no_decay: NoDecay::Nothing };
        let error = groups.check(optimizer, false).unwrap_err().to_string();
        assert!(error.starts_with("param_groups[0]") && error.contains(expected), "{error}");
    }
    let groups =
        ParamGroups { groups: vec![group(&["w"], &[], betas([0.8, 0.9]))], ..Default::default() };
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
