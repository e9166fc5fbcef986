//! Element-wise optimizer steps.
//!
//! Main types: [`ElementwiseStep`], the scalars of one step of any optimizer,
//! and [`OwnedSlice`], the slices that it updates. An optimizer is a file with
//! its reference, its loop over a tile ([`Elementwise`]) and, with the feature
//! `cube`, its function for one element on a device. A line of the table below
//! registers it. Threads, 16-bit gradients and working copies are common to all
//! optimizers and implemented here.

use crate::blocks::{BLOCK, PARALLEL_FROM, TILE, check_lengths, vectorized};
use crate::element::Element;
use crate::float_slice::{FloatSlice, with_elements};
use crate::working::WorkingCopy;
use crate::{
    AdagradStep, AdamStep, AgreedMovementStep, DescentStep, FrozenAdamStep, FrozenLambStep,
    LambStep, LionStep, LocalAdamStep, LocalMomentumStep, LocalMovementStep, MuonMomentumStep,
    SgdMomentumStep, SgdStep,
};
use rayon::prelude::*;

/// The scalars of one step of an optimizer with `STATES` arrays beside the
/// parameter.
///
/// A type implements this for only one number of arrays, so that the table of
/// steps can infer it.
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
    /// The names of the arrays in messages, in the order of
    /// [`Elementwise::tile`]'s arguments.
    const ARRAYS: [&'static str; STATES];

    /// Updates some elements. All slices have the same length, and the gradient
    /// is multiplied by `grad_scale` when it is read.
    ///
    /// Implementations are marked `#[inline(always)]`, so that their loop is
    /// compiled for each instruction set. The loop takes each slice as a
    /// separate argument, which tells the compiler that they do not overlap.
    fn tile(self, grad_scale: f32, param: &mut [f32], grad: &[f32], states: [&mut [f32]; STATES]);

    /// Returns the scalars for [`ElementKernel`](crate::cube::ElementKernel),
    /// without the factor of the gradient.
    #[cfg(feature = "cube")]
    fn scalars(&self) -> Vec<f32>;
}

/// The slices that one step updates, all of equal length.
#[derive(Debug)]
pub struct OwnedSlice<'a, 's> {
    /// The master parameter.
    pub param: &'a mut [f32],
    /// The optimizer's arrays, zero before the first step. A step uses the
    /// first [`ElementwiseStep::states`] of them and does not touch the others.
    pub states: &'a mut [&'s mut [f32]],
    /// The 16-bit copy, to which the rounded new parameter is written.
    pub working: Option<WorkingCopy<'a>>,
}

/// Declares [`ElementwiseStep`] with a variant for each optimizer.
macro_rules! elementwise_steps {
    ($($(#[doc = $doc:literal])+ $variant:ident($step:ty),)+) => {
        /// One step of an optimizer: its scalars, computed in `f64` and narrowed once.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub enum ElementwiseStep {
            $($(#[doc = $doc])+ $variant($step),)+
        }

        $(impl From<$step> for ElementwiseStep {
            fn from(step: $step) -> Self {
                Self::$variant(step)
            }
        })+

        impl ElementwiseStep {
            /// Returns the number of state arrays that the step uses.
            pub fn states(&self) -> usize {
                match self {
                    $(Self::$variant(step) => array_names(step).len(),)+
                }
            }

            /// Updates a slice in one pass. The gradient is converted to f32
            /// element by element and multiplied by `grad_scale`.
            ///
            /// # Panics
            /// When the slices differ in length or there are fewer state arrays than the step uses.
            pub fn update(&self, grad_scale: f32, grad: FloatSlice<'_>, slice: OwnedSlice<'_, '_>) {
                match *self {
                    $(Self::$variant(step) => update(step, grad_scale, grad, slice),)+
                }
            }

            /// Runs the same step on a device.
            #[cfg(feature = "cube")]
            pub(crate) fn launch<R: cubecl::Runtime>(
                &self,
                client: &cubecl::client::ComputeClient<R>,
                grad_scale: f32,
                grad: &crate::cube::Buffer,
                buffers: crate::cube::OwnedBuffers<'_>,
            ) {
                match *self {
                    $(Self::$variant(step) => {
                        crate::cube::launch(client, step, grad_scale, grad, buffers);
                    })+
                }
            }
        }
    };
}

elementwise_steps! {
    /// Adam and AdamW. Arrays: first and second moment.
    Adam(AdamStep),
    /// Gradient descent without momentum. No arrays.
    Sgd(SgdStep),
    /// Gradient descent with momentum. Array: the momentum.
    SgdMomentum(SgdMomentumStep),
    /// Lion. Array: the momentum.
    Lion(LionStep),
    /// Adagrad. Array: the accumulated squares.
    Adagrad(AdagradStep),
    /// LAMB's moments and direction. Arrays: both moments and the direction. The parameter does not
    /// change.
    Lamb(LambStep),
    /// Muon's momentum and direction. Arrays: the momentum and the direction. The parameter does
    /// not change.
    MuonMomentum(MuonMomentumStep),
    /// A step along a direction, which is passed as the gradient. No arrays.
    Descent(DescentStep),
    /// 1-bit Adam's momentum of a rank's own gradient. Arrays: both moments and the local momentum.
    /// Only the local momentum changes.
    LocalMomentum(LocalMomentumStep),
    /// 1-bit Adam's update along a momentum, which is passed as the gradient. Arrays: both moments.
    /// The second one does not change.
    FrozenAdam(FrozenAdamStep),
    /// 1-bit LAMB's moments and direction for a momentum, which is passed as the gradient. Arrays:
    /// both moments, the fresh second moment and the direction. The parameter and the frozen second
    /// moment do not change.
    FrozenLamb(FrozenLambStep),
    /// 0/1 Adam's step with a rank's own gradient. Arrays: both moments, the movement since the
    /// last exchange, and the common parameter. The second moment does not change.
    LocalAdam(LocalAdamStep),
    /// 0/1 Adam's movement of a rank. Arrays: both moments, the movement before the step, and the
    /// movement to exchange. Only the last one changes.
    LocalMovement(LocalMovementStep),
    /// 0/1 Adam's update along the mean movement, which is passed as the gradient. The arrays are
    /// those for the local step.
    AgreedMovement(AgreedMovementStep),
}

/// Returns the names of a step's arrays.
fn array_names<S: Elementwise<N>, const N: usize>(_: &S) -> [&'static str; N] {
    S::ARRAYS
}

/// Checks the lengths and selects the loop for the types of gradient and working copy.
///
/// # Panics
///
/// Panics if the slices differ in length or there are fewer state arrays than the step uses.
fn update<S: Elementwise<N>, const N: usize>(
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
        // A slice of elements of size zero: nothing is allocated or written.
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

/// An [`OwnedSlice`] with its gradient, or a part of both.
pub(crate) struct Slices<'a, G, W, const STATES: usize> {
    /// The master parameter.
    pub(crate) param: &'a mut [f32],
    /// The gradient in its own type.
    pub(crate) grad: &'a [G],
    /// The arrays of the optimizer that the step uses.
    pub(crate) states: [&'a mut [f32]; STATES],
    /// The working copy; elements of type `()` if there is none.
    pub(crate) working: &'a mut [W],
}

impl<G, W, const N: usize> Slices<'_, G, W, N> {
    /// Splits the slices at a block near the middle; a single block is not
    /// split.
    fn split(self) -> (Self, Option<Self>) {
        let len = self.param.len();
        if len <= BLOCK {
            return (self, None);
        }
        // Parts end at multiples of a block. Elements do not depend on each other, so the division
        // changes no bits; it only keeps the tiles full.
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

/// Processes all elements, on the calling thread below [`PARALLEL_FROM`] and otherwise in blocks on
/// all threads.
fn update_all<S: Elementwise<N>, G: Element, W: Element, const N: usize>(
    step: S,
    grad_scale: f32,
    slices: Slices<'_, G, W, N>,
) {
    let part = |slices| {
        vectorized(
            #[inline(always)]
            || update_tiles(step, grad_scale, slices),
        )
    };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Held, in_pool, noise, strong_noise};
    use crate::{
        Adagrad, Adam, FrozenAdam, FrozenLamb, Lamb, Lion, MuonMomentum, Sgd, WeightDecay,
    };

    /// Every step, with settings that use all of its scalars.
    fn steps() -> Vec<ElementwiseStep> {
        let adam = Adam {
            lr: 0.1,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: WeightDecay::L2(0.1),
            bias_correction: true,
        };
        let sgd =
            Sgd { lr: 0.1, momentum: 0.0, dampening: 0.0, weight_decay: 0.1, nesterov: false };
        let lion = Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
        let adagrad = Adagrad { lr: 0.01, eps: 1e-10, weight_decay: 0.1 };
        let lamb =
            Lamb { beta1: 0.9, beta2: 0.999, eps: 1e-8, eps_inside_sqrt: false, weight_decay: 0.1 };
        let muon = MuonMomentum { momentum: 0.95, nesterov: true };
        let frozen = FrozenAdam { lr: 0.1, beta1: 0.9, eps: 1e-8, weight_decay: 0.1 };
        vec![
            AdamStep::new(&adam, 2).into(),
            sgd.step(2),
            Sgd { momentum: 0.9, dampening: 0.5, ..sgd }.step(2),
            Sgd { momentum: 0.9, nesterov: true, ..sgd }.step(2),
            LionStep::new(&lion).into(),
            AdagradStep::new(&adagrad).into(),
            LambStep::new(&lamb).into(),
            LambStep::new(&Lamb { eps_inside_sqrt: true, ..lamb }).into(),
            MuonMomentumStep::new(&muon).into(),
            MuonMomentumStep::new(&MuonMomentum { nesterov: false, ..muon }).into(),
            DescentStep::new(0.999, 0.02).into(),
            LocalMomentumStep::new(0.9).into(),
            FrozenAdamStep::new(&frozen).into(),
            LocalAdamStep::new(&frozen).into(),
            LocalMovementStep::new(&frozen).into(),
            AgreedMovementStep::new(&frozen, 0.3).into(),
            FrozenLambStep::new(&FrozenLamb {
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.1,
            })
            .into(),
        ]
    }

    /// Parameter and states after a step, and the working copy in the format of `grad`.
    fn run(step: ElementwiseStep, grad: &Held) -> (Vec<Vec<f32>>, Held) {
        let len = grad.gradient().len();
        let mut param = noise(len, 1);
        let states = (0..step.states()).map(|i| strong_noise(len, 2 + i as u64));
        // Of one sign: some of them are sums of squares.
        let mut states: Vec<Vec<f32>> =
            states.map(|state| state.into_iter().map(f32::abs).collect()).collect();
        let mut working = grad.clone();
        let slice = OwnedSlice {
            param: &mut param,
            states: &mut states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            working: working.working_copy(),
        };
        step.update(0.5, grad.gradient(), slice);
        states.insert(0, param);
        (states, working)
    }

    #[test]
    fn gradients_in_16_bits_do_what_the_same_numbers_in_32_do() {
        for step in steps() {
            for (kind, grad) in Held::all(&noise(3 * TILE + 5, 9)).iter().enumerate() {
                let mut widened = vec![0.0; 3 * TILE + 5];
                crate::widen(grad.gradient(), &mut widened);
                let (found, working) = run(step, grad);
                let (expected, _) = run(step, &Held::F32(widened));
                assert!(found == expected, "{step:?}");
                // The working copy is the parameter, rounded: to the bit.
                assert!(kind == 0 || working == Held::all(&found[0])[kind], "{step:?}");
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        for step in steps() {
            for grad in Held::all(&noise(3 * PARALLEL_FROM + 5, 9)) {
                let [one, two, three] = [1, 2, 3].map(|n| in_pool(n, || run(step, &grad)));
                assert!(one == two && one == three, "{step:?}");
            }
        }
    }

    #[test]
    fn padding_stays_zero() {
        for step in steps() {
            for grad in Held::all(&[0.0; 5]) {
                let mut arrays = vec![[0.0_f32; 5]; 1 + step.states()];
                let mut slices: Vec<_> = arrays.iter_mut().map(|it| &mut it[..]).collect();
                let (param, states) = slices.split_first_mut().unwrap();
                let mut working = grad.clone();
                let slice = OwnedSlice { param, states, working: working.working_copy() };
                step.update(0.5, grad.gradient(), slice);
                assert!(arrays.iter().flatten().all(|x| *x == 0.0), "{step:?}");
                assert_eq!(working, grad);
            }
        }
    }

    #[test]
    fn arrays_that_a_step_does_not_use_stay_as_they_are() {
        for step in steps() {
            let (mut param, mut states) = ([1.0], vec![[0.5_f32]; step.states()]);
            let mut unused = [3.0];
            let mut slices: Vec<_> = states.iter_mut().map(|it| &mut it[..]).collect();
            slices.push(&mut unused);
            let slice = OwnedSlice { param: &mut param, states: &mut slices, working: None };
            step.update(1.0, FloatSlice::F32(&[1.0]), slice);
            assert_eq!(unused, [3.0]);
        }
    }

    #[test]
    #[should_panic(expected = "adam: 1 state arrays were given, and the step updates 2")]
    fn a_missing_array_is_refused() {
        let slice = OwnedSlice { param: &mut [0.0], states: &mut [&mut [0.0]], working: None };
        steps()[0].update(1.0, FloatSlice::F32(&[0.0]), slice);
    }
}
