//! Fused ops of decoders below autodiff, against Burn's autodiff of the same formulas in plain ops.

use burn::tensor::{DType, Tensor, TensorData, activation};
use burn_backend::tensor::FloatTensor;
use burn_flex::{Flex, FlexDevice};
use deepburn_config::PrecisionPlan;
use deepburn_ops::{
    GateFunction, RmsNorm, RmsWeight, RotatedHeads, SumOps, gated, gated_joint, rms_norm,
    rotate_heads,
};

use crate::autocast::{AUTOCAST, Trained, inside};

type T2 = Tensor<Trained, 2>;

const ROWS: usize = 6;
const WIDTH: usize = 10;

/// Returns different values between -2 and 2 for each seed.
fn values<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<Trained, D> {
    let len = shape.iter().product();
    let values = (0..len).map(|i| ((i * 37 + seed * 101) % 97) as f32 / 24.0 - 2.0);
    Tensor::from_data(TensorData::new(values.collect(), shape), &FlexDevice)
}

/// Asserts that two functions of `x` and of another tensor have the same results and gradients.
#[track_caller]
fn assert_same<const D: usize>(
    other: [usize; D],
    fused: impl Fn(T2, Tensor<Trained, D>) -> T2,
    plain: impl Fn(T2, Tensor<Trained, D>) -> T2,
) {
    let run = |function: &dyn Fn(T2, Tensor<Trained, D>) -> T2| {
        let x = values([ROWS, WIDTH], 1).require_grad();
        let other = values(other, 2).require_grad();
        let y = function(x.clone(), other.clone());
        let grads = (y.clone() * values(y.dims(), 3)).sum().backward();
        let data = |data: TensorData| data.to_vec::<f32>().unwrap();
        [
            data(y.into_data()),
            data(x.grad(&grads).unwrap().into_data()),
            data(other.grad(&grads).unwrap().into_data()),
        ]
    };
    let (found, expected) = (run(&fused), run(&plain));
    for ((found, expected), what) in found.iter().zip(&expected).zip(["y", "dx", "dother"]) {
        assert_eq!(found.len(), expected.len());
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            // Both are f32 and round in another order; values and sums of rows are below 50.
            let error = (found - expected).abs();
            assert!(error < 2e-5 * expected.abs().max(1.0), "{what}[{i}]: {found}, {expected}");
        }
    }
}

#[test]
fn rms_norms() {
    inside(PrecisionPlan::FP32, |_| {
        for (weight, offset) in [(RmsWeight::Factor, 0.0), (RmsWeight::PlusOne, 1.0)] {
            assert_same(
                [WIDTH],
                |x, factor| rms_norm(x, factor, RmsNorm { epsilon: 1e-5, weight }),
                |x, factor| {
                    let root = (x.clone().powf_scalar(2.0).mean_dim(1) + 1e-5).sqrt();
                    x / root * (factor + offset).unsqueeze()
                },
            );
        }
    });
}

#[test]
fn gates() {
    let gelu = |x: T2| {
        let cubic = x.clone() * x.clone() * x.clone() * 0.044_715;
        let u = (x.clone() + cubic) * (2.0 / std::f64::consts::PI).sqrt();
        x * 0.5 * (u.tanh() + 1.0)
    };
    let silu = |x: T2| x.clone() * activation::sigmoid(x);
    inside(PrecisionPlan::FP32, |_| {
        for function in [GateFunction::Silu, GateFunction::GeluTanh] {
            let plain = |gate: T2, up: T2| match function {
                GateFunction::Silu => silu(gate) * up,
                GateFunction::GeluTanh => gelu(gate) * up,
            };
            assert_same([ROWS, WIDTH], |gate, up| gated(gate, up, function), plain);
            let half = WIDTH / 2;
            assert_same(
                [ROWS, half],
                |joint, other| gated_joint(joint, function) * other,
                |joint: T2, other| {
                    let [gate, up] = [0, half].map(|start| joint.clone().narrow(1, start, half));
                    plain(gate, up) * other
                },
            );
        }
    });
}

/// Two heads of 4 columns, of which the first 2 are rotated, and 2 columns that are not.
#[test]
fn rotations() {
    inside(PrecisionPlan::FP32, |_| {
        let [cos, sin] = [4, 5].map(|seed| values([ROWS / 2, 1], seed));
        let rows = |table: &T2| Tensor::cat(vec![table.clone(); 2], 0);
        assert_same(
            [ROWS, WIDTH],
            |x, other| {
                let heads = RotatedHeads { heads: 2, width: 4 };
                rotate_heads(x, cos.clone(), sin.clone(), heads) * other
            },
            |x: T2, other| {
                let column = |i| x.clone().narrow(1, i, 1);
                let [cos, sin] = [&cos, &sin].map(rows);
                let rotated = |i| {
                    let (re, im) = (column(i), column(i + 1));
                    [
                        re.clone() * cos.clone() - im.clone() * sin.clone(),
                        re * sin.clone() + im * cos.clone(),
                        column(i + 2),
                        column(i + 3),
                    ]
                };
                let mut columns = [rotated(0), rotated(4)].concat();
                columns.push(x.clone().narrow(1, 8, 2));
                Tensor::cat(columns, 1) * other
            },
        );
    });
}

/// Norms run in f32. Gates and rotations keep the type of their operands, as `silu` and products
/// with a table of the same type do in PyTorch.
#[test]
fn types_under_autocast() {
    inside(AUTOCAST, |_| {
        let low = || values([ROWS, WIDTH], 1).cast(DType::BF16);
        let norm = RmsNorm { epsilon: 1e-5, weight: RmsWeight::Factor };
        assert_eq!(rms_norm(low(), values([WIDTH], 2), norm).dtype(), DType::F32);
        assert_eq!(gated(low(), low(), GateFunction::Silu).dtype(), DType::BF16);
        let mixed = gated(low(), values([ROWS, WIDTH], 2), GateFunction::Silu);
        assert_eq!(mixed.dtype(), DType::F32);
        let [cos, sin] = [4, 5].map(|seed| values([ROWS, 2], seed));
        let rotated = rotate_heads(low(), cos, sin, RotatedHeads { heads: 2, width: 5 });
        assert_eq!(rotated.dtype(), DType::BF16);
    });
}

/// burn-flex divides sums of this length among threads, which add in any order.
#[test]
fn sums_and_means_of_models_are_in_order() {
    let values: Vec<f32> = (0..5_000_003).map(|i| (i as f32 * 0.618_034).sin() + 0.5).collect();
    let data = TensorData::new(values, [5_000_003]);
    let primitive = Tensor::<Flex, 1>::from_data(data.clone(), &FlexDevice).into_primitive();
    let scalar = |sum: FloatTensor<Flex>| deepburn_ops::float_into_host::<Flex>(sum)[0].to_bits();
    let primitive = primitive.tensor();
    let expected = [Flex::sum(primitive.clone()), Flex::mean(primitive)].map(scalar);
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let found = pool.install(|| {
            let tensor = Tensor::<Trained, 1>::from_data(data.clone(), &FlexDevice);
            [tensor.clone().sum(), tensor.mean()].map(|sum| sum.into_scalar().to_bits())
        });
        assert_eq!(found, expected, "{threads} threads");
    }
}
