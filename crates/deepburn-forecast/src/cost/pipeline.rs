//! The time of a training step of a pipeline, whose stages wait for each other.
//!
//! Main type: [`PipelineCost`]. The dry run of each stage has the passes of its schedule in order,
//! with the messages between them. The timelines of all stages are replayed on one clock:
//!
//! ```text
//! stage 0  │ F0 │ F1 │ idle │ B0     │ F2 │ B1     │ …   │ norm │ update │
//!               └─► message ┌─┘ message
//! stage 1  │ idle │ F0 │ B0 │ F1 │ B1 │ idle │ …         │ norm │ update │
//! ```
//!
//! - A stage that waits for a message is *idle* until the other stage has sent it and it has
//!   arrived. The sender does not wait: messages are buffered.
//! - A collective of several stages, such as the sum of the gradient norm, starts when the last
//!   stage has reached it. The collectives of one stage cost what they cost without a pipeline.
//! - Rank threads share the cores of their machine. While some ranks wait, the others may be faster
//!   ([`SharedCores`]).
//!
//! Nothing here knows a schedule or its passes: a new schedule, or a new kind of pass, is replayed
//! as the engine runs it. The replicas of a stage are assumed to do the same at the same time, so
//! one rank stands for each stage.

mod machine;
mod replay;
mod tasks;
#[cfg(test)]
mod tests;

pub use machine::SharedCores;

use super::{Network, RankSpeed, StepCost, UnknownBandwidth};
use crate::timeline::Timeline;
use machine::PipelineMachine;

/// The time of a training step of a pipeline, and what each stage does in it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PipelineCost {
    /// The number of ranks of all stages together.
    pub ranks: u64,
    /// The seconds of the step, until the last stage has ended it.
    pub seconds: f64,
    /// The stages. Without a pipeline there is one.
    pub stages: Vec<StageCost>,
}

/// What a rank of one stage does in a step. The seconds of the step are
/// `compute + offload + communication - hidden + idle`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StageCost {
    /// The seconds of computation.
    pub compute: f64,
    /// The seconds of transfers to and from host memory and NVMe.
    pub offload: f64,
    /// The seconds of all collectives, including hidden ones.
    pub communication: f64,
    /// The seconds of collectives that run while the rank computes or is idle.
    pub hidden: f64,
    /// The seconds in which the rank waits for other stages, or for messages on its link.
    pub idle: f64,
    /// The bytes that the rank sends in collectives, without headers.
    pub collective_bytes: u64,
    /// The bytes that the rank sends to other stages in messages.
    pub message_bytes: u64,
}

/// The reason why the time of a pipeline cannot be predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PipelineCostError {
    /// A stage offloads to a tier whose bandwidth is not known.
    #[error(transparent)]
    Bandwidth(#[from] UnknownBandwidth),
    /// The stages wait for each other forever.
    #[error(
        "pipeline stage {stage} waits for a message or a collective that no other stage starts; use the stages of one \
         plan and one model"
    )]
    Stuck {
        /// The first stage that does not end its step.
        stage: usize,
    },
}

impl PipelineCost {
    /// Returns the share of the step (0 to 1) in which the stages wait for each other, as a mean
    /// over the stages; 0 for a step without time.
    pub fn idle_share(&self) -> f64 {
        let all = self.seconds * self.stages.len() as f64;
        if all > 0.0 { self.stages.iter().map(|stage| stage.idle).sum::<f64>() / all } else { 0.0 }
    }

    /// Returns the stage that is idle for the shortest time, which determines the time of the step;
    /// `None` without stages.
    pub fn busiest(&self) -> Option<&StageCost> {
        self.stages.iter().min_by(|one, other| one.idle.total_cmp(&other.idle))
    }

    /// Predicts a step from the timelines of a rank of each stage.
    ///
    /// # Errors
    /// Returns an error if a stage offloads to a tier whose bandwidth is not known, or if the
    /// timelines are not of one step.
    pub(crate) fn of_timelines(
        timelines: &[&Timeline],
        ranks: u64,
        speed: RankSpeed,
        network: &Network,
        cores: Option<SharedCores>,
    ) -> Result<Self, PipelineCostError> {
        if let [only] = timelines {
            // One stage waits for no other, so this is the prediction without a pipeline.
            return Ok(only.cost(ranks, speed, network)?.into());
        }
        let machine =
            PipelineMachine { ranks, stages: timelines.len() as u64, speed, network, cores };
        let tasks = timelines.iter().enumerate().map(|(stage, it)| machine.tasks(stage, it));
        let tasks = tasks.collect::<Result<Vec<_>, _>>()?;
        replay::replay(tasks, &machine)
    }
}

impl From<StepCost> for PipelineCost {
    /// Returns the cost of one stage, which is never idle.
    fn from(cost: StepCost) -> Self {
        let StepCost { ranks, compute, offload, communication, hidden, seconds, bytes_sent } = cost;
        let stage = StageCost {
            compute,
            offload,
            communication,
            hidden,
            collective_bytes: bytes_sent,
            ..StageCost::default()
        };
        Self { ranks, seconds, stages: vec![stage] }
    }
}
