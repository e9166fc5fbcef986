//! Throughput of the fused kernels on shares of several sizes, against the plain reference.
//!
//! `cargo bench -p deepburn-kernels`; one line a kernel and size. Adam moves 28 bytes an element
//! (reads four floats, writes three), so GB/s can be held against the machine's memory bandwidth.

use deepburn_kernels::{
    Adam, AdamStep, WeightDecay, adam, adam_reference, all_finite, gradient_stats,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

const RULE: Adam = Adam {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: WeightDecay::Decoupled(0.01),
    bias_correction: true,
};

fn main() {
    println!("{:<24} {:>10} {:>14} {:>8}", "kernel", "elements", "Melements/s", "GB/s");
    for len in [4_096, 65_536, 1_048_576, 16_777_216] {
        let mut param = vec![0.5_f32; len];
        let grad = vec![1e-3_f32; len];
        let (mut m, mut v) = (vec![0.0_f32; len], vec![0.0_f32; len]);
        let step = AdamStep::new(&RULE, 10);
        report("adam fused", len, 28, || adam(&step, 0.5, &mut param, &grad, &mut m, &mut v));
        report("adam reference", len, 28, || {
            adam_reference(&RULE, 10, &mut param, &grad, &mut m, &mut v);
        });
        report("gradient_stats", len, 4, || {
            black_box(gradient_stats(&grad));
        });
        report("all_finite", len, 4, || {
            black_box(all_finite(&grad));
        });
    }
}

/// The best of many runs: on a shared machine the fastest one was disturbed least.
fn report(kernel: &str, len: usize, bytes_per_element: usize, mut run: impl FnMut()) {
    run();
    let (start, mut best) = (Instant::now(), Duration::MAX);
    while start.elapsed() < Duration::from_millis(500) {
        let run_start = Instant::now();
        run();
        best = best.min(run_start.elapsed());
    }
    let rate = len as f64 / best.as_secs_f64();
    let gigabytes = rate * bytes_per_element as f64 / 1e9;
    println!("{kernel:<24} {len:>10} {:>14.1} {gigabytes:>8.2}", rate / 1e6);
}
