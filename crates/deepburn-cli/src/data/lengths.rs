//! How long samples are: what the model allows, and what a curriculum does.

use deepburn::NextStep;
use deepburn_config::{CurriculumPlan, Job};

use crate::failure::Failure;

/// Micro-batches assembled ahead of their use.
pub(crate) const PREFETCH: usize = 4;

/// Refuses samples longer than the model allows, as `field` of its configuration says.
pub(crate) fn check_length(job: &Job, allowed: usize, field: &str) -> Result<(), Failure> {
    let length = job.data.sequence_length;
    if length <= allowed {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "data.sequence_length: {length} is longer than the model allows (model.config.{field} = \
         {allowed}); use at most that"
    )))
}

/// Tokens of a sample in the next step, at most.
pub(crate) fn longest(curriculum: Option<&CurriculumPlan>, next: NextStep) -> usize {
    // Steps of a curriculum count from 1.
    curriculum.map_or(usize::MAX, |plan| plan.difficulty(next.applied_steps as usize + 1))
}
