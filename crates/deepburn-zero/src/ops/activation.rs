//! Activation functions.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Scalar};

use crate::ops::forward;
use crate::{Zero, ZeroTensor};

impl<B: Backend> ActivationOps<Zero<B>> for Zero<B> {
    forward! {
        fn leaky_relu(tensor: float, negative_slope: [Scalar]) -> float;
        fn relu(tensor: float) -> float;
        fn relu_backward(output: float, grad: float) -> float;
        fn gelu(tensor: float) -> float;
        fn prelu(tensor: float, alpha: float) -> float;
        fn gelu_backward(x: float, grad: float) -> float;
        fn sigmoid(tensor: float) -> float;
        fn sigmoid_backward(output: float, grad: float) -> float;
        fn hard_sigmoid(tensor: float, alpha: [Scalar], beta: [Scalar]) -> float;
        fn log_sigmoid(tensor: float) -> float;
        fn softmax(tensor: float, dim: [usize]) -> float;
        fn log_softmax(tensor: float, dim: [usize]) -> float;
        fn softmin(tensor: float, dim: [usize]) -> float;
        fn log_sigmoid_backward(x: float, grad: float) -> float;
    }
}
