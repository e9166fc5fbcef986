//! Element-wise optimizer steps.
//!
//! Main types: [`Elementwise`], the scalars of one step of an optimizer with its loop over a tile,
//! and [`OwnedSlice`], the slices that it updates. Each optimizer has a file with its scalars and,
//! in the macro `elementwise`, the update of one element, which is compiled for the CPU and, with
//! the feature `cube`, for devices. A line of the table in `elementwise_step.rs` registers the
//! optimizer. Threading, 16-bit gradients and working copies are common to all optimizers and
//! implemented here.

use crate::blocks::{BLOCK, PARALLEL_FROM, TILE, check_lengths, vectorized};
use crate::element::Element;
use crate::float_slice::{FloatSlice, with_elements};
use crate::working::WorkingCopy;
use rayon::prelude::*;

/// The scalars of one step of an optimizer with `STATES` state arrays.
///
/// A type implements this for only one number of arrays, so that the table of steps can infer it.
///
/// ```text
/// block of 16,384 elements, one thread
/// tile of 512     gradient --widen--> room --+
///                 param, states -------------+--> tile()  updates in place
///                 param --round--> working copy
/// ```
pub(crate) trait Elementwise<const STATES: usize>: Copy + Send + Sync + 'static {
    /// The name of the optimizer in messages.
    const NAME: &'static str;
    /// The names of the state arrays in messages, in their order.
    const ARRAYS: [&'static str; STATES];

    /// Updates the elements of a tile. All slices have the same length, and the gradient is
    /// multiplied by `grad_scale` when it is read.
    fn tile(self, grad_scale: f32, param: &mut [f32], grad: &[f32], states: [&mut [f32]; STATES]);

    /// Returns the scalars for [`ElementKernel`](crate::cube::ElementKernel), without `grad_scale`.
    #[cfg(feature = "cube")]
    fn scalars(&self) -> Vec<f32>;
}

/// Implements [`Elementwise`] for a step, and with the feature `cube` `ElementKernel` with the same
/// arithmetic: the name of the optimizer in messages, the names of its scalars, which are fields of
/// the step, and the update of an element. The update gets the parameter, the gradient, multiplied
/// by `grad_scale`, and the state arrays, whose names appear in messages. It ends with the new
/// values of what stands behind the arrow.
///
/// ```text
/// |p, g, [m, v]| -> p, [m, v] { .. }       reads and writes the parameter and two states
/// |p, g, [m, v]| -> [m] { .. }             writes only the first state
/// ```
///
/// An update may use operators, [`lerp`], [`only_if`] and functions such as `f32::sqrt(x)`.
macro_rules! elementwise {
    (impl Elementwise<$count:literal> for $step:ident {
        name: $name:literal,
        scalars $(in $part:tt)?: [$($scalar:ident),*],
        |$param:ident, $grad:ident, [$($array:ident),*]| -> $($new:ident,)? [$($changed:ident),*] {
            $($update:tt)*
        }
    }) => {
        impl crate::elementwise::Elementwise<$count> for $step {
            const NAME: &'static str = $name;
            const ARRAYS: [&'static str; $count] = [$(stringify!($array)),*];

            #[inline(always)]
            fn tile(
                self,
                grad_scale: f32,
                param: &mut [f32],
                grad: &[f32],
                [$($array),*]: [&mut [f32]; $count],
            ) {
                // Each slice is an argument of its own, which tells the compiler that they do not
                // overlap. Inlined, so that the loop is compiled for each instruction set.
                #[inline(always)]
                #[allow(unused_imports, clippy::unused_unit)]
                fn update(
                    (step, grad_scale): ($step, f32),
                    param: &mut [f32],
                    grad: &[f32],
                    $($array: &mut [f32]),*
                ) {
                    use crate::elementwise::{lerp, only_if};
                    $(let step = step.$part;)?
                    $(let $scalar = step.$scalar;)*
                    // All slices have one length, so the loop needs no checks.
                    let len = param.len();
                    let grad = &grad[..len];
                    $(let $array = &mut $array[..len];)*
                    for i in 0..len {
                        ($($changed[i],)*) = {
                            // A formula need not read all of them, but each scalar that it lists.
                            #[allow(unused_variables)]
                            let ($param, $grad) = (param[i], grad[i] * grad_scale);
                            $(
                                #[allow(unused_variables)]
                                let $array = $array[i];
                            )*
                            $($update)*
                            $(param[i] = $new;)?
                            ($($changed,)*)
                        };
                    }
                }
                update((self, grad_scale), param, grad, $($array),*);
            }

            #[cfg(feature = "cube")]
            fn scalars(&self) -> Vec<f32> {
                let step = self;
                $(let step = &step.$part;)?
                vec![$(step.$scalar),*]
            }
        }

        #[cfg(feature = "cube")]
        const _: () = {
            #[allow(unused_imports)]
            use crate::cube::{ElementKernel, lerp, only_if, place, write};
            use cubecl::prelude::*;

            const SCALARS: &[&str] = &[$(stringify!($scalar)),*];
            #[allow(dead_code)]
            const ARRAYS: &[&str] = &[$(stringify!($array)),*];

            #[cube]
            impl ElementKernel for $step {
                #[allow(unused_variables)]
                fn element(
                    i: usize,
                    scalars: &Sequence<f32>,
                    $grad: f32,
                    param: &mut Array<f32>,
                    states: &mut Sequence<Array<f32>>,
                ) {
                    $(let $scalar = scalars[comptime![place(SCALARS, stringify!($scalar))]];)*
                    let $param = param[i];
                    $(let $array = states[comptime![place(ARRAYS, stringify!($array))]][i];)*
                    $($update)*
                    $(write::<f32>(states, comptime![place(ARRAYS, stringify!($changed))], i, $changed);)*
                    $(param[i] = $new;)?
                }
            }
        };
    };
}
pub(crate) use elementwise;

/// Returns `from + weight * (to - from)`. It is computed from the nearer end, so that weight 1
/// returns exactly `to`.
#[inline(always)]
pub(crate) fn lerp(from: f32, to: f32, weight: f32) -> f32 {
    if weight < 0.5 { from + weight * (to - from) } else { to - (to - from) * (1.0 - weight) }
}

/// Returns `value` if `condition` is true, and otherwise 0.
#[inline(always)]
pub(crate) fn only_if(condition: bool, value: f32) -> f32 {
    if condition { value } else { 0.0 }
}

/// The slices that one step updates, all of equal length.
#[derive(Debug)]
pub struct OwnedSlice<'a, 's> {
    /// The master weights.
    pub param: &'a mut [f32],
    /// The optimizer states, zero before the first step. A step uses the first
    /// [`ElementwiseStep::states`](crate::ElementwiseStep::states) of them and does not touch the
    /// others.
    pub states: &'a mut [&'s mut [f32]],
    /// The 16-bit working copy, which receives the rounded updated weights.
    pub working: Option<WorkingCopy<'a>>,
}

/// Returns the names of a step's arrays.
pub(crate) fn array_names<S: Elementwise<N>, const N: usize>(_: &S) -> [&'static str; N] {
    S::ARRAYS
}

/// Checks the lengths and selects the loop for the types of gradient and working copy.
///
/// # Panics
/// Panics if the slices differ in length or there are fewer state arrays than the step uses.
pub(crate) fn update<S: Elementwise<N>, const N: usize>(
    step: S,
    grad_scale: f32,
    grad: FloatSlice<'_>,
    slice: OwnedSlice<'_, '_>,
) {
    let OwnedSlice { param, states, working } = slice;
    let (len, given) = (param.len(), states.len());
    let Some(states) = states.first_chunk_mut::<N>() else {
        panic!("{}: {given} state arrays were given, and the step updates {N}", S::NAME)
    };
    let states = states.each_mut().map(|state| &mut **state);
    let working_len = working.as_ref().map_or(len, WorkingCopy::len);
    let others = [("grad", grad.len()), ("working", working_len)];
    check_lengths(S::NAME, ("param", len), &others);
    for (name, state) in S::ARRAYS.into_iter().zip(&states) {
        check_lengths(S::NAME, ("param", len), &[(name, state.len())]);
    }
    with_elements!(grad, grad => match working {
        // A slice of zero-sized elements, so nothing is allocated or written.
        None => {
            update_all(step, grad_scale, Slices { param, grad, states, working: &mut vec![(); len] });
        }
        Some(WorkingCopy::F16(working)) => {
            update_all(step, grad_scale, Slices { param, grad, states, working });
        }
        Some(WorkingCopy::Bf16(working)) => {
            update_all(step, grad_scale, Slices { param, grad, states, working });
        }
    });
}

/// An [`OwnedSlice`] with its gradient, or a range of both.
pub(crate) struct Slices<'a, G, W, const STATES: usize> {
    /// The master weights.
    pub(crate) param: &'a mut [f32],
    /// The gradient in its own type.
    pub(crate) grad: &'a [G],
    /// The optimizer states that the step uses.
    pub(crate) states: [&'a mut [f32]; STATES],
    /// The working copy; elements of type `()` if there is none.
    pub(crate) working: &'a mut [W],
}

impl<G, W, const N: usize> Slices<'_, G, W, N> {
    /// Splits the slices at a block boundary near the middle. A single block is not split.
    fn split(self) -> (Self, Option<Self>) {
        let len = self.param.len();
        if len <= BLOCK {
            return (self, None);
        }
        // Parts end at multiples of a block. Elements do not depend on each other, so the division
        // does not change results; it only keeps the tiles full.
        let middle = len.div_ceil(BLOCK) / 2 * BLOCK;
        let (param, param_tail) = self.param.split_at_mut(middle);
        let (grad, grad_tail) = self.grad.split_at(middle);
        let (working, working_tail) = self.working.split_at_mut(middle);
        let mut states = self.states;
        let tails = states.each_mut().map(|state| {
            state.split_off_mut(middle..).expect("all slices have one length, which is checked")
        });
        let tail =
            Self { param: param_tail, grad: grad_tail, states: tails, working: working_tail };
        (Self { param, grad, states, working }, Some(tail))
    }
}

/// Processes all elements: on the calling thread if there are fewer than [`PARALLEL_FROM`],
/// otherwise in blocks on all threads.
fn update_all<S: Elementwise<N>, G: Element, W: Element, const N: usize>(
    step: S,
    grad_scale: f32,
    slices: Slices<'_, G, W, N>,
) {
    let part = |slices| vectorized!(update_tiles(step, grad_scale, slices));
    if slices.param.len() < PARALLEL_FROM {
        part(slices);
    } else {
        rayon::iter::split(slices, Slices::split).for_each(part);
    }
}

/// Processes elements tile by tile on this thread. A tile is widened, updated and rounded while it
/// is in the first-level cache.
#[inline(always)]
pub(crate) fn update_tiles<S: Elementwise<N>, G: Element, W: Element, const N: usize>(
    step: S,
    grad_scale: f32,
    slices: Slices<'_, G, W, N>,
) {
    let Slices { param, grad, states, working } = slices;
    let mut room = [0.0; TILE];
    let mut state_tiles = states.map(|state| state.chunks_mut(TILE));
    let tiles = param.chunks_mut(TILE).zip(grad.chunks(TILE)).zip(working.chunks_mut(TILE));
    for ((param, grad), working) in tiles {
        let grad = G::widen_all(grad, &mut room[..grad.len()]);
        let states = state_tiles
            .each_mut()
            .map(|tiles| tiles.next().expect("all slices have one length, which is checked"));
        step.tile(grad_scale, param, grad, states);
        W::narrow_all(param, working);
    }
}
