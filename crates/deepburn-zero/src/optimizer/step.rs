//! One optimizer step, parameter by parameter.
//!
//! Main type: `StepInProgress`. Most updates are one pass over the elements. An update that depends
//! on norms, matrices or averaged momenta needs two passes with an exchange between ranks:
//!
//! ```text
//! update   (gradient, moments, values) ──────────────────────────► values
//! direct   (gradient, moments) ──► direction    the values do not change
//!                                      │        the caller exchanges norms, matrices or momenta
//! descend                   (direction, values) ─────────────────► values
//! ```
//!
//! If ranks average momenta, the direction is the momentum. A direction is an additional f32 array
//! of the owned length. It is counted as bucket memory and exists from `direct` to `descend`. The
//! caller limits the number of directions that exist at the same time (`rounds.rs`).

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use deepburn_config::MuonPlan;
use deepburn_kernels::{DescentStep, ElementwiseStep, TreeSum, trust_ratio};
use deepburn_nvme::SwapError;
use deepburn_ops::OptimizerOps;

use super::parked::HostUpdate;
use super::rule::UpdateStep;
use super::tiered_state::{DeviceState, ReadValues, TieredState, zeros};
use super::{Optimizer, Squares, UpdateGradient, UpdateValues, newton_schulz};
use crate::assignment::Matrices;
use crate::ledger::{Category, Lease, Ledger};
use crate::offload::{ParkedArray, WriteBehind};

/// The largest number of elements of parameters that are updated together. Their gradients are in
/// memory at the same time.
const TOGETHER: usize = 8 << 20;

/// A step that updates one parameter after the other, in the order that was passed to `start_step`.
pub(crate) struct StepInProgress<'a, B: Backend> {
    /// The optimizer, whose step counter already has the number of this step.
    pub(super) optimizer: &'a mut Optimizer<B>,
    /// The scalars of the step, by index in the optimizer's settings.
    pub(super) steps: Vec<UpdateStep>,
    /// The factor of every gradient, which combines loss unscaling and gradient clipping.
    pub(super) scale: f32,
}

/// The update direction of a parameter: an f32 array with the length of this rank's owned slice.
///
/// Without a master, it also holds the parameter's values until they are updated. The parameter
/// itself has no values during that time.
#[derive(Debug)]
pub(crate) struct UpdateDirection<B: Backend> {
    /// The index of the parameter.
    pub(crate) index: usize,
    /// The direction, flat, with the same padding as the values.
    pub(crate) elements: B::FloatTensorPrimitive,
    /// The sums of squares of the elements that this rank owns; `None` for an optimizer that does
    /// not depend on norms.
    pub(crate) squares: Option<Squares>,
    /// The values that `descend` changes along the direction.
    pub(super) values: UpdateValues<B>,
    /// The bytes of the direction in the ledger.
    _lease: Lease,
}

impl<B: OptimizerOps> StepInProgress<'_, B> {
    /// Returns true if the optimizer has a master of the parameter's values.
    pub(crate) fn has_master(&self, index: usize) -> bool {
        self.optimizer.has_master(index)
    }

    /// Updates the owned elements of a parameter with their gradient. Both are flat and have the
    /// same padding. Returns the new values in the type in which ops compute; `None` if the values
    /// are parked and were updated in place. Parameters must be updated in the order of the step.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The step must not be continued.
    ///
    /// # Panics
    /// Panics if the order of the step has the parameter in a round.
    pub(crate) fn update(
        &mut self,
        index: usize,
        values: UpdateValues<B>,
        gradient: UpdateGradient<B>,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let UpdateStep::Elements(step) = *self.step(index) else {
            unreachable!("the order of the step has it among the others")
        };
        let scale = self.scale;
        self.pass(index, &step, scale, values, gradient)
    }

    /// Divides `order`, parameters that are updated one by one, into the groups that
    /// [`update_all`](Self::update_all) takes. A group has one parameter unless the backend updates
    /// several at once. `is_parked` tells whether the values of a parameter are parked.
    pub(crate) fn groups<'o>(
        &self,
        order: &'o [usize],
        is_parked: impl Fn(usize) -> bool,
    ) -> Vec<&'o [usize]> {
        // The step and the number of elements of a parameter that can be updated with others.
        let joint = |index: usize| match (self.step(index), &self.optimizer.states[index]) {
            (UpdateStep::Elements(step), Some(TieredState::Device(state)))
                if !is_parked(index) && !self.is_first_local(index) =>
            {
                Some((*step, state.len))
            }
            _ => None,
        };
        let mut groups = Vec::new();
        let (mut start, mut elements) = (0, 0);
        for (place, pair) in order.windows(2).enumerate() {
            let [left, right] = [pair[0], pair[1]].map(joint);
            elements += left.map_or(0, |(_, len)| len);
            let is_alike = left
                .zip(right)
                .is_some_and(|(left, right)| left.0 == right.0 && elements + right.1 <= TOGETHER);
            if !is_alike || place + 1 - start == B::updates_at_once() {
                groups.push(&order[start..=place]);
                (start, elements) = (place + 1, 0);
            }
        }
        groups.extend((start < order.len()).then(|| &order[start..]));
        groups
    }

    /// Updates the parameters of a group like [`update`](Self::update), and returns their new
    /// values in the same order.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The step must not be continued.
    ///
    /// # Panics
    /// Panics if the parameters are not a group of [`groups`](Self::groups).
    pub(crate) fn update_all(
        &mut self,
        group: Vec<(usize, UpdateValues<B>, UpdateGradient<B>)>,
    ) -> Result<Vec<Option<B::FloatTensorPrimitive>>, SwapError> {
        let group = match <[_; 1]>::try_from(group) {
            Ok([(index, values, gradient)]) => {
                return Ok(vec![self.update(index, values, gradient)?]);
            }
            Err(group) => group,
        };
        let UpdateStep::Elements(step) = *self.step(group[0].0) else {
            unreachable!("a group has parameters of one element-wise step")
        };
        let Optimizer { states, working, .. } = &mut *self.optimizer;
        let (mut places, mut updates) = (Vec::new(), Vec::new());
        for (index, values, gradient) in group {
            let (Some(TieredState::Device(state)), UpdateValues::Device(values)) =
                (&mut states[index], values)
            else {
                unreachable!("a group has states and values on the device")
            };
            places.push((index, state.master.is_some()));
            let gradient = on_device(gradient, state);
            updates.push(state.start_update(&step, values, gradient));
        }
        let results = B::update_all(&step, self.scale, updates, *working).into_iter();
        let updated = places.into_iter().zip(results).map(|((index, keeps_master), result)| {
            let Some(TieredState::Device(state)) = &mut states[index] else {
                unreachable!("it was on the device before")
            };
            Some(state.end_update(result, keeps_master))
        });
        Ok(updated.collect())
    }

    /// Updates the moments of a parameter and returns its direction. If ranks average momenta, the
    /// moments do not change and the direction is this rank's momentum.
    ///
    /// `owned` is the range of elements that this rank updates, within the whole parameter. Sums of
    /// squares do not include the padding at the end of the arrays.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The step must not be continued.
    pub(crate) fn direct(
        &mut self,
        index: usize,
        values: UpdateValues<B>,
        gradient: UpdateGradient<B>,
        owned: Range<usize>,
        ledger: &Ledger,
    ) -> Result<UpdateDirection<B>, SwapError> {
        let (step, mut squares) = match self.step(index) {
            UpdateStep::Norms { direction, .. } => {
                (*direction, Some([TreeSum::new(owned.clone()), TreeSum::new(owned)]))
            }
            UpdateStep::Matrix { direction, .. } => (*direction, None),
            UpdateStep::Momentum { local, .. } | UpdateStep::FrozenLamb { local, .. } => {
                (*local, None)
            }
            UpdateStep::Elements(_) => {
                unreachable!("the order of the step has it among the others")
            }
        };
        let has_master = self.has_master(index);
        let is_first_local = self.is_first_local(index);
        let Optimizer { states, pipeline, .. } = &mut *self.optimizer;
        let (elements, values) = match &mut states[index] {
            Some(TieredState::Device(state)) => {
                let gradient = on_device(gradient, state);
                let ReadValues { values: mut own, parked } = state.read(values)?;
                if is_first_local {
                    state.keep_common(own.as_ref());
                }
                let elements =
                    state.direct(&step, self.scale, &mut own, gradient, squares.as_mut());
                (elements, parked.map_or(UpdateValues::Device(own), UpdateValues::Parked))
            }
            Some(TieredState::Parked(state)) => {
                // A direction without norms does not read the master, so the pass starts at the
                // moments.
                let first = usize::from(has_master && squares.is_none());
                let mut update = HostUpdate {
                    step: &step,
                    scale: self.scale,
                    arrays: &state.arrays[first..],
                    has_master,
                    layout: state.layout,
                    pipeline,
                };
                (state.direct(&mut update, &values, gradient, squares.as_mut())?, values)
            }
            None => unreachable!("only trainable parameters are updated, and each has a state"),
        };
        let bytes = elements.shape().num_elements() * size_of::<f32>();
        let lease = ledger.hold(Category::Buckets, bytes);
        Ok(UpdateDirection { index, elements, squares, values, _lease: lease })
    }

    /// Applies a direction to the values with `pass`. Returns the new values like `update`. The
    /// factor of the gradient is 1, because it was applied when the direction was computed.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The step must not be continued.
    pub(crate) fn descend(
        &mut self,
        direction: UpdateDirection<B>,
        pass: &ElementwiseStep,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let UpdateDirection { index, elements, values, .. } = direction;
        self.pass(index, pass, 1.0, values, UpdateGradient::Device(elements))
    }

    /// Returns the pass that applies a direction of LAMB, given the L2 norms of the complete values
    /// and of the complete direction.
    ///
    /// The rate is the step size times LAMB's trust ratio `|values| / |direction|`, clamped to the
    /// plan's bounds. 1-bit LAMB also adds the ratio to its moving average.
    pub(crate) fn descent_by_norms(
        &mut self,
        index: usize,
        [values, direction]: [f64; 2],
    ) -> ElementwiseStep {
        let UpdateStep::Norms { step_size, trust_ratio: [min, max], coeff_beta, .. } =
            *self.step(index)
        else {
            unreachable!("the order of the step has it among the norms")
        };
        let ratio = trust_ratio(values, direction, min, max);
        if let Some(coeff_beta) = coeff_beta {
            self.optimizer.lamb_scalars[index].average(ratio, coeff_beta);
        }
        DescentStep::new(1.0, step_size * ratio).into()
    }

    /// Returns the pass that applies an orthogonalized direction to a parameter of this shape. It
    /// uses decoupled weight decay. Its rate is Muon's learning rate times the plan's scale for the
    /// dimensions of a matrix.
    pub(crate) fn descent_by_shape(&self, index: usize, shape: &[usize]) -> ElementwiseStep {
        let (lr, plan, matrices) = self.matrix(index);
        let (outputs, inputs) = matrices.dimensions(shape);
        let rate = lr * newton_schulz::shape_factor(plan.scale, outputs, inputs);
        DescentStep::new(1.0 - lr * plan.weight_decay, rate).into()
    }

    /// Returns the flat orthogonalized direction of a whole parameter of this shape. Only the owner
    /// of a matrix calls this function, and nothing is exchanged.
    pub(crate) fn orthogonalize(
        &self,
        index: usize,
        whole: B::FloatTensorPrimitive,
        shape: &[usize],
    ) -> B::FloatTensorPrimitive {
        let (_, plan, matrices) = self.matrix(index);
        newton_schulz::orthogonalize::<B>(whole, shape, matrices, &plan.newton_schulz)
    }

    /// Returns the pass that applies the mean momentum of all ranks.
    pub(crate) fn agreed(&self, index: usize) -> ElementwiseStep {
        let UpdateStep::Momentum { agreed, .. } = *self.step(index) else {
            unreachable!("the order of the step has it among the momenta")
        };
        agreed
    }

    /// Returns true if the set of elements that take part in exchanges may have grown since the
    /// last step.
    pub(crate) fn second_moment_has_changed(&self, index: usize) -> bool {
        let compressed = self.optimizer.compressed(index);
        compressed.is_some_and(|it| it.second_moment_has_changed(self.optimizer.time))
    }

    /// Returns true if this step is the first local step. The common values must be stored before
    /// it.
    fn is_first_local(&self, index: usize) -> bool {
        let time = self.optimizer.time;
        let compressed = self.optimizer.compressed(index);
        compressed.is_some_and(|it| it.is_local(time) && !it.is_local(time - 1))
    }

    /// Returns one bit per element of a parameter; see `Optimizer::live_elements`.
    pub(crate) fn live_elements(&self, index: usize) -> Vec<u8> {
        self.optimizer.live_elements(index)
    }

    /// Returns the learning rate, the plan and the matrices of a parameter that Muon updates.
    fn matrix(&self, index: usize) -> (f64, &MuonPlan, Matrices) {
        let UpdateStep::Matrix { lr, plan, matrices, .. } = self.step(index) else {
            unreachable!("the order of the step has it among the matrices")
        };
        (*lr, plan, *matrices)
    }

    /// Returns the scalars of a trainable parameter.
    pub(super) fn step(&self, index: usize) -> &UpdateStep {
        let Some(settings) = self.optimizer.settings_of[index] else {
            unreachable!("only trainable parameters are updated, and each has settings")
        };
        &self.steps[settings]
    }

    /// Runs one pass over the values and the moments that `step` uses, on the device or chunk by
    /// chunk in host memory. Returns the values to store on the device; `None` if they are parked.
    fn pass(
        &mut self,
        index: usize,
        step: &ElementwiseStep,
        scale: f32,
        values: UpdateValues<B>,
        gradient: UpdateGradient<B>,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let has_master = self.has_master(index);
        let is_first_local = self.is_first_local(index);
        let Optimizer { states, working, pipeline, .. } = &mut *self.optimizer;
        match &mut states[index] {
            Some(TieredState::Device(state)) => {
                let ReadValues { values, parked } = state.read(values)?;
                if is_first_local {
                    state.keep_common(values.as_ref());
                }
                let gradient = on_device(gradient, state);
                let updated = state.update(step, scale, values, gradient, *working);
                // With a partial offload (`ratio`), a shard may be parked although its states are
                // on the device.
                let Some(array) = parked else { return Ok(Some(updated)) };
                store::<B>(&array, updated)?;
                Ok(None)
            }
            Some(TieredState::Parked(state)) => {
                // Moments that the step does not use are neither read nor written.
                let used = usize::from(has_master) + step.states();
                let mut update = HostUpdate {
                    step,
                    scale,
                    arrays: &state.arrays[..used],
                    has_master,
                    layout: state.layout,
                    pipeline,
                };
                state.update(&mut update, values, gradient, *working)
            }
            None => unreachable!("only trainable parameters are updated, and each has a state"),
        }
    }
}

/// Returns the gradient of a parameter whose states are on the device. An unused parameter gets
/// zeros, because its moments still decay, as on every other rank.
fn on_device<B: OptimizerOps>(
    gradient: UpdateGradient<B>,
    state: &DeviceState<B>,
) -> B::FloatTensorPrimitive {
    match gradient {
        UpdateGradient::Device(gradient) => gradient,
        UpdateGradient::Zeros => zeros::<B>(state.len, &state.device),
        UpdateGradient::Parked(..) => unreachable!("gradients are parked where states are"),
    }
}

/// Writes updated values into the array from which they were read, and waits until they are
/// written.
///
/// # Errors
/// Returns an error if the disk fails.
fn store<B: OptimizerOps>(
    array: &Arc<ParkedArray>,
    values: B::FloatTensorPrimitive,
) -> Result<(), SwapError> {
    array.write_tensor::<B>(values, &mut WriteBehind::default())
}
