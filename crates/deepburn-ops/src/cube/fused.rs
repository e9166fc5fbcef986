//! The families with a forward and a backward pass, in ops of the backend.
//!
//! The provided methods bound the memory: scores and logits exist a block at a time, and only the
//! values that backward needs are kept. burn-cubecl's products use tensor cores where the device
//! has them.

use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::{AttentionOps, CrossEntropyOps, GeluOps, LayerNormOps, LinearOps};

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

as_provided!(LayerNormOps, GeluOps, LinearOps, CrossEntropyOps, AttentionOps);
