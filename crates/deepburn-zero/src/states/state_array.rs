//! The arrays of a parameter's states, and their names in checkpoints.

use std::borrow::Cow;

use deepburn_config::OptimizerPlan;

use crate::optimizer::{local_state, moments, takes_local_steps};

/// The name of the error of a rank, before the number of the rank.
const WORKER_ERROR: &str = "worker_error";

/// The name of the error of the mean.
const SERVER_ERROR: &str = "server_error";

/// An array of a parameter's states, with one element per element of the parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateArray {
    /// The values, which are the f32 masters if there are masters. Between two averages of 0/1
    /// Adam, the common values that all ranks had after the last average.
    Weights,
    /// A state of the optimizer by its PyTorch name: `exp_avg`, `exp_avg_sq`, `momentum_buffer`,
    /// `sum`. Between two averages of 0/1 Adam, each element of `exp_avg` has the value of the rank
    /// that owns it.
    Moment(&'static str),
    /// The gradient that was accumulated so far in the current step.
    Gradient,
    /// The compression error of the momentum on the given rank.
    WorkerError(usize),
    /// The compression error of the mean momentum. Each rank holds a part of it.
    ServerError,
    /// A state of 0/1 Adam that differs between ranks, on the given rank. The name is `exp_avg` or
    /// `momentum_accumulator`.
    Local(&'static str, usize),
}

impl StateArray {
    /// Returns the name of the array in checkpoints.
    pub fn stored_name(self) -> Cow<'static, str> {
        match self {
            Self::Weights => "weights".into(),
            Self::Gradient => "gradient".into(),
            Self::Moment(name) => name.into(),
            Self::WorkerError(rank) => format!("{WORKER_ERROR}_{rank}").into(),
            Self::ServerError => SERVER_ERROR.into(),
            Self::Local(name, rank) => format!("{name}_{rank}").into(),
        }
    }

    /// Returns the array that a checkpoint stores as `name`, if it is one that differs between
    /// ranks: a compression error, or a state of local steps.
    pub fn of_ranks(name: &str) -> Option<Self> {
        if name == SERVER_ERROR {
            return Some(Self::ServerError);
        }
        let (array, rank) = name.rsplit_once('_')?;
        let rank = rank.parse().ok()?;
        match array {
            WORKER_ERROR => Some(Self::WorkerError(rank)),
            _ => local_state(array).map(|name| Self::Local(name, rank)),
        }
    }

    /// Returns true if training with this optimizer has such an array.
    pub fn is_kept_by(self, optimizer: &OptimizerPlan) -> bool {
        match self {
            Self::Weights | Self::Gradient => true,
            Self::Moment(name) => moments(optimizer).contains(&name),
            Self::WorkerError(_) | Self::ServerError => optimizer.exchanges_momentum(),
            Self::Local(..) => takes_local_steps(optimizer),
        }
    }

    /// Returns the name of the array in error messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Moment(name) | Self::Local(name, _) => name,
            Self::Gradient => "gradient",
            Self::WorkerError(_) => "worker error",
            Self::ServerError => "server error",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ranks_are_read_as_they_are_written() {
        let arrays = [
            StateArray::WorkerError(12),
            StateArray::ServerError,
            StateArray::Local("exp_avg", 0),
            StateArray::Local("momentum_accumulator", 3),
        ];
        for array in arrays {
            assert_eq!(StateArray::of_ranks(&array.stored_name()), Some(array));
        }
        for name in ["exp_avg", "exp_avg_sq", "exp_avg_sq_0", "worker_error", "common_1", "sum_x"] {
            assert_eq!(StateArray::of_ranks(name), None, "{name}");
        }
    }
}
