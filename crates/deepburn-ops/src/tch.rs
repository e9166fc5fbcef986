//! The op families on LibTorch, PyTorch's C++ library, on the CPU or on CUDA.
//!
//! Ops use LibTorch's own kernel if one covers the complete op: layer normalization (forward),
//! GELU, linear layers and, on the CPU, causal attention without dropout. The cross-entropy loss,
//! layer normalization's backward pass and the optimizer steps are implemented here. Other cases,
//! among them RMS normalization, gated activations and rotary embeddings, use [`crate::portable`].
//!
//! Ops run on LibTorch's intra-op thread pool, and optimizer steps on the rayon pool. LibTorch
//! determines the order of summation within a kernel, which may change with its version and its
//! number of threads.

mod attention;
mod cross_entropy;
mod gelu;
mod linear;
mod norm;
mod optimizer;

use burn_tch::{LibTorch, TchElement, TchTensor};
use tch::{Kind, Tensor};

use crate::{GatedOps, RmsNormOps, RotaryOps};

impl<E: TchElement> RmsNormOps for LibTorch<E> {}
impl<E: TchElement> GatedOps for LibTorch<E> {}
impl<E: TchElement> RotaryOps for LibTorch<E> {}

/// Wraps the result of an op as a tensor of the backend, which tracks shared memory from then on.
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
