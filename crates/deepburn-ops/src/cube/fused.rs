//! The portable forms of the fused ops: hand-written backward formulae in the device's own ops.

use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use crate::{AttentionOps, CrossEntropyOps, GeluOps, LayerNormOps, LinearOps};

macro_rules! portable {
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

portable!(AttentionOps, CrossEntropyOps, GeluOps, LayerNormOps, LinearOps);
