//! Tests of ATen's fused ops against the portable implementations, on LibTorch's CPU device.
#![cfg(feature = "tch")]

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use burn_backend::TensorMetadata;
use burn_tch::{LibTorch, LibTorchDevice, TchTensor};
use deepburn_kernels::{Adam, AdamStep, WeightDecay, adam_reference};
use deepburn_ops::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionSaved, CrossEntropyOps, GeluOps,
    HeadGradients, LayerNormOps, LayerNormSaved, LinearOps, OptimizerOps, SelfAttention,
    UpdateArrays, portable,
};

type B = LibTorch<f32>;

const DEVICE: LibTorchDevice = LibTorchDevice::Cpu;
const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

fn random<const D: usize>(shape: [usize; D], dtype: DType) -> TchTensor {
    let tensor =
        Tensor::<B, D>::random(shape, Distribution::Uniform(-1.0, 1.0), &DEVICE).cast(dtype);
    tensor.into_primitive().tensor()
}

fn values(tensor: TchTensor) -> Vec<f64> {
    let data = deepburn_ops::read_float::<B>(tensor);
    data.iter::<f64>().collect()
}

/// Returns the tolerance: one or two roundings of the result in 16 bits. In f32, it covers
/// different orders of addition.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        _ => 3e-2,
    }
}

/// Asserts that the differences are within the tolerance, relative to the largest expected value
/// (at least 1).
#[track_caller]
fn assert_close(found: TchTensor, expected: TchTensor, what: &str, dtype: DType) {
    assert_eq!(found.shape(), expected.shape(), "{what} in {dtype:?}");
    assert_eq!(found.dtype(), expected.dtype(), "{what} in {dtype:?}");
    let (found, expected) = (values(found), values(expected));
    let size = expected.iter().fold(1.0_f64, |size, value| size.max(value.abs()));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let difference = (found - expected).abs();
        let near = difference <= tolerance(dtype) * size;
        assert!(near, "{what}[{i}] in {dtype:?}: {found}, not {expected}");
    }
}

#[test]
fn layer_norm_is_the_portable_one() {
    for dtype in DTYPES {
        for (rows, width) in [(1, 7), (3, 1), (33, 17), (70, 768)] {
            let (x, grad) = (random([rows, width], dtype), random([rows, width], dtype));
            let (gamma, beta) = (random([width], dtype), random([width], dtype));
            let fused = B::layer_norm_forward(x.clone(), gamma.clone(), beta.clone(), 1e-5);
            let plain = portable::norm::forward::<B>(x.clone(), gamma.clone(), beta, 1e-5);
            let pairs = [
                (fused.output, plain.output, "output"),
                (fused.mean.clone(), plain.mean, "mean"),
                (
                    fused.reciprocal_deviation.clone(),
                    plain.reciprocal_deviation,
                    "reciprocal deviation",
                ),
            ];
            for (fused, plain, what) in pairs {
                assert_close(fused, plain, what, dtype);
            }
            let saved = LayerNormSaved {
                x,
                gamma,
                mean: fused.mean,
                reciprocal_deviation: fused.reciprocal_deviation,
            };
            let fused = B::layer_norm_backward(grad.clone(), saved.clone());
            let plain = portable::norm::backward::<B>(grad, saved);
            assert_close(fused.x, plain.x, "dx", dtype);
            assert_close(fused.gamma, plain.gamma, "dgamma", dtype);
            assert_close(fused.beta, plain.beta, "dbeta", dtype);
        }
    }
}

#[test]
fn gelu_is_the_portable_one() {
    for dtype in DTYPES {
        for shape in [[0, 3], [1, 1], [33, 70]] {
            let (x, grad) = (random(shape, dtype), random(shape, dtype));
            assert_close(
                B::gelu_tanh(x.clone()),
                portable::gelu::forward::<B>(x.clone()),
                "y",
                dtype,
            );
            let fused = B::gelu_tanh_backward(grad.clone(), x.clone());
            assert_close(fused, portable::gelu::backward::<B>(grad, x), "dx", dtype);
        }
    }
}

#[test]
fn affine_maps_are_the_portable_ones() {
    for dtype in DTYPES {
        for (rows, inner, width) in [(1, 1, 1), (7, 5, 3), (64, 48, 33)] {
            let (x, weight) = (random([rows, inner], dtype), random([inner, width], dtype));
            let (bias, grad) = (random([width], dtype), random([rows, width], dtype));
            for bias in [None, Some(bias)] {
                let fused = B::fused_linear(x.clone(), weight.clone(), bias.clone());
                let plain = portable::linear::forward::<B>(x.clone(), weight.clone(), bias);
                assert_close(fused, plain, "y", dtype);
            }
            let fused = B::linear_x_gradient(grad.clone(), weight.clone());
            assert_close(
                fused,
                portable::linear::x_gradient::<B>(grad.clone(), weight),
                "dx",
                dtype,
            );
            let fused = B::linear_gradients(grad.clone(), x.clone());
            let plain = portable::linear::gradients::<B>(grad, x);
            assert_close(fused.weight, plain.weight, "dw", dtype);
            assert_close(fused.bias, plain.bias, "db", dtype);
        }
    }
}

#[test]
fn losses_are_the_portable_ones() {
    for dtype in DTYPES {
        // In the last case, 335 rows of f32 logits take 64 MiB, so there are two chunks.
        for (tokens, vocab) in [(1, 1), (9, 130), (400, 50_001)] {
            if tokens == 400 && dtype != DType::F32 {
                continue;
            }
            let (hidden, weight) = (random([tokens, 6], dtype), random([vocab, 6], dtype));
            let target = |i| if i % 4 == 3 { -100 } else { (i * 7 % vocab) as i64 };
            let targets = TensorData::new((0..tokens).map(target).collect::<Vec<_>>(), [tokens]);
            let targets = Tensor::<B, 1, Int>::from_data(targets, &DEVICE).into_primitive();
            for (by_hidden, by_weight) in [(true, true), (false, true), (true, false)] {
                let wanted = HeadGradients { hidden: by_hidden, weight: by_weight };
                let fused = B::head_loss(hidden.clone(), weight.clone(), targets.clone(), wanted);
                let plain = portable::cross_entropy::head_loss::<B>(
                    hidden.clone(),
                    weight.clone(),
                    targets.clone(),
                    wanted,
                );
                assert_close(fused.loss, plain.loss, "loss", dtype);
                let gradients = [fused.gradients, plain.gradients];
                let [fused, plain] = gradients.map(|it| [it.hidden, it.weight]);
                for (fused, plain) in fused.into_iter().zip(plain) {
                    assert_eq!(fused.is_some(), plain.is_some());
                    let Some((fused, plain)) = fused.zip(plain) else { continue };
                    let factor = random([1], DType::F32);
                    let scaled = B::scale_gradient(plain.clone(), factor.clone(), dtype);
                    let expected =
                        portable::cross_entropy::scale_gradient::<B>(plain.clone(), factor, dtype);
                    assert_close(scaled, expected, "scaled", dtype);
                    assert_close(fused, plain, "head", dtype);
                }
            }
            let logits = random([tokens, vocab], dtype);
            let (fused, gradient) = B::logits_loss(logits.clone(), targets.clone(), true);
            let (plain, expected) =
                portable::cross_entropy::logits_loss::<B>(logits, targets.clone(), true);
            assert_close(fused, plain, "loss of logits", dtype);
            assert_close(gradient.unwrap(), expected.unwrap(), "dlogits", dtype);
        }
    }
}

#[test]
fn attention_is_the_portable_one() {
    for dtype in DTYPES {
        for (batch, heads, positions, head_width) in
            [(1, 1, 1, 1), (2, 3, 7, 5), (2, 2, 200, 16), (1, 12, 128, 64)]
        {
            let width = heads * head_width;
            let scale = 1.0 / (head_width as f64).sqrt();
            let attention = SelfAttention {
                batch,
                heads,
                key_value_heads: heads,
                scale,
                soft_cap: None,
                upcast: false,
                mask: AttentionMask::Causal,
            };
            let projected = random([batch * positions, 3 * width], dtype);
            let grad = random([batch * positions, width], dtype);
            for dropout in [None, Some(0.3)] {
                let dropout = dropout.map(|probability| AttentionDropout { seed: 5, probability });
                let fused = B::attention_forward(projected.clone(), &attention, dropout);
                let plain =
                    portable::attention::forward::<B>(projected.clone(), &attention, dropout);
                assert_close(fused.output.clone(), plain.output, "output", dtype);
                assert_close(fused.log_sums.clone(), plain.log_sums, "log sums", dtype);
                let saved = AttentionSaved {
                    projected: projected.clone(),
                    output: fused.output,
                    log_sums: fused.log_sums,
                    dropout,
                };
                let fused = B::attention_backward(grad.clone(), saved.clone(), &attention);
                let plain = portable::attention::backward::<B>(grad.clone(), saved, &attention);
                assert_close(fused, plain, "gradient", dtype);
            }
        }
    }
}

#[test]
fn adam_updates_in_place_and_leaves_what_others_hold() {
    let rule = Adam {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: WeightDecay::Decoupled(0.1),
        bias_correction: true,
    };
    for (len, dtype) in [(0, DType::F32), (1, DType::BF16), (70_001, DType::F16)] {
        let master = random([len], DType::F32);
        let gradient = random([len], dtype);
        let (first, second) = (random([len], DType::F32), random([len], DType::F32));
        let second = TchTensor::new(second.tensor.abs());
        let [mut p, g, mut m, mut v] =
            [&master, &gradient, &first, &second].map(|tensor| values(tensor.clone()));
        let (shared, before) = (master.clone(), p.clone());
        adam_reference(&rule, 3, &mut p, &g, &mut m, &mut v);
        let place = first.tensor.data_ptr();
        let arrays = UpdateArrays { master, states: vec![first, second] };
        let working = Some(burn_backend::FloatDType::BF16);
        let step = AdamStep::new(&rule, 3).into();
        let (arrays, copy) = B::update(&step, 1.0, arrays, gradient, working);
        assert_eq!(values(shared), before, "somebody else holds the master");
        assert_eq!(arrays.states[0].tensor.data_ptr(), place, "nobody else holds the moment");
        let copy = values(copy.unwrap());
        for (i, (found, expected)) in values(arrays.master).iter().zip(&p).enumerate() {
            // One step of 1e-2 with a relative error of 1e-6, and the rounding of p.
            assert!((found - expected).abs() < 2e-7, "{i}: {found} {expected}");
            assert_eq!(half::bf16::from_f32(*found as f32).to_f64(), copy[i]);
        }
    }
}

#[test]
fn stats_see_every_bad_element() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 500, 999] {
                let good = Tensor::<B, 1>::ones([1000], &DEVICE);
                let ones = good.clone().cast(dtype).into_primitive().tensor();
                let bad = Tensor::<B, 1>::full([1], bad, &DEVICE);
                let with_bad = good.slice_assign([place..place + 1], bad).cast(dtype);
                let gradients = [ones, with_bad.into_primitive().tensor()];
                let stats = B::gradient_stats(2, &|index| gradients[index].clone());
                assert!(stats[0].finite && stats[0].sum_of_squares == 1000.0);
                assert!(!stats[1].finite);
            }
        }
    }
}

#[test]
fn flat_arrays_are_their_parts_and_zeros() {
    let parts = [3, 0, 4].map(|len| random([len], DType::F32));
    let mut expected: Vec<f64> = parts.iter().flat_map(|part| values(part.clone())).collect();
    expected.resize(10, 0.0);
    assert_eq!(values(B::flatten(parts.to_vec(), 10)), expected);
}
