//! Bool tensors: masks and the results of comparisons.
//!
//! Bool tensors are never trained: a bool parameter of a module is a buffer
//! (`sharding/buffers.rs`). Results are counted in the ledger as activations. They are never
//! recomputed: a mask that autodiff saves stays in memory until backward has used it.

use burn_backend::ops::BoolTensorOps;
use burn_backend::tensor::{BoolTensor, Device, IntTensor};
use burn_backend::{BoolDType, FloatDType, IntDType, Scalar, Shape, Slice, TensorData};
use deepburn_ops::MatmulOps;

use crate::decorator::Sharded;
use crate::decorator::observer::note_bool;
use crate::decorator::ops::{forward, recorded, view};
use crate::session::Leased;

/// The table of ops whose result has newly allocated memory.
macro_rules! bool_ops {
    ($with:ident) => {
        $with! {
            fn bool_empty(shape: [Shape], device: [&Device<Self>], dtype: [BoolDType]) -> bool;
            fn bool_zeros(shape: [Shape], device: [&Device<Self>], dtype: [BoolDType]) -> bool;
            fn bool_ones(shape: [Shape], device: [&Device<Self>], dtype: [BoolDType]) -> bool;
            fn bool_from_data(data: [TensorData], device: [&Device<Self>]) -> bool;
            fn bool_into_data(tensor: bool) -> data;
            fn bool_into_int(tensor: bool, out_dtype: [IntDType]) -> int;
            fn bool_into_float(tensor: bool, out_dtype: [FloatDType]) -> float;
            fn bool_to_device(tensor: bool, device: [&Device<Self>]) -> bool;
            fn bool_slice_assign(tensor: bool, slices: [&[Slice]], value: bool) -> bool;
            fn bool_mask_where(tensor: bool, mask: bool, value: bool) -> bool;
            fn bool_mask_fill(tensor: bool, mask: bool, value: [Scalar]) -> bool;
            fn bool_gather(dim: [usize], tensor: bool, indices: int) -> bool;
            fn bool_scatter_or(dim: [usize], tensor: bool, indices: int, value: bool) -> bool;
            fn bool_select(tensor: bool, dim: [usize], indices: int) -> bool;
            fn bool_select_or(tensor: bool, dim: [usize], indices: int, value: bool) -> bool;
            fn bool_equal(lhs: bool, rhs: bool) -> bool;
            fn bool_equal_elem(lhs: bool, rhs: [Scalar]) -> bool;
            fn bool_not(tensor: bool) -> bool;
            fn bool_and(lhs: bool, rhs: bool) -> bool;
            fn bool_or(lhs: bool, rhs: bool) -> bool;
            fn bool_flip(tensor: bool, axes: [&[usize]]) -> bool;
            fn bool_unfold(tensor: bool, dim: [usize], size: [usize], step: [usize]) -> bool;
            fn bool_repeat_dim(tensor: bool, dim: [usize], times: [usize]) -> bool;
            fn bool_cat(tensors: (many bool), dim: [usize]) -> bool;
            fn bool_not_equal(lhs: bool, rhs: bool) -> bool;
            fn bool_not_equal_elem(lhs: bool, rhs: [Scalar]) -> bool;
            fn bool_xor(lhs: bool, rhs: bool) -> bool;
            fn bool_any(tensor: bool) -> bool;
            fn bool_any_dim(tensor: bool, dim: [usize]) -> bool;
            fn bool_all(tensor: bool) -> bool;
            fn bool_all_dim(tensor: bool, dim: [usize]) -> bool;
        }
    };
}
pub(crate) use bool_ops;

/// The table of ops whose result shares the memory of its operand, and therefore its ledger entry.
macro_rules! bool_view_ops {
    ($with:ident) => {
        $with! {
            fn bool_reshape(tensor: bool, shape: [Shape]) -> bool;
            fn bool_slice(tensor: bool, slices: [&[Slice]]) -> bool;
            fn bool_swap_dims(tensor: bool, dim1: [usize], dim2: [usize]) -> bool;
            fn bool_permute(tensor: bool, axes: [&[usize]]) -> bool;
            fn bool_expand(tensor: bool, shape: [Shape]) -> bool;
            fn bool_transpose(tensor: bool) -> bool;
        }
    };
}
pub(crate) use bool_view_ops;

impl<B: MatmulOps> BoolTensorOps<Sharded<B>> for Sharded<B> {
    fn bool_argwhere(
        tensor: BoolTensor<Self>,
        out_dtype: IntDType,
    ) -> impl Future<Output = IntTensor<Self>> + 'static + Send {
        let found = B::bool_argwhere(tensor.into_inner(), out_dtype);
        async move { Leased::new(found.await) }
    }

    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> {
        note_bool::<B>(&tensor.tensor);
        B::bool_device(&tensor.tensor)
    }

    bool_ops!(forward);
    bool_view_ops!(view);
}
