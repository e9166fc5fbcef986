//! What this machine reaches, measured in under a second.
//!
//! Main type: [`Measured`]: a matrix product and an element-wise op of the backend `flex`, on arrays as large as those
//! of the model, because small ones reach other rates.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn::comm::{CommError, Host, Member, ProcessGroup, Tag, run_ranks};
use deepburn::ops::MatmulOps;
use deepburn_config::Precision;

use super::Workload;
use crate::failure::Failure;

/// How long one thing is measured.
const BUDGET: Duration = Duration::from_millis(300);
/// Most repetitions of one thing.
const REPETITIONS: usize = 1000;
/// Most rows and columns of what is measured.
const LARGEST: usize = 4096;
/// Least elements of an array whose bandwidth is measured: 1 MiB, more than a core's caches of level 1.
const LEAST_ELEMENTS: usize = 1 << 18;
/// Rank threads that are started to measure a barrier, at most.
const MOST_THREADS: u64 = 256;

/// The speed of this machine with all its cores.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured {
    /// Operations per second of a product.
    pub(super) flops: f64,
    /// Bytes per second that an element-wise op reads and writes.
    pub(super) memory_bandwidth: f64,
}

impl Measured {
    /// Measures a product and an addition of the size that `workload` has on `ranks` ranks together.
    pub(super) fn new(workload: &Workload, ranks: u64) -> Self {
        let clamped = |size: u64| (size as usize).clamp(1, LARGEST);
        let tokens = workload.batch.sequences.saturating_mul(workload.batch.length);
        let rows = clamped(tokens.saturating_mul(ranks));
        let width = clamped(workload.width);
        let inner = (4 * width).min(LARGEST);
        let dtype = match workload.precision {
            Precision::Fp32 => DType::F32,
            Precision::Fp16 => DType::F16,
            Precision::Bf16 => DType::BF16,
        };
        let ones = |shape: [usize; 2]| Tensor::<Flex, 2>::ones(shape, &FlexDevice).cast(dtype);
        let (left, right) = (ones([rows, width]), ones([width, inner]));
        // As the sharding decorator multiplies; Burn's own product of flex has another speed.
        let [left, right] = [left, right].map(|operand| operand.into_primitive().tensor());
        let product = median_seconds(|| Flex::matmul(left.clone(), right.clone()));
        let elements = (rows * inner).max(LEAST_ELEMENTS);
        let array = ones([1, elements]);
        let addition = median_seconds(|| array.clone().add_scalar(1.0));
        Self {
            flops: (2 * rows * width * inner) as f64 / product,
            memory_bandwidth: (2 * elements * dtype.size()) as f64 / addition,
        }
    }
}

/// The median time of `run`, whose first run warms up.
fn median_seconds<T>(mut run: impl FnMut() -> T) -> f64 {
    black_box(run());
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || (begin.elapsed() < BUDGET && times.len() < REPETITIONS) {
        let started = Instant::now();
        black_box(run());
        times.push(started.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    // A clock that does not advance must not make a rate infinite.
    times[times.len() / 2].max(1e-9)
}

/// Seconds of a barrier of `ranks` rank threads for each other rank.
///
/// # Errors
/// When threads cannot be started.
pub(super) fn barrier_seconds(ranks: u64) -> Result<f64, Failure> {
    let ranks = ranks.clamp(2, MOST_THREADS);
    let times = run_ranks(ranks as usize, Duration::from_secs(60), |member: Member| {
        let meet = || ProcessGroup::<Host<f64>>::barrier(&member, Tag::new("measurement", 0));
        meet()?;
        let started = Instant::now();
        const MEETINGS: u32 = 50;
        for _ in 0..MEETINGS {
            meet()?;
        }
        Ok::<_, CommError>(started.elapsed().as_secs_f64() / f64::from(MEETINGS))
    });
    let times = times.map_err(Failure::run)?;
    Ok(times.into_iter().fold(0.0, f64::max) / (ranks - 1) as f64)
}
