//! Layer normalization and RMS normalization.

use deepburn_kernels::cube::{self, DeviceBuffer, DeviceDType, NormalizedRows};

use crate::{Client, assert_close, bits, client, download, half_unit, operand, types, upload};

/// A single element, rows of length 1, odd sizes, several rows of a cube, a row with several
/// elements of each unit, and rows beyond 65,536 elements.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (33, 1), (5, 7), (40, 32), (7, 45), (300, 64), (3, 257), (20, 768), (2, 70_001)];

const EPSILON: f32 = 1e-5;

/// The error of a mean over a row of the longest shape, relative to its elements of at most 1: 274
/// additions of a unit and 8 of the tree, and a division. Each rounds by 2^-24.
const MEAN_ERROR: f64 = 284.0 / (1 << 24) as f64;

/// The formulas in f64, for the inputs of a test.
struct NormReference {
    output: Vec<f64>,
    /// The mean of each row.
    mean: Vec<f64>,
    /// The reciprocal deviation or root of each row.
    factor: Vec<f64>,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    /// The sum of magnitudes of the terms of each element of `weight` and `bias`.
    magnitudes: Vec<f64>,
}

/// The inputs of a normalization in f64.
struct NormInputs {
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    grad: Vec<f64>,
}

/// Computes a layer normalization, or an RMS normalization if `has_mean` is false.
fn reference(inputs: &NormInputs, has_mean: bool, plus_one: bool) -> NormReference {
    let width = inputs.weight.len();
    let weight: Vec<f64> =
        inputs.weight.iter().map(|w| w + if plus_one { 1.0 } else { 0.0 }).collect();
    let mut result = NormReference {
        output: vec![],
        mean: vec![],
        factor: vec![],
        x: vec![],
        weight: vec![0.0; width],
        bias: vec![0.0; width],
        magnitudes: vec![0.0; width],
    };
    for (x, grad) in inputs.x.chunks(width).zip(inputs.grad.chunks(width)) {
        let n = width as f64;
        let mean = if has_mean { x.iter().sum::<f64>() / n } else { 0.0 };
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let factor = 1.0 / (variance + f64::from(EPSILON)).sqrt();
        let normalized: Vec<f64> = x.iter().map(|x| (x - mean) * factor).collect();
        let scaled: Vec<f64> = grad.iter().zip(&weight).map(|(g, w)| g * w).collect();
        let mean_scaled = if has_mean { scaled.iter().sum::<f64>() / n } else { 0.0 };
        let along = scaled.iter().zip(&normalized).map(|(s, n)| s * n).sum::<f64>() / n;
        for i in 0..width {
            result.output.push(normalized[i] * weight[i] + inputs.bias[i]);
            result.x.push(factor * (scaled[i] - mean_scaled - normalized[i] * along));
            result.weight[i] += grad[i] * normalized[i];
            result.bias[i] += grad[i];
            result.magnitudes[i] += (grad[i] * normalized[i]).abs().max(grad[i].abs());
        }
        result.mean.push(mean);
        result.factor.push(factor);
    }
    result
}

/// The arrays of a normalization on the device, and the same numbers in f64.
struct Case {
    x: DeviceBuffer,
    weight: DeviceBuffer,
    bias: DeviceBuffer,
    grad: DeviceBuffer,
    inputs: NormInputs,
}

impl Case {
    fn new(
        client: &Client,
        (rows, width): (usize, usize),
        dtype: DeviceDType,
        weight_dtype: DeviceDType,
    ) -> Self {
        let of = |len, seed, dtype| operand(client, len, seed, 1.0, dtype);
        let ((x, x64), (grad, grad64)) = (of(rows * width, 1, dtype), of(rows * width, 4, dtype));
        let ((weight, weight64), (bias, bias64)) =
            (of(width, 2, weight_dtype), of(width, 3, weight_dtype));
        let inputs = NormInputs { x: x64, weight: weight64, bias: bias64, grad: grad64 };
        Self { x, weight, bias, grad, inputs }
    }
}

/// Calls `check` with every shape, and with weights in the type of the rows and in f32.
fn each_case(client: &Client, check: impl Fn(Case, (usize, usize), &str)) {
    for dtype in types(client) {
        for shape in SHAPES {
            for weight_dtype in [dtype, DeviceDType::F32] {
                let what = format!("{shape:?} {dtype:?} {weight_dtype:?}");
                check(Case::new(client, shape, dtype, weight_dtype), shape, &what);
            }
        }
    }
}

/// Checks the gradients of a normalization.
fn check_gradients(
    client: &Client,
    case: &Case,
    normalized: NormalizedRows<'_>,
    plus_one: bool,
    what: &str,
) {
    let Case { weight, grad, inputs, .. } = case;
    let width = weight.len();
    let expected = reference(inputs, normalized.mean.is_some(), plus_one);
    // The factor of a row multiplies the errors of the means, twice.
    let tolerance = |i: usize| 4.0 * MEAN_ERROR * (1.0 + expected.factor[i / width]).powi(2);
    let x = cube::norm_x_gradient(client, grad, normalized, weight, plus_one);
    assert_close(client, &x, &expected.x, tolerance, &format!("x {what}"));
    let sums = cube::norm_weight_gradients(client, grad, normalized, width, weight.dtype());
    let largest = expected.factor.iter().fold(1.0_f64, |all, factor| all.max(*factor));
    // A sum over at most 300 rows has at most 38 additions of a unit, in two launches, and two
    // trees of 3. Normalized values have the errors of their means.
    let tolerance = |i: usize| {
        44.0 * half_unit(DeviceDType::F32) * expected.magnitudes[i]
            + 2.0 * MEAN_ERROR * largest * expected.magnitudes[i]
    };
    assert_close(client, &sums.weight, &expected.weight, tolerance, &format!("weight {what}"));
    if let Some(bias) = &sums.bias {
        assert_close(client, bias, &expected.bias, tolerance, &format!("bias {what}"));
    }
    let again = cube::norm_weight_gradients(client, grad, normalized, width, weight.dtype());
    let x_again = cube::norm_x_gradient(client, grad, normalized, weight, plus_one);
    let all = |sums: &cube::NormWeightGradients, x: &DeviceBuffer| {
        bits(client, [x, &sums.weight].into_iter().chain(&sums.bias))
    };
    assert_eq!(all(&sums, &x), all(&again, &x_again), "the same bits each time: {what}");
}

#[test]
fn device_kernels_layer_norm_follows_the_f64_reference() {
    let client = client();
    each_case(&client, |case, (_, width), what| {
        let expected = reference(&case.inputs, true, false);
        let run = || cube::layer_norm(&client, &case.x, [&case.weight, &case.bias], EPSILON);
        let rows = run();
        assert_close(&client, &rows.mean, &expected.mean, |_| MEAN_ERROR, what);
        let relative = |i: usize| 2.0 * MEAN_ERROR * expected.factor[i] * expected.factor[i];
        let tolerance = |i: usize| relative(i) * expected.factor[i];
        assert_close(&client, &rows.reciprocal_deviation, &expected.factor, tolerance, what);
        // The factor of a row multiplies the error of its mean, and has an error itself.
        let tolerance = |i: usize| 4.0 * MEAN_ERROR * (1.0 + expected.factor[i / width]).powi(2);
        assert_close(&client, &rows.output, &expected.output, tolerance, what);
        let again = run();
        assert_eq!(bits(&client, [&rows.output]), bits(&client, [&again.output]), "{what}");
        let normalized = NormalizedRows {
            x: &case.x,
            mean: Some(&rows.mean),
            factor: &rows.reciprocal_deviation,
        };
        check_gradients(&client, &case, normalized, false, what);
    });
}

#[test]
fn device_kernels_rms_norm_follows_the_f64_reference() {
    let client = client();
    each_case(&client, |case, (_, width), what| {
        for plus_one in [false, true] {
            let mut inputs = case.inputs.bias.clone();
            inputs.fill(0.0);
            let inputs = NormInputs {
                bias: inputs,
                x: case.inputs.x.clone(),
                weight: case.inputs.weight.clone(),
                grad: case.inputs.grad.clone(),
            };
            let expected = reference(&inputs, false, plus_one);
            let run = || cube::rms_norm(&client, &case.x, &case.weight, EPSILON, plus_one);
            let rows = run();
            let tolerance = |i: usize| 2.0 * MEAN_ERROR * expected.factor[i].powi(3);
            assert_close(&client, &rows.reciprocal_root, &expected.factor, tolerance, what);
            // Without `plus_one` the quotient is rounded to its type too. A quotient is at most the
            // root of the width times the root mean square, 1.
            let rounding = if plus_one { 0.0 } else { half_unit(case.x.dtype()) };
            let tolerance = |i: usize| {
                4.0 * MEAN_ERROR * (1.0 + expected.factor[i / width]).powi(2)
                    + rounding * expected.output[i].abs()
            };
            assert_close(&client, &rows.output, &expected.output, tolerance, what);
            let again = run();
            assert_eq!(bits(&client, [&rows.output]), bits(&client, [&again.output]), "{what}");
            let normalized =
                NormalizedRows { x: &case.x, mean: None, factor: &rows.reciprocal_root };
            check_gradients(&client, &case, normalized, plus_one, what);
        }
    });
}

/// A cube has 32 short rows, and a grid at most 65,535 cubes along one axis.
#[test]
fn device_kernels_norms_take_more_rows_than_a_grid_has_cubes() {
    const ROWS: usize = 2_097_200;
    const WIDTH: usize = 3;
    let client = client();
    let seven = crate::noise(7 * WIDTH, 1);
    let values: Vec<f32> = seven.iter().copied().cycle().take(ROWS * WIDTH).collect();
    let [x, few] = [&values, &seven].map(|all| upload(&client, all, DeviceDType::F32));
    let [gamma, beta] = [2, 3].map(|seed| operand(&client, WIDTH, seed, 1.0, DeviceDType::F32).0);
    let output = |x| download(&client, cube::layer_norm(&client, x, [&gamma, &beta], 1e-5).output);
    let (found, expected) = (output(&x), output(&few));
    for (row, found) in found.chunks(WIDTH).enumerate() {
        assert!(found == &expected[row % 7 * WIDTH..][..WIDTH], "row {row}");
    }
}

#[test]
fn device_kernels_norms_of_bad_rows_are_nan_and_others_are_not() {
    let client = client();
    for (dtype, bad) in types(&client)
        .into_iter()
        .flat_map(|dtype| [f32::NAN, f32::INFINITY].map(|bad| (dtype, bad)))
    {
        let mut values = crate::noise(5 * 45, 1);
        values[2 * 45 + 7] = bad;
        let x = upload(&client, &values, dtype);
        let gamma = operand(&client, 45, 2, 1.0, dtype).0;
        let rows = cube::layer_norm(&client, &x, [&gamma, &gamma], EPSILON);
        for (i, x) in download(&client, rows.output).into_iter().enumerate() {
            assert_eq!(x.is_nan(), i / 45 == 2, "{dtype:?} {bad} {i}: {x}");
        }
        let rows = cube::rms_norm(&client, &x, &gamma, EPSILON, true);
        for (i, x) in download(&client, rows.output).into_iter().enumerate() {
            let may_differ = i / 45 == 2;
            assert!(if i == 97 { x.is_nan() } else { may_differ || x.is_finite() }, "{i}: {x}");
        }
    }
}

#[test]
fn device_kernels_norms_of_constant_and_no_rows() {
    let client = client();
    let x = upload(&client, &[3.0; 90], DeviceDType::F32);
    let [gamma, beta] = [1.0, 0.5].map(|x| upload(&client, &[x; 45], DeviceDType::F32));
    let rows = cube::layer_norm(&client, &x, [&gamma, &beta], EPSILON);
    assert_eq!(download(&client, rows.output), [0.5; 90]);
    let none = DeviceBuffer::empty(&client, 0, DeviceDType::F32);
    let rows = cube::layer_norm(&client, &none, [&gamma, &beta], EPSILON);
    assert!(rows.output.is_empty() && rows.mean.is_empty());
    let normalized =
        NormalizedRows { x: &none, mean: Some(&rows.mean), factor: &rows.reciprocal_deviation };
    assert!(cube::norm_x_gradient(&client, &none, normalized, &gamma, false).is_empty());
    let sums = cube::norm_weight_gradients(&client, &none, normalized, 45, DeviceDType::F32);
    assert_eq!(bits(&client, [&sums.weight].into_iter().chain(&sums.bias)), [0; 90]);
    assert!(cube::rms_norm(&client, &none, &gamma, EPSILON, false).output.is_empty());
}
