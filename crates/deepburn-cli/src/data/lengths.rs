//! Lengths of samples: the maximum length of the model, and the curriculum.
//!
//! A curriculum truncates samples in the first steps of training. It changes neither the order of samples nor their
//! number in a step.

use deepburn::NextStep;
use deepburn::schedule::sequence_length;
use deepburn_config::{CurriculumPlan, Job};

use crate::failure::Failure;

/// Micro-batches that a data loader assembles in advance.
pub(crate) const PREFETCH: usize = 4;

/// Checks that samples are not longer than `allowed`, the value of `field` in the model's configuration.
///
/// # Errors
/// Returns a user's mistake if `data.sequence_length` exceeds `allowed`.
pub(crate) fn check_length(job: &Job, allowed: usize, field: &str) -> Result<(), Failure> {
    let length = job.data.sequence_length;
    if length <= allowed {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "data.sequence_length: too long: {length}; the model supports at most {allowed} (model.config.{field})"
    )))
}

/// Returns the maximum number of tokens of a sample in the next step.
///
/// The difficulty depends on the number of applied steps, so that skipped steps do not advance the curriculum.
pub(crate) fn longest(curriculum: Option<&CurriculumPlan>, next: NextStep) -> usize {
    // Steps of a curriculum count from 1.
    curriculum.map_or(usize::MAX, |plan| sequence_length(plan, next.applied_steps as usize + 1))
}
