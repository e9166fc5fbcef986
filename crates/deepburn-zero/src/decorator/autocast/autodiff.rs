//! Autodiff for the decorated backend.
//!
//! [`Autocast`] wraps the autodiff backend and uses the same tensors, so gradients, leaves and
//! inner tensors are forwarded unchanged. The inner backend of `Autocast<Autodiff<B>>` is
//! `Autocast<B>`, so evaluation follows the same type rules as training.

use burn_backend::AutodiffBackend;
use burn_backend::distributed::{
    DistributedBackend, DistributedConfig, DistributedParamId, DistributedParams, TensorRef,
};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor};

use super::{Autocast, TracksParameters};

impl<B> AutodiffBackend for Autocast<B>
where
    B: TracksParameters + AutodiffBackend,
    B::InnerBackend: TracksParameters,
{
    type InnerBackend = Autocast<B::InnerBackend>;
    type Gradients = B::Gradients;

    fn backward(tensor: FloatTensor<Self>) -> Self::Gradients {
        B::backward(tensor)
    }

    fn grad(
        tensor: &FloatTensor<Self>,
        grads: &Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        B::grad(tensor, grads)
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        B::grad_remove(tensor, grads)
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        B::grad_replace(tensor, grads, grad);
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        B::inner(tensor)
    }

    fn int_inner(tensor: IntTensor<Self>) -> IntTensor<Self::InnerBackend> {
        B::int_inner(tensor)
    }

    fn bool_inner(tensor: BoolTensor<Self>) -> BoolTensor<Self::InnerBackend> {
        B::bool_inner(tensor)
    }

    fn q_inner(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self::InnerBackend> {
        B::q_inner(tensor)
    }

    fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self> {
        B::from_inner(tensor)
    }

    fn int_from_inner(tensor: IntTensor<Self::InnerBackend>) -> IntTensor<Self> {
        B::int_from_inner(tensor)
    }

    fn bool_from_inner(tensor: BoolTensor<Self::InnerBackend>) -> BoolTensor<Self> {
        B::bool_from_inner(tensor)
    }

    fn q_from_inner(tensor: QuantizedTensor<Self::InnerBackend>) -> QuantizedTensor<Self> {
        B::q_from_inner(tensor)
    }

    fn set_distributed_params(
        tensor: FloatTensor<Self>,
        param_id: DistributedParamId,
    ) -> FloatTensor<Self> {
        B::set_distributed_params(tensor, param_id)
    }

    fn distributed_params(tensor: &FloatTensor<Self>) -> Option<DistributedParams> {
        B::distributed_params(tensor)
    }

    fn is_distributed(tensor: &FloatTensor<Self>) -> bool {
        B::is_distributed(tensor)
    }
}

/// Forwards Burn's hooks for data parallelism. They are needed for `Autodiff<Autocast<B>>`, in
/// programs that train without an engine: autodiff then reports gradients to this backend.
impl<B: TracksParameters + DistributedBackend> DistributedBackend for Autocast<B> {
    fn start_communication_server(devices: &[Device<Self>], config: DistributedConfig) {
        B::start_communication_server(devices, config);
    }

    fn close_communication_server(device: &Device<Self>) {
        B::close_communication_server(device);
    }

    fn register_sync_parameters(device: &Device<Self>, params: Vec<DistributedParams>) {
        B::register_sync_parameters(device, params);
    }

    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        B::submit_gradient_sync(TensorRef(tensor.0), params);
    }

    fn submit_sync_collective(device: &Device<Self>) {
        B::submit_sync_collective(device);
    }

    fn sync_collective(device: &Device<Self>) {
        B::sync_collective(device);
    }
}
