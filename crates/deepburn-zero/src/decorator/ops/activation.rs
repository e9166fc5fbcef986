//! Activation functions.
//!
//! All of these ops are cheap to recompute ([`Cost::Low`](crate::recompute::Cost)). Under autocast,
//! softmax and the logarithms run in f32, as in `torch.autocast`'s op list for CUDA, because a sum
//! of exponentials loses precision in 16 bits. The backward functions run below autodiff, on
//! operands whose types the forward pass has already determined.

use burn_backend::Scalar;
use burn_backend::ops::ActivationOps;
use deepburn_ops::MatmulOps;

use crate::decorator::Sharded;
use crate::decorator::ops::{forward, recorded};

/// The table of Burn's `ActivationOps`; see [`ops`](crate::decorator::ops) for its syntax.
macro_rules! activation_ops {
    ($with:ident) => {
        $with! {
            fn leaky_relu(tensor: float, negative_slope: [Scalar]) -> float;
            fn relu(tensor: float) -> float;
            fn relu_backward(output: float, grad: float) -> float;
            fn gelu(tensor: float) -> float;
            fn prelu(tensor: float, alpha: float) -> float;
            fn gelu_backward(x: float, grad: float) -> float;
            fn sigmoid(tensor: float) -> float;
            fn sigmoid_backward(output: float, grad: float) -> float;
            fn hard_sigmoid(tensor: float, alpha: [Scalar], beta: [Scalar]) -> float;
            #[full] fn log_sigmoid(tensor: float) -> float;
            #[full] fn softmax(tensor: float, dim: [usize]) -> float;
            #[full] fn log_softmax(tensor: float, dim: [usize]) -> float;
            #[full] fn softmin(tensor: float, dim: [usize]) -> float;
            fn log_sigmoid_backward(x: float, grad: float) -> float;
        }
    };
}
pub(crate) use activation_ops;

impl<B: MatmulOps> ActivationOps<Sharded<B>> for Sharded<B> {
    activation_ops!(forward);
}
