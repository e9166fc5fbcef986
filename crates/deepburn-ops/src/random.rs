//! Random numbers of a rank's stream, drawn where the tensor is.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, FloatDType, Shape};
use deepburn_kernels::ChaChaPosition;

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
}

/// Autodiff records nothing of random tensors. Decorators of `deepburn-zero` draw them from the
/// stream of their rank.
impl<B: RandomOps, C: CheckpointStrategy> RandomOps for Autodiff<B, C> {}
