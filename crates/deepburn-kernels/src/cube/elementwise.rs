//! Optimizer steps that look at one element at a time, in one launch.
//!
//! Main trait: [`ElementKernel`], what a step does with one element. The kernel around it is the same for
//! every optimizer.

use cubecl::prelude::*;

use super::buffer::{Buffer, ElementType, cubes, with_element};
use crate::ElementwiseStep;
use crate::elementwise::Elementwise;

/// The buffers that one step updates, of one length, each of its own memory.
#[derive(Debug)]
pub struct OwnedBuffers<'a> {
    /// The parameter, f32.
    pub param: &'a Buffer,
    /// The optimizer's arrays, f32. A step uses the first [`ElementwiseStep::states`] of them and leaves
    /// others alone.
    pub states: &'a [&'a Buffer],
    /// Gets the updated parameter in 16 bits.
    pub working: Option<&'a Buffer>,
}

/// One fused pass, as [`ElementwiseStep::update`] on the CPU.
///
/// # Panics
/// When the buffers differ in length, those that are updated are not f32, or there are fewer state buffers
/// than the step uses.
pub fn update<R: Runtime>(
    client: &ComputeClient<R>,
    step: &ElementwiseStep,
    grad_scale: f32,
    grad: &Buffer,
    buffers: OwnedBuffers<'_>,
) {
    step.launch(client, grad_scale, grad, buffers);
}

/// What a step does with one element, in the arithmetic of its CPU version.
#[cube]
pub(crate) trait ElementKernel: Send + Sync + 'static {
    /// Updates element `i` of the parameter and of the states. `scalars` belong to
    /// [`Elementwise::scalars`], and `grad` is the element of the gradient, already multiplied by its factor.
    fn element(
        i: usize,
        scalars: &Array<f32>,
        grad: f32,
        param: &mut Array<f32>,
        states: &mut Sequence<Array<f32>>,
    );
}

/// Writes an element of one of the states.
#[cube]
pub(crate) fn write(
    states: &mut Sequence<Array<f32>>,
    #[comptime] state: usize,
    i: usize,
    value: f32,
) {
    let array = states.index_mut(state);
    array[i] = value;
}

/// `from + weight * (to - from)`, from the nearer end, so that weight 1 gives `to` to the bit.
#[cube]
pub(crate) fn lerp(from: f32, to: f32, weight: f32) -> f32 {
    if weight < 0.5 { from + weight * (to - from) } else { to - (to - from) * (1.0 - weight) }
}

pub(crate) fn launch<R: Runtime, S: Elementwise<N> + ElementKernel, const N: usize>(
    client: &ComputeClient<R>,
    step: S,
    grad_scale: f32,
    grad: &Buffer,
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
    let mut scalars = step.scalars();
    scalars.push(grad_scale);
    let scalars = Buffer::new(
        client.create_from_slice(f32::as_bytes(&scalars)),
        scalars.len(),
        ElementType::F32,
    );
    let (count, dim) = cubes(client, param.len());
    let written = working.unwrap_or(param).dtype();
    // Without a working copy the last argument is a buffer that the kernel leaves alone.
    let unused = Buffer::empty(client, 1, written);
    // SAFETY: every unit checks that its element exists.
    unsafe {
        with_element!(grad.dtype(), G => with_element!(written, W => {
            update_kernel::launch_unchecked::<G, W, S, R>(
                client,
                count,
                dim,
                scalars.arg(),
                grad.arg(),
                param.arg(),
                states.iter().map(|state| state.arg()).collect(),
                working.unwrap_or(&unused).arg(),
                working.is_some(),
            );
        }));
    }
}

/// Panics unless the buffers have one length, and those that are updated are f32.
fn check<S: Elementwise<N>, const N: usize>(
    grad: &Buffer,
    param: &Buffer,
    states: &[&Buffer; N],
    working: Option<&Buffer>,
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
        assert!(dtype == ElementType::F32, "{}: `{name}` is {dtype:?}, must be F32", S::NAME);
    }
}

#[cube(launch_unchecked)]
fn update_kernel<G: Float, W: Float, S: ElementKernel>(
    scalars: &Array<f32>,
    grad: &Array<G>,
    param: &mut Array<f32>,
    states: &mut Sequence<Array<f32>>,
    working: &mut Array<W>,
    #[comptime] writes_working: bool,
) {
    let i = ABSOLUTE_POS;
    if i >= param.len() {
        terminate!();
    }
    let g = f32::cast_from(grad[i]) * scalars[scalars.len() - 1];
    S::element(i, scalars, g, param, states);
    if comptime![writes_working] {
        working[i] = W::cast_from(param[i]);
    }
}
