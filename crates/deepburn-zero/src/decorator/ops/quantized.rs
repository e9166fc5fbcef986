//! Quantized tensors.
//!
//! Quantized tensors are passed to the inner backend unchanged. They are not sharded, trained or
//! counted in the ledger. Dequantized results are float tensors of this backend with a ledger
//! entry.

use burn_backend::ops::QTensorOps;
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{Device, QuantizedTensor};
use burn_backend::{BoolDType, FloatDType, IntDType, Scalar, Shape, Slice, TensorData};
use deepburn_ops::MatmulOps;

use crate::decorator::Sharded;
use crate::decorator::ops::{forward, recorded};

/// The table of Burn's `QTensorOps`; see [`ops`](crate::decorator::ops) for its syntax.
macro_rules! quantized_ops {
    ($with:ident) => {
        $with! {
            fn q_from_data(data: [TensorData], device: [&Device<Self>]) -> quantized;
            fn q_into_data(tensor: quantized) -> data;
            fn q_device(tensor: [&QuantizedTensor<Self>]) -> [Device<Self>];
            fn q_is_require_grad(tensor: [&QuantizedTensor<Self>]) -> [bool];
            #[uncast] fn quantize(tensor: float, scheme: [&QuantScheme], qparams: (QuantizationParametersPrimitive { scales: float })) -> quantized;
            fn dequantize(tensor: quantized, dtype: [FloatDType]) -> float;
            fn q_to_device(tensor: quantized, device: [&Device<Self>]) -> quantized;
            fn q_reshape(tensor: quantized, shape: [Shape]) -> quantized;
            fn q_expand(tensor: quantized, shape: [Shape]) -> quantized;
            fn q_swap_dims(tensor: quantized, dim1: [usize], dim2: [usize]) -> quantized;
            fn q_permute(tensor: quantized, axes: [&[usize]]) -> quantized;
            fn q_flip(tensor: quantized, axes: [&[usize]]) -> quantized;
            fn q_select(tensor: quantized, dim: [usize], indices: int) -> quantized;
            fn q_slice(tensor: quantized, slices: [&[Slice]]) -> quantized;
            fn quantize_dynamic(tensor: float, scheme: [&QuantScheme]) -> quantized;
            fn q_detach(tensor: quantized) -> quantized;
            fn q_set_require_grad(tensor: quantized, require_grad: [bool]) -> quantized;
            fn q_transpose(tensor: quantized) -> quantized;
            fn q_gather(dim: [usize], tensor: quantized, indices: int) -> quantized;
            fn q_repeat_dim(tensor: quantized, dim: [usize], times: [usize]) -> quantized;
            fn q_add(lhs: quantized, rhs: quantized) -> primitive;
            fn q_add_scalar(lhs: quantized, rhs: [Scalar]) -> primitive;
            fn q_clamp_min(tensor: quantized, min: [Scalar]) -> primitive;
            fn q_clamp_max(tensor: quantized, max: [Scalar]) -> primitive;
            fn q_clamp(tensor: quantized, min: [Scalar], max: [Scalar]) -> primitive;
            fn q_sub(lhs: quantized, rhs: quantized) -> primitive;
            fn q_sub_scalar(lhs: quantized, rhs: [Scalar]) -> primitive;
            fn q_mul(lhs: quantized, rhs: quantized) -> primitive;
            fn q_mul_scalar(lhs: quantized, rhs: [Scalar]) -> primitive;
            fn q_div(lhs: quantized, rhs: quantized) -> primitive;
            fn q_div_scalar(lhs: quantized, rhs: [Scalar]) -> primitive;
            fn q_matmul(lhs: primitive, rhs: primitive) -> primitive;
            fn q_neg(tensor: quantized) -> primitive;
            fn q_recip(tensor: quantized) -> primitive;
            fn q_sum(tensor: quantized) -> primitive;
            fn q_sum_dim(tensor: quantized, dim: [usize]) -> primitive;
            fn q_prod(tensor: quantized) -> primitive;
            fn q_prod_dim(tensor: quantized, dim: [usize]) -> primitive;
            fn q_mean(tensor: quantized) -> primitive;
            fn q_mean_dim(tensor: quantized, dim: [usize]) -> primitive;
            fn q_cumsum(tensor: quantized, dim: [usize]) -> primitive;
            fn q_cumprod(tensor: quantized, dim: [usize]) -> primitive;
            fn q_cummin(tensor: quantized, dim: [usize]) -> primitive;
            fn q_cummax(tensor: quantized, dim: [usize]) -> primitive;
            fn q_exp(tensor: quantized) -> primitive;
            fn q_log(tensor: quantized) -> primitive;
            fn q_log1p(tensor: quantized) -> primitive;
            fn q_powf(lhs: quantized, rhs: quantized) -> primitive;
            fn q_powi(lhs: quantized, rhs: int) -> primitive;
            fn q_powi_scalar(lhs: quantized, rhs: [Scalar]) -> primitive;
            fn q_powf_scalar(tensor: quantized, value: [Scalar]) -> primitive;
            fn q_sqrt(tensor: quantized) -> primitive;
            fn q_abs(tensor: quantized) -> quantized;
            fn q_cos(tensor: quantized) -> primitive;
            fn q_sin(tensor: quantized) -> primitive;
            fn q_tan(tensor: quantized) -> primitive;
            fn q_cosh(tensor: quantized) -> primitive;
            fn q_sinh(tensor: quantized) -> primitive;
            fn q_tanh(tensor: quantized) -> primitive;
            fn q_erf(tensor: quantized) -> primitive;
            fn q_cat(tensors: (many quantized), dim: [usize]) -> quantized;
            fn q_argmax(tensor: quantized, dim: [usize], out_dtype: [IntDType]) -> int;
            fn q_argtopk(tensor: quantized, dim: [usize], k: [usize], out_dtype: [IntDType]) -> int;
            fn q_topk(tensor: quantized, dim: [usize], k: [usize]) -> quantized;
            fn q_argmin(tensor: quantized, dim: [usize], out_dtype: [IntDType]) -> int;
            fn q_max(tensor: quantized) -> quantized;
            fn q_max_dim(tensor: quantized, dim: [usize]) -> quantized;
            fn q_max_dim_with_indices(tensor: quantized, dim: [usize], out_dtype: [IntDType]) -> (quantized, int);
            fn q_min(tensor: quantized) -> quantized;
            fn q_min_dim(tensor: quantized, dim: [usize]) -> quantized;
            fn q_min_dim_with_indices(tensor: quantized, dim: [usize], out_dtype: [IntDType]) -> (quantized, int);
            fn q_max_abs(tensor: quantized) -> quantized;
            fn q_max_abs_dim(tensor: quantized, dim: [usize]) -> quantized;
            fn q_any(tensor: quantized, out_dtype: [BoolDType]) -> bool;
            fn q_any_dim(tensor: quantized, dim: [usize], out_dtype: [BoolDType]) -> bool;
            fn q_all(tensor: quantized, out_dtype: [BoolDType]) -> bool;
            fn q_all_dim(tensor: quantized, dim: [usize], out_dtype: [BoolDType]) -> bool;
            fn q_sort(tensor: quantized, dim: [usize], descending: [bool]) -> quantized;
            fn q_sort_with_indices(tensor: quantized, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> (quantized, int);
            fn q_argsort(tensor: quantized, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> int;
        }
    };
}
pub(crate) use quantized_ops;

impl<B: MatmulOps> QTensorOps<Sharded<B>> for Sharded<B> {
    quantized_ops!(forward);
}
