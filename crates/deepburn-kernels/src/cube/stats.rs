//! Sum of squares and overflow check on the device.
//!
//! ```text
//! gradient rows of 256     row 0 | row 1 | ... | row n - 1 | row n | ...
//! cube c                   takes rows c, c + n, c + 2n, ...    n cubes, at most 1024
//! unit u of a cube         sums element u of each of its rows, in f32
//! tree in shared memory    256 sums -> 128 -> ... -> 1, one sum for each cube
//! host                     adds the sums of the cubes in f64, in their order
//! ```
//!
//! The division into cubes depends only on the length, so the result is the same in every run on
//! the same device.

use cubecl::prelude::*;

use super::device_buffer::{CUBE_DIM, DeviceBuffer, DeviceDType, with_element};
use crate::{FloatSlice, GradientStats};

/// The maximum number of cubes in a launch. Each cube produces one sum, which the host adds.
const MAX_CUBES: usize = 1024;

/// The minimum number of elements per unit, so that short arrays use few cubes.
const PER_UNIT: usize = 16;

/// Returns the sum of squares of a gradient, and whether all elements are finite, in one pass.
/// Waits for the device.
///
/// Squares are computed in f32. If their sum overflows although every element is finite (elements
/// of about 1e19), the elements are copied to the host and summed there. If an element is not
/// finite, the sum is NaN.
///
/// # Panics
/// Panics if the device fails.
pub fn gradient_stats<R: Runtime>(client: &ComputeClient<R>, grad: &DeviceBuffer) -> GradientStats {
    if grad.is_empty() {
        return GradientStats { sum_of_squares: 0.0, finite: true };
    }
    let cubes = grad.len().div_ceil(CUBE_DIM as usize * PER_UNIT).min(MAX_CUBES);
    let sums = DeviceBuffer::empty(client, cubes, DeviceDType::F32);
    let bad = client.empty(cubes * size_of::<u32>());
    let (count, dim) = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(CUBE_DIM));
    // SAFETY: every unit checks that its elements exist, and both results have one element for each
    // cube.
    unsafe {
        let bad = ArrayArg::from_raw_parts(bad.clone(), cubes);
        with_element!(grad.dtype(), G => {
            stats_kernel::launch_unchecked::<G, R>(client, count, dim, grad.arg(), sums.arg(), bad);
        });
    }
    let read = |handle| match client.read_one(handle) {
        Ok(bytes) => bytes,
        Err(error) => panic!("reading the sums of a gradient failed: {error:?}"),
    };
    let finite = u32::from_bytes(&read(bad)).iter().all(|bad| *bad == 0);
    let sums = read(sums.into_handle());
    let sum_of_squares = f32::from_bytes(&sums).iter().map(|sum| f64::from(*sum)).sum::<f64>();
    if !finite {
        return GradientStats { sum_of_squares: f64::NAN, finite };
    }
    if sum_of_squares.is_finite() {
        return GradientStats { sum_of_squares, finite };
    }
    // Squares of f32 and bf16 elements can overflow f32; squares of f16 elements cannot.
    let bytes = read(grad.clone().into_handle());
    with_element!(grad.dtype(), G => {
        crate::gradient_stats(FloatSlice::from(&G::from_bytes(&bytes)[..grad.len()]))
    })
}

/// Writes the sum of squares of each cube to `sums`. Writes 1 to `bad` for each cube with an
/// element that is not finite.
///
/// Adjacent units read adjacent elements, so that the device coalesces their reads.
#[cube(launch_unchecked)]
fn stats_kernel<G: Float>(grad: &Array<G>, sums: &mut Array<f32>, bad: &mut Array<u32>) {
    let mut squares = SharedMemory::<f32>::new(256usize);
    let mut found = SharedMemory::<u32>::new(256usize);
    let unit = UNIT_POS as usize;
    let width = CUBE_DIM as usize;
    let stride = CUBE_COUNT * width;
    let mut sum = f32::new(0.0);
    let mut any = u32::new(0);
    let mut i = CUBE_POS * width + unit;
    while i < grad.len() {
        let x = f32::cast_from(grad[i]);
        sum += x * x;
        // All exponent bits set: infinite or NaN.
        let bits = u32::reinterpret(x);
        if (bits & 0x7f80_0000u32) == 0x7f80_0000u32 {
            any = u32::new(1);
        }
        i += stride;
    }
    squares[unit] = sum;
    found[unit] = any;
    let mut half = width / 2;
    while half > 0 {
        sync_cube();
        if unit < half {
            squares[unit] = squares[unit] + squares[unit + half];
            found[unit] = found[unit] | found[unit + half];
        }
        half /= 2;
    }
    if unit == 0 {
        sums[CUBE_POS] = squares[0];
        bad[CUBE_POS] = found[0];
    }
}
