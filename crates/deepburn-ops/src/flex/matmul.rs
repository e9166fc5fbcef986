//! Products of tensors with any strides.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::gemm::{MatrixMut, Product, Threads};
use rayon::prelude::*;

use super::array::{Output, arithmetic, is_supported, matrix_at, written};
use crate::matmul::MatmulOps;

/// Products from which on each is one thread's work; fewer are each divided among the threads.
const ENOUGH_PRODUCTS: usize = 4;

/// Multiplications below which handing work over costs more than it saves, as burn-flex has it for many products.
const WORTH_THREADS: usize = 128 * 128 * 128;

impl MatmulOps for Flex {
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let ranks = [&lhs, &rhs].map(|operand| operand.shape().num_dims());
        if !is_supported(&lhs) || lhs.dtype() != rhs.dtype() || ranks.iter().any(|rank| *rank < 2) {
            return Self::float_matmul(lhs, rhs);
        }
        let [lhs, rhs] = [lhs, rhs].map(forwards);
        let (left, right) = (lhs.shape(), rhs.shape());
        let [rows, depth] = [left[ranks[0] - 2], left[ranks[0] - 1]];
        let columns = right[ranks[1] - 1];
        assert_eq!(depth, right[ranks[1] - 2], "matmul: {left:?} times {right:?}");
        let Some(batch) = broadcast(&left[..ranks[0] - 2], &right[..ranks[1] - 2]) else {
            return Self::float_matmul(lhs, rhs);
        };
        let shape: Vec<usize> = batch.iter().copied().chain([rows, columns]).collect();
        let products =
            Products { lhs: &lhs, rhs: &rhs, batch: &batch, shape: [rows, depth, columns] };
        written(Shape::from(shape), lhs.dtype(), |out| products.compute(out))
    }
}

/// The tensor without negative strides.
fn forwards(tensor: FlexTensor) -> FlexTensor {
    match tensor.layout().strides().iter().all(|stride| *stride >= 0) {
        true => tensor,
        false => tensor.to_contiguous(),
    }
}

/// Axes that two lists of axes are repeated to; `None` if they do not fit.
fn broadcast(left: &[usize], right: &[usize]) -> Option<Vec<usize>> {
    let rank = left.len().max(right.len());
    let at = |axes: &[usize], axis: usize| {
        (axis + axes.len()).checked_sub(rank).map_or(1, |axis| axes[axis])
    };
    (0..rank)
        .map(|axis| match [at(left, axis), at(right, axis)] {
            [left, right] if left == right => Some(left),
            [1, other] | [other, 1] => Some(other),
            _ => None,
        })
        .collect()
}

/// The products of two tensors' matrices.
struct Products<'a> {
    lhs: &'a FlexTensor,
    rhs: &'a FlexTensor,
    batch: &'a [usize],
    /// `[rows, depth, columns]` of each.
    shape: [usize; 3],
}

impl Products<'_> {
    fn compute(&self, out: Output) {
        let count: usize = self.batch.iter().product();
        let multiplications: usize = self.shape.iter().product();
        if count >= ENOUGH_PRODUCTS && count.saturating_mul(multiplications) >= WORTH_THREADS {
            (0..count).into_par_iter().for_each(|index| self.compute_one(index, out, Threads::One));
        } else {
            (0..count).for_each(|index| self.compute_one(index, out, Threads::All));
        }
    }

    fn compute_one(&self, index: usize, out: Output, threads: Threads) {
        let [rows, _, columns] = self.shape;
        let operand = |tensor: &'_ FlexTensor| offset(tensor, self.batch, index);
        let [left, right] = [self.lhs, self.rhs].map(|tensor| (tensor, operand(tensor)));
        let [Some(left), Some(right)] =
            [left, right].map(|(tensor, offset)| matrix_at(tensor, offset))
        else {
            unreachable!("no stride is negative");
        };
        let target = out.at(index * rows * columns);
        // SAFETY: every product has elements of its own.
        let out = unsafe { MatrixMut::from_pointer(target, rows, columns, columns) };
        Product::new(left, right, arithmetic([self.lhs.dtype(), self.rhs.dtype()]))
            .on(threads)
            .write_to(out);
    }
}

/// Where the matrix of product `index` begins in a tensor whose leading axes are repeated to `batch`.
fn offset(tensor: &FlexTensor, batch: &[usize], index: usize) -> usize {
    let (shape, strides) = (tensor.shape(), tensor.layout().strides());
    let own = shape.num_dims() - 2;
    let mut remaining = index;
    let mut offset = 0;
    for axis in (0..batch.len()).rev() {
        let position = remaining % batch[axis];
        remaining /= batch[axis];
        if let Some(axis) = (axis + own).checked_sub(batch.len()).filter(|axis| shape[*axis] > 1) {
            offset += position * strides[axis].unsigned_abs();
        }
    }
    offset
}
