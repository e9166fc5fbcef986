//! [`Probe`], a decorator over any backend, as `Sharded` is one over a backend of Burn 0.21.

use std::cell::Cell;
use std::marker::PhantomData;

use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError};
use burn_ir::{BackendIr, TensorHandle};

thread_local! {
    static PRODUCTS: Cell<usize> = const { Cell::new(0) };
}

/// Returns the number of matrix products on this thread: ops run on the thread of the caller.
pub fn products() -> usize {
    PRODUCTS.get()
}

pub fn count_product() {
    PRODUCTS.set(PRODUCTS.get() + 1);
}

/// A decorator that counts matrix products.
#[derive(Clone, Copy, Debug, Default)]
pub struct Probe<B>(PhantomData<B>);

// The inner backend stores the tensors; the decorator adds no state of its own.
impl<B: BackendIr> BackendTypes for Probe<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = B::FloatTensorPrimitive;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
    type GraphPrimitive = B::GraphPrimitive;
}

impl<B: BackendIr> Backend for Probe<B> {
    fn name(device: &Self::Device) -> String {
        format!("probe<{}>", B::name(device))
    }
    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device, seed);
    }
    fn flush(device: &Self::Device) -> Result<(), ExecutionError> {
        B::flush(device)
    }
    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }
    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}

// A group accepts any backend whose tensors can be stored as handles of the intermediate
// representation.
impl<B: BackendIr> BackendIr for Probe<B> {
    type Handle = B::Handle;
    fn float_tensor(handle: TensorHandle<Self::Handle>) -> FloatTensor<Self> {
        B::float_tensor(handle)
    }
    fn int_tensor(handle: TensorHandle<Self::Handle>) -> IntTensor<Self> {
        B::int_tensor(handle)
    }
    fn bool_tensor(handle: TensorHandle<Self::Handle>) -> BoolTensor<Self> {
        B::bool_tensor(handle)
    }
    fn quantized_tensor(handle: TensorHandle<Self::Handle>) -> QuantizedTensor<Self> {
        B::quantized_tensor(handle)
    }
    fn float_tensor_handle(tensor: FloatTensor<Self>) -> Self::Handle {
        B::float_tensor_handle(tensor)
    }
    fn int_tensor_handle(tensor: IntTensor<Self>) -> Self::Handle {
        B::int_tensor_handle(tensor)
    }
    fn bool_tensor_handle(tensor: BoolTensor<Self>) -> Self::Handle {
        B::bool_tensor_handle(tensor)
    }
    fn quantized_tensor_handle(tensor: QuantizedTensor<Self>) -> Self::Handle {
        B::quantized_tensor_handle(tensor)
    }
}
