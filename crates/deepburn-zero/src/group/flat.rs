//! Flat views of tensors.
//!
//! Parameters, gradients and optimizer arrays are sharded in their flat (row-major) order. The
//! functions flatten and slice in the order that avoids copies for the shape of the tensor.

use std::ops::Range;

use burn_backend::{Backend, DType, FloatDType, Shape, Slice, TensorMetadata};
use deepburn_ops::SumOps;

/// Casts the tensor to `dtype`. A tensor that already has this type is returned unchanged.
pub(crate) fn in_type<B: Backend>(
    tensor: B::FloatTensorPrimitive,
    dtype: FloatDType,
) -> B::FloatTensorPrimitive {
    if tensor.dtype() == DType::from(dtype) { tensor } else { B::float_cast(tensor, dtype) }
}

/// Returns the tensor with one axis.
///
/// A flat tensor is returned unchanged instead of being reshaped to its own shape: flex's reshape
/// copies a view that does not begin at the start of its memory.
pub(crate) fn flattened<B: SumOps>(tensor: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
    let shape = tensor.shape();
    match shape.num_dims() {
        1 => tensor,
        _ => B::reshape(tensor, Shape::from(vec![shape.num_elements()])),
    }
}

/// Returns elements `range` of the flat order of `tensor` as a flat tensor. The result is a view if
/// `tensor` is flat. Otherwise at most the rows that overlap the range are copied.
///
/// ```text
///  range      ····[  ··· ··· ··  ]····       elements 6..16 of rows of 4
///  rows       [ 4 5 6 7 ][ 8 … 11 ][ 12 … 15 ]      sliced first: rows 1..4
///  result         [ 6 7    8 … 11    12 … 15 ]      then flattened and narrowed
/// ```
///
/// Complete rows are sliced before flattening, because flattening copies a tensor that is not
/// contiguous, such as the gradient of a transposed weight. In this order only the overlapping rows
/// are copied.
pub(crate) fn flat_range<B: SumOps>(
    tensor: &B::FloatTensorPrimitive,
    range: Range<usize>,
) -> B::FloatTensorPrimitive {
    let shape = tensor.shape();
    if shape.num_dims() == 1 {
        return narrow::<B>(tensor.clone(), range);
    }
    // At least 1, so that an empty axis does not lead to a division by 0.
    let row_len = shape.iter().skip(1).product::<usize>().max(1);
    let rows = range.start / row_len..range.end.div_ceil(row_len);
    let skipped = rows.start * row_len;
    let cut = if shape.num_dims() > 0 && rows != (0..shape[0]) {
        let mut slices = vec![Slice::from(rows.clone())];
        slices.extend(shape.iter().skip(1).map(|&len| Slice::from(0..len)));
        B::slice(tensor.clone(), &slices)
    } else {
        tensor.clone()
    };
    narrow::<B>(flattened::<B>(cut), range.start - skipped..range.end - skipped)
}

/// Returns a view of elements `range` of a flat tensor, or the tensor itself if the range covers
/// it.
pub(crate) fn narrow<B: SumOps>(
    flat: B::FloatTensorPrimitive,
    range: Range<usize>,
) -> B::FloatTensorPrimitive {
    if range == (0..flat.shape().num_elements()) {
        return flat;
    }
    B::slice(flat, &[Slice::from(range)])
}

/// Pads a flat tensor with zeros to `len` elements. All shards of a parameter have the same length,
/// so the last shards need padding.
pub(crate) fn pad<B: SumOps>(flat: B::FloatTensorPrimitive, len: usize) -> B::FloatTensorPrimitive {
    let missing = len - flat.shape().num_elements();
    if missing == 0 {
        return flat;
    }
    let zeros =
        B::float_zeros(Shape::from(vec![missing]), &B::float_device(&flat), flat.dtype().into());
    B::concat(vec![flat, zeros], 0)
}

/// Returns a placeholder with the length, type and device of an array to receive. It is an expanded
/// view of a single element, so it takes almost no memory.
pub(crate) fn elements_to_come<B: Backend>(
    numel: usize,
    dtype: FloatDType,
    device: &B::Device,
) -> B::FloatTensorPrimitive {
    let shape = |len| Shape::from(vec![len]);
    match numel {
        // An expanded view needs more than one element to save memory.
        0 | 1 => B::float_zeros(shape(numel), device, dtype),
        _ => B::float_expand(B::float_zeros(shape(1), device, dtype), shape(numel)),
    }
}
