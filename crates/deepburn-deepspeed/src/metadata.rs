//! The metadata of a checkpoint: parameters, counters, loss scale.
//!
//! Main types: [`SavedParameter`], [`Counters`], [`LossScale`] and [`Array`], all plain values.

/// A parameter of the saved model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedParameter {
    /// Its name in PyTorch, such as `transformer.wte.weight`.
    pub name: String,
    /// Its shape in PyTorch, outermost dimension first.
    pub shape: Vec<usize>,
    /// Additional names of the same parameter (tied weights).
    pub aliases: Vec<String>,
    /// Whether the optimizer updates it. Only trainable parameters have arrays.
    pub trainable: bool,
}

impl SavedParameter {
    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The training progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// The number of steps, including steps that an overflow skipped.
    pub global_steps: u64,
    /// The number of steps that an overflow skipped.
    pub skipped_steps: u64,
    /// The number of training samples over all ranks.
    pub global_samples: u64,
    /// The optimizer's step count, on which bias correction depends. If the optimizer does not
    /// count steps (SGD), this is the number of steps that were not skipped. At stage 0 in 16 bits
    /// the count is larger by one, because DeepSpeed initializes the optimizer state with a step on
    /// zero gradients.
    pub optimizer_steps: u64,
}

/// The state of a dynamic loss scaler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScale {
    /// The factor by which the next loss is multiplied.
    pub scale: f64,
    /// The number of overflows until the scale is reduced. At stage 0 it is always 1.
    pub hysteresis: u64,
    /// The iteration of the last overflow, from 0; -1 if there was none.
    pub last_overflow: i64,
    /// The number of iterations so far.
    pub iteration: u64,
}

/// An array that belongs to a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Array<'a> {
    /// The values of the parameter: the f32 master weights if there are any, otherwise the model's
    /// weights.
    Weights,
    /// An array of the optimizer, under DeepSpeed's name. The name is one of
    /// [`DeepSpeedCheckpoint::moments`](crate::DeepSpeedCheckpoint::moments).
    Moment(&'a str),
}
