//! Sums of all elements, of the parts of ranks, and of rows of a table, slices and concatenations,
//! on the device.
//!
//! Without autotuning, burn-cubecl adds the sums of four groups of threads with atomic additions if
//! the device has them for the type. Devices of CUDA have them, and wgpu's do not. The groups
//! arrive in any order, so the last bits of a sum would differ from run to run.

use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, IntDType, Shape, Slice, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_std::tensor::{ReshapeAction, reshape_action};
use deepburn_kernels::cube::{self, AddedRows, ColumnRange};

use super::array::{
    are_supported, buffer, contiguous, element_type, exclusive, flat_tensor, known, shaped_tensor,
    without_padding,
};
use crate::rows::{RowBlock, add_rows_on_host};
use crate::sum::{SumOps, add_each};

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
        let tensor = contiguous(tensor);
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
        let parts: Vec<_> = parts.iter().cloned().map(contiguous).collect();
        let buffers: Vec<_> = parts.iter().map(buffer).collect();
        let sum = cube::sum_of_parts(&parts[0].client, &buffers, divisor, len)?;
        Some(flat_tensor(sum, &parts[0]))
    }

    /// Queues one launch for each eight sums in f32 whose terms are all in f32, f16 or bf16.
    fn add_terms(
        sums: Vec<FloatTensor<Self>>,
        terms: Vec<FloatTensor<Self>>,
    ) -> Vec<FloatTensor<Self>> {
        let is_alike = |term: &FloatTensor<Self>| term.dtype() == terms[0].dtype();
        let has_kernel = are_supported(&terms)
            && terms.iter().all(is_alike)
            && sums.iter().all(|sum| sum.dtype() == DType::F32);
        if sums.is_empty() || !has_kernel {
            return add_each::<Self>(sums, terms);
        }
        let sums: Vec<_> = sums.into_iter().map(exclusive).collect();
        let terms: Vec<_> = terms.into_iter().map(contiguous).collect();
        let [of_sums, of_terms] =
            [&sums, &terms].map(|tensors| tensors.iter().map(buffer).collect::<Vec<_>>());
        cube::add_terms(&sums[0].client, &of_sums, &of_terms);
        sums
    }

    /// Returns a view if the layout has one, and otherwise copies rows with padding between them by
    /// a kernel. burn-cubecl's copy uploads its shapes; it is only used for other layouts.
    fn reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        let action = reshape_action(tensor.meta.shape(), tensor.meta.strides(), &shape);
        let is_view = !matches!(action, ReshapeAction::Recompute);
        Self::float_reshape(if is_view { tensor } else { without_padding(tensor) }, shape)
    }

    /// Returns a view if it starts and ends at multiples of the device's alignment, and a copy
    /// otherwise. burn-cubecl's copy uploads its shapes, and the host waits for uploads after a
    /// number of them; it is only used for a slice along several axes, with steps, or of a tensor
    /// that is not contiguous.
    fn slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self> {
        let cut = copied_columns(&tensor, slices).filter(|_| are_supported([&tensor]));
        let Some((columns, shape)) = cut else { return Self::float_slice(tensor, slices) };
        let copy = cube::copy_of_columns(&tensor.client, &buffer(&tensor), columns);
        shaped_tensor(copy, shape, &tensor)
    }

    /// Queues one launch for each eight parts in f32, f16 or bf16.
    fn concat(parts: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        let is_alike = |part: &FloatTensor<Self>| part.dtype() == parts[0].dtype();
        if !are_supported(&parts) || !parts.iter().all(is_alike) {
            return Self::float_cat(parts, dim);
        }
        let parts: Vec<_> = parts.into_iter().map(contiguous).collect();
        let mut shape = parts[0].shape();
        shape[dim] = parts.iter().map(|part| part.shape()[dim]).sum();
        let rows: usize = shape[..dim].iter().product();
        let pitch: usize = shape[dim..].iter().product();
        let buffers: Vec<_> = parts.iter().map(buffer).collect();
        shaped_tensor(cube::join_rows(&parts[0].client, &buffers, rows, pitch), shape, &parts[0])
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

/// Returns the elements of a slice along one axis of a contiguous tensor, as columns of a matrix
/// whose rows are what the axes before select, and the shape of the slice. Returns `None` for other
/// slices, and for one that burn-cubecl returns as a view.
fn copied_columns<R: CubeRuntime>(
    tensor: &CubeTensor<R>,
    slices: &[Slice],
) -> Option<(ColumnRange, Shape)> {
    let mut shape = tensor.shape();
    let ranges = slices.iter().zip(shape.iter()).map(|(slice, &len)| slice.to_range(len));
    let ranges: Vec<_> = ranges.collect();
    let mut cut = (0..ranges.len()).filter(|&axis| ranges[axis] != (0..shape[axis]));
    let (Some(axis), None) = (cut.next(), cut.next()) else { return None };
    if !tensor.is_contiguous() || slices.iter().any(|slice| slice.step != 1) {
        return None;
    }
    let rows: usize = shape[..axis].iter().product();
    let inner: usize = shape[axis + 1..].iter().product();
    let (range, pitch) = (&ranges[axis], shape[axis] * inner);
    let (start, width) = (range.start * inner, range.len() * inner);
    let alignment = tensor.client.properties().memory.alignment as usize;
    let is_aligned = |elements: usize| (elements * tensor.dtype().size()).is_multiple_of(alignment);
    let is_view = is_aligned(start) && is_aligned(pitch - start - width);
    shape[axis] = range.len();
    (!is_view).then_some((ColumnRange { rows, pitch, start, width }, shape))
}
