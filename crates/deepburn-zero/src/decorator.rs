//! [`Sharded<B>`](Sharded): a backend whose parameters can be sharded over ranks.
//!
//! The backend is below autodiff, so ZeRO needs no changes to a model:
//!
//! ```text
//!  forward    op(ZeroTensor, …)       gathers the sharded parameters that it reads;
//!                                     autodiff saves ZeroTensors: handles, not weights
//!  backward   op(ZeroTensor, …)       gathers parameters again from the saved handles
//!             submit_gradient_sync    moves the final gradient of a parameter to the bucket and
//!                                     leaves a marker without data in autodiff's container
//!             submit_sync_collective  end of backward: reduces the last bucket, then a barrier
//! ```
//!
//! All state other than tensors (ledger, random stream, reducer) is in the thread-local context
//! (`session.rs`), because Burn's backend functions are static.
//!
//! Main types: [`Sharded`] below autodiff, its float tensors, [`ZeroTensor`]s, and [`Autocast`]
//! above autodiff. [`Training`] and [`Zero`] combine them. `ops.rs` has the tables of ops that the
//! decorators expand. A tensor that is a parameter reads it (`parameter`), an op of a training
//! forward pass may be recorded (`recompute`), and a final gradient is collected (`gradient`).

mod autocast;
mod fused;
mod observer;
mod ops;
mod staged;
mod tensor;
mod training;

use std::marker::PhantomData;

use burn_backend::distributed::{
    DistributedBackend, DistributedConfig, DistributedParams, TensorRef,
};
use burn_backend::tensor::Device;
use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};
use deepburn_ops::{MatmulOps, SumOps};

use crate::session::Leased;
use crate::{gradient, session};

pub use autocast::{Autocast, TracksParameters};
pub(crate) use observer::{ObservedTensor, Observer, hash_of, portable};
pub use staged::{Bools, Floats, Ints, PlacedTensor, Staged, StagedTensor, TensorKind};
pub use tensor::{ReducedGradient, ZeroTensor};
pub use training::{Training, Zero};

/// Forwards functions to the inner backend `B`, whose types are the same.
macro_rules! forwarded {
    ($( fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?; )*) => { $(
        fn $name($($arg: $type),*) $(-> $result)? {
            B::$name($($arg),*)
        }
    )* };
}
pub(crate) use forwarded;

/// Expands to the methods of `Backend` that the decorators of this crate forward to the inner
/// backend `B`.
macro_rules! forward_backend {
    () => {
        $crate::decorator::forwarded! {
            fn sync(device: &Device<Self>) -> Result<(), ExecutionError>;
            fn dtype_usage(device: &Device<Self>, dtype: DType) -> DTypeUsageSet;
            fn supports_dtype(device: &Device<Self>, dtype: DType) -> bool;
            fn device_count(type_id: u16) -> usize;
            fn ad_enabled(device: &Device<Self>) -> bool;
            fn memory_cleanup(device: &Device<Self>);
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

/// A backend decorator that shards the parameters, gradients and optimizer states of a model.
///
/// Use it below autodiff, as [`Training`](crate::Training) does. Autodiff then saves
/// [`ZeroTensor`]s for the backward pass, which hold no data if they are sharded parameters. Every
/// gradient is reported to this backend as soon as it is final. Tensors that are not parameters of
/// a sharded model behave as on `B`.
///
/// On a thread without a sharded model it is a plain wrapper: nothing is counted, recorded or
/// reduced.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sharded<B> {
    inner: PhantomData<B>,
}

/// Int and bool tensors carry a ledger entry. Quantized tensors are the inner backend's tensors and
/// are not counted.
impl<B: SumOps> BackendTypes for Sharded<B> {
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

    /// Seeds the random stream of the current model inside an engine's call. Between calls, seeds
    /// the streams of the oldest model and of the thread. Without a sharded model, seeds the
    /// device's random number generator.
    fn seed(device: &Device<Self>, seed: u64) {
        if !session::reseed(seed) {
            B::seed(device, seed);
        }
    }

    forward_backend!();
}

/// Implements products and sums with their provided methods, which leave the work to the plain ops.
/// [`Sharded`] computes these with the methods of the backend that it decorates.
macro_rules! of_plain_ops {
    ($($decorator:ident: $bound:ident),*) => { $(
        impl<B: $bound> MatmulOps for $decorator<B> {}
        impl<B: $bound> SumOps for $decorator<B> {}
    )* };
}

of_plain_ops!(Sharded: MatmulOps, Staged: MatmulOps, Autocast: TracksParameters);

/// Burn's hooks for data parallelism. Autodiff reports each marked gradient when it is final.
/// Burn's communication server is not used.
///
/// `ModelStates::start_training_pass` marks the parameters for one backward pass. A mark encodes
/// the number of the model and the index of the parameter (`session.rs`).
impl<B: MatmulOps> DistributedBackend for Sharded<B> {
    fn start_communication_server(_devices: &[Device<Self>], _config: DistributedConfig) {}

    fn close_communication_server(_device: &Device<Self>) {}

    fn register_sync_parameters(_device: &Device<Self>, _params: Vec<DistributedParams>) {}

    /// Moves the gradient from autodiff's container to the model's bucket and leaves a marker
    /// without data. Ignores gradients of models other than the current one.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if a full bucket cannot be reduced.
    fn submit_gradient_sync(tensor: TensorRef<Self>, params: DistributedParams) {
        let Some((reducer, index)) = gradient::reducer_of::<B>(params.param_id) else {
            return;
        };
        // SAFETY: autodiff passes a pointer to the gradient in its container, which it borrows
        // mutably for the duration of this call and does not touch meanwhile.
        let slot = unsafe { &mut *tensor.0 };
        let collected = reducer.borrow_mut().collect(index, |path| slot.take_gradient(path));
        if let Err(error) = collected {
            // Backward cannot return an error. The rank's runner converts the panic back to an
            // error.
            std::panic::panic_any(error);
        }
    }

    /// Reduces the last bucket, which may be partly filled, and waits for all ranks. Autodiff calls
    /// this once at the end of a backward pass that reported gradients, after it has released its
    /// locks.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if a collective fails.
    fn submit_sync_collective(_device: &Device<Self>) {
        if let Some(reducer) = gradient::reducer::<B>() {
            let finished = reducer.borrow_mut().finish_backward();
            if let Err(error) = finished {
                std::panic::panic_any(error);
            }
        }
    }

    fn sync_collective(_device: &Device<Self>) {}
}
