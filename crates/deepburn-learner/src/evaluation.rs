//! Evaluation: the mean loss over data that trains nothing, batch by batch.
//!
//! Batches are made one at a time, so an evaluation holds one batch of each rank in memory, however large its
//! data is. Ranks agree after each batch whether one of them was asked to end the run, so that a signal is
//! answered within one batch.

use burn::module::AutodiffModule;
use deepburn_comm::Tag;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;

use crate::metrics::EvalRow;
use crate::saving::Interrupt;
use crate::source::EvaluationStream;
use crate::task::{Batch, Confusion, Evaluation, Task};
use crate::train::Cause;
use crate::{Engine, EngineError};

/// What an evaluation found.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The record of it.
    pub row: EvalRow,
    /// Targets that were judged.
    pub num_targets: u64,
    /// Which answers were given, where there is such a thing.
    pub answers: Option<Confusion>,
}

/// How far an evaluation is, on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvaluationProgress {
    /// Batches that were evaluated.
    pub done: usize,
    /// Batches in all.
    pub total: usize,
}

/// Returns the mean loss over the batches of all ranks, of which each has as many, at least one.
///
/// # Errors
/// When a batch cannot be made or does not fit the model, or when a collective fails.
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
    let mut sums = Sums::new();
    for batch in batches {
        sums.add(engine, task, &batch.map_err(Cause::Outside)?)?;
    }
    sums.over_ranks(engine)
}

/// Evaluates like [`evaluate`], calls `after_batch` after each batch, and stops where `interrupt` of any rank is
/// asked: then it returns `None` on all ranks. Costs one small message a batch.
///
/// # Errors
/// As [`evaluate`], and those of `after_batch`.
pub fn evaluate_until<B, M, T>(
    engine: &Engine<B, M>,
    task: &T,
    batches: EvaluationStream<'_, T::Batch>,
    interrupt: &Interrupt,
    mut after_batch: impl FnMut(EvaluationProgress) -> Result<(), Cause>,
) -> Result<Option<Measured>, Cause>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    let mut sums = Sums::new();
    let total = batches.len();
    for (index, batch) in batches.enumerate() {
        sums.add(engine, task, &batch.map_err(Cause::Outside)?)?;
        after_batch(EvaluationProgress { done: index + 1, total })?;
        let asked = vec![f64::from(interrupt.is_asked())];
        let tag = Tag::new("evaluation interrupted", 0);
        if engine.group().sum(tag, asked).map_err(EngineError::from)?[0] > 0.0 {
            return Ok(None);
        }
    }
    sums.over_ranks(engine).map(Some)
}

/// Sums over the batches of this rank: loss, targets, then the counts of answers.
struct Sums(Vec<f64>);

impl Sums {
    fn new() -> Self {
        Self(vec![0.0; 2])
    }

    fn add<B, M, T>(
        &mut self,
        engine: &Engine<B, M>,
        task: &T,
        batch: &T::Batch,
    ) -> Result<(), Cause>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
        T: Task<B, M>,
    {
        let measured = engine.evaluate(|model| task.evaluate(model, batch))?;
        let Evaluation { loss_sum, answers } = measured.map_err(Cause::Outside)?;
        let counts = answers.iter().flat_map(Confusion::counts);
        let found: Vec<f64> =
            [loss_sum, batch.num_targets() as f64].into_iter().chain(counts).collect();
        self.0.resize(found.len(), 0.0);
        self.0.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
        Ok(())
    }

    /// Adds up those of all ranks.
    fn over_ranks<B, M>(self, engine: &Engine<B, M>) -> Result<Measured, Cause>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        let tag = Tag::new("evaluation", 0);
        let sums = engine.group().sum(tag, self.0).map_err(EngineError::from)?;
        let answers = (sums.len() > 2).then(|| Confusion::from_counts(&sums[2..]));
        let accuracy = answers.as_ref().map(|answers| answers.num_correct() as f64 / sums[1]);
        Ok(Measured {
            row: EvalRow {
                step: engine.global_steps(),
                eval_loss: sums[0] / sums[1],
                eval_accuracy: accuracy,
            },
            num_targets: sums[1] as u64,
            answers,
        })
    }
}
