//! Synthetic samples. A sample depends only on its index, so the data is the same for any number of
//! ranks.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

/// The number of samples in a step over all ranks, divisible by 1 to 4 ranks.
pub(crate) const GLOBAL_BATCH: usize = 12;

/// The number of steps after which the data repeats.
pub(crate) const EPOCH: usize = 2;

/// A micro-batch of samples, identified by their indices.
#[derive(Debug, Clone)]
pub(crate) struct Samples {
    numbers: Range<u64>,
}

impl Samples {
    /// Returns the samples of rank `rank` of `world_size` in step `step`, counted from 0.
    pub(crate) fn of_step(step: u64, rank: usize, world_size: usize) -> Self {
        let count = (GLOBAL_BATCH / world_size) as u64;
        let first = (step % EPOCH as u64) * GLOBAL_BATCH as u64 + rank as u64 * count;
        Self { numbers: first..first + count }
    }

    /// Returns samples that no step trains on.
    pub(crate) fn held_out() -> Self {
        Self { numbers: 1000..1006 }
    }

    pub(crate) fn len(&self) -> usize {
        (self.numbers.end - self.numbers.start) as usize
    }

    /// Returns f32 values in [-1, 1) of shape `[samples, inner...]`.
    pub(crate) fn floats<B: Backend, const D: usize>(&self, inner: &[usize]) -> Tensor<B, D> {
        let values = self.hashes(inner).map(|hash| (hash >> 40) as f32 / (1 << 23) as f32 - 1.0);
        let data = TensorData::new(values.collect::<Vec<f32>>(), self.shape(inner));
        Tensor::from_data(data, &B::Device::default())
    }

    /// Returns integers from 0 to `below` of shape `[samples, inner...]`.
    pub(crate) fn integers<B: Backend, const D: usize>(
        &self,
        below: u64,
        inner: &[usize],
    ) -> Tensor<B, D, Int> {
        let values = self.hashes(inner).map(|hash| ((hash >> 33) % below) as i64);
        let data = TensorData::new(values.collect::<Vec<i64>>(), self.shape(inner));
        Tensor::from_data(data, &B::Device::default())
    }

    fn shape(&self, inner: &[usize]) -> Vec<usize> {
        std::iter::once(self.len()).chain(inner.iter().copied()).collect()
    }

    fn hashes(&self, inner: &[usize]) -> impl Iterator<Item = u64> {
        let each = inner.iter().product::<usize>() as u64;
        self.numbers.clone().flat_map(move |sample| (0..each).map(move |i| hash(sample, i)))
    }
}

/// Mixes two numbers (the finalizer of SplitMix64).
pub(crate) fn hash(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(1) << 17;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
