//! `optimizer`: which one, and its hyper-parameters, with DeepSpeed's and PyTorch's own defaults.
//!
//! `Adam` decouples weight decay unless `adam_w_mode` is false, as in DeepSpeed; `torch_adam` picks
//! PyTorch's class, whose AdamW decays by 0.01 when nothing is said. Optimizers that do not exist
//! here are refused by name.

use crate::key::{Asks, Key, Literal, Status};

use crate::keys::{muon, one_bit, one_bit_lamb, zero_one};
use crate::kind::{Kind, Reals, Variant};
use crate::plan::{AdamPlan, LambPlan, OptimizerPlan};
use crate::resolve::Context;
use crate::section::Section;
use crate::variant::choose;

/// Learning rate of DeepSpeed's own optimizers when none is given.
const DEFAULT_LR: f64 = 1e-3;

/// Learning rate of transformers' trainer, which `"auto"` stands for.
const TRANSFORMERS_LR: f64 = 5e-5;

/// Weight decay of PyTorch's AdamW when none is given.
const TORCH_ADAMW_DECAY: f64 = 0.01;

pub(super) const LR: Key =
    Key::real("lr", Reals::NotNegative, DEFAULT_LR, "Learning rate of the first step.").auto();
pub(super) const BETAS: Key = Key::new(
    "betas",
    Kind::Pair(Reals::Decay),
    Literal::Pair([0.9, 0.999]),
    "Decay of the first and the second moment.",
)
.auto();
const EPS: Key =
    Key::real("eps", Reals::NotNegative, 1e-8, "Added to the square root of the second moment.")
        .auto();
/// Updates of LAMB, 1-bit Adam and 0/1 Adam cannot do without eps: an element that never has a gradient would be 0 / 0.
pub(super) const POSITIVE_EPS: Key =
    Key::real("eps", Reals::Positive, 1e-8, "Added to the square root of the second moment.")
        .auto();
pub(super) const WEIGHT_DECAY: Key =
    Key::real("weight_decay", Reals::NotNegative, 0.0, "Weight decay.").auto();
pub(super) const AMSGRAD: Key = Key::flag("amsgrad", false, "Keep the largest second moment.")
    .unavailable("AMSGrad", Asks::Differs, "set it to false");
pub(super) const FUSED: &str = "the update is always fused";
const FUSED_FLAG: Key = Key::optional("fused", Kind::Flag, "PyTorch's fused update.").inert(FUSED);
pub(super) const FOREACH: Key =
    Key::optional("foreach", Kind::Flag, "PyTorch's update over lists.").inert(FUSED);
const SET_GRAD_NONE: Key = Key::flag("set_grad_none", true, "Free gradients after the step.")
    .inert("they are always freed");
pub(super) const FP32_STATES: Key = Key::flag(
    "fp32_optimizer_states",
    true,
    "Keep the moments in fp32.",
)
.unavailable("16-bit optimizer states", Asks::Differs, "set it to true");
const CUDA_AWARE: Key = Key::flag("cuda_aware", false, "Whether MPI can send from GPU memory.")
    .inert("only affects 1-bit Adam and 0/1 Adam");
pub(super) const MAX_GRAD_NORM: Key =
    Key::optional("max_grad_norm", Kind::Free, "Clipping, which is not the optimizer's.").refused(
        "'max_grad_norm' is not supported as an optimizer parameter",
        "use the top-level key gradient_clipping",
    );
const MAXIMIZE: Key = Key::flag("maximize", false, "Ascend instead of descend.").unavailable(
    "maximisation",
    Asks::Differs,
    "set it to false",
);

const ADAM: &[Key] = &[
    LR,
    BETAS,
    EPS,
    WEIGHT_DECAY,
    Key::flag("bias_correction", true, "Divide the moments by 1 - beta^t."),
    Key::flag("adam_w_mode", true, "Adam only: decouple the weight decay. AdamW always does."),
    Key::flag("torch_adam", false, "Use PyTorch's class, with PyTorch's default weight decay."),
    AMSGRAD,
    FUSED_FLAG,
    FOREACH,
    SET_GRAD_NONE,
    FP32_STATES,
    CUDA_AWARE,
    MAXIMIZE,
    MAX_GRAD_NORM,
];

const SGD: &[Key] = &[
    LR,
    Key::real("momentum", Reals::NotNegative, 0.0, "Momentum factor; 0 keeps no state."),
    Key::real("dampening", Reals::Any, 0.0, "Dampening of the momentum."),
    WEIGHT_DECAY,
    Key::flag("nesterov", false, "Nesterov's variant; needs momentum and no dampening."),
    FUSED_FLAG,
    FOREACH,
    MAXIMIZE,
    MAX_GRAD_NORM,
];

const LION: &[Key] = &[LR, BETAS, WEIGHT_DECAY, SET_GRAD_NONE, FP32_STATES, MAX_GRAD_NORM];

const ADAGRAD: &[Key] = &[
    Key::real("lr", Reals::NotNegative, 1e-2, "Learning rate of the first step.").auto(),
    Key::real("eps", Reals::NotNegative, 1e-10, "Added to the square root of the sum of squares.")
        .auto(),
    WEIGHT_DECAY,
    AMSGRAD,
    FP32_STATES,
    Key::real("lr_decay", Reals::NotNegative, 0.0, "Decay of the learning rate.").unavailable(
        "Adagrad's own decay",
        Asks::Differs,
        "set it to 0 and use a scheduler",
    ),
    Key::real("initial_accumulator_value", Reals::NotNegative, 0.0, "Where the sums start.")
        .unavailable("another start of Adagrad's sums", Asks::Differs, "set it to 0"),
    FOREACH,
    MAX_GRAD_NORM,
];

pub(super) const MAX_COEFF: Key =
    Key::real("max_coeff", Reals::Positive, 10.0, "Largest trust ratio.");
pub(super) const MIN_COEFF: Key =
    Key::real("min_coeff", Reals::NotNegative, 0.01, "Smallest trust ratio.");

const LAMB: &[Key] = &[
    LR,
    BETAS,
    POSITIVE_EPS,
    WEIGHT_DECAY,
    Key::flag(
        "bias_correction",
        true,
        "Scale the learning rate by sqrt(1 - beta2^t) / (1 - beta1^t).",
    ),
    Key::flag("eps_inside_sqrt", false, "Add eps to the second moment, not to its square root."),
    MAX_COEFF,
    MIN_COEFF,
    AMSGRAD,
    SET_GRAD_NONE,
    FP32_STATES,
    MAX_GRAD_NORM,
];

const fn available(name: &'static str, doc: &'static str, keys: &'static [Key]) -> Variant {
    Variant { name, doc, status: Status::Honoured, keys }
}

const fn missing(name: &'static str, feature: &'static str) -> Variant {
    let remedy = "use AdamW";
    Variant {
        name,
        doc: feature,
        status: Status::Unavailable { feature, asks: Asks::Present, remedy },
        keys: &[],
    }
}

const VARIANTS: &[Variant] = &[
    available("AdamW", "Adam with decoupled weight decay.", ADAM),
    available("Adam", "The same unless adam_w_mode is false: then with L2 regularisation.", ADAM),
    available("SGD", "Stochastic gradient descent with momentum.", SGD),
    available("Lion", "Sign of an interpolated momentum (Chen et al. 2023).", LION),
    available("Adagrad", "Accumulated squares (Duchi et al. 2011).", ADAGRAD),
    available("Lamb", "Adam with a trust ratio for each tensor (You et al. 2020).", LAMB),
    available(
        "Muon",
        "Orthogonalised momentum for the matrices of hidden layers, Adam for all other parameters (Jordan et al. \
            2024).",
        muon::KEYS,
    ),
    available(
        "OneBitAdam",
        "Adam whose ranks exchange one bit for each element of their momentum after freeze_step (Tang et al. 2021). \
            At ZeRO stages 0 and 1.",
        one_bit::KEYS,
    ),
    available(
        "OneBitLamb",
        "LAMB whose ranks exchange one bit for each element of their momentum after freeze_step (Li et al. 2021). \
            At ZeRO stages 0 and 1.",
        one_bit_lamb::KEYS,
    ),
    available(
        "ZeroOneAdam",
        "1-bit Adam with fewer exact gradients, and with steps between which ranks exchange nothing (Lu et al. 2022). \
            At ZeRO stages 0 and 1.",
        zero_one::KEYS,
    ),
    missing("MuAdam", "Adam with maximal update parametrisation"),
    missing("MuAdamW", "AdamW with maximal update parametrisation"),
    missing("MuSGD", "SGD with maximal update parametrisation"),
    missing("RMSprop", "RMSprop"),
    missing("Adadelta", "Adadelta"),
    missing("Adamax", "Adamax"),
    missing("NAdam", "NAdam"),
    missing("RAdam", "RAdam"),
    missing("LBFGS", "L-BFGS"),
];

pub(crate) const KEYS: &[Key] = &[
    Key::required("type", Kind::Text, "Name of the optimizer."),
    Key::optional("params", Kind::Variants(VARIANTS), "Its hyper-parameters."),
    Key::flag("legacy_fusion", false, "Older fused implementation.").inert(FUSED),
];

/// The section's part of the plan. Without the section it is AdamW, and a warning says so:
/// DeepSpeed expects the program to bring an optimizer of its own then.
pub(crate) fn resolve(top: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let section = top.section("optimizer");
    if top.given("optimizer").is_none() {
        let lr = context.facts.learning_rate.unwrap_or(DEFAULT_LR);
        let message = format!(
            "there is no optimizer: AdamW with lr {lr:?}, betas [0.9, 0.999], eps 1e-8, \
                weight_decay 0 is used"
        );
        context.findings.warning("optimizer", message, "add an optimizer section");
        if top.is_auto("optimizer") {
            context.autos.answer("optimizer", "AdamW", "no optimizer is given");
        }
        return OptimizerPlan::AdamW(AdamPlan {
            lr,
            ..adam(&section.variant("params", ADAM), lr, 0.0)
        });
    }
    let Some(variant) = choose(&section, VARIANTS, "optimizer", context) else {
        return OptimizerPlan::AdamW(adam(&section.variant("params", ADAM), DEFAULT_LR, 0.0));
    };
    let params = section.variant("params", variant.keys);
    match variant.name {
        "SGD" => sgd(&params, context),
        "Lion" => OptimizerPlan::Lion {
            lr: learning_rate(&params, context),
            betas: params.pair("betas"),
            weight_decay: params.real("weight_decay"),
        },
        "Adagrad" => OptimizerPlan::Adagrad {
            lr: learning_rate(&params, context),
            eps: params.real("eps"),
            weight_decay: params.real("weight_decay"),
        },
        "Lamb" => lamb(&params, context),
        "Muon" => muon::resolve(&params, context),
        "OneBitAdam" => one_bit::resolve(&params, context),
        "OneBitLamb" => one_bit_lamb::resolve(&params, context),
        "ZeroOneAdam" => zero_one::resolve(&params, context),
        name => adam_family(name, &params, context),
    }
}

pub(super) fn learning_rate(params: &Section<'_>, context: &mut Context<'_>) -> f64 {
    let path = params.path_of("lr");
    let lr = params.real("lr");
    let Some(wanted) = context.facts.learning_rate else {
        if !params.is_auto("lr") {
            return lr;
        }
        context.autos.answer(&path, TRANSFORMERS_LR, "transformers' default");
        return TRANSFORMERS_LR;
    };
    if params.given("lr").is_none() {
        if params.is_auto("lr") {
            context.autos.answer(&path, wanted, "training.learning_rate");
        }
        return wanted;
    }
    if wanted != lr {
        let message = format!("{lr:?} is used, not training.learning_rate {wanted:?}");
        context.findings.push(params.warning(
            "lr",
            message,
            "give one of them, or write \"auto\" here",
        ));
    }
    lr
}

fn adam(params: &Section<'_>, lr: f64, weight_decay: f64) -> AdamPlan {
    AdamPlan {
        lr,
        betas: params.pair("betas"),
        eps: params.real("eps"),
        weight_decay,
        bias_correction: params.flag("bias_correction"),
    }
}

fn adam_family(name: &str, params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let decoupled = name == "AdamW" || params.flag("adam_w_mode");
    let lr = learning_rate(params, context);
    let mut weight_decay = params.real("weight_decay");
    let path = params.path_of("weight_decay");
    if decoupled && params.flag("torch_adam") && params.given("weight_decay").is_none() {
        weight_decay = TORCH_ADAMW_DECAY;
        if params.is_auto("weight_decay") {
            context.autos.answer(&path, weight_decay, "PyTorch's default for AdamW");
        }
        context.findings.push(
            params.note(
                "weight_decay",
                "is 0.01, PyTorch's default for AdamW, because of torch_adam",
            ),
        );
    }
    if name == "Adam" && decoupled {
        context.findings.note(
            "optimizer.type",
            "Adam decouples weight decay, as in DeepSpeed; adam_w_mode false gives L2 \
                regularisation",
        );
    }
    let plan = adam(params, lr, weight_decay);
    if decoupled { OptimizerPlan::AdamW(plan) } else { OptimizerPlan::Adam(plan) }
}

fn lamb(params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let trust_ratio = bounds(params, ["min_coeff", "max_coeff"], context);
    OptimizerPlan::Lamb(LambPlan {
        lr: learning_rate(params, context),
        betas: params.pair("betas"),
        eps: one_bit::positive_eps(params, context),
        eps_inside_sqrt: params.flag("eps_inside_sqrt"),
        weight_decay: params.real("weight_decay"),
        bias_correction: params.flag("bias_correction"),
        trust_ratio,
    })
}

/// Returns a smallest and a largest value. Refuses a smallest that is above the largest.
pub(super) fn bounds(
    params: &Section<'_>,
    [smallest, largest]: [&str; 2],
    context: &mut Context<'_>,
) -> [f64; 2] {
    let bounds = [params.real(smallest), params.real(largest)];
    if bounds[0] > bounds[1] {
        let message = format!("{:?} is above {largest} {:?}", bounds[0], bounds[1]);
        let remedy = format!("give a {smallest} of at most {largest}");
        context.findings.push(params.error(smallest, message, remedy));
    }
    bounds
}

fn sgd(params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let (momentum, dampening) = (params.real("momentum"), params.real("dampening"));
    let nesterov = params.flag("nesterov");
    if nesterov && (momentum == 0.0 || dampening != 0.0) {
        context.findings.push(params.error(
            "nesterov",
            format!(
                "true needs a momentum above 0 and no dampening, but they are {momentum:?} \
                and {dampening:?}"
            ),
            "set momentum to 0.9 for example and dampening to 0, or nesterov to false",
        ));
    }
    OptimizerPlan::Sgd {
        lr: learning_rate(params, context),
        momentum,
        dampening,
        weight_decay: params.real("weight_decay"),
        nesterov,
    }
}
