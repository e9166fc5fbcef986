//! The loss scale, a factor by which the loss is multiplied to keep small gradients in the range of
//! fp16.
//!
//! The smallest positive fp16 number is about 6e-8, and many gradients are smaller. Multiplying the
//! loss multiplies every gradient by the same factor, and the optimizer step divides by it in f32.
//! The scale should be as large as possible without overflow, so a dynamic scaler raises it
//! regularly and lowers it after an overflow.
//!
//! Main type: [`LossScaler`]. By default it follows DeepSpeed's dynamic scaler step by step:
//!
//! - The scale doubles after the first `window + 1` applied steps, and then after every `window`
//!   (PyTorch's first doubling comes one step earlier).
//! - It takes `hysteresis` overflows, consecutive or not, until the first halving.
//! - A doubling restores the hysteresis; an applied step alone does not.
//!
//! The same scaler is used at all ZeRO stages. DeepSpeed's stage 0 uses a different scaler, which
//! has no hysteresis and does not fail at a minimum.
//!
//! With fp16 `torch_autocast` the scaler follows PyTorch's `torch.amp.GradScaler`, with other
//! default values and [`ScaleGrowth::AtWindow`]. The scale then doubles with the last step of a
//! window of applied steps, and every overflow halves it.

use deepburn_config::{DynamicScalePlan, LossScalePlan, ScaleGrowth};
use serde::{Deserialize, Serialize};

/// The loss scale of a run: static, or dynamic with its state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaler {
    /// The current factor of the loss.
    scale: f64,
    /// The dynamic state; `None` for a static scale.
    dynamic: Option<Dynamic>,
}

/// The state of a dynamic scale.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Dynamic {
    /// The rules by which the scale changes.
    plan: DynamicScalePlan,
    /// The number of updates so far, including skipped ones.
    updates: u64,
    /// The number of the last update that overflowed; -1 before the first overflow.
    last_overflow: i64,
    /// The number of overflows that are left until the scale halves.
    hysteresis: u64,
}

/// The scale is at its minimum, and gradients still overflow.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("gradients overflow at a loss scale of {minimum}")]
pub struct ScaleExhausted {
    /// `fp16.min_loss_scale`.
    pub minimum: f64,
}

/// The state of a dynamic loss scale, as checkpoints store it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// The scale.
    pub scale: f64,
    /// The number of overflows that are left until the next halving.
    pub hysteresis: u64,
    /// The update with the last overflow; -1 if there was none.
    pub last_overflow: i64,
    /// The number of updates so far, including overflows.
    pub iteration: u64,
}

impl LossScaler {
    /// Returns the state of a dynamic scale; `None` for a static one.
    pub fn state(&self) -> Option<ScalerState> {
        let Dynamic { updates, last_overflow, hysteresis, .. } = self.dynamic?;
        Some(ScalerState { scale: self.scale, hysteresis, last_overflow, iteration: updates })
    }

    /// Continues from `state`. A static scale stays unchanged.
    pub fn restore(&mut self, state: ScalerState) {
        if let Some(dynamic) = &mut self.dynamic {
            let ScalerState { scale, hysteresis, last_overflow, iteration } = state;
            self.scale = scale;
            *dynamic = Dynamic { updates: iteration, last_overflow, hysteresis, ..*dynamic };
        }
    }

    /// Returns a scaler at the start of a run.
    pub fn new(plan: &LossScalePlan) -> Self {
        match *plan {
            LossScalePlan::Static { scale } => Self { scale, dynamic: None },
            LossScalePlan::Dynamic(plan) => {
                let hysteresis = plan.hysteresis;
                let dynamic = Dynamic { plan, updates: 0, last_overflow: -1, hysteresis };
                Self { scale: plan.initial_scale, dynamic: Some(dynamic) }
            }
        }
    }

    /// Returns the loss factor of the next step.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Returns true if overflows reduce the scale.
    pub fn is_dynamic(&self) -> bool {
        self.dynamic.is_some()
    }

    //= deepspeed 0.19.8 runtime/fp16/loss_scaler.py DynamicLossScaler growth
    /// Records a step whose gradients were finite.
    pub fn applied(&mut self) {
        let Some(Dynamic { plan, updates, last_overflow, hysteresis }) = &mut self.dynamic else {
            return;
        };
        if plan.consecutive_hysteresis {
            *hysteresis = plan.hysteresis;
        }
        //= torch 2.9.0 amp/grad_scaler.py GradScaler.update
        // The number of applied updates since the last overflow. PyTorch counts the current update
        // and DeepSpeed does not, so their first doublings differ by one step.
        let good = match plan.growth {
            ScaleGrowth::AfterWindow => *updates as i64 - *last_overflow - 1,
            ScaleGrowth::AtWindow => *updates as i64 - *last_overflow,
        };
        if good > 0 && (good as u64).is_multiple_of(plan.window) {
            *hysteresis = plan.hysteresis;
            let doubled = self.scale * 2.0;
            // PyTorch keeps its scale in an f32 and does not let it grow to infinity. DeepSpeed has
            // no limit.
            if plan.growth == ScaleGrowth::AfterWindow || doubled <= f64::from(f32::MAX) {
                self.scale = doubled;
            }
        }
        *updates += 1;
    }

    //= deepspeed 0.19.8 runtime/fp16/loss_scaler.py DynamicLossScaler hysteresis
    /// Records a step that was skipped for an overflow.
    ///
    /// # Errors
    /// Returns an error if the scale has to be halved but is already at its minimum. The scaler is
    /// then unchanged.
    pub fn overflowed(&mut self) -> Result<(), ScaleExhausted> {
        let Some(Dynamic { plan, updates, last_overflow, hysteresis }) = &mut self.dynamic else {
            return Ok(());
        };
        // With a `hysteresis` of 1 in the plan, the counter is above 1 only after a checkpoint of a
        // run with another hysteresis.
        if plan.hysteresis == 1 || *hysteresis == 1 {
            //= deepspeed 0.19.8 runtime/fp16/loss_scaler.py DynamicLossScaler minimum
            if self.scale == plan.min_scale {
                return Err(ScaleExhausted { minimum: plan.min_scale });
            }
            self.scale = (self.scale / 2.0).max(plan.min_scale);
        } else {
            *hysteresis -= 1;
        }
        *last_overflow = *updates as i64;
        *updates += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scaler(power: i32, window: u64, hysteresis: u64) -> LossScaler {
        LossScaler::new(&LossScalePlan::Dynamic(DynamicScalePlan {
            initial_scale: 2_f64.powi(power),
            window,
            hysteresis,
            consecutive_hysteresis: false,
            min_scale: 1.0,
            growth: ScaleGrowth::AfterWindow,
        }))
    }

    fn with(mut scaler: LossScaler, change: impl Fn(&mut DynamicScalePlan)) -> LossScaler {
        if let Some(dynamic) = &mut scaler.dynamic {
            change(&mut dynamic.plan);
        }
        scaler
    }

    /// Returns `[scale used, scale after, hysteresis after]` of each update. `g` is an applied
    /// update and `o` an overflow. The element is `None` if the scaler returns an error.
    fn follow(mut scaler: LossScaler, updates: &str) -> Vec<Option<[f64; 3]>> {
        let update = |update| {
            let used = scaler.scale();
            match update {
                'g' => scaler.applied(),
                _ => scaler.overflowed().ok()?,
            }
            Some([used, scaler.scale(), scaler.state()?.hysteresis as f64])
        };
        updates.chars().map(update).collect()
    }

    fn all(rows: &[[f64; 3]]) -> Vec<Option<[f64; 3]>> {
        rows.iter().copied().map(Some).collect()
    }

    // The rows below were computed with the scaler of DeepSpeed 0.19.6.

    //= deepspeed 0.19.8 runtime/fp16/loss_scaler.py DynamicLossScaler growth
    #[test]
    fn doubles_after_the_window_and_one() {
        let rows = [
            [256.0, 256.0, 1.0],
            [256.0, 256.0, 1.0],
            [256.0, 512.0, 1.0],
            [512.0, 512.0, 1.0],
            [512.0, 1024.0, 1.0],
            [1024.0, 1024.0, 1.0],
            [1024.0, 2048.0, 1.0],
            [2048.0, 2048.0, 1.0],
        ];
        assert_eq!(follow(scaler(8, 2, 1), "gggggggg"), all(&rows));
    }

    //= deepspeed 0.19.8 runtime/fp16/loss_scaler.py DynamicLossScaler minimum
    #[test]
    fn halves_down_to_its_minimum_and_gives_up_there() {
        let quarter = with(scaler(4, 2, 1), |plan| plan.min_scale = 0.25);
        let mut rows: Vec<_> =
            (0..6).map(|i| Some([16.0 / 2_f64.powi(i), 8.0 / 2_f64.powi(i), 1.0])).collect();
        rows.push(None);
        assert_eq!(follow(quarter, "ooooooo"), rows);

        let one: Vec<_> = (0..4)
            .map(|i| Some([16.0 / 2_f64.powi(i), 8.0 / 2_f64.powi(i), 1.0]))
            .chain([None])
            .collect();
        assert_eq!(follow(scaler(4, 1000, 1), "ooooo"), one);
        let two = [vec![Some([16.0, 16.0, 1.0])], one].concat();
        assert_eq!(follow(scaler(4, 1000, 2), "oooooo"), two);
    }

    #[test]
    fn overflows_and_good_steps_mixed() {
        let rows = [
            [256.0, 128.0, 1.0],
            [128.0, 64.0, 1.0],
            [64.0, 64.0, 1.0],
            [64.0, 64.0, 1.0],
            [64.0, 128.0, 1.0],
            [128.0, 64.0, 1.0],
        ];
        assert_eq!(follow(scaler(8, 2, 1), "oogggo"), all(&rows));
    }

    //= deepspeed 0.19.8 runtime/fp16/loss_scaler.py DynamicLossScaler hysteresis
    #[test]
    fn hysteresis_is_refilled_by_doubling_only() {
        let updates = "ogogggggo";
        let rows = [
            [256.0, 256.0, 1.0],
            [256.0, 256.0, 1.0],
            [256.0, 128.0, 1.0],
            [128.0, 128.0, 1.0],
            [128.0, 128.0, 1.0],
            [128.0, 128.0, 1.0],
            [128.0, 256.0, 2.0],
            [256.0, 256.0, 2.0],
            [256.0, 256.0, 1.0],
        ];
        assert_eq!(follow(scaler(8, 3, 2), updates), all(&rows));

        let consecutive = with(scaler(8, 3, 2), |plan| plan.consecutive_hysteresis = true);
        let rows = [
            [256.0, 256.0, 1.0],
            [256.0, 256.0, 2.0],
            [256.0, 256.0, 1.0],
            [256.0, 256.0, 2.0],
            [256.0, 256.0, 2.0],
            [256.0, 256.0, 2.0],
            [256.0, 512.0, 2.0],
            [512.0, 512.0, 2.0],
            [512.0, 512.0, 1.0],
        ];
        assert_eq!(follow(consecutive, updates), all(&rows));

        let rows = [
            [256.0, 256.0, 2.0],
            [256.0, 256.0, 1.0],
            [256.0, 256.0, 1.0],
            [256.0, 256.0, 1.0],
            [256.0, 256.0, 1.0],
            [256.0, 512.0, 3.0],
            [512.0, 512.0, 2.0],
            [512.0, 512.0, 1.0],
        ];
        assert_eq!(follow(scaler(8, 3, 3), "ooggggoo"), all(&rows));
    }

    #[test]
    fn a_guides_power_of_32_loses_17_updates_and_gives_up_at_the_34th() {
        let rows = follow(scaler(32, 1000, 2), &"o".repeat(34));
        assert_eq!(rows[16], Some([131_072.0, 65_536.0, 1.0]));
        assert!(rows[..33].iter().all(Option::is_some));
        assert_eq!(rows[33], None);
    }

    //= deepspeed 0.19.8 runtime/fp16/loss_scaler.py DynamicLossScaler growth
    #[test]
    fn the_default_first_grows_on_update_1001() {
        let rows = follow(scaler(16, 1000, 2), &"g".repeat(1001));
        assert_eq!(rows[999], Some([65_536.0, 65_536.0, 2.0]));
        assert_eq!(rows[1000], Some([65_536.0, 131_072.0, 2.0]));
    }

    //= torch 2.9.0 amp/grad_scaler.py GradScaler.update
    // The scales were computed with torch.amp.GradScaler of PyTorch 2.9.0.
    #[test]
    fn grad_scaler_doubles_with_the_last_step_of_a_window_and_halves_at_once() {
        let torch = |power| {
            let scaler = with(scaler(power, 3, 1), |plan| plan.growth = ScaleGrowth::AtWindow);
            with(scaler, |plan| plan.min_scale = f64::from(f32::MIN_POSITIVE))
        };
        let scales = |power, updates| -> Vec<f64> {
            follow(torch(power), updates).into_iter().flatten().map(|row| row[1].log2()).collect()
        };
        let expected = [8.0, 8.0, 9.0, 9.0, 9.0, 10.0, 10.0, 9.0, 9.0, 9.0, 10.0, 9.0];
        assert_eq!(scales(8, "gggggggogggo"), expected);
        // 2^128 is beyond f32.
        let expected = [126.0, 126.0, 127.0, 127.0, 127.0, 127.0, 127.0, 127.0, 127.0];
        assert_eq!(scales(126, "ggggggggg"), expected);
    }

    #[test]
    fn a_fixed_scale_stays() {
        let mut fixed = LossScaler::new(&LossScalePlan::Static { scale: 128.0 });
        fixed.overflowed().unwrap();
        fixed.applied();
        assert_eq!((fixed.scale(), fixed.state()), (128.0, None));
    }

    proptest! {
        #[test]
        fn the_scale_stays_a_power_of_two_at_or_above_its_minimum(
            updates in "[go]{0,200}", window in 1_u64..5, hysteresis in 1_u64..4,
        ) {
            let rows = follow(scaler(8, window, hysteresis), &updates);
            for row in rows.into_iter().map_while(|row| row) {
                prop_assert!(row[1] >= 1.0 && row[1].log2().fract() == 0.0);
                prop_assert!((1.0..=hysteresis as f64).contains(&row[2]));
            }
        }
    }
}
