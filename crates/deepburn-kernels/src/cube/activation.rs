//! GELU and gated activations, element-wise, with one launch for each pass.
//!
//! ```text
//! function        x s(a(x)), s = sigmoid      GELU: a(x) = 2 u(x); SiLU: a(x) = x
//! gated           y = function(gate) up       gate and up are two arrays, or halves of each row
//! backward        d function = s + x s (1 - s) a'(x)
//! ```
//!
//! A unit takes four elements if rows can be divided by four, so that it reads and writes 8 or 16
//! bytes at a time. The formulas are the CPU kernels', in f32, and results are rounded
//! once.

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, cubes, with_element};

/// The function of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationFunction {
    /// `x sigmoid(x)`.
    Silu,
    /// GELU with the tanh approximation: `x sigmoid(2 u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
    GeluTanh,
}

/// The arrays of a gate and of the values that it multiplies.
#[derive(Debug, Clone)]
pub enum Gated {
    /// Two arrays of equal length.
    Separate {
        /// The gate, before its function.
        gate: DeviceBuffer,
        /// The gated values.
        up: DeviceBuffer,
    },
    /// One array of rows: the gate, then the gated values.
    Joint {
        /// The rows.
        rows: DeviceBuffer,
        /// The number of elements of a row's gate.
        width: usize,
    },
}

impl Gated {
    /// Returns the arrays.
    fn arrays(&self) -> Vec<&DeviceBuffer> {
        match self {
            Self::Separate { gate, up } => vec![gate, up],
            Self::Joint { rows, .. } => vec![rows],
        }
    }

    /// Returns the number of gates, and of those in a row.
    ///
    /// # Panics
    /// Panics if the arrays differ in length or type.
    fn shape(&self) -> [usize; 2] {
        match self {
            Self::Separate { gate, up } => {
                assert!(
                    gate.len() == up.len() && gate.dtype() == up.dtype(),
                    "a gate and its values differ in length or type"
                );
                [gate.len(); 2]
            }
            Self::Joint { rows, width } => [rows.len() / 2, *width],
        }
    }

    /// Allocates arrays like these.
    fn empty_like<R: Runtime>(&self, client: &ComputeClient<R>) -> Self {
        let empty = |like: &DeviceBuffer| DeviceBuffer::empty(client, like.len(), like.dtype());
        match self {
            Self::Separate { gate, up } => Self::Separate { gate: empty(gate), up: empty(up) },
            Self::Joint { rows, width } => Self::Joint { rows: empty(rows), width: *width },
        }
    }
}

/// Returns the number of elements that a unit takes: a divisor of the length of a row.
fn elements_at_once(width: usize) -> usize {
    if width.is_multiple_of(4) { 4 } else { 1 }
}

/// Returns GELU of each element.
///
/// Allocates the result and queues one kernel; an empty buffer needs no launch.
pub fn gelu<R: Runtime>(client: &ComputeClient<R>, x: &DeviceBuffer) -> DeviceBuffer {
    let result = DeviceBuffer::empty(client, x.len(), x.dtype());
    if x.is_empty() {
        return result;
    }
    let at_once = elements_at_once(x.len());
    let len = x.len() / at_once;
    let (count, dim) = cubes(client, len);
    // SAFETY: every unit checks that its elements exist.
    unsafe {
        with_element!(x.dtype(), X => {
            gelu_kernel::launch_unchecked::<X, R>(
                client,
                count,
                dim,
                at_once,
                x.arg(),
                result.arg(),
                len,
            );
        });
    }
    result
}

#[cube(launch_unchecked)]
fn gelu_kernel<X: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    result: &mut Array<Vector<X, N>>,
    len: usize,
) {
    let i = ABSOLUTE_POS;
    if i < len {
        let x = Vector::<f32, N>::cast_from(x[i]);
        result[i] = Vector::cast_from(x * sigmoid_of::<N>(x, ActivationFunction::GeluTanh));
    }
}

/// Returns the gradient of `x`, of which GELU was computed. `grad` is the gradient of the output.
///
/// Allocates the result and queues one kernel; an empty buffer needs no launch.
///
/// # Panics
/// Panics if the buffers differ in length or type.
pub fn gelu_gradient<R: Runtime>(
    client: &ComputeClient<R>,
    grad: &DeviceBuffer,
    x: &DeviceBuffer,
) -> DeviceBuffer {
    assert!(
        grad.len() == x.len() && grad.dtype() == x.dtype(),
        "the gradient of GELU and its input differ in length or type"
    );
    let result = DeviceBuffer::empty(client, x.len(), x.dtype());
    if x.is_empty() {
        return result;
    }
    let at_once = elements_at_once(x.len());
    let len = x.len() / at_once;
    let (count, dim) = cubes(client, len);
    // SAFETY: every unit checks that its elements exist.
    unsafe {
        with_element!(x.dtype(), X => {
            gelu_gradient_kernel::launch_unchecked::<X, R>(
                client,
                count,
                dim,
                at_once,
                grad.arg(),
                x.arg(),
                result.arg(),
                len,
            );
        });
    }
    result
}

#[cube(launch_unchecked)]
fn gelu_gradient_kernel<X: Float, N: Size>(
    grad: &Array<Vector<X, N>>,
    x: &Array<Vector<X, N>>,
    result: &mut Array<Vector<X, N>>,
    len: usize,
) {
    let i = ABSOLUTE_POS;
    if i < len {
        let x = Vector::<f32, N>::cast_from(x[i]);
        let sigmoid = sigmoid_of::<N>(x, ActivationFunction::GeluTanh);
        let slope = derivative::<N>(x, sigmoid, ActivationFunction::GeluTanh);
        result[i] = Vector::cast_from(Vector::<f32, N>::cast_from(grad[i]) * slope);
    }
}

/// Returns `activation(gate) * up`.
///
/// Allocates the result and queues one kernel; empty arrays need no launch.
///
/// # Panics
/// Panics if gate and values differ in length or type.
pub fn gated<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: &Gated,
    activation: ActivationFunction,
) -> DeviceBuffer {
    let ([len, width], arrays) = (inputs.shape(), inputs.arrays());
    let result = DeviceBuffer::empty(client, len, arrays[0].dtype());
    if len == 0 {
        return result;
    }
    let at_once = elements_at_once(width);
    let (count, dim) = cubes(client, len / at_once);
    // SAFETY: every unit checks that its elements exist.
    unsafe {
        with_element!(result.dtype(), X => {
            gated_kernel::launch_unchecked::<X, R>(
                client,
                count,
                dim,
                at_once,
                arrays.iter().map(|array| array.arg()).collect(),
                result.arg(),
                len / at_once,
                width / at_once,
                activation,
            );
        });
    }
    result
}

/// Computes some elements per unit. `inputs` are a gate and its values, or one array of both.
#[cube(launch_unchecked)]
fn gated_kernel<X: Float, N: Size>(
    inputs: &Sequence<Array<Vector<X, N>>>,
    result: &mut Array<Vector<X, N>>,
    len: usize,
    width: usize,
    #[comptime] activation: ActivationFunction,
) {
    let i = ABSOLUTE_POS;
    if i < len {
        let last = comptime![inputs.len() - 1];
        let place = gate_place(i, width, last);
        let gate = Vector::<f32, N>::cast_from(inputs[0][place]);
        let up = Vector::<f32, N>::cast_from(inputs[last][up_place(place, width, last)]);
        result[i] = Vector::cast_from(gate * sigmoid_of::<N>(gate, activation) * up);
    }
}

/// Returns the gradients of the gate and of its values, as arrays like the inputs. `grad` is the
/// gradient of the output.
///
/// With the gradient `dy` of `y = f(g) u`: `dg = dy u f'(g)` and `du = dy f(g)`. Queues one kernel;
/// empty arrays need no launch.
///
/// # Panics
/// Panics if the buffers differ in length or type.
pub fn gated_gradients<R: Runtime>(
    client: &ComputeClient<R>,
    grad: &DeviceBuffer,
    inputs: &Gated,
    activation: ActivationFunction,
) -> Gated {
    let ([len, width], arrays) = (inputs.shape(), inputs.arrays());
    assert!(
        grad.len() == len && grad.dtype() == arrays[0].dtype(),
        "the gradient of a gated activation and its inputs differ in length or type"
    );
    let gradients = inputs.empty_like(client);
    if len == 0 {
        return gradients;
    }
    let at_once = elements_at_once(width);
    let (count, dim) = cubes(client, len / at_once);
    // SAFETY: every unit checks that its elements exist.
    unsafe {
        with_element!(grad.dtype(), X => {
            gated_gradients_kernel::launch_unchecked::<X, R>(
                client,
                count,
                dim,
                at_once,
                grad.arg(),
                arrays.iter().map(|array| array.arg()).collect(),
                gradients.arrays().iter().map(|array| array.arg()).collect(),
                len / at_once,
                width / at_once,
                activation,
            );
        });
    }
    gradients
}

/// Computes some elements of both gradients per unit.
#[cube(launch_unchecked)]
fn gated_gradients_kernel<X: Float, N: Size>(
    grad: &Array<Vector<X, N>>,
    inputs: &Sequence<Array<Vector<X, N>>>,
    gradients: &mut Sequence<Array<Vector<X, N>>>,
    len: usize,
    width: usize,
    #[comptime] activation: ActivationFunction,
) {
    let i = ABSOLUTE_POS;
    if i < len {
        let last = comptime![inputs.len() - 1];
        let place = gate_place(i, width, last);
        let values = up_place(place, width, last);
        let grad = Vector::<f32, N>::cast_from(grad[i]);
        let gate = Vector::<f32, N>::cast_from(inputs[0][place]);
        let up = Vector::<f32, N>::cast_from(inputs[last][values]);
        let sigmoid = sigmoid_of::<N>(gate, activation);
        let slope = derivative::<N>(gate, sigmoid, activation);
        let of_gate = gradients.index_mut(0usize);
        of_gate[place] = Vector::cast_from(grad * up * slope);
        let of_up = gradients.index_mut(last);
        of_up[values] = Vector::cast_from(grad * gate * sigmoid);
    }
}

/// Returns the place of gate `i` in its array. `last` is 0 if gate and values share an array.
#[cube]
fn gate_place(i: usize, width: usize, #[comptime] last: usize) -> usize {
    if comptime![last == 0] { i + i / width * width } else { i }
}

/// Returns the place of the value that a gate multiplies.
#[cube]
fn up_place(place: usize, width: usize, #[comptime] last: usize) -> usize {
    if comptime![last == 0] { place + width } else { place }
}

/// `2 sqrt(2 / pi)`, the coefficient of `x` in `2 u(x)`.
const LINEAR: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;

/// The coefficient of `x^3` in `2 u(x)`.
const CUBIC: f32 = 0.044_715 * LINEAR;

/// Returns the factor of `x` in the function. For large negative arguments, the exponential becomes
/// infinite and the factor 0.
#[cube]
fn sigmoid_of<N: Size>(
    x: Vector<f32, N>,
    #[comptime] activation: ActivationFunction,
) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0);
    let argument = match comptime![activation] {
        ActivationFunction::Silu => x,
        ActivationFunction::GeluTanh => {
            x * (Vector::<f32, N>::new(LINEAR) + Vector::<f32, N>::new(CUBIC) * x * x)
        }
    };
    // Not `-argument`: C++ for CUDA has no unary minus for vectors, and CubeCL writes one.
    one / (one + (Vector::<f32, N>::new(0.0) - argument).exp())
}

/// Returns the derivative of the function at `x`, where `sigmoid` is its factor.
#[cube]
fn derivative<N: Size>(
    x: Vector<f32, N>,
    sigmoid: Vector<f32, N>,
    #[comptime] activation: ActivationFunction,
) -> Vector<f32, N> {
    let curve = x * sigmoid * (Vector::<f32, N>::new(1.0) - sigmoid);
    match comptime![activation] {
        ActivationFunction::Silu => sigmoid + curve,
        ActivationFunction::GeluTanh => {
            let slope = Vector::<f32, N>::new(LINEAR) + Vector::<f32, N>::new(3.0 * CUBIC) * x * x;
            sigmoid + curve * slope
        }
    }
}
