//! Tensors of CubeCL as flat arrays of the kernels, and back.

use burn_backend::ops::FloatTensorOps;
use burn_backend::{DType, FloatDType, Shape, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use deepburn_kernels::cube::{self, ColumnRange, DeviceBuffer, DeviceDType};

/// Returns the kernels' identifier of a float type; `None` for f64 and other unsupported types.
pub(super) fn element_type(dtype: FloatDType) -> Option<DeviceDType> {
    match dtype {
        FloatDType::F32 => Some(DeviceDType::F32),
        FloatDType::F16 => Some(DeviceDType::F16),
        FloatDType::BF16 => Some(DeviceDType::Bf16),
        _ => None,
    }
}

/// Returns the data type of a tensor of such elements.
pub(super) fn data_type(dtype: DeviceDType) -> DType {
    match dtype {
        DeviceDType::F32 => DType::F32,
        DeviceDType::F16 => DType::F16,
        DeviceDType::Bf16 => DType::BF16,
    }
}

/// Returns the tensor in contiguous layout and in a type that the kernels support. Other types are
/// converted to f32.
pub(super) fn known<B, R>(tensor: CubeTensor<R>) -> CubeTensor<R>
where
    R: CubeRuntime,
    B: FloatTensorOps<B> + burn_backend::Backend<FloatTensorPrimitive = CubeTensor<R>>,
{
    let tensor = match element_type(tensor.dtype().into()) {
        Some(_) => tensor,
        None => B::float_cast(tensor, FloatDType::F32),
    };
    contiguous(tensor)
}

/// Returns the tensor in contiguous layout.
pub(super) fn contiguous<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    into_contiguous(without_padding(tensor))
}

/// Returns a contiguous copy of a tensor that has padding between its rows, and other tensors
/// unchanged. The columns of a matrix have such rows, and so has a product if its rows do not end
/// at the device's alignment.
///
/// burn-cubecl's copy uploads the shape, and the host waits for uploads after a number of them.
pub(super) fn without_padding<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let Some(dtype) = element_type(tensor.dtype().into()) else { return tensor };
    let Some(columns) = padded_rows(&tensor).filter(|_| !tensor.is_contiguous()) else {
        return tensor;
    };
    let len = (columns.rows - 1) * columns.pitch + columns.width;
    let memory = DeviceBuffer::new(tensor.handle.clone(), len, dtype);
    let copy = cube::copy_of_columns(&tensor.client, &memory, columns);
    shaped_tensor(copy, tensor.shape(), &tensor)
}

/// Returns the layout of a tensor whose rows, along its last axis, are contiguous and at equal
/// distances; `None` for another layout or without elements.
fn padded_rows<R: CubeRuntime>(tensor: &CubeTensor<R>) -> Option<ColumnRange> {
    let (shape, strides) = (tensor.shape(), tensor.meta.strides());
    let (&width, lengths) = shape.as_slice().split_last()?;
    let (&step, distances) = strides.split_last()?;
    let rows: usize = lengths.iter().product();
    if step != 1 || rows == 0 || width == 0 {
        return None;
    }
    // The distance of an axis of length 1 has no meaning.
    let axes = lengths.iter().zip(distances).filter(|(length, _)| **length > 1);
    let mut axes = axes.map(|(length, distance)| (*length, *distance)).rev();
    let (length, pitch) = axes.next().unwrap_or((1, width));
    let end = axes.try_fold(length * pitch, |expected, (length, distance)| {
        (distance == expected).then_some(length * distance)
    });
    let columns = ColumnRange { rows, pitch, start: 0, width };
    (end.is_some() && pitch >= width).then_some(columns)
}

/// Returns the memory of a contiguous tensor as an argument of a kernel. The handle is shared, not
/// copied.
///
/// # Panics
/// Panics if the kernels do not support the type.
pub(super) fn buffer<R: CubeRuntime>(tensor: &CubeTensor<R>) -> DeviceBuffer {
    let dtype = element_type(tensor.dtype().into());
    let dtype = dtype.expect("callers check the type, or convert the tensor");
    DeviceBuffer::new(tensor.handle.clone(), tensor.shape().num_elements(), dtype)
}

/// Returns a buffer as a flat tensor on the device of `like`.
///
/// The tensor takes ownership of the buffer's memory.
pub(super) fn flat_tensor<R: CubeRuntime>(
    buffer: DeviceBuffer,
    like: &CubeTensor<R>,
) -> CubeTensor<R> {
    let shape = Shape::from(vec![buffer.len()]);
    shaped_tensor(buffer, shape, like)
}

/// Returns a buffer as a tensor of a shape on the device of `like`.
///
/// The tensor takes ownership of the buffer's memory.
pub(super) fn shaped_tensor<R: CubeRuntime>(
    buffer: DeviceBuffer,
    shape: Shape,
    like: &CubeTensor<R>,
) -> CubeTensor<R> {
    debug_assert_eq!(shape.num_elements(), buffer.len());
    let dtype = data_type(buffer.dtype());
    let (client, device) = (like.client.clone(), like.device.clone());
    CubeTensor::new_contiguous(client, device, shape, buffer.into_handle(), dtype)
}

/// Returns whether the kernels support the types of all tensors.
pub(super) fn are_supported<'a, R: CubeRuntime>(
    tensors: impl IntoIterator<Item = &'a CubeTensor<R>>,
) -> bool {
    tensors.into_iter().all(|tensor| element_type(tensor.dtype().into()).is_some())
}

/// Returns whether the kernels support the type of all tensors, which is the same one.
pub(super) fn are_alike<const N: usize, R: CubeRuntime>(tensors: [&CubeTensor<R>; N]) -> bool {
    let dtype = tensors[0].dtype();
    are_supported(tensors) && tensors.iter().all(|tensor| tensor.dtype() == dtype)
}

/// Returns a contiguous tensor whose memory is not shared, so that a kernel can update it in place.
/// Copies the tensor on the device if it is shared.
pub(super) fn exclusive<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let tensor = contiguous(tensor);
    if tensor.can_mut() { tensor } else { tensor.copy() }
}
