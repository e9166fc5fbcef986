//! Rotary position embeddings (Su et al. 2021): the heads of queries and keys are rotated by angles
//! that grow with the position.
//!
//! Main trait: [`RotaryOps`]. Element `i` of the first half of a head's rotated elements and
//! element `i` of the second half are the coordinates of a point. The backward pass rotates by the
//! negative angles and needs the table of sines and cosines only.
//!
//! ```text
//! a row of x     | head 0        | head 1        | ... | columns that are not rotated |
//! a head         | x_0 .. x_h-1 | y_0 .. y_h-1 | elements that are not rotated |
//! its result       x cos - y sin   y cos + x sin
//! ```

use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::Backward;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::autodiff_step::{backward_step, record};
use crate::portable;

/// The heads of a row that are rotated: its first columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotatedHeads {
    /// The number of heads.
    pub heads: usize,
    /// The number of columns of a head.
    pub width: usize,
}

impl RotatedHeads {
    /// Checks the shapes of `x` and of a table.
    ///
    /// # Panics
    /// Panics if a row has fewer columns than the heads, a head fewer than the rotated elements, or
    /// the table another number of positions than sequences of the rows can have.
    pub(crate) fn check(self, [rows, columns]: [usize; 2], [positions, half]: [usize; 2]) {
        // Without rows there is nothing to rotate, so a table may have any number of positions.
        let fits = self.heads * self.width <= columns
            && 2 * half <= self.width
            && (rows == 0 || positions > 0 && rows % positions == 0);
        assert!(
            fits,
            "{self:?} of [{rows}, {columns}] are not rotated by a table of [{positions}, {half}]"
        );
    }
}

/// Rotary embeddings of the rows of a matrix. Computed in at least f32 and rounded once, with sines
/// and cosines that are rounded to the type of the matrix first, as in `transformers`.
pub trait RotaryOps: Backend {
    /// Rotates the first heads of each row of `x` `[rows, columns]`. `cos` and `sin` are
    /// `[positions, pairs]`: row `i` of `x` has the angles of position `i % positions`. Autodiff
    /// records this method, with respect to `x`.
    ///
    /// An implementation may update `x` in place.
    fn rotate_heads(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        portable::rotary::rotate::<Self>(x, cos, sin, heads)
    }

    /// Returns the gradient with respect to `x`: `grad`, rotated by the negative angles.
    ///
    /// An implementation may update `grad` in place.
    fn rotate_heads_back(
        grad: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        portable::rotary::rotate_back::<Self>(grad, cos, sin, heads)
    }
}

backward_step! {
    /// The autodiff step. Its parent is `x`.
    RotaryStep<1>: RotaryOps,
    |grad, (cos, sin, heads): (FloatTensor<B>, FloatTensor<B>, RotatedHeads)| {
        [B::rotate_heads_back(grad, cos, sin, heads)]
    }
}

/// The table is a constant.
impl<B: RotaryOps, C: CheckpointStrategy> RotaryOps for Autodiff<B, C> {
    fn rotate_heads(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        record(
            RotaryStep.prepare::<C>([x.node]),
            (x.primitive, cos.primitive, sin.primitive),
            |(x, cos, sin)| {
                let output = B::rotate_heads(x, cos.clone(), sin.clone(), heads);
                ((cos, sin, heads), output)
            },
            |(x, cos, sin)| B::rotate_heads(x, cos, sin, heads),
        )
    }
}

/// Rotates the first heads of each row of `x` `[rows, columns]`. `cos` and `sin` are
/// `[positions, pairs]`: row `i` of `x` has the angles of position `i % positions`. They get no
/// gradient.
///
/// # Panics
/// Panics if the heads do not fit in a row, the pairs do not fit in a head, or the number of rows
/// is not a multiple of the positions.
pub fn rotate_heads<B: RotaryOps>(
    x: Tensor<B, 2>,
    cos: Tensor<B, 2>,
    sin: Tensor<B, 2>,
    heads: RotatedHeads,
) -> Tensor<B, 2> {
    let [x, cos, sin] = [x, cos, sin].map(portable::primitive);
    portable::tensor(B::rotate_heads(x, cos, sin, heads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_and_positions_have_to_fit() {
        let heads = RotatedHeads { heads: 2, width: 4 };
        for (shape, table, fits) in [
            ([6, 8], [3, 2], true),
            ([6, 9], [6, 1], true),
            ([0, 8], [0, 2], true),
            ([6, 7], [3, 2], false),
            ([6, 8], [3, 3], false),
            ([6, 8], [4, 2], false),
            ([6, 8], [0, 2], false),
        ] {
            let checked = std::panic::catch_unwind(|| heads.check(shape, table));
            assert_eq!(checked.is_ok(), fits, "{shape:?} {table:?}");
        }
    }
}
