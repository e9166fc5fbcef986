//! One step of the optimizer, parameter by parameter.
//!
//! Main type: [`StepInProgress`]. Most updates are one pass over the elements ([`StepInProgress::update`]). An update of an
//! optimizer which looks at norms or matrices has two: [`StepInProgress::direct`] updates the moments and makes a
//! [`UpdateDirection`], the caller exchanges what it takes to turn that into the final one, and
//! [`StepInProgress::descend`] changes the values along it. Where ranks agree on momenta, the direction is the momentum.

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use deepburn_config::{Matrices, MuonPlan};
use deepburn_kernels::{DescentStep, ElementwiseStep, TreeSum, trust_ratio};
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, float_bytes};

use super::parked::HostUpdate;
use super::rule::{self, UpdateStep};
use super::state::{DeviceState, ReadValues, State, tensor};
use super::{Optimizer, UpdateGradient, UpdateValues, newton_schulz};
use crate::ledger::{Category, Lease, Ledger};
use crate::parked::{ParkedArray, WriteBehind};

/// A step that updates one parameter after the other.
pub(crate) struct StepInProgress<'a, B: Backend> {
    pub(super) optimizer: &'a mut Optimizer<B>,
    /// For each of the settings.
    pub(super) steps: Vec<UpdateStep>,
    pub(super) scale: f32,
}

/// Where the update of a parameter goes: as long as what this rank owns of it, in f32. Holds these elements until the
/// values are updated, and the values too, where the optimizer has no master of them.
#[derive(Debug)]
pub(crate) struct UpdateDirection<B: Backend> {
    /// Of the parameter.
    pub(crate) index: usize,
    /// Flat, padded as the values are.
    pub(crate) elements: B::FloatTensorPrimitive,
    /// For an optimizer that looks at norms: the squares of the elements that this rank owns, of the values and of the
    /// direction.
    pub(crate) squares: Option<Squares>,
    /// What is updated along it.
    pub(super) values: UpdateValues<B>,
    _lease: Lease,
}

/// Sums of squares of the values of a tensor, and of its direction.
pub(crate) type Squares = [TreeSum; 2];

impl<B: OptimizerOps> StepInProgress<'_, B> {
    /// Whether the optimizer keeps the values of the parameter at `index` itself.
    pub(crate) fn has_master(&self, index: usize) -> bool {
        self.optimizer.has_master(index)
    }

    /// Updates the owned elements of a parameter with their gradient, both flat and padded alike,
    /// and returns what is to be stored: the new values, in the type that ops use; `None` if they are
    /// parked. Parameters come in the order of the step.
    ///
    /// # Errors
    /// The disk fails. The step must not be used.
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

    /// Updates the moments of a parameter and returns its direction. Where ranks average momenta, the moments stay and the
    /// direction is this rank's momentum. This rank updates elements `owned` of it, and
    /// padding after them.
    ///
    /// # Errors
    /// The disk fails. The step must not be used.
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
            Some(State::Device(state)) => {
                let gradient = on_device(gradient, state);
                let ReadValues { values: mut own, parked } = state.read(values)?;
                if is_first_local {
                    state.keep_common(own.as_ref());
                }
                let elements =
                    state.direct(&step, self.scale, &mut own, gradient, squares.as_mut());
                (elements, parked.map_or(UpdateValues::Device(own), UpdateValues::Parked))
            }
            Some(State::Parked(state)) => {
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

    /// Updates values by `pass` along a direction, and returns what is to be stored, as [`update`](Self::update) does.
    ///
    /// # Errors
    /// The disk fails. The step must not be used.
    pub(crate) fn descend(
        &mut self,
        direction: UpdateDirection<B>,
        pass: &ElementwiseStep,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let UpdateDirection { index, elements, values, .. } = direction;
        self.pass(index, pass, 1.0, values, UpdateGradient::Device(elements))
    }

    /// The pass along a direction, for an optimizer that looks at the norms of a tensor's values and of its direction.
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

    /// The pass along an orthogonalised direction of a parameter of this shape.
    pub(crate) fn descent_by_shape(&self, index: usize, shape: &[usize]) -> ElementwiseStep {
        let (lr, plan, matrices) = self.matrix(index);
        let (outputs, inputs) = matrices.dimensions(shape);
        let rate = lr * plan.scale.factor(outputs, inputs);
        DescentStep::new(1.0 - lr * plan.weight_decay, rate).into()
    }

    /// The orthogonalised direction of a whole parameter of this shape, flat.
    pub(crate) fn orthogonalize(
        &self,
        index: usize,
        whole: B::FloatTensorPrimitive,
        shape: &[usize],
    ) -> B::FloatTensorPrimitive {
        let (_, plan, matrices) = self.matrix(index);
        newton_schulz::orthogonalize::<B>(whole, shape, matrices, &plan.newton_schulz)
    }

    /// The pass with a momentum that all ranks agreed on.
    pub(crate) fn agreed(&self, index: usize) -> ElementwiseStep {
        let UpdateStep::Momentum { agreed, .. } = *self.step(index) else {
            unreachable!("the order of the step has it among the momenta")
        };
        agreed
    }

    /// Whether elements may take part in exchanges that did not before.
    pub(crate) fn second_moment_has_changed(&self, index: usize) -> bool {
        let settings = self.optimizer.settings(index);
        settings
            .is_some_and(|it| rule::second_moment_has_changed(&it.optimizer, self.optimizer.time))
    }

    /// Returns whether the step is the first that each rank takes alone.
    fn is_first_local(&self, index: usize) -> bool {
        let settings = self.optimizer.settings(index);
        settings.is_some_and(|it| rule::is_first_local(&it.optimizer, self.optimizer.time))
    }

    /// See [`Optimizer::live_elements`].
    pub(crate) fn live_elements(&self, index: usize) -> Vec<u8> {
        self.optimizer.live_elements(index)
    }

    fn matrix(&self, index: usize) -> (f64, &MuonPlan, Matrices) {
        let UpdateStep::Matrix { lr, plan, matrices, .. } = self.step(index) else {
            unreachable!("the order of the step has it among the matrices")
        };
        (*lr, plan, *matrices)
    }

    pub(super) fn step(&self, index: usize) -> &UpdateStep {
        let Some(settings) = self.optimizer.settings_of[index] else {
            unreachable!("only trainable parameters are updated, and each has settings")
        };
        &self.steps[settings]
    }

    /// One pass over the values and the moments that `step` uses.
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
            Some(State::Device(state)) => {
                let ReadValues { values, parked } = state.read(values)?;
                if is_first_local {
                    state.keep_common(values.as_ref());
                }
                let gradient = on_device(gradient, state);
                let updated = state.update(step, scale, values, gradient, *working);
                let Some(array) = parked else { return Ok(Some(updated)) };
                store::<B>(&array, updated)?;
                Ok(None)
            }
            Some(State::Parked(state)) => {
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

/// The gradient of a parameter whose states are on the device.
fn on_device<B: OptimizerOps>(
    gradient: UpdateGradient<B>,
    state: &DeviceState<B>,
) -> B::FloatTensorPrimitive {
    match gradient {
        UpdateGradient::Device(gradient) => gradient,
        UpdateGradient::Zeros => tensor::<B>(vec![0.0; state.len], &state.device),
        UpdateGradient::Parked(..) => unreachable!("gradients are parked where states are"),
    }
}

/// Brings updated values to where they are kept.
fn store<B: OptimizerOps>(
    array: &Arc<ParkedArray>,
    values: B::FloatTensorPrimitive,
) -> Result<(), SwapError> {
    let dtype = values.dtype();
    array.write(&float_bytes::<B>(values), dtype, &mut WriteBehind::default())
}
