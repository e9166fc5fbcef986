//! Benchmark of one Adam step on the parameters of GPT-2 (124,439,808 elements), compared with a
//! copy of the same number of bytes.
//!
//! `cargo bench -p deepburn-kernels --bench adam [-- ROUNDS]`; `peer_adamw.py` runs it alternately
//! with PyTorch's optimizer. Every round times every case once, so that a disturbance of the
//! machine affects all cases, and each case is compared with the copy of the same round. The
//! benchmark prints medians over the rounds.
//!
//! The bandwidth counts the bytes that are read and written. A step in single precision reads four
//! floats per element and writes three. The copy reads 14 bytes per element and writes 14, one long
//! copy per thread. A step is limited by memory bandwidth, so the copy is its upper bound.

use deepburn_kernels::{
    Adam, AdamStep, ElementwiseStep, FloatSlice, OwnedSlice, WeightDecay, WorkingCopy,
    unscale_and_clip,
};
use half::{bf16, f16};
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// AdamW. The values of the hyper-parameters do not affect the time.
const RULE: Adam = Adam {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: WeightDecay::Decoupled(0.01),
    bias_correction: true,
};

/// The cases: the type of the gradient, and of the working copy if there is one.
const CASES: [&str; 7] = [
    "copy",
    "adam flat",
    "adam 148 tensors",
    "adam f32 to bf16",
    "adam f32 to f16",
    "adam bf16 to bf16",
    "adam f16 to f16",
];

/// Returns the number of elements of each parameter of GPT-2 124M, in the order of its checkpoint.
fn gpt2() -> Vec<usize> {
    const WIDTH: usize = 768;
    let layer = [
        [WIDTH, WIDTH],
        [WIDTH * 3 * WIDTH, 3 * WIDTH],
        [WIDTH * WIDTH, WIDTH],
        [WIDTH, WIDTH],
        [WIDTH * 4 * WIDTH, 4 * WIDTH],
        [4 * WIDTH * WIDTH, WIDTH],
    ];
    let layers = (0..12).flat_map(|_| layer.into_iter().flatten());
    [50_257 * WIDTH, 1024 * WIDTH].into_iter().chain(layers).chain([WIDTH, WIDTH]).collect()
}

/// Runs the rounds and prints each case's median time, bandwidth and ratio to the copy.
fn main() {
    // `cargo bench` passes `--bench` to the program.
    let rounds = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(15);
    let mut bench = Bench::new(gpt2());
    bench.round();
    let rounds = (0..rounds).map(|_| bench.round()).collect::<Vec<_>>();

    println!("{} elements, {} threads", bench.param.len(), rayon::current_num_threads());
    for (case, name) in CASES.iter().enumerate() {
        let seconds = median(rounds.iter().map(|round| round[case]));
        let of_copy = median(rounds.iter().map(|round| round[0] / round[case]));
        let gigabytes = 28.0 * bench.param.len() as f64 / 1e9;
        // A working copy adds two bytes to the 28 bytes per element, and a 16-bit gradient saves
        // two bytes.
        let bytes = if name.starts_with("adam f32 to") { 30.0 / 28.0 } else { 1.0 };
        println!(
            "{name:<20} {seconds:>8.4} s {:>7.2} GB/s {:>6.2} of the copy's bandwidth",
            bytes * gigabytes / seconds,
            bytes * of_copy
        );
    }
}

/// Returns the median; for an even number of values, the upper of the two middle values.
///
/// # Panics
/// Panics if `values` is empty.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values = values.collect::<Vec<_>>();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The arrays of all cases, allocated and touched once.
struct Bench {
    /// The number of elements of each parameter.
    tensors: Vec<usize>,
    /// The master weights of all parameters, concatenated.
    param: Vec<f32>,
    /// The first moments.
    m: Vec<f32>,
    /// The second moments.
    v: Vec<f32>,
    /// The gradient in single precision.
    grad: Vec<f32>,
    /// The same gradient in f16.
    half_grad: Vec<f16>,
    /// The same gradient in bf16.
    brain_grad: Vec<bf16>,
    /// The working copy in f16.
    half_copy: Vec<f16>,
    /// The working copy in bf16.
    brain_copy: Vec<bf16>,
    /// The source of the copy, 14 bytes per element of a parameter.
    from: Vec<u16>,
    /// The target of the copy.
    to: Vec<u16>,
}

impl Bench {
    /// Allocates the arrays for parameters with these numbers of elements. Gradients are below 1e-2
    /// and have different values.
    fn new(tensors: Vec<usize>) -> Self {
        let len = tensors.iter().sum::<usize>();
        let grad = (0..len).map(|i| ((i % 1009) as f32 - 504.0) * 1e-5).collect::<Vec<_>>();
        Self {
            tensors,
            param: grad.iter().map(|g| g * 10.0).collect(),
            m: vec![1e-3; len],
            v: vec![1e-6; len],
            half_grad: grad.iter().map(|g| f16::from_f32(*g)).collect(),
            brain_grad: grad.iter().map(|g| bf16::from_f32(*g)).collect(),
            half_copy: vec![f16::ONE; len],
            brain_copy: vec![bf16::ONE; len],
            from: vec![1; 7 * len],
            to: vec![0; 7 * len],
            grad,
        }
    }

    /// Runs each of [`CASES`] once and returns the seconds of each.
    fn round(&mut self) -> [f64; 7] {
        let (single, flat) = (FloatSlice::F32(&self.grad), [self.param.len()]);
        let (half, brain) = (FloatSlice::F16(&self.half_grad), FloatSlice::Bf16(&self.brain_grad));
        let (half_copy, brain_copy) = (&mut self.half_copy, &mut self.brain_copy);
        let mut state = [&mut self.param[..], &mut self.m, &mut self.v];
        let mut update =
            |tensors: &[usize], grad: FloatSlice<'_>, working: Option<WorkingCopy<'_>>| {
                seconds(|| {
                    step_over(tensors, grad, state.each_mut().map(|array| &mut **array), working)
                })
            };
        [
            seconds(|| copy(&self.from, &mut self.to)),
            update(&flat, single, None),
            update(&self.tensors, single, None),
            update(&flat, single, Some(WorkingCopy::Bf16(brain_copy))),
            update(&flat, single, Some(WorkingCopy::F16(half_copy))),
            update(&flat, brain, Some(WorkingCopy::Bf16(brain_copy))),
            update(&flat, half, Some(WorkingCopy::F16(half_copy))),
        ]
    }
}

/// Runs a step on tensors that are adjacent in the arrays. A working copy is only supported for a
/// single tensor.
fn step_over(
    tensors: &[usize],
    grad: FloatSlice<'_>,
    [param, m, v]: [&mut [f32]; 3],
    mut working: Option<WorkingCopy<'_>>,
) {
    let step = ElementwiseStep::from(AdamStep::new(&RULE, 10));
    let scale = unscale_and_clip(3.0, 1.0, Some(1.0)) as f32;
    let mut start = 0;
    for len in tensors {
        let range = start..start + len;
        let slice = OwnedSlice {
            param: &mut param[range.clone()],
            states: &mut [&mut m[range.clone()], &mut v[range.clone()]],
            working: working.take(),
        };
        step.update(scale, grad.slice(range), slice);
        start += len;
    }
}

/// Copies with one long copy per thread, for which the C library uses stores that bypass the
/// caches.
fn copy(from: &[u16], to: &mut [u16]) {
    let share = from.len().div_ceil(rayon::current_num_threads());
    to.par_chunks_mut(share)
        .zip(from.par_chunks(share))
        .for_each(|(to, from)| black_box(to).copy_from_slice(black_box(from)));
}

/// Returns the wall-clock time of `run` in seconds.
fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}
