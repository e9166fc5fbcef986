//! The optimizer and its hyper-parameters.

use serde::Serialize;

/// The optimizer, with the hyper-parameters it has.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OptimizerPlan {
    /// Adam with decoupled weight decay (DeepSpeed's `AdamW`, and its `Adam` by default).
    AdamW(AdamPlan),
    /// Adam with L2 regularisation (`Adam` with `adam_w_mode: false`).
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
    /// Weight decay; decoupled or L2 is the variant's choice.
    pub weight_decay: f64,
    /// Whether the moments are divided by `1 - beta^t`.
    pub bias_correction: bool,
}

impl OptimizerPlan {
    /// Learning rate that the optimizer has when no schedule sets it.
    pub fn lr(&self) -> f64 {
        match self {
            Self::AdamW(adam) | Self::Adam(adam) => adam.lr,
            Self::Sgd { lr, .. } | Self::Lion { lr, .. } | Self::Adagrad { lr, .. } => *lr,
        }
    }

    /// Decoupled weight decay or L2 penalty, whichever it has.
    pub fn weight_decay(&self) -> f64 {
        match self {
            Self::AdamW(adam) | Self::Adam(adam) => adam.weight_decay,
            Self::Sgd { weight_decay, .. }
            | Self::Lion { weight_decay, .. }
            | Self::Adagrad { weight_decay, .. } => *weight_decay,
        }
    }

    /// Whether it has betas.
    pub fn has_betas(&self) -> bool {
        matches!(self, Self::AdamW(_) | Self::Adam(_) | Self::Lion { .. })
    }

    /// The same with another weight decay and other betas, where they are given. An optimizer without betas has
    /// none after it either.
    pub fn with(&self, decay: Option<f64>, other_betas: Option<[f64; 2]>) -> Self {
        let mut plan = self.clone();
        let (weight_decay, betas) = match &mut plan {
            Self::AdamW(adam) | Self::Adam(adam) => (&mut adam.weight_decay, Some(&mut adam.betas)),
            Self::Lion { weight_decay, betas, .. } => (weight_decay, Some(betas)),
            Self::Sgd { weight_decay, .. } | Self::Adagrad { weight_decay, .. } => {
                (weight_decay, None)
            }
        };
        *weight_decay = decay.unwrap_or(*weight_decay);
        if let (Some(betas), Some(others)) = (betas, other_betas) {
            *betas = others;
        }
        plan
    }
}
