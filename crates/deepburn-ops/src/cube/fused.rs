//! The op families without a kernel for devices, implemented with ops of the backend.
//!
//! The provided methods limit memory use: scores are computed one block at a time, and only the
//! values that the backward pass needs are saved. Products in 16 bits use tensor cores if the
//! device has them.

use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::AttentionOps;

impl<R, F, I, BT> AttentionOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
}
