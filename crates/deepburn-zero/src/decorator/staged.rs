//! [`Staged<B>`](Staged): a backend whose ops run on the pipeline stage that holds their operands.
//!
//! The decorator is above [`Sharded`] and below autodiff. It sees every op of a model, forward and
//! backward, with all operands, and therefore needs neither a list of layers nor a change of the
//! model. `placed.rs` has its tensors, `site.rs` the rule for the place of an op:
//!
//! ```text
//!  on the stage of the op     receives missing operands, calls Sharded<B>
//!  on a stage that sends      sends its operand, calls Meta
//!  on any other stage         calls Meta: shapes and types only
//! ```
//!
//! Without a pipeline all tensors are [`PlacedTensor::Everywhere`], and every op calls
//! `Sharded<B>`.
//!
//! Random numbers are drawn on every stage, so that a stream does not depend on the number of
//! stages. A program that reads a value gets it on every stage, which waits for the stage that
//! holds it. Burn's quantized tensors are never staged.

mod kinds;
pub(super) mod ops;
mod placed;
mod site;

use std::marker::PhantomData;

use burn_backend::distributed::{
    DistributedBackend, DistributedConfig, DistributedParams, TensorRef,
};
use burn_backend::tensor::Device;
use burn_backend::{
    Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData, TensorMetadata,
};
use deepburn_ops::MatmulOps;

use crate::decorator::{Sharded, ZeroTensor, forward_backend};
use crate::gradient;

use kinds::floats_to_come;
pub use kinds::{Bools, Floats, Ints};
pub use placed::{PlacedTensor, StagedTensor, TensorKind};
use site::GradientPart;

/// A backend decorator that runs each op on the pipeline stage that holds its operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct Staged<B> {
    inner: PhantomData<B>,
}

impl<B: MatmulOps> BackendTypes for Staged<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = PlacedTensor<B, Floats>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = PlacedTensor<B, Ints>;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = PlacedTensor<B, Bools>;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: MatmulOps> Backend for Staged<B> {
    fn name(device: &Device<Self>) -> String {
        Sharded::<B>::name(device)
    }

    fn seed(device: &Device<Self>, seed: u64) {
        Sharded::<B>::seed(device, seed);
    }

    forward_backend!();
}

/// Passes gradients on to [`Sharded`] on the stage that owns their parameter.
impl<B: MatmulOps> DistributedBackend for Staged<B> {
    fn start_communication_server(_devices: &[Device<Self>], _config: DistributedConfig) {}

    fn close_communication_server(_device: &Device<Self>) {}

    fn register_sync_parameters(_device: &Device<Self>, _params: Vec<DistributedParams>) {}

    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        // SAFETY: autodiff passes a pointer to the gradient in its container, which it borrows
        // mutably for the duration of this call and does not touch meanwhile.
        let slot = unsafe { &mut *tensor.0 };
        let Some((reducer, index)) = gradient::reducer_of::<B>(params.param_id) else { return };
        let parameter = reducer.borrow().parameter(index).clone();
        let device = parameter.device().clone();
        // On every stage, so that autodiff's container keeps no gradient alive that was passed on.
        let passed_on = ZeroTensor::passed_on(&*slot, device, parameter.shared_path());
        let gradient = std::mem::replace(slot, PlacedTensor::Everywhere(passed_on));
        let (numel, dtype) = (gradient.shape().num_elements(), gradient.dtype());
        let like = || floats_to_come(numel, dtype, parameter.device());
        match site::gradient_at_owner(gradient, &parameter, like) {
            GradientPart::Here(mut gradient) => {
                Sharded::<B>::submit_gradient_sync(TensorRef(&raw mut gradient), params);
            }
            GradientPart::Coming(message) => reducer.borrow_mut().collect_later(index, message),
            GradientPart::Elsewhere => {}
        }
    }

    fn submit_sync_collective(device: &Device<Self>) {
        Sharded::<B>::submit_sync_collective(device);
    }

    fn sync_collective(_device: &Device<Self>) {}
}
