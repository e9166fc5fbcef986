use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::stream_id::StreamId;

use crate::layout::LayoutOps;
use crate::matmul::MatmulOps;
use crate::stream::StreamOps;

impl<R, F, I, BT> StreamOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// CubeCL gives each thread a stream of its own, with its own pool of memory.
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        StreamId { value: 0 }.executes(run)
    }
}

impl<R, F, I, BT> MatmulOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
}

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
