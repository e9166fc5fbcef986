//! Orthogonalized matrices, for Muon.
//!
//! If the momentum has the singular value decomposition `U S V^T`, the update direction of Muon is
//! `U V^T`. The Newton-Schulz iteration of Jordan et al. 2024 approximates it with matrix products
//! only. The matrix is divided by its Frobenius norm, and each iteration then computes
//!
//! ```text
//! A = X X^T
//! X = a X + (b A + c A A) X
//! ```
//!
//! The coefficients make small singular values grow fast, and all of them end between about 0.7 and
//! 1.2. PyTorch runs the iteration in bf16, and DeepSpeed in fp16 if the device supports it. Here
//! it runs in f32, whose rounding errors are far smaller than the error of the iteration.
//!
//! A parameter may consist of several matrices, such as the fused query, key and value projections.
//! Each matrix is orthogonalized separately.

use burn_backend::{Shape, Slice, TensorMetadata};
use deepburn_config::{MuonScale, NewtonSchulzPlan};
use deepburn_ops::OptimizerOps;

use crate::assignment::{Matrices, MatrixLayout};

/// The peak memory of `orthogonalize` besides its operand, as a multiple of the parameter's size.
/// It covers the results, their concatenation, a matrix before and after an iteration, and three
/// square products of the shorter side, none of which is larger than the matrix.
pub(crate) const WORKSPACE: u64 = 7;

/// Orthogonalizes each matrix in `flat`, the values of a parameter of this shape, and returns the
/// flat result. Dimensions after the first are merged, as for convolution kernels. The function
/// needs memory for up to `WORKSPACE` times the number of elements.
///
/// # Panics
/// Panics if the shape has no dimension or its first dimension is 0, which `Matrices` excludes.
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
    // The matrices are concatenated along the output dimension.
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

//= torch 2.9.0 optim/_muon.py _adjust_lr
/// Returns the factor of Muon's learning rate for a matrix that maps `inputs` values to `outputs`
/// values, by the formulae of [`MuonScale`].
pub(crate) fn shape_factor(scale: MuonScale, outputs: usize, inputs: usize) -> f64 {
    let (outputs, inputs) = (outputs as f64, inputs as f64);
    match scale {
        MuonScale::Original => (outputs / inputs).max(1.0).sqrt(),
        MuonScale::MatchRmsAdamw => 0.2 * outputs.max(inputs).sqrt(),
    }
}

//= torch 2.9.0 optim/_muon.py _zeropower_via_newtonschulz
/// Runs the iteration on one matrix of shape `[rows, columns]` and returns one of the same shape.
fn of_matrix<B: OptimizerOps>(
    matrix: B::FloatTensorPrimitive,
    plan: &NewtonSchulzPlan,
) -> B::FloatTensorPrimitive {
    let shape = matrix.shape();
    // X X^T is square with one row per row of X. A tall matrix is transposed, so that the product
    // is smaller.
    let is_tall = shape[0] > shape[1];
    // The norm needs contiguous memory. The reshape copies only slices of fused parameters, which
    // are not contiguous.
    let flat = B::float_reshape(matrix, Shape::from(vec![shape.num_elements()]));
    let [stats] = B::gradient_stats(1, &|_| flat.clone())[..] else {
        unreachable!("statistics of one array were asked for")
    };
    let norm = stats.sum_of_squares.sqrt();
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

    //= torch 2.9.0 optim/_muon.py _adjust_lr
    #[test]
    fn the_learning_rate_follows_the_shape() {
        // Layers from 256 to 1024 features and from 1024 to 256.
        assert_eq!(shape_factor(MuonScale::Original, 1024, 256), 2.0);
        assert_eq!(shape_factor(MuonScale::Original, 256, 1024), 1.0);
        assert_eq!(shape_factor(MuonScale::MatchRmsAdamw, 1024, 256), 0.2 * 32.0);
        assert_eq!(shape_factor(MuonScale::MatchRmsAdamw, 256, 1024), 0.2 * 32.0);
    }
}
