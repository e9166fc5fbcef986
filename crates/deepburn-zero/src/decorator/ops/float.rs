//! Float tensors.
//!
//! For most ops, `forward!` gathers the operands and counts the results in the ledger. These ops
//! are written by hand:
//!
//! - *Views* (reshape, permute, slice, expand, cast) of a parameter are recorded on its handle.
//!   Autodiff can then save the transposed weight of a linear layer without holding any data.
//! - *Additions* of embedding gradients stay sparse. Autodiff sums the two gradients of a tied
//!   embedding with [`float_add`](FloatTensorOps::float_add), and a dense sum would fill the whole
//!   vocabulary.
//! - *Products and sums* use the kernels of [`MatmulOps`] and [`SumOps`](deepburn_ops::SumOps).
//! - *Random tensors* are drawn from the rank's own stream on a thread with a sharded model. The
//!   generator of the device is not used there, because the rank threads of a process share it.

use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::{Device, FloatTensor, IndexingUpdateOp};
use burn_backend::{
    BoolDType, DType, Distribution, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata,
};

use deepburn_ops::{MatmulOps, RandomOps, is_without_data};

use crate::decorator::observer::note_float;
use crate::decorator::ops::{forward, product, recorded, weight, whole_views};
use crate::decorator::{Sharded, ZeroTensor};
use crate::parameter::View;
use crate::recompute::{self, Cost};
use crate::session;
use crate::session::{Leased, RandomStream};

/// The table of ops that need the data of their operands, in either decorator of this crate.
///
/// `#[full]` marks exponentials, logarithms, powers and reductions, which run in f32 under
/// autocast.
macro_rules! float_ops {
    ($with:ident) => {
        $with! {
            fn float_into_data(tensor: float) -> data;
            fn float_into_int(tensor: float, out_dtype: [IntDType]) -> int;
            fn float_empty(shape: [Shape], device: [&Device<Self>], dtype: [FloatDType]) -> float;
            fn float_add_scalar(lhs: float, rhs: [Scalar]) -> float;
            fn float_sub(lhs: float, rhs: float) -> float;
            fn float_sub_scalar(lhs: float, rhs: [Scalar]) -> float;
            fn float_mul(lhs: float, rhs: float) -> float;
            fn float_mul_scalar(lhs: float, rhs: [Scalar]) -> float;
            fn float_div(lhs: float, rhs: float) -> float;
            fn float_div_scalar(lhs: float, rhs: [Scalar]) -> float;
            fn float_remainder(lhs: float, rhs: float) -> float;
            fn float_remainder_scalar(lhs: float, rhs: [Scalar]) -> float;
            fn float_cross(lhs: float, rhs: float, dim: [usize]) -> float;
            #[full] fn float_recip(tensor: float) -> float;
            fn float_flip(tensor: float, axes: [&[usize]]) -> float;
            fn float_gather(dim: [usize], tensor: float, indices: int) -> float;
            fn float_scatter_add(dim: [usize], tensor: float, indices: int, value: float) -> float;
            fn float_select(tensor: float, dim: [usize], indices: int) -> float;
            fn float_select_add(tensor: float, dim: [usize], indices: int, value: float) -> float;
            fn float_slice_assign(tensor: float, slices: [&[Slice]], value: float) -> float;
            fn float_mask_where(tensor: float, mask: bool, value: float) -> float;
            fn float_mask_fill(tensor: float, mask: bool, value: [Scalar]) -> float;
            fn float_equal(lhs: float, rhs: float, out_dtype: [BoolDType]) -> bool;
            fn float_equal_elem(lhs: float, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn float_greater(lhs: float, rhs: float, out_dtype: [BoolDType]) -> bool;
            fn float_greater_elem(lhs: float, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn float_greater_equal(lhs: float, rhs: float, out_dtype: [BoolDType]) -> bool;
            fn float_greater_equal_elem(lhs: float, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn float_lower(lhs: float, rhs: float, out_dtype: [BoolDType]) -> bool;
            fn float_lower_elem(lhs: float, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            fn float_lower_equal(lhs: float, rhs: float, out_dtype: [BoolDType]) -> bool;
            fn float_lower_equal_elem(lhs: float, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            #[full] fn float_sum_dim(tensor: float, dim: [usize]) -> float;
            #[full] fn float_mean_dim(tensor: float, dim: [usize]) -> float;
            #[full] fn float_cumsum(tensor: float, dim: [usize]) -> float;
            #[full] fn float_cumprod(tensor: float, dim: [usize]) -> float;
            fn float_cummin(tensor: float, dim: [usize]) -> float;
            fn float_cummax(tensor: float, dim: [usize]) -> float;
            #[full] fn float_exp(tensor: float) -> float;
            #[full] fn float_log(tensor: float) -> float;
            #[full] fn float_log1p(tensor: float) -> float;
            #[full] fn float_powf(lhs: float, rhs: float) -> float;
            #[full] fn float_powf_scalar_impl(tensor: float, value: [Scalar]) -> float;
            fn float_sqrt(tensor: float) -> float;
            fn float_abs(tensor: float) -> float;
            fn float_cos(tensor: float) -> float;
            fn float_sin(tensor: float) -> float;
            #[full] fn float_tan(tensor: float) -> float;
            #[full] fn float_cosh(tensor: float) -> float;
            #[full] fn float_sinh(tensor: float) -> float;
            fn float_tanh(tensor: float) -> float;
            #[full] fn float_acos(tensor: float) -> float;
            fn float_acosh(tensor: float) -> float;
            #[full] fn float_asin(tensor: float) -> float;
            fn float_asinh(tensor: float) -> float;
            fn float_atan(tensor: float) -> float;
            fn float_atanh(tensor: float) -> float;
            fn float_atan2(lhs: float, rhs: float) -> float;
            fn float_round(tensor: float) -> float;
            fn float_floor(tensor: float) -> float;
            fn float_ceil(tensor: float) -> float;
            fn float_trunc(tensor: float) -> float;
            fn float_erf(tensor: float) -> float;
            fn float_argmax(tensor: float, dim: [usize], out_dtype: [IntDType]) -> int;
            fn float_argtopk(tensor: float, dim: [usize], k: [usize], out_dtype: [IntDType]) -> int;
            fn float_argmin(tensor: float, dim: [usize], out_dtype: [IntDType]) -> int;
            fn float_unfold(tensor: float, dim: [usize], size: [usize], step: [usize]) -> float;
            fn float_zeros(shape: [Shape], device: [&Device<Self>], dtype: [FloatDType]) -> float;
            fn float_ones(shape: [Shape], device: [&Device<Self>], dtype: [FloatDType]) -> float;
            fn float_full(shape: [Shape], fill_value: [Scalar], device: [&Device<Self>], dtype: [FloatDType]) -> float;
            fn float_repeat_dim(tensor: float, dim: [usize], times: [usize]) -> float;
            fn float_clamp_min(tensor: float, min: [Scalar]) -> float;
            fn float_clamp_max(tensor: float, max: [Scalar]) -> float;
            fn float_clamp(tensor: float, min: [Scalar], max: [Scalar]) -> float;
            fn float_neg(tensor: float) -> float;
            fn float_scatter_nd(data: float, indices: int, values: float, reduction: [IndexingUpdateOp]) -> float;
            fn float_gather_nd(data: float, indices: int) -> float;
            fn float_not_equal(lhs: float, rhs: float, out_dtype: [BoolDType]) -> bool;
            fn float_not_equal_elem(lhs: float, rhs: [Scalar], out_dtype: [BoolDType]) -> bool;
            #[full] fn float_prod(tensor: float) -> float;
            #[full] fn float_prod_dim(tensor: float, dim: [usize]) -> float;
            #[full] fn float_powi(lhs: float, rhs: int) -> float;
            #[full] fn float_powi_scalar(lhs: float, rhs: [Scalar]) -> float;
            #[full] fn float_powi_scalar_impl(lhs: float, rhs: [Scalar]) -> float;
            #[full] fn float_powf_scalar(tensor: float, value: [Scalar]) -> float;
            fn float_topk(tensor: float, dim: [usize], k: [usize]) -> float;
            fn float_max(tensor: float) -> float;
            fn float_max_dim(tensor: float, dim: [usize]) -> float;
            fn float_max_dim_with_indices(tensor: float, dim: [usize], indices_dtype: [IntDType]) -> (float, int);
            fn float_min(tensor: float) -> float;
            fn float_min_dim(tensor: float, dim: [usize]) -> float;
            fn float_min_dim_with_indices(tensor: float, dim: [usize], indices_dtype: [IntDType]) -> (float, int);
            fn float_max_abs(tensor: float) -> float;
            fn float_max_abs_dim(tensor: float, dim: [usize]) -> float;
            fn float_any(tensor: float, out_dtype: [BoolDType]) -> bool;
            fn float_any_dim(tensor: float, dim: [usize], out_dtype: [BoolDType]) -> bool;
            fn float_all(tensor: float, out_dtype: [BoolDType]) -> bool;
            fn float_all_dim(tensor: float, dim: [usize], out_dtype: [BoolDType]) -> bool;
            fn float_sign(tensor: float) -> float;
            fn float_sort(tensor: float, dim: [usize], descending: [bool]) -> float;
            fn float_sort_with_indices(tensor: float, dim: [usize], descending: [bool], indices_dtype: [IntDType]) -> (float, int);
            fn float_argsort(tensor: float, dim: [usize], descending: [bool], out_dtype: [IntDType]) -> int;
            fn float_grid_sample_2d(tensor: float, grid: float, options: [GridSampleOptions]) -> float;
            fn float_is_nan(tensor: float, out_dtype: [BoolDType]) -> bool;
            fn float_is_inf(tensor: float, out_dtype: [BoolDType]) -> bool;
        }
    };
}
pub(crate) use float_ops;

/// The table of ops that [`Sharded`] implements by hand. Only `cast!` expands it.
macro_rules! float_handle_ops {
    ($with:ident) => {
        $with! {
            fn float_device(tensor: [&FloatTensor<Self>]) -> [Device<Self>];
            fn float_is_require_grad(tensor: [&FloatTensor<Self>]) -> [bool];
            fn float_from_data(data: [TensorData], device: [&Device<Self>]) -> float;
            fn float_to_device(tensor: float, device: [&Device<Self>]) -> float;
            fn float_random(shape: [Shape], distribution: [Distribution], device: [&Device<Self>], dtype: [FloatDType]) -> float;
            fn float_add(lhs: float, rhs: float) -> float;
            fn float_set_require_grad(tensor: float, require_grad: [bool]) -> float;
            fn float_reshape(tensor: float, shape: [Shape]) -> float;
            fn float_swap_dims(tensor: float, dim1: [usize], dim2: [usize]) -> float;
            fn float_transpose(tensor: float) -> float;
            fn float_permute(tensor: float, axes: [&[usize]]) -> float;
            fn float_slice(tensor: float, slices: [&[Slice]]) -> float;
            fn float_cat(tensors: (many float), dim: [usize]) -> float;
            fn float_expand(tensor: float, shape: [Shape]) -> float;
            fn float_cast(tensor: float, dtype: [FloatDType]) -> float;
            #[product] fn float_matmul(lhs: float, rhs: float) -> float;
            #[full] fn float_sum(tensor: float) -> float;
            #[full] fn float_mean(tensor: float) -> float;
        }
    };
}
pub(crate) use float_handle_ops;

/// Tensors of this backend have no autodiff state, because autodiff wraps this backend. `detach`
/// and `require_grad` therefore return their operand.
impl<B: MatmulOps> FloatTensorOps<Sharded<B>> for Sharded<B> {
    /// Data from outside is not recorded, because the record would take as much memory as the
    /// tensor.
    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        ZeroTensor::full(B::float_from_data(data, device))
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        note_float(tensor);
        tensor.device()
    }

    /// A parameter that is already on `device` stays a handle; otherwise this reads it and copies
    /// the data.
    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        if tensor.device() == *device {
            return tensor;
        }
        ZeroTensor::full(B::float_to_device(tensor.into_full(), device))
    }

    /// Draws random values from the stream of this rank. Neither the stage nor the timing of other
    /// ranks changes the result.
    ///
    /// A recorded op keeps a copy of the stream's state before the op. Recomputation draws from
    /// this copy, so dropout has the same mask, and the stream itself does not advance again.
    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let drawn = session::with_random(|random| {
            // The stream is copied even if the op is not recorded: a copy of a ChaCha state is a
            // few words.
            let before = random.clone();
            (before, draw::<B>(random, shape.clone(), distribution, device, dtype))
        });
        let Some((before, tensor)) = drawn else {
            return ZeroTensor::full(B::float_random(shape, distribution, device, dtype));
        };
        let record = recompute::recorder::<B>().and_then(|recorder| recorder.begin_op(Cost::Low));
        let Some(record) = record else { return ZeroTensor::full(tensor) };
        let device = device.clone();
        let [tensor] = record.record([Leased::new(tensor)], move |_| {
            let mut random = before.clone();
            let drawn = draw::<B>(&mut random, shape.clone(), distribution, &device, dtype);
            [Leased::new(drawn)]
        });
        ZeroTensor::Recorded(tensor)
    }

    /// Adds two tensors. A sum with the gradient of an embedding stays sparse. Autodiff uses this
    /// op to sum the gradients of a tied embedding. If the shapes differ (broadcasting), the sparse
    /// gradient is converted to a dense tensor.
    fn float_add(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        match (lhs, rhs) {
            (ZeroTensor::SparseRows(left), ZeroTensor::SparseRows(right)) => {
                ZeroTensor::sparse_rows(left.add_rows(*right))
            }
            (ZeroTensor::SparseRows(rows), other) | (other, ZeroTensor::SparseRows(rows))
                if other.shape() == *rows.shape() =>
            {
                ZeroTensor::sparse_rows(rows.add_dense(other.into_full()))
            }
            (left, right) => {
                let [sum] =
                    recorded!(Cost::Low; left: float, right: float => [B::float_add(left, right)]);
                sum
            }
        }
    }

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, _require: bool) -> FloatTensor<Self> {
        tensor
    }

    fn float_is_require_grad(_tensor: &FloatTensor<Self>) -> bool {
        false
    }

    // On a parameter, a view is only recorded.
    whole_views!(float view: float_reshape, float_swap_dims, float_transpose, float_permute);

    fn float_slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self> {
        tensor.view(View::Slice(slices.to_vec()))
    }

    fn float_expand(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        tensor.view(View::Expand(shape))
    }

    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        tensor.view(View::Cast(dtype))
    }

    /// Multiplies matrices with the kernels of [`MatmulOps`], which may be faster than Burn's. The
    /// inner dimension determines whether selective activation checkpointing keeps the result.
    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        product::count(&[&lhs, &rhs], || product::matmul(&lhs, &rhs));
        let [product] = recorded!(
            product::cost(&lhs); lhs: float, rhs: weight => [weight::matmul::<B>(lhs, rhs)]
        );
        product
    }

    /// Sums all elements with [`SumOps`](deepburn_ops::SumOps), so that the additions have a fixed
    /// order on every device.
    fn float_sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let [sum] = recorded!(Cost::Low; tensor: float => [B::sum(tensor)]);
        sum
    }

    /// The mean of all elements, with the same order of additions in every run.
    fn float_mean(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let [mean] = recorded!(Cost::Low; tensor: float => [B::mean(tensor)]);
        mean
    }

    /// Concatenates with [`SumOps`](deepburn_ops::SumOps), which copies no shapes to the device.
    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        let [joined] = recorded!(
            Cost::Low; tensors: (many float), dim: [usize] => [B::concat(tensors, dim)]
        );
        joined
    }

    float_ops!(forward);
}

/// Draws a tensor of `shape` from a stream, on `device` if it has a kernel for that, and else on
/// the host.
fn draw<B: RandomOps>(
    random: &mut RandomStream,
    shape: Shape,
    distribution: Distribution,
    device: &Device<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    if is_without_data::<B>() {
        return B::float_empty(shape, device, dtype);
    }
    if let Some(drawn) = draw_on_device::<B>(random, &shape, distribution, device, dtype) {
        return drawn;
    }
    B::float_from_data(draw_on_host(random, shape, distribution, dtype), device)
}

/// Draws the elements of a tensor of `shape` from a stream.
///
/// Values of 16-bit types are drawn in f32 and rounded. The stream therefore advances by the same
/// number of words in every precision except f64.
pub(crate) fn draw_on_host(
    random: &mut RandomStream,
    shape: Shape,
    distribution: Distribution,
    dtype: FloatDType,
) -> TensorData {
    let data = match dtype {
        FloatDType::F64 => random.draw::<f64>(shape, distribution),
        _ => random.draw::<f32>(shape, distribution),
    };
    data.convert_dtype(DType::from(dtype))
}

/// Draws zeros and ones on the device. The elements and the position of the stream afterwards are
/// the same as if they were drawn on the host.
fn draw_on_device<B: RandomOps>(
    random: &mut RandomStream,
    shape: &Shape,
    distribution: Distribution,
    device: &Device<B>,
    dtype: FloatDType,
) -> Option<FloatTensor<B>> {
    let Distribution::Bernoulli(probability) = distribution else { return None };
    // Ones alone take no words of the stream.
    if !(0.0..1.0).contains(&probability) {
        return None;
    }
    let drawn = B::bernoulli(&random.on_device(), probability, shape, device, dtype)?;
    // A u64 each, of two words.
    random.seek(random.position() + 2 * shape.num_elements() as u128);
    Some(drawn)
}
