//! Limits of the counters that a checkpoint gives, so that training on from them overflows nothing.

use deepburn_deepspeed::Counters;

use super::state::EngineState;
use crate::engine::Progress;

/// Largest counter that is accepted: no run gets there, and products with batch sizes stay in range.
const LARGEST: u64 = 1 << 40;

/// Largest number of samples or tokens that is accepted.
const LARGEST_SUM: u64 = 1 << 62;

/// Makes sure that the counters of a checkpoint are those of a run.
///
/// # Errors
/// The first counter that no run has.
pub(super) fn check_counters(state: &EngineState) -> Result<(), String> {
    let Progress { micro_steps, accumulated, global_steps, skipped_steps, .. } = state.progress;
    let Progress { skipped_in_a_row, global_samples, global_tokens, .. } = state.progress;
    let scale = state.loss_scale;
    check(&[
        ("optimizer_steps", state.optimizer_steps, LARGEST),
        ("progress.micro_steps", micro_steps, LARGEST),
        ("progress.accumulated", accumulated as u64, LARGEST),
        ("progress.global_steps", global_steps, LARGEST),
        ("progress.skipped_steps", skipped_steps, LARGEST),
        ("progress.skipped_in_a_row", skipped_in_a_row, LARGEST),
        ("progress.global_samples", global_samples, LARGEST_SUM),
        ("progress.global_tokens", global_tokens, LARGEST_SUM),
        ("schedule", state.schedule.unsigned_abs(), LARGEST),
        ("loss_scale.iteration", scale.map_or(0, |scale| scale.iteration), LARGEST),
        (
            "loss_scale.last_overflow",
            scale.map_or(0, |scale| scale.last_overflow.unsigned_abs()),
            LARGEST,
        ),
    ])
}

/// The same for a checkpoint of DeepSpeed.
///
/// # Errors
/// The first counter that no run has.
pub(super) fn check_deepspeed_counters(counters: &Counters) -> Result<(), String> {
    let Counters { global_steps, skipped_steps, global_samples, optimizer_steps } = *counters;
    check(&[
        ("global_steps", global_steps, LARGEST),
        ("skipped_steps", skipped_steps, LARGEST),
        ("global_samples", global_samples, LARGEST_SUM),
        ("step", optimizer_steps, LARGEST),
    ])
}

fn check(counters: &[(&str, u64, u64)]) -> Result<(), String> {
    match counters.iter().find(|(_, value, largest)| value > largest) {
        Some((name, value, largest)) => Err(format!(
            "{name} is {value}; at most {largest} is supported; load a checkpoint that a run saved"
        )),
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
            "next_size": null,
            "client": null,
        })
    }

    fn verdict(pointer: &str, value: Value) -> Result<(), String> {
        let mut state = state();
        *state.pointer_mut(pointer).unwrap() = value;
        check_counters(&serde_json::from_value(state).unwrap())
    }

    #[test]
    fn counters_that_no_run_has_are_refused_by_name() {
        assert_eq!(verdict("/optimizer_steps", json!(3)), Ok(()));
        for (pointer, value, name) in [
            ("/optimizer_steps", json!(u64::MAX), "optimizer_steps is 18446744073709551615"),
            ("/progress/global_steps", json!(u64::MAX), "progress.global_steps"),
            ("/progress/global_tokens", json!(u64::MAX), "progress.global_tokens"),
            ("/schedule", json!(i64::MAX), "schedule"),
            ("/loss_scale/last_overflow", json!(i64::MIN), "loss_scale.last_overflow"),
        ] {
            let error = verdict(pointer, value).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
        let counters = Counters {
            global_steps: u64::MAX,
            skipped_steps: 0,
            global_samples: 0,
            optimizer_steps: 0,
        };
        assert!(check_deepspeed_counters(&counters).unwrap_err().contains("global_steps"));
    }
}
