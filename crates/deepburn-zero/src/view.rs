//! Views recorded on a parameter that is not whole.
//!
//! Reshaping, permuting, slicing, expanding or casting a sharded parameter moves no data. The view
//! is recorded with its shape and type, and is applied to the whole parameter when an op needs its
//! data. A linear layer that transposes its weight therefore gathers the weight once, in the
//! product.

use burn_backend::{Backend, DType, FloatDType, Shape, Slice, SliceOps, TensorMetadata};

use crate::tensor::{FullTensor, Leased};

/// One recorded view.
#[derive(Debug, Clone)]
pub(crate) enum View {
    /// To this shape, with the same number of elements.
    Reshape(Shape),
    /// Exchanges two dimensions.
    SwapDims(usize, usize),
    /// Reorders the dimensions: dimension `i` of the result is dimension `axes[i]`.
    Permute(Vec<usize>),
    /// A range of each dimension.
    Slice(Vec<Slice>),
    /// Repeats dimensions of size 1, to this complete shape.
    Expand(Shape),
    /// To another float type, in which the data is a copy.
    Cast(FloatDType),
}

impl View {
    /// Applies the view to data.
    pub(crate) fn apply<B: Backend>(
        &self,
        tensor: B::FloatTensorPrimitive,
    ) -> B::FloatTensorPrimitive {
        match self {
            Self::Reshape(shape) => B::float_reshape(tensor, shape.clone()),
            Self::SwapDims(dim1, dim2) => B::float_swap_dims(tensor, *dim1, *dim2),
            Self::Permute(axes) => B::float_permute(tensor, axes),
            Self::Slice(slices) => B::float_slice(tensor, slices),
            Self::Expand(shape) => B::float_expand(tensor, shape.clone()),
            Self::Cast(dtype) if tensor.dtype() == DType::from(*dtype) => tensor,
            Self::Cast(dtype) => B::float_cast(tensor, *dtype),
        }
    }

    /// Applies the view to data in the ledger, whose memory and lease the result shares. A cast to
    /// another type makes new data instead.
    pub(crate) fn share<B: Backend>(&self, tensor: FullTensor<B>) -> FullTensor<B> {
        let dtype = tensor.tensor.dtype();
        if self.dtype(dtype) != dtype {
            return Leased::new(self.apply::<B>(tensor.tensor));
        }
        tensor.viewed(|tensor| self.apply::<B>(tensor))
    }

    /// Returns the shape that a tensor of `shape` has after the view.
    ///
    /// # Panics
    ///
    /// Panics if the view is impossible. Burn checks arguments before it calls a backend, so this
    /// cannot happen here.
    pub(crate) fn shape(&self, shape: Shape) -> Shape {
        match self {
            Self::Reshape(shape) => shape.clone(),
            // In Burn's own order of dimensions; a partial expand has been completed before.
            Self::Expand(shape) => shape.clone(),
            Self::SwapDims(dim1, dim2) => {
                shape.swapped(*dim1, *dim2).expect("dimensions were checked by burn-tensor")
            }
            Self::Permute(axes) => shape.permuted(axes).expect("axes were checked by burn-tensor"),
            Self::Slice(slices) => shape.slice(slices).expect("slices were checked by burn-tensor"),
            Self::Cast(_) => shape,
        }
    }

    /// Returns the element type after the view.
    pub(crate) fn dtype(&self, dtype: DType) -> DType {
        match self {
            Self::Cast(cast) => (*cast).into(),
            _ => dtype,
        }
    }
}
