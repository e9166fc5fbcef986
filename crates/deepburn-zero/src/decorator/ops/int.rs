//! Integer tensors: token ids, indices and counters.
//!
//! Integer tensors are never trained: an integer parameter of a module is a buffer
//! (`sharding/buffers.rs`). Results are counted in the ledger as activations and are never
//! recomputed.

use std::ops::Range;

use burn_backend::ops::IntTensorOps;
use burn_backend::tensor::{Device, IndexingUpdateOp, IntTensor};
use burn_backend::{
    BoolDType, Distribution, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
};
use deepburn_ops::MatmulOps;

use crate::decorator::Sharded;
use crate::decorator::observer::note_int;
use crate::decorator::ops::{forward, recorded, view};
use crate::session;
use crate::session::Leased;

/// The table of ops whose result has newly allocated memory.
macro_rules! int_ops {
    ($with:ident) => {
        $with! {
            fn int_empty(shape: [Shape], device: [&Device<Self>], dtype: [IntDType]) -> int;
            fn int_from_data(data: [TensorData], device: [&Device<Self>]) -> int;
            fn int_into_data(tensor: int) -> data;
            fn int_to_device(tensor: int, device: [&Device<Self>]) -> int;
            fn int_slice_assign(tensor: int, slices: [&[Slice]], value: int) -> int;
            fn int_into_float(tensor: int, out_dtype: [FloatDType]) -> float;
            fn int_mask_where(tensor: int, mask: bool, value: int) -> int;
            fn int_mask_fill(tensor: int, mask: bool, value: [Scalar]) -> int;
            fn int_gather(dim: [usize], tensor: int, indices: int) -> int;
            fn int_scatter_add(dim: [usize], tensor: int, indices: int, value: int) -> int;
            fn int_select(tensor: int, dim: [usize], indices: int) -> int;
            fn int_select_add(tensor: int, dim: [usize], indices: int, value: int) -> int;
            fn int_equal(lhs: int, rhs: int, out_dtype: [BoolDType]) -> bool;
            fn int_equal_elem(lhs: int, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn int_greater(lhs: int, rhs: int, out_dtype: [BoolDType]) -> bool;
            fn int_greater_elem(lhs: int, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn int_greater_equal(lhs: int, rhs: int, out_dtype: [BoolDType]) -> bool;
            fn int_greater_equal_elem(lhs: int, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn int_lower(lhs: int, rhs: int, out_dtype: [BoolDType]) -> bool;
            fn int_lower_elem(lhs: int, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn int_lower_equal(lhs: int, rhs: int, out_dtype: [BoolDType]) -> bool;
            fn int_lower_equal_elem(lhs: int, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn int_add(lhs: int, rhs: int) -> int;
            fn int_add_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn int_sub(lhs: int, rhs: int) -> int;
            fn int_sub_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn int_mul(lhs: int, rhs: int) -> int;
            fn int_mul_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn int_div(lhs: int, rhs: int) -> int;
            fn int_div_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn int_remainder(lhs: int, rhs: int) -> int;
            fn int_remainder_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn int_matmul(lhs: int, rhs: int) -> int;
            fn int_sum(tensor: int) -> int;
            fn int_sum_dim(tensor: int, dim: [usize]) -> int;
            fn int_prod(tensor: int) -> int;
            fn int_prod_dim(tensor: int, dim: [usize]) -> int;
            fn int_mean_dim(tensor: int, dim: [usize]) -> int;
            fn int_cumsum(tensor: int, dim: [usize]) -> int;
            fn int_cumprod(tensor: int, dim: [usize]) -> int;
            fn int_cummin(tensor: int, dim: [usize]) -> int;
            fn int_cummax(tensor: int, dim: [usize]) -> int;
            fn int_argmax(tensor: int, dim: [usize]) -> int;
            fn int_argtopk(tensor: int, dim: [usize], k: [usize]) -> int;
            fn int_argmin(tensor: int, dim: [usize]) -> int;
            fn int_abs(tensor: int) -> int;
            fn int_flip(tensor: int, axes: [&[usize]]) -> int;
            fn bitwise_and(lhs: int, rhs: int) -> int;
            fn bitwise_and_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn bitwise_or(lhs: int, rhs: int) -> int;
            fn bitwise_or_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn bitwise_xor(lhs: int, rhs: int) -> int;
            fn bitwise_xor_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn bitwise_not(tensor: int) -> int;
            fn bitwise_left_shift(lhs: int, rhs: int) -> int;
            fn bitwise_left_shift_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn bitwise_right_shift(lhs: int, rhs: int) -> int;
            fn bitwise_right_shift_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn int_cast(tensor: int, dtype: [IntDType]) -> int;
            fn int_unfold(tensor: int, dim: [usize], size: [usize], step: [usize]) -> int;
            fn int_scatter_nd(data: int, indices: int, values: int, reduction: [IndexingUpdateOp]) -> int;
            fn int_gather_nd(data: int, indices: int) -> int;
            fn int_repeat_dim(tensor: int, dim: [usize], times: [usize]) -> int;
            fn int_cat(tensors: (many int), dim: [usize]) -> int;
            fn int_not_equal(lhs: int, rhs: int, out_dtype: [BoolDType]) -> bool;
            fn int_not_equal_elem(lhs: int, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn int_powi(lhs: int, rhs: int) -> int;
            fn int_powi_scalar(lhs: int, rhs: [Scalar]) -> int;
            fn int_powi_scalar_impl(lhs: int, rhs: [Scalar]) -> int;
            fn int_clamp_min(tensor: int, min: [Scalar]) -> int;
            fn int_clamp_max(tensor: int, max: [Scalar]) -> int;
            fn int_clamp(tensor: int, min: [Scalar], max: [Scalar]) -> int;
            fn int_neg(tensor: int) -> int;
            fn int_zeros(shape: [Shape], device: [&Device<Self>], dtype: [IntDType]) -> int;
            fn int_ones(shape: [Shape], device: [&Device<Self>], dtype: [IntDType]) -> int;
            fn int_full(shape: [Shape], fill_value: [Scalar], device: [&Device<Self>], dtype: [IntDType]) -> int;
            fn int_mean(tensor: int) -> int;
            fn int_topk(tensor: int, dim: [usize], k: [usize]) -> int;
            fn int_max(tensor: int) -> int;
            fn int_max_dim(tensor: int, dim: [usize]) -> int;
            fn int_max_dim_with_indices(tensor: int, dim: [usize]) -> (int, int);
            fn int_max_abs(tensor: int) -> int;
            fn int_max_abs_dim(tensor: int, dim: [usize]) -> int;
            fn int_min(tensor: int) -> int;
            fn int_min_dim(tensor: int, dim: [usize]) -> int;
            fn int_min_dim_with_indices(tensor: int, dim: [usize]) -> (int, int);
            fn int_arange_step(range: [Range<i64>], step: [usize], device: [&Device<Self>], dtype: [IntDType]) -> int;
            fn int_arange(range: [Range<i64>], device: [&Device<Self>], dtype: [IntDType]) -> int;
            fn int_any(tensor: int, out_dtype: [BoolDType]) -> bool;
            fn int_any_dim(tensor: int, dim: [usize], out_dtype: [BoolDType]) -> bool;
            fn int_all(tensor: int, out_dtype: [BoolDType]) -> bool;
            fn int_all_dim(tensor: int, dim: [usize], out_dtype: [BoolDType]) -> bool;
            fn int_sign(tensor: int) -> int;
            fn int_sort(tensor: int, dim: [usize], descending: [bool]) -> int;
            fn int_sort_with_indices(tensor: int, dim: [usize], descending: [bool]) -> (int, int);
            fn int_argsort(tensor: int, dim: [usize], descending: [bool]) -> int;
        }
    };
}
pub(crate) use int_ops;

/// The table of ops whose result shares the memory of its operand, and therefore its ledger entry.
macro_rules! int_view_ops {
    ($with:ident) => {
        $with! {
            fn int_reshape(tensor: int, shape: [Shape]) -> int;
            fn int_slice(tensor: int, slices: [&[Slice]]) -> int;
            fn int_swap_dims(tensor: int, dim1: [usize], dim2: [usize]) -> int;
            fn int_permute(tensor: int, axes: [&[usize]]) -> int;
            fn int_expand(tensor: int, shape: [Shape]) -> int;
            fn int_transpose(tensor: int) -> int;
        }
    };
}
pub(crate) use int_view_ops;

impl<B: MatmulOps> IntTensorOps<Sharded<B>> for Sharded<B> {
    fn int_device(tensor: &IntTensor<Self>) -> Device<Self> {
        note_int::<B>(&tensor.tensor);
        B::int_device(&tensor.tensor)
    }

    /// Draws from the stream of this rank. Integers are drawn as 64-bit numbers and converted, so
    /// the stream advances by the same number of words for every integer type. The op is not
    /// recorded, because results other than floats stay in memory.
    fn int_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: IntDType,
    ) -> IntTensor<Self> {
        Leased::new(
            match session::with_random(|random| random.draw::<i64>(shape.clone(), distribution)) {
                Some(data) => B::int_from_data(data.convert_dtype(dtype.into()), device),
                None => B::int_random(shape, distribution, device, dtype),
            },
        )
    }

    int_ops!(forward);
    int_view_ops!(view);
}
