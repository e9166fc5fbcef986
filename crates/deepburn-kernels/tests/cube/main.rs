//! Tests of the device kernels against references in f64, on the available device.
//!
//! `cargo test --release -p deepburn-kernels --features wgpu --test cube` (a software device is
//! sufficient), `--features cuda` on an NVIDIA GPU.
#![cfg(any(feature = "wgpu", feature = "cuda"))]

mod activation;
mod attention;
mod columns;
mod loss_head;
mod norm;
mod rotary;

use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::prelude::*;
use deepburn_kernels::cube::{
    self, AddedRows, ColumnRange, DeviceBuffer, DeviceDType, DeviceUpdate, OwnedBuffers,
};
use deepburn_kernels::{
    Adagrad, AdagradStep, Adam, AdamStep, AgreedMovementStep, ChaChaPosition, DescentStep,
    ElementwiseStep, FloatSlice, FrozenAdam, FrozenAdamStep, FrozenLamb, FrozenLambStep,
    GradientStats, Lamb, LambStep, Lion, LionStep, LocalAdamStep, LocalMomentumStep,
    LocalMovementStep, MuonMomentum, MuonMomentumStep, OwnedSlice, Sgd, WeightDecay, WorkingCopy,
    adam_reference,
};
use half::{bf16, f16};
use rand::distr::{Bernoulli, Distribution};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

#[cfg(feature = "cuda")]
type Device = cubecl::cuda::CudaRuntime;
#[cfg(not(feature = "cuda"))]
type Device = cubecl::wgpu::WgpuRuntime;

pub(crate) type Client = ComputeClient<Device>;

pub(crate) fn client() -> Client {
    Device::client(&Default::default())
}

/// Empty, a single element, odd lengths, near the size of a cube, and long.
const SIZES: [usize; 8] = [0, 1, 7, 255, 257, 65_537, 1_000_007, 10_000_000];

/// Returns the types that the device can store and convert. f32 is always one of them.
pub(crate) fn types(client: &Client) -> Vec<DeviceDType> {
    let supports = |dtype: &DeviceDType| match dtype {
        DeviceDType::F32 => true,
        DeviceDType::F16 => client.properties().supports_type(f16::as_type_native_unchecked()),
        DeviceDType::Bf16 => client.properties().supports_type(bf16::as_type_native_unchecked()),
    };
    let all = [DeviceDType::F32, DeviceDType::F16, DeviceDType::Bf16];
    let types: Vec<_> = all.into_iter().filter(supports).collect();
    println!("types of this device: {types:?}");
    types
}

/// Returns deterministic numbers in [-1, 1), from a 64-bit linear congruential generator.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

/// Returns the numbers rounded to a type.
pub(crate) fn held(values: &[f32], dtype: DeviceDType) -> Vec<f32> {
    values
        .iter()
        .map(|x| match dtype {
            DeviceDType::F32 => *x,
            DeviceDType::F16 => f16::from_f32(*x).to_f32(),
            DeviceDType::Bf16 => bf16::from_f32(*x).to_f32(),
        })
        .collect()
}

pub(crate) fn upload(client: &Client, values: &[f32], dtype: DeviceDType) -> DeviceBuffer {
    let bytes: Vec<u8> = match dtype {
        DeviceDType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DeviceDType::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        DeviceDType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    };
    if values.is_empty() {
        return DeviceBuffer::empty(client, 0, dtype);
    }
    DeviceBuffer::new(client.create_from_slice(&bytes), values.len(), dtype)
}

pub(crate) fn download(client: &Client, buffer: DeviceBuffer) -> Vec<f32> {
    let (len, dtype) = (buffer.len(), buffer.dtype());
    let bytes = client.read_one(buffer.into_handle()).unwrap();
    let bytes = &bytes[..len * dtype.size()];
    match dtype {
        DeviceDType::F32 => f32::from_bytes(bytes).to_vec(),
        _ => bytes
            .chunks_exact(2)
            .map(|it| {
                let bits = u16::from_le_bytes([it[0], it[1]]);
                match dtype {
                    DeviceDType::F16 => f16::from_bits(bits).to_f32(),
                    _ => bf16::from_bits(bits).to_f32(),
                }
            })
            .collect(),
    }
}

/// Returns the largest relative error of a number that is rounded to a type: half a unit of its
/// last bit.
pub(crate) fn half_unit(dtype: DeviceDType) -> f64 {
    match dtype {
        DeviceDType::F32 => 2f64.powi(-24),
        DeviceDType::F16 => 2f64.powi(-11),
        DeviceDType::Bf16 => 2f64.powi(-8),
    }
}

/// Returns noise of a size that is rounded to a type, on the device and in f64.
pub(crate) fn operand(
    client: &Client,
    len: usize,
    seed: u64,
    scale: f32,
    dtype: DeviceDType,
) -> (DeviceBuffer, Vec<f64>) {
    let values: Vec<f32> = noise(len, seed).iter().map(|x| x * scale).collect();
    let values = held(&values, dtype);
    (upload(client, &values, dtype), values.into_iter().map(f64::from).collect())
}

/// Asserts that numbers differ from the expected ones by at most `tolerance(i)`, and by one
/// rounding to their type.
#[track_caller]
pub(crate) fn assert_close(
    client: &Client,
    found: &DeviceBuffer,
    expected: &[f64],
    tolerance: impl Fn(usize) -> f64,
    what: &str,
) {
    let dtype = found.dtype();
    let found = download(client, found.clone());
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
        let tolerance = tolerance(i) + half_unit(dtype) * y.abs();
        let difference = (f64::from(*x) - y).abs();
        assert!(difference <= tolerance, "{what} {dtype:?} [{i}]: {x} for {y}, {tolerance}");
    }
}

/// Returns the bits of all numbers of some buffers.
pub(crate) fn bits<'a>(
    client: &Client,
    buffers: impl IntoIterator<Item = &'a DeviceBuffer>,
) -> Vec<u32> {
    let all = buffers.into_iter().flat_map(|buffer| download(client, buffer.clone()));
    all.map(f32::to_bits).collect()
}

/// Returns the statistics of a single gradient.
fn stats_of(client: &Client, values: &[f32], dtype: DeviceDType) -> GradientStats {
    let gradient = upload(client, values, dtype);
    cube::gradient_stats(client, 1, |_| gradient.clone()).swap_remove(0)
}

fn rule(weight_decay: WeightDecay) -> Adam {
    Adam { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay, bias_correction: true }
}

/// Returns every optimizer step with step number `t`.
fn steps(t: u64) -> Vec<ElementwiseStep> {
    let sgd = Sgd { lr: 0.1, momentum: 0.0, dampening: 0.0, weight_decay: 0.1, nesterov: false };
    let lion = Lion { lr: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
    let adagrad = Adagrad { lr: 1e-2, eps: 1e-10, weight_decay: 0.1 };
    let [lamb, other_lamb] = [false, true].map(|eps_inside_sqrt| Lamb {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-6,
        eps_inside_sqrt,
        weight_decay: 0.1,
    });
    let [muon, nesterov] = [false, true].map(|nesterov| MuonMomentum { momentum: 0.95, nesterov });
    let frozen = FrozenAdam { lr: 1e-2, beta1: 0.9, eps: 1e-8, weight_decay: 0.1 };
    vec![
        AdamStep::new(&rule(WeightDecay::Decoupled(0.1)), t).into(),
        AdamStep::new(&rule(WeightDecay::L2(0.1)), t).into(),
        sgd.step(t),
        Sgd { momentum: 0.9, dampening: 0.5, ..sgd }.step(t),
        Sgd { momentum: 0.9, nesterov: true, ..sgd }.step(t),
        LionStep::new(&lion).into(),
        AdagradStep::new(&adagrad).into(),
        LambStep::new(&lamb).into(),
        LambStep::new(&other_lamb).into(),
        MuonMomentumStep::new(&muon).into(),
        MuonMomentumStep::new(&nesterov).into(),
        DescentStep::new(0.999, 0.02).into(),
        LocalMomentumStep::new(0.9).into(),
        FrozenAdamStep::new(&frozen).into(),
        LocalAdamStep::new(&frozen).into(),
        LocalMovementStep::new(&frozen).into(),
        AgreedMovementStep::new(&frozen, 0.3).into(),
        FrozenLambStep::new(&FrozenLamb { beta1: 0.9, beta2: 0.999, eps: 1e-6, weight_decay: 0.1 })
            .into(),
    ]
}

/// Returns the arrays after a step on the CPU: parameter, states, working copy.
fn on_the_cpu(
    step: &ElementwiseStep,
    before: &[Vec<f32>],
    grad: &[f32],
    dtype: DeviceDType,
) -> Vec<Vec<f32>> {
    let mut arrays = before.to_vec();
    let (halves, brains): (Vec<_>, Vec<_>) =
        grad.iter().map(|g| (f16::from_f32(*g), bf16::from_f32(*g))).unzip();
    let (mut half_copy, mut brain_copy) = (halves.clone(), brains.clone());
    let (grad, working) = match dtype {
        DeviceDType::F32 => (FloatSlice::F32(grad), None),
        DeviceDType::F16 => (FloatSlice::F16(&halves), Some(WorkingCopy::F16(&mut half_copy))),
        DeviceDType::Bf16 => (FloatSlice::Bf16(&brains), Some(WorkingCopy::Bf16(&mut brain_copy))),
    };
    let mut slices: Vec<_> = arrays.iter_mut().map(Vec::as_mut_slice).collect();
    let (param, states) = slices.split_first_mut().unwrap();
    step.update(0.25, grad, OwnedSlice { param, states, working });
    match dtype {
        DeviceDType::F32 => {}
        DeviceDType::F16 => arrays.push(half_copy.iter().map(|x| x.to_f32()).collect()),
        DeviceDType::Bf16 => arrays.push(brain_copy.iter().map(|x| x.to_f32()).collect()),
    }
    arrays
}

/// Returns the same arrays after a step on the device.
fn on_the_device(
    client: &Client,
    step: &ElementwiseStep,
    before: &[Vec<f32>],
    grad: &[f32],
    dtype: DeviceDType,
) -> Vec<Vec<f32>> {
    let arrays: Vec<_> =
        before.iter().map(|array| upload(client, array, DeviceDType::F32)).collect();
    let states: Vec<_> = arrays[1..].iter().collect();
    let working =
        (dtype != DeviceDType::F32).then(|| DeviceBuffer::empty(client, grad.len(), dtype));
    let buffers = OwnedBuffers { param: &arrays[0], states: &states, working: working.as_ref() };
    let grad = upload(client, grad, dtype);
    step.launch(client, 0.25, &[DeviceUpdate { grad: &grad, buffers }]);
    arrays.into_iter().chain(working).map(|array| download(client, array)).collect()
}

#[test]
fn device_kernels_steps_follow_the_cpu() {
    let client = client();
    // Mesa's llvmpipe and the CPU give bitwise identical results for every step: llvmpipe does not
    // fuse multiplications and additions, and its square root and division are rounded correctly. A
    // GPU may fuse a multiplication and an addition, and Vulkan allows errors of 2.5 units in the
    // last place in a division and of 3 units in a square root. The tolerance is a dozen roundings
    // of 2^-24 of numbers below 2.
    let tolerance = 1e-6;
    for dtype in types(&client) {
        for len in [0, 1, 257, 65_537, 1_000_007] {
            for step in steps(2) {
                let grad = noise(len, 5);
                let before = arrays_before(&step, len);
                let expected = on_the_cpu(&step, &before, &grad, dtype);
                let found = on_the_device(&client, &step, &before, &grad, dtype);
                assert_eq!(found.len(), expected.len());
                if dtype != DeviceDType::F32 {
                    // The working copy is exactly the rounded parameter.
                    assert_eq!(found[before.len()], held(&found[0], dtype), "{len} {step:?}");
                }
                for (found, expected) in found.iter().zip(&expected).take(before.len()) {
                    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
                        assert!((x - y).abs() <= tolerance, "{i} of {len} {step:?}: {x} {y}");
                    }
                }
            }
        }
    }
}

/// Returns parameter and states with values of both signs, except that states with squares are
/// positive.
fn arrays_before(step: &ElementwiseStep, len: usize) -> Vec<Vec<f32>> {
    let strong = |seed| noise(len, seed).iter().map(|x| x + 0.5_f32.copysign(*x)).collect();
    let mut arrays: Vec<Vec<f32>> = vec![noise(len, 1), strong(2), strong(3), strong(4), strong(6)];
    arrays.truncate(step.states() + 1);
    let squares = match step {
        ElementwiseStep::Adam(_)
        | ElementwiseStep::Lamb(_)
        | ElementwiseStep::FrozenAdam(_)
        | ElementwiseStep::LocalAdam(_)
        | ElementwiseStep::LocalMovement(_)
        | ElementwiseStep::AgreedMovement(_) => Some(2),
        ElementwiseStep::Adagrad(_) => Some(1),
        _ => None,
    };
    if let ElementwiseStep::FrozenLamb(_) = step {
        arrays[2..4].iter_mut().flatten().for_each(|x| *x = x.abs());
    }
    if let Some(squares) = squares {
        arrays[squares].iter_mut().for_each(|x| *x = x.abs());
    }
    arrays
}

#[test]
fn device_kernels_adam_follows_the_f64_reference() {
    let client = client();
    let types = types(&client);
    for (case, len) in SIZES.into_iter().enumerate() {
        for &dtype in &types {
            // Each size is tested with one form of weight decay, and each form with every type.
            let decay =
                if case % 2 == 0 { WeightDecay::Decoupled(0.1) } else { WeightDecay::L2(0.1) };
            let rule = rule(decay);
            let start = noise(len, 1);
            // No gradient is near 0. The first steps depend mainly on the sign of the gradient, so
            // a rounding error would be amplified there.
            let strong = |seed| noise(len, seed).iter().map(|x| x + 0.5_f32.copysign(*x)).collect();
            let mut p64: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
            let (mut m64, mut v64) = (vec![0.0; len], vec![0.0; len]);
            let param = upload(&client, &start, DeviceDType::F32);
            let zeros = vec![0.0; len];
            let (m, v) = (
                upload(&client, &zeros, DeviceDType::F32),
                upload(&client, &zeros, DeviceDType::F32),
            );
            let working =
                (dtype != DeviceDType::F32).then(|| DeviceBuffer::empty(&client, len, dtype));
            for t in 1..=3 {
                let grad: Vec<f32> = strong(10 + t);
                let g64: Vec<f64> =
                    held(&grad, dtype).iter().map(|x| f64::from(*x) * 0.25).collect();
                let buffers =
                    OwnedBuffers { param: &param, states: &[&m, &v], working: working.as_ref() };
                let grad = upload(&client, &grad, dtype);
                ElementwiseStep::from(AdamStep::new(&rule, t)).launch(
                    &client,
                    0.25,
                    &[DeviceUpdate { grad: &grad, buffers }],
                );
                adam_reference(&rule, t, &mut p64, &g64, &mut m64, &mut v64);
            }
            let param = download(&client, param);
            for (i, (p, expected)) in param.iter().zip(&p64).enumerate() {
                // Three updates of 1e-2, each with a relative error of some 1e-6, and three
                // roundings of p. The errors of an update come from scalars that are narrowed from
                // f64 (6e-8 of 1 - beta2 = 1e-3), and from a square root and a division whose last
                // bits may be wrong on a device.
                let error = (f64::from(*p) - expected).abs();
                assert!(
                    error <= 6e-7 * expected.abs() + 1e-7,
                    "{dtype:?} {len} {i}: {p} {expected}"
                );
            }
            if let Some(working) = working {
                // The working copy is exactly the rounded parameter.
                assert_eq!(download(&client, working), held(&param, dtype), "{len}");
            }
        }
    }
}

#[test]
fn device_kernels_padding_stays_zero_and_a_bad_gradient_alone() {
    let client = client();
    for step in steps(1) {
        padding_stays_zero_and_a_bad_gradient_alone(&client, &step);
    }
}

fn padding_stays_zero_and_a_bad_gradient_alone(client: &Client, step: &ElementwiseStep) {
    let mut values = noise(300, 1);
    let mut grad = noise(300, 2);
    for i in 290..300 {
        (values[i], grad[i]) = (0.0, 0.0);
    }
    for (place, bad) in [(0, f32::NAN), (7, f32::INFINITY), (289, f32::NEG_INFINITY)] {
        grad[place] = bad;
    }
    let param = upload(client, &values, DeviceDType::F32);
    let zeros = || upload(client, &[0.0; 300], DeviceDType::F32);
    let states: Vec<_> = (0..step.states()).map(|_| zeros()).collect();
    let buffers =
        OwnedBuffers { param: &param, states: &states.iter().collect::<Vec<_>>(), working: None };
    let grad = upload(client, &grad, DeviceDType::F32);
    step.launch(client, 1.0, &[DeviceUpdate { grad: &grad, buffers }]);
    for updated in states.into_iter().chain([param]) {
        for (i, x) in download(client, updated).into_iter().enumerate() {
            if i >= 290 {
                assert_eq!(x, 0.0, "padding at {i} of {step:?}");
            } else if ![0, 7, 289].contains(&i) {
                assert!(x.is_finite(), "{i}: {x} of {step:?}");
            }
        }
    }
}

/// More parameters than a launch takes, one of them without elements.
#[test]
fn device_kernels_steps_of_many_parameters_have_the_bits_of_one() {
    let client = client();
    let step = ElementwiseStep::from(AdamStep::new(&rule(WeightDecay::Decoupled(0.1)), 1));
    let lens = [300, 1, 0, 65_537, 7, 256, 257, 1000, 12, 513, 40_000];
    for dtype in types(&client) {
        let parameters = || {
            let of = |(i, len): (usize, &usize)| {
                let array = |seed| upload(&client, &noise(*len, seed), DeviceDType::F32);
                // The second moment of Adam is not negative.
                let squares: Vec<_> = noise(*len, 3).iter().map(|x| x * x).collect();
                let states = [array(2), upload(&client, &squares, DeviceDType::F32)];
                let grad = upload(&client, &noise(*len, 100 + i as u64), dtype);
                let working =
                    (dtype != DeviceDType::F32).then(|| DeviceBuffer::empty(&client, *len, dtype));
                (grad, array(1), states, working)
            };
            lens.iter().enumerate().map(of).collect::<Vec<_>>()
        };
        let results = |at_once: usize| {
            let parameters = parameters();
            for group in parameters.chunks(at_once) {
                let states: Vec<Vec<_>> =
                    group.iter().map(|(_, _, states, _)| states.iter().collect()).collect();
                let updates: Vec<_> = group
                    .iter()
                    .zip(&states)
                    .map(|((grad, param, _, working), states)| DeviceUpdate {
                        grad,
                        buffers: OwnedBuffers { param, states, working: working.as_ref() },
                    })
                    .collect();
                step.launch(&client, 0.25, &updates);
            }
            let arrays = parameters.into_iter().flat_map(|(_, param, states, working)| {
                [param].into_iter().chain(states).chain(working)
            });
            let bits = |x: f32| x.to_bits();
            let read = |array| download(&client, array).into_iter().map(bits).collect::<Vec<_>>();
            arrays.map(read).collect::<Vec<_>>()
        };
        assert_eq!(results(lens.len()), results(1), "{dtype:?}");
    }
}

#[test]
fn device_kernels_stats_follow_the_f64_reference() {
    let client = client();
    for dtype in types(&client) {
        for len in SIZES {
            let values = noise(len, 3);
            let stats = stats_of(&client, &values, dtype);
            let expected: f64 = held(&values, dtype).iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!(stats.finite);
            // A unit adds at most 10^7 / 2^18 = 39 squares, then a tree of 8: 47 roundings of 6e-8.
            let error = (stats.sum_of_squares - expected).abs();
            assert!(
                error <= 3e-6 * expected,
                "{dtype:?} {len}: {} {expected}",
                stats.sum_of_squares
            );
            let again = stats_of(&client, &values, dtype);
            assert_eq!(stats, again, "the same bits each time");
        }
    }
}

#[test]
fn device_kernels_stats_see_every_bad_element() {
    let client = client();
    for dtype in types(&client) {
        for len in [1, 257, 100_003] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for place in [0, len / 2, len - 1] {
                    let mut values = noise(len, 4);
                    values[place] = bad;
                    let stats = stats_of(&client, &values, dtype);
                    assert!(!stats.finite, "{bad} at {place} of {len} {dtype:?}");
                }
            }
        }
    }
}

/// More gradients than one array of partial results has memory for: the largest ones have 1024
/// pairs each, of 65,536.
#[test]
fn device_kernels_stats_do_not_depend_on_other_gradients() {
    let client = client();
    let types = types(&client);
    let large = upload(&client, &noise(4_200_000, 5), DeviceDType::F32);
    let mut gradients = vec![large; 70];
    for (index, len) in [0, 1, 7, 257, 65_537, 0].into_iter().enumerate() {
        let mut values = noise(len, index as u64);
        // One gradient is not finite, and the squares of another one overflow f32.
        match len {
            7 => values[3] = f32::INFINITY,
            257 => values[0] = 3e38,
            _ => {}
        }
        let dtype = if len == 257 { DeviceDType::F32 } else { types[index % types.len()] };
        gradients.insert(index * 14, upload(&client, &values, dtype));
    }
    let of = |gradients: &[DeviceBuffer]| {
        cube::gradient_stats(&client, gradients.len(), |index| gradients[index].clone())
    };
    let bits = |stats: &GradientStats| (stats.sum_of_squares.to_bits(), stats.finite);
    let together: Vec<_> = of(&gradients).iter().map(bits).collect();
    let each: Vec<_> = gradients.chunks(1).flat_map(of).map(|stats| bits(&stats)).collect();
    assert_eq!(together, each);
    assert_eq!(together.iter().filter(|(_, finite)| !finite).count(), 1);
    assert!(of(&[]).is_empty());
}

#[test]
fn device_kernels_squares_beyond_f32_are_no_overflow() {
    let client = client();
    // f16 has no such elements.
    for dtype in types(&client).into_iter().filter(|dtype| *dtype != DeviceDType::F16) {
        let values = held(&[3e38; 1001], dtype);
        let stats = stats_of(&client, &values, dtype);
        assert!(stats.finite, "{dtype:?}");
        let expected = f64::from(values[0]).powi(2) * 1001.0;
        assert!((stats.sum_of_squares / expected - 1.0).abs() < 1e-12, "{dtype:?}: {stats:?}");
    }
}

#[test]
fn device_kernels_casts_round_to_nearest_even_and_overflow_to_infinity() {
    let client = client();
    let edges = [
        0.0,
        -0.0,
        1.0,
        1.0 + 1.0 / 2048.0,
        1.0 + 3.0 / 2048.0,
        1.0 + 1.0 / 256.0,
        65_504.0,
        65_519.9,
        65_520.0,
        -65_520.0,
        1e6,
        3.4e38,
        -3.4e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
    ];
    for dtype in types(&client) {
        for len in SIZES {
            let mut values: Vec<f32> = noise(len, 5).iter().map(|x| x * 1000.0).collect();
            let count = edges.len().min(len);
            values[..count].copy_from_slice(&edges[..count]);
            let cast = cube::cast(&client, &upload(&client, &values, DeviceDType::F32), dtype);
            assert_eq!(download(&client, cast.clone()), held(&values, dtype), "{dtype:?} {len}");
            let back = cube::cast(&client, &cast, DeviceDType::F32);
            assert_eq!(download(&client, back), held(&values, dtype), "{dtype:?} {len}");
        }
        let nan = cube::cast(&client, &upload(&client, &[f32::NAN], DeviceDType::F32), dtype);
        assert!(download(&client, nan)[0].is_nan(), "{dtype:?}");
    }
}

#[test]
fn device_kernels_flat_arrays_are_their_parts_and_zeros() {
    let client = client();
    for dtype in types(&client) {
        // More parts than a launch takes, and lists that fill one.
        let many = |count: usize| (0..count).map(|i| i * 37 % 300).collect();
        for lens in [
            vec![0],
            vec![1],
            vec![7, 0, 300],
            vec![65_537, 1_000_007, 3],
            many(8),
            many(16),
            many(19),
        ] {
            let parts: Vec<Vec<f32>> =
                lens.iter().enumerate().map(|(i, len)| noise(*len, i as u64)).collect();
            let buffers: Vec<_> = parts.iter().map(|part| upload(&client, part, dtype)).collect();
            let used: usize = lens.iter().sum();
            for padding in [0, 1, 1000] {
                let flat = cube::flatten(&client, &buffers, used + padding);
                let mut expected = held(&parts.concat(), dtype);
                expected.resize(used + padding, 0.0);
                assert_eq!(download(&client, flat), expected, "{lens:?} {padding} {dtype:?}");
            }
        }
    }
}

#[test]
fn device_kernels_joined_rows_are_the_rows_of_the_parts_and_zeros() {
    let client = client();
    for dtype in types(&client) {
        // Widths that a unit can and cannot divide by four, an empty part, more parts than a launch
        // takes.
        let many: Vec<_> = (0..11).map(|i| i * 5 % 13).collect();
        for widths in [vec![64, 32, 32], vec![7, 0, 3], vec![5], vec![0, 0], many] {
            for (rows, padding) in [(0, 0), (1, 4), (37, 0), (300, 3)] {
                let part =
                    |(i, width): (usize, &usize)| held(&noise(rows * width, i as u64), dtype);
                let parts: Vec<_> = widths.iter().enumerate().map(part).collect();
                let buffers: Vec<_> =
                    parts.iter().map(|part| upload(&client, part, dtype)).collect();
                let pitch = widths.iter().sum::<usize>() + padding;
                let joined = cube::join_rows(&client, &buffers, rows, pitch);
                let row = |row: usize| {
                    let own = |(part, width): (&Vec<f32>, &usize)| {
                        part[row * width..(row + 1) * width].to_vec()
                    };
                    let mut whole: Vec<_> = parts.iter().zip(&widths).flat_map(own).collect();
                    whole.resize(pitch, 0.0);
                    whole
                };
                let expected: Vec<_> = (0..rows).flat_map(row).collect();
                assert_eq!(download(&client, joined), expected, "{widths:?} {rows} {dtype:?}");
            }
        }
    }
}

#[test]
fn device_kernels_copies_are_the_elements_of_the_columns() {
    let client = client();
    for dtype in types(&client) {
        let values = held(&noise(70_001, 9), dtype);
        let whole = upload(&client, &values, dtype);
        for [rows, pitch, start, width] in [
            [1, 70_001, 0, 0],
            [1, 70_001, 0, 1],
            [1, 70_001, 70_000, 1],
            [1, 70_001, 3, 512],
            [1, 70_001, 70_001, 0],
            [0, 8, 4, 4],
            [70, 1000, 0, 1000],
            [70, 1000, 128, 300],
            [71, 985, 7, 250],
            // The last row ends before its padding.
            [8, 9000, 3, 6998],
        ] {
            let columns = ColumnRange { rows, pitch, start, width };
            let copy = cube::copy_of_columns(&client, &whole, columns);
            let row = |row: usize| &values[row * pitch + start..][..width];
            let expected: Vec<_> = (0..rows).flat_map(row).copied().collect();
            assert_eq!(download(&client, copy), expected, "{columns:?} {dtype:?}");
        }
    }
}

/// The host adds the widened term, which is exact, and rounds the sum once, as the device does.
#[test]
fn device_kernels_added_terms_have_the_bits_of_the_host() {
    let client = client();
    for dtype in types(&client) {
        // More sums than a launch takes, one without elements, one of several cubes.
        let lens = [300, 0, 1, 65_537, 256, 257, 5, 6, 7, 8, 9, 1000];
        let sums = lens.map(|len| noise(len, len as u64));
        let terms = lens.map(|len| held(&noise(len, 7 + len as u64), dtype));
        let on_device = sums.each_ref().map(|sum| upload(&client, sum, DeviceDType::F32));
        let buffers = terms.each_ref().map(|term| upload(&client, term, dtype));
        cube::add_terms(&client, &on_device, &buffers);
        for ((sum, term), found) in sums.iter().zip(&terms).zip(on_device) {
            let expected: Vec<_> = sum.iter().zip(term).map(|(sum, term)| sum + term).collect();
            assert_eq!(download(&client, found), expected, "{dtype:?} {}", sum.len());
        }
        cube::add_terms(&client, &[], &[]);
    }
}

/// Parts are added in their order in f32, divided and rounded once, as the host computes it.
#[test]
fn device_kernels_sums_of_parts_have_the_bits_of_the_host() {
    let client = client();
    for dtype in types(&client) {
        for (count, len, padding) in [(1, 300, 0), (2, 1, 5), (3, 65_537, 3), (8, 1000, 0)] {
            let parts: Vec<_> = (0..count).map(|i| held(&noise(len, i as u64), dtype)).collect();
            let buffers: Vec<_> = parts.iter().map(|part| upload(&client, part, dtype)).collect();
            for divisor in [1.0, count as f32] {
                let sum = cube::sum_of_parts(&client, &buffers, divisor, len + padding).unwrap();
                let of = |i: usize| parts[1..].iter().fold(parts[0][i], |sum, part| sum + part[i]);
                let quotients: Vec<_> = (0..len).map(|i| of(i) / divisor).collect();
                let mut expected = held(&quotients, dtype);
                expected.resize(len + padding, 0.0);
                assert_eq!(download(&client, sum), expected, "{dtype:?} {count} {len} {divisor}");
            }
        }
        let parts = vec![upload(&client, &[1.0], dtype); 9];
        assert!(cube::sum_of_parts(&client, &parts, 1.0, 1).is_none(), "more than a launch takes");
        let none = vec![upload(&client, &[], dtype); 2];
        let zeros = cube::sum_of_parts(&client, &none, 2.0, 4).unwrap();
        assert_eq!(download(&client, zeros), [0.0; 4]);
    }
}

/// Each unit adds at most 39 elements of the longest array, and two trees of at most 10 additions
/// follow. An addition rounds by 2^-24 of its result, which is at most the sum of magnitudes.
#[test]
fn device_kernels_sums_follow_the_f64_reference_with_the_same_bits_each_time() {
    const ADDITIONS: f64 = 64.0;
    let client = client();
    for dtype in types(&client) {
        for len in SIZES {
            // Positive, so that the sum is not near 0, and normal numbers in every type.
            let values: Vec<f32> = noise(len, 11).iter().map(|x| x * 1e-3 + 2e-3).collect();
            let values = held(&values, dtype);
            let buffer = upload(&client, &values, dtype);
            let expected: f64 = values.iter().map(|x| f64::from(*x)).sum();
            let magnitudes: f64 = values.iter().map(|x| f64::from(x.abs())).sum();
            let rounding = half_unit(dtype) * expected.abs();
            let tolerance = ADDITIONS * half_unit(DeviceDType::F32) * magnitudes + rounding;
            let sums = [(); 3].map(|()| download(&client, cube::sum(&client, &buffer))[0]);
            let difference = (f64::from(sums[0]) - expected).abs();
            assert!(difference <= tolerance, "{len} {dtype:?}: {} for {expected}", sums[0]);
            assert_eq!(sums.map(f32::to_bits), [sums[0].to_bits(); 3], "{len} {dtype:?}");
        }
        let bad = upload(&client, &[1.0, f32::NAN, 2.0], dtype);
        assert!(download(&client, cube::sum(&client, &bad))[0].is_nan(), "{dtype:?}");
    }
}

/// Returns elements `start..` of a table after rows were added in their order, as in f32 on the
/// host.
fn with_rows(dense: &[f32], start: usize, indices: &[u32], values: &[f32]) -> Vec<f32> {
    let mut sum = dense.to_vec();
    let row_len = values.len() / indices.len();
    for (index, row) in indices.iter().zip(values.chunks(row_len)) {
        for (column, value) in row.iter().enumerate() {
            let place = (*index as usize * row_len + column).checked_sub(start);
            if let Some(element) = place.and_then(|place| sum.get_mut(place)) {
                *element += value;
            }
        }
    }
    sum
}

/// Adds rows on the device and returns the sum.
fn device_rows(
    client: &Client,
    dense: &[f32],
    start: usize,
    indices: &[u32],
    values: (&[f32], DeviceDType),
) -> Vec<f32> {
    let sum = upload(client, dense, DeviceDType::F32);
    let rows = AddedRows {
        indices: client.create_from_slice(u32::as_bytes(indices)),
        values: &upload(client, values.0, values.1),
        row_len: values.0.len() / indices.len(),
    };
    cube::add_rows(client, &sum, start, rows);
    download(client, sum)
}

/// Additions in f32 in the order of the rows have the same bits on the host.
#[test]
fn device_kernels_rows_are_added_in_their_order_with_the_bits_of_the_host() {
    let client = client();
    for dtype in types(&client) {
        for (count, row_len, table_rows) in
            [(1, 1, 1), (7, 3, 4), (257, 45, 20), (600, 768, 50), (300, 5, 1)]
        {
            let random = noise(count, 7);
            let index = |x: &f32| ((x + 1.0) * 0.5 * table_rows as f32) as u32;
            let indices: Vec<u32> = random.iter().map(index).collect();
            // Of different magnitudes, so that another order rounds differently.
            let values: Vec<f32> = noise(count * row_len, 8)
                .iter()
                .enumerate()
                .map(|(i, x)| x * [1.0, 1e3, 1e-3][i / row_len % 3])
                .collect();
            let values = held(&values, dtype);
            let table = noise(table_rows * row_len, 9);
            let len = table.len();
            // The whole table, parts that cut rows, and a single element.
            for part in [0..len, len / 3..len, len / 3..2 * len / 3 + 1, len - 1..len] {
                let (start, dense) = (part.start, &table[part.clone()]);
                let expected = with_rows(dense, start, &indices, &values);
                for _ in 0..2 {
                    let sum = device_rows(&client, dense, start, &indices, (&values, dtype));
                    let bits =
                        |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&sum), bits(&expected), "{dtype:?} {count} {row_len} {part:?}");
                }
            }
        }
    }
}

/// More rows than a grid has cubes along one axis, of which few are in the part.
#[test]
fn device_kernels_rows_outside_of_the_part_are_ignored() {
    let client = client();
    let count = 70_000;
    let mut indices: Vec<u32> = (1000..1000 + count as u32).collect();
    (indices[count - 1], indices[3]) = (1001, 0);
    let values = noise(count * 2, 3);
    let dense = noise(7, 4);
    let expected = with_rows(&dense, 1999, &indices, &values);
    assert_ne!(expected, dense);
    assert_eq!(device_rows(&client, &dense, 1999, &indices, (&values, DeviceDType::F32)), expected);
    assert_eq!(device_rows(&client, &dense, 5, &indices, (&values, DeviceDType::F32)), dense);
}

#[test]
#[should_panic(expected = "3 rows need 12 bytes of indices, and 8 bytes were given")]
fn device_kernels_rows_without_indices_are_refused() {
    let client = client();
    let [sum, values] = [6, 6].map(|len| DeviceBuffer::empty(&client, len, DeviceDType::F32));
    let rows = AddedRows { indices: client.empty(8), values: &values, row_len: 2 };
    cube::add_rows(&client, &sum, 0, rows);
}

/// Kernels would compute with the length modulo 2^32.
#[test]
#[should_panic(expected = "an array of 4294967296 elements of F32 is too long")]
fn device_kernels_arrays_beyond_32_bits_are_refused() {
    let handle = client().empty(4);
    DeviceBuffer::new(handle, 1 << 32, DeviceDType::F32);
}

#[test]
#[should_panic(expected = "adam: `v` has 3 elements and `param` has 2")]
fn device_kernels_buffers_of_different_lengths_are_refused() {
    let client = client();
    let [a, b] = [2, 3].map(|len| DeviceBuffer::empty(&client, len, DeviceDType::F32));
    let buffers = OwnedBuffers { param: &a, states: &[&a, &b], working: None };
    let step = ElementwiseStep::from(AdamStep::new(&rule(WeightDecay::L2(0.0)), 1));
    step.launch(&client, 1.0, &[DeviceUpdate { grad: &a, buffers }]);
}

/// Draws on the host and on the device from positions in and between blocks, also where the counter
/// carries into its upper word.
#[test]
fn device_kernels_draw_as_the_host() {
    let client = client();
    let mut host = ChaCha8Rng::seed_from_u64(42);
    host.set_stream(7 << 32 | 3);
    let carries = u128::from(u32::MAX) * 16 + 5;
    for dtype in types(&client) {
        for word in [0, 1, 2, 15, 16, 31, 1000, carries] {
            for (len, probability) in [(0, 0.5), (1, 0.9), (7, 0.0), (8, 0.9), (65_537, 0.1)] {
                host.set_word_pos(word);
                let position =
                    ChaChaPosition { key: host.get_seed(), stream: host.get_stream(), word };
                let drawn = cube::bernoulli(&client, &position, probability, len, dtype);
                let expected = Bernoulli::new(probability).unwrap();
                let expected: Vec<f32> =
                    (0..len).map(|_| f32::from(u8::from(expected.sample(&mut host)))).collect();
                assert_eq!(download(&client, drawn), expected, "{dtype:?}, word {word}, {len}");
                if probability > 0.0 {
                    let x = held(&noise(len, 8), dtype);
                    let scale = (1.0 / probability) as f32;
                    let kept: Vec<_> =
                        x.iter().zip(&expected).map(|(x, one)| x * one * scale).collect();
                    let found =
                        cube::dropout(&client, &position, probability, &upload(&client, &x, dtype));
                    assert_eq!(
                        download(&client, found),
                        held(&kept, dtype),
                        "{dtype:?}, {word}, {len}"
                    );
                }
                assert_eq!(host.get_word_pos(), word + 2 * len as u128);
            }
        }
    }
}
