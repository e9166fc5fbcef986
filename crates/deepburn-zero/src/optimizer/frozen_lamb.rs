//! 1-bit LAMB: its scalars per tensor, and its update after the freeze.
//!
//! Main type: [`LambScalars`]. Until the freeze, steps are LAMB's, and trust ratios enter a moving average. After it, all
//! momenta are averaged in one compressed exchange. All tensors share one scale there, so each momentum is first scaled to
//! the magnitude of the others. The learning rate is multiplied by the averaged trust ratio and by a factor that follows
//! the change of the second moment since the freeze.

use burn_backend::{FloatDType, Shape};
use bytemuck::cast_slice;
use bytes::Bytes;
use deepburn_kernels::{
    DescentStep, ElementwiseStep, FactorRule, add_error, frozen_lamb_sums, live_elements,
};
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, float_bytes};

use super::rule::{FRESH_SECOND_MOMENT, SECOND_MOMENT, UpdateStep};
use super::state::{DeviceState, State, tensor};
use super::step::{StepInProgress, UpdateDirection};
use super::{Optimizer, UpdateValues};

/// The scalars of one tensor, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LambScalars {
    /// Moving average of trust ratios until the freeze.
    frozen_coeff: f64,
    /// Factor of the frozen trust ratio in the last step.
    last_factor: f64,
    /// Factor of the momentum in the exchange; `None` before the freeze.
    scaling_coeff: Option<f64>,
}

const FROZEN_COEFF: &str = "lamb_coeff_freeze";
const LAST_FACTOR: &str = "last_factor";
const SCALING_COEFF: &str = "scaling_coeff";

impl Default for LambScalars {
    fn default() -> Self {
        Self { frozen_coeff: 0.0, last_factor: 1.0, scaling_coeff: None }
    }
}

impl LambScalars {
    /// Takes in the trust ratio of a step before the freeze. The next freeze starts with new factors: a run that was
    /// resumed with a later one had some.
    pub(super) fn average(&mut self, ratio: f64, coeff_beta: f64) {
        let mut frozen_coeff = self.frozen_coeff;
        // 1 stands for a norm of 0, or would change nothing once the average has come near it.
        if ratio != 1.0 {
            frozen_coeff = coeff_beta * frozen_coeff + (1.0 - coeff_beta) * ratio;
        }
        *self = Self { frozen_coeff, ..Self::default() };
    }
}

impl<B: OptimizerOps> Optimizer<B> {
    /// Names and values of the scalars that are kept of a parameter; none where another optimizer updates it.
    pub(crate) fn scalars(&self, index: usize) -> Vec<(&'static str, f64)> {
        if !self.moments(index).contains(&FRESH_SECOND_MOMENT) {
            return Vec::new();
        }
        let LambScalars { frozen_coeff, last_factor, scaling_coeff } = self.lamb_scalars[index];
        let scalars = [(FROZEN_COEFF, frozen_coeff), (LAST_FACTOR, last_factor)];
        let scaling = scaling_coeff.map(|scaling| (SCALING_COEFF, scaling));
        scalars.into_iter().chain(scaling).collect()
    }

    /// Replaces the scalars of a parameter with the values that `read` returns for their names, or with initial values.
    pub(crate) fn set_scalars(&mut self, index: usize, read: impl Fn(&str) -> Option<f64>) {
        let new = LambScalars::default();
        self.lamb_scalars[index] = LambScalars {
            frozen_coeff: read(FROZEN_COEFF).unwrap_or(new.frozen_coeff),
            last_factor: read(LAST_FACTOR).unwrap_or(new.last_factor),
            scaling_coeff: read(SCALING_COEFF),
        };
    }
}

/// Root mean square of a momentum that is taken for 0.
const SMALLEST_SCALE: f64 = 1e-30;

/// Bytes of a parameter's moments: views of those in host memory, copies of those on a device.
struct HostMoments {
    first: Bytes,
    second: Bytes,
    fresh: Bytes,
}

impl<B: OptimizerOps> StepInProgress<'_, B> {
    /// Starts the fresh second moments of these parameters and computes the scaling of their momenta, once at the freeze.
    pub(crate) fn freeze_tensors(&mut self, indices: &[usize]) {
        let is_frozen = |index: &usize| self.optimizer.lamb_scalars[*index].scaling_coeff.is_some();
        if indices.iter().all(is_frozen) {
            return;
        }
        let mut scales = Vec::with_capacity(indices.len());
        for index in indices {
            let HostMoments { first, second, .. } = self.host_moments(*index);
            let [first, second]: [&[f32]; 2] = [cast_slice(&first), cast_slice(&second)];
            // Of the elements that take part in exchanges. Errors that are 0 leave the squares of the momentum alone.
            let mut errors = vec![0.0; first.len()];
            let squares = add_error(first, &mut errors, &live_elements(second));
            let scale = squares.root_mean_square();
            // Smaller ones would be multiplied by more than f32 can hold.
            scales.push(if scale < SMALLEST_SCALE { 0.0 } else { scale });
            let place = self.place(*index, FRESH_SECOND_MOMENT);
            let state = self.device_state(*index);
            // Of its own memory, so that steps update it in place.
            state.moments[place] = tensor::<B>(second.to_vec(), &state.device);
        }
        // A tensor without momentum says nothing about the size of the others.
        let count = scales.iter().filter(|scale| **scale > 0.0).count();
        let united = scales.iter().sum::<f64>() / count as f64;
        for (index, scale) in indices.iter().zip(scales) {
            let scaling = if scale > 0.0 { united / scale } else { 1.0 };
            let scalars = &mut self.optimizer.lamb_scalars[*index];
            scalars.scaling_coeff = Some(scaling);
            // A trust ratio that was 1 in every step is not averaged. It stays 1; at 0 the tensor would never move again.
            if scalars.frozen_coeff == 0.0 {
                scalars.frozen_coeff = 1.0;
            }
        }
    }

    /// Returns the factor of a momentum in the exchange, if it has one.
    pub(crate) fn scaling(&self, index: usize) -> Option<f32> {
        self.optimizer.lamb_scalars[index].scaling_coeff.map(|scaling| scaling as f32)
    }

    /// Turns a momentum that all ranks agreed on into a direction, and says how to go along it. Updates the moments.
    ///
    /// # Errors
    /// The disk fails. The step must not be used.
    pub(crate) fn agreed_direction(
        &mut self,
        direction: UpdateDirection<B>,
    ) -> Result<(UpdateDirection<B>, ElementwiseStep), SwapError> {
        let index = direction.index;
        let UpdateStep::FrozenLamb { direction: pass, lr, plan, .. } = *self.step(index) else {
            unreachable!("the order of the step has it among the fused momenta")
        };
        let direction = self.along(direction, &pass);
        let HostMoments { first, second, fresh } = self.host_moments(index);
        let elements = float_bytes::<B>(direction.elements.clone());
        let arrays = [&first, &second, &fresh, &elements].map(|bytes| cast_slice(bytes));
        let sums = frozen_lamb_sums(plan.lamb.eps, arrays);
        let rule = FactorRule {
            weight_decay: plan.lamb.weight_decay,
            bounds: plan.factor,
            threshold: plan.factor_threshold,
        };
        let scalars = &mut self.optimizer.lamb_scalars[index];
        scalars.last_factor = rule.factor(sums, scalars.last_factor);
        let rate = lr * scalars.frozen_coeff * scalars.last_factor;
        Ok((direction, DescentStep::new(1.0, rate).into()))
    }

    /// Replaces the momentum by the direction that `pass` makes of it.
    fn along(
        &mut self,
        mut direction: UpdateDirection<B>,
        pass: &ElementwiseStep,
    ) -> UpdateDirection<B> {
        let state = self.device_state(direction.index);
        let UpdateValues::Device(values) = &mut direction.values else {
            unreachable!("an optimizer whose ranks agree on momenta keeps values on the device")
        };
        let none = B::float_zeros(Shape::from(vec![1]), &state.device, FloatDType::F32);
        let momentum = std::mem::replace(&mut direction.elements, none);
        direction.elements = state.direct(pass, 1.0, values, momentum, None);
        direction
    }

    fn host_moments(&mut self, index: usize) -> HostMoments {
        let places = ["exp_avg", SECOND_MOMENT, FRESH_SECOND_MOMENT];
        let places = places.map(|name| self.place(index, name));
        let state = self.device_state(index);
        let [first, second, fresh] =
            places.map(|place| float_bytes::<B>(state.moments[place].clone()));
        HostMoments { first, second, fresh }
    }

    fn place(&self, index: usize, name: &str) -> usize {
        let place = self.optimizer.moments(index).iter().position(|moment| *moment == name);
        let Some(place) = place else { unreachable!("1-bit LAMB keeps it") };
        place
    }

    fn device_state(&mut self, index: usize) -> &mut DeviceState<B> {
        match &mut self.optimizer.states[index] {
            Some(State::Device(state)) => state,
            Some(State::Parked(_)) | None => {
                unreachable!("an optimizer whose ranks agree on momenta keeps states on the device")
            }
        }
    }
}
