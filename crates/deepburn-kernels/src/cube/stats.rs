//! Sums of squares and the check for overflow.

use cubecl::prelude::*;

use super::buffer::{Buffer, CUBE_DIM, ElementType, with_element};
use crate::GradientStats;

/// Most cubes of one launch: each leaves one sum for the host.
const MAX_CUBES: usize = 1024;

/// Elements that a unit takes at least.
const PER_UNIT: usize = 16;

/// What one pass over a gradient tells.
///
/// Squares are summed in f32 inside a cube, by a tree, and in f64 over the cubes; the shape depends on
/// the length alone. Where that overflows although every element is finite (beyond 1e19 or so), the
/// elements are read back and summed on the host.
///
/// # Panics
/// When the device fails.
pub fn gradient_stats<R: Runtime>(client: &ComputeClient<R>, grad: &Buffer) -> GradientStats {
    if grad.is_empty() {
        return GradientStats { sum_of_squares: 0.0, finite: true };
    }
    let cubes = grad.len().div_ceil(CUBE_DIM as usize * PER_UNIT).min(MAX_CUBES);
    let sums = Buffer::empty(client, cubes, ElementType::F32);
    let bad = client.empty(cubes * size_of::<u32>());
    let (count, dim) = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(CUBE_DIM));
    // SAFETY: every unit checks that its elements exist, and there is a place for each cube.
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
    // Only f32 has finite numbers whose squares it cannot hold.
    let values = read(grad.clone().into_handle());
    let values = &f32::from_bytes(&values)[..grad.len()];
    crate::gradient_stats(crate::FloatSlice::F32(values))
}

/// A cube takes every n-th row of [`CUBE_DIM`] elements, so that neighbours read neighbours.
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
