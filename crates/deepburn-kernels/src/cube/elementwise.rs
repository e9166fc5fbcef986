//! Element-wise optimizer steps on a device, in one launch for up to eight parameters.
//!
//! Main trait: [`ElementKernel`], a step's function for one element. All optimizers share the
//! kernel that calls this function:
//!
//! ```text
//! cubes       parameter 0's | parameter 1's | ...        a cube has 256 elements of one parameter
//! unit i      g = f32(grad[i]) * grad_scale
//!             step.element(i, scalars, g, param, states)      updates param[i] and states[..][i]
//!             working[i] = W(param[i])                        if there is a working copy
//! scalars     the step's scalars ..., grad_scale              arguments of the launch
//! ```
//!
//! Scalars are arguments of the launch instead of constants, so the kernel is compiled only once
//! per training run although the learning rate changes in every step. An array of them would have
//! to be copied to the device for each launch.

use cubecl::prelude::*;

use super::device_buffer::{
    CUBE_DIM, DeviceBuffer, DeviceDType, cubes, items_at_once, with_element,
};
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

/// A parameter that a step updates.
#[derive(Debug)]
pub struct DeviceUpdate<'a> {
    /// The gradient, in f32, f16 or bf16.
    pub grad: &'a DeviceBuffer,
    /// The buffers that the step updates, of the same length.
    pub buffers: OwnedBuffers<'a>,
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

/// Checks the buffers and launches the kernel of a step, with one unit per element, for as many
/// parameters at once as the device takes. Buffers without elements need no launch.
///
/// # Panics
/// Panics under the same conditions as [`ElementwiseStep::launch`](crate::ElementwiseStep::launch).
pub(crate) fn launch<R: Runtime, S: Elementwise<N> + ElementKernel, const N: usize>(
    client: &ComputeClient<R>,
    step: S,
    grad_scale: f32,
    updates: &[DeviceUpdate<'_>],
) {
    updates.iter().for_each(check::<S, N>);
    let updates: Vec<_> = updates.iter().filter(|update| !update.grad.is_empty()).collect();
    let Some(first) = updates.first() else { return };
    let types = |update: &DeviceUpdate<'_>| {
        (update.grad.dtype(), update.buffers.working.map(DeviceBuffer::dtype))
    };
    let are_alike = updates.iter().all(|update| types(update) == types(first));
    assert!(are_alike, "{}: the parameters of a launch have different types", S::NAME);
    let (grad, working) = types(first);
    // Gradient, parameter, states and working copy.
    let at_once = items_at_once(client, 3 + N, 0);
    for group in updates.chunks(at_once) {
        with_element!(grad, G => with_element!(working.unwrap_or(DeviceDType::F32), W => {
            launch_at_once::<R, S, G, W, N>(client, &step, grad_scale, group);
        }));
    }
}

/// Launches the kernel once for parameters with gradients `G` and working copies `W`.
fn launch_at_once<
    R: Runtime,
    S: Elementwise<N> + ElementKernel,
    G: Float + CubeElement,
    W: Float + CubeElement,
    const N: usize,
>(
    client: &ComputeClient<R>,
    step: &S,
    grad_scale: f32,
    updates: &[&DeviceUpdate<'_>],
) {
    let cubes_of = |update: &&DeviceUpdate<'_>| update.grad.len().div_ceil(CUBE_DIM as usize);
    let all: usize = updates.iter().map(cubes_of).sum();
    let (count, dim) = cubes(client, all * CUBE_DIM as usize);
    let buffers = || updates.iter().map(|update| &update.buffers);
    let states =
        |buffers: &OwnedBuffers<'_>| buffers.states[..N].iter().map(|state| state.arg()).collect();
    // SAFETY: every unit checks that its element exists.
    unsafe {
        update_kernel::launch_unchecked::<G, W, S, R>(
            client,
            count,
            dim,
            step.scalars().into_iter().collect(),
            grad_scale,
            updates.iter().map(cubes_of).collect(),
            updates.iter().map(|update| update.grad.arg()).collect(),
            buffers().map(|buffers| buffers.param.arg()).collect(),
            buffers().map(states).collect(),
            buffers().filter_map(|buffers| buffers.working).map(DeviceBuffer::arg).collect(),
            updates[0].buffers.working.is_some(),
        );
    }
}

/// Checks that all buffers have the same length, that all updated buffers are f32, and that there
/// are as many states as the step updates. Panics otherwise.
fn check<S: Elementwise<N>, const N: usize>(update: &DeviceUpdate<'_>) {
    let &DeviceUpdate { grad, buffers: OwnedBuffers { param, states, working } } = update;
    let Some(states) = states.first_chunk::<N>() else {
        let given = states.len();
        panic!("{}: {given} state buffers were given, and the step updates {N}", S::NAME)
    };
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

/// Runs a step on one element per unit. `cubes` are the numbers of cubes of the parameters.
/// `working` is empty or has one array for each. `writes_working` is known when the kernel is
/// compiled, so steps without a working copy have no branch for it.
#[cube(launch_unchecked)]
fn update_kernel<G: Float, W: Float, S: ElementKernel>(
    scalars: &Sequence<f32>,
    grad_scale: f32,
    cubes: &Sequence<usize>,
    grads: &Sequence<Array<G>>,
    params: &mut Sequence<Array<f32>>,
    states: &mut Sequence<Sequence<Array<f32>>>,
    working: &mut Sequence<Array<W>>,
    #[comptime] writes_working: bool,
) {
    let mut before = 0usize;
    #[unroll]
    for index in 0..grads.len() {
        let after = before + cubes[index];
        if CUBE_POS >= before && CUBE_POS < after {
            let i = (CUBE_POS - before) * CUBE_DIM as usize + UNIT_POS as usize;
            let param = params.index_mut(index);
            if i < param.len() {
                let g = f32::cast_from(grads[index][i]) * grad_scale;
                S::element(i, scalars, g, param, states.index_mut(index));
                if comptime![writes_working] {
                    write::<W>(working, index, i, W::cast_from(param[i]));
                }
            }
        }
        before = after;
    }
}
