//! The op families with a forward and a backward pass, implemented with ops of the backend.
//!
//! The provided methods limit memory use: scores and logits are computed one block at a time, and
//! only the values that the backward pass needs are saved. Products in 16 bits use tensor cores if
//! the device has them.

use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::{AttentionOps, RotaryOps};

/// Implements families with their provided methods for every CubeCL runtime.
macro_rules! as_provided {
    ($($family:ident),*) => { $(
        impl<R, F, I, BT> $family for CubeBackend<R, F, I, BT>
        where
            R: CubeRuntime,
            F: FloatElement,
            I: IntElement,
            BT: BoolElement,
        {
        }
    )* };
}

as_provided!(RotaryOps, AttentionOps);
