//! `optimizer.params` of Muon: keys of DeepSpeed and of `torch.optim.Muon`, with DeepSpeed's defaults.

use super::optimizer::{FOREACH, FP32_STATES, FUSED, MAX_GRAD_NORM, WEIGHT_DECAY, learning_rate};
use crate::key::{Asks, Key, Literal};
use crate::kind::{Integers, Kind, Reals};
use crate::plan::{AdamPlan, MuonPlan, MuonScale, NewtonSchulzPlan, OptimizerPlan};
use crate::resolve::Context;
use crate::section::Section;

/// Learning rate of the Adam beside DeepSpeed's Muon when none is given.
const MUON_ADAM_LR: f64 = 3e-4;

/// Smallest norm by which `torch.optim.Muon` divides a matrix.
const NEWTON_SCHULZ_EPS: f64 = 1e-7;

pub(super) const KEYS: &[Key] = &[
    Key::real("lr", Reals::NotNegative, 0.02, "Learning rate of the first step.").auto(),
    Key::optional(
        "muon_lr",
        Kind::Real(Reals::NotNegative),
        "Learning rate of matrices in place of lr.",
    ),
    Key::optional(
        "adam_lr",
        Kind::Real(Reals::NotNegative),
        "Learning rate of all other parameters in place of lr; 3e-4 where lr is not given either.",
    ),
    Key::real("momentum", Reals::Decay, 0.95, "Decay of the momentum of matrices."),
    Key::flag("nesterov", true, "Nesterov's variant."),
    WEIGHT_DECAY,
    Key::new(
        "ns_steps",
        Kind::Integer(Integers { min: 1, max: 99 }),
        Literal::Integer(5),
        "Iterations of Newton-Schulz.",
    ),
    Key::new(
        "ns_coefficients",
        Kind::Triple(Reals::Any),
        Literal::Triple([3.4445, -4.775, 2.0315]),
        "Coefficients a, b and c of the iteration X <- a X + (b A + c A A) X with A = X X^T.",
    ),
    Key::new(
        "adjust_lr_fn",
        Kind::Choice(&["original", "match_rms_adamw"]),
        Literal::Text("original"),
        "How the learning rate depends on a matrix's shape: sqrt(max(1, outputs / inputs)), or \
            0.2 sqrt(max(outputs, inputs)).",
    ),
    Key::new(
        "betas",
        Kind::Pair(Reals::Decay),
        Literal::Pair([0.9, 0.95]),
        "Decay of the moments of Adam, which updates all other parameters.",
    )
    .auto(),
    Key::real(
        "eps",
        Reals::NotNegative,
        1e-10,
        "Added to the square root of Adam's second moment.",
    )
    .auto(),
    Key::flag("adam_w_mode", true, "Decouple Adam's weight decay."),
    Key::new(
        "ns_method",
        Kind::Choice(&["gram", "standard"]),
        Literal::Text("gram"),
        "Form of the iteration.",
    )
    .inert("both forms are one iteration; it runs in fp32"),
    Key::flag("per_head_muon", false, "Orthogonalise attention heads one by one.").unavailable(
        "Muon per head",
        Asks::Differs,
        "set it to false",
    ),
    Key::flag("torch_adam", false, "PyTorch's class for Adam.").inert(FUSED),
    FOREACH,
    FP32_STATES,
    MAX_GRAD_NORM,
];

/// Muon's part of the plan.
pub(super) fn resolve(params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let shared = learning_rate(params, context);
    let asks = params.given("lr").is_some() || context.facts.learning_rate.is_some();
    let is_given = asks || params.is_auto("lr");
    let adam_default = if is_given { shared } else { MUON_ADAM_LR };
    let lr = params.optional_real("muon_lr").unwrap_or(shared);
    let adam_lr = params.optional_real("adam_lr").unwrap_or(adam_default);
    if asks && params.given("muon_lr").is_some() && params.given("adam_lr").is_some() {
        let message = format!("{shared:?} is not used: muon_lr is {lr:?} and adam_lr {adam_lr:?}");
        context.findings.push(params.warning("lr", message, "remove it, or one of the two"));
    }
    if adam_lr > f64::from(f32::MAX) {
        let message = format!("{adam_lr:e} is larger than an f32 can hold ({:e})", f32::MAX);
        let remedy = "give a learning rate, 1e-3 for example";
        context.findings.push(params.error("adam_lr", message, remedy));
    }
    if adam_lr != lr && lr != 0.0 {
        context.findings.push(params.note(
            "adam_lr",
            format!(
                "in every step of a schedule, Adam's learning rate is {:?} of that of matrices; a schedule of DeepSpeed \
                 with a rate of its own gives both the same",
                adam_lr / lr
            ),
        ));
    }
    let weight_decay = params.real("weight_decay");
    OptimizerPlan::Muon(MuonPlan {
        lr,
        momentum: params.real("momentum"),
        nesterov: params.flag("nesterov"),
        weight_decay,
        newton_schulz: NewtonSchulzPlan {
            steps: params.integer("ns_steps") as usize,
            coefficients: params.triple("ns_coefficients"),
            eps: NEWTON_SCHULZ_EPS,
        },
        scale: match params.choice("adjust_lr_fn") {
            "match_rms_adamw" => MuonScale::MatchRmsAdamw,
            _ => MuonScale::Original,
        },
        adam: AdamPlan {
            lr: adam_lr,
            betas: params.pair("betas"),
            eps: params.real("eps"),
            weight_decay,
            bias_correction: true,
        },
        decouples_decay: params.flag("adam_w_mode"),
    })
}
