//! Gated activations on the device: one launch forward, one backward.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, ActivationFunction, Gated};

use super::array::{are_alike, buffer, contiguous, shaped_tensor};
use crate::gated::{GateFunction, GatedGradients, GatedOps};
use crate::portable;

/// Returns the kernels' name of a function.
fn activation(function: GateFunction) -> ActivationFunction {
    match function {
        GateFunction::Silu => ActivationFunction::Silu,
        GateFunction::GeluTanh => ActivationFunction::GeluTanh,
    }
}

/// Returns the rows of a contiguous joint matrix.
fn joint_rows<R: CubeRuntime>(joint: &CubeTensor<R>) -> Gated {
    Gated::Joint { rows: buffer(joint), width: joint.shape()[1] / 2 }
}

/// Supports f32, f16 and bf16. Other types, and tensors of different types, use the portable
/// implementation.
impl<R, F, I, BT> GatedOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn gated(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> FloatTensor<Self> {
        // The kernel pairs the elements by their flat index, which would also accept other shapes.
        assert_eq!(gate.shape(), up.shape(), "a gate and its values have the same shape");
        if !are_alike([&gate, &up]) {
            return portable::gated::forward::<Self>(gate, up, function);
        }
        let [gate, up] = [gate, up].map(contiguous);
        let inputs = Gated::Separate { gate: buffer(&gate), up: buffer(&up) };
        let output = cube::gated(&gate.client, &inputs, activation(function));
        shaped_tensor(output, gate.shape(), &gate)
    }

    fn gated_backward(
        grad: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> GatedGradients<Self> {
        if !are_alike([&grad, &gate, &up]) {
            return portable::gated::backward::<Self>(grad, gate, up, function);
        }
        let [grad, gate, up] = [grad, gate, up].map(contiguous);
        let inputs = Gated::Separate { gate: buffer(&gate), up: buffer(&up) };
        let activation = activation(function);
        match cube::gated_gradients(&gate.client, &buffer(&grad), &inputs, activation) {
            Gated::Separate { gate: gate_gradient, up: up_gradient } => GatedGradients {
                gate: shaped_tensor(gate_gradient, gate.shape(), &gate),
                up: shaped_tensor(up_gradient, up.shape(), &up),
            },
            Gated::Joint { .. } => unreachable!("gradients are arrays like the inputs"),
        }
    }

    fn gated_joint(joint: FloatTensor<Self>, function: GateFunction) -> FloatTensor<Self> {
        if !are_alike([&joint]) {
            return portable::gated::joint_forward::<Self>(joint, function);
        }
        let joint = contiguous(joint);
        let [rows, columns] = [joint.shape()[0], joint.shape()[1]];
        let output = cube::gated(&joint.client, &joint_rows(&joint), activation(function));
        shaped_tensor(output, Shape::from(vec![rows, columns / 2]), &joint)
    }

    fn gated_joint_backward(
        grad: FloatTensor<Self>,
        joint: FloatTensor<Self>,
        function: GateFunction,
    ) -> FloatTensor<Self> {
        if !are_alike([&grad, &joint]) {
            return portable::gated::joint_backward::<Self>(grad, joint, function);
        }
        let [grad, joint] = [grad, joint].map(contiguous);
        let (inputs, activation) = (joint_rows(&joint), activation(function));
        match cube::gated_gradients(&joint.client, &buffer(&grad), &inputs, activation) {
            Gated::Joint { rows, .. } => shaped_tensor(rows, joint.shape(), &joint),
            Gated::Separate { .. } => unreachable!("gradients are arrays like the inputs"),
        }
    }
}
