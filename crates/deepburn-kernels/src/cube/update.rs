//! Optimizer steps on a device.

use cubecl::prelude::*;

use super::device_buffer::DeviceBuffer;
use super::elementwise::OwnedBuffers;
use crate::ElementwiseStep;

/// Queues one optimizer step as a single pass over the elements, like [`ElementwiseStep::update`]
/// on the CPU.
///
/// # Panics
/// Panics if the buffers differ in length, if a buffer that is updated is not f32, or if there are
/// fewer state buffers than the step uses.
pub fn update<R: Runtime>(
    client: &ComputeClient<R>,
    step: &ElementwiseStep,
    grad_scale: f32,
    grad: &DeviceBuffer,
    buffers: OwnedBuffers<'_>,
) {
    step.launch(client, grad_scale, grad, buffers);
}
