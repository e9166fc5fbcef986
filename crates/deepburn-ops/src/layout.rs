//! How tensors lie in memory.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// How the tensors of a backend lie in memory.
pub trait LayoutOps: Backend {
    /// Whether the elements of `tensor` lie in its flat order, one after the other; `false` where the backend does
    /// not tell. Kernels may add in another order where they do not, so a copy of such a tensor in its flat order
    /// may lead to other bits.
    fn is_contiguous(tensor: &FloatTensor<Self>) -> bool;
}
