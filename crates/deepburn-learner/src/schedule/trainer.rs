//! The schedules of transformers' Trainer, with the formulae of its `optimization.py`.

use std::f64::consts::PI;

use deepburn_config::{RampShape, TrainerCurve, TrainerSchedule, WarmupStableDecay};

//= transformers 5.23.0 optimization.py get_scheduler
/// Returns the factor of the learning rate after `done` applied steps.
pub(super) fn factor(schedule: &TrainerSchedule, done: f64) -> f64 {
    let TrainerSchedule { warmup_steps, total_steps, curve, .. } = schedule;
    let (warmup, total) = (*warmup_steps as f64, *total_steps as f64);
    if done < warmup {
        return match curve {
            TrainerCurve::CosineWarmupWithMinLr { warmup_lr_rate: None, .. } => {
                // This warm-up is one step ahead of the others: it starts at 1 / warmup and not at
                // 0.
                (done + 1.0) / warmup
            }
            TrainerCurve::CosineWarmupWithMinLr { warmup_lr_rate: Some(start), .. } => {
                start + (1.0 - start) * done / (warmup - 1.0).max(1.0)
            }
            TrainerCurve::WarmupStableDecay(parts) => ramp(parts, done / warmup),
            _ => done / warmup,
        };
    }
    let decay_steps = (total - warmup).max(1.0);
    let progress = (done - warmup) / decay_steps;
    match curve {
        TrainerCurve::ConstantWithWarmup => 1.0,
        TrainerCurve::Linear => ((total - done) / decay_steps).max(0.0),
        TrainerCurve::Cosine { num_cycles } => cosine(*num_cycles, progress, 0.0),
        TrainerCurve::CosineWithRestarts { num_cycles } => match progress < 1.0 {
            true => 0.5 * (1.0 + (PI * (num_cycles * progress % 1.0)).cos()),
            false => 0.0,
        },
        TrainerCurve::Polynomial { lr_end, power } => {
            // Beyond the end, the power of a negative number would not be a number.
            let remaining = (1.0 - progress).max(0.0);
            ((schedule.lr - lr_end) * remaining.powf(*power) + lr_end) / schedule.lr
        }
        TrainerCurve::InverseSqrt { timescale } => {
            // The root is shifted by the warm-up, so that the factor is 1 where the warm-up ends.
            let timescale = *timescale as f64;
            1.0 / ((done + timescale - warmup) / timescale).sqrt()
        }
        TrainerCurve::CosineWithMinLr { num_cycles, min_lr_rate } => {
            cosine(*num_cycles, progress, *min_lr_rate)
        }
        TrainerCurve::CosineWarmupWithMinLr { num_cycles, min_lr_rate, .. } => {
            // The decay of this curve is one step ahead of the others.
            cosine(*num_cycles, (done - warmup + 1.0) / decay_steps, *min_lr_rate)
        }
        TrainerCurve::WarmupStableDecay(parts) => stable_decay(parts, done - warmup),
    }
}

/// Returns the factor of `cycles` periods of a cosine between 1 and `min`, at `progress` from 0 to
/// 1.
fn cosine(cycles: f64, progress: f64, min: f64) -> f64 {
    let factor = 0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos());
    (factor * (1.0 - min) + min).max(0.0)
}

/// Returns the factor of a warm-up-stable-decay schedule in its warm-up, at `progress` from 0 to 1.
fn ramp(parts: &WarmupStableDecay, progress: f64) -> f64 {
    let factor = match parts.warmup_type {
        RampShape::Linear => progress,
        RampShape::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
        RampShape::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
    };
    factor * (1.0 - parts.min_lr_ratio) + parts.min_lr_ratio
}

/// Returns the factor of a warm-up-stable-decay schedule `done` steps after its warm-up.
fn stable_decay(parts: &WarmupStableDecay, done: f64) -> f64 {
    let WarmupStableDecay { num_stable_steps, num_decay_steps, min_lr_ratio: min, .. } = *parts;
    let (done, decay_steps) = (done - num_stable_steps as f64, num_decay_steps as f64);
    if done < 0.0 {
        return 1.0;
    }
    if done >= decay_steps {
        return min;
    }
    let progress = done / decay_steps;
    let factor = match parts.decay_type {
        RampShape::Linear => 1.0 - progress,
        RampShape::Cosine => return cosine(parts.num_cycles, progress, min),
        RampShape::OneMinusSqrt => 1.0 - progress.sqrt(),
    };
    factor * (1.0 - min) + min
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use deepburn_config::{Job, JobRequest, resolve};
    use serde_json::{Value, json};

    use crate::schedule::Schedule;

    /// Returns the learning rates of a job with the keys `training`.
    fn rates(training: &Value, steps: usize) -> Vec<f64> {
        let deepspeed = json!({ "train_micro_batch_size_per_gpu": 1 });
        let job = json!({ "training": training, "deepspeed": deepspeed }).to_string();
        let (job, written) =
            Job::parse(&job, "job", Path::new(""), &JobRequest::default()).unwrap();
        let mut schedule =
            Schedule::new(&resolve(&written, &job.run_context()).unwrap().plan.schedule);
        (0..steps)
            .map(|_| {
                let lr = schedule.learning_rate();
                schedule.advance();
                lr
            })
            .collect()
    }

    //= transformers 5.23.0 optimization.py get_scheduler
    #[test]
    fn rates_equal_transformers() {
        let text = include_str!("../../tests/data/transformers_schedules.json");
        let cases: Vec<Value> = serde_json::from_str(text).unwrap();
        assert_eq!(cases.len(), 24);
        for mut case in cases {
            let expected = case.as_object_mut().unwrap().remove("rates").unwrap();
            let expected: Vec<f64> = serde_json::from_value(expected).unwrap();
            let found = rates(&case, expected.len());
            for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                // The order of operations differs by at most a few roundings of f64.
                let close = (found - expected).abs() <= 1e-15_f64.max(1e-12 * expected);
                assert!(close, "{case}: step {}: {found} is not {expected}", step + 1);
            }
        }
    }

    #[test]
    fn every_rate_after_the_end_is_a_number() {
        let kwargs = |name| match name {
            "cosine_with_min_lr" | "cosine_warmup_with_min_lr" => json!({ "min_lr_rate": 0.1 }),
            "warmup_stable_decay" => json!({ "num_decay_steps": 2 }),
            "polynomial" => json!({ "power": 0.5 }),
            _ => json!({}),
        };
        for name in [
            "constant_with_warmup",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
        ] {
            for warmup in [0, 1, 3, 5] {
                let training = json!({
                    "lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs(name),
                    "warmup_steps": warmup, "max_steps": 3,
                });
                let rates = rates(&training, 9);
                assert!(rates.iter().all(|lr| (0.0..=1e-3).contains(lr)), "{name}: {rates:?}");
            }
        }
    }
}
