//! Gated activations, element-wise ops in one pass.
//!
//! Each block of elements is read, computed in f32 and written. The backward pass recomputes the
//! function of the gate, and turns the gradient of the output into the gradient of the gated values
//! in place. A gate of minus infinity gives NaN, because it is multiplied by a sigmoid of 0.

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::array::{
    BLOCK, block_rows, blocks, changed, contiguous, elements, is_supported, read, written,
};
use super::blockwise;
use super::gelu::{self, gelu_slope};
use super::vector::{exp, vectorized};
use crate::gated::{GateFunction, GatedGradients, GatedOps};
use crate::portable;

/// Returns the factor of `x` in SiLU, `1 / (1 + exp(-x))`.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Writes `gate * sigmoid(gate) * up` to `y`.
#[inline(always)]
fn products(gate: &[f32], up: &[f32], y: &mut [f32], sigmoid: impl Fn(f32) -> f32) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = gate * sigmoid(*gate) * up;
    }
}

/// Writes the gradients; see [`backward`]. `slope` is the derivative of the argument of the
/// sigmoid.
#[inline(always)]
fn gradients(
    [gate, up]: [&[f32]; 2],
    grad: &mut [f32],
    gate_grad: &mut [f32],
    sigmoid: impl Fn(f32) -> f32,
    slope: impl Fn(f32) -> f32,
) {
    let inputs = gate.iter().zip(up);
    for ((grad, gate_grad), (gate, up)) in grad.iter_mut().zip(gate_grad).zip(inputs) {
        let sigmoid = sigmoid(*gate);
        let derivative = sigmoid + gate * sigmoid * (1.0 - sigmoid) * slope(*gate);
        *gate_grad = *grad * up * derivative;
        *grad *= gate * sigmoid;
    }
}

vectorized! {
    /// Writes the product of the function of `gate` and `up` to `y`.
    fn forward(gate: &[f32], up: &[f32], y: &mut [f32], function: GateFunction) {
        match function {
            GateFunction::Silu => products(gate, up, y, sigmoid),
            GateFunction::GeluTanh => products(gate, up, y, gelu::gate),
        }
    }
}

vectorized! {
    /// Writes the gradient of the gate to `gate_grad`, and turns `grad`, the gradient of the
    /// output, into the gradient of `up`.
    fn backward(inputs: [&[f32]; 2], grad: &mut [f32], gate_grad: &mut [f32], function: GateFunction) {
        match function {
            GateFunction::Silu => gradients(inputs, grad, gate_grad, sigmoid, |_| 1.0),
            GateFunction::GeluTanh => gradients(inputs, grad, gate_grad, gelu::gate, gelu_slope),
        }
    }
}

/// Returns whether the kernels take these tensors: all of one supported type.
fn are_supported<const N: usize>(tensors: [&FlexTensor; N]) -> bool {
    tensors.iter().all(|tensor| is_supported(tensor) && tensor.dtype() == tensors[0].dtype())
}

/// Element-wise, so results do not depend on the shape or on the division into blocks. The only
/// scratch memory of a thread is the f32 copies of a block of 16-bit elements.
///
/// Tensors of other types, and of different types, use the portable implementation.
impl GatedOps for Flex {
    /// Allocates the result.
    fn gated(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> FloatTensor<Self> {
        // The kernel pairs the elements by their flat index, which would also accept other shapes.
        assert_eq!(gate.shape(), up.shape(), "a gate and its values have the same shape");
        if !are_supported([&gate, &up]) {
            return portable::gated::forward::<Self>(gate, up, function);
        }
        blockwise::map([&gate, &up], gate.dtype(), |[gate, up], y| forward(gate, up, y, function))
    }

    /// Allocates the gradient of the gate. The gradient of `up` takes the memory of `grad` if it is
    /// not shared.
    fn gated_backward(
        grad: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> GatedGradients<Self> {
        if !are_supported([&grad, &gate, &up]) {
            return portable::gated::backward::<Self>(grad, gate, up, function);
        }
        let [gate, up] = [contiguous(&gate), contiguous(&up)];
        let inputs = [&gate, &up].map(elements);
        let mut up_grad = None;
        let gate_grad = written(gate.shape(), gate.dtype(), |gate_grad| {
            up_grad = Some(changed(grad, |grad| {
                let rooms = <[Vec<f32>; 4]>::default;
                blocks(inputs[0].len(), BLOCK).for_each_init(rooms, |rooms, block| {
                    let [gate_room, up_room, grad_room, room] = rooms;
                    let gate = read(inputs[0], block.clone(), gate_room);
                    let up = read(inputs[1], block.clone(), up_room);
                    // SAFETY: blocks are disjoint, and all elements of a gradient are written.
                    unsafe {
                        gate_grad.write(block.clone(), room, |gate_grad| {
                            grad.update(block, grad_room, |grad| {
                                backward([gate, up], grad, gate_grad, function)
                            })
                        })
                    };
                });
            }));
        });
        GatedGradients { gate: gate_grad, up: up_grad.expect("`written` calls its closure") }
    }

    /// Allocates the result.
    fn gated_joint(joint: FloatTensor<Self>, function: GateFunction) -> FloatTensor<Self> {
        if !is_supported(&joint) {
            return portable::gated::joint_forward::<Self>(joint, function);
        }
        // By rows: a row of `joint` is twice as long as a row of the result, so their blocks
        // differ.
        let (rows, width) = (joint.shape()[0], joint.shape()[1] / 2);
        let joint = contiguous(&joint);
        let values = elements(&joint);
        written([rows, width], joint.dtype(), |y| {
            let rooms = <[Vec<f32>; 2]>::default;
            block_rows(rows, width).for_each_init(rooms, |[joint_room, room], row| {
                let joint = read(values, 2 * width * row..2 * width * (row + 1), joint_room);
                let (gate, up) = joint.split_at(width);
                let row = width * row..width * (row + 1);
                // SAFETY: rows are disjoint.
                unsafe { y.write(row, room, |y| forward(gate, up, y, function)) };
            });
        })
    }

    /// Allocates the gradient.
    fn gated_joint_backward(
        grad: FloatTensor<Self>,
        joint: FloatTensor<Self>,
        function: GateFunction,
    ) -> FloatTensor<Self> {
        if !are_supported([&grad, &joint]) {
            return portable::gated::joint_backward::<Self>(grad, joint, function);
        }
        let (rows, width) = (joint.shape()[0], joint.shape()[1] / 2);
        let [grad, joint] = [contiguous(&grad), contiguous(&joint)];
        let [grads, values] = [&grad, &joint].map(elements);
        written(joint.shape(), joint.dtype(), |out| {
            let rooms = <[Vec<f32>; 3]>::default;
            block_rows(rows, width).for_each_init(rooms, |[joint_room, grad_room, room], row| {
                let both = 2 * width * row..2 * width * (row + 1);
                let (gate, up) = read(values, both.clone(), joint_room).split_at(width);
                let grad = read(grads, width * row..width * (row + 1), grad_room);
                let write = |out: &mut [f32]| {
                    let (gate_grad, up_grad) = out.split_at_mut(width);
                    // `backward` works in place: it turns the gradient of the output into the one
                    // of `up`.
                    up_grad.copy_from_slice(grad);
                    backward([gate, up], up_grad, gate_grad, function);
                };
                // SAFETY: rows are disjoint.
                unsafe { out.write(both, room, write) };
            });
        })
    }
}
