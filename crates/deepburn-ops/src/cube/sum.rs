//! Sums of all elements, of the parts of ranks, and of rows of a table, on the device.
//!
//! Without autotuning, burn-cubecl adds the sums of four groups of threads with atomic additions if
//! the device has them for the type. Devices of CUDA have them, and wgpu's do not. The groups
//! arrive in any order, so the last bits of a sum would differ from run to run.

use std::ops::Range;

use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, IntDType, Shape, Slice, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, AddedRows, DeviceBuffer};

use super::array::{are_supported, buffer, element_type, exclusive, flat_tensor, known};
use crate::rows::{RowBlock, add_rows_on_host};
use crate::sum::SumOps;

/// f32, f16 and bf16 are summed by a kernel, in f32. Other types are summed along one axis, by one
/// thread.
impl<R, F, I, BT> SumOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        if element_type(tensor.dtype().into()).is_none() {
            let len = tensor.shape().num_elements();
            return Self::float_sum_dim(Self::float_reshape(tensor, Shape::from(vec![len])), 0);
        }
        let tensor = into_contiguous(tensor);
        flat_tensor(cube::sum(&tensor.client, &buffer(&tensor)), &tensor)
    }

    /// Queues one launch for up to eight parts in f32, f16 or bf16.
    fn sum_of_parts(
        parts: &[FloatTensor<Self>],
        divisor: f32,
        len: usize,
    ) -> Option<FloatTensor<Self>> {
        let is_alike = |part: &FloatTensor<Self>| part.dtype() == parts[0].dtype();
        if !are_supported(parts) || !parts.iter().all(is_alike) {
            return None;
        }
        let parts: Vec<_> = parts.iter().cloned().map(into_contiguous).collect();
        let buffers: Vec<_> = parts.iter().map(buffer).collect();
        let sum = cube::sum_of_parts(&parts[0].client, &buffers, divisor, len)?;
        Some(flat_tensor(sum, &parts[0]))
    }

    /// Returns a view if it starts and ends at multiples of the device's alignment, and a copy
    /// otherwise. burn-cubecl's copy uploads its shapes, and the host waits for uploads after a
    /// number of them.
    fn narrow(flat: FloatTensor<Self>, range: Range<usize>) -> FloatTensor<Self> {
        let alignment = flat.client.properties().memory.alignment as usize;
        let (len, size) = (flat.shape().num_elements(), flat.dtype().size());
        let is_aligned = |elements: usize| (elements * size).is_multiple_of(alignment);
        let is_view = is_aligned(range.start) && is_aligned(len - range.end);
        if is_view || !are_supported([&flat]) {
            return Self::float_slice(flat, &[Slice::from(range)]);
        }
        let flat = into_contiguous(flat);
        flat_tensor(cube::copy_of_range(&flat.client, &buffer(&flat), range), &flat)
    }

    /// Queues one launch for each eight parts in f32, f16 or bf16.
    fn concat(parts: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        if !are_supported(&parts) {
            return Self::float_cat(parts, 0);
        }
        let parts: Vec<_> = parts.into_iter().map(into_contiguous).collect();
        let buffers: Vec<_> = parts.iter().map(buffer).collect();
        let len = buffers.iter().map(DeviceBuffer::len).sum();
        flat_tensor(cube::flatten(&parts[0].client, &buffers, len), &parts[0])
    }

    /// Queues two launches for each block, without copying anything to the host. A shared `sum` is
    /// first copied on the device. A sum in f64 is computed on the host.
    fn add_rows(
        sum: FloatTensor<Self>,
        start: usize,
        blocks: Vec<RowBlock<Self>>,
    ) -> FloatTensor<Self> {
        if sum.dtype() != DType::F32 {
            return add_rows_on_host::<Self>(sum, start, &blocks);
        }
        let sum = exclusive(sum);
        for RowBlock { indices, values } in blocks {
            let row_len = values.shape()[1];
            // The kernel reads 32 bits. A table on a device has fewer rows than 2^31.
            let indices = match indices.dtype() {
                DType::I32 | DType::U32 => indices,
                _ => Self::int_cast(indices, IntDType::I32),
            };
            let indices = into_contiguous(indices).handle;
            let values = known::<Self, R>(values);
            let rows = AddedRows { indices, values: &buffer(&values), row_len };
            cube::add_rows(&sum.client, &buffer(&sum), start, rows);
        }
        sum
    }
}
