//! Matrix products over the last two axes of tensors with any strides and broadcast leading axes.
//!
//! A tensor of shape `[..., rows, depth]` is a list of matrices. Each product of two matrices is
//! computed by `deepburn_kernels::gemm`, which reads the operands through their strides:
//!
//! ```text
//! lhs  [2, 1, rows, depth]        product 0: lhs[0, 0] rhs[0, 0]
//! rhs  [1, 3, depth, columns]     product 1: lhs[0, 0] rhs[0, 1]
//! out  [2, 3, rows, columns]      ...
//!                                 product 5: lhs[1, 0] rhs[0, 2]
//! ```
//!
//! If there are many products, each product runs on one thread. If there are few, each product is
//! divided among all threads. Both ways give bitwise identical results, because each element is
//! always summed over the depth in the same order.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::gemm::{MatrixMut, Product, Threads};
use rayon::prelude::*;

use super::array::{OutputArray, arithmetic, is_supported, matrix_at, written};
use crate::linear::LinearOps;
use crate::matmul::MatmulOps;
use crate::quantized::QuantizedMatrix;
use crate::random::RandomOps;

/// The minimum number of products for which each product runs on one thread. With fewer products,
/// some threads would be idle.
const ENOUGH_PRODUCTS: usize = 4;

/// The number of multiplications, over all products, below which distributing the work over threads
/// costs more than it saves. burn-flex uses the same limit for batched products.
const WORTH_THREADS: usize = 128 * 128 * 128;

/// Random numbers are drawn in host memory, where the tensors are.
impl RandomOps for Flex {}

/// Operands of different types, types other than f32, f16 and bf16, vectors, and shapes that cannot
/// be broadcast use burn-flex's own product, which also reports errors.
impl MatmulOps for Flex {
    /// # Panics
    /// Panics if the depths of the operands differ.
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let ranks = [&lhs, &rhs].map(|operand| operand.shape().num_dims());
        if !is_supported(&lhs) || lhs.dtype() != rhs.dtype() || ranks.iter().any(|rank| *rank < 2) {
            return Self::float_matmul(lhs, rhs);
        }
        // A flipped axis has a negative stride, which the kernels do not support. Other strides are
        // read as they are, so transposed operands and heads of an attention are not copied.
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

    /// All leading axes are rows of one product.
    fn quantized_matmul(lhs: FloatTensor<Self>, rhs: &QuantizedMatrix<Self>) -> FloatTensor<Self> {
        let mut shape = lhs.shape().to_vec();
        let depth = shape.pop().unwrap_or(1);
        let rows = Self::float_reshape(lhs, Shape::from(vec![shape.iter().product(), depth]));
        shape.push(rhs.shape()[1]);
        Self::float_reshape(Self::quantized_linear(rows, rhs, None), Shape::from(shape))
    }
}

/// Returns the tensor with non-negative strides; copies it if one is negative.
fn forwards(tensor: FlexTensor) -> FlexTensor {
    match tensor.layout().strides().iter().all(|stride| *stride >= 0) {
        true => tensor,
        false => tensor.to_contiguous(),
    }
}

/// Returns the axes to which two lists of leading axes are broadcast; `None` if they are
/// incompatible. As in NumPy, axes are aligned at the end, missing ones count as 1, and an axis of
/// length 1 is repeated.
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

/// A batch of matrix products of two tensors.
struct Products<'a> {
    /// The left operand, with non-negative strides.
    lhs: &'a FlexTensor,
    /// The right operand, with non-negative strides.
    rhs: &'a FlexTensor,
    /// The leading axes of the result.
    batch: &'a [usize],
    /// `[rows, depth, columns]` of each product.
    shape: [usize; 3],
}

impl Products<'_> {
    /// Computes all products. A product writes `rows * columns` consecutive elements of `out`.
    fn compute(&self, out: OutputArray) {
        let count: usize = self.batch.iter().product();
        let multiplications: usize = self.shape.iter().product();
        if count >= ENOUGH_PRODUCTS && count.saturating_mul(multiplications) >= WORTH_THREADS {
            (0..count).into_par_iter().for_each(|index| self.compute_one(index, out, Threads::One));
        } else {
            // Each product is divided among all threads if it is large enough.
            (0..count).for_each(|index| self.compute_one(index, out, Threads::All));
        }
    }

    /// Computes product `index` of the flattened batch.
    fn compute_one(&self, index: usize, out: OutputArray, threads: Threads) {
        let [rows, _, columns] = self.shape;
        let operand = |tensor: &'_ FlexTensor| offset(tensor, self.batch, index);
        let [left, right] = [self.lhs, self.rhs].map(|tensor| (tensor, operand(tensor)));
        let [Some(left), Some(right)] =
            [left, right].map(|(tensor, offset)| matrix_at(tensor, offset))
        else {
            unreachable!("no stride is negative");
        };
        let target = out.at(index * rows * columns);
        // SAFETY: every product writes different elements.
        let out = unsafe { MatrixMut::from_pointer(target, rows, columns, columns) };
        Product::new(left, right, arithmetic([self.lhs.dtype(), self.rhs.dtype()]))
            .on(threads)
            .write_to(out);
    }
}

/// Returns the offset of the matrix of product `index` in a tensor whose leading axes are broadcast
/// to `batch`.
///
/// The index is divided into positions along the axes of the batch, from the last axis to the
/// first. Axes of length 1, and axes that the tensor does not have, do not add to the offset.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_axes_are_broadcast_as_in_numpy() {
        for (left, right, expected) in [
            (&[][..], &[][..], Some(vec![])),
            (&[2, 1], &[1, 3], Some(vec![2, 3])),
            (&[], &[4, 5], Some(vec![4, 5])),
            (&[5], &[4, 5], Some(vec![4, 5])),
            (&[1, 0], &[7, 1], Some(vec![7, 0])),
            (&[2], &[3], None),
            (&[4, 5], &[4], None),
        ] {
            assert_eq!(broadcast(left, right), expected, "{left:?} {right:?}");
            assert_eq!(broadcast(right, left), expected, "{right:?} {left:?}");
        }
    }
}
