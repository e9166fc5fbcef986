//! Sums, concatenations and copies of the parts that ranks exchange, in one launch for up to eight
//! parts.
//!
//! ```text
//! copy             result[i] = whole[start + i]
//! sum of parts     result[i] = T((f32(part 0[i]) + f32(part 1[i]) + ...) / divisor)
//! concatenation    part 0 | part 1 | ... | zeros up to the requested length
//! ```
//!
//! The parts are a sequence of arguments, so a kernel is compiled for each number of parts. With a
//! launch for each part, or for each conversion and addition, the small parameters of a model would
//! cost more launches than its forward and backward passes.

use std::ops::Range;

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, cubes, items_at_once, with_element};

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
    let dtype = parts[0].dtype();
    let used: usize = parts.iter().map(DeviceBuffer::len).sum();
    assert!(used <= len, "flatten: the parts have {used} elements and the whole has {len}");
    if let Some(other) = parts.iter().find(|part| part.dtype() != dtype) {
        panic!("flatten: {:?} among {dtype:?}", other.dtype());
    }
    let flat = DeviceBuffer::empty(client, len, dtype);
    let mut start = 0;
    for group in parts.chunks(items_at_once(client, 1, 1)) {
        let end = start + group.iter().map(DeviceBuffer::len).sum::<usize>();
        // The last group is followed by the padding.
        let end = if end == used { len } else { end };
        join(client, group, &flat, start..end);
        start = end;
    }
    flat
}

/// Returns a copy of elements `range`.
///
/// # Panics
/// Panics if the range is not in the buffer.
pub fn copy_of_range<R: Runtime>(
    client: &ComputeClient<R>,
    whole: &DeviceBuffer,
    range: Range<usize>,
) -> DeviceBuffer {
    assert!(range.start <= range.end && range.end <= whole.len(), "{range:?} of {}", whole.len());
    let copy = DeviceBuffer::empty(client, range.len(), whole.dtype());
    if range.is_empty() {
        return copy;
    }
    let (cubes, dim) = cubes(client, range.len());
    // SAFETY: every unit checks that its element exists, and the range is in the buffer.
    unsafe {
        with_element!(whole.dtype(), T => {
            copy_kernel::launch_unchecked::<T, R>(
                client,
                cubes,
                dim,
                whole.arg(),
                range.start,
                copy.arg(),
            );
        });
    }
    copy
}

/// Copies one element per unit, from element `start` on.
#[cube(launch_unchecked)]
fn copy_kernel<T: Float>(whole: &Array<T>, start: usize, copy: &mut Array<T>) {
    if ABSOLUTE_POS < copy.len() {
        copy[ABSOLUTE_POS] = whole[start + ABSOLUTE_POS];
    }
}

/// Writes elements `range` of `flat`: the elements of the parts, then zeros.
fn join<R: Runtime>(
    client: &ComputeClient<R>,
    parts: &[DeviceBuffer],
    flat: &DeviceBuffer,
    range: Range<usize>,
) {
    if range.is_empty() {
        return;
    }
    let (cubes, dim) = cubes(client, range.len());
    // SAFETY: every unit checks that its element exists, and the caller has checked that `flat` is
    // long enough.
    unsafe {
        with_element!(flat.dtype(), T => {
            join_kernel::launch_unchecked::<T, R>(
                client,
                cubes,
                dim,
                parts.iter().map(DeviceBuffer::arg).collect(),
                parts.iter().map(DeviceBuffer::len).collect(),
                flat.arg(),
                range.start,
                range.len(),
            );
        });
    }
}

/// Writes one element per unit: `count` elements from `start` on. An empty part has memory for one
/// element, so the lengths are arguments.
#[cube(launch_unchecked)]
fn join_kernel<T: Float>(
    parts: &Sequence<Array<T>>,
    lengths: &Sequence<usize>,
    flat: &mut Array<T>,
    start: usize,
    count: usize,
) {
    let i = ABSOLUTE_POS;
    if i < count {
        let mut value = T::from_int(0);
        let mut before = 0usize;
        #[unroll]
        for part in 0..parts.len() {
            let after = before + lengths[part];
            if i >= before && i < after {
                value = parts[part][i - before];
            }
            before = after;
        }
        flat[start + i] = value;
    }
}
