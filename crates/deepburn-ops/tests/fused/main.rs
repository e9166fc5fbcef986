//! Tests of outputs and gradients of every op family against references in f64, for the kernels of
//! the CPU backend and for the portable implementation, which other backends use by default.

mod attention;
mod cache;
mod cross_entropy;
mod decoders;
mod elementwise;
mod quantized;
mod reference;
mod steps;
mod sums;

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flex::Flex;

/// The shape and the values of a matrix.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) shape: [usize; 2],
    pub(crate) values: Vec<f64>,
}

impl Array {
    /// Creates a matrix with deterministic values between -1 and 1. Different seeds give different
    /// matrices.
    pub(crate) fn new(shape: [usize; 2], seed: u64) -> Self {
        let value = |i: usize| {
            let bits = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ (seed << 17));
            let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            // The value has 20 bits, which f32 represents exactly.
            ((bits ^ (bits >> 32)) & 0xf_ffff) as f64 / 524_288.0 - 1.0
        };
        Self { shape, values: (0..shape[0] * shape[1]).map(value).collect() }
    }

    /// Rounds the values to `dtype`.
    pub(crate) fn rounded(mut self, dtype: DType) -> Self {
        let data = TensorData::new(self.values.clone(), self.shape).convert_dtype(dtype);
        self.values = data.iter::<f64>().collect();
        self
    }

    pub(crate) fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.shape[1]..(row + 1) * self.shape[1]]
    }

    pub(crate) fn tensor(&self, dtype: DType) -> Tensor<Flex, 2> {
        let data = TensorData::new(self.values.clone(), self.shape);
        Tensor::from_data(data.convert_dtype(dtype), (&Default::default(), dtype))
    }

    pub(crate) fn vector(&self, dtype: DType) -> Tensor<Flex, 1> {
        self.tensor(dtype).flatten(0, 1)
    }
}

pub(crate) fn indices(values: &[i64]) -> Tensor<Flex, 1, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &Default::default())
}

pub(crate) fn values(primitive: burn_flex::FlexTensor) -> Vec<f64> {
    burn_flex::FlexTensor::into_data(primitive).iter::<f64>().collect()
}

/// Asserts that all differences are within `tolerance`, relative to the largest expected value (at
/// least 1).
#[track_caller]
pub(crate) fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let size = expected.iter().fold(1.0_f64, |size, value| size.max(value.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - expected).abs();
        assert!(difference <= tolerance * size, "{what}[{i}]: {found} instead of {expected}");
    }
}

/// Returns the tolerance: one rounding of the result in 16 bits (f16 has 11 bits of precision, bf16
/// has 8), because all intermediate values are f32. For f32, it is the 1e-5 by which fused and
/// unfused ops may differ.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 1e-5,
    }
}

pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Runs a closure on 1, 2 and 5 threads and checks that the results are bitwise identical.
#[track_caller]
pub(crate) fn same_on_all_threads(run: impl Fn() -> Vec<f64> + Sync) {
    let bits = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&run).into_iter().map(f64::to_bits).collect::<Vec<_>>()
    };
    let one = bits(1);
    assert_eq!(one, bits(2));
    assert_eq!(one, bits(5));
}
