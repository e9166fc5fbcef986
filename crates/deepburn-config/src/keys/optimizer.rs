//! `optimizer`: the optimizers and their hyper-parameters, with the defaults of DeepSpeed and
//! PyTorch.
//!
//! Each optimizer has a separate section of parameters, so that a parameter of another optimizer is
//! an unknown key. Parameters of several optimizers are constants. Unsupported optimizers of
//! DeepSpeed and PyTorch are variants without parameters, and are errors that name the optimizer.

use crate::plan::MuonScale;
use crate::spec::*;

/// The reason why PyTorch's implementations cannot be selected.
const FUSED: &str = "the update is always fused";
/// The reason why settings of DeepSpeed's transport have no effect.
const TRANSPORT: &str = "collectives run between threads or over MPI, from host memory";

shared! {
    // For all optimizers except Muon and Adagrad, which have other defaults.
    /// Learning rate. Unset or "auto": training.learning_rate of a job file, if set. Schedules with
    /// their own rates override it.
    LR: f64 = real(NotNegative, 1e-3).auto();

    // For the Adam family and Lion.
    /// Decay rates of the first and second moment. Larger values average over more steps.
    BETAS: [f64; 2] = pair(Decay, &[0.9, 0.999]).auto();

    // For Adam. It may be 0, as in PyTorch and DeepSpeed.
    /// Term added to the square root of the second moment for numerical stability.
    EPS: f64 = real(NotNegative, 1e-8).auto();

    // LAMB, 1-bit Adam, 1-bit LAMB and 0/1 Adam need an eps: the update of an element without
    // gradients would be 0 / 0.
    /// Term added to the square root of the second moment for numerical stability.
    POSITIVE_EPS: f64 = real(Positive, 1e-8).auto();

    // For all optimizers. The optimizer determines whether it is decoupled.
    /// Weight decay. training.no_decay of a job file excludes biases and norms by default.
    WEIGHT_DECAY: f64 = real(NotNegative, 0.0).auto();

    /// Upper bound of the trust ratio.
    MAX_COEFF: f64 = real(Positive, 10.0);

    /// Lower bound of the trust ratio.
    MIN_COEFF: f64 = real(NotNegative, 0.01);

    // Length of the exact phase of 1-bit Adam and 1-bit LAMB. A rule checks the range, and suggests
    // a good value.
    /// Steps of uncompressed warm-up; at least 1, and 15 to 25 % of all steps is a good choice.
    /// Afterwards the second moment is frozen and momenta are compressed. If it is frozen too
    /// early, training diverges.
    FREEZE_STEP: i64 = integer(100_000).unit("steps");

    // true is an error, because the maximum would be another optimizer state.
    /// Use the maximum of all second moments so far (AMSGrad).
    AMSGRAD: bool = fixed(false, "AMSGrad");

    // One of PyTorch's implementations of an update.
    /// Use PyTorch's fused implementation.
    FUSED_FLAG: Option<bool> = opt_flag().inert(FUSED);

    // Another of PyTorch's implementations of an update.
    /// Use PyTorch's foreach implementation.
    FOREACH: Option<bool> = opt_flag().inert(FUSED);

    // DeepSpeed's handling of gradients after a step.
    /// Free gradients after the step.
    SET_GRAD_NONE: bool = flag(true).inert("gradients are always freed");

    // false is an error, because moments are stored in fp32.
    /// Keep optimizer states in fp32.
    FP32_STATES: bool = fixed(true, "16-bit optimizer states");

    /// Maximize the objective instead of minimizing it.
    MAXIMIZE: bool = fixed(false, "maximization of the objective");

    // For the optimizers with compressed momenta. LAMB supports its key of this name.
    /// Add eps to the second moment before the square root instead of after it.
    EPS_INSIDE_SQRT: bool =
        fixed(false, "an eps inside the square root, which DeepSpeed accepts and ignores");

    // A setting of DeepSpeed's MPI backend.
    /// Use CUDA-aware MPI.
    CUDA_AWARE: bool = flag(false).inert(TRANSPORT);

    // A setting of DeepSpeed's compressed all-reduce.
    /// Communication backend of compressed all-reduces.
    COMM_BACKEND_NAME: &str = one_of(&["nccl", "mpi", "hccl", "compressed"], "nccl").inert(TRANSPORT);

    // DeepSpeed also rejects the key, with this message.
    /// Gradient clipping; not an optimizer parameter.
    MAX_GRAD_NORM: () = free().refused(
        "'max_grad_norm' is not supported as an optimizer parameter", "use the top-level key gradient_clipping",
    );
}

/// Declares an unsupported optimizer.
const fn missing(name: &'static str, feature: &'static str) -> SectionVariant {
    SectionVariant::missing(name, feature, "use AdamW")
}

/// The optimizers.
pub(crate) const OPTIMIZERS: &[SectionVariant] = &[
    SectionVariant::of("AdamW", "Adam with decoupled weight decay.", Adam::KEYS),
    SectionVariant::of(
        "Adam",
        "AdamW, or Adam with L2 regularization if adam_w_mode is false.",
        Adam::KEYS,
    ),
    SectionVariant::of("SGD", Sgd::DOC, Sgd::KEYS),
    SectionVariant::of("Lion", Lion::DOC, Lion::KEYS),
    SectionVariant::of("Adagrad", Adagrad::DOC, Adagrad::KEYS),
    SectionVariant::of("Lamb", Lamb::DOC, Lamb::KEYS),
    SectionVariant::of("Muon", Muon::DOC, Muon::KEYS),
    SectionVariant::of("OneBitAdam", OneBitAdam::DOC, OneBitAdam::KEYS),
    SectionVariant::of("OneBitLamb", OneBitLamb::DOC, OneBitLamb::KEYS),
    SectionVariant::of("ZeroOneAdam", ZeroOneAdam::DOC, ZeroOneAdam::KEYS),
    missing("MuAdam", "Adam with maximal update parametrization"),
    missing("MuAdamW", "AdamW with maximal update parametrization"),
    missing("MuSGD", "SGD with maximal update parametrization"),
    missing("RMSprop", "RMSprop"),
    missing("Adadelta", "Adadelta"),
    missing("Adamax", "Adamax"),
    missing("NAdam", "NAdam"),
    missing("RAdam", "RAdam"),
    missing("LBFGS", "L-BFGS"),
];

section! {
    /// Optimizer. Unset: AdamW.
    pub(crate) struct Optimizer<'a> {
        /// Optimizer type, such as "AdamW"; case is ignored.
        name as "type": Option<&'a str> = opt_text().required(),
        /// Hyper-parameters of the optimizer; they depend on type.
        params: () = variants(OPTIMIZERS),
        /// Use an older fused implementation.
        legacy_fusion = flag(false).inert("the update is always fused"),
    }

    /// Parameters that the Adam family shares.
    pub(crate) struct Moments<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        eps: f64 = EPS,
        weight_decay: f64 = WEIGHT_DECAY,
    }

    /// Parameters of Adam and AdamW.
    pub(crate) struct Adam<'a> {
        lr = LR,
        betas = BETAS,
        eps = EPS,
        weight_decay: f64 = WEIGHT_DECAY,
        /// Correct the bias of the moments, which start at 0: divide them by 1 - beta^t.
        bias_correction: bool = flag(true),
        /// Use decoupled weight decay (AdamW); false uses L2 regularization. Only for Adam: AdamW
        /// always decouples it.
        adam_w_mode: bool = flag(true),
        /// Use PyTorch's default weight decay of 0.01 if weight_decay is unset and decoupled.
        torch_adam: bool = flag(false),
        amsgrad = AMSGRAD,
        fused = FUSED_FLAG,
        foreach = FOREACH,
        set_grad_none = SET_GRAD_NONE,
        fp32_optimizer_states = FP32_STATES,
        /// Use CUDA-aware MPI.
        cuda_aware = flag(false).inert("only affects 1-bit Adam and 0/1 Adam"),
        maximize = MAXIMIZE,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Stochastic gradient descent with momentum.
    pub(crate) struct Sgd<'a> {
        lr: f64 = LR,
        /// Momentum factor. 0 disables momentum and its memory.
        momentum: f64 = real(NotNegative, 0.0),
        /// Dampening of the momentum.
        dampening: f64 = real(Any, 0.0),
        weight_decay: f64 = WEIGHT_DECAY,
        /// Use Nesterov momentum. Requires momentum above 0 and dampening 0.
        nesterov: bool = flag(false),
        fused = FUSED_FLAG,
        foreach = FOREACH,
        maximize = MAXIMIZE,
        max_grad_norm = MAX_GRAD_NORM,
    }

    //= deepspeed 0.19.8 ops/lion/fused_lion.py FusedLion
    /// Lion: sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023).
    pub(crate) struct Lion<'a> {
        lr: f64 = LR,
        betas: [f64; 2] = BETAS,
        weight_decay: f64 = WEIGHT_DECAY,
        set_grad_none = SET_GRAD_NONE,
        fp32_optimizer_states = FP32_STATES,
        max_grad_norm = MAX_GRAD_NORM,
    }

    /// Adagrad: learning rates scaled by accumulated squared gradients (Duchi et al. 2011).
    pub(crate) struct Adagrad<'a> {
        /// Learning rate. Unset or "auto": training.learning_rate of a job file, if set. Schedules
        /// with their own rates override it.
        lr: f64 = real(NotNegative, 0.01).auto(),
        /// Term added to the denominator for numerical stability.
        eps: f64 = real(NotNegative, 1e-10).auto(),
        weight_decay: f64 = WEIGHT_DECAY,
        amsgrad = AMSGRAD,
        fp32_optimizer_states = FP32_STATES,
        /// Decay of the learning rate.
        lr_decay = real(NotNegative, 0.0)
            .unavailable("Adagrad's own learning-rate decay", Differs, "set it to 0 and use a scheduler"),
        /// Initial value of the sum of squared gradients.
        initial_accumulator_value = real(NotNegative, 0.0)
            .unavailable("an initial accumulator value above 0", Differs, "set it to 0"),
        foreach = FOREACH,
        max_grad_norm = MAX_GRAD_NORM,
    }

    //= deepspeed 0.19.8 ops/lamb/fused_lamb.py FusedLamb
    /// LAMB: Adam with a trust ratio for each tensor (You et al. 2020).
    pub(crate) struct Lamb<'a> {
        lr = LR,
        betas = BETAS,
        eps = POSITIVE_EPS,
        weight_decay = WEIGHT_DECAY,
        /// Correct the bias of the moments: scale the learning rate by sqrt(1 - beta2^t) / (1 -
        /// beta1^t).
        bias_correction: bool = flag(true),
        /// Add eps to the second moment before the square root instead of after it.
        eps_inside_sqrt: bool = flag(false),
        max_coeff: f64 = MAX_COEFF,
        min_coeff: f64 = MIN_COEFF,
        amsgrad = AMSGRAD,
        set_grad_none = SET_GRAD_NONE,
        fp32_optimizer_states = FP32_STATES,
        max_grad_norm = MAX_GRAD_NORM,
    }

    //= deepspeed 0.19.8 runtime/zero/muon/original_muon.py MuonWithAuxAdam
    /// Muon: orthogonalized momentum for hidden-layer matrices, and Adam for all other parameters
    /// (Jordan et al. 2024).
    pub(crate) struct Muon<'a> {
        /// Learning rate of matrices and, if set, of all other parameters. muon_lr and adam_lr
        /// override it.
        lr: f64 = real(NotNegative, 0.02).auto(),
        /// Learning rate of matrices. Unset: lr.
        muon_lr: Option<f64> = opt_real(NotNegative),
        /// Learning rate of the parameters that Adam updates. Unset: lr, or 3e-4 if lr is unset
        /// too.
        adam_lr: Option<f64> = opt_real(NotNegative),
        /// Momentum factor of matrices.
        momentum: f64 = real(Decay, 0.95),
        /// Use Nesterov momentum.
        nesterov: bool = flag(true),
        weight_decay: f64 = WEIGHT_DECAY,
        /// Number of Newton-Schulz iterations. More iterations orthogonalize more precisely and
        /// take longer.
        ns_steps: usize = count_in(1, 99, 5),
        // Jordan et al. chose them for the largest slope at 0. Singular values end near 1, not
        // exactly at 1.
        /// Coefficients a, b and c of the Newton-Schulz iteration X <- a X + (b A + c A A) X with A
        /// = X X^T.
        ns_coefficients: [f64; 3] = triple(Any, &[3.4445, -4.775, 2.0315]),
        /// Scaling of the learning rate by a matrix's shape: "original", sqrt(max(1, outputs /
        /// inputs)), or "match_rms_adamw", 0.2 sqrt(max(outputs, inputs)), which suits learning
        /// rates tuned for AdamW.
        scale as "adjust_lr_fn": MuonScale = choice("original"),
        /// Betas of Adam, the decay rates of its moments.
        betas: [f64; 2] = pair(Decay, &[0.9, 0.95]).auto(),
        /// Term added to Adam's denominator for numerical stability.
        eps: f64 = real(NotNegative, 1e-10).auto(),
        /// Use decoupled weight decay for Adam's parameters; false uses L2 regularization.
        decouples_decay as "adam_w_mode": bool = flag(true),
        /// Form of the Newton-Schulz iteration.
        ns_method = one_of(&["gram", "standard"], "gram")
            .inert("both forms compute the same iteration, which runs in fp32"),
        /// Orthogonalize each attention head separately.
        per_head_muon = fixed(false, "Muon per head"),
        /// Use PyTorch's class for Adam.
        torch_adam = flag(false).inert(FUSED),
        foreach = FOREACH,
        fp32_optimizer_states = FP32_STATES,
        max_grad_norm = MAX_GRAD_NORM,
    }
}

/// Declares the optimizers with compressed momenta: the keys of the moments, then their own.
macro_rules! compressed {
    ($($(#[doc = $about:literal])+ $Name:ident($called:literal) { $($own:tt)* })+) => {
        section! {
            $($(#[doc = $about])+
            pub(crate) struct $Name<'a> {
                lr = LR,
                betas = BETAS,
                eps = POSITIVE_EPS,
                weight_decay = WEIGHT_DECAY,
                $($own)*
                /// Correct the bias of the moments.
                bias_correction = flag(true)
                    .inert(concat!($called, " never corrects its moments; DeepSpeed ignores the key too")),
                eps_inside_sqrt = EPS_INSIDE_SQRT,
                amsgrad = AMSGRAD,
                cuda_aware = CUDA_AWARE,
                comm_backend_name = COMM_BACKEND_NAME,
                max_grad_norm = MAX_GRAD_NORM,
            })+
        }
    };
}

compressed! {
    /// 1-bit Adam: after freeze_step, ranks exchange compressed momenta instead of gradients (Tang
    /// et al. 2021). Stages 0 and 1 only; nothing is sharded.
    OneBitAdam("1-bit Adam") {
        freeze_step: i64 = FREEZE_STEP,
    }

    /// 1-bit LAMB: after freeze_step, ranks exchange compressed momenta instead of gradients (Li et
    /// al. 2021). Stages 0 and 1 only; nothing is sharded.
    OneBitLamb("1-bit LAMB") {
        max_coeff: f64 = MAX_COEFF,
        min_coeff: f64 = MIN_COEFF,
        freeze_step: i64 = FREEZE_STEP,
        /// Decay rate of the moving average of each tensor's trust ratio, which is frozen after
        /// freeze_step. freeze_step should be at least 1 / (1 - coeff_beta).
        coeff_beta: f64 = real(Decay, 0.9),
        /// Upper bound of the factor that scales the frozen trust ratio.
        factor_max: f64 = real(Positive, 4.0),
        /// Lower bound of the factor that scales the frozen trust ratio.
        factor_min: f64 = real(NotNegative, 0.5),
        /// Maximum relative change of this factor per step.
        factor_threshold: f64 = real(NotNegative, 0.1),
    }

    /// 0/1 Adam: compressed gradients, then local steps with compressed averages (Lu et al. 2022).
    /// Communicates less than 1-bit Adam. Stages 0 and 1 only; nothing is sharded.
    ZeroOneAdam("0/1 Adam") {
        /// Last step that may update the second moment, usually the end of the warm-up. Afterwards
        /// ranks take local steps between averages.
        var_freeze_step: usize = positive(100_000).unit("steps"),
        /// Number of second-moment updates after which the interval between them doubles. Smaller
        /// values communicate less.
        var_update_scaler: usize = positive(16).unit("steps"),
        // DeepSpeed's default is 32,678, not the power of two 32,768.
        /// Number of local steps after which the interval between averages doubles. Smaller values
        /// communicate less.
        local_step_scaler: usize = positive(32_678).unit("steps"),
        /// Maximum interval between averages. Larger values communicate less, but ranks drift
        /// further apart.
        local_step_clipper: usize = positive(16).unit("steps"),
    }
}
