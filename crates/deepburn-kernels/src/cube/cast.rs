//! Conversion between f32 and the 16-bit types on the device.
//!
//! Optimizer steps do not need this conversion: they write the working copy in the same kernel
//! launch.

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, DeviceDType, cubes, with_element};

/// Returns the elements in another type, rounded to nearest even. Values beyond the range of the
/// type become infinite.
///
/// Allocates the result and queues one kernel; an empty buffer needs no launch.
pub fn cast<R: Runtime>(
    client: &ComputeClient<R>,
    from: &DeviceBuffer,
    to: DeviceDType,
) -> DeviceBuffer {
    let result = DeviceBuffer::empty(client, from.len(), to);
    if from.is_empty() {
        return result;
    }
    let (count, dim) = cubes(client, from.len());
    // SAFETY: every unit checks that its element exists.
    unsafe {
        with_element!(from.dtype(), F => with_element!(to, T => {
            cast_kernel::launch_unchecked::<F, T, R>(client, count, dim, from.arg(), result.arg());
        }));
    }
    result
}

/// Converts one element per unit. The device's own conversion instructions round to nearest even.
#[cube(launch_unchecked)]
fn cast_kernel<F: Float, T: Float>(from: &Array<F>, to: &mut Array<T>) {
    if ABSOLUTE_POS < to.len() {
        to[ABSOLUTE_POS] = T::cast_from(from[ABSOLUTE_POS]);
    }
}
