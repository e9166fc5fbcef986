//! Sums of squares and overflow checks on the device, for many gradients with one wait.
//!
//! ```text
//! gradient rows of 256     row 0 | row 1 | ... | row n - 1 | row n | ...
//! cube c                   takes rows c, c + n, c + 2n, ...    n cubes, at most 1024
//! unit u of a cube         sums element u of each of its rows, in f32
//! tree in shared memory    256 sums -> 128 -> ... -> 1, a pair for each cube
//! pairs                    gradient 0's | gradient 1's | ...    in one array
//! totals                   one pair for each gradient: a cube adds its pairs in the same way
//! ```
//!
//! A launch takes up to eight gradients, one after the other, because most parameters of a model
//! are so small that a launch costs more than their sum. The division into cubes depends only on
//! the length of a gradient, so the result is the same in every run on the same device, whichever
//! gradients share a launch. All kernels are launched before the host waits: a wait for each
//! gradient would leave the device idle once for each parameter. It then reads one pair for each
//! gradient.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device_buffer::{CUBE_DIM, DeviceBuffer, items_at_once, with_element};
use crate::{FloatSlice, GradientStats};

/// The maximum number of cubes for a gradient. Each cube produces one pair.
const MAX_CUBES: usize = 1024;

/// The minimum number of elements per unit, so that short arrays use few cubes.
const PER_UNIT: usize = 16;

/// The maximum number of pairs in an array: 512 KiB. GPT-2 with 124 million parameters has about
/// 30,000.
const MAX_PAIRS: usize = 1 << 16;

/// The number of words of a pair: the bits of the sum, and whether an element is not finite.
const PAIR: usize = 2;

/// Gradients of this many elements and more are launched as soon as they are there. A gradient may
/// be a copy of a slice, and all gradients of a launch are in memory at the same time.
const MAX_ELEMENTS: usize = 8 << 20;

/// Returns the sum of squares of each gradient, and whether all its elements are finite, in one
/// pass over each. Waits for the device once.
///
/// `gradient` returns gradient `0..count`. It is called in this order, and once more for a gradient
/// that must be summed on the host. Results do not depend on which gradients share a call.
///
/// Squares are computed and added in f32. If their sum overflows although every element is finite
/// (elements of about 1e19), the elements are copied to the host and summed there. If an element is
/// not finite, the sum is NaN.
///
/// # Panics
/// Panics if the device fails.
pub fn gradient_stats<R: Runtime>(
    client: &ComputeClient<R>,
    count: usize,
    gradient: impl Fn(usize) -> DeviceBuffer,
) -> Vec<GradientStats> {
    let mut partials = Partials::new(client, count);
    let places: Vec<_> = (0..count).map(|index| partials.add(gradient(index))).collect();
    let totals = partials.read();
    let stats = places.into_iter().enumerate().map(|(index, place)| {
        let Some(GradientPlace { array, index: in_array }) = place else {
            return GradientStats { sum_of_squares: 0.0, finite: true };
        };
        let [sum, bad] = totals[array][in_array];
        if bad != 0 {
            return GradientStats { sum_of_squares: f64::NAN, finite: false };
        }
        let sum_of_squares = f64::from(f32::from_bits(sum));
        if sum_of_squares.is_finite() {
            return GradientStats { sum_of_squares, finite: true };
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

/// Where the total of a gradient is.
struct GradientPlace {
    /// The index of the array of pairs.
    array: usize,
    /// The index of the gradient in the array.
    index: usize,
}

/// An array in which kernels write the pairs of some gradients.
struct PairArray {
    /// The memory.
    pairs: Handle,
    /// The pairs up to the end of each gradient, 0 first.
    ends: Vec<u32>,
}

impl PairArray {
    /// Returns the number of pairs in use.
    fn used(&self) -> usize {
        self.ends.last().map_or(0, |end| *end as usize)
    }
}

/// The arrays of pairs, and the gradients that wait for a launch.
struct Partials<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    /// The arrays. The last one is being filled.
    arrays: Vec<PairArray>,
    /// The number of pairs for which an array has memory.
    capacity: usize,
    /// The gradients of the next launch, of one type, with the numbers of their cubes. Their pairs
    /// are the last ones in use.
    waiting: Vec<(DeviceBuffer, usize)>,
}

impl<'a, R: Runtime> Partials<'a, R> {
    /// Prepares arrays for `count` gradients.
    fn new(client: &'a ComputeClient<R>, count: usize) -> Self {
        let capacity = (count * MAX_CUBES).min(MAX_PAIRS);
        Self { client, arrays: Vec::new(), capacity, waiting: Vec::new() }
    }

    /// Adds a gradient, which is launched with others. Returns the place of its total; `None` for a
    /// gradient without elements.
    fn add(&mut self, grad: DeviceBuffer) -> Option<GradientPlace> {
        if grad.is_empty() {
            return None;
        }
        let cubes = grad.len().div_ceil(CUBE_DIM as usize * PER_UNIT).min(MAX_CUBES);
        let is_full = |array: &PairArray| array.used() + cubes > self.capacity;
        let is_alike = self.waiting.first().is_none_or(|(it, _)| it.dtype() == grad.dtype());
        let starts_array = self.arrays.last().is_none_or(is_full);
        if starts_array || !is_alike {
            self.launch();
        }
        if starts_array {
            let pairs = self.client.empty(self.capacity * PAIR * size_of::<u32>());
            self.arrays.push(PairArray { pairs, ends: vec![0] });
        }
        let index = self.arrays.len() - 1;
        let array = &mut self.arrays[index];
        array.ends.push((array.used() + cubes) as u32);
        let place = GradientPlace { array: index, index: array.ends.len() - 2 };
        self.waiting.push((grad, cubes));
        let elements: usize = self.waiting.iter().map(|(grad, _)| grad.len()).sum();
        if self.waiting.len() == items_at_once(self.client, 1, 1) || elements >= MAX_ELEMENTS {
            self.launch();
        }
        Some(place)
    }

    /// Launches the kernel of the gradients that wait.
    fn launch(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        let (Some(array), Some((first, _))) = (self.arrays.last(), waiting.first()) else { return };
        let cubes: usize = waiting.iter().map(|(_, cubes)| cubes).sum();
        let (count, dim) = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(CUBE_DIM));
        // SAFETY: every unit checks that its elements exist, and the array has a pair for each
        // cube.
        unsafe {
            let pairs = ArrayArg::from_raw_parts(array.pairs.clone(), self.capacity * PAIR);
            with_element!(first.dtype(), G => {
                stats_kernel::launch_unchecked::<G, R>(
                    self.client,
                    count,
                    dim,
                    waiting.iter().map(|(grad, _)| grad.arg()).collect(),
                    waiting.iter().map(|(_, cubes)| *cubes).collect(),
                    array.used() - cubes,
                    pairs,
                );
            });
        }
    }

    /// Adds the pairs of each gradient, waits for the kernels and returns the totals of each array.
    fn read(mut self) -> Vec<Vec<[u32; PAIR]>> {
        self.launch();
        if self.arrays.is_empty() {
            return Vec::new();
        }
        let totals = self.arrays.iter().map(|array| self.total(array)).collect();
        let pair = |words: &[u32]| [words[0], words[1]];
        let bytes = read(self.client, totals);
        bytes.iter().map(|it| u32::from_bytes(it).chunks_exact(PAIR).map(pair).collect()).collect()
    }

    /// Launches the kernel that adds the pairs of each gradient of an array. Returns the memory of
    /// the totals.
    fn total(&self, array: &PairArray) -> Handle {
        let gradients = array.ends.len() - 1;
        let totals = self.client.empty(gradients * PAIR * size_of::<u32>());
        let ends = self.client.create_from_slice(u32::as_bytes(&array.ends));
        let (count, dim) = (CubeCount::Static(gradients as u32, 1, 1), CubeDim::new_1d(CUBE_DIM));
        // SAFETY: a cube reads the pairs of its gradient, which are in use, and there is a total
        // for each.
        unsafe {
            total_pairs_kernel::launch_unchecked::<R>(
                self.client,
                count,
                dim,
                ArrayArg::from_raw_parts(array.pairs.clone(), self.capacity * PAIR),
                ArrayArg::from_raw_parts(ends, array.ends.len()),
                ArrayArg::from_raw_parts(totals.clone(), gradients * PAIR),
            );
        }
        totals
    }
}

/// Writes a pair for each cube, from pair `start` on: the sum of squares, and 1 if an element is
/// not finite. `cubes` are the numbers of cubes of the gradients.
///
/// Adjacent units read adjacent elements, so that the device coalesces their reads.
#[cube(launch_unchecked)]
fn stats_kernel<G: Float>(
    gradients: &Sequence<Array<G>>,
    cubes: &Sequence<usize>,
    start: usize,
    pairs: &mut Array<u32>,
) {
    let width = CUBE_DIM as usize;
    let mut sum = f32::new(0.0);
    let mut any = u32::new(0);
    let mut before = 0usize;
    #[unroll]
    for index in 0..gradients.len() {
        let grad = &gradients[index];
        let after = before + cubes[index];
        if CUBE_POS >= before && CUBE_POS < after {
            let mut i = (CUBE_POS - before) * width + UNIT_POS as usize;
            while i < grad.len() {
                let x = f32::cast_from(grad[i]);
                sum += x * x;
                // All exponent bits set: infinite or NaN.
                let bits = u32::reinterpret(x);
                if (bits & 0x7f80_0000u32) == 0x7f80_0000u32 {
                    any = u32::new(1);
                }
                i += cubes[index] * width;
            }
        }
        before = after;
    }
    write_pair(sum, any, pairs, start + CUBE_POS);
}

/// Adds the pairs of a gradient in each cube. `ends` has the pairs up to the end of each gradient,
/// 0 first.
#[cube(launch_unchecked)]
fn total_pairs_kernel(pairs: &Array<u32>, ends: &Array<u32>, totals: &mut Array<u32>) {
    let mut sum = f32::new(0.0);
    let mut any = u32::new(0);
    let mut pair = ends[CUBE_POS] as usize + UNIT_POS as usize;
    let end = ends[CUBE_POS + 1] as usize;
    while pair < end {
        sum += f32::reinterpret(pairs[pair * 2]);
        any |= pairs[pair * 2 + 1];
        pair += CUBE_DIM as usize;
    }
    write_pair(sum, any, totals, CUBE_POS);
}

/// Adds the sums of all units of a cube in a tree and writes the pair of the cube.
#[cube]
fn write_pair(sum: f32, any: u32, pairs: &mut Array<u32>, place: usize) {
    let mut squares = SharedMemory::<f32>::new(256usize);
    let mut found = SharedMemory::<u32>::new(256usize);
    let unit = UNIT_POS as usize;
    squares[unit] = sum;
    found[unit] = any;
    let mut half = CUBE_DIM as usize / 2;
    while half > 0 {
        sync_cube();
        if unit < half {
            squares[unit] = squares[unit] + squares[unit + half];
            found[unit] = found[unit] | found[unit + half];
        }
        half /= 2;
    }
    if unit == 0 {
        pairs[place * 2] = u32::reinterpret(squares[0]);
        pairs[place * 2 + 1] = found[0];
    }
}
