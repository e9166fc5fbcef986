//! `Sharded<B>`: a backend whose parameters can be sharded over ranks.

use std::marker::PhantomData;

use burn_backend::distributed::{
    DistributedBackend, DistributedConfig, DistributedParams, TensorRef,
};
use burn_backend::tensor::Device;
use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};
use deepburn_ops::MatmulOps;

use crate::session;
use crate::tensor::{Leased, ZeroTensor};

/// The methods of `Backend` that both decorators of this crate forward to the inner backend `B`.
macro_rules! forward_backend {
    () => {
        fn sync(device: &Device<Self>) -> Result<(), ExecutionError> {
            B::sync(device)
        }

        fn dtype_usage(device: &Device<Self>, dtype: DType) -> DTypeUsageSet {
            B::dtype_usage(device, dtype)
        }

        fn supports_dtype(device: &Device<Self>, dtype: DType) -> bool {
            B::supports_dtype(device, dtype)
        }

        fn device_count(type_id: u16) -> usize {
            B::device_count(type_id)
        }

        fn ad_enabled(device: &Device<Self>) -> bool {
            B::ad_enabled(device)
        }

        fn memory_cleanup(device: &Device<Self>) {
            B::memory_cleanup(device);
        }

        fn memory_persistent_allocations<
            Output: Send,
            Input: Send,
            Func: Fn(Input) -> Output + Send,
        >(
            device: &Device<Self>,
            input: Input,
            func: Func,
        ) -> Output {
            B::memory_persistent_allocations(device, input, func)
        }

        fn staging<'a, Iter>(data: Iter, device: &Device<Self>)
        where
            Iter: Iterator<Item = &'a mut TensorData>,
        {
            B::staging(data, device);
        }
    };
}
pub(crate) use forward_backend;

/// A backend decorator that shards the parameters, gradients and optimizer
/// states of a model.
///
/// It belongs below autodiff ([`Training`](crate::Training)). Autodiff then
/// saves [`ZeroTensor`]s for the backward pass, which hold no data if they are
/// sharded parameters, and every gradient passes through this backend as soon
/// as it is final. Tensors that are not parameters of a sharded model behave as
/// on `B`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sharded<B> {
    inner: PhantomData<B>,
}

impl<B: Backend> BackendTypes for Sharded<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = ZeroTensor<B>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = Leased<B::IntTensorPrimitive>;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = Leased<B::BoolTensorPrimitive>;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: MatmulOps> Backend for Sharded<B> {
    fn name(device: &Device<Self>) -> String {
        format!("zero<{}>", B::name(device))
    }

    /// Inside an engine's call, seeds the random stream of its model. Between calls, seeds the streams
    /// of the oldest model and of the thread. Without a sharded model, seeds the device's generator.
    fn seed(device: &Device<Self>, seed: u64) {
        if !session::reseed(seed) {
            B::seed(device, seed);
        }
    }

    forward_backend!();
}

/// Burn's hook for data parallelism: autodiff reports each marked gradient when it is final.
/// Burn's own communication server is not used.
impl<B: MatmulOps> DistributedBackend for Sharded<B> {
    fn start_communication_server(_devices: &[Device<Self>], _config: DistributedConfig) {}

    fn close_communication_server(_device: &Device<Self>) {}

    fn register_sync_parameters(_device: &Device<Self>, _params: Vec<DistributedParams>) {}

    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        let Some((reducer, index)) = session::reducer_of::<B>(params.param_id) else {
            return;
        };
        // SAFETY: autodiff passes a pointer to the gradient in its container, which it borrows
        // mutably for the duration of this call and does not touch meanwhile.
        let slot = unsafe { &mut *tensor.0 };
        let collected = reducer.borrow_mut().collect(index, slot);
        if let Err(error) = collected {
            // Backward cannot return an error; the rank's runner converts the
            // panic back to one.
            std::panic::panic_any(error);
        }
    }

    /// Called once at the end of a backward pass that reported gradients, after
    /// autodiff has released its locks.
    fn submit_sync_collective(_device: &Device<Self>) {
        if let Some(reducer) = session::reducer::<B>() {
            let finished = reducer.borrow_mut().finish_backward();
            if let Err(error) = finished {
                std::panic::panic_any(error);
            }
        }
    }

    fn sync_collective(_device: &Device<Self>) {}
}
