//! RMS normalization, gated activations and rotary embeddings.

use burn::tensor::{DType, Tensor};
use burn_flex::{Flex, FlexTensor};
use deepburn_ops::{
    GateFunction, GatedGradients, GatedOps, RmsNorm, RmsNormGradients, RmsNormOps, RmsNormOutput,
    RmsNormSaved, RmsWeight, RotaryOps, RotatedHeads, portable,
};
use proptest::prelude::*;

use crate::{Array, DTYPES, assert_close, reference, same_on_all_threads, tolerance, values};

fn primitive<const D: usize>(tensor: Tensor<Flex, D>) -> FlexTensor {
    tensor.into_primitive().tensor()
}

/// The kernels, and the implementation that works on every backend.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Implementation {
    Kernel,
    Portable,
}

use Implementation::{Kernel, Portable};

/// Returns the output, and the gradients with respect to x and the weight.
fn run_rms(
    implementation: Implementation,
    inputs: &[Array; 3],
    norm: RmsNorm,
    dtype: DType,
) -> [Vec<f64>; 3] {
    let [x, weight, dy] = inputs;
    let (x, weight, dy) =
        (primitive(x.tensor(dtype)), primitive(weight.vector(dtype)), primitive(dy.tensor(dtype)));
    let forward = match implementation {
        Kernel => Flex::rms_norm_forward,
        Portable => portable::rms_norm::forward::<Flex>,
    };
    let backward = match implementation {
        Kernel => Flex::rms_norm_backward,
        Portable => portable::rms_norm::backward::<Flex>,
    };
    let RmsNormOutput { output, reciprocal_root } = forward(x.clone(), weight.clone(), norm);
    let RmsNormGradients { x, weight } =
        backward(dy, RmsNormSaved { x, weight, reciprocal_root }, norm);
    assert!([&output, &x, &weight].iter().all(|tensor| tensor.dtype() == dtype));
    [output, x, weight].map(values)
}

fn check_rms(rows: usize, width: usize) {
    for (dtype, weight) in DTYPES
        .into_iter()
        .flat_map(|dtype| [RmsWeight::Factor, RmsWeight::PlusOne].map(|weight| (dtype, weight)))
    {
        let norm = RmsNorm { epsilon: 1e-5, weight };
        let inputs = [([rows, width], 1), ([1, width], 2), ([rows, width], 3)]
            .map(|(shape, seed)| Array::new(shape, seed).rounded(dtype));
        let [x, weight, dy] = &inputs;
        let expected = reference::rms_norm(x, weight, norm, dy);
        for implementation in [Kernel, Portable] {
            let found = run_rms(implementation, &inputs, norm, dtype);
            for ((found, expected), what) in found.iter().zip(&expected).zip(["y", "dx", "dw"]) {
                let what = format!("{what} of {rows}x{width}: {norm:?}, {dtype:?}");
                // In 16 bits, the quotient may be rounded before the output is.
                assert_close(found, expected, 2.0 * tolerance(dtype), &what);
            }
        }
    }
}

#[test]
fn rms_norm_of_odd_sizes() {
    for (rows, width) in [(1, 7), (3, 1), (33, 17), (70, 768), (2, 100)] {
        check_rms(rows, width);
    }
}

#[test]
fn rms_norm_of_no_rows_is_empty() {
    let inputs = [[0, 5], [1, 5], [0, 5]].map(|shape| Array::new(shape, 1));
    let norm = RmsNorm { epsilon: 1e-5, weight: RmsWeight::Factor };
    let [y, dx, weight] = run_rms(Kernel, &inputs, norm, DType::F32);
    assert!(y.is_empty() && dx.is_empty());
    assert_eq!(weight, vec![0.0; 5]);
}

//= transformers 5.23.0 models/llama/modeling_llama.py LlamaRMSNorm
//= transformers 5.23.0 models/gemma2/modeling_gemma2.py Gemma2RMSNorm
/// Whether the quotient is rounded before it is multiplied shows in the last bit of some of 16
/// products.
#[test]
fn only_one_formula_rounds_the_quotient() {
    let x = Array { shape: [1, 16], values: (1..=16).map(f64::from).collect() };
    let root = (x.values.iter().map(|x| x * x).sum::<f64>() / 16.0).sqrt();
    let bf16 = |x: f64| half::bf16::from_f64(x).to_f64();
    let factor = 1.375;
    let twice: Vec<f64> = x.values.iter().map(|x| bf16(bf16(x / root) * factor)).collect();
    let once: Vec<f64> = x.values.iter().map(|x| bf16(x / root * factor)).collect();
    assert_ne!(twice, once, "the numbers show the difference");
    for implementation in [Kernel, Portable] {
        let run = |formula, weight| {
            let weight = Array { shape: [1, 16], values: vec![weight; 16] };
            let norm = RmsNorm { epsilon: 0.0, weight: formula };
            run_rms(implementation, &[x.clone(), weight, x.clone()], norm, DType::BF16)[0].clone()
        };
        assert_eq!(run(RmsWeight::Factor, factor), twice);
        assert_eq!(run(RmsWeight::PlusOne, factor - 1.0), once);
    }
}

#[test]
fn squares_of_large_f16_do_not_overflow() {
    let x = Array { shape: [1, 2], values: vec![-30_000.0, 30_000.0] };
    let inputs = [x, Array { shape: [1, 2], values: vec![2.0; 2] }, Array::new([1, 2], 3)];
    let norm = RmsNorm { epsilon: 1e-6, weight: RmsWeight::Factor };
    for implementation in [Kernel, Portable] {
        assert_eq!(run_rms(implementation, &inputs, norm, DType::F16)[0], [-2.0, 2.0]);
    }
}

#[test]
fn nan_stays_in_its_row() {
    let mut x = Array::new([3, 20], 1);
    x.values[27] = f64::NAN;
    let inputs = [x, Array::new([1, 20], 2), Array::new([3, 20], 3)];
    let norm = RmsNorm { epsilon: 1e-6, weight: RmsWeight::PlusOne };
    for implementation in [Kernel, Portable] {
        let [y, dx, weight] = run_rms(implementation, &inputs, norm, DType::F32);
        for (row, (y, dx)) in y.chunks(20).zip(dx.chunks(20)).enumerate() {
            assert!(y.iter().chain(dx).all(|v| v.is_nan() == (row == 1)), "row {row}");
        }
        assert!(weight.iter().all(|v| v.is_nan()));
    }
}

const FUNCTIONS: [GateFunction; 2] = [GateFunction::Silu, GateFunction::GeluTanh];

/// Returns the matrix whose rows are the rows of two matrices, side by side.
fn beside(left: &Array, right: &Array) -> Array {
    let rows = 0..left.shape[0];
    let values = rows.flat_map(|row| left.row(row).iter().chain(right.row(row)).copied());
    Array { shape: [left.shape[0], left.shape[1] + right.shape[1]], values: values.collect() }
}

/// Returns the output and the gradients of gate and up, from two matrices.
fn run_gated(
    implementation: Implementation,
    inputs: &[Array; 3],
    function: GateFunction,
    dtype: DType,
) -> [Vec<f64>; 3] {
    let [gate, up, dy] = inputs.each_ref().map(|array| primitive(array.tensor(dtype)));
    let (y, GatedGradients { gate, up }) = match implementation {
        Kernel => (
            Flex::gated(gate.clone(), up.clone(), function),
            Flex::gated_backward(dy, gate, up, function),
        ),
        Portable => (
            portable::gated::forward::<Flex>(gate.clone(), up.clone(), function),
            portable::gated::backward::<Flex>(dy, gate, up, function),
        ),
    };
    assert!([&y, &gate, &up].iter().all(|tensor| tensor.dtype() == dtype));
    [y, gate, up].map(values)
}

/// Returns the output and the joint gradient, from a joint matrix.
fn run_joint(
    implementation: Implementation,
    inputs: &[Array; 3],
    function: GateFunction,
    dtype: DType,
) -> [Vec<f64>; 2] {
    let joint = primitive(beside(&inputs[0], &inputs[1]).tensor(dtype));
    let dy = primitive(inputs[2].tensor(dtype));
    let results = match implementation {
        Kernel => [
            Flex::gated_joint(joint.clone(), function),
            Flex::gated_joint_backward(dy, joint, function),
        ],
        Portable => [
            portable::gated::joint_forward::<Flex>(joint.clone(), function),
            portable::gated::joint_backward::<Flex>(dy, joint, function),
        ],
    };
    results.map(values)
}

fn check_gated([rows, width]: [usize; 2]) {
    for (dtype, function) in
        DTYPES.into_iter().flat_map(|dtype| FUNCTIONS.map(|function| (dtype, function)))
    {
        let mut inputs = [1, 2, 3].map(|seed| Array::new([rows, width], seed));
        // The range from a gate of 0 to a gate of 1.
        inputs[0].values.iter_mut().for_each(|gate| *gate *= 12.0);
        let inputs = inputs.map(|array| array.rounded(dtype));
        let [gate, up, dy] = &inputs;
        let [y, dgate, dup] = reference::gated(gate, up, function, dy);
        let array = |values: &[f64]| Array { shape: [rows, width], values: values.to_vec() };
        let both = beside(&array(&dgate), &array(&dup)).values;
        for implementation in [Kernel, Portable] {
            let what = format!("{rows}x{width}: {implementation:?}, {function:?}, {dtype:?}");
            let close = |found: &[f64], expected: &[f64], which| {
                assert_close(found, expected, tolerance(dtype), &format!("{which} of {what}"));
            };
            let found = run_gated(implementation, &inputs, function, dtype);
            close(&found[0], &y, "y");
            close(&found[1], &dgate, "dgate");
            close(&found[2], &dup, "dup");
            let found = run_joint(implementation, &inputs, function, dtype);
            close(&found[0], &y, "joint y");
            close(&found[1], &both, "joint gradient");
        }
    }
}

#[test]
fn gated_activations_of_odd_sizes() {
    for shape in [[0, 3], [1, 1], [1, 7], [33, 17], [5, 4_000]] {
        check_gated(shape);
    }
}

#[test]
fn gates_of_extremes() {
    let gate = Array { shape: [1, 5], values: vec![-1e30, -200.0, 0.0, 200.0, f64::NAN] };
    let ones = Array { shape: [1, 5], values: vec![1.0; 5] };
    let run = |function| {
        run_gated(Kernel, &[gate.clone(), ones.clone(), ones.clone()], function, DType::F32)
    };
    let [y, dgate, dup] = run(GateFunction::Silu);
    assert_eq!(y[..4], [0.0, 0.0, 0.0, 200.0]);
    assert_eq!(dgate[..4], [0.0, 0.0, 0.5, 1.0]);
    assert_eq!(dup[..4], y[..4]);
    assert!(y[4].is_nan() && dgate[4].is_nan() && dup[4].is_nan());
}

/// Returns `x` rotated and rotated back.
fn run_rotary(
    implementation: Implementation,
    [x, cos, sin]: [&Array; 3],
    heads: RotatedHeads,
    dtype: DType,
) -> [Vec<f64>; 2] {
    let x = primitive(x.tensor(dtype));
    let [cos, sin] = [cos, sin].map(|table| primitive(table.tensor(DType::F32)));
    let [forward, back]: [fn(_, _, _, _) -> FlexTensor; 2] = match implementation {
        Kernel => [Flex::rotate_heads, Flex::rotate_heads_back],
        Portable => [portable::rotary::rotate::<Flex>, portable::rotary::rotate_back::<Flex>],
    };
    let before = values(x.clone());
    let rotated = forward(x.clone(), cos.clone(), sin.clone(), heads);
    let back = back(x.clone(), cos, sin, heads);
    assert_eq!((rotated.dtype(), back.dtype()), (dtype, dtype));
    assert_eq!(values(x), before, "somebody else holds x");
    [rotated, back].map(values)
}

#[test]
fn rotations_and_their_gradients() {
    for (sequences, positions, heads, width, half, others) in [
        (1, 1, 1, 2, 1, 0),
        (2, 3, 2, 5, 2, 3),
        (1, 7, 3, 64, 32, 64),
        (3, 40, 4, 20, 10, 0),
        (2, 0, 1, 2, 1, 0),
        (2, 3, 0, 4, 2, 5),
    ] {
        let shape = [sequences * positions, heads * width + others];
        let heads = RotatedHeads { heads, width };
        for dtype in DTYPES {
            let x = Array::new(shape, 1).rounded(dtype);
            let [cos, sin] = [2, 3].map(|seed| Array::new([positions, half], seed));
            // The table is rounded to the type of x.
            let [rounded_cos, rounded_sin] = [&cos, &sin].map(|table| table.clone().rounded(dtype));
            let mut negative = rounded_sin.clone();
            negative.values.iter_mut().for_each(|sin| *sin = -*sin);
            let expected =
                [rounded_sin, negative].map(|sin| reference::rotate(&x, &rounded_cos, &sin, heads));
            for implementation in [Kernel, Portable] {
                let found = run_rotary(implementation, [&x, &cos, &sin], heads, dtype);
                let what = format!("{shape:?}: {heads:?}, {implementation:?}, {dtype:?}");
                assert_close(&found[0], &expected[0], tolerance(dtype), &what);
                assert_close(&found[1], &expected[1], tolerance(dtype), &format!("{what}, back"));
            }
        }
    }
}

#[test]
#[should_panic(expected = "are not rotated by a table of [3, 1]")]
fn tables_of_other_lengths_are_refused() {
    let [x, table] = [Array::new([4, 2], 1), Array::new([3, 1], 2)];
    run_rotary(Kernel, [&x, &table, &table], RotatedHeads { heads: 1, width: 2 }, DType::F32);
}

#[test]
fn rotations_without_another_owner_are_in_place() {
    let x = primitive(Array::new([4, 6], 1).tensor(DType::F32));
    let place = x.bytes().as_ptr();
    let [cos, sin] = [2, 3].map(|seed| primitive(Array::new([4, 1], seed).tensor(DType::F32)));
    let heads = RotatedHeads { heads: 2, width: 2 };
    assert_eq!(Flex::rotate_heads(x, cos, sin, heads).bytes().as_ptr(), place);
}

#[test]
fn bits_do_not_depend_on_threads() {
    let inputs =
        [([100, 96], 1), ([1, 96], 2), ([100, 96], 3)].map(|(shape, seed)| Array::new(shape, seed));
    let norm = RmsNorm { epsilon: 1e-5, weight: RmsWeight::Factor };
    same_on_all_threads(|| run_rms(Kernel, &inputs, norm, DType::F32).concat());
    let inputs = [1, 2, 3].map(|seed| Array::new([300, 256], seed));
    same_on_all_threads(|| {
        let mut all = run_gated(Kernel, &inputs, GateFunction::Silu, DType::F32).concat();
        all.extend(run_joint(Kernel, &inputs, GateFunction::Silu, DType::F32).concat());
        all
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn rms_norm_of_any_size(rows in 1_usize..70, width in 2_usize..70) {
        check_rms(rows, width);
    }

    #[test]
    fn gated_activations_of_any_size(rows in 1_usize..20, width in 1_usize..70) {
        check_gated([rows, width]);
    }
}
