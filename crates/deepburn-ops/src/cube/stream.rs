//! A device stream that all ranks of a process share, and the layouts of the device's tensors.

use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::stream_id::StreamId;

use crate::layout::LayoutOps;
use crate::stream::StreamOps;

/// Kernels of all ranks run in the order in which they were submitted.
impl<R, F, I, BT> StreamOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// Runs the work in stream 0 of the device.
    ///
    /// By default, CubeCL gives each thread its own stream with its own memory pool. A rank that
    /// reads another rank's tensor would then need a synchronization for every read, and could be
    /// given memory that a kernel in the other stream is still reading.
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        StreamId { value: 0 }.executes(run)
    }
}

/// The layout is known on the host, although the elements may not be computed yet.
impl<R, F, I, BT> LayoutOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn is_contiguous(tensor: &CubeTensor<R>) -> bool {
        tensor.is_contiguous()
    }
}
