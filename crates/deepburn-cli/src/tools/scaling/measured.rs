//! Measures the speed of this machine in under a second.
//!
//! Main type: [`MeasuredSpeed`]. It times a matrix product and an element-wise op of the backend `flex` on arrays of
//! the model's size, because rates depend on the size.
//!
//! Each figure is a median after a warm-up, so that an interruption does not change it. With rank threads, the arrays
//! are as large as the arrays of all ranks together, because the threads share the caches.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn::comm::{CollectiveTag, CommError, Host, Member, ProcessGroup, run_ranks};
use deepburn::ops::MatmulOps;
use deepburn_config::Precision;

use super::RankWorkload;
use crate::failure::Failure;

/// Time after which a measurement ends.
const BUDGET: Duration = Duration::from_millis(300);
/// Maximum number of repetitions of a measurement.
const REPETITIONS: usize = 1000;
/// Maximum number of rows and columns of a measured array.
const LARGEST: usize = 4096;
/// Minimum number of elements of the array for the memory bandwidth. It takes 1 MiB, which is more than the level 1
/// cache of a core.
const LEAST_ELEMENTS: usize = 1 << 18;
/// Maximum number of rank threads in the measurement of a barrier.
const MAX_THREADS: u64 = 256;

/// The speed of this machine on all cores.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasuredSpeed {
    /// FLOP/s of a matrix product.
    pub(super) flops: f64,
    /// Bytes per second that an element-wise op reads and writes.
    pub(super) memory_bandwidth: f64,
}

impl MeasuredSpeed {
    /// Measures a matrix product and an addition with the sizes of `workload` on `ranks` ranks together.
    ///
    /// Arrays have at most 4096 rows and columns, so that a measurement takes less than a second. The measurement
    /// allocates the two operands and the result of the product, and an array for the addition.
    pub(super) fn new(workload: &RankWorkload, ranks: u64) -> Self {
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
        // Values do not affect the speed, and ones neither overflow nor become subnormal.
        let ones = |shape: [usize; 2]| Tensor::<Flex, 2>::ones(shape, &FlexDevice).cast(dtype);
        let (left, right) = (ones([rows, width]), ones([width, inner]));
        // Training uses `MatmulOps` for its products. Burn's own product on flex has another speed.
        let [left, right] = [left, right].map(|operand| operand.into_primitive().tensor());
        let product = median_seconds(|| Flex::matmul(left.clone(), right.clone()));
        let elements = (rows * inner).max(LEAST_ELEMENTS);
        let array = ones([1, elements]);
        let addition = median_seconds(|| array.clone().add_scalar(1.0));
        Self {
            // Each term of the product is a multiplication and an addition.
            flops: (2 * rows * width * inner) as f64 / product,
            // Each element is read once and written once.
            memory_bandwidth: (2 * elements * dtype.size()) as f64 / addition,
        }
    }
}

/// Returns the median time of `run` after one warm-up.
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
    // If the clock did not advance, the rate would be infinite.
    times[times.len() / 2].max(1e-9)
}

/// Returns the time of a barrier of `ranks` rank threads in seconds, divided by the number of other ranks.
///
/// The time of a barrier is the latency of a collective between threads, without the copies: each rank waits until all
/// others have reached it. If there are more threads than cores, it includes delays of the scheduler. At most 256 ranks
/// are measured.
///
/// # Errors
/// Returns a failure while running if threads cannot be started.
pub(super) fn barrier_seconds(ranks: u64) -> Result<f64, Failure> {
    let ranks = ranks.clamp(2, MAX_THREADS);
    let times = run_ranks(ranks as usize, Duration::from_secs(60), |member: Member| {
        let barrier =
            || ProcessGroup::<Host<f64>>::barrier(&member, CollectiveTag::new("measurement", 0));
        barrier()?;
        let started = Instant::now();
        const BARRIERS: u32 = 50;
        for _ in 0..BARRIERS {
            barrier()?;
        }
        Ok::<_, CommError>(started.elapsed().as_secs_f64() / f64::from(BARRIERS))
    });
    let times = times.map_err(Failure::run)?;
    Ok(times.into_iter().fold(0.0, f64::max) / (ranks - 1) as f64)
}
