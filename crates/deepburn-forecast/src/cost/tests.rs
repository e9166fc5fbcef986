//! Formulas, bounds and bytes sent.

use deepburn_comm::{Operation, ReduceOp};
use deepburn_meta::Work;
use proptest::prelude::*;

use super::clock::Clock;
use super::*;
use crate::timeline::Collective;

const SPEED: RankSpeed = RankSpeed::new(1e12, 1e11);

const LINKS: Links =
    Links { bandwidth: 1e9, latency: 1e-6, ranks_per_machine: 1, local_bandwidth: 1e9 };

fn dense(operation: Operation, arrays: u64, elements: u64) -> Collective {
    let bytes = 4 * elements;
    Collective { operation, arrays, contributed: bytes, complete: bytes, stride: 1 }
}

/// The alpha-beta model of a ring: `(n - 1) (alpha + bytes / n / bandwidth)` for a reduce-scatter
/// or all-gather, and a latency of `(n - 1) alpha` for the headers.
#[test]
fn collectives_take_the_time_of_the_formula() {
    let speed = RankSpeed::new(1.0, f64::INFINITY);
    let seconds = |operation, arrays| {
        Network::Links(LINKS).seconds(&dense(operation, arrays, 1_000_000), 4, &speed)
    };
    let half = 3.0 * (1e-6 + 4e6 / 4.0 / 1e9);
    let meeting = 3.0 * 1e-6;
    let close =
        |left: f64, right: f64| assert!((left / right - 1.0).abs() < 1e-12, "{left} {right}");
    close(seconds(Operation::AllGather, 1), meeting + half);
    close(seconds(Operation::ReduceScatter(ReduceOp::Mean), 1), meeting + half);
    close(seconds(Operation::AllReduce(ReduceOp::Mean), 1), meeting + 2.0 * half);
    close(seconds(Operation::AllGather, 5), meeting + half + 4.0 * 3.0 * 1e-6);
    close(Network::Links(LINKS).seconds(&dense(Operation::Barrier, 0, 0), 4, &speed), meeting);
}

#[test]
fn ranks_of_a_machine_share_its_link() {
    let gather = dense(Operation::AllGather, 1, 1 << 20);
    let links = Links { latency: 0.0, ..LINKS };
    let alone = Network::Links(links).seconds(&gather, 16, &SPEED);
    let fast = Links { ranks_per_machine: 8, local_bandwidth: 1e12, ..links };
    let shared = Network::Links(fast).seconds(&gather, 16, &SPEED);
    // 8 ranks send to 8 ranks each over the link, instead of one rank to 15.
    assert!((shared / alone - 64.0 / 15.0).abs() < 1e-9, "{shared} {alone}");
    let inside = Network::Links(fast).seconds(&gather, 8, &SPEED);
    assert!((inside - 7.0 / 8.0 * 4.0 * f64::from(1 << 20) / 1e12).abs() < 1e-15, "{inside}");
}

/// A rank thread reads a part of each array of every other rank.
#[test]
fn threads_pay_for_each_part() {
    let speed = RankSpeed { op_seconds: 1e-6, ..SPEED };
    let extra = |operation, arrays| {
        let seconds = |speed| {
            Network::Threads { latency: 0.0 }.seconds(&dense(operation, arrays, 8), 4, speed)
        };
        seconds(&speed) - seconds(&SPEED)
    };
    let is = |seconds: f64, expected: f64| assert!((seconds - expected).abs() < 1e-15, "{seconds}");
    is(extra(Operation::ReduceScatter(ReduceOp::Mean), 5), 15e-6);
    is(extra(Operation::AllReduce(ReduceOp::Mean), 5), 30e-6);
    is(extra(Operation::AllGather, 5), 0.0);
}

/// 16 ranks on two machines. Each rank has a replica on the other machine, to which all eight ranks
/// of a machine send at the same time. The replicas of a machine use its own links.
#[test]
fn replicas_share_the_link_of_their_machine() {
    let links = Links { ranks_per_machine: 8, latency: 0.0, local_bandwidth: 1e12, ..LINKS };
    let seconds = |stride| {
        let gather = Collective { stride, ..dense(Operation::AllGather, 1, 1 << 20) };
        Network::Links(links).seconds(&gather, 2, &SPEED)
    };
    let half = 2.0 * f64::from(1 << 20);
    assert!((seconds(8) - 8.0 * half / links.bandwidth).abs() < 1e-12, "{}", seconds(8));
    assert!((seconds(4) - half / 1e12).abs() < 1e-12, "{}", seconds(4));
}

#[test]
fn a_collective_is_hidden_until_the_rank_waits() {
    let mut clock = Clock::new(true);
    let first = clock.start(3.0);
    let second = clock.start(1.0);
    clock.compute(2.0);
    clock.wait(first);
    assert_eq!((clock.now, clock.exposed), (3.0, 1.0));
    clock.compute(5.0);
    // The link was free again at 4.
    clock.wait(second);
    assert_eq!((clock.now, clock.exposed, clock.communication), (8.0, 1.0, 4.0));
    let mut clock = Clock::new(false);
    let only = clock.start(3.0);
    clock.compute(2.0);
    clock.wait(only);
    assert_eq!((clock.now, clock.exposed), (5.0, 3.0));
}

/// An op that takes `seconds` at [`SPEED`].
fn op(seconds: f64) -> RankEvent {
    RankEvent::Compute(Work { operations: (seconds * SPEED.flops) as u64, ..Work::default() })
}

#[test]
fn a_part_is_repeated() {
    let gather = dense(Operation::AllGather, 1, 1_000_000);
    let start = |number| RankEvent::Start { number, collective: gather, ranks: 2 };
    let events = vec![
        start(0),
        op(1.0),
        RankEvent::Wait { number: 0 },
        start(1),
        RankEvent::Wait { number: 1 },
    ];
    let cost = |times| {
        let parts = vec![Stretch { events: events.clone(), times }];
        Timeline { parts }.cost(2, SPEED, &Network::Links(LINKS)).unwrap()
    };
    let (one, three) = (cost(1), cost(3));
    let seconds = Network::Links(LINKS).seconds(&gather, 2, &SPEED);
    assert!((one.seconds - 1.0 - seconds).abs() < 1e-12, "{one:?}");
    assert!((one.hidden - seconds).abs() < 1e-12, "{one:?}");
    assert_eq!((one.bytes_sent, three.bytes_sent), (4_000_000, 12_000_000));
    assert!((three.seconds - 3.0 * one.seconds).abs() < 1e-12, "{three:?}");
}

#[test]
fn offload_takes_the_time_of_its_bandwidth() {
    let transfers = Work { copied: 1_000, swapped: 500, ..Work::default() };
    let events = vec![op(1.0), RankEvent::Compute(transfers), op(2.0)];
    let timeline = Timeline { parts: vec![Stretch { events, times: 2 }] };
    let cost = |host_bandwidth, disk_bandwidth| {
        let speed = RankSpeed { host_bandwidth, disk_bandwidth, op_seconds: 0.5, ..SPEED };
        timeline.cost(1, speed, &Network::Links(LINKS))
    };
    // 10 s of copies and 5 s of reads and writes, twice; two ops of 0.5 s overhead each, twice.
    let known = cost(Some(100.0), Some(100.0)).unwrap();
    assert_eq!((known.compute, known.offload, known.seconds), (8.0, 30.0, 38.0));
    assert_eq!(cost(None, Some(100.0)), Err(UnknownBandwidth::Host));
    assert_eq!(cost(Some(100.0), None), Err(UnknownBandwidth::Disk));
}

#[test]
fn the_operands_of_a_product_are_packed_before_it() {
    let speed = RankSpeed { operand_bandwidth: 1e10, ..SPEED };
    let work = |operations, bytes| Work { operations, bytes, ..Work::default() };
    // 1 s of operations at 1e12 per second, and 1 s for 1e10 bytes of operands.
    assert_eq!(speed.seconds(&work(1_000_000_000_000, 10_000_000_000)), 2.0);
    assert_eq!(SPEED.seconds(&work(1_000_000_000_000, 10_000_000_000)), 1.0);
    // An element-wise op has only the memory's bandwidth, 1e11 bytes per second.
    assert_eq!(speed.seconds(&work(0, 100_000_000_000)), 1.0);
    assert_eq!(speed.shared_by(4, 2).operand_bandwidth, 2.5e9);
}

#[test]
fn threads_share_cores_for_the_overhead_of_ops() {
    let speed = RankSpeed { op_seconds: 1.0, ..SPEED };
    assert_eq!(speed.shared_by(2, 4).op_seconds, 1.0);
    assert_eq!(speed.shared_by(8, 4).op_seconds, 2.0);
    assert_eq!(speed.shared_by(8, 4).flops, SPEED.flops / 8.0);
}

/// Events of one of `ranks` ranks: ops, and collectives with the number of ops before they are
/// awaited.
fn events(ranks: u64) -> impl Strategy<Value = Vec<RankEvent>> {
    let step = prop_oneof![
        (0.0..2.0_f64).prop_map(|seconds| vec![op(seconds)]),
        (1..1_000_000_u64).prop_map(move |elements| {
            vec![RankEvent::Start {
                number: 0,
                collective: dense(Operation::AllGather, 1, elements),
                ranks,
            }]
        }),
    ];
    prop::collection::vec(step, 0..40).prop_map(|steps| {
        let mut events: Vec<_> = steps.into_iter().flatten().collect();
        let mut numbers = 0;
        for event in &mut events {
            if let RankEvent::Start { number, .. } = event {
                *number = numbers;
                numbers += 1;
            }
        }
        events.extend((0..numbers).map(|number| RankEvent::Wait { number }));
        events
    })
}

proptest! {
    #[test]
    fn a_step_is_computation_and_what_is_not_hidden(
        (ranks, events) in (1..5000_u64).prop_flat_map(|ranks| (Just(ranks), events(ranks))),
        has_links in any::<bool>(),
    ) {
        let network = match has_links {
            true => Network::Links(LINKS),
            false => Network::Threads { latency: 1e-6 },
        };
        let parts = vec![Stretch { events, times: 1 }];
        let cost = Timeline { parts }.cost(ranks, SPEED, &network).unwrap();
        let sum = cost.compute + cost.communication - cost.hidden;
        prop_assert!((cost.seconds - sum).abs() <= 1e-9 * sum, "{:?}", cost);
        prop_assert!(cost.hidden >= 0.0 && cost.hidden <= cost.communication);
        prop_assert!(ranks > 1 || cost.communication == 0.0);
        prop_assert!(has_links || cost.hidden <= 1e-9 * cost.communication);
    }
}
