//! Sums in a fixed order, and the parts of tensors and their concatenations.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Shape, Slice, TensorMetadata};

use crate::rows::{RowBlock, add_rows_on_host};

/// Sums in a fixed order, and the division and concatenation of tensors: what collectives compute,
/// and what autodiff records of a concatenation.
pub trait SumOps: Backend {
    /// Returns the sum of all elements, `[1]`, in the type of the tensor. The provided method calls
    /// [`FloatTensorOps::float_sum`](burn_backend::ops::FloatTensorOps::float_sum). A backend
    /// overrides it if that op adds partial sums in the order in which they happen to be computed,
    /// as atomic additions on a device do.
    fn sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_sum(tensor)
    }

    /// Returns the mean of all elements, `[1]`, in the type of the tensor. The provided method
    /// calls [`FloatTensorOps::float_mean`](burn_backend::ops::FloatTensorOps::float_mean). A
    /// backend overrides it if that op has no fixed order.
    fn mean(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_mean(tensor)
    }

    /// Returns the sum of flat tensors of one type, length and device, divided by `divisor`, in new
    /// memory of `len` elements that ends with zeros. The parts are added in their order in f32,
    /// and the quotient is rounded once.
    ///
    /// Returns `None` if the backend has no kernel for these parts. The caller then uses ops for
    /// the conversions, the additions and the division, with the same result.
    fn sum_of_parts(
        _parts: &[FloatTensor<Self>],
        _divisor: f32,
        _len: usize,
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// Adds each of `terms` to the sum at its place, in the type of the sum. Both are flat and of
    /// equal length.
    fn add_terms(
        sums: Vec<FloatTensor<Self>>,
        terms: Vec<FloatTensor<Self>>,
    ) -> Vec<FloatTensor<Self>> {
        add_each::<Self>(sums, terms)
    }

    /// Returns the elements in the same flat order in another shape, as a view if the backend can.
    fn reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        Self::float_reshape(tensor, shape)
    }

    /// Returns the slice of a tensor, as a view if the backend can.
    fn slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self> {
        Self::float_slice(tensor, slices)
    }

    /// Concatenates tensors of one type and device, of which there is at least one, along axis
    /// `dim`, in new memory. Their other axes are equal.
    fn concat(parts: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        Self::float_cat(parts, dim)
    }

    /// Adds the rows of each block to `sum`, a flat tensor of elements `start..` of a table in flat
    /// order. Rows outside of this part are ignored, and a row that crosses an end of it is cut.
    ///
    /// Additions are in f32: rows are added one by one, blocks in their order and the rows of a
    /// block in theirs. The result has these bits on every device. The provided method computes in
    /// host memory; a backend overrides it if `sum` would have to be copied there and back.
    fn add_rows(
        sum: FloatTensor<Self>,
        start: usize,
        blocks: Vec<RowBlock<Self>>,
    ) -> FloatTensor<Self> {
        add_rows_on_host::<Self>(sum, start, &blocks)
    }
}

/// Implements [`SumOps::add_terms`] with an addition for each term, and a cast if the types differ.
pub(crate) fn add_each<B: Backend>(
    sums: Vec<FloatTensor<B>>,
    terms: Vec<FloatTensor<B>>,
) -> Vec<FloatTensor<B>> {
    let add = |(sum, term): (FloatTensor<B>, FloatTensor<B>)| {
        let term = match term.dtype() == sum.dtype() {
            true => term,
            false => B::float_cast(term, sum.dtype().into()),
        };
        B::float_add(sum, term)
    };
    sums.into_iter().zip(terms).map(add).collect()
}

/// Autodiff records `float_sum` and `float_mean`, which call the same ops of the backend below.
/// Decorators of `deepburn-zero` compute these with [`sum`](SumOps::sum) and
/// [`mean`](SumOps::mean), and views and concatenations with
/// [`reshape`](SumOps::reshape), [`slice`](SumOps::slice) and [`concat`](SumOps::concat).
impl<B: SumOps, C: CheckpointStrategy> SumOps for Autodiff<B, C> {}
