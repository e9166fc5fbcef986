//! Element-wise optimizer steps on a device, in one launch.
//!
//! Main trait: [`ElementKernel`], a step's function for one element. All optimizers share the
//! kernel that calls this function:
//!
//! ```text
//! unit i      g = f32(grad[i]) * grad_scale
//!             step.element(i, scalars, g, param, states)      updates param[i] and states[..][i]
//!             working[i] = W(param[i])                        if there is a working copy
//! scalars     the step's scalars ..., grad_scale              arguments of the launch
//! ```
//!
//! Scalars are arguments of the launch instead of constants, so the kernel is compiled only once
//! per training run although the learning rate changes in every step. An array of them would have
//! to be copied to the device for each parameter.

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, DeviceDType, cubes, with_element};
use crate::elementwise::Elementwise;

/// The buffers that one step updates, all of equal length. No other tensor may use their memory.
#[derive(Debug)]
pub struct OwnedBuffers<'a> {
    /// The master weights, in f32.
    pub param: &'a DeviceBuffer,
    /// The optimizer states, in f32. A step uses the first
    /// [`ElementwiseStep::states`](crate::ElementwiseStep::states) of them and does not touch the
    /// others.
    pub states: &'a [&'a DeviceBuffer],
    /// The 16-bit working copy, which receives the rounded updated weights.
    pub working: Option<&'a DeviceBuffer>,
}

/// A step's function for one element, with the same arithmetic as on the CPU.
#[cube]
pub(crate) trait ElementKernel: Send + Sync + 'static {
    /// Updates element `i` of the parameter and of the states.
    ///
    /// `scalars` are the step's [`Elementwise::scalars`]. `grad` is the element of the gradient as
    /// f32, already multiplied by `grad_scale`.
    fn element(
        i: usize,
        scalars: &Sequence<f32>,
        grad: f32,
        param: &mut Array<f32>,
        states: &mut Sequence<Array<f32>>,
    );
}

/// Returns the index of one of `names`. Called when a kernel is compiled.
///
/// # Panics
/// Panics if `name` is none of them. Another index would be the place of another value.
pub(crate) fn place(names: &[&str], name: &str) -> usize {
    names.iter().position(|other| *other == name).expect("a name of the step")
}

/// Writes element `i` of array `place`, which must be known when the kernel is compiled.
#[cube]
pub(crate) fn write<T: Float>(
    arrays: &mut Sequence<Array<T>>,
    #[comptime] place: usize,
    i: usize,
    value: T,
) {
    let array = arrays.index_mut(place);
    array[i] = value;
}

/// Does the same as [`lerp`](crate::elementwise::lerp) on the CPU.
#[cube]
pub(crate) fn lerp(from: f32, to: f32, weight: f32) -> f32 {
    if weight < 0.5 { from + weight * (to - from) } else { to - (to - from) * (1.0 - weight) }
}

/// Does the same as [`only_if`](crate::elementwise::only_if) on the CPU.
#[cube]
pub(crate) fn only_if(condition: bool, value: f32) -> f32 {
    if condition { value } else { f32::new(0.0) }
}

/// Checks the buffers and launches the kernel of a step with one unit per element. Buffers without
/// elements need no launch.
///
/// # Panics
/// Panics under the same conditions as [`ElementwiseStep::launch`](crate::ElementwiseStep::launch).
pub(crate) fn launch<R: Runtime, S: Elementwise<N> + ElementKernel, const N: usize>(
    client: &ComputeClient<R>,
    step: S,
    grad_scale: f32,
    grad: &DeviceBuffer,
    buffers: OwnedBuffers<'_>,
) {
    let OwnedBuffers { param, states, working } = buffers;
    let Some(states) = states.first_chunk::<N>() else {
        let given = states.len();
        panic!("{}: {given} state buffers were given, and the step updates {N}", S::NAME)
    };
    check::<S, N>(grad, param, states, working);
    if param.is_empty() {
        return;
    }
    let (count, dim) = cubes(client, param.len());
    let written = working.unwrap_or(param).dtype();
    // SAFETY: every unit checks that its element exists.
    unsafe {
        with_element!(grad.dtype(), G => with_element!(written, W => {
            update_kernel::launch_unchecked::<G, W, S, R>(
                client,
                count,
                dim,
                step.scalars().into_iter().collect(),
                grad_scale,
                grad.arg(),
                param.arg(),
                states.iter().map(|state| state.arg()).collect(),
                working.iter().map(|working| working.arg()).collect(),
                working.is_some(),
            );
        }));
    }
}

/// Checks that all buffers have the same length and that all updated buffers are f32. Panics
/// otherwise.
fn check<S: Elementwise<N>, const N: usize>(
    grad: &DeviceBuffer,
    param: &DeviceBuffer,
    states: &[&DeviceBuffer; N],
    working: Option<&DeviceBuffer>,
) {
    let len = param.len();
    let states = S::ARRAYS.into_iter().zip(states.iter().copied());
    let updated = || [("param", param)].into_iter().chain(states.clone());
    for (name, buffer) in updated().chain([("grad", grad)]).chain(working.map(|w| ("working", w))) {
        assert!(
            buffer.len() == len,
            "{}: `{name}` has {} elements and `param` has {len}; they go together, element by element",
            S::NAME,
            buffer.len()
        );
    }
    for (name, buffer) in updated() {
        let dtype = buffer.dtype();
        assert!(dtype == DeviceDType::F32, "{}: `{name}` is {dtype:?}, must be F32", S::NAME);
    }
}

/// Runs a step on one element per unit. `working` is empty or has one array. `writes_working` is
/// known when the kernel is compiled, so steps without a working copy have no branch for it.
#[cube(launch_unchecked)]
fn update_kernel<G: Float, W: Float, S: ElementKernel>(
    scalars: &Sequence<f32>,
    grad_scale: f32,
    grad: &Array<G>,
    param: &mut Array<f32>,
    states: &mut Sequence<Array<f32>>,
    working: &mut Sequence<Array<W>>,
    #[comptime] writes_working: bool,
) {
    let i = ABSOLUTE_POS;
    if i >= param.len() {
        terminate!();
    }
    let g = f32::cast_from(grad[i]) * grad_scale;
    S::element(i, scalars, g, param, states);
    if comptime![writes_working] {
        write::<W>(working, 0usize, i, W::cast_from(param[i]));
    }
}
