//! Orthogonalised matrices, for Muon.
//!
//! Muon moves along `U V^T` where the momentum is `U S V^T`. The Newton-Schulz iteration of Jordan
//! et al. 2024 approximates it with matrix products alone. After a division by the Frobenius norm,
//! each iteration computes
//!
//! ```text
//! A = X X^T
//! X = a X + (b A + c A A) X
//! ```
//!
//! Its coefficients make small singular values grow fast, and leave all of them between about 0.7
//! and 1.2. PyTorch runs it in bf16, DeepSpeed in fp16 if the device supports it. Here it runs in
//! f32, whose rounding errors are far smaller than the error of the iteration.
//!
//! A parameter may contain several matrices side by side, such as the fused query, key and value
//! projections. Each of them is orthogonalised separately.

use burn_backend::{Shape, Slice, TensorMetadata};
use deepburn_config::{MuonScale, NewtonSchulzPlan};
use deepburn_ops::OptimizerOps;

use crate::assignment::{Matrices, MatrixLayout};

/// The peak number of elements that `orthogonalize` holds besides its operand, as a multiple of the
/// parameter's elements: the results, their concatenation, a matrix before and after an iteration,
/// and three products of its shorter side squared, none of which is larger than the matrix.
pub(crate) const WORKSPACE: u64 = 7;

/// Orthogonalises each matrix in `flat`, the values of a parameter of this shape, and returns them
/// flat. Dimensions after the first are joined, as for convolution kernels. Holds up to `WORKSPACE`
/// times as many elements.
///
/// # Panics
///
/// Panics if the shape has no dimension or its first one is 0, which `Matrices` excludes.
pub(crate) fn orthogonalize<B: OptimizerOps>(
    flat: B::FloatTensorPrimitive,
    shape: &[usize],
    matrices: Matrices,
    plan: &NewtonSchulzPlan,
) -> B::FloatTensorPrimitive {
    let numel: usize = shape.iter().product();
    let rows = shape[0];
    let columns = numel / rows;
    let whole = B::float_reshape(flat, Shape::from(vec![rows, columns]));
    // Matrices lie side by side along the outputs.
    let (axis, len) = match matrices.layout {
        MatrixLayout::InputsFirst => (1, columns / matrices.count),
        MatrixLayout::OutputsFirst => (0, rows / matrices.count),
    };
    let parts = (0..matrices.count).map(|index| {
        let mut slices = [Slice::from(0..rows), Slice::from(0..columns)];
        slices[axis] = Slice::from(index * len..(index + 1) * len);
        of_matrix::<B>(B::float_slice(whole.clone(), &slices), plan)
    });
    let parts: Vec<_> = parts.collect();
    // A single matrix needs no concatenation, which would copy it.
    let whole = match <[_; 1]>::try_from(parts) {
        Ok([only]) => only,
        Err(parts) => B::float_cat(parts, axis),
    };
    B::float_reshape(whole, Shape::from(vec![numel]))
}

/// Returns the factor of Muon's learning rate for a matrix that maps `inputs` values to `outputs`
/// values, by the formulae of [`MuonScale`].
pub(crate) fn shape_factor(scale: MuonScale, outputs: usize, inputs: usize) -> f64 {
    let (outputs, inputs) = (outputs as f64, inputs as f64);
    match scale {
        MuonScale::Original => (outputs / inputs).max(1.0).sqrt(),
        MuonScale::MatchRmsAdamw => 0.2 * outputs.max(inputs).sqrt(),
    }
}

/// Runs the iteration on one matrix of shape `[rows, columns]` and returns one of the same shape.
fn of_matrix<B: OptimizerOps>(
    matrix: B::FloatTensorPrimitive,
    plan: &NewtonSchulzPlan,
) -> B::FloatTensorPrimitive {
    let shape = matrix.shape();
    // X X^T has the size of the rows, so a tall matrix is transposed to get the smaller product.
    let is_tall = shape[0] > shape[1];
    // The norm needs flat memory. Only a part of a fused parameter is copied here, because its rows
    // are not contiguous.
    let flat = B::float_reshape(matrix, Shape::from(vec![shape.num_elements()]));
    let norm = B::gradient_stats(flat.clone()).sum_of_squares.sqrt();
    let matrix = B::float_reshape(flat, shape);
    let mut x = if is_tall { B::float_transpose(matrix) } else { matrix };
    // The Frobenius norm bounds the largest singular value, so the iteration starts within its
    // range of convergence.
    x = B::float_mul_scalar(x, (1.0 / norm.max(plan.eps)).into());
    let [a, b, c] = plan.coefficients;
    for _ in 0..plan.steps {
        let gram = B::matmul(x.clone(), B::float_transpose(x.clone()));
        let square = B::matmul(gram.clone(), gram.clone());
        let polynomial = B::float_add(
            B::float_mul_scalar(gram, b.into()),
            B::float_mul_scalar(square, c.into()),
        );
        let change = B::matmul(polynomial, x.clone());
        x = B::float_add(B::float_mul_scalar(x, a.into()), change);
    }
    if is_tall { B::float_transpose(x) } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_follows_the_shape() {
        // From 256 to 1024 values, and back.
        assert_eq!(shape_factor(MuonScale::Original, 1024, 256), 2.0);
        assert_eq!(shape_factor(MuonScale::Original, 256, 1024), 1.0);
        assert_eq!(shape_factor(MuonScale::MatchRmsAdamw, 1024, 256), 0.2 * 32.0);
        assert_eq!(shape_factor(MuonScale::MatchRmsAdamw, 256, 1024), 0.2 * 32.0);
    }
}
