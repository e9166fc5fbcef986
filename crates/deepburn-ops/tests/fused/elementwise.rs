//! Layer normalization, GELU and linear layers.

use burn::tensor::DType;
use burn_flex::{Flex, FlexTensor};
use deepburn_ops::{
    GeluOps, LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved, LinearOps, portable,
};
use proptest::prelude::*;

use crate::{Array, DTYPES, assert_close, reference, same_on_all_threads, tolerance, values};

fn primitive<const D: usize>(tensor: burn::tensor::Tensor<Flex, D>) -> FlexTensor {
    tensor.into_primitive().tensor()
}

type Norm = (
    fn(FlexTensor, FlexTensor, FlexTensor, f64) -> LayerNormOutput<Flex>,
    fn(FlexTensor, LayerNormSaved<Flex>) -> LayerNormGradients<Flex>,
);

const NORMS: [Norm; 2] = [
    (Flex::layer_norm_forward, Flex::layer_norm_backward),
    (portable::norm::forward::<Flex>, portable::norm::backward::<Flex>),
];

/// Returns the output and the gradients with respect to x, gamma and beta.
fn run_norm((forward, backward): Norm, inputs: &[Array; 4], dtype: DType) -> [Vec<f64>; 4] {
    let [x, gamma, beta, dy] = inputs;
    let (x, gamma) = (primitive(x.tensor(dtype)), primitive(gamma.vector(dtype)));
    let LayerNormOutput { output, mean, reciprocal_deviation } =
        forward(x.clone(), gamma.clone(), primitive(beta.vector(dtype)), 1e-5);
    let saved = LayerNormSaved { x, gamma, mean, reciprocal_deviation };
    let grads = backward(primitive(dy.tensor(dtype)), saved);
    assert!([&output, &grads.x, &grads.gamma].iter().all(|tensor| tensor.dtype() == dtype));
    [output, grads.x, grads.gamma, grads.beta].map(values)
}

fn check_norm(rows: usize, width: usize) {
    for dtype in DTYPES {
        let shapes = [[rows, width], [1, width], [1, width], [rows, width]];
        let mut seed = 0;
        let inputs = shapes.map(|shape| {
            seed += 1;
            Array::new(shape, seed).rounded(dtype)
        });
        let [x, gamma, beta, dy] = &inputs;
        let expected = reference::layer_norm(x, gamma, beta, 1e-5, dy);
        for norm in NORMS {
            let found = run_norm(norm, &inputs, dtype);
            for ((found, expected), what) in
                found.iter().zip(&expected).zip(["y", "dx", "dgamma", "dbeta"])
            {
                let what = format!("{what} of {rows}x{width} in {dtype:?}");
                assert_close(found, expected, tolerance(dtype), &what);
            }
        }
    }
}

#[test]
fn layer_norm_of_odd_sizes() {
    for (rows, width) in [(1, 7), (3, 1), (33, 17), (70, 768), (2, 100)] {
        check_norm(rows, width);
    }
}

#[test]
fn layer_norm_of_no_rows_is_empty() {
    let inputs = [[0, 5], [1, 5], [1, 5], [0, 5]].map(|shape| Array::new(shape, 1));
    let [y, dx, gamma, beta] = run_norm(NORMS[0], &inputs, DType::F32);
    assert!(y.is_empty() && dx.is_empty());
    assert_eq!([gamma, beta], [vec![0.0; 5], vec![0.0; 5]]);
}

#[test]
fn layer_norm_far_from_zero_keeps_its_digits() {
    // The mean is a thousand standard deviations from 0, so a variance computed from the squares of
    // x would lose all digits.
    let mut x = Array::new([4, 64], 1);
    x.values.iter_mut().for_each(|x| *x += 1024.0);
    let inputs = [
        x.rounded(DType::F32),
        Array::new([1, 64], 2),
        Array::new([1, 64], 3),
        Array::new([4, 64], 4),
    ];
    let [x, gamma, beta, dy] = &inputs;
    let expected = reference::layer_norm(x, gamma, beta, 1e-5, dy);
    let found = run_norm(NORMS[0], &inputs, DType::F32);
    // An f32 near 1024 has a rounding error of up to 6e-5.
    assert_close(&found[0], &expected[0], 3e-4, "y");
}

#[test]
fn nan_stays_in_its_row() {
    let mut x = Array::new([3, 20], 1);
    x.values[27] = f64::NAN;
    let ones = Array { shape: [1, 20], values: vec![1.0; 20] };
    let inputs = [x, ones.clone(), ones, Array::new([3, 20], 4)];
    for norm in NORMS {
        let [y, dx, gamma, _] = run_norm(norm, &inputs, DType::F32);
        for (row, (y, dx)) in y.chunks(20).zip(dx.chunks(20)).enumerate() {
            assert!(y.iter().chain(dx).all(|v| v.is_nan() == (row == 1)), "row {row}");
        }
        assert!(gamma.iter().all(|v| v.is_nan()));
    }
}

#[test]
fn gelu_and_its_derivative() {
    // The range from a gate of 0 to a gate of 1.
    let x = Array { shape: [5, 321], values: (0..1605).map(|i| i as f64 / 64.0 - 12.5).collect() };
    let dy = Array::new([5, 321], 3);
    for dtype in DTYPES {
        let (x, dy) = (x.clone().rounded(dtype), dy.clone().rounded(dtype));
        let [y, dx] = reference::gelu(&x, &dy);
        let [x, dy] = [primitive(x.tensor(dtype)), primitive(dy.tensor(dtype))];
        for (found_y, found_dx) in [
            (Flex::gelu_tanh(x.clone()), Flex::gelu_tanh_backward(dy.clone(), x.clone())),
            (
                portable::gelu::forward::<Flex>(x.clone()),
                portable::gelu::backward::<Flex>(dy.clone(), x.clone()),
            ),
        ] {
            assert_eq!((found_y.dtype(), found_dx.dtype()), (dtype, dtype));
            assert_close(&values(found_y), &y, tolerance(dtype), "y");
            assert_close(&values(found_dx), &dx, tolerance(dtype), "dx");
        }
    }
}

#[test]
fn gelu_of_extremes() {
    let extremes = [-1e30, -60.0, -0.0, 0.0, 60.0, 1e12, f64::NAN, f64::INFINITY];
    let x = Array { shape: [1, 8], values: extremes.to_vec() };
    let y = values(Flex::gelu_tanh(primitive(x.tensor(DType::F32))));
    assert_eq!(&y[1..5], [0.0, 0.0, 0.0, 60.0]);
    assert_eq!(y[5], f64::from(1e12_f32));
    assert!(y[6].is_nan() && y[7] == f64::INFINITY, "{y:?}");
}

fn check_linear([rows, columns, out]: [usize; 3], dtype: DType) {
    let [x, weight, dy] = [([rows, columns], 1), ([columns, out], 2), ([rows, out], 3)]
        .map(|(shape, seed)| Array::new(shape, seed).rounded(dtype));
    let bias = Array::new([1, out], 4).rounded(dtype);
    let mut y = reference::product(&x, false, &weight, false);
    let dx = reference::product(&dy, false, &weight, true);
    let dw = reference::product(&x, true, &dy, false);
    let db: Vec<f64> = (0..out).map(|i| (0..rows).map(|r| dy.row(r)[i]).sum()).collect();
    let plain = y.values.clone();
    y.values.iter_mut().enumerate().for_each(|(i, y)| *y += bias.values[i % out]);
    let [x, weight, dy] = [x, weight, dy].map(|array| primitive(array.tensor(dtype)));
    let bias = primitive(bias.vector(dtype));
    let close = |found: FlexTensor, expected: &[f64], what| {
        assert_eq!(found.dtype(), dtype);
        // In 16 bits, the product is rounded, and then its sum with the bias is rounded.
        assert_close(&values(found), expected, 2.0 * tolerance(dtype), what);
    };
    close(Flex::fused_linear(x.clone(), weight.clone(), Some(bias)), &y.values, "y");
    close(Flex::fused_linear(x.clone(), weight.clone(), None), &plain, "y without bias");
    close(Flex::linear_x_gradient(dy.clone(), weight), &dx.values, "dx");
    let grads = Flex::linear_gradients(dy, x);
    close(grads.weight, &dw.values, "dW");
    close(grads.bias, &db, "db");
}

#[test]
fn affine_maps_and_their_gradients() {
    for size in [[1, 1, 1], [3, 5, 7], [130, 33, 65], [2, 300, 3]] {
        for dtype in DTYPES {
            check_linear(size, dtype);
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let inputs = [([100, 96], 1), ([1, 96], 2), ([1, 96], 3), ([100, 96], 4)]
        .map(|(shape, seed)| Array::new(shape, seed));
    same_on_all_threads(|| run_norm(NORMS[0], &inputs, DType::F32).concat());
    let [x, weight, dy] = [([300, 256], 1), ([256, 320], 2), ([300, 320], 3)]
        .map(|(shape, seed)| Array::new(shape, seed));
    same_on_all_threads(|| {
        let [x, weight, dy] = [&x, &weight, &dy].map(|a| primitive(a.tensor(DType::F32)));
        let grads = Flex::linear_gradients(dy.clone(), x.clone());
        let y = Flex::fused_linear(x, weight.clone(), Some(grads.bias.clone()));
        [y, Flex::linear_x_gradient(dy, weight), grads.weight, grads.bias].map(values).concat()
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn layer_norm_of_any_size(rows in 1_usize..70, width in 2_usize..70) {
        check_norm(rows, width);
    }
}
