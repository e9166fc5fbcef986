//! The order in which the stages of a pipeline run the passes of a step.

/// A pass of one micro-batch through the blocks of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// The forward pass of a micro-batch.
    Forward(usize),
    /// The backward pass of a micro-batch.
    Backward(usize),
}

/// A pipeline schedule.
///
/// Every schedule runs the backward passes in the order of the micro-batches. Gradients are
/// therefore added in the order of plain gradient accumulation, and have the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PassSchedule {
    /// All forward passes, then all backward passes (GPipe, Huang et al. 2019).
    FillDrain,
    /// A backward pass as soon as a micro-batch returns from the last stage (1F1B of
    /// PipeDream-Flush, Narayanan et al. 2021). As fast as [`PassSchedule::FillDrain`] with fewer
    /// activations.
    OneForwardOneBackward,
}

impl PassSchedule {
    //= deepspeed 0.19.8 runtime/pipe/schedule.py TrainSchedule
    /// Returns the passes of `stage`, which is below `stages`, in the order in which it runs them.
    ///
    /// ```
    /// use deepburn_pipeline::Action::{Backward, Forward};
    /// use deepburn_pipeline::PassSchedule;
    ///
    /// let first = PassSchedule::OneForwardOneBackward.actions(0, 2, 3);
    /// assert_eq!(first, [Forward(0), Forward(1), Backward(0), Forward(2), Backward(1), Backward(2)]);
    /// ```
    pub fn actions(self, stage: usize, stages: usize, micro_batches: usize) -> Vec<Action> {
        // What a stage may hold, it runs ahead, so later stages have work as early as possible.
        let ahead = self.in_flight(stage, stages, micro_batches);
        let warmup = (0..ahead).map(Action::Forward);
        let steady = (0..micro_batches).flat_map(|k| {
            let next = k + ahead;
            let forward = (next < micro_batches).then_some(Action::Forward(next));
            std::iter::once(Action::Backward(k)).chain(forward)
        });
        warmup.chain(steady).collect()
    }

    /// Returns the maximum number of micro-batches of `stage` between forward and backward, whose
    /// activations it holds.
    pub fn in_flight(self, stage: usize, stages: usize, micro_batches: usize) -> usize {
        match self {
            Self::FillDrain => micro_batches,
            //= deepspeed 0.19.8 runtime/pipe/schedule.py num_pipe_buffers
            Self::OneForwardOneBackward => stages.saturating_sub(stage).max(1).min(micro_batches),
        }
    }
}
