//! What a checkpoint says of itself: parameters, counters, loss scale.
//!
//! Main types: [`Parameter`], [`Counters`], [`LossScale`] and [`Array`], all plain values.

/// A parameter of the model that was trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in PyTorch, such as `transformer.wte.weight`.
    pub name: String,
    /// Its shape in PyTorch, outermost dimension first.
    pub shape: Vec<usize>,
    /// Further names of the very same parameter (tied weights).
    pub aliases: Vec<String>,
    /// Whether the optimizer updates it. Only of such a parameter there are arrays.
    pub trainable: bool,
}

impl Parameter {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How far training was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Steps, those that an overflow skipped included.
    pub global_steps: u64,
    /// Steps that an overflow skipped.
    pub skipped_steps: u64,
    /// Samples that were trained on, over all ranks.
    pub global_samples: u64,
    /// Updates that the optimizer counts, which its bias correction depends on. Where it counts
    /// none (SGD), the steps that were not skipped. In 16 bits at stage 0 it is one more than those:
    /// DeepSpeed makes its state by a step with gradients of zero.
    pub optimizer_steps: u64,
}

/// State of a dynamic loss scaler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScale {
    /// The factor of the next loss.
    pub scale: f64,
    /// Overflows that it takes until the scale falls. Stage 0 has no such delay: 1.
    pub hysteresis: u64,
    /// Iteration of the last overflow, counted from 0; -1 before any.
    pub last_overflow: i64,
    /// Iterations so far.
    pub iteration: u64,
}

/// One of the arrays that belong to a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Array<'a> {
    /// Its values: the fp32 masters where there are some, else what the model has.
    Weights,
    /// An array of the optimizer, by DeepSpeed's name: one of
    /// [`DeepSpeedCheckpoint::moments`](crate::DeepSpeedCheckpoint::moments).
    Moment(&'a str),
}
