//! LibTorch, on the CPU or on CUDA.

mod attention;
mod cross_entropy;
mod gelu;
mod linear;
mod norm;
mod optimizer;

use burn_tch::TchTensor;
use tch::{Kind, Tensor};

/// A tensor that an op of LibTorch made.
fn wrap(tensor: Tensor) -> TchTensor {
    TchTensor::new(tensor)
}

/// The type to compute in: at least f32.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    }
}
