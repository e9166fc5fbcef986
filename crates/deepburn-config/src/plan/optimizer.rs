//! The optimizer and its hyper-parameters.

use serde::Serialize;

use crate::choice::choices;

/// An optimizer and its hyper-parameters.
///
/// ```
/// use deepburn_config::{AdamPlan, OptimizerPlan};
///
/// let adam = AdamPlan {
///     lr: 1e-3,
///     betas: [0.9, 0.999],
///     eps: 1e-8,
///     weight_decay: 0.1,
///     bias_correction: true,
/// };
/// let optimizer = OptimizerPlan::AdamW(adam);
/// assert_eq!((optimizer.name(), optimizer.lr()), ("AdamW", 1e-3));
/// // The optimizer of a group of parameters that do not decay.
/// assert_eq!(optimizer.with(Some(0.0), None).weight_decay(), 0.0);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OptimizerPlan {
    /// Adam with decoupled weight decay (DeepSpeed's `AdamW`, and its `Adam` by default).
    AdamW(AdamPlan),
    /// Adam with L2 regularization (`Adam` with `adam_w_mode: false`).
    Adam(AdamPlan),
    /// Stochastic gradient descent with momentum.
    Sgd {
        /// Learning rate of the first step.
        lr: f64,
        /// Momentum factor; 0 keeps no state.
        momentum: f64,
        /// Dampening of the momentum.
        dampening: f64,
        /// L2 penalty.
        weight_decay: f64,
        /// Nesterov's variant.
        nesterov: bool,
    },
    /// Lion (Chen et al. 2023): sign of an interpolated momentum, decoupled decay.
    Lion {
        /// Learning rate of the first step.
        lr: f64,
        /// Interpolation and momentum factors.
        betas: [f64; 2],
        /// Decoupled weight decay.
        weight_decay: f64,
    },
    /// Adagrad (Duchi et al. 2011).
    Adagrad {
        /// Learning rate of the first step.
        lr: f64,
        /// Added to the square root of the accumulated squares.
        eps: f64,
        /// L2 penalty.
        weight_decay: f64,
    },
    /// LAMB (You et al. 2020), as DeepSpeed computes it.
    Lamb(LambPlan),
    /// Muon (Jordan et al. 2024) on the matrices of hidden layers, and Adam on everything else.
    Muon(MuonPlan),
    /// 1-bit Adam (Tang et al. 2021): AdamW without bias correction whose ranks exchange compressed
    /// momenta.
    OneBitAdam(OneBitAdamPlan),
    /// 1-bit LAMB (Li et al. 2021): LAMB without bias correction whose ranks exchange compressed
    /// momenta.
    OneBitLamb(OneBitLambPlan),
    /// 0/1 Adam (Lu et al. 2022): 1-bit Adam with fewer exact gradients, and with local steps in
    /// which ranks exchange nothing.
    ZeroOneAdam(ZeroOneAdamPlan),
}

/// Hyper-parameters of the Adam family.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AdamPlan {
    /// Learning rate of the first step.
    pub lr: f64,
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Weight decay; the variant determines whether it is decoupled or L2.
    pub weight_decay: f64,
    /// Whether the moments are divided by `1 - beta^t`.
    pub bias_correction: bool,
}

/// Hyper-parameters of LAMB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LambPlan {
    /// Learning rate of the first step.
    pub lr: f64,
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment, or to the second moment itself.
    pub eps: f64,
    /// Whether `eps` is added under the square root.
    pub eps_inside_sqrt: bool,
    /// Weight decay, which is part of each tensor's update direction.
    pub weight_decay: f64,
    /// Whether the learning rate is multiplied by `sqrt(1 - beta2^t) / (1 - beta1^t)`.
    pub bias_correction: bool,
    /// Lower and upper bound of the trust ratio.
    pub trust_ratio: [f64; 2],
}

impl LambPlan {
    /// Creates LAMB from Adam's hyper-parameters, with `eps` outside of the square root.
    pub(crate) fn of(adam: AdamPlan, trust_ratio: [f64; 2]) -> Self {
        let AdamPlan { lr, betas, eps, weight_decay, bias_correction } = adam;
        Self { lr, betas, eps, eps_inside_sqrt: false, weight_decay, bias_correction, trust_ratio }
    }
}

/// Hyper-parameters of Muon.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MuonPlan {
    /// Learning rate of the first step, of matrices.
    pub lr: f64,
    /// Decay of the momentum.
    pub momentum: f64,
    /// Nesterov's variant.
    pub nesterov: bool,
    /// Decoupled weight decay, of matrices.
    pub weight_decay: f64,
    /// How a matrix is orthogonalized.
    pub newton_schulz: NewtonSchulzPlan,
    /// How the learning rate depends on a matrix's shape.
    pub scale: MuonScale,
    /// Adam on all other parameters.
    pub adam: AdamPlan,
    /// Whether the weight decay of Adam is decoupled.
    pub decouples_decay: bool,
}

/// The Newton-Schulz iteration `X <- a X + (b A + c A A) X` with `A = X X^T`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NewtonSchulzPlan {
    /// Iterations.
    pub steps: usize,
    /// `a`, `b` and `c`.
    pub coefficients: [f64; 3],
    /// Smallest norm by which a matrix is divided before the first iteration.
    pub eps: f64,
}

/// How Muon's learning rate depends on the shape of a matrix that maps `inputs` values to `outputs`
/// values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuonScale {
    /// `sqrt(max(1, outputs / inputs))` (Jordan et al.).
    Original,
    /// `0.2 sqrt(max(outputs, inputs))`, with which AdamW's learning rates fit (Liu et al. 2025).
    MatchRmsAdamw,
}

/// Hyper-parameters of 1-bit Adam.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OneBitAdamPlan {
    /// Adam before and after the freeze. Weight decay is decoupled and `bias_correction` is false.
    pub adam: AdamPlan,
    /// Steps with exact gradients. Afterwards the second moment is frozen, and ranks exchange one
    /// bit for each element of their momentum instead of gradients.
    pub freeze_step: u64,
}

/// Hyper-parameters of 1-bit LAMB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OneBitLambPlan {
    /// LAMB before and after the freeze. `bias_correction` and `eps_inside_sqrt` are false.
    pub lamb: LambPlan,
    /// Steps with exact gradients. Afterwards the second moment and the trust ratios are frozen,
    /// and ranks exchange one bit for each element of their momentum instead of gradients.
    pub freeze_step: u64,
    /// Decay of the moving average of trust ratios that is frozen.
    pub coeff_beta: f64,
    /// Smallest and largest factor of the frozen trust ratio.
    pub factor: [f64; 2],
    /// Largest relative change of the factor from one step to the next.
    pub factor_threshold: f64,
}

/// Hyper-parameters of 0/1 Adam.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ZeroOneAdamPlan {
    /// Adam in all steps. Weight decay is decoupled and `bias_correction` is false.
    pub adam: AdamPlan,
    /// The last step that may update the second moment. Afterwards, ranks take local steps.
    pub var_freeze_step: u64,
    /// Number of updates of the second moment after which the interval between them doubles. These
    /// updates use exact gradients.
    pub var_update_scaler: u64,
    /// Number of local steps after which the interval between exchanges doubles.
    pub local_step_scaler: u64,
    /// The longest interval between exchanges, in steps.
    pub local_step_clipper: u64,
}

choices!(MuonScale { "original" => Original, "match_rms_adamw" => MatchRmsAdamw });

/// Name, learning rate, weight decay and betas of an optimizer, as far as it has them.
type Settings<'a> = (&'static str, &'a mut f64, &'a mut f64, Option<&'a mut [f64; 2]>);

/// Returns the settings of the optimizer `name`, from a plan with betas.
macro_rules! settings {
    ($name:literal, $part:expr) => {{
        let part = $part;
        ($name, &mut part.lr, &mut part.weight_decay, Some(&mut part.betas))
    }};
}

impl OptimizerPlan {
    /// Returns the settings that all variants have in common.
    fn settings(&mut self) -> Settings<'_> {
        match self {
            Self::AdamW(adam) => settings!("AdamW", adam),
            Self::Adam(adam) => settings!("Adam", adam),
            Self::Sgd { lr, weight_decay, .. } => ("SGD", lr, weight_decay, None),
            Self::Lion { lr, weight_decay, betas } => ("Lion", lr, weight_decay, Some(betas)),
            Self::Adagrad { lr, weight_decay, .. } => ("Adagrad", lr, weight_decay, None),
            Self::Lamb(lamb) => settings!("Lamb", lamb),
            // The betas apply to Adam, which updates the other parameters.
            Self::Muon(muon) => ("Muon", &mut muon.lr, &mut muon.weight_decay, None),
            Self::OneBitAdam(plan) => settings!("OneBitAdam", &mut plan.adam),
            Self::OneBitLamb(plan) => settings!("OneBitLamb", &mut plan.lamb),
            Self::ZeroOneAdam(plan) => settings!("ZeroOneAdam", &mut plan.adam),
        }
    }

    /// Returns the `optimizer.type` that selects it.
    pub fn name(&self) -> &'static str {
        // A copy is small, and saves a second match for shared references.
        self.clone().settings().0
    }

    /// Returns the learning rate that the optimizer has when no schedule sets it.
    pub fn lr(&self) -> f64 {
        *self.clone().settings().1
    }

    /// Returns the decoupled weight decay or the L2 penalty.
    pub fn weight_decay(&self) -> f64 {
        *self.clone().settings().2
    }

    /// Returns whether the optimizer has betas. Muon has betas for the parameters that Adam
    /// updates.
    pub fn has_betas(&self) -> bool {
        matches!(self, Self::Muon(_)) || self.clone().settings().3.is_some()
    }

    /// Returns whether ranks exchange compressed momenta instead of gradients, at least after some
    /// step. 0/1 Adam also exchanges compressed gradients or parameter movements. Each rank then
    /// needs the full gradient and momentum, so nothing is sharded or offloaded.
    pub fn exchanges_momentum(&self) -> bool {
        matches!(self, Self::OneBitAdam(_) | Self::OneBitLamb(_) | Self::ZeroOneAdam(_))
    }

    /// Returns the plan with another weight decay and other betas, if they are given. Betas are
    /// ignored for an optimizer without betas.
    pub fn with(&self, decay: Option<f64>, other_betas: Option<[f64; 2]>) -> Self {
        let mut plan = self.clone();
        let (_, _, weight_decay, betas) = plan.settings();
        *weight_decay = decay.unwrap_or(*weight_decay);
        if let (Some(betas), Some(others)) = (betas, other_betas) {
            *betas = others;
        }
        plan
    }
}
