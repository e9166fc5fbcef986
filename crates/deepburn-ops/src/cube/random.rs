//! Random numbers on the device.

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{FloatDType, Shape, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::{ChaChaPosition, cube};

use super::array::{buffer, contiguous, data_type, element_type, shaped_tensor};
use crate::random::{ElementDropout, RandomOps};

impl<R, F, I, BT> RandomOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// Queues one launch. f64 is drawn on the host, and so are 2^31 elements and more.
    fn bernoulli(
        position: &ChaChaPosition,
        probability: f64,
        shape: &Shape,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> Option<FloatTensor<Self>> {
        let wanted = element_type(dtype)?;
        if shape.num_elements() > cube::MAX_DRAWN {
            return None;
        }
        let client = R::client(device);
        let drawn = cube::bernoulli(&client, position, probability, shape.num_elements(), wanted);
        Some(CubeTensor::new_contiguous(
            client,
            device.clone(),
            shape.clone(),
            drawn.into_handle(),
            data_type(wanted),
        ))
    }

    fn has_dropout(len: usize, dtype: FloatDType) -> bool {
        len <= cube::MAX_DRAWN && element_type(dtype).is_some()
    }

    /// Queues one launch.
    fn drop_elements(x: FloatTensor<Self>, dropout: ElementDropout) -> FloatTensor<Self> {
        let x = contiguous(x);
        let kept = cube::dropout(&x.client, &dropout.position, dropout.keep, &buffer(&x));
        shaped_tensor(kept, x.shape(), &x)
    }
}
