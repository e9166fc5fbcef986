//! Random numbers of a rank's stream, drawn where the tensor is.

use burn::nn::Dropout;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::Backward;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, FloatDType, Shape, TensorMetadata};
use deepburn_kernels::ChaChaPosition;

use crate::autodiff_step::{backward_step, record};

/// Which elements of a tensor a dropout keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ElementDropout {
    /// Where the words of the first element are. Each element takes two, in row-major order.
    pub position: ChaChaPosition,
    /// The probability with which an element is kept, in `0.0..1.0`.
    pub keep: f64,
}

/// Random numbers of a stream whose position the caller knows.
pub trait RandomOps: Backend {
    /// Returns a tensor of zeros and ones, which are 1 with a probability in `0.0..1.0`, if the
    /// backend draws them on the device. Each element takes two words of the stream, in row-major
    /// order, and is the one that `rand` draws on the host. Without a kernel, the provided method
    /// returns `None`, and the caller draws on the host and copies the elements to the device.
    fn bernoulli(
        _position: &ChaChaPosition,
        _probability: f64,
        _shape: &Shape,
        _device: &Device<Self>,
        _dtype: FloatDType,
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// Returns true if [`drop_elements`](Self::drop_elements) has a kernel for `len` elements of a
    /// type.
    fn has_dropout(_len: usize, _dtype: FloatDType) -> bool {
        false
    }

    /// Takes the words of a dropout of `len` elements from the random stream of the current rank
    /// and returns where they are. Returns `None` if there is no such stream, or no kernel for
    /// the type.
    fn take_dropout(
        _device: &Device<Self>,
        _len: usize,
        _dtype: FloatDType,
    ) -> Option<ChaChaPosition> {
        None
    }

    /// Returns the elements of `x` that a dropout keeps, divided by the probability of keeping one,
    /// and 0 for the others. This is also its gradient, if `x` is the gradient of the output.
    /// Autodiff records this method.
    ///
    /// # Panics
    /// Panics if the backend has no kernel ([`has_dropout`](Self::has_dropout)).
    fn drop_elements(x: FloatTensor<Self>, dropout: ElementDropout) -> FloatTensor<Self> {
        let ElementDropout { position, keep } = dropout;
        let (device, dtype) = (Self::float_device(&x), x.dtype().into());
        let Some(ones) = Self::bernoulli(&position, keep, &x.shape(), &device, dtype) else {
            unreachable!("only a backend with a kernel takes words of a stream")
        };
        Self::float_mul_scalar(Self::float_mul(x, ones), (1.0 / keep).into())
    }
}

backward_step! {
    /// The autodiff step. Its state selects the elements, which are drawn again.
    DropoutStep<1>: RandomOps, |grad, dropout: ElementDropout| [B::drop_elements(grad, dropout)]
}

/// Applies a dropout while gradients are computed. On a device with a kernel, it is one launch
/// forward and one backward, and keeps no mask.
pub fn dropout<B: RandomOps, const D: usize>(dropout: &Dropout, x: Tensor<B, D>) -> Tensor<B, D> {
    let (device, keep) = (x.device(), 1.0 - dropout.prob);
    let is_drawn = B::ad_enabled(&device) && (0.0..1.0).contains(&keep);
    let dtype = x.dtype().into();
    let taken = is_drawn.then(|| B::take_dropout(&device, x.shape().num_elements(), dtype));
    match taken.flatten() {
        Some(position) => {
            let x = x.into_primitive().tensor();
            let kept = B::drop_elements(x, ElementDropout { position, keep });
            Tensor::from_primitive(TensorPrimitive::Float(kept))
        }
        None => dropout.forward(x),
    }
}

/// Autodiff records nothing of random tensors. Decorators of `deepburn-zero` draw them from the
/// stream of their rank.
impl<B: RandomOps, C: CheckpointStrategy> RandomOps for Autodiff<B, C> {
    fn take_dropout(
        device: &Device<Self>,
        len: usize,
        dtype: FloatDType,
    ) -> Option<ChaChaPosition> {
        B::take_dropout(device, len, dtype)
    }

    fn drop_elements(x: FloatTensor<Self>, dropout: ElementDropout) -> FloatTensor<Self> {
        record(
            DropoutStep.prepare::<C>([x.node]),
            x.primitive,
            |x| (dropout, B::drop_elements(x, dropout)),
            |x| B::drop_elements(x, dropout),
        )
    }
}
