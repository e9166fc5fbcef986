//! `optimizer`: the optimizer and its hyper-parameters.
//!
//! `Adam` decouples weight decay unless `adam_w_mode` is false, as in DeepSpeed; `torch_adam`
//! selects PyTorch's class, whose AdamW has a default weight decay of 0.01. An unsupported
//! optimizer is an error that names it.

use super::*;

/// Default weight decay of PyTorch's AdamW.
const TORCH_ADAMW_DECAY: f64 = 0.01;

/// Returns AdamW with the default of every key.
fn default() -> AdamPlan {
    // Read from an empty section, so that the key table is the only place with the defaults.
    let nothing = Node::map(Vec::new());
    let keys = Moments::read(&ConfigEntry::document(&nothing));
    filled!(AdamPlan, keys { lr, betas, eps, weight_decay } bias_correction: true)
}

/// Resolves the section. Without the section, AdamW is used with a warning, because DeepSpeed then
/// expects the program to provide an optimizer.
pub(crate) fn resolve(context: &mut Context<'_>) -> OptimizerPlan {
    let top = context.top;
    let section = &top.optimizer.value;
    if !top.optimizer.is_given() {
        let lr = context.run.learning_rate.unwrap_or(default().lr);
        warning!(context, "optimizer" =>
            "there is no optimizer: AdamW with lr {lr:?}, betas [0.9, 0.999], eps 1e-8, weight_decay 0 is used";
            "add an optimizer section");
        context.answer(&top.optimizer, "AdamW", "no optimizer is given");
        return OptimizerPlan::AdamW(AdamPlan { lr, ..default() });
    }
    let Some(variant) = choose(&section.name, OPTIMIZERS, "optimizer", context) else {
        // The error has been reported. The rules that follow need some optimizer.
        return OptimizerPlan::AdamW(default());
    };
    let entry = &*section.params;
    match variant.name {
        "SGD" => sgd(&Sgd::read(entry), context),
        "Lion" => {
            let params = Lion::read(entry);
            let lr = learning_rate(&params.lr, context);
            filled!(OptimizerPlan::Lion, params { betas, weight_decay } lr)
        }
        "Adagrad" => {
            let params = Adagrad::read(entry);
            let lr = learning_rate(&params.lr, context);
            warn_of_zero_eps(&params.eps, context);
            filled!(OptimizerPlan::Adagrad, params { eps, weight_decay } lr)
        }
        "Lamb" => lamb(entry, context),
        "Muon" => muon::resolve(&Muon::read(entry), context),
        "OneBitAdam" => one_bit::adam(entry, context),
        "OneBitLamb" => one_bit::lamb(entry, context),
        "ZeroOneAdam" => one_bit::zero_one_adam(entry, context),
        name => adam_family(name, entry, context),
    }
}

/// Resolves Adam and AdamW, which differ in how the weight decay is applied.
fn adam_family(name: &str, entry: &ConfigEntry<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let params = Adam::read(entry);
    //= deepspeed 0.19.8 runtime/engine.py _configure_basic_optimizer
    let decoupled = name == "AdamW" || params.adam_w_mode.value;
    let bias_correction = params.bias_correction.value;
    let mut plan = AdamPlan { bias_correction, ..moments(entry, false, context) };
    let decay = &params.weight_decay;
    //= torch 2.9.0 optim/adamw.py AdamW weight_decay
    if decoupled && params.torch_adam.value && !decay.is_given() {
        plan.weight_decay = TORCH_ADAMW_DECAY;
        context.answer(decay, TORCH_ADAMW_DECAY, "PyTorch's default for AdamW");
        note!(context, decay => "is 0.01, PyTorch's default for AdamW, because of torch_adam");
    }
    let mode = &params.adam_w_mode;
    note!(if name == "AdamW" && mode.is_given() && mode.value; context, mode =>
        "has no effect: AdamW always decouples weight decay");
    warning!(if name == "AdamW" && !mode.value; context, mode =>
        "false has no effect: AdamW always decouples weight decay";
        "use the type Adam for L2 regularization, or remove it");
    note!(if name == "Adam" && decoupled; context, "optimizer.type" =>
        "Adam decouples weight decay, as in DeepSpeed; adam_w_mode false gives L2 regularization");
    if decoupled { OptimizerPlan::AdamW(plan) } else { OptimizerPlan::Adam(plan) }
}

/// Resolves LAMB, with the bounds of its trust ratio.
fn lamb(entry: &ConfigEntry<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let params = Lamb::read(entry);
    let trust_ratio = bounds(&params.min_coeff, &params.max_coeff, context);
    let bias_correction = params.bias_correction.value;
    let adam = AdamPlan { bias_correction, ..moments(entry, true, context) };
    let eps_inside_sqrt = params.eps_inside_sqrt.value;
    OptimizerPlan::Lamb(LambPlan { eps_inside_sqrt, ..LambPlan::of(adam, trust_ratio) })
}

/// Resolves SGD. Nesterov momentum needs a momentum above 0, as in PyTorch.
fn sgd(params: &Sgd<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let (momentum, dampening) = (params.momentum.value, params.dampening.value);
    refuse!(if params.nesterov.value && (momentum == 0.0 || dampening != 0.0); context, &params.nesterov =>
        "true needs a momentum above 0 and no dampening, but they are {momentum:?} and {dampening:?}";
        "set momentum to 0.9 for example and dampening to 0, or nesterov to false");
    let lr = learning_rate(&params.lr, context);
    filled!(OptimizerPlan::Sgd, params { momentum, dampening, weight_decay, nesterov } lr)
}
