use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::stream_id::StreamId;

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
