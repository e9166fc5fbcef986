//! The tasks of a stage: its events with their times on a machine.

use std::collections::HashMap;

use deepburn_meta::Work;

use super::UnknownBandwidth;
use super::machine::{MessageTime, PipelineMachine};
use crate::timeline::{RankEvent, Timeline};

/// What a rank spends time on, other than waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    /// Computation.
    Compute,
    /// Transfers to and from host memory and NVMe.
    Offload,
    /// A collective that the rank cannot hide.
    Exchange,
}

/// A collective of several stages: the size and the stride of its group, and its number among the
/// collectives of this group.
pub(super) type Meeting = (u64, u64, u64);

/// A task of a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum StageTask {
    /// The rank is busy.
    Busy {
        /// The seconds that it takes while all ranks compute.
        seconds: f64,
        /// What it does.
        activity: Activity,
    },
    /// The rank starts a collective.
    Start {
        /// The number of the collective in its stage.
        number: u64,
        /// The seconds that it takes when all of its ranks have started it.
        seconds: f64,
        /// The collective, if other stages take part in it.
        meeting: Option<Meeting>,
    },
    /// The rank waits for the collective with this number.
    Wait {
        /// The number that the collective had at its start.
        number: u64,
    },
    /// The rank sends a message.
    Send {
        /// The number of the message.
        message: u64,
        /// How long it takes.
        time: MessageTime,
    },
    /// The rank waits for a message.
    Receive {
        /// The number of the message.
        message: u64,
    },
}

/// The tasks of a stage, and the bytes that one of its ranks sends.
#[derive(Debug, Default)]
pub(super) struct StageTasks {
    pub(super) tasks: Vec<StageTask>,
    /// Bytes of collectives.
    pub(super) collective_bytes: u64,
    /// Bytes of messages.
    pub(super) message_bytes: u64,
    /// The number of collectives so far of each group that has ranks of several stages, by its size
    /// and stride.
    meetings: HashMap<(u64, u64), u64>,
}

impl PipelineMachine<'_> {
    /// Returns the tasks of a stage with this timeline.
    ///
    /// # Errors
    /// Returns an error if a tier is used whose bandwidth is not known.
    pub(super) fn tasks(
        &self,
        stage: usize,
        timeline: &Timeline,
    ) -> Result<StageTasks, UnknownBandwidth> {
        let mut tasks = StageTasks::default();
        for part in &timeline.parts {
            for _ in 0..part.times {
                for event in &part.events {
                    self.add(stage, event, &mut tasks)?;
                }
            }
        }
        Ok(tasks)
    }

    /// Adds the task of an event.
    fn add(
        &self,
        stage: usize,
        event: &RankEvent,
        sum: &mut StageTasks,
    ) -> Result<(), UnknownBandwidth> {
        match *event {
            // Transfers between tiers are work of their own, which computes nothing.
            RankEvent::Compute(work @ Work { operations: 0, bytes: 0, .. }) => {
                sum.add_busy(self.speed.offload_seconds(&work)?, Activity::Offload);
            }
            RankEvent::Compute(work) => sum.add_busy(self.speed.seconds(&work), Activity::Compute),
            RankEvent::Start { number, collective, ranks } => {
                sum.collective_bytes += collective.bytes_sent(ranks);
                let seconds = self.network.seconds(&collective, ranks, &self.speed);
                let meeting = self.spans_stages(ranks, collective.stride).then(|| {
                    let count = sum.meetings.entry((ranks, collective.stride)).or_default();
                    *count += 1;
                    (ranks, collective.stride, *count)
                });
                sum.tasks.push(StageTask::Start { number, seconds, meeting });
            }
            RankEvent::Wait { number } => sum.tasks.push(StageTask::Wait { number }),
            RankEvent::Send { message, to, bytes } => {
                sum.message_bytes += bytes;
                sum.tasks.push(StageTask::Send { message, time: self.message(stage, to, bytes) });
            }
            RankEvent::Receive { message } => sum.tasks.push(StageTask::Receive { message }),
        }
        Ok(())
    }
}

impl StageTasks {
    /// Adds seconds of an activity. Ops that follow each other are one task, because a step has
    /// many of them for each message.
    fn add_busy(&mut self, more: f64, what: Activity) {
        match self.tasks.last_mut() {
            Some(StageTask::Busy { seconds, activity }) if *activity == what => *seconds += more,
            _ => self.tasks.push(StageTask::Busy { seconds: more, activity: what }),
        }
    }
}
