//! Sums of squares and overflow checks on the device, for many gradients with one wait.
//!
//! ```text
//! gradient rows of 256     row 0 | row 1 | ... | row n - 1 | row n | ...
//! cube c                   takes rows c, c + n, c + 2n, ...    n cubes, at most 1024
//! unit u of a cube         sums element u of each of its rows, in f32
//! tree in shared memory    256 sums -> 128 -> ... -> 1, one sum for each cube
//! partials                 the pairs of gradient 0 | of gradient 1 | ...      read once
//! host                     adds the sums of a gradient's cubes in f64, in their order
//! ```
//!
//! The division into cubes depends only on the length, so the result is the same in every run on
//! the same device. The kernels of all gradients are launched before the host waits for any of
//! them: a wait for each gradient would leave the device idle once for each parameter.

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device_buffer::{CUBE_DIM, DeviceBuffer, with_element};
use crate::{FloatSlice, GradientStats};

/// The maximum number of cubes in a launch. Each cube produces one pair, which the host adds.
const MAX_CUBES: usize = 1024;

/// The minimum number of elements per unit, so that short arrays use few cubes.
const PER_UNIT: usize = 16;

/// The maximum number of pairs in an array of partial results: 512 KiB. GPT-2 with 124 million
/// parameters has about 30,000.
const MAX_PAIRS: usize = 1 << 16;

/// The number of words of a pair: the bits of the sum, and whether an element is not finite.
const PAIR: usize = 2;

/// Returns the sum of squares of each gradient, and whether all its elements are finite, in one
/// pass over each. Waits for the device once for up to about 60 gradients of the largest size.
///
/// `gradient` returns gradient `0..count`. It is called in this order, and once more for a gradient
/// that must be summed on the host. Results do not depend on which gradients share a call.
///
/// Squares are computed in f32. If their sum overflows although every element is finite (elements
/// of about 1e19), the elements are copied to the host and summed there. If an element is not
/// finite, the sum is NaN.
///
/// # Panics
/// Panics if the device fails.
pub fn gradient_stats<R: Runtime>(
    client: &ComputeClient<R>,
    count: usize,
    gradient: impl Fn(usize) -> DeviceBuffer,
) -> Vec<GradientStats> {
    let mut partials = Partials::new(count);
    // A gradient may be a copy of a slice. It is dropped as soon as its kernel is launched, so that
    // its memory can be reused for the next one.
    let places: Vec<_> =
        (0..count).map(|index| partials.launch(client, &gradient(index))).collect();
    let arrays = partials.read(client);
    let stats = places.into_iter().enumerate().map(|(index, place)| {
        let Some(GradientPairs { array, pairs }) = place else {
            return GradientStats { sum_of_squares: 0.0, finite: true };
        };
        let words = &arrays[array][pairs.start * PAIR..pairs.end * PAIR];
        let finite = words.iter().skip(1).step_by(PAIR).all(|bad| *bad == 0);
        if !finite {
            return GradientStats { sum_of_squares: f64::NAN, finite };
        }
        let sums = words.iter().step_by(PAIR).map(|sum| f64::from(f32::from_bits(*sum)));
        let sum_of_squares = sums.sum::<f64>();
        if sum_of_squares.is_finite() {
            return GradientStats { sum_of_squares, finite };
        }
        // Squares of f32 and bf16 elements can overflow f32; squares of f16 elements cannot.
        stats_on_host(client, gradient(index))
    });
    stats.collect()
}

/// Copies a gradient to the host and sums its squares there, in f64.
fn stats_on_host<R: Runtime>(client: &ComputeClient<R>, grad: DeviceBuffer) -> GradientStats {
    let (len, dtype) = (grad.len(), grad.dtype());
    let bytes = read(client, vec![grad.into_handle()]).swap_remove(0);
    with_element!(dtype, G => {
        crate::gradient_stats(FloatSlice::from(&G::from_bytes(&bytes)[..len]))
    })
}

/// Copies arrays to the host, with one wait for all of them.
///
/// # Panics
/// Panics if the device fails.
fn read<R: Runtime>(client: &ComputeClient<R>, handles: Vec<Handle>) -> Vec<cubecl::bytes::Bytes> {
    match cubecl::future::block_on(client.read_async(handles)) {
        Ok(bytes) => bytes,
        Err(error) => panic!("reading the sums of gradients failed: {error:?}"),
    }
}

/// The pairs of a gradient.
struct GradientPairs {
    /// The index of the array.
    array: usize,
    /// The pairs in the array, one for each cube.
    pairs: Range<usize>,
}

/// The arrays in which kernels write their pairs.
struct Partials {
    /// The arrays, each with the number of pairs in it. The last one is being filled.
    arrays: Vec<(Handle, usize)>,
    /// The number of pairs for which an array has memory.
    capacity: usize,
}

impl Partials {
    /// Prepares arrays for `count` gradients.
    fn new(count: usize) -> Self {
        Self { arrays: Vec::new(), capacity: (count * MAX_CUBES).min(MAX_PAIRS) }
    }

    /// Launches the kernel of a gradient and returns the place of its pairs; `None` for a gradient
    /// without elements.
    fn launch<R: Runtime>(
        &mut self,
        client: &ComputeClient<R>,
        grad: &DeviceBuffer,
    ) -> Option<GradientPairs> {
        if grad.is_empty() {
            return None;
        }
        let cubes = grad.len().div_ceil(CUBE_DIM as usize * PER_UNIT).min(MAX_CUBES);
        if self.arrays.last().is_none_or(|(_, used)| used + cubes > self.capacity) {
            self.arrays.push((client.empty(self.capacity * PAIR * size_of::<u32>()), 0));
        }
        let array = self.arrays.len() - 1;
        let (handle, used) = &mut self.arrays[array];
        let start = *used;
        *used += cubes;
        let (count, dim) = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(CUBE_DIM));
        // SAFETY: every unit checks that its elements exist, and the array has a pair for each
        // cube: a launch has at most `MAX_CUBES` cubes, for which an empty array has memory.
        unsafe {
            let pairs = ArrayArg::from_raw_parts(handle.clone(), self.capacity * PAIR);
            with_element!(grad.dtype(), G => {
                stats_kernel::launch_unchecked::<G, R>(
                    client,
                    count,
                    dim,
                    grad.arg(),
                    start,
                    pairs,
                );
            });
        }
        Some(GradientPairs { array, pairs: start..start + cubes })
    }

    /// Waits for the kernels and returns the words of each array.
    fn read<R: Runtime>(self, client: &ComputeClient<R>) -> Vec<Vec<u32>> {
        if self.arrays.is_empty() {
            return Vec::new();
        }
        let unused = |used: usize| ((self.capacity - used) * PAIR * size_of::<u32>()) as u64;
        let written = |(handle, used): (Handle, usize)| handle.offset_end(unused(used));
        let bytes = read(client, self.arrays.into_iter().map(written).collect());
        bytes.iter().map(|bytes| u32::from_bytes(bytes).to_vec()).collect()
    }
}

/// Writes a pair for each cube, from pair `start` on: the sum of squares, and 1 if an element is
/// not finite.
///
/// Adjacent units read adjacent elements, so that the device coalesces their reads.
#[cube(launch_unchecked)]
fn stats_kernel<G: Float>(grad: &Array<G>, start: usize, pairs: &mut Array<u32>) {
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
        let pair = (start + CUBE_POS) * 2;
        pairs[pair] = u32::reinterpret(squares[0]);
        pairs[pair + 1] = found[0];
    }
}
