//! Optimizer kernels in the queue of lazy tensors: updates and concatenations are custom ops.
//!
//! Gradient statistics are read on the host. [`OptimizerOps::gradient_stats`] therefore executes
//! the queue up to the gradients first.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, Shape, TensorMetadata};
use burn_fusion::{Fusion, FusionBackend};
use deepburn_kernels::{ElementwiseStep, GradientStats};

use super::queue::{InnerKernel, queue};
use crate::optimizer::{OptimizerOps, UpdateArrays};

/// The inner backend performs the arithmetic.
impl<B: FusionBackend + OptimizerOps> OptimizerOps for Fusion<B> {
    /// Queues the update and returns handles of its results. An input that has no other handle is
    /// updated in place.
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        let UpdateArrays { master, states } = arrays;
        let shape = master.shape();
        // An f32 working copy would equal the master weights, so the caller uses the master weights
        // instead.
        let working = working.filter(|dtype| matches!(dtype, FloatDType::F16 | FloatDType::BF16));
        let count = states.len();
        let mut results = vec![(shape.clone(), DType::F32); 1 + count];
        results.extend(working.map(|dtype| (shape, dtype.into())));
        let update = OptimizerUpdate { step: *step, grad_scale, working };
        let inputs = [gradient, master].into_iter().chain(states).collect();
        let mut results = queue::<B, _>(update, inputs, results).into_iter();
        let mut next = || results.next().expect("as many results as were asked for");
        let arrays = UpdateArrays { master: next(), states: (0..count).map(|_| next()).collect() };
        (arrays, working.map(|_| next()))
    }

    /// Runs the queue up to each gradient. The inner backend waits for its device.
    fn gradient_stats(
        count: usize,
        gradient: &dyn Fn(usize) -> FloatTensor<Self>,
    ) -> Vec<GradientStats> {
        B::gradient_stats(count, &|index| {
            let gradient = gradient(index);
            let client = gradient.client.clone();
            client.resolve_tensor_float::<B>(gradient)
        })
    }

    /// Queues the copies. All parts must have the type of the first one.
    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        let result = (Shape::from(vec![len]), parts[0].dtype());
        let mut results = queue::<B, _>(Flatten { len }, parts, vec![result]);
        results.pop().expect("one result was asked for")
    }
}

/// An optimizer step. Its inputs are the gradient, the master weights and the optimizer states.
#[derive(Debug)]
struct OptimizerUpdate {
    /// The scalars of the step, by value: the step may run after the call has returned.
    step: ElementwiseStep,
    /// The factor by which the gradient is multiplied.
    grad_scale: f32,
    /// The type of the working copy, f16 or bf16; `None` for no copy.
    working: Option<FloatDType>,
}

impl<B: FusionBackend + OptimizerOps> InnerKernel<B> for OptimizerUpdate {
    const NAME: &'static str = "deepburn optimizer update";

    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("queued with a gradient, a master and states");
        let (gradient, master) = (next(), next());
        let arrays = UpdateArrays { master, states: inputs.collect() };
        let (arrays, copy) = B::update(&self.step, self.grad_scale, arrays, gradient, self.working);
        [arrays.master].into_iter().chain(arrays.states).chain(copy).collect()
    }
}

/// A concatenation of its inputs, followed by zeros.
#[derive(Debug)]
struct Flatten {
    /// The number of elements of the result.
    len: usize,
}

impl<B: FusionBackend + OptimizerOps> InnerKernel<B> for Flatten {
    const NAME: &'static str = "deepburn flatten";

    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        vec![B::flatten(inputs, self.len)]
    }
}
