//! Optimizer kernels in the queue of lazy tensors.
//!
//! Updates and concatenations are queued as custom ops, which run when Burn executes the queue:
//!
//! ```text
//! queue of the device
//!   ... backward ops ... | deepburn optimizer update | next step's ops ...
//! inputs   [gradient, master, states ...]      handles of the inner backend
//! outputs  [master, states ..., working copy]  registered under new ids
//! ```
//!
//! Gradient statistics are read on the host. [`OptimizerOps::gradient_stats`] therefore executes
//! the queue up to the gradient first.

use std::fmt::Debug;
use std::marker::PhantomData;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, Shape, TensorMetadata};
use burn_fusion::stream::{Operation, OperationStreams};
use burn_fusion::{Fusion, FusionBackend, FusionTensor};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use deepburn_kernels::{ElementwiseStep, GradientStats};

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

    /// Runs the queue up to the gradient and waits for the device.
    fn gradient_stats(gradient: FloatTensor<Self>) -> GradientStats {
        let client = gradient.client.clone();
        B::gradient_stats(client.resolve_tensor_float::<B>(gradient))
    }

    /// Queues the copies. All parts must have the type of the first one.
    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        let result = (Shape::from(vec![len]), parts[0].dtype());
        let mut results = queue::<B, _>(Flatten { len }, parts, vec![result]);
        results.pop().expect("one result was asked for")
    }
}

/// A kernel of the inner backend that is queued until its inputs are computed.
trait InnerKernel<B: FusionBackend>: Debug + Send + Sync + 'static {
    /// The name of the custom op in the queue's intermediate representation.
    const NAME: &'static str;

    /// Runs the kernel and returns the results in the order in which their shapes were passed to
    /// [`queue`].
    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>>;
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

/// Adds a kernel to the queue of the inputs' device and returns lazy tensors for its results. The
/// kernel has not run yet, so `results` must list the shapes and types in order.
///
/// # Panics
/// Panics if there is no input.
fn queue<B: FusionBackend, K: InnerKernel<B>>(
    kernel: K,
    inputs: Vec<FusionTensor<B::FusionRuntime>>,
    results: Vec<(Shape, DType)>,
) -> Vec<FusionTensor<B::FusionRuntime>> {
    let client = inputs[0].client.clone();
    // Taken before the inputs become descriptions, which do not know their streams.
    let streams = OperationStreams::with_inputs(&inputs);
    // `into_ir` marks the last use of a tensor without other owners. Reading the tensor then
    // removes it from the container, and the kernel can update its memory in place.
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let results: Vec<_> = results
        .into_iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
        .collect();
    let description = CustomOpIr::new(K::NAME, &inputs, &results);
    let queued = Queued { kernel, description: description.clone(), backend: PhantomData::<B> };
    client.register(streams, OperationIr::Custom(description), queued)
}

/// A kernel in the queue.
#[derive(Debug)]
struct Queued<B, K> {
    /// The kernel with its parameters.
    kernel: K,
    /// The ids, shapes and types of inputs and outputs.
    description: CustomOpIr,
    /// The inner backend, whose tensors are passed to the kernel.
    backend: PhantomData<B>,
}

impl<B: FusionBackend, K: InnerKernel<B>> Operation<B::FusionRuntime> for Queued<B, K> {
    /// Takes the inputs out of the container of handles, runs the kernel and stores its results
    /// under their ids.
    fn execute(&self, handles: &mut HandleContainer<B::Handle>) {
        let inputs = self.description.inputs.iter();
        let inputs = inputs.map(|input| handles.get_float_tensor::<B>(input)).collect();
        let results = self.kernel.run(inputs);
        for (result, described) in results.into_iter().zip(&self.description.outputs) {
            handles.register_float_tensor::<B>(&described.id, result);
        }
    }
}
