//! Optimizer steps: arrays keep their size, and gradients are finite.

use burn_backend::tensor::FloatTensor;
use burn_backend::{FloatDType, TensorMetadata};
use deepburn_kernels::{ElementwiseStep, GradientStats};
use deepburn_meta::{Meta, meta_tensor};

use super::report;
use crate::{LayoutOps, OptimizerOps, StreamOps, UpdateArrays};

impl OptimizerOps for Meta {
    fn update(
        step: &ElementwiseStep,
        _grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        let half = working.filter(|dtype| matches!(dtype, FloatDType::F16 | FloatDType::BF16));
        let copy = half.map(|dtype| meta_tensor(arrays.master.shape(), dtype.into()));
        // The master and the states that the step uses are read and written.
        report(0, [&gradient]);
        for array in arrays.states.iter().take(step.states()).chain([&arrays.master]) {
            report(0, [array, array]);
        }
        if let Some(copy) = &copy {
            report(0, [copy]);
        }
        (arrays, copy)
    }

    /// Returns the sum 1 for each gradient, so that a norm can be computed and clipped.
    fn gradient_stats(
        count: usize,
        gradient: &dyn Fn(usize) -> FloatTensor<Self>,
    ) -> Vec<GradientStats> {
        let stats = |index| {
            report(0, [&gradient(index)]);
            GradientStats { sum_of_squares: 1.0, finite: true }
        };
        (0..count).map(stats).collect()
    }

    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let cast = meta_tensor(tensor.shape(), dtype.into());
        if cast.dtype() != tensor.dtype() {
            report(0, [&tensor, &cast]);
        }
        cast
    }

    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        let flat = meta_tensor([len], parts[0].dtype());
        report(0, [&flat, &flat]);
        flat
    }
}

impl StreamOps for Meta {}

/// Every tensor counts as contiguous: a layout without memory costs nothing to change.
impl LayoutOps for Meta {
    fn is_contiguous(_tensor: &FloatTensor<Self>) -> bool {
        true
    }
}
