//! The order in which the stages of a pipeline run the passes of a step.

/// A pass of one micro-batch through the blocks of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// The forward pass of a micro-batch.
    Forward(usize),
    /// The backward pass of a micro-batch. It computes the gradients of weights too, unless the
    /// schedule has [`Action::Weights`] of the micro-batch.
    Backward(usize),
    /// The gradients of weights of a micro-batch, which no other stage waits for.
    Weights(usize),
}

/// A pipeline schedule.
///
/// Every schedule runs the backward passes in the order of the micro-batches, and so the gradients
/// of weights. Gradients are therefore added in the order of plain gradient accumulation, and have
/// the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PassSchedule {
    /// All forward passes, then all backward passes (GPipe, Huang et al. 2019).
    FillDrain,
    /// A backward pass as soon as a micro-batch returns from the last stage (1F1B of
    /// PipeDream-Flush, Narayanan et al. 2021). As fast as [`PassSchedule::FillDrain`] with fewer
    /// activations.
    OneForwardOneBackward,
    /// 1F1B that computes gradients of weights when a stage would wait (ZB-H1 of Qi et al. 2023,
    /// "Zero Bubble Pipeline Parallelism"). Stage `s` computes the gradients of micro-batch `k`
    /// after the backward pass of micro-batch `k + s`, so the first stage does not defer any. A
    /// stage waits a third as long as with [`PassSchedule::OneForwardOneBackward`] if forward pass,
    /// gradients of activations and gradients of weights take the same time.
    ZeroBubbleH1,
}

impl PassSchedule {
    //= deepspeed 0.19.8 runtime/pipe/schedule.py TrainSchedule
    /// Returns the passes of `stage`, which is below `stages`, in the order in which it runs them.
    ///
    /// ```
    /// use deepburn_pipeline::Action::{Backward, Forward, Weights};
    /// use deepburn_pipeline::PassSchedule;
    ///
    /// let first = PassSchedule::OneForwardOneBackward.actions(0, 2, 3);
    /// assert_eq!(first, [Forward(0), Forward(1), Backward(0), Forward(2), Backward(1), Backward(2)]);
    /// let last = PassSchedule::ZeroBubbleH1.actions(1, 2, 2);
    /// assert_eq!(
    ///     last,
    ///     [Forward(0), Backward(0), Forward(1), Backward(1), Weights(0), Weights(1)]
    /// );
    /// ```
    pub fn actions(self, stage: usize, stages: usize, micro_batches: usize) -> Vec<Action> {
        // What a stage may hold, it runs ahead, so later stages have work as early as possible.
        let ahead = self.in_flight(stage, stages, micro_batches);
        let deferred = self.deferred(stage, micro_batches);
        let weights = |k: usize| (self == Self::ZeroBubbleH1).then_some(Action::Weights(k));
        let warmup = (0..ahead).map(Action::Forward);
        let steady = (0..micro_batches).flat_map(|k| {
            let next = k + ahead;
            let forward = (next < micro_batches).then_some(Action::Forward(next));
            let due = k.checked_sub(deferred).and_then(weights);
            std::iter::once(Action::Backward(k)).chain(due).chain(forward)
        });
        let rest = (micro_batches - deferred..micro_batches).filter_map(weights);
        warmup.chain(steady).chain(rest).collect()
    }

    /// Returns the maximum number of micro-batches of `stage` between forward and backward, whose
    /// activations it holds.
    pub fn in_flight(self, stage: usize, stages: usize, micro_batches: usize) -> usize {
        match self {
            Self::FillDrain => micro_batches,
            //= deepspeed 0.19.8 runtime/pipe/schedule.py num_pipe_buffers
            Self::OneForwardOneBackward | Self::ZeroBubbleH1 => {
                stages.saturating_sub(stage).max(1).min(micro_batches)
            }
        }
    }

    //= Qi et al. 2023 section 2.1 ZB-H1
    /// Returns the number of micro-batches whose gradients of weights `stage` defers while it runs
    /// other passes. It holds the operands of their products meanwhile. A stage that defers none
    /// computes them in the backward pass, or right after it.
    pub fn deferred(self, stage: usize, micro_batches: usize) -> usize {
        match self {
            Self::FillDrain | Self::OneForwardOneBackward => 0,
            Self::ZeroBubbleH1 => stage.min(micro_batches),
        }
    }
}
