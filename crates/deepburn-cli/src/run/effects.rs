//! Keys of a job that have no effect with its data or its number of steps.
//!
//! Main function: [`add_notes`]. Keys that never have an effect are reported by `deepburn-config`.

use deepburn_config::{
    Cadence, Diagnosis, DynamicBatchingPlan, Job, Severity, StepCount, TrainingJob, counted,
};

/// Adds notes on keys that have no effect with this data or this number of steps.
///
/// Like the notes on the configuration, they are written to `job.json` and to the log. Notes on
/// keys that never have an effect come from the configuration.
pub(crate) fn add_notes(job: &mut Job, dynamic: Option<&DynamicBatchingPlan>, max_steps: usize) {
    let mut note = |severity, key: &str, message: String| {
        job.notes.push(Diagnosis::new(severity, key, message, ""));
    };
    if dynamic.is_some() {
        let message =
            "has no effect: dynamic batching orders samples by its own sequence_picking_order";
        note(Severity::Note, "data.shuffle", message.to_owned());
        if job.data.drop_last {
            let message = "has no effect: dynamic batching drops no sample";
            note(Severity::Warning, "data.drop_last", message.to_owned());
        }
    }
    let late = job.training.batch_size_schedule.iter().find(|(step, _)| *step > max_steps);
    if let Some((step, size)) = late {
        let message = format!(
            "the change to {size} at step {step} has no effect: training ends after step {max_steps}"
        );
        note(Severity::Warning, "training.batch_size_schedule", message);
    }
    for (key, message) in late_keys(&job.training, max_steps) {
        note(Severity::Note, key, message);
    }
}

/// Returns the keys of intervals that are longer than the run, with what happens instead. A ratio
/// of the steps is never longer.
fn late_keys(training: &TrainingJob, max_steps: usize) -> Vec<(&'static str, String)> {
    let interval = |cadence| match cadence {
        Some(Cadence::Every(StepCount::Steps(steps))) => Some(steps),
        _ => None,
    };
    let ends = counted(max_steps, "step");
    let mut keys = Vec::new();
    for (key, cadence, done) in [
        ("training.eval_steps", training.evaluation.eval_steps, "evaluated"),
        ("training.save_steps", training.saving.save_steps, "saved"),
    ] {
        if let Some(steps) = interval(cadence).filter(|steps| *steps > max_steps) {
            let message = format!(
                "is {steps}, but the run has {ends}: the model is only {done} after the last one"
            );
            keys.push((key, message));
        }
    }
    if let (Some(patience), Some(steps)) =
        (training.evaluation.early_stopping_patience, interval(training.evaluation.eval_steps))
    {
        let evaluations = max_steps.div_ceil(steps.max(1));
        // The first evaluation is always the best so far.
        if patience >= evaluations {
            let evaluations = counted(evaluations, "evaluation");
            let message =
                format!("is {patience}, but the run has {evaluations}: training never stops early");
            keys.push(("training.early_stopping_patience", message));
        }
    }
    keys
}
