//! Evaluation: computes the mean loss over a data set, batch by batch.
//!
//! Each rank holds only one batch in memory, regardless of the size of the data set. The ranks
//! exchange flags before each batch and after the last one. If a rank was interrupted or cannot
//! read its data, all ranks stop at the same batch. The run then saves a checkpoint whose
//! `LoopState` marks the evaluation as pending. The resumed run evaluates before its next step, so
//! `metrics.jsonl` has the same rows.

use std::path::PathBuf;

use burn::module::AutodiffModule;
use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;

use crate::answers::Answers;
use crate::error::{BoxError, Cause};
use crate::metrics::EvalRow;
use crate::saving::Interrupt;
use crate::source::EvaluationStream;
use crate::task::{Batch, Evaluation, Task};
use crate::{Engine, EngineError};

/// The result of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The record for `metrics.jsonl`.
    pub row: EvalRow,
    /// The number of targets (labeled tokens or samples) that were evaluated. If it is 0, the loss
    /// is NaN.
    pub num_targets: u64,
    /// The answers to the targets; `None` for a task whose only metric is the loss.
    pub answers: Option<Answers>,
}

/// The progress of an evaluation on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvaluationProgress {
    /// The number of batches that were evaluated.
    pub done: usize,
    /// The number of batches in total.
    pub total: usize,
}

/// Returns the mean loss over the batches of all ranks. Every rank must have the same number of
/// batches, at least one.
///
/// # Errors
/// Returns an error if a batch cannot be created or does not fit the model, or if a collective
/// fails.
pub fn evaluate<B, M, T>(
    engine: &Engine<B, M>,
    task: &T,
    batches: EvaluationStream<'_, T::Batch>,
) -> Result<Measured, Cause>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    let mut sums = Sums::new(engine, task);
    for batch in batches {
        sums.add(&batch.map_err(Cause::Outside)?)?;
    }
    sums.over_ranks()
}

/// How an interruptible evaluation ended.
#[derive(Debug)]
pub enum EvaluationEnd {
    /// All batches were evaluated.
    Completed(Measured),
    /// A rank was interrupted.
    Interrupted,
    /// A rank could not read its data. The error is present on that rank only.
    Unreadable(Option<BoxError>),
}

/// Returns the failure of a run after [`EvaluationEnd::Unreadable`].
///
/// `cause` is the error of this rank, if it has one. A rank whose data is intact waits here until
/// the failure of the other rank ends the run, so that the error message names that rank and its
/// error. `checkpoint` is the checkpoint that was saved before the failure, for the message.
pub fn data_failure<B, M>(
    engine: &Engine<B, M>,
    cause: Option<BoxError>,
    checkpoint: Option<PathBuf>,
) -> Cause
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
{
    if let Some(cause) = cause {
        return Cause::Data { cause, checkpoint };
    }
    match engine.group().sum(CollectiveTag::new("data of another rank", 0), vec![0.0]) {
        Err(error) => EngineError::from(error).into(),
        Ok(_) => Cause::Data { cause: "another rank cannot read its data".into(), checkpoint },
    }
}

/// Evaluates like [`evaluate`], but stops on all ranks if any rank is interrupted or cannot read
/// its data. Calls `after_batch` after each batch. This needs one additional small collective per
/// batch.
///
/// # Errors
/// Returns an error if a batch does not fit the model, or if a collective fails.
pub fn evaluate_until<B, M, T>(
    engine: &Engine<B, M>,
    task: &T,
    mut batches: EvaluationStream<'_, T::Batch>,
    interrupt: &Interrupt,
    mut after_batch: impl FnMut(EvaluationProgress),
) -> Result<EvaluationEnd, Cause>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    let mut sums = Sums::new(engine, task);
    let total = batches.len();
    // The loop has one iteration more than there are batches, so that an interruption during the
    // last batch is noticed.
    for done in 0..=total {
        let (batch, failure) = match batches.next().transpose() {
            Ok(batch) => (batch, None),
            Err(error) => (None, Some(error)),
        };
        // Both flags share one collective.
        let mine = vec![f64::from(interrupt.is_asked()), f64::from(failure.is_some())];
        let tag = CollectiveTag::new("evaluation continues", 0);
        let all = engine.group().sum(tag, mine).map_err(EngineError::from)?;
        // If both happened, the run must not end as one that can simply be resumed.
        if all[1] > 0.0 {
            return Ok(EvaluationEnd::Unreadable(failure));
        }
        if all[0] > 0.0 {
            return Ok(EvaluationEnd::Interrupted);
        }
        if let Some(batch) = batch {
            sums.add(&batch)?;
            after_batch(EvaluationProgress { done: done + 1, total });
        }
    }
    sums.over_ranks().map(EvaluationEnd::Completed)
}

/// Sums over the batches of this rank.
struct Sums<'a, B: OptimizerOps, M: AutodiffModule<Training<B>>, T> {
    /// The engine of this rank.
    engine: &'a Engine<B, M>,
    /// Evaluates a batch.
    task: &'a T,
    /// Loss, number of targets, then the [`Answers::sums`].
    sums: Vec<f64>,
    /// The answers of the first batch, whose kind is the kind of all batches.
    answers: Option<Answers>,
}

impl<'a, B, M, T> Sums<'a, B, M, T>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    /// Returns sums of 0 for the loss and the number of targets.
    fn new(engine: &'a Engine<B, M>, task: &'a T) -> Self {
        Self { engine, task, sums: vec![0.0; 2], answers: None }
    }

    /// Evaluates a batch and adds its sums.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model, or if a collective fails.
    fn add(&mut self, batch: &T::Batch) -> Result<(), Cause> {
        let measured = self.engine.evaluate(|model| self.task.evaluate(model, batch))?;
        let Evaluation { loss_sum, answers } = measured.map_err(Cause::Outside)?;
        // All numbers are summed in f64, so that one collective is enough; counts stay exact up to
        // 2^53.
        let counts = answers.iter().flat_map(Answers::sums);
        let found: Vec<f64> =
            [loss_sum, batch.num_targets() as f64].into_iter().chain(counts).collect();
        // The number of classes is known only after the first batch.
        self.sums.resize(found.len(), 0.0);
        self.sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
        self.answers = self.answers.take().or(answers);
        Ok(())
    }

    /// Sums over all ranks and divides by the number of targets.
    ///
    /// Without targets, the loss is NaN and there are no other metrics.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    fn over_ranks(self) -> Result<Measured, Cause> {
        let tag = CollectiveTag::new("evaluation", 0);
        let group = self.engine.states().data_group();
        let sums = group.sum(tag, self.sums).map_err(EngineError::from)?;
        // The loss and the number of targets come first.
        let answers = self.answers.map(|answers| answers.with_sums(&sums[2..]));
        let counted = answers.as_ref().filter(|_| sums[1] > 0.0);
        let metrics = counted.map(|answers| answers.metrics(sums[1])).unwrap_or_default();
        Ok(Measured {
            row: EvalRow {
                step: self.engine.global_steps(),
                // Without targets, 0/0 is NaN even if the task returned a loss.
                eval_loss: if sums[1] > 0.0 { sums[0] / sums[1] } else { f64::NAN },
                ..metrics
            },
            num_targets: sums[1] as u64,
            answers,
        })
    }
}
