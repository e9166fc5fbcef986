//! Optimizer kernels in the queue of lazy tensors.
//!
//! Updates and copies are queued; the sums of a gradient are wanted on the host, so its tensor is
//! computed first.

use std::fmt::Debug;
use std::marker::PhantomData;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, Shape, TensorMetadata};
use burn_fusion::stream::{Operation, OperationStreams};
use burn_fusion::{Fusion, FusionBackend, FusionTensor};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use deepburn_kernels::{ElementwiseStep, GradientStats};

use crate::optimizer::{OptimizerOps, UpdateArrays};

impl<B: FusionBackend + OptimizerOps> OptimizerOps for Fusion<B> {
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        let UpdateArrays { master, states } = arrays;
        let shape = master.shape();
        // The copy of a master in its own type is the master.
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

    fn gradient_stats(gradient: FloatTensor<Self>) -> GradientStats {
        let client = gradient.client.clone();
        B::gradient_stats(client.resolve_tensor_float::<B>(gradient))
    }

    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        let result = (Shape::from(vec![len]), parts[0].dtype());
        let mut results = queue::<B, _>(Flatten { len }, parts, vec![result]);
        results.pop().expect("one result was asked for")
    }
}

/// A kernel that can wait until its inputs are there.
trait Kernel<B: FusionBackend>: Debug + Send + Sync + 'static {
    /// The name under which fusion knows it.
    const NAME: &'static str;

    /// Runs on tensors of the backend below.
    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>>;
}

#[derive(Debug)]
struct OptimizerUpdate {
    step: ElementwiseStep,
    grad_scale: f32,
    working: Option<FloatDType>,
}

impl<B: FusionBackend + OptimizerOps> Kernel<B> for OptimizerUpdate {
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

#[derive(Debug)]
struct Flatten {
    len: usize,
}

impl<B: FusionBackend + OptimizerOps> Kernel<B> for Flatten {
    const NAME: &'static str = "deepburn flatten";

    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        vec![B::flatten(inputs, self.len)]
    }
}

/// Puts a kernel into the queue of the device; its results have the given shapes and types.
fn queue<B: FusionBackend, K: Kernel<B>>(
    kernel: K,
    inputs: Vec<FusionTensor<B::FusionRuntime>>,
    results: Vec<(Shape, DType)>,
) -> Vec<FusionTensor<B::FusionRuntime>> {
    let client = inputs[0].client.clone();
    let streams = OperationStreams::with_inputs(&inputs);
    // A tensor that nobody else holds leaves the container when it is read, and its memory can be
    // written in place.
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let results: Vec<_> = results
        .into_iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
        .collect();
    let description = CustomOpIr::new(K::NAME, &inputs, &results);
    let queued = Queued { kernel, description: description.clone(), backend: PhantomData::<B> };
    client.register(streams, OperationIr::Custom(description), queued)
}

#[derive(Debug)]
struct Queued<B, K> {
    kernel: K,
    description: CustomOpIr,
    backend: PhantomData<B>,
}

impl<B: FusionBackend, K: Kernel<B>> Operation<B::FusionRuntime> for Queued<B, K> {
    fn execute(&self, handles: &mut HandleContainer<B::Handle>) {
        let inputs = self.description.inputs.iter();
        let inputs = inputs.map(|input| handles.get_float_tensor::<B>(input)).collect();
        let results = self.kernel.run(inputs);
        for (result, described) in results.into_iter().zip(&self.description.outputs) {
            handles.register_float_tensor::<B>(&described.id, result);
        }
    }
}
