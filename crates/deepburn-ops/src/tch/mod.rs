//! The families on LibTorch, PyTorch's C++ library, on the CPU or on CUDA.
//!
//! Ops use LibTorch's own kernels where it has one for the complete op: layer normalisation
//! (forward), GELU, linear layers and, on the CPU, causal attention without dropout. The loss head,
//! layer normalisation's backward pass and the optimizer steps are written here. Other cases use
//! [`crate::portable`].
//!
//! Threads are LibTorch's intra-op pool, except for optimizer steps, which run on the rayon pool.
//! The order of sums within a kernel is LibTorch's, and may change with its version and its number
//! of threads.

mod attention;
mod cross_entropy;
mod gelu;
mod linear;
mod norm;
mod optimizer;

use burn_tch::TchTensor;
use tch::{Kind, Tensor};

/// Makes the result of an op a tensor of the backend. The backend keeps track of shared memory from
/// here on.
fn wrap(tensor: Tensor) -> TchTensor {
    TchTensor::new(tensor)
}

/// Returns the type in which sums and exponentials are computed: f32 for 16-bit types, otherwise
/// the type itself.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    }
}
