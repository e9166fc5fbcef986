//! Lengths of samples: the maximum length of the model, and the curriculum.
//!
//! A curriculum truncates samples in the first steps of training. It changes neither the order of
//! samples nor their number in a step.

use deepburn::NextStep;
use deepburn::schedule::sequence_length;
use deepburn_config::{CurriculumPlan, CurriculumSchedule, Job, Plan, counted};

use crate::failure::Failure;

/// Micro-batches that a data loader assembles in advance.
pub(crate) const PREFETCH: usize = 4;

/// Checks that samples are not longer than `allowed`, the value of `field` in the model's
/// configuration.
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

/// Checks that the curriculum leaves at least `min_tokens` tokens of a sample, so that every step
/// has a target.
///
/// # Errors
/// Returns a user's mistake if its shortest length is smaller, or if the end of a sample is what is
/// learned.
pub(crate) fn check_curriculum(job: &Job, plan: &Plan, min_tokens: usize) -> Result<(), Failure> {
    let Some(curriculum) = &plan.data_efficiency.curriculum else { return Ok(()) };
    if job.data.kind.samples().is_some() {
        return Err(Failure::mistake(format!(
            "deepspeed.curriculum_learning.enabled: is not supported for data of kind \"{}\": it would cut off the \
             answers, which are at the end of samples; set it to false, and for an order by length, sort the file and set \
             data.shuffle to false",
            job.data.kind.name()
        )));
    }
    // Lengths never decrease, so the first step has the shortest one.
    let shortest = sequence_length(curriculum, 1);
    if shortest >= min_tokens {
        return Ok(());
    }
    let field = match curriculum.schedule {
        CurriculumSchedule::Discrete { .. } => "schedule_config.difficulty",
        CurriculumSchedule::Root { .. } => "min_difficulty",
    };
    Err(Failure::mistake(format!(
        "deepspeed.curriculum_learning.{field}: too short: {shortest}; a sequence needs at least {}, \
         because the first one is not predicted, and no step would have a target; start with {min_tokens} or more",
        counted(min_tokens, "token")
    )))
}

/// Returns the maximum number of tokens of a sample in the next step.
///
/// The difficulty depends on the number of applied steps, so that skipped steps do not advance the
/// curriculum.
pub(crate) fn longest(curriculum: Option<&CurriculumPlan>, next: NextStep) -> usize {
    // Steps of a curriculum count from 1.
    curriculum.map_or(usize::MAX, |plan| sequence_length(plan, next.applied_steps as usize + 1))
}
