//! Concatenation of arrays on the device.
//!
//! ```text
//! parts   | a a a | b b | c c c c |
//! flat    | a a a b b c c c c 0 0 0 |      zeros up to the requested length
//! ```
//!
//! With one launch per part, the kernel does not have to search for the part that contains an
//! element. The launches are queued, so the host does not wait between them.

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, cubes, with_element};

/// Returns a new buffer of `len` elements: the parts one after the other, then zeros.
///
/// Uses one launch per part, and one launch for the padding.
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
    let flat = DeviceBuffer::empty(client, len, dtype);
    let mut start = 0;
    for part in parts {
        assert!(part.dtype() == dtype, "flatten: {:?} among {dtype:?}", part.dtype());
        copy(client, part, &flat, start, part.len());
        start += part.len();
    }
    if start < len {
        // An empty part, so that all following elements are padding.
        copy(client, &DeviceBuffer::empty(client, 0, dtype), &flat, start, len - start);
    }
    flat
}

/// Writes `count` elements of `flat` from `start` on: the elements of `part`, then zeros.
fn copy<R: Runtime>(
    client: &ComputeClient<R>,
    part: &DeviceBuffer,
    flat: &DeviceBuffer,
    start: usize,
    count: usize,
) {
    if count == 0 {
        return;
    }
    let (cubes, dim) = cubes(client, count);
    // SAFETY: every unit checks that its element exists, and the caller has checked that `flat` is
    // long enough.
    unsafe {
        with_element!(flat.dtype(), T => {
            copy_kernel::launch_unchecked::<T, R>(
                client,
                cubes,
                dim,
                start,
                part.len(),
                count,
                part.arg(),
                flat.arg(),
            );
        });
    }
}

/// Writes one element per unit: `count` elements from `start` on, of which the first `part_len` are
/// the part's. An empty part has memory for one element, so its array does not have this length.
#[cube(launch_unchecked)]
fn copy_kernel<T: Float>(
    start: usize,
    part_len: usize,
    count: usize,
    part: &Array<T>,
    flat: &mut Array<T>,
) {
    let i = ABSOLUTE_POS;
    if i < count {
        if i < part_len {
            flat[start + i] = part[i];
        } else {
            flat[start + i] = T::from_int(0);
        }
    }
}
