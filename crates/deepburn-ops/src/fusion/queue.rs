//! Kernels of the inner backend as custom ops in the queue of lazy tensors, which run when Burn
//! executes the queue:
//!
//! ```text
//! queue of the device
//!   ... backward ops ... | deepburn optimizer update | next step's ops ...
//! inputs   [gradient, master, states ...]      handles of the inner backend
//! outputs  [master, states ..., working copy]  registered under new ids
//! ```

use std::fmt::Debug;
use std::marker::PhantomData;

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, Shape};
use burn_fusion::stream::{Operation, OperationStreams};
use burn_fusion::{FusionBackend, FusionTensor};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};

/// A kernel of the inner backend that is queued until its inputs are computed.
pub(super) trait InnerKernel<B: FusionBackend>: Debug + Send + Sync + 'static {
    /// The name of the custom op in the queue's intermediate representation.
    const NAME: &'static str;

    /// Runs the kernel and returns the results in the order in which their shapes were passed to
    /// [`queue`].
    fn run(&self, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>>;
}

/// Adds a kernel to the queue of the inputs' device and returns lazy tensors for its results. The
/// kernel has not run yet, so `results` must list the shapes and types in order.
///
/// # Panics
/// Panics if there is no input.
pub(super) fn queue<B: FusionBackend, K: InnerKernel<B>>(
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
