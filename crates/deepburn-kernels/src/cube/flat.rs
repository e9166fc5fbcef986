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
    let extent = [start as u32, part.len() as u32, count as u32];
    let extent = client.create_from_slice(u32::as_bytes(&extent));
    let (cubes, dim) = cubes(client, count);
    // SAFETY: every unit checks that its element exists, and the caller has checked that `flat` is
    // long enough.
    unsafe {
        let extent = ArrayArg::from_raw_parts(extent, 3);
        with_element!(flat.dtype(), T => {
            copy_kernel::launch_unchecked::<T, R>(client, cubes, dim, extent, part.arg(), flat.arg());
        });
    }
}

/// Writes one element per unit. `extent` contains the first element of the result, the length of
/// the part and the number of elements to write.
#[cube(launch_unchecked)]
fn copy_kernel<T: Float>(extent: &Array<u32>, part: &Array<T>, flat: &mut Array<T>) {
    let i = ABSOLUTE_POS;
    let start = extent[0] as usize;
    if i < extent[2] as usize {
        if i < extent[1] as usize {
            flat[start + i] = part[i];
        } else {
            flat[start + i] = T::from_int(0);
        }
    }
}
