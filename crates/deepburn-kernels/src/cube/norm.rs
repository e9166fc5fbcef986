//! Layer normalization and RMS normalization of the rows of a matrix.
//!
//! ```text
//! forward     one launch: sums over a row, then its output. A row is read again from the cache.
//! backward    one launch for the gradient of x; two for the gradients of the weights, which are
//!             sums of columns (`columns`)
//! ```
//!
//! The formulas are the CPU kernels'. The variance is the mean of the squared differences
//! from the mean. All arithmetic is in f32, and results are rounded to their type once.

use cubecl::prelude::*;

use super::columns::{
    BlockGrid, ColumnBlocks, LANES, block_sums, column_sum, unit_column, write_partial,
};
use super::device_buffer::{DeviceBuffer, DeviceDType, with_element};
use super::elementwise::write;
use super::row_tree::{RowLayout, own_row, row_grid, row_len, row_sum};

/// The output of a layer normalization, and what its backward pass needs.
#[derive(Debug)]
pub struct LayerNormRows {
    /// The normalized rows, in the type of the input.
    pub output: DeviceBuffer,
    /// The mean of each row, in f32.
    pub mean: DeviceBuffer,
    /// `1 / sqrt(var + epsilon)` of each row, in f32.
    pub reciprocal_deviation: DeviceBuffer,
}

/// Returns `(x - mean) / sqrt(var + epsilon) * gamma + beta` of rows of the length of `gamma`.
///
/// Queues one kernel.
///
/// # Panics
/// Panics if `gamma` has no elements, or if `beta` differs from it in length or type.
pub fn layer_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: &DeviceBuffer,
    [gamma, beta]: [&DeviceBuffer; 2],
    epsilon: f32,
) -> LayerNormRows {
    let width = gamma.len();
    assert!(
        beta.len() == width && beta.dtype() == gamma.dtype(),
        "`beta` and `gamma` differ in length or type"
    );
    let count = x.len() / width;
    let output = DeviceBuffer::empty(client, x.len(), x.dtype());
    let [mean, reciprocal_deviation] =
        [(); 2].map(|()| DeviceBuffer::empty(client, count, DeviceDType::F32));
    if count > 0 {
        let (cubes, dim, rows) = row_grid(client, [count, width], width);
        // SAFETY: units check that their row and its elements exist.
        unsafe {
            with_element!(x.dtype(), X => with_element!(gamma.dtype(), W => {
                layer_norm_kernel::launch_unchecked::<X, W, R>(
                    client,
                    cubes,
                    dim,
                    x.arg(),
                    [gamma.arg(), beta.arg()].into_iter().collect(),
                    epsilon,
                    output.arg(),
                    [mean.arg(), reciprocal_deviation.arg()].into_iter().collect(),
                    rows,
                );
            }));
        }
    }
    LayerNormRows { output, mean, reciprocal_deviation }
}

/// Normalizes a row with several units. `weights` are `gamma` and `beta`; `statistics` receive the
/// means and the reciprocal deviations.
#[cube(launch_unchecked)]
fn layer_norm_kernel<X: Float, W: Float>(
    x: &Array<X>,
    weights: &Sequence<Array<W>>,
    epsilon: f32,
    output: &mut Array<X>,
    statistics: &mut Sequence<Array<f32>>,
    rows: &RowLayout,
) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let units = rows.units;
    let row = own_row(units);
    let place = UNIT_POS as usize % units;
    let start = row * rows.stride;
    let len = row_len(rows, row);
    let mut sum = f32::new(0.0);
    let mut i = place;
    while i < len {
        sum += f32::cast_from(x[start + i]);
        i += units;
    }
    let width = rows.width as f32;
    let mean = row_sum(&mut parts, sum, units) / width;
    let mut squares = f32::new(0.0);
    let mut i = place;
    while i < len {
        let centered = f32::cast_from(x[start + i]) - mean;
        squares += centered * centered;
        i += units;
    }
    let variance = row_sum(&mut parts, squares, units) / width;
    let reciprocal = 1.0 / (variance + epsilon).sqrt();
    let mut i = place;
    while i < len {
        let normalized = (f32::cast_from(x[start + i]) - mean) * reciprocal;
        let gamma = f32::cast_from(weights[0][i]);
        output[start + i] = X::cast_from(normalized * gamma + f32::cast_from(weights[1][i]));
        i += units;
    }
    if place == 0 && row < rows.count {
        write::<f32>(statistics, 0usize, row, mean);
        write::<f32>(statistics, 1usize, row, reciprocal);
    }
}

/// The input of a normalization that was saved for the backward pass, with one f32 number of each
/// kind for each row.
#[derive(Debug, Clone, Copy)]
pub struct NormalizedRows<'a> {
    /// The rows.
    pub x: &'a DeviceBuffer,
    /// The means, which are subtracted; `None` for RMS normalization.
    pub mean: Option<&'a DeviceBuffer>,
    /// The factor of each row: the reciprocal deviation, or the reciprocal root.
    pub factor: &'a DeviceBuffer,
}

impl NormalizedRows<'_> {
    /// Returns the means, if there are any, and the factors as an argument.
    fn statistics<R: Runtime>(&self) -> SequenceArg<R, Array<f32>> {
        [self.factor].into_iter().chain(self.mean).map(|each| each.arg()).collect()
    }

    /// Checks the lengths of the arrays.
    ///
    /// # Panics
    /// Panics if `grad` differs from `x` in length or type, or if there are fewer numbers than rows
    /// of `width` elements.
    fn check(&self, grad: &DeviceBuffer, width: usize) {
        let (x, rows) = (self.x, self.x.len() / width);
        assert!(
            grad.len() == x.len() && grad.dtype() == x.dtype(),
            "the gradient of the output and `x` differ in length or type"
        );
        for numbers in [self.factor].into_iter().chain(self.mean) {
            let len = numbers.len();
            assert!(len >= rows, "{rows} normalized rows have only {len} means or factors");
        }
    }
}

/// Returns the gradient of `x`, in its type. `weight` is `gamma`; with `plus_one` the factor of a
/// column is the weight plus 1. `grad` is the gradient of the output.
///
/// With the normalized row `n = (x - mean) r` and `g = grad factor`: `r (g - mean(g) - n mean(g
/// n))`, or without means `r (g - n mean(g n))`.
///
/// Queues one kernel.
///
/// # Panics
/// Panics if `weight` has no elements, or the buffers do not fit.
pub fn norm_x_gradient<R: Runtime>(
    client: &ComputeClient<R>,
    grad: &DeviceBuffer,
    normalized: NormalizedRows<'_>,
    weight: &DeviceBuffer,
    plus_one: bool,
) -> DeviceBuffer {
    let (x, width) = (normalized.x, weight.len());
    normalized.check(grad, width);
    let result = DeviceBuffer::empty(client, x.len(), x.dtype());
    if x.is_empty() {
        return result;
    }
    let (cubes, dim, rows) = row_grid(client, [x.len() / width, width], width);
    // SAFETY: units check that their row and its elements exist, and every row has its numbers.
    unsafe {
        with_element!(x.dtype(), X => with_element!(weight.dtype(), W => {
            x_gradient_kernel::launch_unchecked::<X, W, R>(
                client,
                cubes,
                dim,
                [grad.arg(), x.arg()].into_iter().collect(),
                normalized.statistics(),
                weight.arg(),
                result.arg(),
                rows,
                plus_one,
            );
        }));
    }
    result
}

/// Computes the gradient of a row with several units. `inputs` are the gradient of the output and
/// `x`.
#[cube(launch_unchecked)]
fn x_gradient_kernel<X: Float, W: Float>(
    inputs: &Sequence<Array<X>>,
    statistics: &Sequence<Array<f32>>,
    weight: &Array<W>,
    result: &mut Array<X>,
    rows: &RowLayout,
    #[comptime] plus_one: bool,
) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let units = rows.units;
    let row = own_row(units);
    let place = UNIT_POS as usize % units;
    let start = row * rows.stride;
    let len = row_len(rows, row);
    let width = rows.width as f32;
    let has_mean = comptime![statistics.len() > 1];
    let numbers = row_statistics(statistics, row, rows.count);
    let mut sum = f32::new(0.0);
    let mut along = f32::new(0.0);
    let mut i = place;
    while i < len {
        let scaled = f32::cast_from(inputs[0][start + i]) * factor_of::<W>(weight, i, plus_one);
        along += scaled * normalized_of(f32::cast_from(inputs[1][start + i]), &numbers);
        if comptime![has_mean] {
            sum += scaled;
        }
        i += units;
    }
    let along = row_sum(&mut parts, along, units) / width;
    let mut mean = f32::new(0.0);
    if comptime![has_mean] {
        mean = row_sum(&mut parts, sum, units) / width;
    }
    let mut i = place;
    while i < len {
        let scaled = f32::cast_from(inputs[0][start + i]) * factor_of::<W>(weight, i, plus_one);
        let normalized = normalized_of(f32::cast_from(inputs[1][start + i]), &numbers);
        let gradient = (scaled - mean - normalized * along) * numbers.factor;
        result[start + i] = X::cast_from(gradient);
        i += units;
    }
}

/// The numbers of a row.
#[derive(CubeType)]
struct RowStatistics {
    mean: f32,
    factor: f32,
}

/// Returns the numbers of a row, which are 0 beyond the last one. `statistics` are the factors, and
/// the means if there are any.
#[cube]
fn row_statistics(statistics: &Sequence<Array<f32>>, row: usize, rows: usize) -> RowStatistics {
    let mut mean = f32::new(0.0);
    let mut factor = f32::new(0.0);
    if row < rows {
        factor = statistics[0][row];
        if comptime![statistics.len() > 1] {
            mean = statistics[1][row];
        }
    }
    RowStatistics { mean, factor }
}

/// Returns the normalized value of an element.
#[cube]
fn normalized_of(x: f32, numbers: &RowStatistics) -> f32 {
    (x - numbers.mean) * numbers.factor
}

/// Returns the factor of a column.
#[cube]
fn factor_of<W: Float>(weight: &Array<W>, column: usize, #[comptime] plus_one: bool) -> f32 {
    let weight = f32::cast_from(weight[column]);
    if comptime![plus_one] { weight + 1.0 } else { weight }
}

/// The gradients of the weights of a normalization.
#[derive(Debug)]
pub struct NormWeightGradients {
    /// The sum of `grad` times the normalized rows.
    pub weight: DeviceBuffer,
    /// The sum of `grad`, of a layer normalization.
    pub bias: Option<DeviceBuffer>,
}

/// Returns the gradients of the weights, in type `dtype`: sums over all rows of `width` elements,
/// in a fixed order. `grad` is the gradient of the output.
///
/// Queues two kernels.
///
/// # Panics
/// Panics if `width` is 0, or the buffers do not fit.
pub fn norm_weight_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    grad: &DeviceBuffer,
    normalized: NormalizedRows<'_>,
    width: usize,
    dtype: DeviceDType,
) -> NormWeightGradients {
    normalized.check(grad, width);
    let x = normalized.x;
    let kinds = if normalized.mean.is_some() { 2 } else { 1 };
    let sums = block_sums(client, [x.len() / width, width], kinds, |grid| {
        let BlockGrid { count, dim, blocks, partials } = grid;
        // SAFETY: units check that their row, column and block exist.
        unsafe {
            with_element!(x.dtype(), X => {
                weight_gradients_kernel::launch_unchecked::<X, R>(
                    client,
                    count,
                    dim,
                    grad.arg(),
                    x.arg(),
                    normalized.statistics(),
                    partials,
                    blocks,
                );
            });
        }
    });
    let mut totals = sums.total(client, dtype).into_iter();
    let weight = totals.next().expect("there is at least one kind of sums");
    NormWeightGradients { weight, bias: totals.next() }
}

/// Writes the sums of each column of a block. The second kind, the sums of the gradient alone, goes
/// with means.
#[cube(launch_unchecked)]
fn weight_gradients_kernel<X: Float>(
    grad: &Array<X>,
    x: &Array<X>,
    statistics: &Sequence<Array<f32>>,
    partials: &mut Array<f32>,
    blocks: &ColumnBlocks,
) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let own = unit_column(blocks);
    let mut weight = f32::new(0.0);
    let mut bias = f32::new(0.0);
    let mut row = own.first;
    while row < own.end {
        let place = row * blocks.width + own.column;
        let numbers = row_statistics(statistics, row, blocks.rows);
        let grad = f32::cast_from(grad[place]);
        weight += grad * normalized_of(f32::cast_from(x[place]), &numbers);
        bias += grad;
        row += LANES;
    }
    let weight = column_sum(&mut parts, weight);
    write_partial(partials, blocks, &own, 0usize, weight);
    if comptime![statistics.len() > 1] {
        let bias = column_sum(&mut parts, bias);
        write_partial(partials, blocks, &own, 1usize, bias);
    }
}

/// The output of an RMS normalization, and what its backward pass needs.
#[derive(Debug)]
pub struct RmsNormRows {
    /// The normalized rows, in the type of the input.
    pub output: DeviceBuffer,
    /// `1 / sqrt(mean(x^2) + epsilon)` of each row, in f32.
    pub reciprocal_root: DeviceBuffer,
}

/// Returns the quotients `x / sqrt(mean(x^2) + epsilon)` of rows of the length of `weight`, times a
/// factor for each column.
///
/// With `plus_one` the factor is `1 + weight`, and the product is rounded once. Otherwise it is the
/// weight, and the quotient is rounded to the type of `x` before.
///
/// Queues one kernel.
///
/// # Panics
/// Panics if `weight` has no elements.
pub fn rms_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: &DeviceBuffer,
    weight: &DeviceBuffer,
    epsilon: f32,
    plus_one: bool,
) -> RmsNormRows {
    let width = weight.len();
    let count = x.len() / width;
    let output = DeviceBuffer::empty(client, x.len(), x.dtype());
    let reciprocal_root = DeviceBuffer::empty(client, count, DeviceDType::F32);
    if count > 0 {
        let (cubes, dim, rows) = row_grid(client, [count, width], width);
        // SAFETY: units check that their row and its elements exist.
        unsafe {
            with_element!(x.dtype(), X => with_element!(weight.dtype(), W => {
                rms_norm_kernel::launch_unchecked::<X, W, R>(
                    client,
                    cubes,
                    dim,
                    x.arg(),
                    weight.arg(),
                    epsilon,
                    output.arg(),
                    reciprocal_root.arg(),
                    rows,
                    plus_one,
                );
            }));
        }
    }
    RmsNormRows { output, reciprocal_root }
}

/// Normalizes a row with several units.
#[cube(launch_unchecked)]
fn rms_norm_kernel<X: Float, W: Float>(
    x: &Array<X>,
    weight: &Array<W>,
    epsilon: f32,
    output: &mut Array<X>,
    reciprocal_roots: &mut Array<f32>,
    rows: &RowLayout,
    #[comptime] plus_one: bool,
) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let units = rows.units;
    let row = own_row(units);
    let place = UNIT_POS as usize % units;
    let start = row * rows.stride;
    let len = row_len(rows, row);
    let mut squares = f32::new(0.0);
    let mut i = place;
    while i < len {
        let x = f32::cast_from(x[start + i]);
        squares += x * x;
        i += units;
    }
    let mean = row_sum(&mut parts, squares, units) / rows.width as f32;
    let reciprocal = 1.0 / (mean + epsilon).sqrt();
    let mut i = place;
    while i < len {
        let quotient = f32::cast_from(x[start + i]) * reciprocal;
        let factor = factor_of::<W>(weight, i, plus_one);
        if comptime![plus_one] {
            output[start + i] = X::cast_from(quotient * factor);
        } else {
            let quotient = f32::cast_from(X::cast_from(quotient));
            output[start + i] = X::cast_from(quotient * factor);
        }
        i += units;
    }
    if place == 0 && row < rows.count {
        reciprocal_roots[row] = reciprocal;
    }
}
