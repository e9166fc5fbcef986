//! Upper limits of the counters in a checkpoint. They ensure that resuming cannot overflow any
//! arithmetic.

use deepburn_deepspeed::Counters;

use super::state::EngineState;
use crate::loss_scale::ScalerState;

/// The largest accepted counter. No real run reaches it, and products with batch sizes still fit
/// into 64 bits.
const LARGEST: u64 = 1 << 40;

/// The largest number of samples or tokens that is accepted.
const LARGEST_SUM: u64 = 1 << 62;

/// The remedy in each error message.
const REMEDY: &str = "load a checkpoint that a run saved";

/// Checks that the counters of a checkpoint are in the range that a run can produce.
///
/// A checkpoint is untrusted input. After loading, its counters are incremented and multiplied by
/// batch sizes, which would overflow with the values of a malicious file.
///
/// # Errors
/// Returns the name, the value and the limit of the first counter that is out of range.
pub(super) fn check_counters(state: &EngineState) -> Result<(), String> {
    let progress = &state.progress;
    check(&[
        ("optimizer_steps", state.optimizer_steps, LARGEST),
        ("progress.micro_steps", progress.micro_steps, LARGEST),
        ("progress.accumulated", progress.accumulated as u64, LARGEST),
        ("backward_passes", state.backward_passes.unwrap_or(0) as u64, LARGEST),
        ("progress.global_steps", progress.global_steps, LARGEST),
        ("progress.skipped_steps", progress.skipped_steps, LARGEST),
        ("progress.skipped_in_a_row", progress.skipped_in_a_row, LARGEST),
        ("progress.global_samples", progress.global_samples, LARGEST_SUM),
        ("progress.global_tokens", progress.global_tokens, LARGEST_SUM),
        ("next_size.samples", state.next_size.map_or(0, |size| size.samples), LARGEST),
        (
            "training_loop.evaluations_without_improvement",
            state.training_loop.evaluations_without_improvement,
            LARGEST,
        ),
        ("schedule", state.schedule.unsigned_abs(), LARGEST),
    ])?;
    for (path, start) in &state.state_starts {
        // A parameter cannot have started after the last step: the difference is its own step
        // count.
        let limit = state.optimizer_steps;
        check(&[(&format!("state_starts.{path}"), *start, limit)])?;
    }
    let rates = state.local_rates_bits.map(f64::from_bits);
    if let Some(rates) = rates.filter(|rates| !(0.0..f64::INFINITY).contains(rates)) {
        return Err(format!("its local_rates_bits encode {rates}; it must be 0 or more; {REMEDY}"));
    }
    check_scaler(state.loss_scale)
}

/// Checks the counters of a DeepSpeed checkpoint, its schedule position and its loss scaler.
///
/// # Errors
/// Returns the first counter that is out of range.
pub(super) fn check_deepspeed_counters(
    counters: &Counters,
    schedule: Option<i64>,
    scaler: Option<ScalerState>,
) -> Result<(), String> {
    let Counters { global_steps, skipped_steps, global_samples, optimizer_steps } = *counters;
    check(&[
        ("global_steps", global_steps, LARGEST),
        ("skipped_steps", skipped_steps, LARGEST),
        ("global_samples", global_samples, LARGEST_SUM),
        ("step", optimizer_steps, LARGEST),
        ("lr_scheduler", schedule.unwrap_or(0).unsigned_abs(), LARGEST),
    ])?;
    check_scaler(scaler)
}

/// Checks the dynamic loss scaler: positive finite scale, hysteresis of at least 1.
fn check_scaler(scaler: Option<ScalerState>) -> Result<(), String> {
    let Some(ScalerState { scale, hysteresis, last_overflow, iteration }) = scaler else {
        return Ok(());
    };
    check(&[
        ("loss_scale.iteration", iteration, LARGEST),
        ("loss_scale.last_overflow", last_overflow.unsigned_abs(), LARGEST),
    ])?;
    // The hysteresis counts down to 1, and the next overflow then halves the scale.
    let wrong = match (hysteresis, scale.is_finite() && scale > 0.0) {
        (0, _) => "hysteresis is 0; it must be at least 1".to_owned(),
        (_, false) => format!("scale is {scale}; it must be a positive number"),
        _ => return Ok(()),
    };
    Err(format!("loss_scale.{wrong}; {REMEDY}"))
}

/// Compares each counter, given as name, value and limit.
fn check(counters: &[(&str, u64, u64)]) -> Result<(), String> {
    match counters.iter().find(|(_, value, largest)| value > largest) {
        Some((name, value, largest)) => {
            Err(format!("{name} is {value}; at most {largest} is supported; {REMEDY}"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state() -> Value {
        json!({
            "progress": {
                "micro_steps": 4, "accumulated": 0, "global_steps": 2, "skipped_steps": 0,
                "skipped_in_a_row": 0, "global_samples": 8, "global_tokens": 64,
            },
            "optimizer_steps": 2,
            "loss_scale": {"scale": 65536.0, "hysteresis": 2, "last_overflow": -1, "iteration": 2},
            "schedule": 1,
            "batch": {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "world_size": 2},
            "next_size": {"samples": 4, "lr_factor": 1.0},
            "training_loop": {"evaluations_without_improvement": 0},
            "client": null,
        })
    }

    fn verdict(pointer: &str, value: Value) -> Result<(), String> {
        let mut state = state();
        *state.pointer_mut(pointer).unwrap() = value;
        check_counters(&serde_json::from_value(state).unwrap())
    }

    #[test]
    fn counters_out_of_range_are_refused_by_name() {
        assert_eq!(verdict("/optimizer_steps", json!(3)), Ok(()));
        for (pointer, value, name) in [
            ("/optimizer_steps", json!(u64::MAX), "optimizer_steps is 18446744073709551615"),
            ("/progress/global_steps", json!(u64::MAX), "progress.global_steps"),
            ("/progress/global_tokens", json!(u64::MAX), "progress.global_tokens"),
            ("/next_size/samples", json!(u64::MAX), "next_size.samples"),
            (
                "/training_loop/evaluations_without_improvement",
                json!(u64::MAX),
                "training_loop.evaluations_without_improvement",
            ),
            ("/schedule", json!(i64::MAX), "schedule"),
            ("/loss_scale/last_overflow", json!(i64::MIN), "loss_scale.last_overflow"),
            ("/loss_scale/hysteresis", json!(0), "loss_scale.hysteresis is 0"),
            ("/loss_scale/scale", json!(0.0), "loss_scale.scale is 0; it must be a positive"),
        ] {
            let error = verdict(pointer, value).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn counters_of_deepspeed_are_checked_too() {
        let counters =
            Counters { global_steps: 3, skipped_steps: 1, global_samples: 24, optimizer_steps: 2 };
        let scaler =
            ScalerState { scale: 8.0, hysteresis: 1, last_overflow: -1, iteration: u64::MAX };
        assert_eq!(check_deepspeed_counters(&counters, Some(2), None), Ok(()));
        let endless = Counters { global_steps: u64::MAX, ..counters };
        for (verdict, name) in [
            (check_deepspeed_counters(&endless, None, None), "global_steps"),
            (check_deepspeed_counters(&counters, Some(i64::MAX), None), "lr_scheduler"),
            (check_deepspeed_counters(&counters, None, Some(scaler)), "loss_scale.iteration"),
        ] {
            let error = verdict.unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
