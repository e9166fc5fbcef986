//! The memory layout of tensors.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Queries the memory layout of a backend's tensors.
pub trait LayoutOps: Backend {
    /// Returns true if the elements of `tensor` are contiguous in flat order; `false` if the
    /// backend does not know. Kernels may add elements of other layouts in a different order, so a
    /// contiguous copy of such a tensor can give results that differ in the last bits.
    fn is_contiguous(tensor: &FloatTensor<Self>) -> bool;
}
