//! Counts the floating-point operations of products in the counter of the active call.

use burn_backend::{Shape, TensorMetadata};
use deepburn_ops::SumOps;

use crate::decorator::ZeroTensor;
use crate::ledger::OperationCounter;
use crate::recompute::Cost;
use crate::session;

/// Counts a product of `operands`. `count` is called only while counting is on.
pub(crate) fn count<B: SumOps>(operands: &[&ZeroTensor<B>], count: impl FnOnce() -> u64) {
    session::with_counter(|counter| {
        let parameter = operands.iter().find_map(|operand| match operand {
            ZeroTensor::Parameter(view) => Some(view.parameter.path()),
            _ => None,
        });
        if let Some(parameter) = parameter {
            counter.read(parameter);
        }
        counter.enter(count(), parameter.is_some());
    });
}

/// Counts operations as backward for an op that computes gradients in forward. They are attributed
/// to the module of `parameter`.
pub(crate) fn count_backward<B: SumOps>(
    parameter: &ZeroTensor<B>,
    operations: impl FnOnce() -> u64,
) {
    session::with_counter(OperationCounter::start_backward);
    count(&[parameter], operations);
    session::with_counter(OperationCounter::start_forward);
}

/// Returns how expensive it is to recompute the product of rows `[.., k]` and a matrix.
pub(crate) fn cost<B: SumOps>(rows: &ZeroTensor<B>) -> Cost {
    Cost::of_product(rows.shape().as_slice().last().copied().unwrap_or(1))
}

/// Returns the operations of `[.., m, k]` times `[.., k, n]`: `2 m k n` for each matrix of the
/// larger batch.
pub(crate) fn matmul<B: SumOps>(lhs: &ZeroTensor<B>, rhs: &ZeroTensor<B>) -> u64 {
    let (lhs, rhs) = (lhs.shape(), rhs.shape());
    let batches = lhs.num_elements() / matrix(&lhs).max(1);
    let others = rhs.num_elements() / matrix(&rhs).max(1);
    let columns = rhs.as_slice().last().copied().unwrap_or(1);
    2 * (batches.max(others) * matrix(&lhs) * columns) as u64
}

/// Returns the number of elements of the last two axes.
fn matrix(shape: &Shape) -> usize {
    shape.as_slice().iter().rev().take(2).product()
}

/// Returns the operations of rows `[.., k]` times a matrix of `numel` elements, one axis of which
/// is `k`: `2 rows numel`.
pub(crate) fn rows_times<B: SumOps>(rows: &ZeroTensor<B>, numel: usize) -> u64 {
    let shape = rows.shape();
    let width = shape.as_slice().last().copied().unwrap_or(1).max(1);
    2 * (shape.num_elements() / width * numel) as u64
}

/// Returns the operations of a convolution with `output` output elements: 2 for each output and
/// each weight of its channel. `weight` is `[channels, inputs / groups, kernel ..]`.
pub(crate) fn convolution(output: usize, weight: &Shape) -> u64 {
    let channels = weight.as_slice().first().copied().unwrap_or(1).max(1);
    2 * (output * (weight.num_elements() / channels)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_convolution_counts_its_kernel_for_each_output() {
        // LeNet's first layer: 6 output channels, 1 input channel, a 5 x 5 kernel, 24 x 24 outputs.
        assert_eq!(convolution(6 * 24 * 24, &Shape::from(vec![6, 1, 5, 5])), 2 * 6 * 24 * 24 * 25);
    }
}
