//! Lengths of samples: the maximum of the model, and the curriculum.
//!
//! A curriculum shortens samples in the first steps of training. It changes their length only, so that the order of
//! samples and their number in a step stay the same.

use deepburn::NextStep;
use deepburn::schedule::sequence_length;
use deepburn_config::{CurriculumPlan, Job};

use crate::failure::Failure;

/// Micro-batches that a data loader assembles in advance.
pub(crate) const PREFETCH: usize = 4;

/// Refuses samples that are longer than `allowed`, the value of `field` in the model's configuration.
///
/// # Errors
/// A user's mistake.
pub(crate) fn check_length(job: &Job, allowed: usize, field: &str) -> Result<(), Failure> {
    let length = job.data.sequence_length;
    if length <= allowed {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "data.sequence_length: too long: {length}; the model supports at most {allowed} (model.config.{field})"
    )))
}

/// Returns the most tokens of a sample in the next step.
///
/// The difficulty follows applied steps, so that skipped ones do not advance the curriculum.
pub(crate) fn longest(curriculum: Option<&CurriculumPlan>, next: NextStep) -> usize {
    // Steps of a curriculum count from 1.
    curriculum.map_or(usize::MAX, |plan| sequence_length(plan, next.applied_steps as usize + 1))
}
