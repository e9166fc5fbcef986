//! The sum of all elements on the device, in an order that depends only on their number.
//!
//! ```text
//! first launch    n cubes of 256 units, at most 1024    one f32 sum for each cube, as in `stats`
//! second launch   one cube                              the sum of these sums, in the wanted type
//! ```
//!
//! An array that one cube can sum needs one launch. Kernels that add the sums of several cubes with
//! atomic additions need one launch too, but the cubes arrive in any order, and the last bits of
//! their sum differ from run to run.

use cubecl::prelude::*;

use super::device_buffer::{CUBE_DIM, DeviceBuffer, DeviceDType, with_element};

/// The maximum number of cubes of the first launch. The second launch adds the sum of each.
const MAX_CUBES: usize = 1024;

/// The minimum number of elements per unit, so that short arrays use few cubes.
const PER_UNIT: usize = 16;

/// Returns the sum of all elements as a buffer of one element of the same type.
///
/// Elements are added in f32 and the sum is rounded once. The launches are queued, so the host does
/// not wait.
pub fn sum<R: Runtime>(client: &ComputeClient<R>, values: &DeviceBuffer) -> DeviceBuffer {
    if values.is_empty() {
        // All bits of 0 are 0 in every type.
        let zero = client.create_from_slice(&vec![0; values.dtype().size()]);
        return DeviceBuffer::new(zero, 1, values.dtype());
    }
    let cubes = values.len().div_ceil(CUBE_DIM as usize * PER_UNIT).min(MAX_CUBES);
    if cubes == 1 {
        return sums_of_cubes(client, values, 1, values.dtype());
    }
    let sums = sums_of_cubes(client, values, cubes, DeviceDType::F32);
    sums_of_cubes(client, &sums, 1, values.dtype())
}

/// Divides the elements, of which there is at least one, among `cubes` cubes and returns the sum of
/// each in type `dtype`.
fn sums_of_cubes<R: Runtime>(
    client: &ComputeClient<R>,
    values: &DeviceBuffer,
    cubes: usize,
    dtype: DeviceDType,
) -> DeviceBuffer {
    let sums = DeviceBuffer::empty(client, cubes, dtype);
    let (count, dim) = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(CUBE_DIM));
    // SAFETY: every unit checks that its elements exist, and there is one sum for each cube.
    unsafe {
        with_element!(values.dtype(), T => with_element!(dtype, S => {
            sum_kernel::launch_unchecked::<T, S, R>(client, count, dim, values.arg(), sums.arg());
        }));
    }
    sums
}

/// Writes the sum of the elements of each cube.
///
/// Adjacent units read adjacent elements, so that the device coalesces their reads.
#[cube(launch_unchecked)]
fn sum_kernel<T: Float, S: Float>(values: &Array<T>, sums: &mut Array<S>) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let unit = UNIT_POS as usize;
    let width = CUBE_DIM as usize;
    let stride = CUBE_COUNT * width;
    let mut sum = f32::new(0.0);
    let mut i = CUBE_POS * width + unit;
    while i < values.len() {
        sum += f32::cast_from(values[i]);
        i += stride;
    }
    parts[unit] = sum;
    let mut half = width / 2;
    while half > 0 {
        sync_cube();
        if unit < half {
            parts[unit] = parts[unit] + parts[unit + half];
        }
        half /= 2;
    }
    if unit == 0 {
        sums[CUBE_POS] = S::cast_from(parts[0]);
    }
}
