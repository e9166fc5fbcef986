//! Closed formulas of schedules, messages and shared cores.

use deepburn_comm::{Operation, ReduceOp};
use deepburn_meta::Work;
use deepburn_pipeline::{Action, PassSchedule};
use proptest::prelude::*;

use super::replay::replay;
use super::*;
use crate::cost::Links;
use crate::timeline::{Collective, RankEvent, Stretch};

const SPEED: RankSpeed = RankSpeed::new(1e12, 1e11);
const SCHEDULES: [PassSchedule; 2] = [PassSchedule::FillDrain, PassSchedule::OneForwardOneBackward];

/// A network whose messages and collectives take no time.
const FREE: Network = Network::Threads { latency: 0.0 };

fn links(bandwidth: f64, latency: f64) -> Network {
    let local_bandwidth = bandwidth;
    Network::Links(Links { bandwidth, latency, ranks_per_machine: 1, local_bandwidth })
}

/// An op that takes `seconds` at [`SPEED`].
fn op(seconds: f64) -> RankEvent {
    RankEvent::Compute(Work {
        operations: (seconds * SPEED.flops).round() as u64,
        ..Work::default()
    })
}

/// The seconds of the passes of a stage.
type PassTimes = [f64; 2];

/// Returns the timelines of stages whose passes take these seconds, with messages of `bytes`
/// between neighbors, on `replicas` ranks each.
fn timelines(
    schedule: PassSchedule,
    times: &[PassTimes],
    micro_batches: usize,
    bytes: u64,
    replicas: u64,
) -> Vec<Timeline> {
    let stages = times.len();
    // A number for each micro-batch, direction and sender.
    let message =
        |k: usize, direction: usize, from: usize| ((k * 2 + direction) * stages + from) as u64;
    let events = |stage: usize| {
        let mut events = Vec::new();
        for action in schedule.actions(stage, stages, micro_batches) {
            let [forward, backward] = times[stage];
            // Gradients of weights are half of a backward pass.
            let of_weights = match schedule {
                PassSchedule::ZeroBubbleH1 => backward / 2.0,
                _ => 0.0,
            };
            let (k, direction, seconds) = match action {
                Action::Forward(k) => (k, 0, forward),
                Action::Backward(k) => (k, 1, backward - of_weights),
                Action::Weights(_) => {
                    events.push(op(of_weights));
                    continue;
                }
            };
            let [before, after] = match direction {
                0 => [stage.checked_sub(1), Some(stage + 1)],
                _ => [Some(stage + 1), stage.checked_sub(1)],
            }
            .map(|neighbor| neighbor.filter(|it| *it < stages));
            events.extend(
                before.map(|from| RankEvent::Receive { message: message(k, direction, from) }),
            );
            events.push(op(seconds));
            events.extend(after.map(|to| {
                let (message, to) = (message(k, direction, stage), to as u64 * replicas);
                RankEvent::Send { message, to, bytes }
            }));
        }
        Timeline { parts: vec![Stretch { events, times: 1 }] }
    };
    (0..stages).map(events).collect()
}

fn cost(
    timelines: &[Timeline],
    replicas: u64,
    network: &Network,
    cores: Option<u64>,
) -> Result<PipelineCost, PipelineCostError> {
    let cores = cores.map(|cores| SharedCores { cores });
    let ranks = timelines.len() as u64 * replicas;
    PipelineCost::of_timelines(&timelines.iter().collect::<Vec<_>>(), ranks, SPEED, network, cores)
}

fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{found} {expected}");
}

#[test]
fn messages_delay_the_receiver_alone() {
    let times = [[1.0, 2.0]; 2];
    let one = timelines(PassSchedule::OneForwardOneBackward, &times, 1, 1_000, 1);
    for network in [links(4e3, 0.0), links(1e30, 0.25), Network::Threads { latency: 0.25 }] {
        let cost = cost(&one, 1, &network, None).unwrap();
        assert_close(cost.seconds, 6.5);
        assert!(cost.stages.iter().all(|it| it.compute == 3.0 && it.message_bytes == 1_000));
    }
}

/// `p - 1` of `3 m + p - 1` units of time are idle (Qi et al. 2023).
#[test]
fn deferred_gradients_of_weights_fill_waits() {
    for (stages, micro_batches) in [(2, 8), (3, 5), (4, 4)] {
        let times = vec![[1.0, 2.0]; stages];
        let step = timelines(PassSchedule::ZeroBubbleH1, &times, micro_batches, 0, 1);
        let cost = cost(&step, 1, &FREE, None).unwrap();
        assert_close(cost.seconds, (3 * micro_batches + stages - 1) as f64);
    }
}

#[test]
fn the_slowest_stage_sets_the_pace() {
    let times = [[1.0, 2.0], [2.0, 4.0]];
    let step = timelines(PassSchedule::OneForwardOneBackward, &times, 100, 0, 1);
    let cost = cost(&step, 1, &FREE, None).unwrap();
    // The first forward and the last backward of the first stage are not hidden.
    assert_close(cost.seconds, 603.0);
    assert_eq!(cost.busiest(), Some(&cost.stages[1]));
}

/// The replicas of a stage on one machine share its link.
#[test]
fn replicas_share_the_link_for_their_messages() {
    let of_machine = |ranks_per_machine| {
        let links = Links { bandwidth: 1e3, latency: 0.0, ranks_per_machine, local_bandwidth: 1e6 };
        let step = timelines(PassSchedule::FillDrain, &[[1.0; 2]; 2], 1, 1_000, 4);
        cost(&step, 4, &Network::Links(links), None).unwrap().seconds
    };
    // Two messages of 1 s each, which take 4 s if four ranks send them, and a thousandth inside.
    assert_close(of_machine(1), 4.0 + 2.0);
    assert_close(of_machine(4), 4.0 + 8.0);
    assert_close(of_machine(8), 4.0 + 0.002);
}

/// The gradient norm is summed over all stages. The collectives of a stage involve no other stage.
#[test]
fn a_collective_of_all_stages_waits_for_the_last_one() {
    let reduce = |ranks, stride| RankEvent::Start {
        number: 0,
        collective: Collective {
            operation: Operation::AllReduce(ReduceOp::Sum),
            arrays: 1,
            contributed: 8,
            complete: 8,
            stride,
        },
        ranks,
    };
    let stage = |before, after, ranks, stride| {
        let events =
            vec![op(before), reduce(ranks, stride), RankEvent::Wait { number: 0 }, op(after)];
        Timeline { parts: vec![Stretch { events, times: 1 }] }
    };
    for network in [FREE, links(1e30, 0.0)] {
        let seconds = |ranks, stride| {
            let stages = [stage(3.0, 1.0, ranks, stride), stage(1.0, 2.0, ranks, stride)];
            cost(&stages, 4, &network, None).unwrap().seconds
        };
        // All eight ranks, a rank of each stage, and the four ranks of a stage.
        assert_close(seconds(8, 1), 5.0);
        assert_close(seconds(2, 4), 5.0);
        assert_close(seconds(4, 1), 4.0);
    }
}

#[test]
fn stages_that_wait_for_each_other_are_found() {
    let receive = |message| Timeline {
        parts: vec![Stretch { events: vec![RankEvent::Receive { message }], times: 1 }],
    };
    let error = cost(&[Timeline::default(), receive(0)], 1, &FREE, None).unwrap_err();
    assert_eq!(error, PipelineCostError::Stuck { stage: 1 });
    assert!(error.to_string().contains("stage 1"), "{error}");
}

#[test]
fn an_unknown_bandwidth_is_an_error() {
    let work = Work { copied: 8, ..Work::default() };
    let copies =
        Timeline { parts: vec![Stretch { events: vec![RankEvent::Compute(work)], times: 1 }] };
    let error = cost(&[copies, Timeline::default()], 1, &FREE, None).unwrap_err();
    assert_eq!(error, PipelineCostError::Bandwidth(UnknownBandwidth::Host));
}

#[test]
fn a_step_without_work_takes_no_time() {
    let empty = cost(&[Timeline::default(), Timeline::default()], 1, &FREE, None).unwrap();
    assert_eq!((empty.seconds, empty.idle_share()), (0.0, 0.0));
}

proptest! {
    /// Narayanan et al. (2021): with equal stages and free messages, both schedules are idle for
    /// `(p - 1) / (m + p - 1)` of the step.
    #[test]
    fn equal_stages_are_idle_at_both_ends(
        stages in 2usize..9,
        micro_batches in 1usize..17,
        (forward, backward) in (0.1..3.0_f64, 0.1..3.0_f64),
        replicas in 1u64..4,
        has_links in any::<bool>(),
    ) {
        let network = if has_links { links(f64::INFINITY, 0.0) } else { FREE };
        for schedule in SCHEDULES {
            let step = timelines(schedule, &vec![[forward, backward]; stages], micro_batches, 8, replicas);
            let cost = cost(&step, replicas, &network, None).unwrap();
            let slots = (micro_batches + stages - 1) as f64;
            assert_close(cost.seconds, slots * (forward + backward));
            assert_close(cost.idle_share(), (stages - 1) as f64 / slots);
        }
    }

    /// A core per rank is idle with its rank. A pool of more cores than ranks is busy as long as a
    /// rank is, so the step takes as long as all work on all cores.
    #[test]
    fn waiting_ranks_leave_a_shared_pool_to_the_others(
        stages in 2usize..6, micro_batches in 1usize..9, replicas in 1u64..3,
    ) {
        let ranks = stages as u64 * replicas;
        for schedule in SCHEDULES {
            let step = timelines(schedule, &vec![[1.0, 2.0]; stages], micro_batches, 0, replicas);
            let seconds = |cores| cost(&step, replicas, &FREE, Some(cores)).unwrap().seconds;
            let work = 3.0 * micro_batches as f64;
            assert_close(seconds(ranks + 1), work);
            assert_close(seconds(ranks), 3.0 * (micro_batches + stages - 1) as f64);
            // One core is always busy.
            assert_close(seconds(1), work);
            // Half as many cores are idle less often.
            let half = seconds((ranks / 2).max(1));
            prop_assert!(half >= work - 1e-9 && half <= seconds(ranks) + 1e-9, "{half}");
        }
    }

    /// The replay of one stage is the prediction without a pipeline.
    #[test]
    fn one_stage_is_predicted_as_without_a_pipeline(
        steps in prop::collection::vec((0.0..2.0_f64, 1..1_000_000_u64, any::<bool>(), 0u64..3), 0..30),
        times in 1u64..4,
        ranks in 1u64..9,
        has_links in any::<bool>(),
    ) {
        let mut events = Vec::new();
        let mut open = Vec::new();
        for (number, (seconds, bytes, is_offload, waits)) in steps.into_iter().enumerate() {
            let number = number as u64;
            let transfers = Work { copied: bytes, ..Work::default() };
            events.push(if is_offload { RankEvent::Compute(transfers) } else { op(seconds) });
            let operation = Operation::AllGather;
            let collective = Collective { operation, arrays: 2, contributed: bytes, complete: bytes, stride: 1 };
            events.push(RankEvent::Start { number, collective, ranks });
            open.push(number);
            let awaited = open.drain(..open.len().min(waits as usize));
            events.extend(awaited.map(|number| RankEvent::Wait { number }));
        }
        events.extend(open.into_iter().map(|number| RankEvent::Wait { number }));
        let timeline = Timeline { parts: vec![Stretch { events, times }] };
        let speed = RankSpeed { op_seconds: 1e-3, host_bandwidth: Some(1e6), ..SPEED };
        let network = if has_links { links(1e9, 1e-6) } else { Network::Threads { latency: 1e-6 } };
        let expected = timeline.cost(ranks, speed, &network).unwrap();
        let of_timelines = PipelineCost::of_timelines(&[&timeline], ranks, speed, &network, None).unwrap();
        // Exactly, because it is the same computation.
        prop_assert_eq!(&of_timelines, &expected.into());
        let machine = PipelineMachine { ranks, stages: 1, speed, network: &network, cores: None };
        let replayed = replay(vec![machine.tasks(0, &timeline).unwrap()], &machine).unwrap();
        assert_close(replayed.seconds, expected.seconds);
        let (stage, expected) = (replayed.stages[0], of_timelines.stages[0]);
        for (found, expected) in [
            (stage.compute, expected.compute),
            (stage.offload, expected.offload),
            (stage.communication, expected.communication),
            (stage.hidden, expected.hidden),
            (stage.idle, 0.0),
        ] {
            assert_close(found, expected);
        }
        prop_assert_eq!(stage.collective_bytes, expected.collective_bytes);
    }

    /// Whatever the stages and messages are, every second of a stage is accounted for, and no stage
    /// is faster than its own work.
    #[test]
    fn the_seconds_of_a_stage_add_up_to_the_step(
        times in prop::collection::vec((0.0..3.0_f64, 0.0..3.0_f64), 2..7),
        micro_batches in 1usize..9,
        bytes in 0u64..10_000_000_000,
        (has_links, has_cores) in any::<(bool, bool)>(),
    ) {
        let times: Vec<_> = times.into_iter().map(|(forward, backward)| [forward, backward]).collect();
        let network = if has_links { links(1e9, 1e-3) } else { Network::Threads { latency: 1e-3 } };
        for schedule in SCHEDULES {
            let step = timelines(schedule, &times, micro_batches, bytes, 1);
            let cost = cost(&step, 1, &network, has_cores.then_some(3)).unwrap();
            for (stage, times) in cost.stages.iter().zip(&times) {
                assert_close(stage.compute + stage.idle, cost.seconds);
                let alone = micro_batches as f64 * (times[0] + times[1]);
                prop_assert!(has_cores || (stage.compute - alone).abs() < 1e-6, "{:?} {}", stage, alone);
            }
        }
    }
}
