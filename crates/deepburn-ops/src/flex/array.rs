//! Flex tensors as arrays of f32, f16 or bf16 elements, which kernels access as f32.
//!
//! Kernels compute in f32. [`read`], [`OutputArray::write`] and [`OutputArray::update`] convert a
//! block of 16-bit elements in a scratch vector of the calling thread, so the f32 copy stays in the
//! cache and no tensor is widened as a whole. f32 elements are accessed in place.
//!
//! ```text
//! 16-bit tensor  | block 0 | block 1 | block 2 | ...     16,384 elements each
//!                     |         ^
//!                   widen      round
//!                     v         |
//! scratch        | f32 x 16,384  |                       one per thread, 64 KiB
//! ```
//!
//! Loops over elements are in `blockwise`. Matrix products get a [`Matrix`] view of the tensor with
//! its strides, so a transposed operand is not copied.

use std::borrow::Cow;
use std::ops::Range;

use burn_backend::{DType, Shape, TensorData, TensorMetadata};
use burn_flex::FlexTensor;
use deepburn_kernels::gemm::{Arithmetic, Matrix, Target};
use deepburn_kernels::{self as kernels, FloatSlice, WorkingCopy};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::quantized::with_element;

/// The number of elements that a thread takes at a time in loops over elements: 64 KiB of f32,
/// which fit in a second-level cache together with the operands of the loop.
pub(crate) const BLOCK: usize = 16 * 1024;

/// Returns the ranges of the blocks of `size` elements of an array of `len` elements, as a parallel
/// iterator. The last block may be shorter. An empty array may have blocks of size 0.
pub(crate) fn blocks(len: usize, size: usize) -> impl IndexedParallelIterator<Item = Range<usize>> {
    (0..len.div_ceil(size.max(1)))
        .into_par_iter()
        .map(move |block| block * size..len.min((block + 1) * size))
}

/// Returns the indices of the rows of a matrix, as a parallel iterator. A thread takes so many
/// consecutive rows of `width` elements at a time that they fill a block, at least one.
pub(crate) fn block_rows(rows: usize, width: usize) -> impl IndexedParallelIterator<Item = usize> {
    (0..rows).into_par_iter().with_min_len((BLOCK / width.max(1)).max(1))
}

/// Returns true for f32, f16 and bf16 tensors. Ops with other operands, which are f64 in practice,
/// use the portable implementation.
pub(crate) fn is_supported(tensor: &FlexTensor) -> bool {
    is_supported_type(tensor.dtype())
}

/// Returns true for f32, f16 and bf16.
pub(crate) fn is_supported_type(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Calls a generic function with the element type that `$dtype` names. Panics if the type is not
/// supported.
macro_rules! with_supported {
    ($dtype:expr, $E:ident => $body:expr) => {{
        let dtype = $dtype;
        assert!(is_supported_type(dtype), "the kernels of the CPU backend support no {dtype:?}");
        with_element!(dtype, $E => $body)
    }};
}

/// Returns the arithmetic of a product with operands of these types: bf16 only if both are bf16.
///
/// f16 is widened and multiplied in f32: processors have no fast f16 product with f32 sums, and a
/// conversion to bf16 would lose three of f16's eleven significant bits.
pub(crate) fn arithmetic(operands: [DType; 2]) -> Arithmetic {
    match operands {
        [DType::BF16, DType::BF16] => Arithmetic::Bf16,
        _ => Arithmetic::F32,
    }
}

/// Returns the tensor in flat order. A contiguous tensor is shared, not copied; it may be a view
/// that starts in the middle of its storage.
pub(crate) fn contiguous(tensor: &FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor.clone() } else { tensor.to_contiguous() }
}

/// Returns the tensor in flat order at the start of its own storage, without keeping a second
/// handle. With a second handle, `storage_mut` would copy the storage before the first write.
pub(crate) fn owned(tensor: FlexTensor) -> FlexTensor {
    tensor.to_contiguous()
}

/// Returns the storage of a tensor from its first element on. The slice may extend beyond the
/// tensor's last element. It is empty for an empty view whose offset is beyond the end of the
/// storage.
///
/// # Panics
/// Panics if the type is not [supported](is_supported).
fn stored(tensor: &FlexTensor) -> FloatSlice<'_> {
    let start = tensor.layout().start_offset();
    with_supported!(tensor.dtype(), E => {
        tensor.storage::<E>().get(start..).unwrap_or_default().into()
    })
}

/// Returns the elements of a contiguous tensor in flat order.
///
/// # Panics
/// Panics if the tensor is not contiguous or its type is not [supported](is_supported).
pub(crate) fn elements(tensor: &FlexTensor) -> FloatSlice<'_> {
    assert!(tensor.is_contiguous(), "the caller makes it contiguous");
    let len = tensor.shape().num_elements();
    stored(tensor).slice(0..len)
}

/// Returns the last two axes of a tensor as a matrix that starts `offset` elements after the
/// tensor's first element; `None` if one of their strides is negative. The strides may have any
/// other value, 0 included (a broadcast axis).
pub(crate) fn matrix_at(tensor: &FlexTensor, offset: usize) -> Option<Matrix<'_>> {
    let (shape, strides) = (tensor.shape(), tensor.layout().strides());
    let rank = shape.num_dims();
    let [rows, columns] = [shape[rank - 2], shape[rank - 1]];
    let strides = [strides[rank - 2], strides[rank - 1]].map(usize::try_from);
    let [Ok(row_stride), Ok(column_stride)] = strides else { return None };
    // The offset of an empty view may be beyond the end of the storage.
    let stored = stored(tensor);
    let elements = stored.starting_at(offset.min(stored.len()));
    Some(Matrix::strided(elements, [rows, columns], [row_stride, column_stride]))
}

/// Calls `work` with the last two axes of a tensor as a matrix. The tensor is copied only if a
/// stride is negative, which a matrix cannot express.
pub(crate) fn with_matrix<R>(tensor: &FlexTensor, work: impl FnOnce(Matrix<'_>) -> R) -> R {
    match matrix_at(tensor, 0) {
        Some(matrix) => work(matrix),
        None => {
            let copy = tensor.to_contiguous();
            work(matrix_at(&copy, 0).expect("the strides of a contiguous tensor are not negative"))
        }
    }
}

/// Returns the elements in flat order as f32. Borrows contiguous f32 tensors and copies all others
/// completely, so it is only for small tensors such as biases and row statistics.
pub(crate) fn widen(tensor: &FlexTensor) -> Cow<'_, [f32]> {
    if let Some(values) = tensor.as_slice::<f32>().filter(|_| tensor.dtype() == DType::F32) {
        return Cow::Borrowed(values);
    }
    let tensor = tensor.to_contiguous();
    let mut room = Vec::new();
    let len = tensor.shape().num_elements();
    Cow::Owned(read(elements(&tensor), 0..len, &mut room).to_vec())
}

/// Returns the elements in `range` as f32. `room` is a scratch vector that holds the converted
/// elements of a 16-bit slice and is not used for f32. Its length and content are arbitrary before
/// and after the call.
///
/// # Panics
/// Panics if `range` reaches beyond the end.
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

/// Rounds values in place to the numbers that `dtype` has, to nearest even. f32 values stay as they
/// are.
///
/// # Panics
/// Panics if `dtype` is not f32, f16 or bf16.
pub(crate) fn round(values: &mut [f32], dtype: DType) {
    /// Rounds pieces that fit in a first-level cache.
    fn through<E: Copy + Default>(values: &mut [f32])
    where
        for<'a> &'a mut [E]: Into<WorkingCopy<'a>>,
        for<'a> &'a [E]: Into<FloatSlice<'a>>,
    {
        let mut room = [E::default(); 1024];
        for values in values.chunks_mut(room.len()) {
            let room = &mut room[..values.len()];
            kernels::cast(values, (&mut *room).into());
            kernels::widen((&*room).into(), values);
        }
    }
    match dtype {
        DType::F32 => {}
        DType::F16 => through::<f16>(values),
        DType::BF16 => through::<bf16>(values),
        other => panic!("the kernels of the CPU backend make no {other:?}"),
    }
}

/// An array that several threads write as f32 at the same time. Each thread writes different
/// ranges.
///
/// The array is a raw pointer with a length, because the ranges of a thread need not be adjacent:
/// an attention head owns some columns of every row. The borrow checker cannot express such ranges,
/// so callers must ensure that the ranges of different threads do not overlap.
#[derive(Clone, Copy)]
pub(crate) struct OutputArray {
    /// The first element and its type.
    target: Target,
    /// The number of elements.
    len: usize,
}

// SAFETY: a caller that accesses a range promises that no other thread uses it.
unsafe impl Send for OutputArray {}
// SAFETY: as above.
unsafe impl Sync for OutputArray {}

impl OutputArray {
    /// Wraps the array of `len` elements at `target`.
    ///
    /// # Safety
    /// The memory must be valid for writes of `len` elements as long as the output or a copy of it
    /// is used. During that time, it may be accessed only through the output.
    pub(crate) unsafe fn new(target: impl Into<Target>, len: usize) -> Self {
        Self { target: target.into(), len }
    }

    /// Returns a pointer to element `index`, or to the end of the array.
    ///
    /// # Panics
    /// Panics if `index` is greater than the length.
    pub(crate) fn at(self, index: usize) -> Target {
        assert!(index <= self.len);
        // SAFETY: the element is in the array or at its end.
        unsafe { self.target.add(index) }
    }

    /// Calls `work` with a slice for the elements in `range`, which must be written completely, and
    /// returns its result. The initial content of the slice is arbitrary.
    ///
    /// f32 elements are written in place. 16-bit elements are written to `room` and rounded to
    /// nearest even afterwards.
    ///
    /// # Safety
    /// No other thread accesses these elements during the call. `work` must not read an element
    /// before it has written it.
    ///
    /// # Panics
    /// Panics if `range` reaches beyond the end.
    pub(crate) unsafe fn write<R>(
        self,
        range: Range<usize>,
        room: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]) -> R,
    ) -> R {
        let len = range.len();
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range is inside the array, and the caller promises that no other thread
        // accesses it.
        let narrow = unsafe {
            match self.at(range.start) {
                Target::F32(first) => return work(std::slice::from_raw_parts_mut(first, len)),
                Target::F16(first) => WorkingCopy::F16(std::slice::from_raw_parts_mut(first, len)),
                Target::Bf16(first) => {
                    WorkingCopy::Bf16(std::slice::from_raw_parts_mut(first, len))
                }
            }
        };
        room.resize(len, 0.0);
        let result = work(room);
        kernels::cast(room, narrow);
        result
    }

    /// Calls `work` with the current elements in `range` as f32, stores the updated values and
    /// returns the result of `work`.
    ///
    /// # Safety
    /// The elements were initialized before, and no other thread accesses them during the call.
    ///
    /// # Panics
    /// Panics if `range` reaches beyond the end.
    pub(crate) unsafe fn update<R>(
        self,
        range: Range<usize>,
        room: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]) -> R,
    ) -> R {
        let len = range.len();
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range is inside the array, and the caller promises that it was written and
        // that no other thread accesses it.
        unsafe {
            let narrow = match self.at(range.start) {
                // `write` passes f32 elements in place, so they keep their values.
                Target::F32(_) => return self.write(range, room, work),
                Target::F16(first) => FloatSlice::F16(std::slice::from_raw_parts(first, len)),
                Target::Bf16(first) => FloatSlice::Bf16(std::slice::from_raw_parts(first, len)),
            };
            room.resize(len, 0.0);
            kernels::widen(narrow, room);
            self.write(range, room, work)
        }
    }
}

/// Returns a new tensor of `shape` and `dtype`. The memory is uninitialized when `fill` is called,
/// and `fill` must write every element.
///
/// # Panics
/// Panics if `dtype` is not f32, f16 or bf16.
pub(crate) fn written(
    shape: impl Into<Shape>,
    dtype: DType,
    fill: impl FnOnce(OutputArray),
) -> FlexTensor {
    let shape = shape.into();
    let len = shape.num_elements();
    with_supported!(dtype, E => {
        let mut values = unwritten::<E>(len);
        // SAFETY: the vector is alive until `fill` has returned, and no other code uses it.
        fill(unsafe { OutputArray::new(values.as_mut_ptr(), len) });
        FlexTensor::from_data(TensorData::new(values, shape))
    })
}

/// Calls `work` to update the elements of a tensor in flat order and returns the tensor. The update
/// is in place if the storage is not shared and the tensor covers it completely; otherwise the
/// tensor is copied first.
///
/// # Panics
/// Panics if the type is not [supported](is_supported).
pub(crate) fn changed(tensor: FlexTensor, work: impl FnOnce(OutputArray)) -> FlexTensor {
    let mut tensor = owned(tensor);
    let (start, end) = tensor.layout().contiguous_offsets().expect("it was made contiguous");
    // A shared storage is copied first.
    let target: Target = with_supported!(tensor.dtype(), E => {
        tensor.storage_mut::<E>()[start..].as_mut_ptr().into()
    });
    // SAFETY: after `storage_mut`, only this tensor owns the storage, and the tensor is alive until
    // `work` has returned.
    work(unsafe { OutputArray::new(target, end - start) });
    tensor
}

/// Returns a tensor of `shape` with `values`, rounded to `dtype`. Takes ownership of the vector if
/// `dtype` is f32.
pub(crate) fn from_values(values: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> FlexTensor {
    if dtype == DType::F32 {
        return FlexTensor::from_data(TensorData::new(values, shape.into()));
    }
    written(shape, dtype, |out| {
        // SAFETY: no other code has access to the output.
        unsafe {
            out.write(0..values.len(), &mut Vec::new(), |room| room.copy_from_slice(&values))
        };
    })
}

/// Allocates `len` numbers with arbitrary values, which must be written before they are read.
///
/// Zeroing them first would cost about as much memory bandwidth as the kernel that writes them.
#[allow(clippy::uninit_vec)]
pub(crate) fn unwritten<E: bytemuck::Pod>(len: usize) -> Vec<E> {
    let mut values = Vec::with_capacity(len);
    // SAFETY: the capacity is at least `len`, any bits are a valid number, and every caller writes
    // all elements before it reads them or passes them on.
    unsafe { values.set_len(len) };
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_first(tensor: FlexTensor) -> FlexTensor {
        changed(tensor, |all| {
            // SAFETY: no other code has access to the elements, and all of them were written.
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
