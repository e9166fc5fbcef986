//! Tensors as host memory and back.
//!
//! On a backend whose device is the host both ways are free of copies as long as nobody else
//! holds the tensor.

use burn_backend::{Backend, TensorData, read_sync};

/// The f32 elements of `tensor`, in flat order.
pub fn float_into_host<B: Backend>(tensor: B::FloatTensorPrimitive) -> Vec<f32> {
    read_float::<B>(tensor)
        .convert::<f32>()
        .into_vec()
        .expect("the data was converted to f32 just before")
}

/// The data of `tensor`, in its own type.
pub fn read_float<B: Backend>(tensor: B::FloatTensorPrimitive) -> TensorData {
    match read_sync(B::float_into_data(tensor)) {
        Ok(data) => data,
        Err(error) => panic!("reading a tensor from its device failed: {error:?}"),
    }
}

/// The elements of an index tensor.
pub fn int_into_host<B: Backend>(tensor: B::IntTensorPrimitive) -> Vec<i64> {
    match read_sync(B::int_into_data(tensor)) {
        Ok(data) => data.iter::<i64>().collect(),
        Err(error) => panic!("reading indices from their device failed: {error:?}"),
    }
}

/// An index tensor of `indices`, shape `[k]`, in the integer type of `device`.
pub fn int_from_host<B: Backend>(indices: Vec<i64>, device: &B::Device) -> B::IntTensorPrimitive {
    let len = indices.len();
    let dtype = burn_backend::get_device_settings::<B>(device).int_dtype;
    B::int_from_data(TensorData::new(indices, vec![len]).convert_dtype(dtype.into()), device)
}

/// A tensor of `data` on `device`.
pub fn float_from_host<B: Backend>(
    data: TensorData,
    device: &B::Device,
) -> B::FloatTensorPrimitive {
    B::float_from_data(data, device)
}
