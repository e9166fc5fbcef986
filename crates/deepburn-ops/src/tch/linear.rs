use burn_backend::tensor::FloatTensor;
use burn_tch::{LibTorch, TchElement};

use super::{wide, wrap};
use crate::linear::{LinearGradients, LinearOps};

impl<E: TchElement> LinearOps for LibTorch<E> {
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

    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        let (grad, kind) = (grad.tensor, x.tensor.kind());
        let bias = grad.sum_dim_intlist(0_i64, false, wide(kind)).to_kind(kind);
        LinearGradients { weight: wrap(x.tensor.tr().mm(&grad)), bias: wrap(bias) }
    }
}
