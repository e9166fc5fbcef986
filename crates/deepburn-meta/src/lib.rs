//! A Burn backend without data: a tensor has a shape, an element type and a device, but no values.
//!
//! [`Meta`] runs any Burn program without memory or arithmetic, as PyTorch's `meta` device does. It
//! answers which tensors a model creates and how large they are, without creating them.
//!
//! The backend is Burn's router over a client that executes nothing. The router describes each op
//! in Burn's intermediate representation, and `burn-ir` infers the shapes of its results:
//!
//! ```text
//!  float_matmul(lhs, rhs)      BackendRouter    describes the op, infers the shape of the result
//!    └─ MatmulOpIr             MetaClient       reports the work ([`Work`]) and drops the description
//!  RouterTensor                                 shape, element type, device
//! ```
//!
//! Element types default to f32, i32 and bool, as on Burn's CPU backend.
//!
//! Reading a tensor returns zeros, so a program that decides by the values of a tensor takes the
//! branch for zeros. Fourier transforms and quantized tensors are not supported by the router and
//! panic.

mod work;

use burn_backend::{
    DType, DTypeUsage, DTypeUsageSet, DeviceId, DeviceOps, ExecutionError, Shape, TensorData,
};
use burn_ir::{ModuleOperationIr, OperationIr, TensorId, TensorIr};
use burn_router::{BackendRouter, MultiBackendBridge, RouterTensor, RunnerChannel, RunnerClient};
use burn_std::device::Device;
use burn_std::future::DynFut;

pub use work::{Work, observe_work, report_work, without_work};

/// The backend without data.
pub type Meta = BackendRouter<MetaChannel>;

/// A tensor of [`Meta`], of any kind.
pub type MetaTensor = RouterTensor<MetaClient>;

/// The only device of [`Meta`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MetaDevice;

impl Device for MetaDevice {
    fn to_id(&self) -> DeviceId {
        DeviceId::new(0, 0)
    }

    fn from_id(_id: DeviceId) -> Self {
        Self
    }
}

impl DeviceOps for MetaDevice {}

/// Connects the router to [`MetaClient`].
#[derive(Clone, Copy, Debug)]
pub struct MetaChannel;

impl RunnerChannel for MetaChannel {
    type Device = MetaDevice;
    type Bridge = MetaBridge;
    type Client = MetaClient;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = bool;

    fn name(_device: &MetaDevice) -> String {
        "meta".to_owned()
    }

    fn init_client(_device: &MetaDevice) -> MetaClient {
        MetaClient
    }

    fn get_tensor_handle(_tensor: &TensorIr, _client: &MetaClient) {}

    fn register_tensor(client: &MetaClient, _handle: (), shape: Shape, dtype: DType) -> MetaTensor {
        tensor(shape, dtype, *client)
    }
}

/// Moves tensors between devices. There is only one device, and there is nothing to move.
#[derive(Debug)]
pub struct MetaBridge;

impl MultiBackendBridge for MetaBridge {
    type TensorHandle = ();
    type Device = MetaDevice;

    fn change_backend_float(_tensor: (), _shape: Shape, _target: &MetaDevice) {}

    fn change_backend_int(_tensor: (), _shape: Shape, _target: &MetaDevice) {}

    fn change_backend_bool(_tensor: (), _shape: Shape, _target: &MetaDevice) {}
}

/// A client that executes no op. It only reports the work that each op would be.
#[derive(Clone, Copy, Debug)]
pub struct MetaClient;

impl RunnerClient for MetaClient {
    type Device = MetaDevice;

    fn register_op(&self, op: OperationIr) {
        // The description is all that exists of the op: it is dropped here, and its outputs have
        // shapes only.
        report_work(|| Work::of(&op));
    }

    /// Returns tensors of the inferred shapes. The indices of a pooling layer are 64-bit integers,
    /// as on Burn's CPU backend.
    fn register(&self, op: OperationIr) -> Vec<MetaTensor> {
        // The router describes these indices in its own integer type, i32. A dry run counts bytes,
        // so the difference would show.
        let is_pooling = matches!(
            op,
            OperationIr::Module(
                ModuleOperationIr::MaxPool1dWithIndices(_)
                    | ModuleOperationIr::MaxPool2dWithIndices(_)
            )
        );
        let dtype = |dtype: DType| if is_pooling && dtype.is_int() { DType::I64 } else { dtype };
        let outputs = op.outputs().map(|out| tensor(out.shape.clone(), dtype(out.dtype), *self));
        let outputs = outputs.collect();
        self.register_op(op);
        outputs
    }

    /// Returns zeros of the tensor's shape and type.
    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let bytes = vec![0; tensor.shape.num_elements() * tensor.dtype.size()];
        let data = TensorData::from_bytes_vec(bytes, tensor.shape, tensor.dtype);
        Box::pin(std::future::ready(Ok(data)))
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        Ok(())
    }

    /// Returns the same number for every tensor, because nothing is stored under it.
    fn create_empty_handle(&self) -> TensorId {
        // A router looks a tensor up by its id, but this client has no table to look into.
        TensorId::new(0)
    }

    /// Keeps shape and type, and drops the values.
    fn register_tensor_data(&self, data: TensorData) -> MetaTensor {
        tensor(data.shape.clone(), data.dtype, *self)
    }

    fn device(&self) -> MetaDevice {
        MetaDevice
    }

    fn seed(&self, _seed: u64) {}

    /// Every type can be stored and computed with.
    fn dtype_usage(&self, _dtype: DType) -> DTypeUsageSet {
        DTypeUsage::general()
    }
}

/// Returns a tensor of this shape and type.
pub fn meta_tensor(shape: impl Into<Shape>, dtype: DType) -> MetaTensor {
    tensor(shape.into(), dtype, MetaClient)
}

fn tensor(shape: Shape, dtype: DType, client: MetaClient) -> MetaTensor {
    RouterTensor::new(client.create_empty_handle(), shape, dtype, client)
}
