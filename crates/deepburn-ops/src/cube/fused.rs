//! Forward and backward in ops of the backend, fused or not as it does them.

use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::{AttentionOps, CrossEntropyOps, GeluOps, LayerNormOps, LinearOps};

/// Families of which the provided methods are used.
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
