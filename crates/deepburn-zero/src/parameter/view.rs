//! Lazy views of sharded parameters.
//!
//! Reshaping, permuting, slicing, expanding or casting a sharded parameter does not read it. The
//! view is recorded on the handle and applied to the whole parameter when an op reads it:
//!
//! ```text
//!  weight [768, 2304], sharded
//!    .transpose()        SwapDims(0, 1)        shape [2304, 768]
//!    .cast(bf16)         Cast(BF16)            shape [2304, 768], bf16
//!  matmul reads it       gather, swap, cast
//! ```
//!
//! A view of data shares the memory, except for a cast to another type. The shape and the type of
//! the result are known without the data, so autodiff and the model can request them at any time.

use burn_backend::{DType, FloatDType, Shape, Slice, SliceOps, TensorMetadata};
use deepburn_ops::SumOps;

use crate::session::{FullTensor, Leased};

/// A view: an op whose result has elements of its operand in another shape, order or type.
#[derive(Debug, Clone)]
pub enum View {
    /// Elements in the same flat order, in this shape.
    Reshape(Shape),
    /// Two axes swapped.
    SwapDims(usize, usize),
    /// Axis `i` of the result is axis `axes[i]` of the operand.
    Permute(Vec<usize>),
    /// A range of each axis.
    Slice(Vec<Slice>),
    /// Axes of length 1 repeated to this complete shape.
    Expand(Shape),
    /// Elements in another type. The only view that may need new memory.
    Cast(FloatDType),
}

impl View {
    /// Applies the view to data of the inner backend. A cast to the type that the data already has
    /// does nothing.
    pub(crate) fn apply<B: SumOps>(
        &self,
        tensor: B::FloatTensorPrimitive,
    ) -> B::FloatTensorPrimitive {
        match self {
            Self::Reshape(shape) => B::reshape(tensor, shape.clone()),
            Self::SwapDims(dim1, dim2) => B::float_swap_dims(tensor, *dim1, *dim2),
            Self::Permute(axes) => B::float_permute(tensor, axes),
            Self::Slice(slices) => B::slice(tensor, slices),
            Self::Expand(shape) => B::float_expand(tensor, shape.clone()),
            Self::Cast(dtype) if tensor.dtype() == DType::from(*dtype) => tensor,
            Self::Cast(dtype) => B::float_cast(tensor, *dtype),
        }
    }

    /// Applies the view to data with a ledger entry. The result shares the memory and the entry. A
    /// cast to another type creates data with a separate entry.
    pub(crate) fn share<B: SumOps>(&self, tensor: FullTensor<B>) -> FullTensor<B> {
        match self {
            Self::Cast(dtype) if tensor.tensor.dtype() != DType::from(*dtype) => {
                Leased::new(self.apply::<B>(tensor.tensor))
            }
            _ => tensor.viewed(|tensor| self.apply::<B>(tensor)),
        }
    }

    /// Returns whether a matrix of `shape` is transposed by `views`; `None` if they do more than
    /// transpose it, add axes of length 1 in front, or cast it.
    pub(crate) fn transpositions(views: &[Self], shape: &Shape) -> Option<bool> {
        let mut shape = shape.clone();
        let mut is_transposed = false;
        for view in views {
            let viewed = view.shape(shape.clone());
            // The last two axes are the matrix. A view with fewer axes is not a matrix.
            let last = viewed.num_dims().checked_sub(2)?;
            let is_same = match view {
                Self::Cast(_) => true,
                // Even a slice of all elements may reverse an axis.
                Self::Slice(_) => false,
                Self::Reshape(_) | Self::Expand(_) => {
                    let axes = viewed.as_slice();
                    axes[..last].iter().all(|len| *len == 1)
                        && shape.as_slice().ends_with(&axes[last..])
                }
                Self::SwapDims(first, second) => {
                    is_transposed ^= first != second;
                    first == second
                        || [first.min(second), first.max(second)] == [&last, &(last + 1)]
                }
                Self::Permute(axes) => {
                    let swaps = axes[last..] == [last + 1, last];
                    is_transposed ^= swaps;
                    swaps || axes[last..] == [last, last + 1]
                }
            };
            if !is_same {
                return None;
            }
            shape = viewed;
        }
        Some(is_transposed)
    }

    /// Returns the shape of the result for an operand of `shape`.
    ///
    /// # Panics
    /// Panics if the view is invalid for this shape. Burn checks arguments before it calls a
    /// backend, so this does not happen.
    pub(crate) fn shape(&self, shape: Shape) -> Shape {
        match self {
            Self::Reshape(shape) => shape.clone(),
            // Burn completes a partial shape before it calls the backend.
            Self::Expand(shape) => shape.clone(),
            Self::SwapDims(dim1, dim2) => {
                shape.swapped(*dim1, *dim2).expect("dimensions were checked by burn-tensor")
            }
            Self::Permute(axes) => shape.permuted(axes).expect("axes were checked by burn-tensor"),
            Self::Slice(slices) => shape.slice(slices).expect("slices were checked by burn-tensor"),
            Self::Cast(_) => shape,
        }
    }

    /// Returns the view that undoes this one for an operand of shape `before`. Only views that keep
    /// all elements have one.
    ///
    /// # Panics
    /// Panics for slices, expanded axes and casts.
    pub(crate) fn inverse(&self, before: &Shape) -> Self {
        match self {
            Self::Reshape(_) => Self::Reshape(before.clone()),
            Self::SwapDims(dim1, dim2) => Self::SwapDims(*dim1, *dim2),
            Self::Permute(axes) => {
                let mut inverse = vec![0; axes.len()];
                axes.iter().enumerate().for_each(|(place, axis)| inverse[*axis] = place);
                Self::Permute(inverse)
            }
            Self::Slice(_) | Self::Expand(_) | Self::Cast(_) => {
                unreachable!("a view that drops or repeats elements cannot be undone")
            }
        }
    }

    /// Returns the element type of the result for an operand of `dtype`.
    pub(crate) fn dtype(&self, dtype: DType) -> DType {
        match self {
            Self::Cast(cast) => (*cast).into(),
            _ => dtype,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transpositions(views: &[View]) -> Option<bool> {
        View::transpositions(views, &Shape::from(vec![3, 5]))
    }

    #[test]
    fn views_that_keep_a_matrix() {
        let reshape = |shape: &[usize]| View::Reshape(Shape::from(shape.to_vec()));
        let swap = || View::SwapDims(0, 1);
        assert_eq!(transpositions(&[]), Some(false));
        assert_eq!(transpositions(&[swap()]), Some(true));
        assert_eq!(transpositions(&[View::SwapDims(1, 0), swap()]), Some(false));
        assert_eq!(transpositions(&[swap(), reshape(&[1, 5, 3])]), Some(true));
        assert_eq!(transpositions(&[reshape(&[1, 3, 5]), View::SwapDims(2, 1)]), Some(true));
        assert_eq!(transpositions(&[View::Permute(vec![1, 0])]), Some(true));
        assert_eq!(transpositions(&[View::Permute(vec![0, 1])]), Some(false));
        let cast = View::Cast(FloatDType::BF16);
        assert_eq!(transpositions(&[cast, View::Expand(Shape::from(vec![1, 3, 5]))]), Some(false));
    }

    #[test]
    fn views_that_need_the_elements() {
        let reshape = |shape: &[usize]| View::Reshape(Shape::from(shape.to_vec()));
        // A slice of all elements may reverse them.
        for view in [
            reshape(&[5, 3]),
            reshape(&[15]),
            reshape(&[3, 5, 1]),
            View::Expand(Shape::from(vec![2, 3, 5])),
            View::Slice(vec![Slice::from(0..2), Slice::from(0..5)]),
            View::Slice(vec![Slice::new(0, None, -1), Slice::from(0..5)]),
        ] {
            assert_eq!(transpositions(&[view]), None);
        }
        let unsqueezed = reshape(&[1, 3, 5]);
        assert_eq!(transpositions(&[unsqueezed.clone(), View::SwapDims(0, 1)]), None);
        assert_eq!(transpositions(&[unsqueezed, View::Permute(vec![2, 1, 0])]), None);
    }
}
