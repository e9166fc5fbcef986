//! Matrix products of tensors.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Matrix products of the last two axes.
pub trait MatmulOps: Backend {
    /// `lhs` `[..., rows, depth]` times `rhs` `[..., depth, columns]`. The other axes are broadcast. As
    /// [`FloatTensorOps::float_matmul`](burn_backend::ops::FloatTensorOps::float_matmul); a backend overrides it where
    /// it has a faster kernel than Burn's.
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }
}
