//! One step of any element-wise optimizer.
//!
//! Main type: [`ElementwiseStep`], declared by a table with one line per optimizer.

use crate::elementwise::{array_names, update};
use crate::{
    AdagradStep, AdamStep, AgreedMovementStep, DescentStep, FloatSlice, FrozenAdamStep,
    FrozenLambStep, LambStep, LionStep, LocalAdamStep, LocalMomentumStep, LocalMovementStep,
    MuonMomentumStep, OwnedSlice, Sgd, SgdMomentumStep, SgdStep,
};

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

            /// Updates a slice in one pass. The gradient is converted to f32 element by element and
            /// multiplied by `grad_scale`.
            ///
            /// # Panics
            /// Panics if the slices differ in length, or if there are fewer state arrays than the
            /// step uses.
            pub fn update(&self, grad_scale: f32, grad: FloatSlice<'_>, slice: OwnedSlice<'_, '_>) {
                match *self {
                    $(Self::$variant(step) => update(step, grad_scale, grad, slice),)+
                }
            }

            /// Queues the step on a device as a single pass over the elements, like
            /// [`update`](Self::update) on the CPU. A launch updates up to eight parameters.
            ///
            /// # Panics
            /// Panics if the buffers of a parameter differ in length, if a buffer that is updated
            /// is not f32, if there are fewer state buffers than the step uses, or if parameters
            /// differ in the types of their gradients or working copies.
            #[cfg(feature = "cube")]
            pub fn launch<R: cubecl::Runtime>(
                &self,
                client: &cubecl::client::ComputeClient<R>,
                grad_scale: f32,
                updates: &[crate::cube::DeviceUpdate<'_>],
            ) {
                match *self {
                    $(Self::$variant(step) => {
                        crate::cube::launch(client, step, grad_scale, updates);
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
    /// LAMB's moments and direction. Arrays: both moments and the direction. Does not change the
    /// parameter.
    Lamb(LambStep),
    /// Muon's momentum and direction. Arrays: the momentum and the direction. Does not change the
    /// parameter.
    MuonMomentum(MuonMomentumStep),
    /// A step along a direction, which is passed as the gradient. No arrays.
    Descent(DescentStep),
    /// 1-bit Adam's local momentum, computed from the rank's own gradient. Arrays: both moments and
    /// the local momentum. Only the local momentum changes.
    LocalMomentum(LocalMomentumStep),
    /// 1-bit Adam's update along the averaged momentum, which is passed as the gradient. Arrays:
    /// both moments. The second moment does not change.
    FrozenAdam(FrozenAdamStep),
    /// 1-bit LAMB's moments and direction for the averaged momentum, which is passed as the
    /// gradient. Arrays: both moments, the fresh second moment and the direction. The parameter and
    /// the frozen second moment do not change.
    FrozenLamb(FrozenLambStep),
    /// 0/1 Adam's local step with the rank's own gradient. Arrays: both moments, the movement since
    /// the last exchange, and the common parameter. The second moment does not change.
    LocalAdam(LocalAdamStep),
    /// 0/1 Adam's local movement. Arrays: both moments, the movement before the step, and the
    /// movement to exchange. Only the movement to exchange changes.
    LocalMovement(LocalMovementStep),
    /// 0/1 Adam's update along the mean movement, which is passed as the gradient. The arrays are
    /// the same as for the local step.
    AgreedMovement(AgreedMovementStep),
}

impl Sgd {
    /// Returns step `t`, counted from 1. With a momentum factor of 0, the step needs no state and
    /// does not change a momentum array that is passed.
    ///
    /// # Panics
    /// Panics if `t` is 0.
    pub fn step(&self, t: u64) -> ElementwiseStep {
        let gain = self.gradient_gain(t) as f32;
        match self.keeps_momentum() {
            true => SgdMomentumStep::new(self, gain).into(),
            false => SgdStep::new(self).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{PARALLEL_FROM, TILE};
    use crate::tests::{Held, in_pool, noise, strong_noise, with_values_anywhere};
    use crate::{
        Adagrad, Adam, FrozenAdam, FrozenLamb, Lamb, Lion, MuonMomentum, Sgd, WeightDecay,
    };
    use proptest::prelude::*;

    /// Returns every step, with settings that use all scalars of the step.
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
            AdamStep::new(&Adam { weight_decay: WeightDecay::Decoupled(0.1), ..adam }, 3).into(),
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

    /// Returns parameter and states after a step, and the working copy in the format of `grad`.
    fn run(step: ElementwiseStep, grad: &Held) -> (Vec<Vec<f32>>, Held) {
        let len = grad.gradient().len();
        let mut param = noise(len, 1);
        let states = (0..step.states()).map(|i| strong_noise(len, 2 + i as u64));
        // The states are positive, because some of them are sums of squares.
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
                // The working copy is exactly the rounded parameter.
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

    proptest! {
        /// The NaN or infinity stays visible in an array of its own element.
        #[test]
        fn a_bad_gradient_stays_alone((grad, bad) in with_values_anywhere(200)) {
            for (step, grad) in steps().into_iter().flat_map(|step| Held::all(&grad).map(|grad| (step, grad))) {
                let (arrays, working) = run(step, &grad);
                for i in 0..arrays[0].len() {
                    let is_finite = arrays.iter().all(|array| array[i].is_finite());
                    prop_assert_eq!(is_finite, !bad.contains(&i), "{:?}", step);
                    // Without a working copy, this is the gradient itself.
                    prop_assert!(working.gradient().get(i).is_finite() || bad.contains(&i));
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "adam: 1 state arrays were given, and the step updates 2")]
    fn a_missing_array_is_refused() {
        let slice = OwnedSlice { param: &mut [0.0], states: &mut [&mut [0.0]], working: None };
        steps()[0].update(1.0, FloatSlice::F32(&[0.0]), slice);
    }
}
