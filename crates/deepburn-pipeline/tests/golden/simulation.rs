//! The time of a step of a pipeline, from the times of its passes.

use std::collections::HashMap;

use deepburn_pipeline::Action::{Backward, Forward, Weights};
use deepburn_pipeline::{Action, PassSchedule};
use proptest::prelude::*;

/// Returns the passes of every stage.
pub(crate) fn orders(
    schedule: PassSchedule,
    stages: usize,
    micro_batches: usize,
) -> Vec<Vec<Action>> {
    (0..stages).map(|stage| schedule.actions(stage, stages, micro_batches)).collect()
}

/// The seconds of the passes of one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StageTime {
    /// Seconds of the forward pass of a micro-batch.
    pub(crate) forward: f64,
    /// Seconds of the backward pass of a micro-batch, without the gradients of weights.
    pub(crate) backward: f64,
    /// Seconds of the gradients of weights of a micro-batch.
    pub(crate) weights: f64,
}

/// A simulated step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Simulation {
    /// Seconds until the last stage has finished.
    pub(crate) seconds: f64,
    /// Seconds that each stage computes.
    pub(crate) busy: Vec<f64>,
    /// Maximum number of micro-batches of each stage between forward and backward.
    pub(crate) in_flight: Vec<usize>,
    /// Maximum number of micro-batches of each stage whose gradients of weights wait during another
    /// pass.
    pub(crate) deferred: Vec<usize>,
}

impl Simulation {
    /// Returns the fraction of the step (0 to 1) that a stage waits, as a mean over the stages; 0
    /// for a step without time.
    pub(crate) fn idle_fraction(&self) -> f64 {
        let all = self.seconds * self.busy.len() as f64;
        if all > 0.0 { 1.0 - self.busy.iter().sum::<f64>() / all } else { 0.0 }
    }
}

/// Runs the passes of every stage, each in the order of its list.
///
/// A forward pass waits for the forward pass of the stage before, and a backward pass for the
/// backward pass of the stage after. What a pass sends arrives `message` seconds after its end. The
/// sender does not wait: messages are buffered.
///
/// Returns `None` if stages wait for each other forever, or if the lists have different lengths.
pub(crate) fn simulate(
    orders: &[Vec<Action>],
    times: &[StageTime],
    message: f64,
) -> Option<Simulation> {
    if orders.len() != times.len() {
        return None;
    }
    let mut stages: Vec<_> = orders.iter().zip(times).map(StageRun::new).collect();
    let mut ends = HashMap::new();
    // When a pass starts depends on the passes before it, and not on the order in which they are
    // visited here.
    loop {
        let mut progress = false;
        for (index, stage) in stages.iter_mut().enumerate() {
            while let Some(action) = stage.next()
                && let Some(ready) = ready(index, orders.len(), action, message, &ends)
            {
                ends.insert((index, action), stage.run(action, ready));
                progress = true;
            }
        }
        // Either all passes have run, or the next pass of every stage waits for another stage.
        if !progress {
            break;
        }
    }
    stages.iter().all(|stage| stage.next().is_none()).then(|| Simulation {
        seconds: stages.iter().map(|stage| stage.clock).fold(0.0, f64::max),
        busy: stages.iter().map(|stage| stage.busy).collect(),
        in_flight: stages.iter().map(|stage| stage.most_in_flight).collect(),
        deferred: stages.iter().map(|stage| stage.most_deferred).collect(),
    })
}

/// Returns the time at which everything that a pass reads has arrived; `None` if it has not been
/// computed yet.
fn ready(
    stage: usize,
    stages: usize,
    action: Action,
    message: f64,
    ends: &HashMap<(usize, Action), f64>,
) -> Option<f64> {
    let arrival = |sender: usize| Some(ends.get(&(sender, action))? + message);
    match action {
        // The samples of the first stage are there from the start.
        Action::Forward(_) if stage == 0 => Some(0.0),
        Action::Forward(_) => arrival(stage - 1),
        Action::Backward(k) => {
            let forward = *ends.get(&(stage, Action::Forward(k)))?;
            if stage + 1 == stages { Some(forward) } else { Some(forward.max(arrival(stage + 1)?)) }
        }
        Action::Weights(k) => ends.get(&(stage, Action::Backward(k))).copied(),
    }
}

/// The progress of one stage.
struct StageRun<'a> {
    order: &'a [Action],
    time: StageTime,
    /// Number of passes that have run.
    position: usize,
    /// Seconds at which the last of them ended.
    clock: f64,
    busy: f64,
    in_flight: usize,
    most_in_flight: usize,
    /// Whether gradients of weights are passes of their own.
    splits: bool,
    deferred: usize,
    most_deferred: usize,
}

impl<'a> StageRun<'a> {
    fn new((order, time): (&'a Vec<Action>, &StageTime)) -> Self {
        Self {
            order,
            time: *time,
            position: 0,
            clock: 0.0,
            busy: 0.0,
            in_flight: 0,
            most_in_flight: 0,
            splits: order.iter().any(|action| matches!(action, Weights(_))),
            deferred: 0,
            most_deferred: 0,
        }
    }

    /// Returns the next pass.
    fn next(&self) -> Option<Action> {
        self.order.get(self.position).copied()
    }

    /// Runs the next pass, which can start at `ready`, and returns its end.
    fn run(&mut self, action: Action, ready: f64) -> f64 {
        let seconds = match action {
            Action::Forward(_) => {
                self.in_flight += 1;
                self.time.forward
            }
            Action::Backward(_) => {
                self.in_flight = self.in_flight.saturating_sub(1);
                self.time.backward + if self.splits { 0.0 } else { self.time.weights }
            }
            Action::Weights(_) => self.time.weights,
        };
        // The gradients that wait while this pass runs.
        let waiting = self.deferred - usize::from(matches!(action, Weights(_)));
        self.most_deferred = self.most_deferred.max(waiting);
        self.deferred = waiting + usize::from(self.splits && matches!(action, Backward(_)));
        self.most_in_flight = self.most_in_flight.max(self.in_flight);
        self.position += 1;
        self.busy += seconds;
        self.clock = self.clock.max(ready) + seconds;
        self.clock
    }
}

const SCHEDULES: [PassSchedule; 3] =
    [PassSchedule::FillDrain, PassSchedule::OneForwardOneBackward, PassSchedule::ZeroBubbleH1];

#[test]
fn stages_that_wait_for_each_other_are_found() {
    let time = StageTime { forward: 1.0, backward: 1.0, weights: 0.0 };
    // The first stage wants the gradient of a micro-batch that it sends afterwards.
    let first = vec![Forward(0), Backward(1), Forward(1), Backward(0)];
    let orders = [first, PassSchedule::FillDrain.actions(1, 2, 2)];
    assert_eq!(simulate(&orders, &[time; 2], 0.0), None);
    assert_eq!(simulate(&orders, &[time], 0.0), None);
}

#[test]
fn messages_delay_the_receiver_alone() {
    let orders = orders(PassSchedule::OneForwardOneBackward, 2, 1);
    let times = [StageTime { forward: 1.0, backward: 1.0, weights: 1.0 }; 2];
    let step = simulate(&orders, &times, 0.25).unwrap();
    assert_eq!((step.seconds, step.busy), (6.5, vec![3.0, 3.0]));
}

#[test]
fn the_slowest_stage_sets_the_pace() {
    let orders = orders(PassSchedule::OneForwardOneBackward, 2, 100);
    let time = |seconds| StageTime { forward: seconds, backward: seconds, weights: seconds };
    let step = simulate(&orders, &[time(1.0), time(2.0)], 0.0).unwrap();
    // The first forward and the last backward of the first stage are not hidden.
    assert_eq!(step.seconds, 603.0);
}

#[test]
fn no_passes_take_no_time() {
    let empty = simulate(&[], &[], 1.0).unwrap();
    assert_eq!((empty.seconds, empty.idle_fraction()), (0.0, 0.0));
}

proptest! {
    #[test]
    fn every_schedule_runs_every_pass_once_and_ends(
        stages in 1usize..9,
        micro_batches in 0usize..17,
        seconds in proptest::collection::vec((0.0f64..3.0, 0.0f64..3.0, 0.0f64..3.0), 9),
        message in 0.0f64..2.0,
    ) {
        let times: Vec<_> = seconds[..stages]
            .iter()
            .map(|&(forward, backward, weights)| StageTime { forward, backward, weights })
            .collect();
        for schedule in SCHEDULES {
            let orders = orders(schedule, stages, micro_batches);
            let step = simulate(&orders, &times, message).expect("a schedule never deadlocks");
            for (stage, order) in orders.iter().enumerate() {
                let at = |action| order.iter().position(|it| *it == action).unwrap();
                let splits = order.iter().any(|action| matches!(action, Weights(_)));
                prop_assert_eq!(order.len(), (2 + usize::from(splits)) * micro_batches);
                for k in 0..micro_batches {
                    prop_assert!(at(Forward(k)) < at(Backward(k)));
                    prop_assert!(k == 0 || at(Backward(k - 1)) < at(Backward(k)));
                    if splits {
                        prop_assert!(at(Backward(k)) < at(Weights(k)));
                        prop_assert!(k == 0 || at(Weights(k - 1)) < at(Weights(k)));
                    }
                }
                let bound = schedule.in_flight(stage, stages, micro_batches);
                prop_assert_eq!(step.in_flight[stage], bound);
                // The first pass after a backward pass computes the gradients that are due.
                let deferred = schedule.deferred(stage, micro_batches);
                prop_assert!(step.deferred[stage] <= deferred);
                prop_assert!(bound + deferred <= stages.max(bound));
            }
            let idle = step.idle_fraction();
            prop_assert!((-1e-9..=1.0).contains(&idle), "{}", idle);
        }
    }
}
