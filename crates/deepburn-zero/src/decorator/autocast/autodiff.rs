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
use crate::decorator::forwarded;

impl<B> AutodiffBackend for Autocast<B>
where
    B: TracksParameters + AutodiffBackend,
    B::InnerBackend: TracksParameters,
{
    type InnerBackend = Autocast<B::InnerBackend>;
    type Gradients = B::Gradients;

    forwarded! {
        fn backward(tensor: FloatTensor<Self>) -> Self::Gradients;
        fn grad(tensor: &FloatTensor<Self>, grads: &Self::Gradients)
            -> Option<FloatTensor<Self::InnerBackend>>;
        fn grad_remove(tensor: &FloatTensor<Self>, grads: &mut Self::Gradients)
            -> Option<FloatTensor<Self::InnerBackend>>;
        fn grad_replace(
            tensor: &FloatTensor<Self>, grads: &mut Self::Gradients,
            grad: FloatTensor<Self::InnerBackend>,
        );
        fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend>;
        fn int_inner(tensor: IntTensor<Self>) -> IntTensor<Self::InnerBackend>;
        fn bool_inner(tensor: BoolTensor<Self>) -> BoolTensor<Self::InnerBackend>;
        fn q_inner(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self::InnerBackend>;
        fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self>;
        fn int_from_inner(tensor: IntTensor<Self::InnerBackend>) -> IntTensor<Self>;
        fn bool_from_inner(tensor: BoolTensor<Self::InnerBackend>) -> BoolTensor<Self>;
        fn q_from_inner(tensor: QuantizedTensor<Self::InnerBackend>) -> QuantizedTensor<Self>;
        fn set_distributed_params(tensor: FloatTensor<Self>, param_id: DistributedParamId)
            -> FloatTensor<Self>;
        fn distributed_params(tensor: &FloatTensor<Self>) -> Option<DistributedParams>;
        fn is_distributed(tensor: &FloatTensor<Self>) -> bool;
    }
}

/// Forwards Burn's hooks for data parallelism. They are needed for `Autodiff<Autocast<B>>`, in
/// programs that train without an engine: autodiff then reports gradients to this backend.
impl<B: TracksParameters + DistributedBackend> DistributedBackend for Autocast<B> {
    forwarded! {
        fn start_communication_server(devices: &[Device<Self>], config: DistributedConfig);
        fn close_communication_server(device: &Device<Self>);
        fn register_sync_parameters(device: &Device<Self>, params: Vec<DistributedParams>);
        fn submit_sync_collective(device: &Device<Self>);
        fn sync_collective(device: &Device<Self>);
    }

    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        B::submit_gradient_sync(TensorRef(tensor.0), params);
    }
}
