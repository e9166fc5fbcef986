//! 1-bit LAMB: the scalars of each tensor, and the update after the freeze.
//!
//! Main type: `LambScalars`. Source: Li et al. 2021, "1-bit LAMB", as in
//! `deepspeed/runtime/fp16/onebit/lamb.py`.
//!
//! *Until the freeze*, steps are LAMB steps, and the trust ratio of each tensor is added to a
//! moving average.
//!
//! *At the freeze* (`freeze_tensors`), the second moment is copied to the fresh second moment. All
//! tensors share one scale in the compressed exchange. Every momentum is therefore multiplied by a
//! factor that brings it to the mean magnitude of all momenta. Otherwise tensors with large momenta
//! would determine the scale of tensors with small ones.
//!
//! *After the freeze*, in each step:
//!
//! ```text
//! local gradient ─► local momentum ─► x scaling ─► compressed mean ─► / scaling ─► mean momentum
//! mean momentum ─► direction (frozen second moment), fresh second moment
//! frozen vs fresh second moment ─► factor
//! values -= lr * averaged trust ratio * factor * direction
//! ```
//!
//! The scalars are computed from complete arrays with sums in a fixed order. Every rank therefore
//! computes bitwise identical scalars without an exchange. Checkpoints store them by DeepSpeed's
//! names.

use burn_backend::{FloatDType, Shape};
use bytemuck::cast_slice;
use bytes::Bytes;
use deepburn_config::{LambPlan, OneBitLambPlan};
use deepburn_kernels as kernels;
use deepburn_kernels::{
    DescentStep, ElementwiseStep, FactorRule, add_error, frozen_lamb_sums, live_elements,
};
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, float_bytes};

use super::moments::{FIRST_MOMENT, FRESH_SECOND_MOMENT, SECOND_MOMENT};
use super::rounds::UpdateScope;
use super::rule::{self, CompressedOptimizer, UpdateStep};
use super::step::{StepInProgress, UpdateDirection};
use super::tiered_state::{DeviceState, TieredState, tensor};
use super::{Optimizer, Rates, UpdateValues};

impl CompressedOptimizer for OneBitLambPlan {
    fn moments(&self) -> &'static [&'static str] {
        &[FIRST_MOMENT, SECOND_MOMENT, FRESH_SECOND_MOMENT]
    }

    fn freeze_step(&self) -> u64 {
        self.freeze_step
    }

    fn compressed_quantity(&self, _time: u64) -> &'static str {
        "scaled momentum"
    }

    fn scope(&self, time: u64, _local_rates: f64) -> UpdateScope {
        match time > self.freeze_step {
            true => UpdateScope::FusedMomentum,
            false => UpdateScope::Norms,
        }
    }

    fn step(&self, rates: Rates, time: u64, _local_rates: f64) -> UpdateStep {
        match time > self.freeze_step {
            true => frozen_lamb(self, rates),
            false => rule::lamb(&self.lamb, rates, time, Some(self.coeff_beta)),
        }
    }
}

/// Returns the scalars of 1-bit LAMB after the freeze (Li et al. 2021, and
/// `deepspeed/runtime/fp16/onebit/lamb.py`). As in DeepSpeed, there is no bias correction.
fn frozen_lamb(plan: &OneBitLambPlan, Rates { lr, betas }: Rates) -> UpdateStep {
    let LambPlan { betas: own, eps, weight_decay, .. } = plan.lamb;
    let [beta1, beta2] = betas.unwrap_or(own);
    let rule = kernels::FrozenLamb { beta1, beta2, eps, weight_decay };
    UpdateStep::FrozenLamb {
        local: kernels::LocalMomentumStep::new(beta1).into(),
        direction: kernels::FrozenLambStep::new(&rule).into(),
        lr,
        plan: *plan,
    }
}

/// The scalars of one tensor, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LambScalars {
    /// The moving average of trust ratios until the freeze, constant after it. 0 before the first
    /// step.
    frozen_coeff: f64,
    /// The factor of the frozen trust ratio in the last step. The factor of the next step may
    /// differ from it by at most the fraction `factor_threshold`.
    last_factor: f64,
    /// The factor of the momentum in the exchange; `None` before the freeze.
    scaling_coeff: Option<f64>,
}

/// DeepSpeed's name of the averaged trust ratio.
const FROZEN_COEFF: &str = "lamb_coeff_freeze";
/// DeepSpeed's name of the last factor.
const LAST_FACTOR: &str = "last_factor";
/// DeepSpeed's name of the factor in the exchange.
const SCALING_COEFF: &str = "scaling_coeff";

impl Default for LambScalars {
    fn default() -> Self {
        Self { frozen_coeff: 0.0, last_factor: 1.0, scaling_coeff: None }
    }
}

impl LambScalars {
    //= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb lamb_coeff_freeze
    /// Adds the trust ratio of a step before the freeze to the moving average, with the decay
    /// `coeff_beta`. Resets the other scalars, because a run that was resumed with a later freeze
    /// still has the scalars of the earlier freeze.
    pub(super) fn average(&mut self, ratio: f64, coeff_beta: f64) {
        let mut frozen_coeff = self.frozen_coeff;
        // A ratio of exactly 1 usually means that a norm is 0, so it is not added to the average.
        if ratio != 1.0 {
            frozen_coeff = coeff_beta * frozen_coeff + (1.0 - coeff_beta) * ratio;
        }
        *self = Self { frozen_coeff, ..Self::default() };
    }
}

impl<B: OptimizerOps> Optimizer<B> {
    /// Returns the names and values of a parameter's scalars; empty for other optimizers.
    pub(crate) fn scalars(&self, index: usize) -> Vec<(&'static str, f64)> {
        if !self.moments(index).contains(&FRESH_SECOND_MOMENT) {
            return Vec::new();
        }
        let LambScalars { frozen_coeff, last_factor, scaling_coeff } = self.lamb_scalars[index];
        let scalars = [(FROZEN_COEFF, frozen_coeff), (LAST_FACTOR, last_factor)];
        let scaling = scaling_coeff.map(|scaling| (SCALING_COEFF, scaling));
        scalars.into_iter().chain(scaling).collect()
    }

    /// Replaces the scalars of a parameter with the values that `read` returns for their names. A
    /// missing scalar gets its initial value.
    pub(crate) fn set_scalars(&mut self, index: usize, read: impl Fn(&str) -> Option<f64>) {
        let new = LambScalars::default();
        self.lamb_scalars[index] = LambScalars {
            frozen_coeff: read(FROZEN_COEFF).unwrap_or(new.frozen_coeff),
            last_factor: read(LAST_FACTOR).unwrap_or(new.last_factor),
            scaling_coeff: read(SCALING_COEFF),
        };
    }
}

/// The root mean square below which a momentum counts as 0.
const SMALLEST_SCALE: f64 = 1e-30;

/// The bytes of a parameter's three f32 moments. On a CPU backend they share the memory of the
/// moments. On other devices they are copies.
struct HostMoments {
    /// The momentum (`exp_avg`).
    first: Bytes,
    /// The frozen second moment (`exp_avg_sq`).
    second: Bytes,
    /// The second moment that is still updated (`exp_avg_sq_fresh`).
    fresh: Bytes,
}

impl<B: OptimizerOps> StepInProgress<'_, B> {
    /// Initializes the fresh second moments of these parameters and computes the factors of their
    /// momenta. This happens once, in the first step after the freeze. Later calls do nothing.
    pub(crate) fn freeze_tensors(&mut self, indices: &[usize]) {
        let is_frozen = |index: &usize| self.optimizer.lamb_scalars[*index].scaling_coeff.is_some();
        if indices.iter().all(is_frozen) {
            return;
        }
        let mut scales = Vec::with_capacity(indices.len());
        for index in indices {
            let HostMoments { first, second, .. } = self.host_moments(*index);
            let [first, second]: [&[f32]; 2] = [cast_slice(&first), cast_slice(&second)];
            // Only live elements take part in exchanges. With errors of 0, `add_error` returns the
            // squares of the momentum.
            let mut errors = vec![0.0; first.len()];
            let squares = add_error(first, &mut errors, &live_elements(second));
            let scale = squares.root_mean_square();
            // A smaller scale would need a factor that f32 cannot represent.
            scales.push(if scale < SMALLEST_SCALE { 0.0 } else { scale });
            let place = self.place(*index, FRESH_SECOND_MOMENT);
            let state = self.device_state(*index);
            // The copy has its own memory, so that steps can update it in place.
            state.moments[place] = tensor::<B>(second.to_vec(), &state.device);
        }
        // Tensors without momentum are excluded from the mean magnitude.
        let count = scales.iter().filter(|scale| **scale > 0.0).count();
        //= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb scaling_coeff
        let united = scales.iter().sum::<f64>() / count as f64;
        for (index, scale) in indices.iter().zip(scales) {
            let scaling = if scale > 0.0 { united / scale } else { 1.0 };
            let scalars = &mut self.optimizer.lamb_scalars[*index];
            scalars.scaling_coeff = Some(scaling);
            // A trust ratio that was 1 in every step was never added to the average. It is set to
            // 1, because with 0 the tensor would never be updated again.
            if scalars.frozen_coeff == 0.0 {
                scalars.frozen_coeff = 1.0;
            }
        }
    }

    /// Returns the factor of a momentum in the exchange; `None` before the freeze and for other
    /// optimizers.
    pub(crate) fn scaling(&self, index: usize) -> Option<f32> {
        self.optimizer.lamb_scalars[index].scaling_coeff.map(|scaling| scaling as f32)
    }

    /// Computes the direction from the mean momentum of all ranks and updates the moments. Returns
    /// the direction together with the pass that applies it. The rate of this pass is the learning
    /// rate times the averaged trust ratio times the factor of this step.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The step must not be continued.
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
        // The factor depends on complete arrays, which every rank has, so no exchange is needed.
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

    /// Replaces the momentum with the direction that `pass` computes from it. The values are an
    /// operand and do not change.
    fn along(
        &mut self,
        mut direction: UpdateDirection<B>,
        pass: &ElementwiseStep,
    ) -> UpdateDirection<B> {
        let state = self.device_state(direction.index);
        let UpdateValues::Device(values) = &mut direction.values else {
            unreachable!("an optimizer whose ranks agree on momenta keeps values on the device")
        };
        // A one-element placeholder, so that the kernel gets the only reference to the momentum.
        let none = B::float_zeros(Shape::from(vec![1]), &state.device, FloatDType::F32);
        let momentum = std::mem::replace(&mut direction.elements, none);
        direction.elements = state.direct(pass, 1.0, values, momentum, None);
        direction
    }

    /// Returns the current moments of a parameter in host memory.
    fn host_moments(&mut self, index: usize) -> HostMoments {
        let places = [FIRST_MOMENT, SECOND_MOMENT, FRESH_SECOND_MOMENT];
        let places = places.map(|name| self.place(index, name));
        let state = self.device_state(index);
        let [first, second, fresh] =
            places.map(|place| float_bytes::<B>(state.moments[place].clone()));
        HostMoments { first, second, fresh }
    }

    /// Returns the position of a moment in the state's list.
    fn place(&self, index: usize, name: &str) -> usize {
        let place = self.optimizer.moments(index).iter().position(|moment| *moment == name);
        let Some(place) = place else { unreachable!("1-bit LAMB keeps it") };
        place
    }

    /// Returns the state of a parameter. It is on the device, because optimizers with a compressed
    /// exchange do not support offload.
    fn device_state(&mut self, index: usize) -> &mut DeviceState<B> {
        match &mut self.optimizer.states[index] {
            Some(TieredState::Device(state)) => state,
            Some(TieredState::Parked(_)) | None => {
                unreachable!("an optimizer whose ranks agree on momenta keeps states on the device")
            }
        }
    }
}
