//! The speed of this machine, for the [cost model](crate::cost).
//!
//! The speed of a kernel depends on the sizes of its arrays, so the sizes of a real pass are
//! measured: matrix products with many and with few rows, which tell the time of the operations
//! from the time of the operands, and an addition over the elements of a result for the memory
//! bandwidth. The latency of a collective is the time of a barrier. Each figure is a median after a
//! warm-up, so that an interruption does not change it. With rank threads, the arrays are as large
//! as the arrays of all ranks together, because the threads share the caches.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use deepburn_comm::{CollectiveTag, CommError, Host, Member, ProcessGroup, RankFailure, run_ranks};
use deepburn_config::Precision;
use deepburn_forecast::cost::{Network, RankSpeed, SharedCores};
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;

/// Time after which a measurement ends.
const BUDGET: Duration = Duration::from_millis(300);
/// Maximum number of repetitions of a measurement.
const REPETITIONS: usize = 1000;
/// Maximum number of rows and columns of a measured array.
const LARGEST: usize = 4096;
/// Minimum number of elements of the array for the memory bandwidth. It takes 1 MiB, which is more
/// than the level 1 cache of a core.
const LEAST_ELEMENTS: usize = 1 << 18;
/// Maximum number of rank threads in the measurement of a barrier.
const MAX_THREADS: usize = 256;

/// The sizes of the measured arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredSizes {
    /// Rows of the first factor: tokens or samples of a micro-batch, of all ranks that share the
    /// machine together.
    pub rows: u64,
    /// Rows of the smallest product that is predicted, at most `rows`: tokens or samples of one
    /// rank, or of the smallest micro-batch.
    pub fewest_rows: u64,
    /// Columns of the first factor. The second factor has four times as many columns, as in a
    /// feed-forward network.
    pub width: u64,
    /// Type of the elements.
    pub dtype: DType,
}

/// Measures the speed of `device` on all its cores, with an unknown bandwidth of offload.
///
/// Arrays have at most 4096 rows and columns, so that a measurement takes about a second.
pub fn machine_speed<B: OptimizerOps>(device: &B::Device, sizes: MeasuredSizes) -> RankSpeed {
    let MeasuredSizes { rows, fewest_rows, width, dtype } = sizes;
    let [rows, fewest_rows, width] =
        [rows, fewest_rows, width].map(|size| (size as usize).clamp(1, LARGEST));
    let inner = (4 * width).min(LARGEST);
    // Values do not affect the speed, and ones neither overflow nor become subnormal.
    let ones = |shape: [usize; 2]| Tensor::<B, 2>::ones(shape, device).cast(dtype);
    let weight = ones([width, inner]);
    let product = |rows: usize| {
        // Training uses `MatmulOps` for its products. The product of a backend may have another
        // speed.
        let [left, right] =
            [ones([rows, width]), weight.clone()].map(|operand| operand.into_primitive().tensor());
        let elements = rows * width + width * inner + rows * inner;
        TimedProduct {
            // Each term is a multiplication and an addition.
            operations: (2 * rows * width * inner) as f64,
            bytes: (elements * dtype.size()) as f64,
            seconds: median_seconds::<B, _>(device, || B::matmul(left.clone(), right.clone())),
        }
    };
    let many = product(rows);
    let few = if fewest_rows < rows { product(fewest_rows) } else { many };
    let (flops, operand_bandwidth) = product_speed(&many, &few);
    let elements = (rows * inner).max(LEAST_ELEMENTS);
    let array = ones([1, elements]);
    let addition = median_seconds::<B, _>(device, || array.clone().add_scalar(1.0));
    let element = Tensor::<Training<B>, 1>::ones([1], device);
    // Each element is read once and written once.
    let memory_bandwidth = (2 * elements * dtype.size()) as f64 / addition;
    RankSpeed {
        operand_bandwidth,
        op_seconds: median_seconds::<B, _>(device, || element.clone().add_scalar(1.0)),
        ..RankSpeed::new(flops, memory_bandwidth)
    }
}

/// The work and the time of a matrix product.
#[derive(Debug, Clone, Copy)]
struct TimedProduct {
    /// Floating-point operations.
    operations: f64,
    /// Bytes of the operands and of the result.
    bytes: f64,
    seconds: f64,
}

/// Returns the floating-point operations per second and the bandwidth of the operands with which
/// both products take the time that was measured:
///
/// ```text
/// seconds = operations / flops + bytes / operand_bandwidth
/// ```
///
/// The bandwidth is infinite if the operands take no time of their own: the product with fewer rows
/// is as fast by its operations as the other one, or both are the same.
fn product_speed(many: &TimedProduct, few: &TimedProduct) -> (f64, f64) {
    // Cramer's rule for the reciprocals of both rates.
    let determinant = many.operations * few.bytes - few.operations * many.bytes;
    let of_operation = (many.seconds * few.bytes - few.seconds * many.bytes) / determinant;
    let of_byte = (many.operations * few.seconds - few.operations * many.seconds) / determinant;
    // Products of equal sizes have no solution, and errors of measurement may give negative rates.
    if of_operation > 0.0 && of_byte > 0.0 && of_operation.is_finite() && of_byte.is_finite() {
        (of_operation.recip(), of_byte.recip())
    } else {
        (many.operations / many.seconds, f64::INFINITY)
    }
}

/// Returns the median time of `run` after one warm-up.
fn median_seconds<B: OptimizerOps, T>(device: &B::Device, mut run: impl FnMut() -> T) -> f64 {
    let mut timed = || {
        let started = Instant::now();
        black_box(run());
        // A device that fails does so again in the run, with a message.
        let _ = B::sync(device);
        started.elapsed().as_secs_f64()
    };
    // The first call is not measured: it compiles kernels and allocates memory.
    timed();
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || (begin.elapsed() < BUDGET && times.len() < REPETITIONS) {
        times.push(timed());
    }
    times.sort_by(f64::total_cmp);
    // If the clock did not advance, the rate would be infinite.
    times[times.len() / 2].max(1e-9)
}

/// Returns the time of a barrier of `ranks` rank threads in seconds, divided by the number of other
/// ranks.
///
/// The time of a barrier is the latency of a collective between threads, without the copies: each
/// rank waits until all others have reached it. If there are more threads than cores, it includes
/// delays of the scheduler. At most 256 ranks are measured.
///
/// # Errors
/// Returns an error if threads cannot be started.
pub fn thread_latency(ranks: usize) -> Result<f64, RankFailure<CommError>> {
    let ranks = ranks.clamp(2, MAX_THREADS);
    let times = run_ranks(ranks, Duration::from_secs(60), |member: Member| {
        let barrier =
            || ProcessGroup::<Host<f64>>::barrier(&member, CollectiveTag::new("measurement", 0));
        barrier()?;
        let started = Instant::now();
        const BARRIERS: u32 = 50;
        for _ in 0..BARRIERS {
            barrier()?;
        }
        Ok::<_, CommError>(started.elapsed().as_secs_f64() / f64::from(BARRIERS))
    })?;
    // The cost model multiplies the latency by the number of other ranks.
    Ok(times.into_iter().fold(0.0, f64::max) / (ranks - 1) as f64)
}

/// Returns the speed of one of `ranks` rank threads that share a machine of this `speed`, and their
/// network.
pub fn shared_by_threads(speed: RankSpeed, latency: f64, ranks: usize) -> (RankSpeed, Network) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (speed.shared_by(ranks as u64, cores as u64), Network::Threads { latency })
}

/// Returns the cores of this machine, which the rank threads of all pipeline stages share.
pub fn shared_cores() -> SharedCores {
    SharedCores { cores: thread::available_parallelism().map_or(1, usize::from) as u64 }
}

/// Returns the element type of tensors in this precision.
pub fn dtype_of(precision: Precision) -> DType {
    match precision {
        Precision::Fp32 => DType::F32,
        Precision::Fp16 => DType::F16,
        Precision::Bf16 => DType::BF16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A product that takes a second for 100 operations or 10 bytes.
    fn product(operations: f64, bytes: f64) -> TimedProduct {
        TimedProduct { operations, bytes, seconds: operations / 100.0 + bytes / 10.0 }
    }

    #[test]
    fn operations_and_operands_are_told_apart() {
        let (flops, bandwidth) = product_speed(&product(8000.0, 50.0), &product(1000.0, 20.0));
        assert!(
            (flops - 100.0).abs() < 1e-9 && (bandwidth - 10.0).abs() < 1e-9,
            "{flops} {bandwidth}"
        );
    }

    #[test]
    fn operands_without_a_time_of_their_own_are_free() {
        let many = product(8000.0, 50.0);
        let rate = many.operations / many.seconds;
        // The same product, and one that is faster by its operations.
        let faster = TimedProduct { seconds: 1.0, ..product(1000.0, 20.0) };
        for few in [many, faster] {
            assert_eq!(product_speed(&many, &few), (rate, f64::INFINITY));
        }
    }
}
