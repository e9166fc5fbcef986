//! Softmax cross-entropy of rows of logits, in one launch.
//!
//! ```text
//! row       l_0 l_1 ... l_v-1          256 units, or fewer if the row is short
//! read      the largest logit m and sum(exp(l - m)) of a unit, scaled whenever m grows
//! tree      m of the row, then the sum of the units' sums times exp(m of the unit - m)
//! loss      ln(sum) - (l_target - m)
//! write     l = exp(l - m) / sum, minus 1 at the target          if the gradient is wanted
//! ```
//!
//! A row is therefore read twice and written once, whatever its length (online softmax, Milakov and
//! Gimelshein 2018). A row without a target is not read.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device_buffer::{DeviceBuffer, DeviceDType, cubes, with_element};
use super::elementwise::{only_if, write};
use super::row_tree::{RowLayout, own_row, row_grid, row_len, row_max, row_sum};

/// The targets and the results of a loss, one of each for every row of all chunks.
#[derive(Debug)]
pub struct RowLosses<'a> {
    /// The index of the target of each row, as 32-bit integers. A negative one masks its row.
    pub targets: Handle,
    /// Receives the loss of each row, in f32; 0 for masked rows.
    pub losses: &'a DeviceBuffer,
    /// Receives 1 for each row whose target has the largest logit, and is the first one that has
    /// it, in f32; otherwise 0.
    pub predicted: Option<&'a DeviceBuffer>,
}

/// The logits of a chunk of rows.
#[derive(Debug, Clone, Copy)]
pub struct LogitRows<'a> {
    /// The memory of the rows.
    pub logits: &'a DeviceBuffer,
    /// The number of rows.
    pub count: usize,
    /// The number of logits of a row.
    pub vocab: usize,
    /// The distance between the first logits of two rows. Products on a device may have padding
    /// between their rows, which is neither read nor written.
    pub stride: usize,
}

/// Computes the losses of a chunk of rows, in f32. The rows are `first_row..` of the rows of
/// `results`.
///
/// With `gradient`, the logits are overwritten with the gradient of the sum of the losses, rounded
/// once, which is 0 for masked rows. A row that contains NaN or plus infinity, or whose target is
/// beyond the vocabulary, gets a loss and a gradient of NaN.
///
/// Queues one kernel.
///
/// # Panics
/// Panics if there are fewer logits, targets, losses or predictions than the rows need, or if
/// losses or predictions are not f32.
pub fn row_losses<R: Runtime>(
    client: &ComputeClient<R>,
    chunk: LogitRows<'_>,
    first_row: usize,
    results: RowLosses<'_>,
    gradient: bool,
) {
    let LogitRows { logits, count, vocab, stride } = chunk;
    if count == 0 || vocab == 0 {
        return;
    }
    results.check(&chunk, first_row + count);
    let RowLosses { targets, losses, predicted } = results;
    let targets_len = first_row + count;
    let (cubes, dim, rows) = row_grid(client, [count, vocab], stride);
    // SAFETY: units check that their row, its elements and its target exist, and all rows have
    // logits, a target, a loss and a prediction.
    unsafe {
        let targets = ArrayArg::from_raw_parts(targets, targets_len);
        with_element!(logits.dtype(), L => {
            loss_kernel::launch_unchecked::<L, R>(
                client,
                cubes,
                dim,
                logits.arg(),
                targets,
                losses.arg(),
                predicted.iter().map(|predicted| predicted.arg()).collect(),
                rows,
                first_row,
                gradient,
            );
        });
    }
}

impl RowLosses<'_> {
    /// Checks the lengths and types of all arrays, where `rows` targets and results are needed.
    ///
    /// # Panics
    /// Panics under the conditions of [`row_losses`].
    fn check(&self, chunk: &LogitRows<'_>, rows: usize) {
        let LogitRows { logits, count, vocab, stride } = *chunk;
        let needed = (count - 1) * stride + vocab;
        let len = logits.len();
        assert!(
            stride >= vocab && needed <= len,
            "{count} rows of {vocab} logits, {stride} apart, do not fit in {len} elements"
        );
        let targets = self.targets.size_in_used() as usize / size_of::<i32>();
        assert!(rows <= targets, "{rows} rows have only {targets} targets");
        for results in [self.losses].into_iter().chain(self.predicted) {
            let (len, dtype) = (results.len(), results.dtype());
            assert!(rows <= len, "{rows} rows have only {len} losses or predictions");
            assert!(dtype == DeviceDType::F32, "losses and predictions are {dtype:?}, must be F32");
        }
    }
}

/// The smallest f32. With minus infinity, the difference of two equal logits would be NaN.
const LOWEST: f32 = f32::MIN;

/// The number of elements that a unit reads before it uses the first of them, so that the device
/// can wait for all of them together.
const AT_ONCE: usize = 4;

/// Computes the loss of a row with several units. `predicted` is empty or has one array.
#[cube(launch_unchecked)]
fn loss_kernel<L: Float>(
    logits: &mut Array<L>,
    targets: &Array<i32>,
    losses: &mut Array<f32>,
    predicted: &mut Sequence<Array<f32>>,
    rows: &RowLayout,
    first_row: usize,
    #[comptime] writes_gradient: bool,
) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let units = rows.units;
    let row = own_row(units);
    let start = row * rows.stride;
    let mut target = i32::new(-1);
    if row < rows.count {
        target = targets[first_row + row];
    }
    // A masked row has no elements to read, but its units reach every barrier.
    let mut len = rows.width;
    if target < 0 {
        len = 0usize;
    }
    // A target beyond the vocabulary has no logit.
    let mut is_beyond = u32::new(0);
    let mut target_logit = f32::new(0.0);
    if (target as usize) < len {
        // Read before it is overwritten.
        target_logit = f32::cast_from(logits[start + target as usize]);
    } else if target >= 0 {
        is_beyond = u32::new(1);
    }

    let own = unit_softmax::<L>(logits, start, len, units);
    let largest = row_max(&mut parts, own.largest, units);
    let sum = row_sum(&mut parts, own.sum * (own.largest - largest).exp(), units);
    let sum = sum + nan_if(is_beyond);

    let place = UNIT_POS as usize % units;
    let is_first = place == 0 && row < rows.count;
    if comptime![predicted.len() == 1] {
        let beaten = beaten_by::<L>(logits, start, len, target as usize, target_logit, units);
        let beaten = row_max(&mut parts, beaten, units);
        if is_first {
            let is_predicted = only_if(target >= 0 && beaten == 0.0, f32::new(1.0));
            write::<f32>(predicted, 0usize, first_row + row, is_predicted);
        }
    }
    if is_first {
        losses[first_row + row] = only_if(target >= 0, sum.ln() - (target_logit - largest));
    }
    if comptime![writes_gradient] {
        let softmax = Softmax { largest, sum };
        overwrite::<L>(logits, rows, row, target, &softmax);
    }
}

/// The largest logit of some, and the sum of the exponentials of their differences from it.
#[derive(CubeType)]
struct Softmax {
    largest: f32,
    sum: f32,
}

/// Returns the largest logit and the sum of one unit of a row, whose `len` elements begin at
/// `start`. The sum is NaN if a logit is NaN or plus infinity.
#[cube]
fn unit_softmax<L: Float>(
    logits: &Array<L>,
    start: usize,
    len: usize,
    #[comptime] units: usize,
) -> Softmax {
    let mut largest = f32::new(LOWEST);
    let mut sum = f32::new(0.0);
    let mut is_bad = u32::new(0);
    let mut i = UNIT_POS as usize % units;
    while i + comptime![(AT_ONCE - 1) * units] < len {
        let mut read = Array::<f32>::new(AT_ONCE);
        #[unroll]
        for k in 0..AT_ONCE {
            read[k] = f32::cast_from(logits[start + i + k * units]);
        }
        let mut new_largest = largest;
        #[unroll]
        for k in 0..AT_ONCE {
            is_bad |= is_nan_or_plus_infinity(read[k]);
            new_largest = max(new_largest, read[k]);
        }
        sum *= (largest - new_largest).exp();
        largest = new_largest;
        #[unroll]
        for k in 0..AT_ONCE {
            sum += (read[k] - largest).exp();
        }
        i += comptime![AT_ONCE * units];
    }
    while i < len {
        let logit = f32::cast_from(logits[start + i]);
        is_bad |= is_nan_or_plus_infinity(logit);
        let new_largest = max(largest, logit);
        sum = sum * (largest - new_largest).exp() + (logit - new_largest).exp();
        largest = new_largest;
        i += units;
    }
    Softmax { largest, sum: sum + nan_if(is_bad) }
}

/// Returns 1 if one of a unit's logits is larger than the target's, or equal and before it;
/// otherwise 0. A NaN is as larger.
#[cube]
fn beaten_by<L: Float>(
    logits: &Array<L>,
    start: usize,
    len: usize,
    target: usize,
    target_logit: f32,
    #[comptime] units: usize,
) -> f32 {
    let mut beaten = f32::new(0.0);
    let mut i = UNIT_POS as usize % units;
    while i < len {
        let logit = f32::cast_from(logits[start + i]);
        let is_bad = is_nan_or_plus_infinity(logit) == 1u32;
        if is_bad || logit > target_logit || (logit == target_logit && i < target) {
            beaten = f32::new(1.0);
        }
        i += units;
    }
    beaten
}

/// Overwrites the logits of a row with their gradient.
#[cube]
fn overwrite<L: Float>(
    logits: &mut Array<L>,
    rows: &RowLayout,
    row: usize,
    target: i32,
    softmax: &Softmax,
) {
    let start = row * rows.stride;
    let len = row_len(rows, row);
    let factor = 1.0 / softmax.sum;
    let mut i = UNIT_POS as usize % rows.units;
    while i < len {
        let mut gradient = f32::new(0.0);
        if target >= 0 {
            let logit = f32::cast_from(logits[start + i]);
            gradient = (logit - softmax.largest).exp() * factor;
            if i == target as usize {
                gradient -= 1.0;
            }
        }
        logits[start + i] = L::cast_from(gradient);
        i += rows.units;
    }
}

/// Returns 1 for NaN and plus infinity, which give the row no loss, and otherwise 0. Tests the
/// bits, because a shader compiler may assume that there are no such numbers.
#[cube]
fn is_nan_or_plus_infinity(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let mut is_bad = u32::new(0);
    if (bits & 0x7f80_0000u32) == 0x7f80_0000u32 && bits != 0xff80_0000u32 {
        is_bad = u32::new(1);
    }
    is_bad
}

/// Returns NaN for 1, and 0 for 0.
#[cube]
fn nan_if(is_bad: u32) -> f32 {
    // All bits of the exponent and one of the mantissa.
    f32::reinterpret(is_bad * 0x7fc0_0000u32)
}

/// Multiplies each element by the single f32 element of `factor` and rounds it to `dtype` once.
///
/// Allocates the result and queues one kernel; an empty buffer needs no launch.
pub fn scale<R: Runtime>(
    client: &ComputeClient<R>,
    values: &DeviceBuffer,
    factor: &DeviceBuffer,
    dtype: DeviceDType,
) -> DeviceBuffer {
    let result = DeviceBuffer::empty(client, values.len(), dtype);
    if values.is_empty() {
        return result;
    }
    let (count, dim) = cubes(client, values.len());
    // SAFETY: every unit checks that its element exists, and a buffer has at least one element.
    unsafe {
        with_element!(values.dtype(), V => with_element!(dtype, T => {
            scale_kernel::launch_unchecked::<V, T, R>(
                client,
                count,
                dim,
                values.arg(),
                factor.arg(),
                result.arg(),
            );
        }));
    }
    result
}

/// Scales one element per unit.
#[cube(launch_unchecked)]
fn scale_kernel<V: Float, T: Float>(values: &Array<V>, factor: &Array<f32>, result: &mut Array<T>) {
    if ABSOLUTE_POS < result.len() {
        result[ABSOLUTE_POS] = T::cast_from(f32::cast_from(values[ABSOLUTE_POS]) * factor[0]);
    }
}

/// Writes a product to elements `start..` of `total`, or adds it to them, in f32.
///
/// Queues one kernel.
///
/// # Panics
/// Panics if `total` is not f32, or too short.
pub fn accumulate<R: Runtime>(
    client: &ComputeClient<R>,
    total: &DeviceBuffer,
    start: usize,
    product: &DeviceBuffer,
    adds: bool,
) {
    let (dtype, len) = (total.dtype(), total.len());
    assert!(dtype == DeviceDType::F32, "products are added to {dtype:?}, must be F32");
    let end = start + product.len();
    assert!(end <= len, "elements {start}..{end} are not among {len}");
    if product.is_empty() {
        return;
    }
    let (count, dim) = cubes(client, product.len());
    // SAFETY: every unit checks that its element exists, and `total` is long enough.
    unsafe {
        with_element!(product.dtype(), P => {
            accumulate_kernel::launch_unchecked::<P, R>(
                client,
                count,
                dim,
                total.arg(),
                start,
                product.arg(),
                adds,
            );
        });
    }
}

/// Writes or adds one element per unit.
#[cube(launch_unchecked)]
fn accumulate_kernel<P: Float>(
    total: &mut Array<f32>,
    start: usize,
    product: &Array<P>,
    #[comptime] adds: bool,
) {
    if ABSOLUTE_POS < product.len() {
        let value = f32::cast_from(product[ABSOLUTE_POS]);
        let place = start + ABSOLUTE_POS;
        if comptime![adds] {
            total[place] = total[place] + value;
        } else {
            total[place] = value;
        }
    }
}
