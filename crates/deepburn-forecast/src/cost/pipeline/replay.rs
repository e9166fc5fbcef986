//! Replays the tasks of all stages on one clock.
//!
//! The clock advances from one end of a task to the next. In between, each stage either is busy at
//! a constant speed, or waits for a known time, or waits for another stage. The speed changes when
//! the number of busy stages does, so the time of a task is only known when it has ended:
//!
//! ```text
//! loop   each stage runs the tasks that take no time, up to one that does or that has to wait
//!        the clock advances to the first end of a task or wait
//! ```

use std::collections::{HashMap, VecDeque};

use super::machine::PipelineMachine;
use super::tasks::{Activity, Meeting, StageTask, StageTasks};
use super::{PipelineCost, PipelineCostError, StageCost};
use crate::cost::Network;

/// Runs the tasks of every stage, each in the order of its list.
///
/// # Errors
/// Returns an error if the stages wait for each other forever.
pub(super) fn replay(
    tasks: Vec<StageTasks>,
    machine: &PipelineMachine<'_>,
) -> Result<PipelineCost, PipelineCostError> {
    let mut shared = PipelineState {
        now: 0.0,
        overlaps: matches!(machine.network, Network::Links(_)),
        stages: tasks.len(),
        arrivals: HashMap::new(),
        meetings: HashMap::new(),
    };
    let mut stages: Vec<_> = tasks.into_iter().map(StageReplay::new).collect();
    loop {
        // What a stage waits for may come from a stage that is visited later.
        let mut has_proceeded = true;
        while has_proceeded {
            has_proceeded = false;
            for stage in &mut stages {
                has_proceeded |= stage.proceed(&mut shared);
            }
        }
        let gain = machine.gain(stages.iter().filter(|stage| stage.is_busy()).count());
        let ends = stages.iter().filter_map(|stage| stage.end(shared.now, gain));
        let Some(next) = ends.reduce(f64::min) else { break };
        stages.iter_mut().for_each(|stage| stage.advance(shared.now, next, gain));
        shared.now = next;
    }
    if let Some(stage) = stages.iter().position(|stage| !stage.has_ended()) {
        return Err(PipelineCostError::Stuck { stage });
    }
    let seconds = shared.now;
    let costs = stages.into_iter().map(|stage| stage.cost(seconds, shared.overlaps));
    Ok(PipelineCost { ranks: machine.ranks, seconds, stages: costs.collect() })
}

/// What the stages share.
struct PipelineState {
    /// The seconds since the begin of the step.
    now: f64,
    /// Whether collectives run while a rank computes.
    overlaps: bool,
    /// The number of stages.
    stages: usize,
    /// The times at which messages arrive that have been sent and not received, by number. Messages
    /// with the same number are received in the order in which they were sent.
    arrivals: HashMap<u64, VecDeque<f64>>,
    /// The collectives of several stages that have been started: the number of stages that have
    /// started it, and the earliest time at which their links are free.
    meetings: HashMap<Meeting, (usize, f64)>,
}

/// A started collective that the rank has not awaited.
#[derive(Debug, Clone, Copy)]
struct StartedCollective {
    /// Its duration.
    seconds: f64,
    /// When it ends.
    end: CollectiveEnd,
}

/// The end of a collective.
#[derive(Debug, Clone, Copy)]
enum CollectiveEnd {
    /// At this time.
    At(f64),
    /// Known when all stages have started it.
    Of(Meeting),
}

/// What a stage does now.
#[derive(Debug, Clone, Copy)]
enum StageState {
    /// Its next task begins, or waits for another stage.
    Ready,
    /// It is busy.
    Busy {
        /// The seconds that are left while all ranks compute.
        left: f64,
        activity: Activity,
    },
    /// It waits until a time, for a collective or for a message.
    Until { time: f64, is_collective: bool },
}

/// The progress of one stage.
struct StageReplay {
    tasks: std::iter::Peekable<std::vec::IntoIter<StageTask>>,
    state: StageState,
    /// The time at which the link of the rank becomes free.
    link: f64,
    started: HashMap<u64, StartedCollective>,
    /// The seconds of collectives for which the rank waited.
    exposed: f64,
    cost: StageCost,
}

impl StageReplay {
    fn new(StageTasks { tasks, collective_bytes, message_bytes, .. }: StageTasks) -> Self {
        Self {
            tasks: tasks.into_iter().peekable(),
            state: StageState::Ready,
            link: 0.0,
            started: HashMap::new(),
            exposed: 0.0,
            cost: StageCost { collective_bytes, message_bytes, ..StageCost::default() },
        }
    }

    fn is_busy(&self) -> bool {
        matches!(self.state, StageState::Busy { .. })
    }

    fn has_ended(&self) -> bool {
        self.tasks.len() == 0 && matches!(self.state, StageState::Ready)
    }

    /// Begins tasks until one takes time or waits for another stage. Returns true if a task was
    /// begun.
    fn proceed(&mut self, shared: &mut PipelineState) -> bool {
        let mut has_begun = false;
        while let (StageState::Ready, Some(task)) = (self.state, self.tasks.peek().copied())
            && self.begin(task, shared)
        {
            self.tasks.next();
            has_begun = true;
        }
        has_begun
    }

    /// Begins a task. Returns false if it waits for another stage that is not as far yet.
    fn begin(&mut self, task: StageTask, shared: &mut PipelineState) -> bool {
        let PipelineState { now, overlaps, .. } = *shared;
        // Without overlap there is no link that a collective could occupy while the rank computes.
        let free = if overlaps { now.max(self.link) } else { now };
        match task {
            StageTask::Busy { seconds, activity } => {
                self.state = StageState::Busy { left: seconds, activity };
            }
            StageTask::Start { number, seconds, meeting } => {
                let end = match meeting {
                    None => {
                        self.link = free + seconds;
                        CollectiveEnd::At(self.link)
                    }
                    Some(meeting) => {
                        let (joined, ready) = shared.meetings.entry(meeting).or_default();
                        (*joined, *ready) = (*joined + 1, ready.max(free));
                        CollectiveEnd::Of(meeting)
                    }
                };
                self.cost.communication += seconds;
                self.started.insert(number, StartedCollective { seconds, end });
            }
            StageTask::Wait { number } => {
                let Some(StartedCollective { seconds, end }) = self.started.get(&number).copied()
                else {
                    return true;
                };
                let end = match end {
                    CollectiveEnd::At(end) => end,
                    CollectiveEnd::Of(meeting) => match shared.meetings.get(&meeting) {
                        Some((joined, ready)) if *joined == shared.stages => ready + seconds,
                        _ => return false,
                    },
                };
                self.started.remove(&number);
                self.link = self.link.max(end);
                self.state = match overlaps {
                    true => StageState::Until { time: end, is_collective: true },
                    // Rank threads move the data themselves, while they wait.
                    false => StageState::Busy { left: seconds, activity: Activity::Exchange },
                };
            }
            StageTask::Send { message, time } => {
                self.link = free + time.sending;
                shared.arrivals.entry(message).or_default().push_back(self.link + time.latency);
            }
            StageTask::Receive { message } => {
                let arrival = shared.arrivals.get_mut(&message).and_then(VecDeque::pop_front);
                let Some(time) = arrival else { return false };
                self.state = StageState::Until { time, is_collective: false };
            }
        }
        true
    }

    /// Returns the time at which the stage ends what it does; `None` if it waits for another stage
    /// or has ended.
    fn end(&self, now: f64, gain: f64) -> Option<f64> {
        match self.state {
            StageState::Ready => None,
            StageState::Busy { left, .. } => Some(now + left / gain),
            StageState::Until { time, .. } => Some(time.max(now)),
        }
    }

    /// Advances the stage from `now` to `next`, which is not after the end of what it does.
    fn advance(&mut self, now: f64, next: f64, gain: f64) {
        let (passed, end) = (next - now, self.end(now, gain));
        match &mut self.state {
            StageState::Ready => {}
            StageState::Busy { left, activity } => {
                match activity {
                    Activity::Compute => self.cost.compute += passed,
                    Activity::Offload => self.cost.offload += passed,
                    Activity::Exchange => self.exposed += passed,
                }
                *left -= passed * gain;
            }
            StageState::Until { is_collective: true, .. } => self.exposed += passed,
            StageState::Until { .. } => {}
        }
        // Compared with the same expression from which `next` was chosen, so that rounding never
        // leaves a rest.
        if end.is_some_and(|end| end <= next) {
            self.state = StageState::Ready;
        }
    }

    /// Returns the cost of the stage in a step of `seconds`.
    fn cost(self, seconds: f64, overlaps: bool) -> StageCost {
        let StageCost { compute, offload, communication, .. } = self.cost;
        // Without overlap, the time that a collective took depends on how many ranks were busy.
        let communication = if overlaps { communication } else { self.exposed };
        // A collective may wait on the link for messages, which is more than its own time.
        let exposed = self.exposed.min(communication);
        StageCost {
            communication,
            hidden: communication - exposed,
            // Sums of the same times in another order may be rounded below 0.
            idle: (seconds - compute - offload - exposed).max(0.0),
            ..self.cost
        }
    }
}
