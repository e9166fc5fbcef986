//! One optimizer step of the training loop: its micro-batches, its update and its record.

use std::time::{Duration, Instant};

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Category, Group, Ledger, Tier, Training};

use super::TrainLoop;
use crate::answers::RewardSums;
use crate::engine::{PhaseTimes, Step};
use crate::hook::Hook;
use crate::metrics::{MemoryRow, PhaseSeconds, StepRow};
use crate::source::{NextStep, StepBatches};
use crate::task::{Batch, Task};
use crate::train_batch::{MicroBatches, TrainedBatch};
use crate::{BoxError, Cause, EngineError};

/// Flags that the ranks combine once per step.
pub(super) struct RankFlags {
    /// Whether this rank was interrupted; over all ranks, whether any was.
    pub(super) interrupted: bool,
    /// Whether this rank has written its part of a checkpoint; over all ranks, whether every rank
    /// has.
    pub(super) written: bool,
}

/// The data of one optimizer step.
pub(super) struct StepData<T> {
    /// The start time of the step.
    pub(super) started: Instant,
    /// The time spent waiting for the data.
    pub(super) waited: Duration,
    /// The micro-batches of this rank, in order.
    pub(super) micro_batches: Vec<T>,
    /// The sums over the micro-batches of all ranks.
    pub(super) totals: Totals,
}

impl<B, M, T, S> TrainLoop<'_, '_, B, M, T, S>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    /// Runs one optimizer step, or skips it if it has no target. Returns its record and the
    /// combined flags of all ranks.
    pub(super) fn train_step(
        &mut self,
        data: StepData<T::Batch>,
        mine: RankFlags,
    ) -> Result<(StepRow, RankFlags), Cause> {
        let StepData { started, waited, micro_batches, totals } = data;
        let (loss_sum, step) = match totals.targets > 0.0 {
            true => self.run_micro_batches(micro_batches, &totals)?,
            // The mean over no target does not exist.
            false => (f64::NAN, self.engine.skip_step()),
        };
        let engine = &mut *self.engine;
        // The loss, the flags and the rewards share one collective, because its latency does not
        // depend on the number of values. All stages of a pipeline have the losses, and the first
        // one sums them.
        let is_counted = engine.states().stages().is_none_or(|stages| stages.stage() == 0);
        let counted = |value: f64| if is_counted { value } else { 0.0 };
        let flags = [f64::from(mine.interrupted), f64::from(mine.written)];
        let mut message = vec![counted(loss_sum), flags[0], flags[1]];
        let rewards = self.task.take_rewards();
        message.extend(rewards.iter().flat_map(|rewards| rewards.sums().map(counted)));
        let tag = CollectiveTag::new("loss", 0);
        let sums = engine.group().sum(tag, message).map_err(EngineError::from)?;
        let world_size = engine.group().world_size() as f64;
        let all = RankFlags { interrupted: sums[1] > 0.0, written: sums[2] == world_size };

        let PhaseTimes { forward, backward, step: optimizer } = engine.take_times();
        let [data, forward, backward, optimizer] =
            [waited, forward, backward, optimizer].map(|time| time.as_secs_f64());
        engine.count_tokens(totals.tokens as u64);
        // The task of a run either has rewards on all ranks, four sums, or none.
        let rewards = sums[3..].try_into().ok();
        let rewards = rewards.and_then(|sums| RewardSums::from_sums(sums).means());
        // The time of this rank, which includes waiting for data.
        let step_seconds = started.elapsed().as_secs_f64();
        let row = StepRow {
            step: step.number,
            loss: sums[0] / totals.targets,
            lr: step.learning_rate,
            grad_norm: step.gradient_norm,
            loss_scale: step.loss_scale,
            skipped: step.is_skipped(),
            tokens: totals.tokens as u64,
            step_seconds,
            tokens_per_second: totals.tokens / step_seconds,
            memory: memory_row(engine.ledger()),
            seconds: Some(PhaseSeconds { data, forward, backward, optimizer }),
            rewards_chosen: rewards.map(|it| it.chosen),
            rewards_rejected: rewards.map(|it| it.rejected),
            rewards_margins: rewards.map(|it| it.margins),
            rewards_accuracies: rewards.map(|it| it.accuracies),
        };
        Ok((row, all))
    }

    /// Runs the micro-batches of a step and its update. Returns the sum of this rank's losses over
    /// all targets, and the record of the step.
    fn run_micro_batches(
        &mut self,
        batches: Vec<T::Batch>,
        totals: &Totals,
    ) -> Result<(f64, Step), Cause> {
        let data_ranks = self.engine.data_ranks() as f64;
        let counts: Vec<f64> = batches.iter().map(|batch| batch.num_targets() as f64).collect();
        let (task, hooks, targets) = (self.task, &mut *self.hooks, totals.targets);
        let mut batches = StepPasses { task, batches, hooks, data_ranks, targets };
        let TrainedBatch { losses, step } = self.engine.train_batch(&mut batches)?;
        // The loss of a step is the sum over all targets divided by their number, so that
        // micro-batches of different lengths are weighted correctly.
        let loss_sum = losses.iter().zip(counts).fold(0.0, |sum, (loss, count)| sum + count * loss);
        Ok((loss_sum, step))
    }
}

/// The passes of a step.
///
/// Each micro-batch is weighted by its number of targets, so that the gradient of a step is the
/// mean over all targets of the step on all ranks, even if micro-batches have different lengths.
/// The factor `data_ranks`, the number of ranks with different data, is needed because gradients
/// are averaged over them.
///
/// ```text
/// weight of micro-batch i on rank r = targets(r, i) * data_ranks / targets of the step
/// ```
///
/// A micro-batch without targets has the weight 0. It is run nevertheless, because other ranks take
/// part in its collectives.
struct StepPasses<'a, 'h, T, U> {
    task: &'a T,
    batches: Vec<U>,
    hooks: &'a mut [Box<dyn Hook + 'h>],
    /// The number of ranks with different data.
    data_ranks: f64,
    /// The number of targets of the step on all ranks.
    targets: f64,
}

impl<B, M, T> MicroBatches<B, M> for StepPasses<'_, '_, T, T::Batch>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    fn loss(&mut self, model: &M, index: usize) -> Result<Tensor<Training<B>, 1>, Cause> {
        self.task.loss(model, &self.batches[index]).map_err(Cause::Outside)
    }

    fn weight(&self, index: usize) -> f64 {
        self.batches[index].num_targets() as f64 * self.data_ranks / self.targets
    }

    fn check(&self, index: usize, loss: f64) -> Result<(), Cause> {
        // A weight of 0 does not remove NaN from the gradients.
        if self.batches[index].num_targets() > 0 || loss.is_finite() {
            return Ok(());
        }
        Err(Cause::Outside(
            format!(
                "the loss of a micro-batch without targets is {loss}; it must be 0: divide the sum of the losses by \
                 at least 1 in `Task::loss`"
            )
            .into(),
        ))
    }

    fn after_phase(&mut self, ledger: &Ledger) {
        self.hooks.iter_mut().for_each(|hook| hook.after_phase(ledger));
    }
}

/// Checks that a data source returned all micro-batches of a step.
///
/// # Errors
/// Returns the error of the source, or an error if it returned another number.
pub(super) fn complete<T>(
    taken: Result<StepBatches<T>, BoxError>,
    next: NextStep,
) -> Result<StepBatches<T>, BoxError> {
    let (found, expected) =
        (taken.as_ref().map_or(0, |it| it.micro_batches.len()), next.micro_batches);
    match taken {
        Ok(_) if found != expected => Err(format!(
            "the data source returned {found} micro-batches for a step of {expected}: return \
             `NextStep::micro_batches` of them"
        )
        .into()),
        taken => taken,
    }
}

/// Sums over all micro-batches of a step on all ranks.
pub(super) struct Totals {
    /// The number of tokens, for throughput.
    pub(super) tokens: f64,
    /// The number of targets (labeled tokens or samples).
    pub(super) targets: f64,
}

impl Totals {
    /// Sums `batches` over the ranks with different data. A rank that could not read its data
    /// passes `None`, and then all ranks return `None`.
    pub(super) fn over_ranks<B: OptimizerOps, T: Batch>(
        group: &Group<B>,
        batches: Option<&[T]>,
    ) -> Result<Option<Self>, EngineError> {
        let own = batches.unwrap_or_default();
        let tokens: usize = own.iter().map(Batch::num_tokens).sum();
        let targets: usize = own.iter().map(Batch::num_targets).sum();
        let mine = vec![tokens as f64, targets as f64, f64::from(batches.is_none())];
        let sums = group.sum(CollectiveTag::new("batch totals", 0), mine)?;
        let totals = Self { tokens: sums[0], targets: sums[1] };
        Ok((sums[2] == 0.0).then_some(totals))
    }
}

/// Returns the memory of this rank during the last step.
///
/// For parameters and optimizer states these are the current bytes, which do not change within a
/// step. All other values are the peaks of the step.
fn memory_row(ledger: &Ledger) -> MemoryRow {
    let usage = |category| ledger.usage(category);
    let total = |tier| ledger.total_on(tier).peak as u64;
    MemoryRow {
        parameters: usage(Category::Parameters).current as u64,
        gradients: usage(Category::Gradients).peak as u64,
        optimizer: usage(Category::Optimizer).current as u64,
        gathered_peak: usage(Category::Gathered).peak as u64,
        activations_peak: usage(Category::Activations).peak as u64,
        device_peak: total(Tier::Device),
        host_peak: total(Tier::Host),
        disk_peak: total(Tier::Disk),
        rss: resident_bytes(),
    }
}

/// Returns the resident set size of this process; 0 if the operating system does not report it.
fn resident_bytes() -> u64 {
    memory_stats::memory_stats().map_or(0, |stats| stats.physical_mem as u64)
}
