//! Matrix products on the device.
//!
//! burn-cubecl chooses the kernel. On devices with tensor cores, its products of f32 matrices round
//! the operands to TF32, and it has no setting for that. Unless TF32 is allowed ([`allow_tf32`]),
//! these products therefore use the kernel that burn-cubecl chooses on devices without tensor
//! cores. It multiplies and adds in f32.
//!
//! Burn's convolutions and its own `attention` choose their kernels themselves, and keep TF32.
//!
//! [`allow_tf32`]: crate::allow_tf32

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{DType, TensorMetadata};
use burn_cubecl::kernel::matmul::init_matmul_output;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::prelude::{CubePrimitive, tf32};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::std::InputBinding;

use super::linear;
use crate::matmul::{MatmulOps, is_tf32_allowed};

/// Products of other types than f32 are burn-cubecl's.
impl<R, F, I, BT> MatmulOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// # Panics
    /// Panics if the depths of the operands differ.
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let are_f32 = [&lhs, &rhs].into_iter().all(|operand| operand.dtype() == DType::F32);
        match are_f32 && !is_tf32_allowed() {
            true => product_in_f32(lhs, rhs),
            false => Self::float_matmul(lhs, rhs),
        }
    }

    fn has_tf32(device: &Device<Self>) -> bool {
        R::client(device).properties().supports_type(tf32::as_type_native_unchecked())
    }

    fn module_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        linear::forward::<Self>(x, weight, bias)
    }

    fn module_linear_x_gradient(
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        linear::x_gradient::<Self>(weight, grad)
    }

    fn module_linear_weight_gradient(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        linear::weight_gradient::<Self>(x, grad)
    }
}

/// Multiplies f32 matrices without tensor cores, which would round the operands.
fn product_in_f32<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>) -> CubeTensor<R> {
    let output = init_matmul_output(&lhs, &rhs, DType::F32);
    let element = DType::F32.into();
    let mut elements =
        MatmulElems::from_globals(&MatmulGlobalElems { lhs: element, rhs: element, out: element });
    let [left, right] = [lhs, rhs].map(|operand| InputBinding::new(operand.binding(), element));
    // `Strategy::Auto` takes the same kernel on devices without tensor cores.
    let strategy = Strategy::SimpleUnit(Default::default());
    let result =
        launch_ref(&strategy, &output.client, left, right, output.clone().binding(), &mut elements);
    if let Err(error) = result {
        panic!("matmul: no kernel for a product {:?} in f32: {error:?}", output.shape());
    }
    output
}
