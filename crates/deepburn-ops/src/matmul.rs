//! Matrix products of tensors.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Matrix products over the last two axes.
pub trait MatmulOps: Backend {
    /// Multiplies `lhs` `[..., rows, depth]` by `rhs` `[..., depth, columns]`; the other axes are
    /// broadcast. The result equals
    /// [`FloatTensorOps::float_matmul`](burn_backend::ops::FloatTensorOps::float_matmul) up to
    /// rounding; a backend overrides this method if it has a faster kernel than Burn's.
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }
}
