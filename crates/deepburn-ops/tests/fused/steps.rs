//! Tests of the autodiff steps: the gradients of fused ops equal the gradients of the ops that they
//! replace.

use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use burn_flex::Flex;
use deepburn_ops::{
    AttentionMask, SelfAttention, cross_entropy, gelu_tanh, layer_norm, linear,
    linear_cross_entropy, self_attention,
};
use deepburn_zero::Training;

use crate::{Array, assert_close};

type B = Training<Flex>;

fn input(array: &Array, dtype: DType) -> Tensor<B, 2> {
    let data = TensorData::new(array.values.clone(), array.shape).convert_dtype(dtype);
    Tensor::from_data(data, (&Default::default(), dtype))
}

fn targets(values: &[i64]) -> Tensor<B, 1, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &Default::default())
}

/// Returns the output, and the gradients of a weighted sum of the output with respect to each input
/// that `learns`.
fn run(
    inputs: &[Array],
    learns: &[bool],
    function: impl Fn(&[Tensor<B, 2>]) -> Tensor<B, 2>,
) -> Vec<Vec<f64>> {
    let inputs: Vec<_> = inputs
        .iter()
        .zip(learns)
        .map(|(array, learns)| input(array, DType::F32).set_require_grad(*learns))
        .collect();
    let output = function(&inputs);
    let mut found = vec![output.clone().into_data().iter::<f64>().collect()];
    if learns.contains(&true) {
        let weights = input(&Array::new(output.dims(), 9), DType::F32);
        let grads = (output * weights).sum().backward();
        for (input, learns) in inputs.iter().zip(learns) {
            let grad = input.grad(&grads);
            assert_eq!(grad.is_some(), *learns);
            found.extend(grad.map(|grad| grad.into_data().iter::<f64>().collect::<Vec<_>>()));
        }
    }
    found
}

/// Compares two functions for every subset of inputs that require a gradient.
fn compare(
    inputs: &[Array],
    fused: impl Fn(&[Tensor<B, 2>]) -> Tensor<B, 2>,
    plain: impl Fn(&[Tensor<B, 2>]) -> Tensor<B, 2>,
) {
    for choice in 0..1_u32 << inputs.len() {
        let learns: Vec<bool> = (0..inputs.len()).map(|i| choice >> i & 1 == 1).collect();
        let (fused, plain) = (run(inputs, &learns, &fused), run(inputs, &learns, &plain));
        assert_eq!(fused.len(), plain.len());
        for (i, (fused, plain)) in fused.iter().zip(&plain).enumerate() {
            assert_close(fused, plain, 1e-5, &format!("{learns:?}, result {i}"));
        }
    }
}

fn arrays<const N: usize>(shapes: [[usize; 2]; N]) -> [Array; N] {
    let mut seed = 0;
    shapes.map(|shape| {
        seed += 1;
        Array::new(shape, seed)
    })
}

#[test]
fn layer_norm_step() {
    let fused = |x: &[Tensor<B, 2>]| {
        let [gamma, beta] = [&x[1], &x[2]].map(|x| x.clone().flatten(0, 1));
        layer_norm(x[0].clone(), gamma, Some(beta), 1e-5)
    };
    let plain = |x: &[Tensor<B, 2>]| {
        let centered = x[0].clone() - x[0].clone().mean_dim(1);
        let variance = centered.clone().powi_scalar(2).mean_dim(1);
        centered / (variance + 1e-5).sqrt() * x[1].clone() + x[2].clone()
    };
    compare(&arrays([[7, 12], [1, 12], [1, 12]]), fused, plain);
}

#[test]
fn layer_norm_without_beta_of_higher_rank() {
    let x = input(&Array::new([6, 4], 1), DType::F32);
    let gamma = input(&Array::new([1, 4], 2), DType::F32).flatten(0, 1);
    let flat = layer_norm(x.clone(), gamma.clone(), None, 1e-5);
    let cube = layer_norm(x.reshape([2, 3, 4]), gamma, None, 1e-5);
    assert_eq!(cube.dims(), [2, 3, 4]);
    let [flat, cube] =
        [flat.into_data(), cube.into_data()].map(|data| data.to_vec::<f32>().unwrap());
    assert_eq!(flat, cube);
}

#[test]
fn gelu_step() {
    let plain = |x: &[Tensor<B, 2>]| {
        let x = x[0].clone();
        let u = (x.clone() + x.clone().powi_scalar(3) * 0.044_715)
            * (2.0 / std::f64::consts::PI).sqrt();
        x * (activation::tanh(u) + 1.0) * 0.5
    };
    compare(&arrays([[5, 9]]), |x| gelu_tanh(x[0].clone()), plain);
}

#[test]
fn linear_step() {
    let shapes = [[5, 4], [4, 6], [1, 6]];
    let fused =
        |x: &[Tensor<B, 2>]| linear(x[0].clone(), x[1].clone(), Some(x[2].clone().flatten(0, 1)));
    let plain = |x: &[Tensor<B, 2>]| x[0].clone().matmul(x[1].clone()) + x[2].clone();
    compare(&arrays(shapes), fused, plain);
    let arrays = arrays([[5, 4], [4, 6]]);
    compare(
        &arrays,
        |x| linear(x[0].clone(), x[1].clone(), None),
        |x| x[0].clone().matmul(x[1].clone()),
    );
}

fn plain_loss(logits: Tensor<B, 2>) -> Tensor<B, 2> {
    let log = activation::log_softmax(logits, 1);
    let rows = log.clone().slice([0..4, 0..11]);
    rows.gather(1, targets(&[3, 0, 10, 3]).unsqueeze_dim(1)).sum().neg().unsqueeze()
}

#[test]
fn head_step() {
    // The last target is masked.
    let fused = |x: &[Tensor<B, 2>]| {
        linear_cross_entropy(x[0].clone(), x[1].clone(), targets(&[3, 0, 10, 3, -100])).unsqueeze()
    };
    let plain = |x: &[Tensor<B, 2>]| plain_loss(x[0].clone().matmul(x[1].clone().transpose()));
    compare(&arrays([[5, 6], [11, 6]]), fused, plain);
}

#[test]
fn cross_entropy_step() {
    let fused =
        |x: &[Tensor<B, 2>]| cross_entropy(x[0].clone(), targets(&[3, 0, 10, 3, -100])).unsqueeze();
    compare(&arrays([[5, 11]]), fused, |x| plain_loss(x[0].clone()));
}

#[test]
fn attention_step() {
    let options = SelfAttention {
        batch: 2,
        heads: 2,
        key_value_heads: 2,
        soft_cap: None,
        scale: 0.6,
        upcast: false,
        mask: AttentionMask::Causal,
    };
    let plain = |x: &[Tensor<B, 2>]| {
        let heads = x[0].clone().reshape([2, 5, 6, 3]).swap_dims(1, 2);
        let [q, k, v] = [0, 1, 2].map(|part| heads.clone().narrow(1, part * 2, 2));
        let scores = (q * 0.6).matmul(k.swap_dims(2, 3));
        let future = Tensor::<B, 2, Int>::from_data(
            TensorData::new((0..25).map(|i| i64::from(i % 5 > i / 5)).collect(), [5, 5]),
            &Default::default(),
        );
        let future = future.bool().unsqueeze::<4>().expand([2, 2, 5, 5]);
        let weights = activation::softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
        weights.matmul(v).swap_dims(1, 2).reshape([10, 6])
    };
    compare(&arrays([[10, 18]]), |x| self_attention(x[0].clone(), &options, 0.0), plain);
}

#[test]
fn dropped_weights_carry_no_gradient() {
    let options = SelfAttention {
        batch: 1,
        heads: 1,
        key_value_heads: 1,
        soft_cap: None,
        scale: 1.0,
        upcast: false,
        mask: AttentionMask::Causal,
    };
    let x = input(&Array::new([1, 6], 1), DType::F32).require_grad();
    // With a single position there is one weight, which becomes 2 or is dropped.
    let mut seen = [false; 2];
    for _ in 0..100 {
        let y = self_attention(x.clone(), &options, 0.5);
        let kept = y.clone().abs().sum().into_scalar() > 0.0;
        let grads = y.sum().backward();
        let grad: Vec<f32> = x.grad(&grads).unwrap().into_data().to_vec().unwrap();
        let value = if kept { 2.0 } else { 0.0 };
        assert_eq!(grad, [0.0, 0.0, 0.0, 0.0, value, value]);
        seen[usize::from(kept)] = true;
    }
    assert_eq!(seen, [true; 2]);
}

#[test]
fn sixteen_bit_gradients_have_their_inputs_type_and_overflow_to_infinity() {
    for dtype in [DType::F16, DType::BF16] {
        let hidden = input(&Array::new([3, 4], 1), dtype).require_grad();
        let weight = input(&Array::new([7, 4], 2), dtype).require_grad();
        let loss = linear_cross_entropy(hidden.clone(), weight.clone(), targets(&[1, 2, 3]));
        assert_eq!(loss.dtype(), DType::F32);
        let grads = (loss * 1e6).backward();
        for grad in [hidden.grad(&grads).unwrap(), weight.grad(&grads).unwrap()] {
            assert_eq!(grad.dtype(), dtype);
            let values = grad.into_data();
            let infinite = values.iter::<f32>().any(f32::is_infinite);
            // Only f16 has a maximum of 65504.
            assert_eq!(infinite, dtype == DType::F16);
        }
    }
}
