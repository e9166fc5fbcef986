//! Fused ops and their gradients on wgpu, whose kernels work on rows, against the CPU's.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use burn_wgpu::Wgpu;
use deepburn::ops::{
    FusedOps, GateFunction, RmsNorm, RmsWeight, RotatedHeads, cross_entropy, gated, gated_joint,
    gelu_tanh, layer_norm, linear, linear_cross_entropy, linear_scores, rms_norm, rotate_heads,
};
use deepburn::zero::Training;

/// Returns deterministic numbers in [-1, 1) as a matrix. It is stored transposed, so that no kernel
/// may rely on the order of its elements in memory.
fn matrix<B: Backend>([rows, columns]: [usize; 2], seed: usize) -> Tensor<B, 2> {
    let value = |i: usize| ((seed * 7919 + i) as f32 * 0.618_034).sin();
    let values: Vec<f32> =
        (0..rows * columns).map(|i| value(i % rows * columns + i / rows)).collect();
    let data = TensorData::new(values, [columns, rows]);
    Tensor::<B, 2>::from_data(data, &B::Device::default()).transpose()
}

/// Returns targets, every fourth of which is masked.
fn targets<B: Backend>(rows: usize, vocab: usize) -> Tensor<B, 1, Int> {
    let target = |i: usize| if i % 4 == 3 { -100 } else { (i * 7 % vocab) as i64 };
    let values: Vec<i64> = (0..rows).map(target).collect();
    Tensor::from_data(TensorData::new(values, [rows]), &B::Device::default())
}

/// An op of three matrices: `[rows, width]`, `[rows, width]` and `[1, width]`.
type Op<B> = fn(Tensor<B, 2>, Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 2>;

/// Returns the ops of all families.
fn ops<B: FusedOps>() -> Vec<(&'static str, Op<B>)> {
    vec![
        ("layer norm", |x, y, w| {
            let beta = y.narrow(0, 0, 1).flatten(0, 1);
            layer_norm(x, w.flatten(0, 1), Some(beta), 1e-5)
        }),
        ("rms norm", |x, _, w| {
            rms_norm(x, w.flatten(0, 1), RmsNorm { epsilon: 1e-5, weight: RmsWeight::Factor })
        }),
        ("rms norm plus one", |x, _, w| {
            rms_norm(x, w.flatten(0, 1), RmsNorm { epsilon: 1e-5, weight: RmsWeight::PlusOne })
        }),
        ("gelu", |x, _, _| gelu_tanh(x)),
        ("swiglu", |x, y, _| gated(x, y, GateFunction::Silu)),
        ("geglu", |x, y, _| gated(x, y, GateFunction::GeluTanh)),
        ("joint swiglu", |x, y, _| gated_joint(Tensor::cat(vec![x, y], 1), GateFunction::Silu)),
        ("rotary", |x, y, _| {
            let [rows, width] = x.dims();
            let half = width / 4;
            let table = y.detach().slice([0..rows, 0..half]);
            let heads = RotatedHeads { heads: 1, width: width - 1 };
            rotate_heads(x, table.clone().cos(), table.sin(), heads)
        }),
        ("joined columns and their slices", |x, y, w| {
            let width = x.dims()[1];
            let all = Tensor::cat(vec![x, y.narrow(1, 1, width / 2), w.repeat_dim(0, ROWS)], 1);
            let [rows, columns] = all.dims();
            all.clone().narrow(1, 3, columns / 2)
                * all.narrow(1, columns - columns / 2, columns / 2)
                / rows as f32
        }),
        ("joined and cut along the middle axis", |x, y, _| {
            let [rows, width] = x.dims();
            let joined =
                Tensor::cat(vec![x.reshape([rows, width, 1]), y.reshape([rows, width, 1])], 1);
            joined.narrow(1, 2, width).reshape([width, rows])
        }),
        ("linear", |x, y, w| linear(x, y.transpose(), Some(vector_like(w)))),
        ("head", |x, y, _| {
            let rows = x.dims()[0];
            linear_cross_entropy(x, y, targets::<B>(rows, rows)).reshape([1, 1])
        }),
        ("logits", |x, _, _| {
            let [rows, vocab] = x.dims();
            cross_entropy(x, targets::<B>(rows, vocab)).reshape([1, 1])
        }),
    ]
}

/// Returns the first elements of a row, as many as `linear` has outputs.
fn vector_like<B: Backend>(row: Tensor<B, 2>) -> Tensor<B, 1> {
    let row: Tensor<B, 1> = row.flatten(0, 1);
    row.narrow(0, 0, ROWS)
}

const ROWS: usize = 37;

/// Returns the output of an op and the gradients of its inputs; an input without a gradient has
/// none.
fn results<B: AutodiffBackend>(op: Op<B>, width: usize) -> Vec<Vec<f32>> {
    let inputs = [([ROWS, width], 1), ([ROWS, width], 2), ([1, width], 3)]
        .map(|(shape, seed)| matrix::<B>(shape, seed).detach().require_grad());
    let [x, y, w] = inputs.clone();
    let output = op(x, y, w);
    let weights = matrix::<B>(output.dims(), 4);
    let gradients = (output.clone() * weights).sum().backward();
    let of_inputs = inputs.iter().map(|input| match input.grad(&gradients) {
        Some(gradient) => gradient.into_data().to_vec::<f32>().unwrap(),
        None => vec![],
    });
    [output.into_data().to_vec::<f32>().unwrap()].into_iter().chain(of_inputs).collect()
}

/// Both compute in f32. Sums of at most 200 terms have another order, and the device's exponential
/// has errors of some units in the last place: 2e-5 of the largest element of a result.
#[test]
fn row_kernels_follow_the_cpu() {
    for width in [64, 45, 200] {
        let ops = ops::<Training<Wgpu>>().into_iter().zip(ops::<Training<Flex>>());
        for ((name, on_wgpu), (_, on_flex)) in ops {
            let found = results(on_wgpu, width);
            let expected = results(on_flex, width);
            assert_eq!(found, results(on_wgpu, width), "{name} {width}: the same bits each time");
            for (part, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.len(), expected.len(), "{name} {width} {part}");
                let size = expected.iter().fold(1.0_f32, |all, x| all.max(x.abs()));
                for (i, (x, y)) in found.iter().zip(expected).enumerate() {
                    let difference = (x - y).abs();
                    assert!(difference <= 2e-5 * size, "{name} {width} {part} [{i}]: {x} for {y}");
                }
            }
        }
    }
}

/// The loss is the training loss but for roundings, of which there are a few for each of 28 terms,
/// and predictions are counted exactly.
#[test]
fn scores_of_a_head_follow_the_cpu() {
    fn scores<B: FusedOps>() -> Vec<f32> {
        let (hidden, weight) = (matrix::<B>([ROWS, 20], 1), matrix::<B>([50, 20], 2));
        let scores = linear_scores(hidden.clone(), weight.clone(), targets::<B>(ROWS, 50));
        let loss = linear_cross_entropy(hidden, weight, targets::<B>(ROWS, 50));
        let all = Tensor::cat(vec![scores, loss], 0).into_data().to_vec::<f32>().unwrap();
        assert!((all[0] - all[2]).abs() <= 1e-5 * all[2], "{all:?}");
        all
    }
    let [found, expected] = [scores::<Training<Wgpu>>(), scores::<Training<Flex>>()];
    assert_eq!(found[1], expected[1]);
    assert!((found[0] - expected[0]).abs() <= 1e-4, "{found:?} {expected:?}");
}
