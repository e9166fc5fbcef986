//! Linear layers with LibTorch's matrix products.
//!
//! Products are in the type of the operands. A transposed operand is a view, which the product
//! reads without a copy.

use burn_backend::tensor::FloatTensor;
use burn_tch::{LibTorch, TchElement};

use super::{wide, wrap};
use crate::linear::{LinearGradients, LinearOps};

/// Each method is one product of LibTorch's BLAS library or, on CUDA, of cuBLAS.
impl<E: TchElement> LinearOps for LibTorch<E> {
    /// `addmm` adds the bias within the product, before the result is rounded.
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        wrap(match bias {
            Some(bias) => bias.tensor.addmm(&x.tensor, &weight.tensor),
            None => x.tensor.mm(&weight.tensor),
        })
    }

    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        wrap(grad.tensor.mm(&weight.tensor.tr()))
    }

    /// The bias gradient is summed in at least f32 and rounded once. The weight gradient has the
    /// operands' type.
    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        let (grad, kind) = (grad.tensor, x.tensor.kind());
        let bias = grad.sum_dim_intlist(0_i64, false, wide(kind)).to_kind(kind);
        LinearGradients { weight: wrap(x.tensor.tr().mm(&grad)), bias: wrap(bias) }
    }
}
