//! `optimizer`: which one, and its hyper-parameters, with DeepSpeed's and PyTorch's own defaults.
//!
//! Each optimizer has a section of parameters of its own, so that a parameter of another optimizer
//! is an unknown key. What several of them share is a constant. The names of DeepSpeed and PyTorch
//! that do not exist here are variants without parameters, and refused by name.

use crate::plan::MuonScale;
use crate::spec::*;

/// Learning rate of DeepSpeed's own optimizers when none is given.
pub(crate) const DEFAULT_LR: f64 = 1e-3;

/// Why there is no choice of PyTorch's implementations.
const FUSED: &str = "the update is always fused";
/// Why settings of DeepSpeed's transport change nothing.
const TRANSPORT: &str = "collectives run between threads or over MPI, from host memory";

/// Of all optimizers but Muon and Adagrad, which have other defaults.
const LR: Spec<f64> = real(NotNegative, DEFAULT_LR).auto().doc("Learning rate of the first step.");
/// Of the Adam family and Lion.
const BETAS: Spec<[f64; 2]> =
    pair(Decay, [0.9, 0.999]).auto().doc("Decay of the first and the second moment.");
/// Of Adam. It may be 0, as in PyTorch and DeepSpeed.
const EPS: Spec<f64> =
    real(NotNegative, 1e-8).auto().doc("Added to the square root of the second moment.");
/// LAMB, 1-bit Adam and 0/1 Adam need an eps: the update of an element without gradients would be 0
/// / 0.
const POSITIVE_EPS: Spec<f64> =
    real(Positive, 1e-8).auto().doc("Added to the square root of the second moment.");
/// Of all optimizers. Whether it is decoupled is the optimizer's choice.
const WEIGHT_DECAY: Spec<f64> = real(NotNegative, 0.0).auto().doc("Weight decay.");
/// Upper bound of LAMB's trust ratio.
const MAX_COEFF: Spec<f64> = real(Positive, 10.0).doc("Largest trust ratio.");
/// Lower bound of LAMB's trust ratio.
const MIN_COEFF: Spec<f64> = real(NotNegative, 0.01).doc("Smallest trust ratio.");
/// Length of the exact phase of 1-bit Adam and 1-bit LAMB. The range is checked by a rule, which
/// says what a good value is.
const FREEZE_STEP: Spec<i64> = integer(100_000).unit("steps").doc(
    "Steps with exact gradients, at least 1; 15 to 25 % of the run is a good choice. Afterwards the second moment is \
     frozen and momenta are compressed.",
);
/// Refused where it is on: its maximum is another state that nothing here keeps.
const AMSGRAD: Spec<bool> = flag(false)
    .unavailable("AMSGrad", Differs, "set it to false")
    .doc("Keep the largest second moment.");
/// One of PyTorch's implementations of an update.
const FUSED_FLAG: Spec<Option<bool>> = opt_flag().inert(FUSED).doc("PyTorch's fused update.");
/// Another of PyTorch's implementations of an update.
const FOREACH: Spec<Option<bool>> = opt_flag().inert(FUSED).doc("PyTorch's update over lists.");
/// What DeepSpeed does with gradients after a step.
const SET_GRAD_NONE: Spec<bool> =
    flag(true).inert("they are always freed").doc("Free gradients after the step.");
/// Refused where it is off: moments are kept in fp32.
const FP32_STATES: Spec<bool> = flag(true)
    .unavailable("16-bit optimizer states", Differs, "set it to true")
    .doc("Keep the moments in fp32.");
/// Refused where it is on.
const MAXIMIZE: Spec<bool> = flag(false)
    .unavailable("maximisation", Differs, "set it to false")
    .doc("Ascend instead of descend.");
/// Of the optimizers with compressed momenta. LAMB itself honours its key of this name.
const EPS_INSIDE_SQRT: Spec<bool> = flag(false)
    .unavailable(
        "an eps inside the square root, which DeepSpeed accepts and ignores",
        Differs,
        "set it to false",
    )
    .doc("Add eps to the second moment, not to its square root.");
/// A setting of DeepSpeed's MPI backend.
const CUDA_AWARE: Spec<bool> =
    flag(false).inert(TRANSPORT).doc("Whether MPI can send from GPU memory.");
/// A setting of DeepSpeed's compressed all-reduce.
const COMM_BACKEND_NAME: Spec<&str> = one_of(&["nccl", "mpi", "hccl", "compressed"], "nccl")
    .inert(TRANSPORT)
    .doc("Library that exchanges compressed momenta.");
/// DeepSpeed refuses the key here too, in these words.
const MAX_GRAD_NORM: Spec<()> = free()
    .refused(
        "'max_grad_norm' is not supported as an optimizer parameter",
        "use the top-level key gradient_clipping",
    )
    .doc("Clipping, which is not the optimizer's.");

/// An optimizer that does not exist here.
const fn missing(name: &'static str, feature: &'static str) -> Variant {
    Variant::missing(name, feature, "use AdamW")
}

/// The optimizers.
pub(crate) const VARIANTS: &[Variant] = &[
    Variant::of("AdamW", "Adam with decoupled weight decay.", Adam::KEYS),
    Variant::of(
        "Adam",
        "The same unless adam_w_mode is false: then with L2 regularisation.",
        Adam::KEYS,
    ),
    Variant::of("SGD", Sgd::DOC, Sgd::KEYS),
    Variant::of("Lion", Lion::DOC, Lion::KEYS),
    Variant::of("Adagrad", Adagrad::DOC, Adagrad::KEYS),
    Variant::of("Lamb", Lamb::DOC, Lamb::KEYS),
    Variant::of("Muon", Muon::DOC, Muon::KEYS),
    Variant::of("OneBitAdam", OneBitAdam::DOC, OneBitAdam::KEYS),
    Variant::of("OneBitLamb", OneBitLamb::DOC, OneBitLamb::KEYS),
    Variant::of("ZeroOneAdam", ZeroOneAdam::DOC, ZeroOneAdam::KEYS),
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

section! {
    /// The optimizer. AdamW when there is none.
    pub(crate) struct Optimizer<'a> {
        /// Name of the optimizer.
        name as "type": Option<&'a str> = opt_text().required(),
        /// Its hyper-parameters.
        params: () = variants(VARIANTS),
        /// Older fused implementation.
        legacy_fusion = flag(false).inert("the update is always fused"),
    }

    /// Parameters of Adam and AdamW.
    pub(crate) struct Adam<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        eps: f64 = EPS,
        weight_decay: f64 = WEIGHT_DECAY,
        /// Divide the moments by 1 - beta^t.
        bias_correction: bool = flag(true),
        /// Adam only: decouple the weight decay. AdamW always does.
        adam_w_mode: bool = flag(true),
        /// Use PyTorch's class, with PyTorch's default weight decay.
        torch_adam: bool = flag(false),
        amsgrad = AMSGRAD,
        fused = FUSED_FLAG,
        foreach = FOREACH,
        set_grad_none = SET_GRAD_NONE,
        fp32_optimizer_states = FP32_STATES,
        /// Whether MPI can send from GPU memory.
        cuda_aware = flag(false).inert("only affects 1-bit Adam and 0/1 Adam"),
        maximize = MAXIMIZE,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Stochastic gradient descent with momentum.
    pub(crate) struct Sgd<'a> {
        lr: f64 = LR,
        /// Momentum factor; 0 keeps no state.
        momentum: f64 = real(NotNegative, 0.0),
        /// Dampening of the momentum.
        dampening: f64 = real(Any, 0.0),
        weight_decay: f64 = WEIGHT_DECAY,
        /// Nesterov's variant; needs momentum and no dampening.
        nesterov: bool = flag(false),
        fused = FUSED_FLAG,
        foreach = FOREACH,
        maximize = MAXIMIZE,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Sign of an interpolated momentum (Chen et al. 2023).
    pub(crate) struct Lion<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        weight_decay: f64 = WEIGHT_DECAY,
        set_grad_none = SET_GRAD_NONE,
        fp32_optimizer_states = FP32_STATES,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Accumulated squares (Duchi et al. 2011).
    pub(crate) struct Adagrad<'a> {
        /// Learning rate of the first step.
        lr: f64 = real(NotNegative, 0.01).auto(),
        /// Added to the square root of the sum of squares.
        eps: f64 = real(NotNegative, 1e-10).auto(),
        weight_decay: f64 = WEIGHT_DECAY,
        amsgrad = AMSGRAD,
        fp32_optimizer_states = FP32_STATES,
        /// Decay of the learning rate.
        lr_decay = real(NotNegative, 0.0)
            .unavailable("Adagrad's own decay", Differs, "set it to 0 and use a scheduler"),
        /// Where the sums start.
        initial_accumulator_value = real(NotNegative, 0.0)
            .unavailable("another start of Adagrad's sums", Differs, "set it to 0"),
        foreach = FOREACH,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Adam with a trust ratio for each tensor (You et al. 2020).
    pub(crate) struct Lamb<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        eps: f64 = POSITIVE_EPS,
        weight_decay: f64 = WEIGHT_DECAY,
        /// Scale the learning rate by sqrt(1 - beta2^t) / (1 - beta1^t).
        bias_correction: bool = flag(true),
        /// Add eps to the second moment, not to its square root.
        eps_inside_sqrt: bool = flag(false),
        max_coeff: f64 = MAX_COEFF,
        min_coeff: f64 = MIN_COEFF,
        amsgrad = AMSGRAD,
        set_grad_none = SET_GRAD_NONE,
        fp32_optimizer_states = FP32_STATES,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Orthogonalised momentum for the matrices of hidden layers, Adam for all other parameters
    /// (Jordan et al. 2024).
    pub(crate) struct Muon<'a> {
        /// Learning rate of the first step.
        lr: f64 = real(NotNegative, 0.02).auto(),
        /// Learning rate of matrices in place of lr.
        muon_lr: Option<f64> = opt_real(NotNegative),
        /// Learning rate of all other parameters in place of lr; 3e-4 where lr is not given either.
        adam_lr: Option<f64> = opt_real(NotNegative),
        /// Decay of the momentum of matrices.
        momentum: f64 = real(Decay, 0.95),
        /// Nesterov's variant.
        nesterov: bool = flag(true),
        weight_decay: f64 = WEIGHT_DECAY,
        /// Iterations of Newton-Schulz.
        ns_steps: usize = count_in(1, 99, 5),
        /// Coefficients a, b and c of the iteration X <- a X + (b A + c A A) X with A = X X^T.
        ns_coefficients: [f64; 3] = triple(Any, [3.4445, -4.775, 2.0315]),
        /// How the learning rate depends on a matrix's shape: sqrt(max(1, outputs / inputs)), or
        /// 0.2 sqrt(max(outputs, inputs)).
        adjust_lr_fn: MuonScale = choice("original"),
        /// Decay of the moments of Adam, which updates all other parameters.
        betas: [f64; 2] = pair(Decay, [0.9, 0.95]).auto(),
        /// Added to the square root of Adam's second moment.
        eps: f64 = real(NotNegative, 1e-10).auto(),
        /// Decouple Adam's weight decay.
        adam_w_mode: bool = flag(true),
        /// Form of the iteration.
        ns_method = one_of(&["gram", "standard"], "gram")
            .inert("both forms are one iteration; it runs in fp32"),
        /// Orthogonalise attention heads one by one.
        per_head_muon = flag(false).unavailable("Muon per head", Differs, "set it to false"),
        /// PyTorch's class for Adam.
        torch_adam = flag(false).inert(FUSED),
        foreach = FOREACH,
        fp32_optimizer_states = FP32_STATES,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Adam whose ranks exchange one bit for each element of their momentum after freeze_step (Tang
    /// et al. 2021). At ZeRO stages 0 and 1.
    pub(crate) struct OneBitAdam<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        eps: f64 = POSITIVE_EPS,
        weight_decay: f64 = WEIGHT_DECAY,
        freeze_step: i64 = FREEZE_STEP,
        /// Divide the moments by 1 - beta^t.
        bias_correction = flag(true)
            .inert("1-bit Adam never corrects its moments; DeepSpeed ignores the key too"),
        eps_inside_sqrt = EPS_INSIDE_SQRT,
        amsgrad = AMSGRAD,
        cuda_aware = CUDA_AWARE,
        comm_backend_name = COMM_BACKEND_NAME,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// LAMB whose ranks exchange one bit for each element of their momentum after freeze_step (Li
    /// et al. 2021). At ZeRO stages 0 and 1.
    pub(crate) struct OneBitLamb<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        eps: f64 = POSITIVE_EPS,
        weight_decay: f64 = WEIGHT_DECAY,
        max_coeff: f64 = MAX_COEFF,
        min_coeff: f64 = MIN_COEFF,
        freeze_step: i64 = FREEZE_STEP,
        /// Decay of the moving average of each tensor's trust ratio, which is frozen after
        /// freeze_step.
        coeff_beta: f64 = real(Decay, 0.9),
        /// Largest factor of the frozen trust ratio.
        factor_max: f64 = real(Positive, 4.0),
        /// Smallest factor of the frozen trust ratio.
        factor_min: f64 = real(NotNegative, 0.5),
        /// Largest relative change of the factor from one step to the next.
        factor_threshold: f64 = real(NotNegative, 0.1),
        /// Divide the moments by 1 - beta^t.
        bias_correction = flag(true)
            .inert("1-bit LAMB never corrects its moments; DeepSpeed ignores the key too"),
        eps_inside_sqrt = EPS_INSIDE_SQRT,
        amsgrad = AMSGRAD,
        cuda_aware = CUDA_AWARE,
        comm_backend_name = COMM_BACKEND_NAME,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// 1-bit Adam with fewer exact gradients, and with steps between which ranks exchange nothing
    /// (Lu et al. 2022). At ZeRO stages 0 and 1.
    pub(crate) struct ZeroOneAdam<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        eps: f64 = POSITIVE_EPS,
        weight_decay: f64 = WEIGHT_DECAY,
        /// Last step that may update the second moment, usually the end of the warm-up. Ranks take
        /// local steps after it.
        var_freeze_step: usize = positive(100_000).unit("steps"),
        /// Updates of the second moment after which the interval between them doubles.
        var_update_scaler: usize = positive(16).unit("steps"),
        /// Local steps after which the interval between averages doubles.
        local_step_scaler: usize = positive(32_678).unit("steps"),
        /// Largest interval between averages.
        local_step_clipper: usize = positive(16).unit("steps"),
        /// Divide the moments by 1 - beta^t.
        bias_correction = flag(true)
            .inert("0/1 Adam never corrects its moments; DeepSpeed ignores the key too"),
        eps_inside_sqrt = EPS_INSIDE_SQRT,
        amsgrad = AMSGRAD,
        cuda_aware = CUDA_AWARE,
        comm_backend_name = COMM_BACKEND_NAME,
        max_grad_norm = MAX_GRAD_NORM,
    }
}
