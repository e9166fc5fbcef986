//! The length of training in optimizer steps.
//!
//! Main type: [`TrainingLength`]. Main functions: [`num_steps`], and [`steps_within_budget`] for
//! dynamic batching. Epochs are counted by samples. A run that resumes with another batch size or
//! another number of ranks counts the samples of its checkpoint, so that it ends after the same
//! number of samples:
//!
//! ```text
//! 160 samples, 2 epochs, 20 steps of 4 samples, then steps of 8:  20 + (320 - 80) / 8 = 50 steps
//! ```
//!
//! If an epoch ends with a shorter step, this step counts as a full one, so that the samples of a
//! checkpoint depend on its batch sizes. The position of the data loader says which of them are
//! left.
//!
//! Schedules count steps. In the example, the learning rate continues at step 20 of 50.

use deepburn::BatchSchedule;
use deepburn_config::{BatchPlan, DynamicBatchingPlan, Job, StepCount, counted};
use deepburn_datasets::{BudgetSampler, StepPosition, StepShape};

use crate::data::recipe::SubjectInfo;
use crate::failure::Failure;

/// The length of a run.
pub(crate) struct TrainingLength {
    /// Number of samples of each step.
    pub(crate) batch_sizes: BatchSchedule,
    /// Optimizer steps after which training ends.
    pub(crate) max_steps: u64,
    /// Samples of an epoch, over all ranks.
    pub(crate) epoch_samples: u64,
}

impl TrainingLength {
    /// Returns the length of a run with these steps and samples.
    pub(crate) fn new(batch_sizes: BatchSchedule, max_steps: usize, epoch_samples: usize) -> Self {
        Self { batch_sizes, max_steps: max_steps as u64, epoch_samples: epoch_samples as u64 }
    }

    /// Returns a number of steps, which may be a ratio of the steps of the run.
    pub(crate) fn steps_of(&self, count: StepCount) -> u64 {
        count.of(self.max_steps as usize) as u64
    }
}

/// The progress of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The number of optimizer steps.
    pub(crate) step: usize,
    /// The number of samples of these steps, over all ranks.
    pub(crate) samples: usize,
    /// The position in an epoch, for data whose steps end with the epochs.
    pub(crate) position: Option<StepPosition>,
}

impl Progress {
    /// Returns the progress with the samples that the job's steps would have had: of `per_step`
    /// samples, in epochs of `epoch_samples` with the rest of the last step, and `num_samples`
    /// without.
    fn in_steps_of(self, per_step: usize, epoch_samples: usize, num_samples: usize) -> Self {
        let Some(position) = self.position else { return self };
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let drawn = count(position.samples)
            .saturating_add(count(position.micro_batches.saturating_mul(position.batch_samples)));
        // The steps that are left of the current epoch are full steps except for the last one.
        let left = num_samples.saturating_sub(drawn).div_ceil(per_step).saturating_mul(per_step);
        let samples = count(position.epoch)
            .saturating_mul(epoch_samples)
            .saturating_add(epoch_samples.saturating_sub(left));
        Self { samples, ..self }
    }

    /// Returns the number of samples up to which the schedule `batches` has to be followed, so that
    /// training ends after `total` samples.
    fn in_schedule(&self, total: usize, batches: &BatchSchedule) -> usize {
        // In the schedule, the steps of the checkpoint have another number of samples if the batch
        // size changed.
        total.saturating_add(batches.samples_before(self.step)).saturating_sub(self.samples)
    }

    /// Refuses epochs that end before the checkpoint.
    ///
    /// # Errors
    /// Returns a user's mistake if the epochs have fewer samples than the steps before the last
    /// one.
    fn check_epochs(&self, epochs: f64, epoch_samples: usize) -> Result<(), Failure> {
        let total = (epochs * epoch_samples as f64).ceil() as usize;
        // The last step of training may have more samples than are left.
        let per_step = self.samples / self.step.max(1);
        if self.samples < total.saturating_add(per_step.max(1)) {
            return Ok(());
        }
        Err(Failure::mistake(format!(
            "--resume: the checkpoint of step {} was saved after {}, but the job ends after {total} (training.epochs \
             {epochs}); raise training.epochs",
            self.step,
            counted(self.samples, "sample")
        )))
    }
}

/// Maximum number of epochs whose dynamic batches are planned in advance to count steps. Planning
/// an epoch takes some milliseconds.
const MAX_PLANNED_EPOCHS: usize = 10_000;

/// Returns the number of optimizer steps with dynamic batching: `max_steps` or the steps of all
/// epochs, whichever is less.
///
/// The batches of an epoch depend on the lengths of its texts and on their shuffled order. So every
/// epoch is planned in the same way as during training, and its steps are counted.
///
/// # Errors
/// Returns a user's mistake if there are too many epochs, or if a text exceeds the token budget.
pub(super) fn steps_within_budget(
    job: &Job,
    subject: &dyn SubjectInfo,
    batch: BatchPlan,
    dynamic: &DynamicBatchingPlan,
    resumed: Option<&Progress>,
) -> Result<usize, Failure> {
    let shape = StepShape {
        num_ranks: batch.data_parallel_size,
        accumulation: batch.gradient_accumulation_steps,
    };
    let mut sampler = subject.budget_sampler(shape, dynamic)?;
    let epochs = job.training.length.epochs.unwrap_or(f64::INFINITY);
    let max_steps = job.training.length.max_steps.unwrap_or(usize::MAX);
    if epochs > MAX_PLANNED_EPOCHS as f64 && max_steps == usize::MAX {
        return Err(Failure::mistake(format!(
            "training.epochs: {epochs} is too many for dynamic batching, whose steps are counted in advance; use at \
             most {MAX_PLANNED_EPOCHS}, or give training.max_steps"
        )));
    }
    // The steps before a checkpoint may have had other sizes than the planned steps with the same
    // samples.
    let (before, planned) = match resumed {
        Some(resumed) => (resumed.step, planned_steps(sampler.clone(), resumed.samples)),
        None => (0, 0),
    };
    let mut steps = 0;
    for epoch in 0..epochs.ceil() as usize {
        // Every epoch has its own order, and so its own number of steps.
        let plan = sampler.plan();
        if dynamic.verbose && epoch < 10 {
            tracing::info!(
                "epoch {epoch}: {} in {}, {}, {:.1} % padding",
                counted(plan.num_samples(), "sample"),
                counted(plan.num_steps(), "step"),
                counted(plan.num_tokens() as usize, "token"),
                100.0 * plan.padding()
            );
        }
        // The last epoch may be a fraction of one.
        let part = (epochs - epoch as f64).min(1.0);
        steps += (part * plan.num_steps() as f64).ceil() as usize;
        if before + steps.saturating_sub(planned) >= max_steps {
            return Ok(max_steps);
        }
        sampler.next_epoch();
    }
    Ok(before + steps.saturating_sub(planned))
}

/// Returns the number of planned steps that begin before the sample `samples`, counted from the
/// start of training.
fn planned_steps(mut sampler: BudgetSampler, samples: usize) -> usize {
    let mut steps = 0;
    let mut left = samples;
    while left >= sampler.plan().num_samples() {
        left -= sampler.plan().num_samples();
        steps += sampler.plan().num_steps();
        sampler.next_epoch();
    }
    steps + sampler.plan().step_at(left)
}

/// Returns the number of optimizer steps: `max_steps` or the steps of all epochs, whichever is
/// less.
///
/// A fraction of an epoch is rounded up to whole samples, and these to whole steps (without
/// `drop_last`), as in transformers. The samples of the steps before a checkpoint count as they
/// were, not as the job's batch size would have made them. `epoch_samples` counts the last step of
/// an epoch in full.
///
/// # Errors
/// Returns a user's mistake if the epochs have too few samples for a single step, or fewer than the
/// checkpoint.
pub(super) fn num_steps(
    job: &Job,
    info: &dyn SubjectInfo,
    epoch_samples: usize,
    batches: &BatchSchedule,
    resumed: Option<&Progress>,
) -> Result<usize, Failure> {
    let num_ranks = job.training.placement.ranks;
    let full_step = batches.at(0).train_batch_size;
    let num_samples = info.num_samples().map_err(Failure::mistake)?;
    // With a schedule of batch sizes, the epochs of the schedule are planned with the first of
    // them.
    let resumed = resumed.map(|it| match batches.is_constant() {
        true => it.in_steps_of(full_step, epoch_samples, num_samples),
        false => *it,
    });
    if let (Some(epochs), Some(resumed)) = (job.training.length.epochs, &resumed) {
        resumed.check_epochs(epochs, epoch_samples)?;
    }
    // Ranks take equal shares of an epoch.
    let per_rank = epoch_samples / num_ranks;
    let per_step = full_step / num_ranks;
    let by_epochs = job.training.length.epochs.map(|epochs| {
        let samples = (epochs * epoch_samples as f64).ceil() as usize;
        let samples = resumed.map_or(samples, |resumed| resumed.in_schedule(samples, batches));
        let whole = batches.steps_within(samples);
        // Without drop_last, a last step that the samples of the epochs do not fill counts as well.
        let rest = !job.data.drop_last && batches.samples_before(whole) < samples;
        whole + usize::from(rest)
    });
    // The job has at least one of them.
    let steps = [job.training.length.max_steps, by_epochs].into_iter().flatten().min().unwrap_or(0);
    // A checkpoint beyond the last step is an error of `--resume`.
    if steps == 0 && resumed.is_none() {
        let epochs = job.training.length.epochs.unwrap_or(1.0);
        return Err(Failure::mistake(format!(
            "training.epochs: {epochs}: a rank has {} in all, but a step takes {per_step}, so that no step is \
             complete; raise training.epochs, lower deepspeed.train_batch_size or set data.drop_last to false",
            counted((epochs * epoch_samples as f64).ceil() as usize / num_ranks, "sample")
        )));
    }
    if per_step > per_rank {
        tracing::warn!(
            "deepspeed.train_batch_size: a step takes {} per rank, but the train split has {per_rank}, \
             so each step contains samples more than once",
            counted(per_step, "sample")
        );
    } else if let Some(largest) = oversized(batches.at(0), num_samples) {
        tracing::warn!(
            "deepspeed.train_micro_batch_size_per_gpu: a micro-batch has room for {}, but a rank has {largest} in an epoch; \
             the rest is empty and takes as long; lower it to {largest}",
            counted(batches.at(0).micro_batch_size, "sample")
        );
    }
    Ok(steps)
}

/// Returns the number of samples of an epoch on a rank if no micro-batch of `batch` can be full.
fn oversized(batch: BatchPlan, num_samples: usize) -> Option<usize> {
    let largest = num_samples.div_ceil(batch.data_parallel_size);
    (batch.micro_batch_size > largest).then_some(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(train_batch_size: usize, changes: &[(usize, usize)]) -> BatchSchedule {
        let initial = BatchPlan {
            train_batch_size,
            micro_batch_size: 2,
            gradient_accumulation_steps: train_batch_size / 2,
            data_parallel_size: 1,
        };
        BatchSchedule::new(initial, changes.iter().copied()).unwrap()
    }

    /// Returns the last step of training for `total` samples.
    fn last_step(resumed: Progress, total: usize, batches: &BatchSchedule) -> usize {
        batches.steps_within(resumed.in_schedule(total, batches))
    }

    #[test]
    fn a_resumed_run_ends_after_the_same_samples() {
        let resumed = |step, samples| Progress { step, samples, position: None };
        // An unchanged batch size, then 4 to 8 and 8 to 4.
        assert_eq!(last_step(resumed(20, 80), 320, &batches(4, &[])), 80);
        assert_eq!(last_step(resumed(20, 80), 320, &batches(8, &[])), 50);
        assert_eq!(last_step(resumed(20, 160), 320, &batches(4, &[])), 60);
        // A second change: 20 steps of 4, 10 of 8, then 4 again.
        assert_eq!(last_step(resumed(30, 160), 320, &batches(4, &[])), 70);
        // A schedule: steps of 8 up to step 40, then of 16.
        assert_eq!(last_step(resumed(20, 80), 320, &batches(8, &[(40, 16)])), 45);
        assert_eq!(last_step(resumed(20, 320), 320, &batches(8, &[])), 20);
    }

    /// 9 samples in 10 epochs. In steps of 4, an epoch has 3 of them, and the last one has a single
    /// sample.
    #[test]
    fn a_shorter_last_step_is_not_counted_in_full() {
        let ends = |step, epoch, samples, per_step: usize| {
            let epoch_samples = 9_usize.next_multiple_of(per_step);
            let position = StepPosition { epoch, samples, micro_batches: 0, batch_samples: 1 };
            let saved = Progress { step, samples: step * 4, position: Some(position) };
            let resumed = saved.in_steps_of(per_step, epoch_samples, 9);
            last_step(resumed, 10 * epoch_samples, &batches(per_step, &[]))
        };
        // After 5 epochs.
        assert_eq!(ends(15, 5, 0, 4), 30);
        assert_eq!(ends(15, 5, 0, 2), 15 + 5 * 5);
        assert_eq!(ends(15, 5, 0, 8), 15 + 5 * 2);
        assert_eq!(ends(15, 5, 0, 12), 15 + 5);
        // One and two steps later.
        assert_eq!(ends(16, 5, 4, 4), 30);
        assert_eq!(ends(16, 5, 4, 2), 16 + 3 + 4 * 5);
        assert_eq!(ends(17, 5, 8, 2), 17 + 1 + 4 * 5);
        assert_eq!(ends(17, 5, 8, 8), 17 + 1 + 4 * 2);
    }

    #[test]
    fn micro_batches_that_are_never_full_are_found() {
        let batch = |micro_batch_size, data_parallel_size| BatchPlan {
            micro_batch_size,
            data_parallel_size,
            ..batches(4, &[]).at(0)
        };
        assert_eq!(oversized(batch(61, 1), 60), Some(60));
        assert_eq!(oversized(batch(60, 1), 60), None);
        assert_eq!(oversized(batch(60, 2), 61), Some(31));
        assert_eq!(oversized(batch(31, 2), 61), None);
    }

    #[test]
    fn epochs_before_the_checkpoint_are_refused() {
        let resumed = Progress { step: 20, samples: 160, position: None };
        assert!(resumed.check_epochs(1.0, 160).is_ok());
        // The last of these steps has more samples than were left.
        assert!(resumed.check_epochs(1.0, 157).is_ok());
        let error = resumed.check_epochs(0.5, 160).unwrap_err().to_string();
        assert!(error.contains("after 160 samples, but the job ends after 80"), "{error}");
    }
}
