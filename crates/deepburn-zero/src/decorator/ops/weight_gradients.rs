//! Ops whose results are gradients of weights, which a pipeline stage may defer.
//!
//! These are the products of linear layers, of Burn's and of `deepburn-ops`: most of the time of
//! weight gradients. All others are computed in the backward pass: a convolution's op reads the
//! parameter, gradients of norms and embeddings are small, and a product with a parameter by
//! `matmul` looks like any other product.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use deepburn_ops::SumOps;

use crate::decorator::ZeroTensor;
use crate::deferred::DeferredTensor;
use crate::pipeline;
use crate::session::Leased;

/// Runs an op, or defers it if the backward pass does. Its results have these shapes and the type
/// of the first operand.
pub(super) fn weight_gradients<B: SumOps, const N: usize>(
    operands: [ZeroTensor<B>; 2],
    shapes: [Shape; N],
    run: fn([FloatTensor<B>; 2]) -> [FloatTensor<B>; N],
) -> [ZeroTensor<B>; N] {
    if !pipeline::defers_weights::<B>() {
        return run(operands.map(ZeroTensor::into_full)).map(ZeroTensor::full);
    }
    let (dtype, device) = (operands[0].dtype(), operands[0].device());
    // Operands that were freed are recomputed now, when backward reads their block.
    let operands = operands.map(ZeroTensor::into_leased);
    let results = DeferredTensor::results(shapes, dtype, &device, move || {
        run(operands.map(Leased::into_inner)).map(Leased::new)
    });
    results.map(ZeroTensor::Deferred)
}
