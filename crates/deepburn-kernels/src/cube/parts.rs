//! Sums, concatenations and copies of parts, in one launch for up to eight parts: what ranks
//! exchange, and the columns of matrices.
//!
//! ```text
//! sum of parts     result[i] = T((f32(part 0[i]) + f32(part 1[i]) + ...) / divisor)
//! added terms      sum[i] = sum[i] + f32(term[i])            for up to eight sums
//! concatenation    part 0 | part 1 | ... | zeros up to the requested length
//! joined rows      row 0 of part 0 | row 0 of part 1 | ... | row 1 of part 0 | ...
//! copied columns   columns start.. of row 0 | columns start.. of row 1 | ...
//! ```
//!
//! The parts are a sequence of arguments, so a kernel is compiled for each number of parts. With a
//! launch for each part, or for each conversion and addition, the small parameters of a model would
//! cost more launches than its forward and backward passes.

use cubecl::prelude::*;

use super::device_buffer::{
    CUBE_DIM, DeviceBuffer, DeviceDType, cubes, items_at_once, with_element,
};

/// Returns the sum of all parts, in their order, divided by `divisor`, as a new buffer of `len`
/// elements that ends with zeros. Sum and division are in f32 and rounded once.
///
/// Returns `None` if there are more parts than a launch takes.
///
/// # Panics
/// Panics if `parts` is empty, if the parts differ in length or type, or if they are longer than
/// `len`.
pub fn sum_of_parts<R: Runtime>(
    client: &ComputeClient<R>,
    parts: &[DeviceBuffer],
    divisor: f32,
    len: usize,
) -> Option<DeviceBuffer> {
    if parts.len() > items_at_once(client, 1, 1) {
        return None;
    }
    let (count, dtype) = (parts[0].len(), parts[0].dtype());
    let are_alike = parts.iter().all(|part| part.len() == count && part.dtype() == dtype);
    assert!(are_alike, "the parts of a sum differ in length or type");
    assert!(count <= len, "parts of {count} elements do not fit into {len}");
    let sum = DeviceBuffer::empty(client, len, dtype);
    if len == 0 {
        return Some(sum);
    }
    let (cubes, dim) = cubes(client, len);
    // SAFETY: every unit checks that its elements exist.
    unsafe {
        with_element!(dtype, T => {
            sum_of_parts_kernel::launch_unchecked::<T, R>(
                client,
                cubes,
                dim,
                parts.iter().map(DeviceBuffer::arg).collect(),
                count,
                divisor,
                sum.arg(),
                len,
            );
        });
    }
    Some(sum)
}

/// Writes one element per unit: a sum, or 0 after the last of them.
#[cube(launch_unchecked)]
fn sum_of_parts_kernel<T: Float>(
    parts: &Sequence<Array<T>>,
    count: usize,
    divisor: f32,
    sums: &mut Array<T>,
    len: usize,
) {
    let i = ABSOLUTE_POS;
    if i < len {
        let mut sum = f32::new(0.0);
        if i < count {
            sum = f32::cast_from(parts[0][i]);
            #[unroll]
            for part in 1..parts.len() {
                sum += f32::cast_from(parts[part][i]);
            }
            sum /= divisor;
        }
        sums[i] = T::cast_from(sum);
    }
}

/// Adds to each sum, in f32, the term of the same length. The terms are of one type.
///
/// Queues one launch for up to eight sums.
///
/// # Panics
/// Panics if a sum and its term differ in length, if a sum is not in f32, or if the terms differ in
/// type.
pub fn add_terms<R: Runtime>(
    client: &ComputeClient<R>,
    sums: &[DeviceBuffer],
    terms: &[DeviceBuffer],
) {
    assert_eq!(sums.len(), terms.len(), "each sum has a term");
    let dtype = terms.first().map(DeviceBuffer::dtype);
    let pairs: Vec<_> = sums.iter().zip(terms).collect();
    for (sum, term) in &pairs {
        assert!(
            sum.len() == term.len()
                && sum.dtype() == DeviceDType::F32
                && Some(term.dtype()) == dtype,
            "a sum of {} elements of {:?} and a term of {} elements of {:?}",
            sum.len(),
            sum.dtype(),
            term.len(),
            term.dtype()
        );
    }
    let cubes_of = |pair: &(&DeviceBuffer, &DeviceBuffer)| pair.0.len().div_ceil(CUBE_DIM as usize);
    let filled: Vec<_> = pairs.into_iter().filter(|(sum, _)| !sum.is_empty()).collect();
    for group in filled.chunks(items_at_once(client, 2, 0)) {
        let all: usize = group.iter().map(cubes_of).sum();
        let (count, dim) = cubes(client, all * CUBE_DIM as usize);
        // SAFETY: every unit checks that its element exists.
        unsafe {
            with_element!(group[0].1.dtype(), T => {
                add_terms_kernel::launch_unchecked::<T, R>(
                    client,
                    count,
                    dim,
                    group.iter().map(cubes_of).collect(),
                    group.iter().map(|(_, term)| term.arg()).collect(),
                    group.iter().map(|(sum, _)| sum.arg()).collect(),
                );
            });
        }
    }
}

/// Adds one element per unit. `cubes` are the numbers of cubes of the sums.
#[cube(launch_unchecked)]
fn add_terms_kernel<T: Float>(
    cubes: &Sequence<usize>,
    terms: &Sequence<Array<T>>,
    sums: &mut Sequence<Array<f32>>,
) {
    let mut before = 0usize;
    #[unroll]
    for index in 0..terms.len() {
        let after = before + cubes[index];
        if CUBE_POS >= before && CUBE_POS < after {
            let i = (CUBE_POS - before) * CUBE_DIM as usize + UNIT_POS as usize;
            let sum = sums.index_mut(index);
            if i < sum.len() {
                sum[i] = sum[i] + f32::cast_from(terms[index][i]);
            }
        }
        before = after;
    }
}

/// Some adjacent columns of a matrix. A flat array is a matrix of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnRange {
    /// The number of rows.
    pub rows: usize,
    /// The number of elements from the start of a row to the start of the next one.
    pub pitch: usize,
    /// The first column.
    pub start: usize,
    /// The number of columns.
    pub width: usize,
}

impl ColumnRange {
    /// Returns the number of elements.
    fn len(self) -> usize {
        self.rows * self.width
    }

    /// Checks that the columns are in a buffer.
    ///
    /// # Panics
    /// Panics if they are not.
    fn check(self, buffer: &DeviceBuffer) {
        let Self { rows, pitch, start, width } = self;
        let end = rows.saturating_sub(1) * pitch + start + width;
        let fits = start + width <= pitch && end <= buffer.len();
        assert!(self.len() == 0 || fits, "{self:?} of {} elements", buffer.len());
    }

    /// Returns the columns in vectors of `at_once` elements, by which all numbers can be divided.
    fn in_vectors(self, at_once: usize) -> Self {
        let Self { rows, pitch, start, width } = self;
        Self { rows, pitch: pitch / at_once, start: start / at_once, width: width / at_once }
    }
}

/// Returns the number of elements that a unit takes: 4 if all of `numbers` can be divided by 4, so
/// that it reads and writes 8 or 16 bytes at a time. Buffers must start at such a vector, and an
/// empty one has memory for one element only.
fn elements_at_once<'a>(
    numbers: impl IntoIterator<Item = usize>,
    buffers: impl IntoIterator<Item = &'a DeviceBuffer>,
) -> usize {
    let is_in_vectors = |buffer: &DeviceBuffer| {
        !buffer.is_empty() && buffer.offset().is_multiple_of(4 * buffer.dtype().size() as u64)
    };
    let fits = numbers.into_iter().all(|number| number.is_multiple_of(4))
        && buffers.into_iter().all(is_in_vectors);
    if fits { 4 } else { 1 }
}

/// Returns a new buffer of `len` elements: the parts one after the other, then zeros.
///
/// Queues one launch for up to eight parts.
///
/// # Panics
/// Panics if the parts have more than `len` elements together, if they differ in type, or if
/// `parts` is empty.
pub fn flatten<R: Runtime>(
    client: &ComputeClient<R>,
    parts: &[DeviceBuffer],
    len: usize,
) -> DeviceBuffer {
    join_rows(client, parts, 1, len)
}

/// Returns a new buffer of `rows` rows of `pitch` elements: each has the row of the first part,
/// then the row of the next part, and so on, then zeros.
///
/// Queues one launch for up to eight parts.
///
/// # Panics
/// Panics if the rows of the parts have more than `pitch` elements together, if a part cannot be
/// divided into `rows` rows, if the parts differ in type, or if `parts` is empty.
pub fn join_rows<R: Runtime>(
    client: &ComputeClient<R>,
    parts: &[DeviceBuffer],
    rows: usize,
    pitch: usize,
) -> DeviceBuffer {
    let dtype = parts[0].dtype();
    let whole_rows = parts.iter().all(|part| part.len() == part.len() / rows.max(1) * rows);
    assert!(whole_rows, "join: the parts do not have {rows} rows");
    let width = |part: &DeviceBuffer| part.len() / rows.max(1);
    let used: usize = parts.iter().map(width).sum();
    assert!(used <= pitch, "join: rows of {used} elements do not fit into {pitch}");
    if let Some(other) = parts.iter().find(|part| part.dtype() != dtype) {
        panic!("join: {:?} among {dtype:?}", other.dtype());
    }
    let joined = DeviceBuffer::empty(client, rows * pitch, dtype);
    let mut start = 0;
    for group in parts.chunks(items_at_once(client, 1, 1)) {
        let end = start + group.iter().map(width).sum::<usize>();
        // The last group is followed by the padding.
        let end = if end == used { pitch } else { end };
        join(client, group, &joined, ColumnRange { rows, pitch, start, width: end - start });
        start = end;
    }
    joined
}

/// Returns a copy of columns, as contiguous rows.
///
/// # Panics
/// Panics if the columns are not in the buffer.
pub fn copy_of_columns<R: Runtime>(
    client: &ComputeClient<R>,
    whole: &DeviceBuffer,
    columns: ColumnRange,
) -> DeviceBuffer {
    columns.check(whole);
    let copy = DeviceBuffer::empty(client, columns.len(), whole.dtype());
    if copy.is_empty() {
        return copy;
    }
    let at_once = elements_at_once([columns.pitch, columns.start, columns.width], [whole]);
    let ColumnRange { pitch, start, width, .. } = columns.in_vectors(at_once);
    let len = copy.len() / at_once;
    let (cubes, dim) = cubes(client, len);
    // SAFETY: every unit checks that its elements exist, and the columns are in the buffer.
    unsafe {
        with_element!(whole.dtype(), T => {
            copy_kernel::launch_unchecked::<T, R>(
                client,
                cubes,
                dim,
                at_once,
                whole.arg(),
                copy.arg(),
                len,
                pitch,
                start,
                width,
            );
        });
    }
    copy
}

/// Copies some elements per unit.
#[cube(launch_unchecked)]
fn copy_kernel<T: Float, N: Size>(
    whole: &Array<Vector<T, N>>,
    copy: &mut Array<Vector<T, N>>,
    len: usize,
    pitch: usize,
    start: usize,
    width: usize,
) {
    let i = ABSOLUTE_POS;
    if i < len {
        copy[i] = whole[i / width * pitch + start + i % width];
    }
}

/// Writes columns of `joined`: the rows of the parts, then zeros.
fn join<R: Runtime>(
    client: &ComputeClient<R>,
    parts: &[DeviceBuffer],
    joined: &DeviceBuffer,
    columns: ColumnRange,
) {
    if columns.len() == 0 {
        return;
    }
    columns.check(joined);
    let ColumnRange { rows, pitch, start, width } = columns;
    let widths = parts.iter().map(|part| part.len() / rows);
    let at_once = elements_at_once(widths.clone().chain([pitch, start, width]), parts);
    let len = columns.len() / at_once;
    let (cubes, dim) = cubes(client, len);
    // SAFETY: every unit checks that its elements exist, and the columns are in the buffer.
    unsafe {
        with_element!(joined.dtype(), T => {
            join_kernel::launch_unchecked::<T, R>(
                client,
                cubes,
                dim,
                at_once,
                parts.iter().map(DeviceBuffer::arg).collect(),
                widths.map(|width| width / at_once).collect(),
                joined.arg(),
                len,
                pitch / at_once,
                start / at_once,
                width / at_once,
            );
        });
    }
}

/// Writes some elements per unit, of rows of `width` from column `start` on. An empty part has
/// memory for one element, so the widths are arguments.
#[cube(launch_unchecked)]
fn join_kernel<T: Float, N: Size>(
    parts: &Sequence<Array<Vector<T, N>>>,
    widths: &Sequence<usize>,
    joined: &mut Array<Vector<T, N>>,
    len: usize,
    pitch: usize,
    start: usize,
    width: usize,
) {
    let i = ABSOLUTE_POS;
    if i < len {
        let row = i / width;
        let column = i % width;
        let mut value = Vector::<T, N>::new(T::from_int(0));
        let mut before = 0usize;
        #[unroll]
        for part in 0..parts.len() {
            let after = before + widths[part];
            if column >= before && column < after {
                value = parts[part][row * widths[part] + column - before];
            }
            before = after;
        }
        joined[row * pitch + start + column] = value;
    }
}
