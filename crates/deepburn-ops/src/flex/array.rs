//! Flex tensors as arrays of f32, f16 or bf16, block by block in f32.
//!
//! Kernels compute in f32. 16-bit elements are widened and rounded a block at a time, so that f32 copies stay in the
//! cache and no whole tensor is copied.

use std::borrow::Cow;
use std::ops::Range;

use burn_backend::{DType, Shape, TensorData, TensorMetadata};
use burn_flex::FlexTensor;
use deepburn_kernels::gemm::{Arithmetic, Matrix, Target};
use deepburn_kernels::{self as kernels, FloatSlice};
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements that a thread takes at a time in loops over elements.
const BLOCK: usize = 16 * 1024;

/// Returns ranges of at most [`BLOCK`] elements.
pub(crate) fn blocks(len: usize) -> impl IndexedParallelIterator<Item = Range<usize>> {
    (0..len.div_ceil(BLOCK))
        .into_par_iter()
        .map(move |block| block * BLOCK..len.min((block + 1) * BLOCK))
}

/// Returns true if the kernels here support the type; f64 uses the portable
/// implementation.
pub(crate) fn is_supported(tensor: &FlexTensor) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16)
}

/// Returns the arithmetic for a product of these types: bf16 only if both
/// operands are.
pub(crate) fn arithmetic(operands: [DType; 2]) -> Arithmetic {
    match operands {
        [DType::BF16, DType::BF16] => Arithmetic::Bf16,
        _ => Arithmetic::F32,
    }
}

/// Returns the tensor in flat order; copies only if it is not contiguous.
pub(crate) fn contiguous(tensor: &FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor.clone() } else { tensor.to_contiguous() }
}

/// Returns the tensor in flat order without keeping a second handle, because
/// `storage_mut` would then copy it.
pub(crate) fn owned(tensor: FlexTensor) -> FlexTensor {
    tensor.to_contiguous()
}

/// What a tensor's storage holds from its first element on; nothing of an empty view that lies beyond it.
fn stored(tensor: &FlexTensor) -> FloatSlice<'_> {
    let start = tensor.layout().start_offset();
    match tensor.dtype() {
        DType::F32 => tensor.storage::<f32>().get(start..).unwrap_or_default().into(),
        DType::F16 => tensor.storage::<f16>().get(start..).unwrap_or_default().into(),
        DType::BF16 => tensor.storage::<bf16>().get(start..).unwrap_or_default().into(),
        other => panic!("the kernels of the CPU backend take no {other:?}"),
    }
}

/// The elements of a contiguous tensor in flat order.
pub(crate) fn elements(tensor: &FlexTensor) -> FloatSlice<'_> {
    assert!(tensor.is_contiguous(), "the caller makes it contiguous");
    let len = tensor.shape().num_elements();
    stored(tensor).slice(0..len)
}

/// Returns a matrix of a tensor: its last two axes, starting `offset` elements
/// after the first. `None` if a stride is negative.
pub(crate) fn matrix_at(tensor: &FlexTensor, offset: usize) -> Option<Matrix<'_>> {
    let (shape, strides) = (tensor.shape(), tensor.layout().strides());
    let rank = shape.num_dims();
    let [rows, columns] = [shape[rank - 2], shape[rank - 1]];
    let strides = [strides[rank - 2], strides[rank - 1]].map(usize::try_from);
    let [Ok(row_stride), Ok(column_stride)] = strides else { return None };
    // An empty view may lie beyond the end.
    let stored = stored(tensor);
    let elements = stored.starting_at(offset.min(stored.len()));
    Some(Matrix::strided(elements, [rows, columns], [row_stride, column_stride]))
}

/// Calls `work` with a matrix, which is copied only if a stride is negative.
pub(crate) fn with_matrix<R>(tensor: &FlexTensor, work: impl FnOnce(Matrix<'_>) -> R) -> R {
    match matrix_at(tensor, 0) {
        Some(matrix) => work(matrix),
        None => {
            let copy = tensor.to_contiguous();
            work(matrix_at(&copy, 0).expect("the strides of a contiguous tensor are not negative"))
        }
    }
}

/// Returns the elements in flat order as f32; copies unless they are contiguous
/// f32. For small tensors.
pub(crate) fn widen(tensor: &FlexTensor) -> Cow<'_, [f32]> {
    if let Some(values) = tensor.as_slice::<f32>().filter(|_| tensor.dtype() == DType::F32) {
        return Cow::Borrowed(values);
    }
    let tensor = tensor.to_contiguous();
    let mut room = Vec::new();
    let len = tensor.shape().num_elements();
    Cow::Owned(read(elements(&tensor), 0..len, &mut room).to_vec())
}

/// Reads elements `range` as f32, using `room` to convert 16-bit elements.
pub(crate) fn read<'a>(
    elements: FloatSlice<'a>,
    range: Range<usize>,
    room: &'a mut Vec<f32>,
) -> &'a [f32] {
    match elements.slice(range) {
        FloatSlice::F32(elements) => elements,
        narrow => {
            room.resize(narrow.len(), 0.0);
            kernels::widen(narrow, room);
            room
        }
    }
}

/// An array whose parts several threads write, as f32.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    target: Target,
    len: usize,
}

// SAFETY: a caller that takes a part promises that no other thread uses it.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl Output {
    /// Wraps the array of `len` elements at `target`.
    ///
    /// # Safety
    /// It is valid, and only parts of this output are used, as long as the output is.
    pub(crate) unsafe fn new(target: impl Into<Target>, len: usize) -> Self {
        Self { target: target.into(), len }
    }

    /// Returns a pointer to element `index`.
    pub(crate) fn at(self, index: usize) -> Target {
        assert!(index <= self.len);
        // SAFETY: in the array, or at its end.
        unsafe { self.target.add(index) }
    }

    /// Calls `work` to write elements `range`, using `room` to convert to 16
    /// bits. The slice has arbitrary initial content.
    ///
    /// # Safety
    /// No other thread uses these elements meanwhile.
    pub(crate) unsafe fn write(
        self,
        range: Range<usize>,
        room: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]),
    ) {
        let len = range.len();
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside of the array, and the caller's alone.
        unsafe {
            match self.at(range.start) {
                Target::F32(first) => work(std::slice::from_raw_parts_mut(first, len)),
                Target::F16(first) => {
                    room.resize(len, 0.0);
                    work(room);
                    kernels::cast(room, std::slice::from_raw_parts_mut(first, len).into());
                }
                Target::Bf16(first) => {
                    room.resize(len, 0.0);
                    work(room);
                    kernels::cast(room, std::slice::from_raw_parts_mut(first, len).into());
                }
            }
        }
    }

    /// Calls `work` to update elements `range`.
    ///
    /// # Safety
    /// They were written before, and no other thread uses them meanwhile.
    pub(crate) unsafe fn update(
        self,
        range: Range<usize>,
        room: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]),
    ) {
        let len = range.len();
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside of the array, written, and the caller's alone.
        unsafe {
            match self.at(range.start) {
                Target::F32(_) => {}
                Target::F16(first) => {
                    room.resize(len, 0.0);
                    kernels::widen(std::slice::from_raw_parts(first, len).into(), room);
                }
                Target::Bf16(first) => {
                    room.resize(len, 0.0);
                    kernels::widen(std::slice::from_raw_parts(first, len).into(), room);
                }
            }
            self.write(range, room, work);
        }
    }
}

/// Returns a new tensor of `shape` and `dtype`; `fill` must write all elements.
pub(crate) fn written(
    shape: impl Into<Shape>,
    dtype: DType,
    fill: impl FnOnce(Output),
) -> FlexTensor {
    fn filled<E: burn_backend::Element + bytemuck::Pod>(
        shape: Shape,
        fill: impl FnOnce(Output),
    ) -> FlexTensor
    where
        *mut E: Into<Target>,
    {
        let len = shape.num_elements();
        let mut values = unwritten::<E>(len);
        // SAFETY: the vector is alive until `fill` has returned, and used by nobody else.
        fill(unsafe { Output::new(values.as_mut_ptr(), len) });
        FlexTensor::from_data(TensorData::new(values, shape))
    }
    let shape = shape.into();
    match dtype {
        DType::F32 => filled::<f32>(shape, fill),
        DType::F16 => filled::<f16>(shape, fill),
        DType::BF16 => filled::<bf16>(shape, fill),
        other => panic!("the kernels of the CPU backend make no {other:?}"),
    }
}

/// Calls `work` to update the elements of a tensor in flat order. A tensor that
/// is shared or not contiguous is copied first.
pub(crate) fn changed(tensor: FlexTensor, work: impl FnOnce(Output)) -> FlexTensor {
    fn target<E: burn_backend::Element + bytemuck::Pod>(
        tensor: &mut FlexTensor,
        start: usize,
    ) -> Target
    where
        *mut E: Into<Target>,
    {
        tensor.storage_mut::<E>()[start..].as_mut_ptr().into()
    }
    let mut tensor = owned(tensor);
    let (start, end) = tensor.layout().contiguous_offsets().expect("it was made contiguous");
    let target = match tensor.dtype() {
        DType::F32 => target::<f32>(&mut tensor, start),
        DType::F16 => target::<f16>(&mut tensor, start),
        DType::BF16 => target::<bf16>(&mut tensor, start),
        other => panic!("the kernels of the CPU backend change no {other:?}"),
    };
    // SAFETY: `storage_mut` made the storage this tensor's alone, and it is alive until `work` has returned.
    work(unsafe { Output::new(target, end - start) });
    tensor
}

/// Returns a tensor of `shape` with these elements, rounded to `dtype`.
pub(crate) fn from_values(values: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> FlexTensor {
    if dtype == DType::F32 {
        return FlexTensor::from_data(TensorData::new(values, shape.into()));
    }
    written(shape, dtype, |out| {
        // SAFETY: nobody else has the output.
        unsafe {
            out.write(0..values.len(), &mut Vec::new(), |room| room.copy_from_slice(&values))
        };
    })
}

/// Allocates `len` numbers that must be written before they are read. Clearing
/// them first would cost as much as writing them once more.
#[allow(clippy::uninit_vec)]
pub(crate) fn unwritten<E: bytemuck::Pod>(len: usize) -> Vec<E> {
    let mut values = Vec::with_capacity(len);
    // SAFETY: the capacity is there, any bits are a number, and every caller writes all elements
    // before it reads one or gives them away.
    unsafe { values.set_len(len) };
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_first(tensor: FlexTensor) -> FlexTensor {
        changed(tensor, |all| {
            // SAFETY: nobody else has the elements, which were written.
            unsafe { all.update(0..1, &mut Vec::new(), |first| first[0] = 9.0) };
        })
    }

    #[test]
    fn only_what_somebody_else_holds_is_copied() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let tensor = from_values(vec![1.0, 2.0, 3.0], [3], dtype);
            let place = tensor.bytes().as_ptr();
            let alone = set_first(tensor);
            assert_eq!(alone.bytes().as_ptr(), place);
            let before = alone.clone();
            let after = set_first(from_values(vec![5.0], [1], dtype));
            assert_eq!(widen(&after)[..], [9.0]);
            let shared = set_first(before);
            assert_ne!(shared.bytes().as_ptr(), place);
            assert_eq!(widen(&alone)[..], [9.0, 2.0, 3.0]);
        }
    }

    #[test]
    fn empty_views_beyond_the_storage_are_empty_matrices() {
        let tensor = from_values(vec![1.0; 6], [2, 3], DType::F32);
        let empty = tensor.narrow(0, 1, 1).narrow(1, 1, 2).narrow(0, 0, 0);
        assert_eq!(matrix_at(&empty, 7).map(|matrix| matrix.rows()), Some(0));
    }
}
