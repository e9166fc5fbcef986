//! Sums of all elements of a tensor.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Sums of all elements of a tensor in a fixed order.
pub trait SumOps: Backend {
    /// Returns the sum of all elements, `[1]`, in the type of the tensor. The provided method calls
    /// [`FloatTensorOps::float_sum`](burn_backend::ops::FloatTensorOps::float_sum). A backend
    /// overrides it if that op adds partial sums in the order in which they happen to be computed,
    /// as atomic additions on a device do.
    fn sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_sum(tensor)
    }
}

/// Autodiff records `float_sum`, which calls the one of the backend below. Decorators of
/// `deepburn-zero` compute that one with [`sum`](SumOps::sum).
impl<B: SumOps, C: CheckpointStrategy> SumOps for Autodiff<B, C> {}
