//! GELU and gated activations.

use deepburn_kernels::cube::{self, ActivationFunction, DeviceBuffer, Gated};

use crate::{assert_close, bits, client, operand, types};

/// Numbers of rows and gates of a row: none, a single element, odd sizes, and units of four
/// elements.
const SHAPES: [(usize, usize); 6] = [(0, 4), (1, 1), (3, 5), (257, 4), (5, 768), (100, 1001)];

/// The error of the factor `s = 1 / (1 + exp(-a))`. Shaders may compute an exponential with an
/// error of `3 + 2 |a|` units in the last place of 2^-23, and a division with 2.5. Here `|a|` is at
/// most `2 u(4) = 11`, so `a` itself has an error of as many units of 2^-24.
const FACTOR_ERROR: f64 = 40.0 / (1 << 23) as f64;

/// Returns the function and its derivative at `x`.
fn reference(x: f64, activation: ActivationFunction) -> [f64; 2] {
    match activation {
        ActivationFunction::Silu => {
            let sigmoid = 1.0 / (1.0 + (-x).exp());
            [x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid)]
        }
        ActivationFunction::GeluTanh => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let t = (c * (x + 0.044_715 * x.powi(3))).tanh();
            let slope = c * (1.0 + 3.0 * 0.044_715 * x * x);
            [0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope]
        }
    }
}

/// The error of a value: `x` is at most 4 in magnitude, and is multiplied by the factor.
const VALUE_ERROR: f64 = 4.0 * FACTOR_ERROR;

/// The error of a derivative: `s (1 - s)` has about the error of `s`, and is multiplied by `x` and
/// the derivative of `a`, together at most `4 * 5`.
const SLOPE_ERROR: f64 = 21.0 * FACTOR_ERROR;

#[test]
fn device_kernels_gelu_follows_the_f64_reference() {
    let client = client();
    for dtype in types(&client) {
        for (rows, width) in SHAPES {
            let (x, x64) = operand(&client, rows * width, 1, 4.0, dtype);
            let (grad, grad64) = operand(&client, rows * width, 2, 1.0, dtype);
            let expected = x64.iter().map(|x| reference(*x, ActivationFunction::GeluTanh));
            let [y64, slopes]: [Vec<f64>; 2] =
                [0, 1].map(|i| expected.clone().map(|e| e[i]).collect());
            let what = format!("{rows} {width}");
            let y = cube::gelu(&client, &x);
            assert_close(&client, &y, &y64, |_| VALUE_ERROR, &what);
            let dx64: Vec<f64> = slopes.iter().zip(&grad64).map(|(slope, g)| slope * g).collect();
            let dx = cube::gelu_gradient(&client, &grad, &x);
            assert_close(&client, &dx, &dx64, |_| SLOPE_ERROR, &what);
            let again = [cube::gelu(&client, &x), cube::gelu_gradient(&client, &grad, &x)];
            assert_eq!(bits(&client, [&y, &dx]), bits(&client, &again), "{what}");
        }
    }
}

/// Returns gate and values of separate arrays, or of the halves of the rows of one.
fn halves(joint: &[f64], width: usize) -> [Vec<f64>; 2] {
    [0, width].map(|start| {
        joint.chunks(2 * width).flat_map(|row| row[start..start + width].to_vec()).collect()
    })
}

#[test]
fn device_kernels_gated_activations_follow_the_f64_reference() {
    let client = client();
    for dtype in types(&client) {
        for (rows, width) in SHAPES {
            let (joint, joint64) = operand(&client, 2 * rows * width, 1, 4.0, dtype);
            let (gate, gate64) = operand(&client, rows * width, 2, 4.0, dtype);
            let (up, up64) = operand(&client, rows * width, 3, 1.0, dtype);
            let (grad, grad64) = operand(&client, rows * width, 4, 1.0, dtype);
            for activation in [ActivationFunction::Silu, ActivationFunction::GeluTanh] {
                let separate =
                    (Gated::Separate { gate: gate.clone(), up: up.clone() }, [&gate64, &up64]);
                let [left, right] = halves(&joint64, width);
                let joint = (Gated::Joint { rows: joint.clone(), width }, [&left, &right]);
                for (inputs, [gate64, up64]) in [separate, joint] {
                    let what = format!("{rows} {width} {activation:?} {inputs:?}");
                    let run = || cube::gated(&client, &inputs, activation);
                    let of = |i: usize| reference(gate64[i], activation);
                    let all = |f: &dyn Fn(usize) -> f64| (0..up64.len()).map(f).collect::<Vec<_>>();
                    let y = run();
                    let expected = all(&|i| of(i)[0] * up64[i]);
                    // Values are at most 4 in magnitude.
                    assert_close(&client, &y, &expected, |_| 4.0 * VALUE_ERROR, &what);
                    assert_eq!(bits(&client, [&y]), bits(&client, [&run()]), "{what}");
                    let gradients = cube::gated_gradients(&client, &grad, &inputs, activation);
                    let gates = all(&|i| grad64[i] * up64[i] * of(i)[1]);
                    let ups = all(&|i| grad64[i] * of(i)[0]);
                    let close = |found: &DeviceBuffer, expected: &[f64]| {
                        assert_close(&client, found, expected, |_| 4.0 * SLOPE_ERROR, &what);
                    };
                    match &gradients {
                        Gated::Separate { gate, up } => {
                            close(gate, &gates);
                            close(up, &ups);
                        }
                        Gated::Joint { rows, .. } => {
                            let both = gates.chunks(width).zip(ups.chunks(width));
                            close(
                                rows,
                                &both.flat_map(|(g, u)| [g, u].concat()).collect::<Vec<_>>(),
                            );
                        }
                    }
                }
            }
        }
    }
}

/// The exponential overflows f32 there.
#[test]
fn device_kernels_activations_of_large_numbers_are_finite() {
    let client = client();
    for dtype in types(&client) {
        let x = crate::upload(&client, &[-30_000.0, -200.0, 0.0, 200.0, 30_000.0], dtype);
        let expected: Vec<f32> = crate::held(&[0.0, 0.0, 0.0, 200.0, 30_000.0], dtype);
        assert_eq!(crate::download(&client, cube::gelu(&client, &x)), expected, "{dtype:?}");
    }
}
