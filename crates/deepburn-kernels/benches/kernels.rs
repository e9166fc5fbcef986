//! Benchmark of the kernels on slices of several sizes. Some kernels are compared with their plain
//! references.
//!
//! `cargo bench -p deepburn-kernels --bench kernels` prints one line per kernel and size. GB/s
//! counts the bytes that are read and written (Adam in single precision: four floats read, three
//! written). The sizes range from one row of GPT-2, which stays in the first-level cache and on one
//! thread, to an array that exceeds all caches.

use deepburn_kernels::{
    Adam, AdamStep, ElementwiseStep, FloatSlice, OwnedSlice, WeightDecay, WorkingCopy,
    adam_reference, cast, flatten, gradient_stats, widen,
};
use half::{bf16, f16};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// AdamW. The values of the hyper-parameters do not affect the time.
const RULE: Adam = Adam {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: WeightDecay::Decoupled(0.01),
    bias_correction: true,
};

/// Runs all kernels for each size.
fn main() {
    println!("{:<28} {:>10} {:>14} {:>8}", "kernel", "elements", "Melements/s", "GB/s");
    for len in [768, 4_096, 65_536, 1_048_576, 16_777_216] {
        optimizer(len);
        let grad = vec![1e-3_f32; len];
        let half = vec![f16::from_f32(1e-3); len];
        let brain = vec![bf16::from_f32(1e-3); len];
        gradients(len, "f32", 4, FloatSlice::F32(&grad));
        gradients(len, "f16", 2, FloatSlice::F16(&half));
        gradients(len, "bf16", 2, FloatSlice::Bf16(&brain));
        copies(&grad, half, brain);
    }
}

/// Reports an Adam step and its reference. Both read and write seven numbers per element, which are
/// 28 bytes, or 56 in f64.
fn optimizer(len: usize) {
    let (mut param, grad) = (vec![0.5_f32; len], vec![1e-3_f32; len]);
    let (mut m, mut v) = (vec![0.0_f32; len], vec![0.0_f32; len]);
    let step = ElementwiseStep::from(AdamStep::new(&RULE, 10));
    report("adam fused", len, 28, || {
        let slice = OwnedSlice { param: &mut param, states: &mut [&mut m, &mut v], working: None };
        step.update(0.5, FloatSlice::F32(&grad), slice);
    });
    let (mut param, grad) = (vec![0.5; len], vec![1e-3; len]);
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    report("adam reference f64", len, 56, || {
        adam_reference(&RULE, 10, &mut param, &grad, &mut m, &mut v);
    });
}

/// Reports the kernels that read a gradient in `format`, whose elements have `size` bytes.
fn gradients(len: usize, format: &str, size: usize, grad: FloatSlice<'_>) {
    let mut out = vec![0.0; len];
    report(&format!("gradient_stats {format}"), len, size, || {
        black_box(gradient_stats(grad));
    });
    report(&format!("widen {format}"), len, size + 4, || widen(grad, &mut out));
}

/// Reports conversions to 16 bits and the layout of a bucket, seven parts in one flat buffer.
fn copies(values: &[f32], mut half: Vec<f16>, mut brain: Vec<bf16>) {
    let len = values.len();
    report("cast f16", len, 6, || cast(values, WorkingCopy::F16(&mut half)));
    report("cast bf16", len, 6, || cast(values, WorkingCopy::Bf16(&mut brain)));
    let parts = values.chunks(len.div_ceil(7)).collect::<Vec<_>>();
    let mut flat = vec![0.0; len];
    report("flatten 7 parts", len, 8, || flatten(&parts, &mut flat));
}

/// Prints the throughput of `run` on `len` elements, from the fastest of the runs within 200 ms.
/// The first run is not timed: it touches the memory and starts the threads.
///
/// The fastest run is reported because other programs on a shared machine disturbed it least.
fn report(kernel: &str, len: usize, bytes_per_element: usize, mut run: impl FnMut()) {
    run();
    let (start, mut best) = (Instant::now(), Duration::MAX);
    while start.elapsed() < Duration::from_millis(200) {
        let run_start = Instant::now();
        run();
        best = best.min(run_start.elapsed());
    }
    let rate = len as f64 / best.as_secs_f64();
    let gigabytes = rate * bytes_per_element as f64 / 1e9;
    println!("{kernel:<28} {len:>10} {:>14.1} {gigabytes:>8.2}", rate / 1e6);
}
