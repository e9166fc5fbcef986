//! Ops that take the blocks of a quantized parameter.
//!
//! Each function chooses between the op for elements and the one for blocks.

use burn_backend::tensor::{FloatTensor, IntTensor};
use deepburn_ops::{
    CrossEntropyOps, HeadGradients, HeadLoss, LinearOps, MatmulOps, quantized_rows,
};

use crate::parameter::WeightOperand;

/// Returns `lhs [.., rows, depth]` times `rhs`.
pub(super) fn matmul<B: MatmulOps>(lhs: FloatTensor<B>, rhs: WeightOperand<B>) -> FloatTensor<B> {
    match rhs {
        WeightOperand::Dense(rhs) => B::matmul(lhs, rhs),
        WeightOperand::Quantized(rhs) => B::quantized_matmul(lhs, &rhs),
    }
}

/// Returns `x weight + bias`.
pub(super) fn linear<B: LinearOps>(
    x: FloatTensor<B>,
    weight: WeightOperand<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    match weight {
        WeightOperand::Dense(weight) => B::fused_linear(x, weight, bias),
        WeightOperand::Quantized(weight) => B::quantized_linear(x, &weight, bias),
    }
}

/// Returns the gradient of the input of a linear layer.
pub(super) fn linear_x_gradient<B: LinearOps>(
    grad: FloatTensor<B>,
    weight: WeightOperand<B>,
) -> FloatTensor<B> {
    match weight {
        WeightOperand::Dense(weight) => B::linear_x_gradient(grad, weight),
        WeightOperand::Quantized(weight) => B::quantized_x_gradient(grad, &weight),
    }
}

/// Returns the loss of a head and its wanted gradients.
///
/// A quantized weight is frozen, so its gradient is never wanted.
pub(super) fn head_loss<B: CrossEntropyOps>(
    hidden: FloatTensor<B>,
    weight: WeightOperand<B>,
    targets: IntTensor<B>,
    wanted: HeadGradients<bool>,
) -> HeadLoss<B> {
    match weight {
        WeightOperand::Dense(weight) => B::head_loss(hidden, weight, targets, wanted),
        WeightOperand::Quantized(weight) if wanted.weight => {
            B::head_loss(hidden, weight.dequantized(), targets, wanted)
        }
        WeightOperand::Quantized(weight) => {
            B::quantized_head_loss(hidden, &weight, targets, wanted.hidden)
        }
    }
}

/// Returns the loss of a head without gradients.
pub(super) fn linear_cross_entropy<B: CrossEntropyOps>(
    hidden: FloatTensor<B>,
    weight: WeightOperand<B>,
    targets: IntTensor<B>,
) -> FloatTensor<B> {
    match weight {
        WeightOperand::Dense(weight) => B::linear_cross_entropy(hidden, weight, targets),
        WeightOperand::Quantized(weight) => {
            B::quantized_head_loss(hidden, &weight, targets, false).loss
        }
    }
}

/// Returns the loss of a head and the number of predicted targets.
pub(super) fn head_scores<B: CrossEntropyOps>(
    hidden: FloatTensor<B>,
    weight: WeightOperand<B>,
    targets: IntTensor<B>,
) -> FloatTensor<B> {
    match weight {
        WeightOperand::Dense(weight) => B::head_scores(hidden, weight, targets),
        WeightOperand::Quantized(weight) => B::quantized_head_scores(hidden, &weight, targets),
    }
}

/// Returns the rows `indices` of a table.
pub(super) fn embedding<B: MatmulOps>(
    table: WeightOperand<B>,
    indices: IntTensor<B>,
) -> FloatTensor<B> {
    match table {
        WeightOperand::Dense(table) => B::embedding(table, indices),
        WeightOperand::Quantized(table) => quantized_rows(&table, indices),
    }
}
